"""Deadlines: late calls are not started, nested calls inherit what is left, errors are typed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc.agent.calls import CURRENT
from tests.actors.e2e.kit import Gate, open_gate, pass_gate, row_of, until

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]


def left() -> float:
    """How many seconds the call has left that this runs in."""
    execution = CURRENT.get()
    assert execution is not None
    return execution.deadline - time.monotonic()


@actorrpc.remote
class Worker:
    def __init__(self) -> None:
        self.ran: list[str] = []

    def block(self, path: str) -> str:
        return pass_gate(path)

    def run(self, name: str) -> None:
        self.ran.append(name)

    def all(self) -> list[str]:
        return self.ran

    def left(self) -> float:
        return left()

    def nested(self, others: list[Any]) -> float:
        return actorrpc.get(others[0].nested.remote(others[1:])) if others else left()

    def nested_options(self, other: Any) -> float:
        return actorrpc.get(other.left.options(timeout=500).remote())

    def wait_for(self, gate: Any) -> str:
        self.ran.append("waiting")
        try:
            return actorrpc.get(gate.wait.remote())
        except TimeoutError as error:
            self.ran.append(type(error).__name__)
            raise

    def stream(self) -> Any:
        yield left()

    def spin(self) -> None:
        try:
            while True:
                pass
        finally:
            self.ran.append("out")


@actorrpc.remote
class Patient:
    @actorrpc.method(interrupt=True)
    def spin(self) -> None:
        while True:
            pass

    def block(self, path: str) -> str:
        return pass_gate(path)

    def alive(self) -> bool:
        return True


@actorrpc.remote
class OnLoop:
    """Has an event loop."""

    async def alive(self) -> bool:
        return True

    def count_down(self, path: str) -> str:
        word = pass_gate(path)
        for _ in range(1000):  # an interruption would arrive here
            pass
        return self.said(word)

    def said(self, word: str) -> str:
        self.word = word
        return word

    def word_said(self) -> str:
        return self.word


@actorrpc.remote
class Async:
    async def nested(self, others: list[Any]) -> float:
        return await others[0].nested.remote(others[1:]) if others else left()


def test_a_late_call_is_not_started(gate: Path) -> None:
    actor = Worker.remote()
    busy = actor.block.remote(str(gate))
    late = actor.run.options(timeout=0.05).remote("late")
    with pytest.raises(actorrpc.RpcTimeoutError) as caught:
        actorrpc.get(late)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(TimeoutError):
        actor.rpc_sync(timeout=0.05).run("late, too")
    until(lambda: row_of(actor).pending_calls == 0)  # it has heard so
    open_gate(gate)
    assert actorrpc.get(busy) == "go"
    actorrpc.get(actor.run.remote("in time"))
    assert actorrpc.get(actor.all.remote()) == ["in time"]
    del caught


@pytest.mark.slow
def test_a_call_that_is_late_before_its_actor_is_there(gate: Path) -> None:
    slow = SlowStart.remote(str(gate))
    with pytest.raises(actorrpc.RpcTimeoutError):
        actorrpc.get(slow.all.options(timeout=0.05).remote())
    open_gate(gate)
    assert actorrpc.get(slow.all.remote()) is None


@actorrpc.remote
class SlowStart:
    def __init__(self, path: str) -> None:
        pass_gate(path)

    def all(self) -> None: ...


def test_nested_calls_inherit_what_is_left() -> None:
    a, b, c = Worker.remote(), Async.remote(), Worker.remote()
    assert actorrpc.get(a.nested.remote([b, c])) == float("inf")
    for way in ([], [b], [b, c], [c, b, a]):
        found = actorrpc.get(a.nested.options(timeout=100).remote(way))
        assert 50 < found <= 100
    assert actorrpc.get(a.nested_options.options(timeout=100).remote(c)) <= 100
    assert actorrpc.get(next(a.stream.options(timeout=100).remote())) <= 100


@pytest.mark.slow
def test_a_wait_inside_of_a_call_ends_with_the_call() -> None:
    actor, gate = Worker.remote(), Gate.remote()
    actorrpc.get([actor.all.remote(), gate.count.remote()])
    with pytest.raises(actorrpc.RpcTimeoutError):
        actorrpc.get(actor.wait_for.options(timeout=0.3).remote(gate))
    # And the actor goes on.
    ran = actorrpc.get(actor.all.remote())
    assert ran[0] == "waiting"
    assert actorrpc.get(gate.open.remote()) is None


def test_the_time_of_a_wait_is_not_the_calls(gate: Path) -> None:
    actor = Worker.remote()
    actorrpc.get(actor.all.remote())
    ref = actor.block.remote(str(gate))

    async def wait_for() -> None:
        await asyncio.wait_for(ref, 0.01)

    with pytest.raises(actorrpc.RpcTimeoutError, match="it goes on"):
        actorrpc.get(ref, timeout=0.01)
    with pytest.raises(TimeoutError):
        asyncio.run(wait_for())
    assert actorrpc.wait([ref], timeout=0.01) == ([], [ref])
    open_gate(gate)
    assert actorrpc.get(ref) == "go"


# -- interrupt=True --------------------------------------------------------------------------------------------------


def test_a_late_method_is_interrupted_where_its_caller_says_so() -> None:
    actor = Worker.remote()
    for n in range(3):
        assert actorrpc.get(actor.all.remote()) == ["out"] * n
        with pytest.raises(actorrpc.RpcTimeoutError, match="if it has begun, it is interrupted") as caught:
            actorrpc.get(actor.spin.options(timeout=0.2, interrupt=True).remote())
        assert caught.value.maybe_executed
        del caught
    assert actorrpc.get(actor.all.remote()) == ["out"] * 3


def test_a_method_may_say_so_itself_of_the_actors_own_timeout() -> None:
    actor = Patient.options(timeout=0.3).remote()
    assert actorrpc.get(actor.alive.options(timeout=0).remote())
    with pytest.raises(actorrpc.RpcTimeoutError):
        actorrpc.get(actor.spin.remote())
    assert actorrpc.get(actor.alive.options(timeout=0).remote())


def test_otherwise_it_goes_on(gate: Path) -> None:
    actor = Patient.remote()
    assert actorrpc.get(actor.alive.remote())
    with pytest.raises(actorrpc.RpcTimeoutError, match="it runs to its end, and other calls wait for that"):
        actorrpc.get(actor.block.options(timeout=0.1).remote(str(gate)))
    after = actor.alive.remote()
    assert not after.done()
    open_gate(gate)
    assert actorrpc.get(after)


def test_never_on_an_event_loop(gate: Path) -> None:
    actor = OnLoop.remote()
    assert actorrpc.get(actor.alive.remote())
    with pytest.raises(actorrpc.RpcTimeoutError):
        actorrpc.get(actor.count_down.options(timeout=0.1, interrupt=True).remote(str(gate)))
    open_gate(gate)
    assert actorrpc.get(actor.word_said.remote()) == "go"


@actorrpc.remote
def spin_task() -> None:
    while True:
        pass


@actorrpc.remote
def quick_task() -> str:
    return "quick"


def test_a_late_task_is_interrupted_where_its_caller_says_so() -> None:
    with pytest.raises(actorrpc.RpcTimeoutError):
        actorrpc.get(spin_task.options(timeout=0.3, interrupt=True).remote())
    assert actorrpc.get([quick_task.remote() for _ in range(8)]) == ["quick"] * 8
