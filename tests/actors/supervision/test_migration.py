"""Handing over: a call that comes in whichever moment of its actor's end runs once, at the new place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc.actors.context import Runtime
from actorrpc.actors.host.actor import HostedActor
from actorrpc.actors.host.envelope import Envelope
from actorrpc.actors.host.registry import ActorRegistry
from actorrpc.actors.supervision.migration import hand_over
from actorrpc.agent.executor import Executor
from actorrpc.errors import RpcError
from tests.actors.alone import alone

_entered = threading.Event()
_gate = threading.Event()


@actorrpc.remote
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count

    def add_behind_the_gate(self) -> int:
        _entered.set()
        _gate.wait(20)
        return self.add()

    def checkpoint(self) -> int:
        return self.count

    def restore(self, count: int) -> None:
        self.count = count


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    _entered.clear()
    _gate.clear()
    with alone(tmp_path) as here:
        yield here


def _move(runtime: Runtime) -> Any:
    """Have the actors of this worker end and begin again, as if they went to another one; return a future for the end."""
    me = runtime.agent.record
    return hand_over(me.rank, me.incarnation, "it is moved").future


def test_a_call_that_comes_when_the_actor_was_seen_idle_runs_once_elsewhere(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look whether anything runs, and the end of the mailbox, are one step."""
    ending, refused = threading.Event(), threading.Event()
    end, refuse = HostedActor._end_now, HostedActor._refuse_gone

    def held_up(hosted: HostedActor) -> None:
        if not ending.is_set():
            ending.set()
            while not (_entered.wait(0.01) or refused.wait(0.01)):
                pass
        end(hosted)

    def refuses(hosted: HostedActor, entry: Envelope) -> None:
        refused.set()
        refuse(hosted, entry)

    actor = Counter.remote()
    assert actorrpc.get(actor.add.remote()) == 1
    monkeypatch.setattr(HostedActor, "_end_now", held_up)
    monkeypatch.setattr(HostedActor, "_refuse_gone", refuses)
    moved = _move(runtime)
    assert ending.wait(20)
    call = actor.add_behind_the_gate.remote()
    moved.wait(20)
    _gate.set()
    assert actorrpc.get(call, timeout=20) == 2
    del actor, call


def test_a_call_that_finds_the_mailbox_closed_is_refused_as_not_executed(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its refusal is made by another thread, and may come after the actor's last step."""
    ending, refused = threading.Event(), threading.Event()
    held: list[tuple[HostedActor, Envelope]] = []
    forget, wind_up, refuse = ActorRegistry.forget, HostedActor._wind_up, HostedActor._refuse_gone

    def held_up(registry: ActorRegistry, hosted: HostedActor) -> None:
        ending.set()
        assert refused.wait(20)
        forget(registry, hosted)

    def winds_up(hosted: HostedActor) -> None:
        assert refused.wait(20)
        wind_up(hosted)

    def refuses(hosted: HostedActor, entry: Envelope) -> None:
        held.append((hosted, entry))
        refused.set()

    actor = Counter.remote()
    assert actorrpc.get(actor.add.remote()) == 1
    monkeypatch.setattr(ActorRegistry, "forget", held_up)
    monkeypatch.setattr(HostedActor, "_wind_up", winds_up)
    monkeypatch.setattr(HostedActor, "_refuse_gone", refuses)
    moved = _move(runtime)
    assert ending.wait(20)
    call = actor.add.remote()
    moved.wait(20)
    monkeypatch.undo()
    for hosted, entry in held:
        hosted.over.wait(20)
        refuse(hosted, entry)
    assert actorrpc.get(call, timeout=20) == 2
    held.clear()
    del actor, call, hosted, entry


def test_a_worker_has_something_to_do_until_it_has_refused_a_call_of_an_actor_that_is_gone(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is drained ends when nothing runs there; who is not answered by then cannot know that nothing ran."""
    seen: list[bool] = []
    refuse = Executor.refuse

    def refuses(executor: Executor, conn: Any, frame: Any, error: RpcError, **options: Any) -> None:
        seen.append(frame.id in runtime.agent.self_peer.running)
        refuse(executor, conn, frame, error, **options)

    actor = Counter.remote()
    assert actorrpc.get(actor.add.remote()) == 1
    _move(runtime).wait(20)
    monkeypatch.setattr(Executor, "refuse", refuses)
    assert actorrpc.get(actor.add.remote(), timeout=20) == 2  # the handle believed it to be where it was
    assert seen == [True]
    del actor
