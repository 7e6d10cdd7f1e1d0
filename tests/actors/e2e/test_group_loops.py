"""The event loops of an actor's concurrency groups: none of them is held by another."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc import get
from tests.actors.e2e.kit import Gate, open_gate, pass_gate, row_of, until

pytestmark = [
    pytest.mark.usefixtures("place"),
    pytest.mark.limit(30),
    pytest.mark.prints(r"on the actor's event loop", r"has held the event loop"),
]


@actorrpc.remote(concurrency_groups={"io": 2, "compute": 3})
class Grouped:
    def __init__(self) -> None:
        self.held = ""
        self.ended = ""
        self.loops: dict[int, asyncio.AbstractEventLoop] = {}  # keeps them, and so their ids their own
        self.task: Any = None

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

    # -- what blocks the loop

    async def hold(self, path: str) -> str:
        self.held = "held"
        return pass_gate(path)

    async def get_from(self, me: Any, group: str | None, method: str, *args: Any) -> Any:
        return get(getattr(me, method).options(concurrency_group=group).remote(*args))

    # -- what ends

    async def wait(self) -> str:
        try:
            self.held = "waits"
            await asyncio.Event().wait()
        finally:
            self.ended = f"on {(await self.where())[1]}"
        return "never"

    async def leave(self, how: str) -> None:
        await asyncio.sleep(0)
        _leave(how)

    async def leave_in_a_task(self, how: str) -> None:
        async def task() -> None:
            _leave(how)

        self.task = asyncio.create_task(task())
        await asyncio.Event().wait()


def _leave(how: str) -> None:
    if how == "exit_actor":
        actorrpc.exit_actor()
    sys.exit(3)


_IO = {"concurrency_group": "io"}
_COMPUTE = {"concurrency_group": "compute"}


# -- where -----------------------------------------------------------------------------------------------------


def test_each_group_has_a_loop_and_a_thread() -> None:
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


def test_calls_of_one_caller_start_in_order_within_a_group() -> None:
    actor = Grouped.options(concurrency_groups={"io": 1, "compute": 3}).remote()
    gate = Gate.remote()
    refs = [actor.get_from.options(**_IO).remote(gate, None, "wait"), actor.tick.options(**_IO).remote()]
    until(lambda: get(gate.count.remote()) == 1)
    assert get(actor.tick.remote()) == "tick"
    assert not actorrpc.wait(refs, timeout=0)[0]
    get(gate.open.remote())
    assert get(refs) == ["open", "tick"]


@pytest.mark.parametrize("holder", [None, "io"])
def test_a_loop_that_is_held_holds_no_other(holder: str | None, gate: Path) -> None:
    actor = Grouped.remote()
    held = actor.hold.options(concurrency_group=holder).remote(str(gate))
    until(lambda: get(actor.look.remote())[0] == "held")
    others = [group for group in (None, "io", "compute") if group != holder]
    assert get([actor.tick.options(concurrency_group=each).remote() for each in others]) == ["tick", "tick"]
    late = actor.tick.options(concurrency_group=holder).remote()
    assert not actorrpc.wait([late], timeout=0)[0]
    open_gate(gate)
    assert get([held, late]) == ["go", "tick"]


# -- waits on a loop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("waiter", "waited"), [(None, "io"), ("io", None), ("io", "compute")])
def test_a_coroutine_of_another_group_can_be_waited_for(waiter: str | None, waited: str | None) -> None:
    actor = Grouped.remote()
    assert get(actor.get_from.options(concurrency_group=waiter).remote(actor, waited, "tick")) == "tick"


def test_waiting_for_a_coroutine_of_the_own_group_ends_at_once() -> None:
    actor = Grouped.remote()
    with pytest.raises(
        actorrpc.DeadlockError, match=r"waits for it with get\(\), which blocks the event loop"
    ):
        get(actor.get_from.options(**_IO).remote(actor, "io", "tick"))
    assert get(actor.tick.options(**_IO).remote()) == "tick"


@pytest.mark.parametrize("groups", [(None, "io"), ("io", None)])
def test_a_circle_through_the_loop_of_another_group_is_found(groups: tuple[str | None, str | None]) -> None:
    actor = Grouped.remote()
    first, second = groups
    with pytest.raises(actorrpc.DeadlockError, match=r"get_from\(\) -> .*wait for each other in a circle"):
        get(
            actor.get_from.options(concurrency_group=first).remote(
                actor, second, "get_from", actor, first, "tick"
            )
        )
    assert get([actor.tick.options(concurrency_group=each).remote() for each in groups]) == ["tick", "tick"]


def test_a_plain_method_runs_within_a_wait_of_the_default_group_below_another() -> None:
    actor = Grouped.remote()
    _, loop = get(actor.where.remote())
    assert get(actor.get_from.remote(actor, "io", "get_from", actor, None, "plain")) == loop
    assert get(actor.get_from.options(**_IO).remote(actor, None, "plain")) == loop


# -- ends ----------------------------------------------------------------------------------------------------------


def test_a_coroutine_is_cancelled_on_the_loop_of_its_group(gate: Path) -> None:
    actor = Grouped.remote()
    _, thread = get(actor.where.options(**_IO).remote())
    waiting = actor.wait.options(**_IO).remote()
    until(lambda: get(actor.look.remote())[0] == "waits")
    held = actor.hold.remote(str(gate))  # the main loop has no part in it
    until(lambda: get(actor.look.remote())[0] == "held")
    assert actorrpc.cancel(waiting)
    with pytest.raises(actorrpc.CancelledError):
        get(waiting)
    assert get(actor.look.remote())[1] == f"on {thread}"
    open_gate(gate)
    assert get(held) == "go"


def test_one_that_waits_for_its_turn_never_runs(gate: Path) -> None:
    actor = Grouped.remote()
    held = actor.hold.options(**_IO).remote(str(gate))
    until(lambda: get(actor.look.remote())[0] == "held")
    waiting = actor.wait.options(**_IO).remote()
    until(lambda: row_of(actor).pending_calls == 1)
    assert actorrpc.cancel(waiting)
    with pytest.raises(actorrpc.CancelledError):
        get(waiting)
    until(lambda: row_of(actor).pending_calls == 0)
    open_gate(gate)
    assert get(held) == "go"
    get(actor.tick.options(**_IO).remote())
    assert get(actor.look.remote()) == ("held", "")


@pytest.mark.parametrize("method", ["leave", "leave_in_a_task"])
@pytest.mark.parametrize("how", ["exit_actor", "sys.exit"])
def test_an_exit_on_the_loop_of_a_group_ends_the_actor(how: str, method: str) -> None:
    actor = Grouped.remote()
    others = [actor.wait.remote(), actor.wait.options(**_COMPUTE).remote()]
    get([actor.tick.remote(), actor.tick.options(**_COMPUTE).remote()])
    for ref in [getattr(actor, method).options(**_IO).remote(how), *others]:
        with pytest.raises(actorrpc.ActorDiedError, match=rf"{how}\(3?\) was called in it"):
            get(ref)
    for group in (None, "io", "compute"):
        with pytest.raises(actorrpc.ActorDiedError, match=rf"{how}\(3?\) was called in it"):
            get(actor.tick.options(concurrency_group=group).remote())
    del others, ref


def test_calls_end_with_their_actor_also_where_the_loop_of_a_group_is_held(place: str, gate: Path) -> None:
    actor = Grouped.remote()
    held = actor.hold.options(**_IO).remote(str(gate))
    until(lambda: get(actor.look.remote())[0] == "held")
    waiting = [actor.tick.options(**_IO).remote(), actor.wait.remote()]
    actor.kill()
    for each in [held, *waiting]:
        with pytest.raises(actorrpc.ActorDiedError):
            get(each, timeout=10)
    del held, waiting, each
    if place == "group":  # otherwise its process is gone
        open_gate(gate)
