"""Misbehaving user objects: no thread of the package ends because of them, and no caller waits without end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import actorrpc
from actorrpc import _time
from actorrpc.agent.calls import CURRENT
from actorrpc.errors import ActorDiedError, LimitError, RemoteError
from tests import unruly

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(60)]


@actorrpc.remote
class Unruly:
    """Raises an exception of a given kind, in each way that a method can."""

    def __init__(self, kind: str = "") -> None:
        self.kind = kind
        if kind:
            raise unruly.make(kind)

    def call(self, kind: str) -> None:
        raise unruly.make(kind)

    def items(self, kind: str) -> Iterator[int]:
        yield 1
        raise unruly.make(kind)

    def ping(self) -> str:
        return "pong"


@actorrpc.remote
class AsyncUnruly:
    async def call(self, kind: str) -> None:
        raise unruly.make(kind)

    async def items(self, kind: str) -> AsyncIterator[int]:
        yield 1
        raise unruly.make(kind)

    async def ping(self) -> str:
        return "pong"


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Unruly, AsyncUnruly])
def test_exceptions_that_refuse_attributes_reach_the_caller(cls: Any) -> None:
    actor = cls.remote()
    for kind in unruly.KINDS:
        with pytest.raises(RemoteError):
            actorrpc.get(actor.call.remote(kind))
        assert actorrpc.get(actor.ping.remote()) == "pong", kind
        items = actor.items.remote(kind).values()
        assert next(items) == 1
        with pytest.raises(RemoteError):
            next(items)
        assert actorrpc.get(actor.ping.remote()) == "pong", kind
    for kind in unruly.KINDS if cls is Unruly else ():
        with pytest.raises(ActorDiedError, match="constructor raised"):
            actorrpc.get(Unruly.remote(kind).ping.remote())


@actorrpc.remote
class Looping:
    """Stops the event loop on which its methods run."""

    async def stop(self) -> str:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return "went on"

    async def ping(self) -> str:
        return "pong"


@pytest.mark.prints("stopped the event loop, which all of its methods need: the loop is started again")
def test_an_event_loop_that_a_method_stops_is_started_again() -> None:
    actor = Looping.remote()
    assert actorrpc.get(actor.stop.remote()) == "went on"
    assert actorrpc.get(actor.ping.remote()) == "pong"


@actorrpc.remote
class Breaking:
    """Damages the state of its executor, as a bug of the package would."""

    def damage(self) -> str:
        execution = CURRENT.get()
        assert execution is not None
        execution.actor.mailbox.turn = None
        return "damaged"

    def ping(self) -> str:
        return "pong"


@pytest.mark.prints("is ended: a thread of it ended unexpectedly\nTraceback")
def test_an_actor_ends_if_one_of_its_threads_ends_unexpectedly() -> None:
    actor = Breaking.remote()
    assert actorrpc.get(actor.damage.remote()) == "damaged"
    with pytest.raises(ActorDiedError, match="a thread of it ended unexpectedly"):
        actorrpc.get(actor.ping.remote())


@actorrpc.remote(concurrency_groups={"io": 2})
class Crowded:
    """Simulates a system that cannot start more threads."""

    @actorrpc.method(thread=True)
    def fill(self, spare: int) -> None:
        self.start = _time.start
        left = [None] * spare

        def start(thread: threading.Thread) -> None:
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
            self.start(thread)

        _time.start = start

    @actorrpc.method(thread=True)
    def free(self) -> None:
        _time.start = self.start

    @actorrpc.method(concurrency_group="io")
    def other(self) -> str:
        return "other"

    @actorrpc.method(concurrency_group="io")
    def items(self) -> Iterator[int]:
        yield from range(3)

    async def coroutine(self) -> str:
        return "coroutine"


def test_a_group_that_gets_fewer_threads_than_its_limit_still_runs_its_calls() -> None:
    actor = Crowded.remote()
    actorrpc.get(actor.fill.remote(1))
    assert actorrpc.get(actor.other.remote()) == "other"
    assert list(actor.items.remote().values()) == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(LimitError, match="cannot start another thread: ") as refused:
            actorrpc.get(actor.coroutine.remote())
        assert refused.value.maybe_executed is False
    del refused
    actorrpc.get(actor.free.remote())
    assert actorrpc.get(actor.coroutine.remote()) == "coroutine"
