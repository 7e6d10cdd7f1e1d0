"""Actors with an event loop: where their methods run, what blocks the loop, and what may run meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import get, rpc
from tests.actors.e2e.kit import Gate, open_gate, pass_gate, row_of, until

pytestmark = [
    pytest.mark.usefixtures("place"),
    pytest.mark.limit(30),
    pytest.mark.prints(r"on the actor's event loop", r"has held the event loop"),
]

_mark: contextvars.ContextVar[str] = contextvars.ContextVar("_mark", default="")


@actorrpc.remote(concurrency_groups={"io": 2})
class Async:
    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.log: list[Any] = []
        self.kept: Any = None

    async def loop_thread(self) -> int:
        return threading.get_ident()

    # -- plain ones

    def thread(self) -> int:
        return threading.get_ident()

    def running_loop(self) -> bool:
        return asyncio.get_running_loop() is not None

    @actorrpc.method(thread=True)
    def beside(self) -> int:
        return threading.get_ident()

    @actorrpc.method(thread=True)
    def all_beside(self) -> list[Any]:
        return self.log

    @actorrpc.method(concurrency_group="io")
    def grouped(self) -> int:
        return threading.get_ident()

    def items(self, count: int) -> Any:
        for number in range(count):
            yield number, threading.get_ident()

    def listed(self, count: int) -> list[int]:
        return list(range(count))

    def put(self, word: Any) -> None:
        self.log.append(word)

    def all(self) -> list[Any]:
        return self.log

    def set(self) -> None:
        self.event.set()
        self.event.clear()

    def mark(self, word: str) -> str:
        found = _mark.get()
        _mark.set(word)
        return found

    def grad(self) -> bool:
        return torch.is_grad_enabled()

    @rpc.functions.async_execution
    def later(self, gate: Any) -> Any:
        return gate.wait.remote().future()

    def hold(self, path: str) -> str:
        self.log.append("held")
        return pass_gate(path)

    # -- async ones

    async def wait(self) -> str:
        await self.event.wait()
        return "set"

    async def put_twice(self, first: Any, second: Any) -> None:
        self.log.append(first)
        await asyncio.sleep(0)
        self.log.append(second)

    async def tick(self) -> str:
        return "tick"

    # -- that wait with get()

    async def get_plain(self, me: Any) -> int:
        return get(me.thread.remote())

    async def get_tick(self, me: Any) -> Any:
        return get(me.tick.remote())

    def fibonacci(self, me: Any, n: int) -> int:
        if n < 2:
            return n
        return sum(get([me.fibonacci.remote(me, n - 1), me.fibonacci.remote(me, n - 2)]))

    async def get_of(self, refs: list[Any]) -> Any:
        return get(refs[0])

    async def get_begun(self, me: Any) -> Any:
        begun = me.wait.remote()
        await me.tick.remote()  # behind it
        return get(begun)

    async def get_due(self, me: Any) -> Any:
        waiting = me.thread.remote()
        await asyncio.sleep(0)
        return get(waiting)

    async def get_kept(self) -> Any:
        return get(self.kept)

    async def keep(self, me: Any) -> None:
        self.kept = me.wait.remote()

    def get_items(self, me: Any) -> list[Any]:
        return [get(each) for each in me.items.remote(3)]

    def wait_for_tick(self, me: Any) -> Any:
        return actorrpc.wait([me.tick.remote()])

    async def via(self, others: list[Any], method: str, me: Any) -> Any:
        return get(others[0].ask.remote(others[1:], method, me))

    async def via_without_grad(self, other: Any, me: Any) -> Any:
        with torch.no_grad():
            return get(other.ask.remote([], "grad", me))

    async def get_from_task(self, me: Any) -> Any:
        async def task() -> Any:
            return get(me.thread.remote())

        return await asyncio.create_task(task())

    async def get_gate(self, gate: Any) -> str:
        return get(gate.wait.remote())


@actorrpc.remote
class Plain:
    def ask(self, others: list[Any], method: str, actor: Any) -> Any:
        if others:
            return get(others[0].ask.remote(others[1:], method, actor))
        return get(getattr(actor, method).remote())


def _made() -> Any:
    made = Async.remote()
    get(made.tick.remote())
    return made


# -- where -----------------------------------------------------------------------------------------------------


def test_plain_methods_run_on_the_loop() -> None:
    actor = _made()
    loop = get(actor.loop_thread.remote())
    assert get(actor.thread.remote()) == loop
    assert get(actor.running_loop.remote())
    assert actor.rpc_sync().thread() == loop
    assert actorrpc.call(actor, lambda _: threading.get_ident()).future().wait() == loop
    assert [get(each) for each in actor.items.remote(3)] == [(0, loop), (1, loop), (2, loop)]
    assert [get(each) for each in actor.listed.options(num_returns="streaming").remote(20)] == list(range(20))


def test_those_that_say_so_run_on_threads() -> None:
    actor = _made()
    loop = get(actor.loop_thread.remote())
    threads = get(
        [actor.beside.remote(), actor.grouped.remote(), actor.thread.options(concurrency_group="io").remote()]
    )
    assert loop not in threads


def test_events_of_asyncio_can_be_set_by_plain_methods() -> None:
    actor = _made()
    for _ in range(60):
        waiting = actor.wait.remote()
        actor.set.remote()
        assert get(waiting) == "set"


def test_calls_start_in_order_whatever_they_are() -> None:
    actor = _made()
    get([actor.put_twice.remote(n, None) if n % 2 else actor.put.remote(n) for n in range(100)])
    assert [each for each in get(actor.all.remote()) if each is not None] == list(range(100))


def test_what_one_sets_for_itself_others_do_not_see() -> None:
    actor = _made()
    assert get([actor.mark.remote("a"), actor.mark.remote("b")]) == ["", ""]


def test_a_future_as_the_answer() -> None:
    actor = _made()
    gate = Gate.remote()
    answer = actor.later.remote(gate)
    assert get(actor.tick.remote()) == "tick"
    get(gate.open.remote())
    assert get(answer) == "open"


def test_a_plain_generator_lets_others_go_on() -> None:
    actor = _made()
    stream = actor.items.options(max_buffered_items=4).remote(100)
    first = next(stream)
    assert get(actor.tick.remote()) == "tick"
    assert get(actor.thread.remote()) == get(first)[1]
    assert len(list(stream)) == 99


def test_what_plain_methods_leave_in_the_state_is_kept() -> None:
    actor = Keeps.options(max_restarts=1).remote()
    gate = Gate.remote()
    assert get([actor.add.remote(), actor.add.remote()]) == [1, 2]
    assert get(actor.nested.remote(actor)) == 3
    get(gate.count.remote())
    actor.kill(no_restart=False)
    assert get(actor.add.remote()) == 4


@actorrpc.remote
class Keeps:
    def __init__(self) -> None:
        self.count = 0

    def checkpoint(self) -> int:
        return self.count

    def restore(self, count: int) -> None:
        self.count = count

    def add(self) -> int:
        self.count += 1
        return self.count

    async def nested(self, me: Any) -> int:
        return get(me.add.remote())


# -- waits on the loop -------------------------------------------------------------------------------------------


def test_plain_calls_of_its_own_chain_run_within_a_wait() -> None:
    actor = _made()
    loop = get(actor.loop_thread.remote())
    assert get(actor.get_plain.remote(actor)) == loop
    assert get(actor.get_due.remote(actor)) == loop
    assert get(actor.get_from_task.remote(actor)) == loop
    assert get(actor.fibonacci.remote(actor, 6)) == 8
    others = [Plain.remote(), Plain.remote()]
    assert get(actor.via.remote(others, "thread", actor)) == loop
    assert get(actor.via_without_grad.remote(others[0], actor)) is True


@pytest.mark.parametrize("method", ["get_tick", "get_begun", "get_items", "wait_for_tick"])
def test_waiting_for_a_coroutine_of_its_own_ends_at_once(method: str) -> None:
    actor = _made()
    if method == "wait_for_tick":
        assert len(get(actor.wait_for_tick.remote(actor))[0]) == 1
    else:
        with pytest.raises(
            actorrpc.DeadlockError, match=r"waits for it with get\(\), which blocks the event loop"
        ):
            get(getattr(actor, method).remote(actor))
    assert get(actor.tick.remote()) == "tick"


def test_waiting_for_a_coroutine_that_another_call_has_begun() -> None:
    actor = _made()
    get(actor.keep.remote(actor))
    with pytest.raises(actorrpc.DeadlockError):
        get(actor.get_kept.remote())
    assert get(actor.tick.remote()) == "tick"


@pytest.mark.slow
def test_a_circle_through_other_actors_is_found() -> None:
    actor = _made()
    others = [Plain.remote(), Plain.remote()]
    with pytest.raises(actorrpc.DeadlockError, match=r"Plain.*\.ask\(\) -> "):
        get(actor.via.remote(others, "tick", actor))
    assert get(actor.tick.remote()) == "tick"


@pytest.mark.slow
def test_unrelated_calls_wait() -> None:
    actor = _made()
    gate = Gate.remote()
    blocked = actor.get_gate.remote(gate)
    until(lambda: get(gate.count.remote()) == 1)
    others = [actor.thread.remote(), actor.tick.remote()]
    until(lambda: row_of(actor).pending_calls >= 2)
    get(gate.open.remote())
    assert get(blocked) == "open"
    assert get(others[1]) == "tick"


# -- ends ----------------------------------------------------------------------------------------------------------


def test_a_plain_call_that_is_cancelled_before_its_turn_never_runs(gate: Path) -> None:
    actor = _made()
    held = actor.hold.remote(str(gate))
    until(lambda: get(actor.all_beside.remote()) == ["held"])
    waiting = actor.put.remote("never")
    until(lambda: row_of(actor).pending_calls == 1)
    assert actorrpc.cancel(waiting)
    with pytest.raises(actorrpc.CancelledError):
        get(waiting)
    until(lambda: row_of(actor).pending_calls == 0)
    open_gate(gate)
    assert get(held) == "go"
    assert get(actor.all.remote()) == ["held"]


@pytest.mark.slow
def test_calls_end_with_their_actor_also_where_the_loop_is_held(place: str, gate: Path) -> None:
    actor = _made()
    held = actor.hold.remote(str(gate))
    until(lambda: get(actor.all_beside.remote()) == ["held"])
    waiting = [actor.tick.remote(), actor.put.remote("never")]
    actor.kill()
    for each in [held, *waiting]:
        with pytest.raises(actorrpc.ActorDiedError):
            get(each, timeout=10)
    del held, waiting
    if place == "group":  # otherwise its process is gone
        open_gate(gate)
