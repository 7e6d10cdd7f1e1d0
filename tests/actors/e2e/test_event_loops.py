"""Async actors: the thread of each method, blocked event loops, deadlocks, loops of concurrency groups and of methods."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import get, rpc
from tests.actors.e2e.kit import Gate, open_gate, pass_gate, until
from tests.migration.rows import row

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

    async def loop_thread(self) -> int:
        return threading.get_ident()

    # -- plain methods --

    def thread(self) -> int:
        return threading.get_ident()

    @actorrpc.method(thread=True)
    def other_thread(self) -> int:
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

    def mark(self, word: str) -> str:
        found = _mark.get()
        _mark.set(word)
        return found

    def grad(self) -> bool:
        return torch.is_grad_enabled()

    @rpc.functions.async_execution
    def later(self, gate: Any) -> Any:
        return gate.wait.remote().future()

    # -- coroutines --

    async def wait(self) -> str:
        await self.event.wait()
        return "set"

    async def put_twice(self, first: Any, second: Any) -> None:
        self.log.append(first)
        await asyncio.sleep(0)
        self.log.append(second)

    async def tick(self) -> str:
        return "tick"

    # -- methods that wait with get() --

    async def get_plain(self, me: Any) -> int:
        return get(me.thread.remote())

    async def get_tick(self, me: Any) -> Any:
        return get(me.tick.remote())

    def fibonacci(self, me: Any, n: int) -> int:
        if n < 2:
            return n
        return sum(get([me.fibonacci.remote(me, n - 1), me.fibonacci.remote(me, n - 2)]))

    async def get_begun(self, me: Any) -> Any:
        begun = me.wait.remote()
        await me.tick.remote()  # it runs after ``begun``
        return get(begun)

    async def get_scheduled(self, me: Any) -> Any:
        waiting = me.thread.remote()
        await asyncio.sleep(0)
        return get(waiting)

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


# -- threads of methods ----------------------------------------------------------------------------------------


@row("endpoints are all sync, or all async", "from-monarch")
def test_plain_methods_of_an_async_actor_run_on_its_event_loop_unless_they_have_a_thread() -> None:
    actor = _made()
    loop = get(actor.loop_thread.remote())
    assert get(actor.thread.remote()) == loop
    assert get(actor.other_thread.remote()) != loop
    assert actor.rpc_sync().thread() == loop
    assert actorrpc.call(actor, lambda _: threading.get_ident()).future().wait() == loop
    assert [get(each) for each in actor.items.remote(3)] == [(0, loop), (1, loop), (2, loop)]
    assert [get(each) for each in actor.listed.options(num_returns="streaming").remote(20)] == list(range(20))


def test_plain_and_async_calls_start_in_the_order_of_their_caller() -> None:
    actor = _made()
    get([actor.put_twice.remote(n, None) if n % 2 else actor.put.remote(n) for n in range(100)])
    assert [each for each in get(actor.all.remote()) if each is not None] == list(range(100))


def test_calls_do_not_share_context_variables() -> None:
    actor = _made()
    assert get([actor.mark.remote("a"), actor.mark.remote("b")]) == ["", ""]


def test_async_execution_methods_do_not_block_the_event_loop() -> None:
    actor = _made()
    gate = Gate.remote()
    answer = actor.later.remote(gate)
    assert get(actor.tick.remote()) == "tick"
    get(gate.open.remote())
    assert get(answer) == "open"


def test_a_plain_generator_lets_other_calls_run_between_its_items() -> None:
    actor = _made()
    stream = actor.items.options(max_buffered_items=4).remote(100)
    first = next(stream)
    assert get(actor.tick.remote()) == "tick"
    assert get(actor.thread.remote()) == get(first)[1]
    assert len(list(stream)) == 99


# -- waits on the event loop -------------------------------------------------------------------------------------


def test_plain_calls_of_the_same_chain_run_during_a_blocking_wait() -> None:
    actor = _made()
    loop = get(actor.loop_thread.remote())
    assert get(actor.get_plain.remote(actor)) == loop
    assert get(actor.get_scheduled.remote(actor)) == loop
    assert get(actor.get_from_task.remote(actor)) == loop
    assert get(actor.fibonacci.remote(actor, 6)) == 8
    others = [Plain.remote(), Plain.remote()]
    assert get(actor.via.remote(others, "thread", actor)) == loop
    assert get(actor.via_without_grad.remote(others[0], actor)) is True


def test_blocking_on_a_coroutine_of_the_same_event_loop_raises_deadlock_error() -> None:
    actor = _made()
    assert len(get(actor.wait_for_tick.remote(actor))[0]) == 1
    for method in (actor.get_tick, actor.get_begun, actor.get_items):
        with pytest.raises(
            actorrpc.DeadlockError, match=r"waits for it with get\(\), which blocks the event loop"
        ):
            get(method.remote(actor))
        assert get(actor.tick.remote()) == "tick"


@pytest.mark.slow
def test_a_deadlock_of_an_event_loop_through_other_actors_is_found() -> None:
    actor = _made()
    others = [Plain.remote(), Plain.remote()]
    with pytest.raises(actorrpc.DeadlockError, match=r"Plain.*\.ask\(\) -> "):
        get(actor.via.remote(others, "tick", actor))
    assert get(actor.tick.remote()) == "tick"


# -- the event loops of concurrency groups -------------------------------------------------------------------


@actorrpc.remote(concurrency_groups={"io": 2, "compute": 3})
class Grouped:
    def __init__(self) -> None:
        self.held = ""
        self.ended = ""
        self.loops: dict[int, asyncio.AbstractEventLoop] = {}  # references keep the ids unique

    async def where(self) -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        self.loops[id(loop)] = loop
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is loop
        return id(loop), threading.get_ident()

    def plain(self) -> int:
        return threading.get_ident()

    async def items(self, count: int) -> AsyncIterator[tuple[int, int]]:
        for _ in range(count):
            yield await self.where()

    async def tick(self) -> str:
        return "tick"

    @actorrpc.method(thread=True)
    def look(self) -> tuple[str, str]:
        return self.held, self.ended

    def forget(self) -> None:
        self.held = ""

    # -- methods that block the loop --

    async def hold(self, path: str) -> str:
        self.held = "held"
        return pass_gate(path)

    async def get_from(self, me: Any, group: str | None, method: str, *args: Any) -> Any:
        return get(getattr(me, method).options(concurrency_group=group).remote(*args))

    # -- a coroutine that waits until it is cancelled --

    async def wait(self) -> str:
        try:
            self.held = "waits"
            await asyncio.Event().wait()
        finally:
            self.ended = f"on {(await self.where())[1]}"
        return "never"


_IO = {"concurrency_group": "io"}
_COMPUTE = {"concurrency_group": "compute"}


# -- threads of groups -----------------------------------------------------------------------------------------


def test_each_concurrency_group_has_its_own_event_loop_and_thread() -> None:
    actor = Grouped.remote()
    found = get(
        [
            method.remote()
            for _ in range(3)
            for method in (actor.where, actor.where.options(**_IO), actor.where.options(**_COMPUTE))
        ]
    )
    assert found[:3] * 2 == found[3:]
    loops, threads = zip(*found[:3], strict=True)
    assert len(set(loops)) == len(set(threads)) == 3
    assert get(actor.plain.remote()) == threads[0]
    assert get(actor.plain.options(**_IO).remote()) not in threads
    assert [get(each) for each in actor.items.options(**_IO).remote(3)] == [found[1]] * 3


def test_calls_of_one_caller_start_in_order_within_a_concurrency_group() -> None:
    actor = Grouped.options(concurrency_groups={"io": 1, "compute": 3}).remote()
    gate = Gate.remote()
    refs = [actor.get_from.options(**_IO).remote(gate, None, "wait"), actor.tick.options(**_IO).remote()]
    until(lambda: get(gate.count.remote()) == 1)
    assert get(actor.tick.remote()) == "tick"
    assert not actorrpc.wait(refs, timeout=0)[0]
    get(gate.open.remote())
    assert get(refs) == ["open", "tick"]


def test_a_blocked_event_loop_does_not_block_the_loops_of_other_groups(gate: Path) -> None:
    actor = Grouped.remote()
    for blocked_group in (None, "io"):
        held = actor.hold.options(concurrency_group=blocked_group).remote(str(gate))
        until(lambda: get(actor.look.remote())[0] == "held")
        others = [group for group in (None, "io", "compute") if group != blocked_group]
        ticks = [actor.tick.options(concurrency_group=each).remote() for each in others]
        assert get(ticks) == ["tick", "tick"]
        late = actor.tick.options(concurrency_group=blocked_group).remote()
        assert not actorrpc.wait([late], timeout=0)[0]
        open_gate(gate)
        assert get([held, late]) == ["go", "tick"]
        get(actor.forget.remote())


# -- waits between groups ----------------------------------------------------------------------------------------


def test_blocking_is_possible_on_a_coroutine_of_another_group_but_not_of_the_same() -> None:
    actor = Grouped.remote()
    for waiter, waited in ((None, "io"), ("io", None), ("io", "compute")):
        assert get(actor.get_from.options(concurrency_group=waiter).remote(actor, waited, "tick")) == "tick"
    with pytest.raises(
        actorrpc.DeadlockError, match=r"waits for it with get\(\), which blocks the event loop"
    ):
        get(actor.get_from.options(**_IO).remote(actor, "io", "tick"))
    assert get(actor.tick.options(**_IO).remote()) == "tick"


def test_a_deadlock_through_the_event_loop_of_another_group_is_found() -> None:
    actor = Grouped.remote()
    for first, second in ((None, "io"), ("io", None)):
        call = actor.get_from.options(concurrency_group=first)
        with pytest.raises(
            actorrpc.DeadlockError, match=r"get_from\(\) -> .*wait for each other in a circle"
        ):
            get(call.remote(actor, second, "get_from", actor, first, "tick"))
        ticks = [actor.tick.options(concurrency_group=each).remote() for each in (None, "io")]
        assert get(ticks) == ["tick", "tick"]


def test_a_plain_method_runs_during_a_blocking_wait_on_the_main_loop_through_another_group() -> None:
    actor = Grouped.remote()
    _, loop = get(actor.where.remote())
    assert get(actor.get_from.remote(actor, "io", "get_from", actor, None, "plain")) == loop
    assert get(actor.get_from.options(**_IO).remote(actor, None, "plain")) == loop


# -- ends ----------------------------------------------------------------------------------------------------------


def test_a_coroutine_is_cancelled_on_the_event_loop_of_its_group(gate: Path) -> None:
    actor = Grouped.remote()
    _, thread = get(actor.where.options(**_IO).remote())
    waiting = actor.wait.options(**_IO).remote()
    until(lambda: get(actor.look.remote())[0] == "waits")
    held = actor.hold.remote(str(gate))  # the main loop is blocked and takes no part
    until(lambda: get(actor.look.remote())[0] == "held")
    assert actorrpc.cancel(waiting)
    with pytest.raises(actorrpc.CancelledError):
        get(waiting)
    assert get(actor.look.remote())[1] == f"on {thread}"
    open_gate(gate)
    assert get(held) == "go"


def test_calls_end_with_a_killed_actor_even_if_an_event_loop_is_blocked(place: str, gate: Path) -> None:
    actor = Grouped.remote()
    held = actor.hold.options(**_IO).remote(str(gate))
    until(lambda: get(actor.look.remote())[0] == "held")
    waiting = [actor.tick.options(**_IO).remote(), actor.wait.remote()]
    actor.kill()
    for each in [held, *waiting]:
        with pytest.raises(actorrpc.ActorDiedError):
            get(each, timeout=10)
    del held, waiting, each
    if place == "group":  # on the embedded cluster its process has ended
        open_gate(gate)
