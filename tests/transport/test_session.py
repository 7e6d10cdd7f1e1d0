"""ReliableStream: all bytes arrive once and in order, although connections break and bytes are lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorrpc.errors import ProtocolError
from actorrpc.transport.session import ReliableStream
from actorrpc.transport.stream import Stream


class _Wire(Stream):
    """A wire with an adjustable number of bytes per write and read."""

    def __init__(self) -> None:
        self.room = 1 << 30
        self.under_way = bytearray()
        self.closed = False

    def send(self, data: bytes, flags: int = 0, /) -> int:
        return self.sendmsg([memoryview(data)])

    def sendmsg(self, parts: Sequence[memoryview], ancillary: Any = (), flags: int = 0, /) -> int:
        data = b"".join(parts)[: self.room]
        self.under_way += data
        return len(data)

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0, /) -> int:
        data = self.under_way[: len(buffer)]
        del self.under_way[: len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self.closed = True


class _Line:
    """A stream over wires that break. Bytes that were sent but not received are lost."""

    def __init__(self) -> None:
        self.wire = _Wire()
        self.sender = ReliableStream(self.wire, limit=200)
        self.receiver = ReliableStream(self.wire, say_every=40)
        self.rest: list[memoryview] = []
        self.arrived = bytearray()

    def send(self, data: bytes) -> None:
        self.rest.append(memoryview(data))

    def push(self, count: int) -> None:
        """Let the kernel accept up to ``count`` bytes."""
        if self.sender.is_full or not self.rest:
            return
        self.wire.room = count
        count = self.sender.sendmsg(self.rest)
        while self.rest and count >= 0:
            part = self.rest.pop(0)
            if count < len(part):
                self.rest.insert(0, part[count:])
                break
            count -= len(part)

    def pull(self, count: int) -> None:
        buffer = memoryview(bytearray(count))
        self.arrived += buffer[: self.receiver.recv_into(buffer)]
        if self.receiver.owed:
            self.sender.acknowledged(self.receiver.owed)
            self.receiver.ack_sent()

    def cut(self) -> None:
        self.rest = self.sender.rewind(self.receiver.received) + self.rest
        self.wire = _Wire()
        for end in (self.sender, self.receiver):
            end.replace(self.wire)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_bytes_arrive_once_and_in_order_over_breaking_wires(seed: int) -> None:
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


def test_an_acknowledgement_wakes_a_writer_that_waits_for_room() -> None:
    stream = ReliableStream(_Wire(), limit=100)
    stream.send(bytes(100))
    thread = threading.Thread(target=lambda: stream.acknowledged(100))
    thread.start()
    while stream.is_full:
        stream.wait(20)
    thread.join()


@pytest.mark.parametrize("count", [0, 9, 31, 1 << 63])
def test_resuming_at_a_position_that_was_never_sent_or_already_dropped_is_refused(count: int) -> None:
    stream = ReliableStream(_Wire())
    for _ in range(2):
        stream.send(bytes(10))
    stream.acknowledged(10)
    stream.send(bytes(10))  # drops the ten acknowledged bytes
    with pytest.raises(ProtocolError, match="bytes"):
        stream.rewind(count)
