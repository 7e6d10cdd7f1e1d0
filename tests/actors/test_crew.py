"""The threads of actors: all of them end with their actor."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import actorrpc
from actorrpc.actors.crew import Station
from tests.actors.alone import alone


@actorrpc.remote
class Idle:
    """Does nothing."""


def test_a_thread_that_starts_when_its_actor_has_ended_ends_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Station] = []
    arrived = threading.Event()

    def hold(station: Station) -> None:
        held.append(station)
        arrived.set()

    with alone(tmp_path):
        monkeypatch.setattr(Station, "start", hold)
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
