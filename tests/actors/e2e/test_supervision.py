"""Actors that are killed, exit, come back and are looked for: on the embedded cluster and in a group."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc import actors
from actorrpc.errors import (
    ActorDiedError,
    CancelledError,
    NameTakenError,
    PendingCallsLimitExceeded,
    RpcTimeoutError,
    UnknownActorError,
)
from tests.actors.e2e.kit import open_gate, until
from tests.actors.e2e.mortals import Fragile, Parent, Slow, error_of

pytestmark = pytest.mark.usefixtures("place")


def test_a_constructor_error_reaches_every_call() -> None:
    fragile = Fragile.remote(-1)
    for ref in (fragile.step.remote(), fragile.pid.remote()):
        error = error_of(ref)
        assert isinstance(error, ActorDiedError)
        assert type(error.cause) is ValueError
        assert error.__cause__ is error.cause
        assert "a count cannot be negative" in str(error)
        assert error.maybe_executed is False
    assert not actors.is_alive(fragile)
    assert isinstance(actors.monitor(fragile).wait(10), ActorDiedError)


def test_calls_before_it_is_there() -> None:
    fragile = Fragile.remote()
    assert actorrpc.get([fragile.step.remote() for _ in range(200)]) == list(range(1, 201))


def test_kill_is_for_good(gate: Path) -> None:
    fragile = Fragile.options(max_restarts=-1).remote()
    fired: list[Any] = []
    actors.monitor(fragile).add_done_callback(lambda done: fired.append(done.value()))
    running = fragile.block.remote(str(gate))
    waiting = fragile.step.remote()
    actorrpc.get(actors.ready(fragile))
    actors.kill(fragile)
    for ref in (running, waiting, fragile.step.remote()):
        error = error_of(ref)
        assert isinstance(error, ActorDiedError)
        assert "it was killed with kill()" in str(error)
    until(lambda: fired)
    assert len(fired) == 1
    assert not actors.is_alive(fragile)
    # Where it shared a worker, its thread is still at the gate.
    descriptor = os.open(gate, os.O_RDWR)
    os.close(descriptor)


def test_kill_and_restart() -> None:
    fragile = Fragile.options(max_restarts=2).remote(5)
    for _ in range(3):
        assert actorrpc.get([fragile.step.remote(), fragile.step.remote()]) == [6, 7]
        actors.kill(fragile, no_restart=False)
    error = error_of(fragile.step.remote())
    assert isinstance(error, ActorDiedError)
    assert "max_restarts is 2" in str(error)


def test_exit_is_for_good() -> None:
    fragile = Fragile.options(max_restarts=-1).remote()
    error = error_of(fragile.leave.remote())
    assert isinstance(error, ActorDiedError)
    assert "exit_actor()" in str(error)
    assert isinstance(error_of(fragile.step.remote()), ActorDiedError)


def test_names() -> None:
    fragile = Fragile.options(name="one").remote(1)
    assert actorrpc.get(actors.get_actor("one").step.remote()) == 2
    with pytest.raises(NameTakenError):
        Fragile.options(name="one").remote()
    again = Fragile.options(name="one", get_if_exists=True).remote(7)
    assert actorrpc.get(again.step.remote()) == 3
    parent = Parent.remote()
    with pytest.raises(NameTakenError, match="'one'"):
        actorrpc.get(parent.make.remote(name="one"))
    actors.kill(fragile)
    with pytest.raises(UnknownActorError):
        actors.get_actor("one")


def test_a_weak_handle_does_not_keep_it() -> None:
    strong = Fragile.options(name="weak").remote()
    weak = actors.get_actor("weak")
    assert actorrpc.get(weak.step.remote()) == 1
    ended = actors.monitor(weak)
    del strong
    gc.collect()
    assert "its last handle is gone" in str(ended.wait(30))
    assert isinstance(error_of(weak.step.remote()), ActorDiedError)


def test_a_handle_that_travelled_keeps_it() -> None:
    fragile = Fragile.remote()
    holder = Fragile.remote()
    ended = actors.monitor(fragile)
    kept = holder.echo.remote([fragile])
    del fragile
    gc.collect()
    (back,) = actorrpc.get(kept)
    assert actorrpc.get(back.step.remote()) == 1
    assert not ended.done()
    del back, kept
    gc.collect()
    assert isinstance(ended.wait(30), ActorDiedError)


def test_owned_actors_end_with_their_creator_and_detached_ones_do_not() -> None:
    parent = Parent.remote()
    owned = actorrpc.get(parent.make.remote())
    detached = actorrpc.get(parent.make.remote(lifetime="detached", name="stays"))
    assert actorrpc.get([owned.step.remote(), detached.step.remote()]) == [11, 11]
    actors.kill(parent)
    found = actors.get_actor("stays")
    assert actorrpc.get(found.step.remote()) == 12
    actors.kill(found)
    assert isinstance(error_of(found.step.remote()), ActorDiedError)


def test_deadlines_and_cancellation_while_it_is_made(gate: Path) -> None:
    blocked = Slow.remote(str(gate))
    refs = [blocked.step.remote() for _ in range(4)]
    assert actorrpc.actors.cancel(refs[1])
    error = error_of(refs[1])
    assert isinstance(error, CancelledError)
    assert error.maybe_executed is False
    late = blocked.step.options(timeout=0.05).remote()
    error = error_of(late)
    assert isinstance(error, RpcTimeoutError)
    assert error.maybe_executed is False
    open_gate(gate)
    assert actorrpc.get([refs[0], refs[2], refs[3]]) == [1, 2, 3]


def test_max_pending_calls(gate: Path) -> None:
    fragile = Fragile.options(max_pending_calls=2).remote()
    refs = [fragile.block.remote(str(gate)), fragile.step.remote()]
    with pytest.raises(PendingCallsLimitExceeded, match="max_pending_calls=2"):
        fragile.step.remote()
    open_gate(gate)
    assert actorrpc.get(refs) == ["go", 1]
    assert actorrpc.get(fragile.step.remote()) == 2
