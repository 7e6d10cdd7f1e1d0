"""Migration of actors: a call that arrives at any moment of the move runs once, at the new place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc.actors.context import Runtime
from actorrpc.actors.host.executor import ActorExecutor
from actorrpc.actors.host.mailbox import Mailbox
from actorrpc.actors.supervision.supervisor import hand_over
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
    """End the actors of this worker and restart them, as if they moved to another worker; return a future of the end."""
    me = runtime.agent.record
    return hand_over(me.rank, me.incarnation, "it is moved").future


def test_a_call_that_arrives_as_the_idle_actor_is_closed_runs_once_on_the_new_actor(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The idle check and the closing of the mailbox are atomic."""
    ending, refused = threading.Event(), threading.Event()
    close, refuse = Mailbox.close_if_idle, ActorExecutor.refuse

    def delayed(mailbox: Mailbox) -> bool:
        closed = close(mailbox)
        if closed and not ending.is_set():
            ending.set()
            while not (_entered.wait(0.01) or refused.wait(0.01)):
                pass
        return closed

    def note_refusal(executor: ActorExecutor, *given: Any) -> None:
        refused.set()
        refuse(executor, *given)

    actor = Counter.remote()
    assert actorrpc.get(actor.add.remote()) == 1
    monkeypatch.setattr(Mailbox, "close_if_idle", delayed)
    monkeypatch.setattr(ActorExecutor, "refuse", note_refusal)
    moved = _move(runtime)
    assert ending.wait(20)
    call = actor.add_behind_the_gate.remote()
    moved.wait(20)
    _gate.set()
    assert actorrpc.get(call, timeout=20) == 2
    del actor, call


def test_a_call_counts_as_running_on_its_worker_until_it_was_refused(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drained worker ends when nothing runs; a caller without a refusal by then would not know that its call has not run."""
    seen: list[bool] = []
    refuse = Executor.refuse

    def note_refusal(executor: Executor, conn: Any, frame: Any, error: RpcError, **options: Any) -> None:
        seen.append(frame.id in runtime.agent.self_peer.running)
        refuse(executor, conn, frame, error, **options)

    actor = Counter.remote()
    assert actorrpc.get(actor.add.remote()) == 1
    _move(runtime).wait(20)
    monkeypatch.setattr(Executor, "refuse", note_refusal)
    assert actorrpc.get(actor.add.remote(), timeout=20) == 2  # the handle still has the old location
    assert seen == [True]
    del actor
