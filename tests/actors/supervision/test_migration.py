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
from actorrpc.actors.host.executor import ActorExecutor
from actorrpc.actors.host.mailbox import Mailbox
from actorrpc.actors.host.registry import ActorRegistry
from actorrpc.actors.supervision.migration import hand_over
from actorrpc.agent import hooks
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
    close, refuse = Mailbox.close_if_idle, ActorExecutor.refuse

    def held_up(mailbox: Mailbox) -> bool:
        closed = close(mailbox)
        if closed and not ending.is_set():
            ending.set()
            while not (_entered.wait(0.01) or refused.wait(0.01)):
                pass
        return closed

    def refuses(executor: ActorExecutor, *given: Any) -> None:
        refused.set()
        refuse(executor, *given)

    actor = Counter.remote()
    assert actorrpc.get(actor.add.remote()) == 1
    monkeypatch.setattr(Mailbox, "close_if_idle", held_up)
    monkeypatch.setattr(ActorExecutor, "refuse", refuses)
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
    held: list[Any] = []
    forget, reach, refuse = ActorRegistry.forget, hooks.reach, ActorExecutor.refuse

    def held_up(registry: ActorRegistry, hosted: HostedActor) -> None:
        ending.set()
        assert refused.wait(20)
        forget(registry, hosted)

    def winds_up(point: str, *given: Any) -> None:
        if point == "actor.ending":
            assert refused.wait(20)
        reach(point, *given)

    def refuses(*given: Any) -> None:
        held.append(given)
        refused.set()

    actor = Counter.remote()
    assert actorrpc.get(actor.add.remote()) == 1
    monkeypatch.setattr(ActorRegistry, "forget", held_up)
    monkeypatch.setattr(hooks, "reach", winds_up)
    monkeypatch.setattr(ActorExecutor, "refuse", refuses)
    moved = _move(runtime)
    assert ending.wait(20)
    call = actor.add.remote()
    moved.wait(20)
    monkeypatch.undo()
    for given in held:
        refuse(*given)
    assert actorrpc.get(call, timeout=20) == 2
    held.clear()
    del actor, call, given


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
