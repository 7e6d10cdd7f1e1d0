"""Replay: whatever is lost, and wherever a stream is cut, all of it arrives once and in order."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorrpc.errors import ProtocolError
from actorrpc.transport.session import Replay


class _Line:
    """A stream over sockets that break: what was sent and not taken yet is lost then."""

    def __init__(self) -> None:
        self.sender = Replay(limit=200)
        self.receiver = Replay(say_every=40)
        self.under_way = bytearray()
        self.rest: list[memoryview] = []
        self.arrived = bytearray()

    def send(self, data: bytes) -> None:
        self.rest.append(memoryview(data))

    def push(self, count: int) -> None:
        """Have the kernel take up to ``count`` bytes."""
        if self.sender.full:
            return
        self.sender.note_parts(self.rest, count)
        while self.rest and count > 0:
            part = self.rest.pop(0)
            self.under_way += part[:count]
            if count < len(part):
                self.rest.insert(0, part[count:])
            count -= min(count, len(part))

    def pull(self, count: int) -> None:
        data = self.under_way[:count]
        del self.under_way[:count]
        self.arrived += data
        if self.receiver.count(len(data)):
            self.sender.acknowledged(self.receiver.received)

    def cut(self) -> None:
        self.under_way.clear()
        self.rest = self.sender.rewind(self.receiver.received) + self.rest


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_all_arrives_once_and_in_order(seed: int) -> None:
    dice, line = random.Random(seed), _Line()
    sent = bytearray()
    for _ in range(200):
        match dice.randrange(4):
            case 0:
                data = dice.randbytes(dice.randrange(60))
                sent += data
                line.send(data)
            case 1:
                line.push(dice.randrange(80))
            case 2:
                line.pull(dice.randrange(80))
            case 3:
                if not dice.randrange(4):
                    line.cut()
    for _ in range(10_000):
        if len(line.arrived) == len(sent):
            break
        line.push(50)
        line.pull(50)
    assert line.arrived == sent


def test_what_is_kept_is_bounded_and_goes_when_it_has_arrived() -> None:
    replay = Replay(limit=1000)
    data = bytes(100)
    while not replay.full:
        replay.note(data)
    assert replay.sent == 1000
    replay.acknowledged(replay.sent - 10)
    assert not replay.full
    replay.acknowledged(5)  # old news
    assert sum(map(len, replay.rewind(replay.sent - 10))) == 10
    assert replay.sent == 1000 - 10


def test_a_writer_that_waits_is_woken() -> None:
    replay = Replay(limit=100)
    replay.note(bytes(100))
    thread = threading.Thread(target=lambda: replay.acknowledged(100))
    thread.start()
    while replay.full:
        replay.wait(20)
    thread.join()


@pytest.mark.parametrize("count", [0, 9, 31, 1 << 63])
def test_the_other_side_cannot_have_more_or_less(count: int) -> None:
    replay = Replay()
    for _ in range(3):
        replay.note(bytes(10))
    replay.acknowledged(10)
    with pytest.raises(ProtocolError, match="bytes"):
        replay.rewind(count)


def test_copies_are_kept() -> None:
    replay, memory = Replay(), bytearray(b"abcdef")
    replay.note_parts([memoryview(memory)[:2], memoryview(memory)[2:]], 5)
    memory[:] = b"xxxxxx"
    assert b"".join(replay.rewind(1)) == b"bcde"
