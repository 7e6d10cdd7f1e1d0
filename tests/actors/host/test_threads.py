"""The threads of actors: all of them end with their actor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc import CancelledError, cancel, get
from actorrpc.actors.host.threads import ActorThread
from tests.actors.alone import alone
from tests.actors.e2e.kit import until


@actorrpc.remote
class Idle:
    """Does nothing."""


@actorrpc.remote
class Starts:
    """Starts a thread that notes that it has run, and goes on until it is interrupted."""

    def ready(self) -> None:
        """Answer."""

    def starts(self, note: Path) -> None:
        threading.Thread(target=note.touch).start()
        while True:
            time.sleep(0.001)


def test_a_thread_that_starts_when_its_actor_has_ended_ends_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[ActorThread] = []
    arrived = threading.Event()

    def hold(station: ActorThread) -> None:
        held.append(station)
        arrived.set()

    with alone(tmp_path):
        monkeypatch.setattr(ActorThread, "start", hold)
        actor = Idle.remote()
        assert arrived.wait(20)
        actor.kill()
        monkeypatch.undo()
        held[0]._resident.over.wait(20)
        held[0].start()
        for thread in threading.enumerate():
            if thread.name == f"actorrpc-actor-{held[0]._resident.title}":
                thread.join(20)
                assert not thread.is_alive()
        del actor


def test_a_method_is_not_interrupted_while_it_starts_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The new thread bears the id of the one that starts it until it runs: what is raised there would end the new one.
    starting, looked, start = threading.Event(), threading.Semaphore(0), threading._start_new_thread  # type: ignore[attr-defined]
    interrupt = ActorThread.interrupt

    def start_late(run: Callable[[], None], arguments: tuple[()]) -> Any:
        if threading.current_thread().name.startswith("actorrpc-actor-"):
            starting.set()
            for _ in range(2):
                assert looked.acquire(timeout=20)
        return start(run, arguments)

    def look(station: ActorThread, *arguments: Any) -> None:
        interrupt(station, *arguments)
        looked.release()

    with alone(tmp_path):
        actor = Starts.remote()
        get(actor.ready.remote())
        monkeypatch.setattr(threading, "_start_new_thread", start_late)
        monkeypatch.setattr(ActorThread, "interrupt", look)
        ref = actor.starts.remote(tmp_path / "note")
        assert starting.wait(20)
        assert cancel(ref)
        with pytest.raises(CancelledError):
            get(ref)
        get(actor.ready.remote())
        until((tmp_path / "note").exists)
        del actor, ref
