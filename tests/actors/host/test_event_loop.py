"""The event loop of an actor: log messages about blocking, loops of groups, and cancelled coroutines that do not end."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc.actors.context import Runtime
from actorrpc.errors import LimitError
from actorrpc.testing import InProcessCluster
from tests.actors.alone import alone
from tests.actors.e2e.kit import until


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with alone(tmp_path) as here:
        yield here


def _messages(caplog: pytest.LogCaptureFixture, text: str, count: int = 1) -> list[str]:
    """Wait until a number of log messages contain a text."""
    found: list[str] = []

    def are_there() -> bool:
        found[:] = [each for each in map(logging.LogRecord.getMessage, caplog.records) if text in each]
        return len(found) >= count

    until(are_there)
    return found


class _Holds:
    """The gate at which methods block the loop, shared with the test."""

    begun, gate = threading.Event(), threading.Event()


@actorrpc.remote(concurrency_groups={"io": 2})
class Held:
    def plain(self) -> None:
        _Holds.gate.wait(20)

    async def coroutine(self) -> None:
        _Holds.begun.set()
        _Holds.gate.wait(20)

    async def coroutine_in_group(self) -> None:
        _Holds.gate.wait(20)

    async def in_a_task(self) -> None:
        async def task() -> None:
            _Holds.gate.wait(20)

        await asyncio.create_task(task())

    async def tick(self) -> None: ...

    def get_from(self, other: Any) -> Any:
        return actorrpc.get(other.wait.remote())

    async def sleep(self) -> None:
        await asyncio.sleep(1.5)


@actorrpc.remote
class Other:
    def wait(self) -> str:
        _Holds.gate.wait(20)
        return "waited"


@pytest.mark.prints(r"has held the event loop")
@pytest.mark.slow
@pytest.mark.usefixtures("runtime")
def test_each_method_that_blocks_the_event_loop_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    actor = Held.remote()
    logged = 0
    for method, name in (
        ("plain", ".plain()"),
        ("coroutine", ".coroutine()"),
        ("in_a_task", "a task"),
        ("coroutine_in_group", ".coroutine_in_group()"),
        ("plain", ""),
    ):
        _Holds.gate.clear()
        group = "io" if method.endswith("_in_group") else None
        ref = getattr(actor, method).options(concurrency_group=group).remote()
        if name:
            logged += 1
            found = _messages(caplog, "has held the event loop", logged)
            assert name in found[-1].partition(" has held")[0]
            assert f"in {'task' if method == 'in_a_task' else method}\n" in found[-1]
            assert "threading.Thread" not in found[-1]
            assert ("(concurrency group 'io') for more than 1 s" in found[-1]) is (group == "io")
        else:
            actorrpc.wait([ref], timeout=2.5)
        _Holds.gate.set()
        actorrpc.get(ref)
    actorrpc.get(actor.sleep.remote())
    assert len(_messages(caplog, "has held the event loop", logged)) == logged
    del actor


@pytest.mark.prints(r"waits \(get\(\) and the like\)")
@pytest.mark.usefixtures("runtime")
def test_a_blocking_get_on_the_event_loop_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    actor, other = Held.remote(), Other.remote()
    for _ in range(2):
        _Holds.gate.clear()
        refs = [actor.get_from.remote(other), actor.tick.remote()]
        logged = _messages(caplog, "waits (get() and the like)", 1)
        _Holds.gate.set()
        assert actorrpc.get(refs) == ["waited", None]
    assert len(logged) == 1
    assert "get_from() of actor Held" in logged[0]
    assert "@method(thread=True)" in logged[0]
    del actor, other


# -- event loops of groups -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("runtime")
def test_a_call_is_refused_if_the_event_loop_of_its_group_cannot_be_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor = Held.remote()
    actorrpc.get(actor.tick.remote())

    def none() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", none)
        for _ in range(2):
            with pytest.raises(
                LimitError, match=r"it needs an event loop, which cannot be made: .*Too many open"
            ) as refused:
                actorrpc.get(actor.tick.options(concurrency_group="io").remote())
            assert refused.value.maybe_executed is False
            del refused
        actorrpc.get(actor.tick.remote())
    actorrpc.get(actor.tick.options(concurrency_group="io").remote())
    del actor


@actorrpc.remote
class Stubborn:
    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.begun = asyncio.Event()

    async def wait(self, other: Any) -> str:
        try:
            self.begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                await self.event.wait()
            except asyncio.CancelledError:
                try:
                    await other.tick.remote()
                except actorrpc.CancelledError as error:
                    return f"again: {error}"
        return "never"

    async def has_begun(self) -> None:
        await self.begun.wait()

    async def tick(self) -> None: ...


def test_a_cancelled_coroutine_that_does_not_end_is_given_up_after_the_grace_period() -> None:
    with InProcessCluster(2, autojump=True):
        actor, other = (Stubborn.options(worker=f"worker{number}").remote() for number in range(2))
        ref = actor.wait.remote(other)
        actorrpc.get(actor.has_begun.remote())
        assert actorrpc.cancel(ref)
        with pytest.raises(actorrpc.CancelledError, match="has not ended within 5 s"):
            actorrpc.get(ref)
        actorrpc.get(actor.tick.remote())
        del actor, other, ref


@pytest.mark.prints("has held the event loop")
def test_a_caller_stops_waiting_for_its_cancelled_call_although_the_coroutine_blocks_its_loop() -> None:
    _Holds.begun.clear()
    _Holds.gate.clear()
    with InProcessCluster(2) as cluster:
        actor = Held.options(worker="worker1").remote()
        ref = actor.coroutine.remote()
        assert _Holds.begun.wait(20)
        assert actorrpc.cancel(ref)
        cluster.clock.advance(6.5)
        with pytest.raises(actorrpc.CancelledError, match="was cancelled by its caller"):
            actorrpc.get(ref)
        _Holds.gate.set()
        del actor, ref
