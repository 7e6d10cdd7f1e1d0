"""Faults at the fault_filter of an agent: several agents in one process, no RRefs, nothing that depends on time.

What is held up is held up for a day, and released by the end of the fault.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from actorrpc.agent.agent import Agent
from actorrpc.errors import (
    CancelledError,
    RpcTimeoutError,
    ShutdownError,
)
from actorrpc.futures import Future
from actorrpc.testing import Fault, delay, drop
from actorrpc.testing.messages.fault_filter import FaultFilter
from tests.agent.agents import agents

DAY = 86_400.0
SOON = 0.03
arrived: list[Any] = []
came = threading.Semaphore(0)


@pytest.fixture(params=["other", "self"])
def to(request: pytest.FixtureRequest) -> str:
    """To whom messages go: to another worker, or to the one that sends them."""
    return "a1" if request.param == "other" else "a0"


@pytest.fixture
def pair() -> Iterator[list[Agent]]:
    global came
    came = threading.Semaphore(0)
    arrived.clear()
    with agents(2) as made:
        yield made
        for agent in made:
            for peer in agent.peers():
                assert not peer.pending, peer
                assert not peer.window.charged, peer


@pytest.fixture
def filters(pair: list[Agent]) -> Iterator[list[FaultFilter]]:
    made = [FaultFilter(agent) for agent in pair]
    yield made
    for fault_filter in made:
        fault_filter.close(True)
    until(lambda: not any(agent.hooks.active for agent in pair))


def until(condition: Callable[[], Any]) -> None:
    """Wait for something that nothing announces; bounded by the test's limit."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.001)


def note(value: Any) -> Any:
    arrived.append(value)
    came.release()
    return value


def later(agent: Agent, to: str, function: Any, *args: Any, timeout: float = 0) -> Future[Any]:
    future: Future[Any] = Future()
    agent.call(agent.peer(to), function, args, {}, timeout, future=future)
    agent.flush()
    return future


def sync(agent: Agent, to: str, function: Any, *args: Any, timeout: float = 0) -> Any:
    return agent.ask(agent.peer(to), function, args, {}, timeout)


@pytest.mark.parametrize("call", [sync, lambda *args, **more: later(*args, **more).wait()])
def test_a_lost_call_ends_at_its_deadline(
    pair: list[Agent], filters: list[FaultFilter], to: str, call: Callable[..., Any]
) -> None:
    fault = drop("call", total=1)
    filters[0].add(fault)
    with pytest.raises(RpcTimeoutError, match=r"note.*timed out.*may have run") as caught:
        call(pair[0], to, note, 1, timeout=SOON)
    assert caught.value.maybe_executed is True
    assert caught.value.worker == to
    assert call(pair[0], to, note, 2, timeout=60) == 2
    assert arrived == [2]
    assert fault.count == 1


@pytest.mark.parametrize(("timeout", "at_once"), [(0, False), (DAY, True), (0, True)])
def test_a_lost_call_ends_at_once(
    pair: list[Agent], filters: list[FaultFilter], to: str, timeout: float, at_once: bool
) -> None:
    """Where that is asked for, and where nothing else would end it."""
    filters[0].add(drop("call", at_once=at_once))
    for call in (sync, lambda *args, **more: later(*args, **more).wait()):
        with pytest.raises(RpcTimeoutError, match=r"lost on the way to.*drop\('call'"):
            call(pair[0], to, note, 1, timeout=timeout)
    assert not arrived


@pytest.mark.parametrize("elements", [1, 3000, 100_000, 3_000_000])
@pytest.mark.parametrize("lane", [True, False])
def test_a_call_that_is_held_up_arrives_as_it_was_made(elements: int, lane: bool) -> None:
    arrived.clear()
    with agents(2, lane=lane) as both:
        for to in ("a1", "a0"):
            fault_filter = FaultFilter(both[0])
            fault = delay("call", seconds=DAY)
            fault_filter.add(fault)
            sent = torch.ones(elements)
            future = later(both[0], to, note, sent, timeout=DAY)
            assert fault.held == 1
            assert bool(both[0].peer(to).window.charged) is (elements > 5000)
            sent.zero_()
            assert not future.done()
            fault_filter.remove(fault)
            assert torch.equal(future.wait(), torch.ones(elements))
            assert fault.held == 0
            assert fault.count == 1
            fault_filter.close(True)
            until(lambda: not both[0].hooks.active)
            arrived.clear()
        assert all(not peer.window.charged for peer in both[0].peers())


