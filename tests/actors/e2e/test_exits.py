"""Actors that end themselves: exit_actor() is final, and after sys.exit() an actor may be restarted."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc import get
from tests.actors.e2e.kit import Gate, until
from tests.migration.rows import row

pytestmark = [
    pytest.mark.usefixtures("place"),
    pytest.mark.limit(30),
    # asyncio prints this if exit_actor() was called on another thread and the actor ended before its loop read the
    # future. On the standard error of another process it is two entries.
    pytest.mark.prints(
        "^Future exception was never retrieved", "^future: <Future finished exception=ActorExit"
    ),
]


class _Exits:
    """Methods that exit, for serial and async actors."""

    def __init__(self, path: str = "") -> None:
        self.task: Any = None
        if path:
            with open(path, "a") as file:
                file.write("made\n")

    def ping(self) -> str:
        return "pong"

    def leave(self, how: str) -> None:
        _leave(how)

    def yields(self, how: str) -> Any:
        yield 1
        _leave(how)


def _leave(how: str) -> None:
    if how == "exit_actor":
        actorrpc.exit_actor()
    sys.exit(3)


@actorrpc.remote
class Serial(_Exits):
    def in_thread(self, how: str) -> None:
        asyncio.run(asyncio.to_thread(_leave, how))


@actorrpc.remote
class Async(_Exits):
    async def leave_async(self, how: str) -> None:
        await asyncio.sleep(0)
        _leave(how)

    async def yields_async(self, how: str) -> Any:
        yield 1
        _leave(how)

    async def begin(self, how: str) -> None:
        async def task() -> None:
            _leave(how)

        self.task = asyncio.create_task(task())
        await asyncio.Event().wait()

    async def begin_and_end(self, how: str) -> str:
        async def task() -> None:
            await asyncio.sleep(0)
            _leave(how)

        self.task = asyncio.create_task(task())
        return "begun"

    async def gathered(self, how: str) -> None:
        await asyncio.gather(asyncio.to_thread(_leave, how), asyncio.Event().wait())

    async def wait_and_leave(self, gate: Any, how: str) -> None:
        await gate.wait.remote()
        _leave(how)

    async def wait(self) -> None:
        await asyncio.Event().wait()


_MESSAGE = {"exit_actor": r"exit_actor\(\) was called in it", "sys.exit": r"sys\.exit\(3\) was called in it"}
_WAYS: list[tuple[Any, str, str]] = [
    *((Serial, method, "sys.exit") for method in ("leave", "in_thread")),
    *((Async, method, "sys.exit") for method in ("leave", "leave_async", "begin", "gathered")),
    (Serial, "leave", "exit_actor"),
    (Async, "leave_async", "exit_actor"),
    (Async, "gathered", "exit_actor"),
]


@pytest.mark.parametrize(("cls", "method", "how"), _WAYS)
def test_an_actor_that_exits_is_dead_and_its_calls_fail(cls: Any, method: str, how: str) -> None:
    actor = cls.remote()
    get(actor.ping.remote())
    with pytest.raises(actorrpc.ActorDiedError, match=_MESSAGE[how]):
        get(getattr(actor, method).remote(how))
    with pytest.raises(actorrpc.ActorDiedError, match=_MESSAGE[how]):
        get(actor.ping.remote())
    assert not actorrpc.is_alive(actor)


@pytest.mark.parametrize(
    ("cls", "method", "how"),
    [(Serial, "yields", "exit_actor"), (Async, "yields", "sys.exit"), (Async, "yields_async", "exit_actor")],
)
def test_a_stream_fails_if_its_generator_exits(cls: Any, method: str, how: str) -> None:
    actor = cls.remote()
    stream = getattr(actor, method).remote(how)
    assert get(next(stream)) == 1
    with pytest.raises(actorrpc.ActorDiedError, match=_MESSAGE[how]):
        get(next(stream))


def test_an_exit_in_a_background_task_ends_the_actor() -> None:
    actor = Async.remote()
    assert get(actor.begin_and_end.remote("sys.exit")) == "begun"
    until(lambda: not actorrpc.is_alive(actor))


def test_running_and_waiting_calls_of_an_async_actor_fail_if_it_exits() -> None:
    how = "exit_actor"
    actor, gate = Async.options(max_concurrency=3).remote(), Gate.remote()
    refs = [actor.wait_and_leave.remote(gate, how), actor.wait.remote(), actor.wait.remote()]
    refs += [actor.wait.remote(), actor.leave_async.remote("never"), actor.ping.remote()]
    until(lambda: get(gate.count.remote()) == 1)
    get(gate.open.remote())
    for ref in refs:
        with pytest.raises(actorrpc.ActorDiedError, match=_MESSAGE[how]):
            get(ref)
    del refs, ref


@pytest.mark.parametrize("cls", [Serial, Async])
def test_an_actor_is_restarted_after_sys_exit_but_not_after_exit_actor(cls: Any, tmp_path: Path) -> None:
    actor = cls.options(max_restarts=1).remote(str(tmp_path / "made"))
    get(actor.ping.remote())
    with pytest.raises(actorrpc.ActorUnavailableError, match=_MESSAGE["sys.exit"]):
        get(actor.leave.remote("sys.exit"))
    assert get(actor.ping.remote()) == "pong"
    assert (tmp_path / "made").read_text() == "made\n" * 2
    with pytest.raises(actorrpc.ActorDiedError, match=_MESSAGE["exit_actor"]):
        get(actor.leave.remote("exit_actor"))


def test_a_call_that_exits_is_retried_up_to_max_task_retries(tmp_path: Path) -> None:
    actor = Serial.options(max_restarts=2, max_task_retries=2).remote(str(tmp_path / "made"))
    with pytest.raises(actorrpc.ActorDiedError, match=_MESSAGE["sys.exit"]):
        get(actor.leave.remote("sys.exit"))
    assert (tmp_path / "made").read_text() == "made\n" * 3


@actorrpc.remote
def leaving_task(path: str) -> str:
    with open(path, "a") as file:
        file.write("run\n")
    with open(path) as file:
        if len(file.readlines()) < 3:
            sys.exit(3)
    return "done"


@row("TaskCancelledError; WorkerCrashedError; GetTimeoutError", "from-ray")
def test_a_task_that_exits_is_retried_up_to_max_retries(tmp_path: Path) -> None:
    assert get(leaving_task.options(max_retries=2).remote(str(tmp_path / "runs"))) == "done"
    with pytest.raises(actorrpc.PeerDiedError, match=_MESSAGE["sys.exit"]):
        get(leaving_task.options(max_retries=1).remote(str(tmp_path / "others")))
