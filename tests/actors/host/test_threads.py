"""The threads of actors: all of them end with their actor."""

from __future__ import annotations

import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import actorrpc
from actorrpc import CancelledError, cancel, get
from actorrpc.actors.host.threads import ActorThread, _bears_interruption
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


class Dropped:
    """Is interrupted, or nearly, while it is dropped."""

    dropping = threading.Event()
    looked = threading.Semaphore(0)
    told = threading.Event()

    def __del__(self) -> None:
        self.dropping.set()
        for _ in range(2):
            self.looked.acquire(timeout=20)


@actorrpc.remote
class Drops:
    """Drops an object, and goes on until it is interrupted, or is told to end."""

    def ready(self) -> None:
        """Answer."""

    def drops(self) -> None:
        Dropped()
        while not Dropped.told.is_set():
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


def test_an_interruption_is_not_lost_in_a_del(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter prints and forgets what is raised in a __del__: the method would go on.
    interrupt = ActorThread.interrupt

    def look(station: ActorThread, *arguments: Any) -> None:
        interrupt(station, *arguments)
        Dropped.looked.release()

    with alone(tmp_path):
        actor = Drops.remote()
        get(actor.ready.remote())
        monkeypatch.setattr(ActorThread, "interrupt", look)
        ref = actor.drops.remote()
        assert Dropped.dropping.wait(20)
        assert cancel(ref)
        with pytest.raises(CancelledError):
            get(ref)
        try:
            get(actor.ready.remote(), timeout=20)
        finally:
            Dropped.told.set()
        del actor, ref


@pytest.mark.parametrize(("caller", "bears"), [("actorrpc.rpc.rref", False), ("__main__", True)])
def test_what_makes_a_named_tuple_is_interrupted_only_where_its_caller_may_be(
    caller: str, bears: bool
) -> None:
    # The constructor of a named tuple is in a module of its own, which `collections` invents.
    pair: Any = namedtuple("pair", ["a", "b"])
    found: list[bool] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals["__name__"] == "namedtuple_pair":
            found.append(_bears_interruption(frame))

    made = eval("lambda pair: pair(1, 2)", {"__name__": caller})
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        made(pair)
    finally:
        sys.setprofile(before)
    assert found == [bears]
