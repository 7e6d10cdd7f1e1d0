"""The event loop of an actor: what is said of it in the log, and how long its coroutines may take to end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc.actors import callee
from actorrpc.actors.runtime import Runtime
from tests.actors.alone import alone


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with alone(tmp_path) as here:
        yield here


class _Lines(logging.Handler):
    """Gathers what is logged; one waits for a number of lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._more = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._more:
            self.lines.append(record.getMessage())
            self._more.notify_all()

    def wait_for(self, text: str, count: int) -> list[str]:
        with self._more:
            assert self._more.wait_for(lambda: sum(text in line for line in self.lines) >= count, 20)
        return [line for line in self.lines if text in line]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[_Lines]:
    handler = _Lines()
    logger = logging.getLogger("actorrpc.actors")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


class _Holds:
    """What methods wait for that hold the loop; in the test's own process."""

    gate = threading.Event()


@actorrpc.remote
class Held:
    def plain(self) -> None:
        _Holds.gate.wait(20)

    async def coroutine(self) -> None:
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
def test_what_holds_the_loop_is_named_once_each(lines: _Lines) -> None:
    actor = Held.remote()
    said = 0
    for method, name in (
        ("plain", ".plain()"),
        ("coroutine", ".coroutine()"),
        ("in_a_task", "a task"),
        ("plain", ""),
    ):
        _Holds.gate.clear()
        ref = getattr(actor, method).remote()
        if name:
            said += 1
            found = lines.wait_for("has held the event loop", said)
            assert name in found[-1].partition(" has held")[0]
            assert f"in {'task' if method == 'in_a_task' else method}\n" in found[-1]
            assert "threading.Thread" not in found[-1]
        else:
            actorrpc.wait([ref], timeout=2.5)
        _Holds.gate.set()
        actorrpc.get(ref)
    actorrpc.get(actor.sleep.remote())
    assert len(lines.wait_for("has held the event loop", said)) == said
    del actor


@pytest.mark.prints(r"waits \(get\(\) and the like\)")
@pytest.mark.usefixtures("runtime")
def test_a_wait_on_the_loop_is_said_once(lines: _Lines) -> None:
    actor, other = Held.remote(), Other.remote()
    for _ in range(2):
        _Holds.gate.clear()
        refs = [actor.get_from.remote(other), actor.tick.remote()]
        said = lines.wait_for("waits (get() and the like)", 1)
        _Holds.gate.set()
        assert actorrpc.get(refs) == ["waited", None]
    assert len(said) == 1
    assert "get_from() of actor Held" in said[0]
    assert "@method(thread=True)" in said[0]
    del actor, other


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


@pytest.mark.usefixtures("runtime")
def test_the_grace_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callee, "GRACE_S", 0.1)
    actor, other = Stubborn.remote(), Stubborn.remote()
    ref = actor.wait.remote(other)
    actorrpc.get(actor.has_begun.remote())
    assert actorrpc.cancel(ref)
    with pytest.raises(actorrpc.CancelledError, match=r"has not ended within 0\.1 s"):
        actorrpc.get(ref)
    actorrpc.get(actor.tick.remote())
    del actor, other, ref


@pytest.mark.usefixtures("runtime")
def test_a_loop_that_nobody_can_reach_bounds_a_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorrpc.actors.results.GRACE_S", 0.0)
    monkeypatch.setattr("actorrpc.actors.results._MARGIN_S", 0.1)
    _Holds.gate.clear()
    actor, other = Stubborn.remote(), Stubborn.remote()
    ref = actor.wait.remote(other)
    actorrpc.get(actor.has_begun.remote())
    assert actorrpc.cancel(ref)
    with pytest.raises(actorrpc.CancelledError, match="was cancelled by its caller"):
        actorrpc.get(ref)
    del actor, other, ref