def test_others_overtake_and_those_held_up_keep_their_order(
    pair: list[Agent], filters: list[FaultFilter], to: str
) -> None:
    fault = delay("call", seconds=DAY, function=note)
    filters[0].add(fault)
    held = [later(pair[0], to, note, number) for number in range(20)]
    assert sync(pair[0], to, operator.add, 1, 2) == 3
    assert not any(future.done() for future in held)
    pair[1].pool.max_threads = pair[0].pool.max_threads = 1  # or their threads change the order
    filters[0].remove(fault)
    assert [future.wait() for future in held] == list(range(20))


def test_a_call_that_is_held_up_can_be_cancelled(
    pair: list[Agent], filters: list[FaultFilter], to: str
) -> None:
    fault = delay("call", seconds=DAY)
    filters[0].add(fault)
    future = later(pair[0], to, note, 1)
    assert future.cancel()
    with pytest.raises(CancelledError) as caught:
        future.wait()
    assert caught.value.maybe_executed is True
    filters[0].remove(fault)
    came.acquire()


def test_calls_that_are_held_up_end_with_the_agent(
    pair: list[Agent], filters: list[FaultFilter], to: str
) -> None:
    fault = delay("call", seconds=DAY)
    filters[0].add(fault)
    future = later(pair[0], to, note, 1)
    filters[0].close(False)
    assert fault.held == 0
    assert not fault.active
    pair[0].close()
    with pytest.raises(ShutdownError):
        future.wait()
    assert not arrived


def test_a_lost_answer(pair: list[Agent], filters: list[FaultFilter], to: str) -> None:
    there = filters[1] if to == "a1" else filters[0]
    fault = drop("answer", function=note)
    there.add(fault)
    with pytest.raises(RpcTimeoutError, match="timed out"):
        sync(pair[0], to, note, torch.ones(3), timeout=SOON)
    with pytest.raises(RpcTimeoutError, match="timed out"):
        later(pair[0], to, note, 2, timeout=SOON).wait()
    with pytest.raises(RpcTimeoutError, match="answer of a call was lost") as caught:
        sync(pair[0], to, note, 3)  # it has no deadline
    assert caught.value.maybe_executed is True
    assert sync(pair[0], to, operator.add, 1, 2, timeout=60) == 3
    assert fault.counts == {"answer": 3}
    there.remove(fault)
    assert sync(pair[0], to, note, 4, timeout=60) == 4
    assert not any(agent.hooks.active for agent in pair)


@pytest.mark.parametrize("value", [1, "text", torch.ones(3), torch.ones(100_000)])
def test_an_answer_that_is_held_up(
    pair: list[Agent], filters: list[FaultFilter], to: str, value: Any
) -> None:
    there = filters[1] if to == "a1" else filters[0]
    fault = delay("answer", seconds=DAY)
    there.add(fault)
    future = later(pair[0], to, note, value)
    came.acquire()
    until(lambda: fault.held)
    assert not future.done()
    if isinstance(value, torch.Tensor):
        arrived[0].zero_()
    there.remove(fault)
    assert torch.equal(torch.as_tensor(future.wait() != 0), torch.as_tensor(value != 0))


def test_many_threads(pair: list[Agent], filters: list[FaultFilter], to: str) -> None:
    """Faults come and go while calls are made; each call ends, and what is counted is what was lost."""
    ends: list[str] = []
    faults: list[Fault] = []
    left = threading.Event()

    def call(number: int) -> None:
        for turn in range(60):
            try:
                ends.append("" if sync(pair[0], to, operator.add, number, turn) == number + turn else "wrong")
            except RpcTimeoutError:
                ends.append("lost")

    def trouble() -> None:
        while not left.is_set():
            faults.append(drop("call", probability=0.3, at_once=True))
            filters[0].add(faults[-1])
            held = delay("call", seconds=0.0005, probability=0.5)
            filters[0].add(held)
            filters[0].remove(faults[-1])
            filters[0].remove(held)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    troublemaker = threading.Thread(target=trouble)
    for thread in (*threads, troublemaker):
        thread.start()
    for thread in threads:
        thread.join()
    left.set()
    troublemaker.join()
    assert len(ends) == 240
    assert "wrong" not in ends
    assert sum(fault.count for fault in faults) == ends.count("lost")
