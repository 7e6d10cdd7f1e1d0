"""Sync methods that run event loops of their own: what those await, and the calls that come back meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import actorrpc
from actorrpc import get

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]


async def _await(ref: Any) -> Any:
    return await ref


async def _wait_for(ref: Any) -> Any:
    return await asyncio.wait_for(ref, 60)


async def _gather(ref: Any) -> Any:
    return (await asyncio.gather(ref, asyncio.sleep(0)))[0]


async def _task(ref: Any) -> Any:
    return await asyncio.create_task(_await(ref))


async def _wrap(ref: Any) -> Any:
    return await asyncio.wrap_future(ref.future())


async def _to_thread(ref: Any) -> Any:
    return await asyncio.to_thread(get, ref)


async def _get(ref: Any) -> Any:
    return get(ref)


async def _as_completed(ref: Any) -> Any:
    return get(await anext(actorrpc.as_completed([ref])))


WAYS: dict[str, Callable[[Any], Any]] = {
    "await": lambda ref: asyncio.run(_await(ref)),
    "to_thread": lambda ref: asyncio.run(_to_thread(ref)),
    "wrap": lambda ref: asyncio.run(_wrap(ref)),
    "get": get,
    "future": lambda ref: ref.future().result(),
    "wait": lambda ref: get(actorrpc.wait([ref])[0][0]),
    "as_completed": lambda ref: get(next(actorrpc.as_completed([ref]))),
    "wait_for": lambda ref: asyncio.run(_wait_for(ref)),
    "gather": lambda ref: asyncio.run(_gather(ref)),
    "task": lambda ref: asyncio.run(_task(ref)),
    "get within": lambda ref: asyncio.run(_get(ref)),
    "as_completed within": lambda ref: asyncio.run(_as_completed(ref)),
}


@actorrpc.remote
class Serial:
    """Waits in all ways for what comes back to it."""

    def __init__(self) -> None:
        self.home = threading.get_ident()

    def visit(self, way: list[Any], how: str) -> list[bool]:
        here = self.home == threading.get_ident()
        if not way:
            return [here]
        head, *rest = way
        return [here, *WAYS[how](head.visit.remote(rest, how))]

    def made_before(self, me: Any) -> bool:
        ref = me.is_home.remote()
        return bool(asyncio.run(_await(ref)))

    def is_home(self) -> bool:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            raise AssertionError("a loop below is not this method's")
        return self.home == threading.get_ident()

    def items(self, me: Any) -> Iterator[bool]:
        for _ in range(3):
            yield get(me.is_home.remote())

    def take_items(self, other: Any, me: Any) -> list[bool]:
        async def take() -> list[bool]:
            return [await ref async for ref in other.items.remote(me)]

        return asyncio.run(take())


@pytest.mark.parametrize("how", WAYS)
def test_calls_that_come_back_run_while_the_loop_awaits(how: str) -> None:
    a, b = Serial.remote(), Serial.remote()
    assert get(a.visit.remote([a], how), timeout=15) == [True] * 2
    assert get(a.visit.remote([b, a, b, a], how), timeout=15) == [True] * 5


def test_a_call_that_was_made_before_the_loop() -> None:
    a = Serial.remote()
    assert get(a.made_before.remote(a)) is True


def test_a_stream_whose_generator_calls_back() -> None:
    a, b = Serial.remote(), Serial.remote()
    assert get(a.take_items.remote(b, a)) == [True] * 3


@pytest.mark.parametrize("how", ["await", "gather", "get within"])
def test_without_reentrancy_a_circle_is_reported(how: str) -> None:
    a, b = Serial.options(reentrant=False, name=f"first {how}").remote(), Serial.remote()
    with pytest.raises(actorrpc.DeadlockError, match="first"):
        get(a.visit.remote([b, a], how), timeout=15)
    with pytest.raises(actorrpc.DeadlockError, match="first"):
        get(a.visit.remote([a], how), timeout=15)
    assert get(a.is_home.remote()) is True


@actorrpc.remote
class OneAtATime:
    async def visit(self, way: list[Any]) -> int:
        return 1 + (int(await way[0].visit.remote(way[1:])) if way else 0)


def test_an_async_actor_that_executes_one_call_at_a_time() -> None:
    a, b = OneAtATime.options(max_concurrency=1).remote(), OneAtATime.remote()
    assert get(a.visit.remote([b, a, a])) == 4
    closed = OneAtATime.options(max_concurrency=1, reentrant=False, name="closed").remote()
    with pytest.raises(actorrpc.DeadlockError, match="closed"):
        get(closed.visit.remote([closed]), timeout=15)
    with pytest.raises(actorrpc.DeadlockError, match="closed"):
        get(b.visit.remote([closed, b, closed]), timeout=15)
    assert get(closed.visit.remote([b])) == 2
