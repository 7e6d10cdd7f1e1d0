"""Casts (requests without an answer), definitions of functions, and the limit of buffers per message."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import CURRENT
from actorrpc.errors import LimitError, PeerDiedError, SerializationError, ShutdownError
from tests.agent.agents import agents

received: list[object] = []
received_one = threading.Semaphore(0)


def take(*args: object) -> str:
    execution = CURRENT.get()
    received.append((execution.peer.name if execution else None, *args))
    received_one.release()
    return "nobody sees this"


def fail() -> None:
    received_one.release()
    raise ZeroDivisionError("as posted")


@pytest.fixture
def pair() -> Iterator[list[Agent]]:
    received.clear()
    with agents(2) as both:
        yield both


def wait(count: int) -> None:
    for _ in range(count):
        received_one.acquire()


@pytest.mark.parametrize("elements", [1, 3000, 300_000, 3_000_000])
@pytest.mark.parametrize("transport", ["auto", "no lane"])
def test_a_cast_delivers_a_copy_of_its_arguments(elements: int, transport: str) -> None:
    received.clear()
    with agents(2, lane=transport == "auto") as (a, b):
        sent = torch.arange(elements, dtype=torch.float32)
        for to in (b.name, a.name):
            a.cast(a.peer(to), take, (1, sent), "take")
            sent_then = sent.clone()
            sent.add_(1)  # must not change the tensor of the receiver
            wait(1)
            (name, number, got) = received.pop()  # type: ignore[misc]
            assert (name, number) == ("a0", 1)
            assert torch.equal(got, sent_then)
        assert not any(peer.pending for peer in a.peers())


@pytest.mark.prints("a cast of 'a0' failed here.*ZeroDivisionError: as posted")
def test_a_failing_cast_is_logged_by_its_receiver(
    pair: list[Agent], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    with caplog.at_level(logging.ERROR, "actorrpc"):
        a.cast(a.peer(b.name), fail, (), "fail")
        wait(1)
        while not caplog.records:  # the error is logged shortly after `fail` has raised it
            assert a.call_sync(a.peer(b.name), max, (1, 2), {}, 30) == 2
    assert "a cast of 'a0' failed here" in caplog.text
    assert "ZeroDivisionError: as posted" in caplog.text


def _made(number: int) -> Callable[[], int]:
    return lambda: number


def _sum_of(functions: list[Callable[[], int]]) -> int:
    return sum(function() for function in functions)


def test_function_definitions_evicted_by_the_peer_are_sent_again(pair: list[Agent]) -> None:
    one, other = pair
    first, to = _made(7), one.peer(other.name)
    assert one.call_sync(to, first, (), {}, 10.0) == 7
    for begin in range(1000, 6000, 1000):
        functions = [_made(number) for number in range(begin, begin + 1000)]
        assert one.call_sync(to, _sum_of, (functions,), {}, 10.0) == sum(range(begin, begin + 1000))
    assert one.call_sync(to, first, (), {}, 10.0) == 7


def test_a_cast_that_cannot_be_sent_raises(pair: list[Agent]) -> None:
    a, b = pair
    peer = a.peer(b.name)
    with pytest.raises(SerializationError):
        a.cast(peer, take, (threading.Lock(),), "take")
    assert a.call_sync(peer, max, (1, 2), {}, 30) == 2
    b.close()
    while peer.state == "alive":
        threading.Event().wait(0.001)
    with pytest.raises(PeerDiedError):
        a.cast(peer, take, (), "take")
    a.close()
    with pytest.raises(ShutdownError):
        a.cast(peer, take, (), "take")


def test_max_buffers_can_be_raised_and_its_limit_error_names_the_setting() -> None:
    arrays = [np.zeros(4097, dtype=np.uint8) for _ in range(10_002)]
    with agents(2, max_buffers=10_001) as (caller, _):
        peer = caller.peer("a1")
        with pytest.raises(LimitError, match=r"10002 tensors, arrays and buffers .* max_buffers"):
            caller.call_sync(peer, len, (arrays,), {}, 30)
        assert caller.call_sync(peer, len, (arrays[1:],), {}, 30) == 10_001
