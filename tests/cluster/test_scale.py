"""scale() and drain(): actors move from a drained worker, restart, or end."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

import actorrpc
from actorrpc import rpc
from actorrpc.cluster import ClusterContext, drain, init, scale
from actorrpc.errors import (
    ActorDiedError,
    ActorUnavailableError,
    ConfigError,
    RpcTimeoutError,
    UnknownWorkerError,
)
from tests.cluster.drive import until
from tests.cluster.joiners import is_there
from tests.cluster.remotes import Counter, Fixed

pytestmark = pytest.mark.limit(90)


@pytest.fixture(autouse=True)
def _test_leaves_nothing() -> None:
    """Disable the leak check of single tests: threads and workers of the shared cluster start and end between tests."""


@pytest.fixture(scope="module")
def driver() -> Iterator[ClusterContext]:
    with init(num_cpus=4) as context:
        yield context


@pytest.mark.slow
def test_drain_moves_actors_with_checkpoints_after_running_calls_have_ended(driver: ClusterContext) -> None:
    first, second = scale(2)
    assert is_there(first)
    assert is_there(second)
    moving = Counter.options(worker=first, checkpoint_every=1000).remote(10)
    fixed = Fixed.options(worker=first).remote()
    assert actorrpc.get(moving.where.remote()) == first
    assert actorrpc.get(fixed.where.remote()) == first
    assert [actorrpc.get(moving.add.remote()) for _ in range(3)] == [11, 12, 13]
    running = fixed.wait.remote()
    calls = [moving.add.remote() for _ in range(50)]

    with pytest.raises(RpcTimeoutError, match=f"drain of {first!r}.*have not finished within 0.5 s"):
        drain(first, timeout=0.5)
    assert is_there(first)  # the running call is not interrupted
    actorrpc.get(fixed.open.remote())
    drain(first, timeout=60)
    assert actorrpc.get(running) == "finished"
    assert actorrpc.get(calls) == list(range(14, 64))
    assert actorrpc.get(moving.add.remote()) == 64  # the handle finds the moved actor
    assert actorrpc.get(moving.where.remote()) not in (first, "driver")
    with pytest.raises(ActorDiedError):
        actorrpc.get(fixed.where.remote())
    assert not is_there(first)
    assert scale(1) == [second]
    assert scale(0) == []
    until(lambda: not is_there(second))


@pytest.mark.prints("supervision group 'fixed': it has given up")
def test_drain_restarts_or_ends_actors_that_cannot_move(driver: ClusterContext) -> None:
    worker, other = scale(2, labels={"pool": "a"})
    loose, once = _created_on(worker, Fixed, max_restarts=1), _created_on(worker, Fixed)
    pinned = Fixed.options(worker=worker, max_restarts=1).remote()
    child = _created_on(worker, Counter, 10, max_restarts=1)
    fixed = Counter.options(worker=worker, max_restarts=1).remote(10)
    moved, stuck = actorrpc.supervise([child]), actorrpc.supervise([fixed], name="fixed")
    assert actorrpc.get([pinned.where.remote(), fixed.where.remote()]) == [worker] * 2
    assert actorrpc.get(child.add.remote()) == 11
    given_up = stuck.monitor()

    drain(worker)
    reason = rf"its worker {worker!r} is drained, and it cannot move"
    with pytest.raises(ActorDiedError, match=rf"max_restarts is 0.*{reason}") as found:
        actorrpc.get(once.where.remote())
    assert found.value.worker == worker
    with pytest.raises(ActorDiedError, match=rf"not restarted: worker= has put it there.*{reason}"):
        actorrpc.get(pinned.where.remote())
    with pytest.raises(ActorDiedError, match=rf"not restarted: worker= has put it there.*{reason}"):
        actorrpc.get(fixed.where.remote())
    assert re.search(rf"'fixed': it has given up.*{reason}", str(given_up.wait(60)), re.DOTALL)
    # Actors with restarts start on the other worker, without state or with their last checkpoint.
    assert _where(loose) == other
    assert _where(child) == other
    assert actorrpc.get(child.add.remote()) == 12
    moved.end()


def _created_on(worker: str, cls: Any, *args: Any, **options: Any) -> Any:
    """Create actors until one is placed on this worker; return it."""
    misplaced = []
    while True:
        handle = cls.options(labels={"pool": "a"}, **options).remote(*args)
        if actorrpc.get(handle.where.remote()) == worker:
            return handle
        misplaced.append(handle)


def _where(handle: Any) -> str:
    """Return the worker of an actor, once the actor is alive."""
    while True:
        try:
            return str(actorrpc.get(handle.where.remote()))
        except ActorUnavailableError:
            actorrpc.get(actorrpc.ready(handle))


def test_drain_and_scale_reject_wrong_workers_and_numbers(driver: ClusterContext) -> None:
    with pytest.raises(ConfigError, match="other workers"):
        drain("driver")
    with pytest.raises(UnknownWorkerError):
        drain("nobody")
    with pytest.raises(ConfigError, match="number of workers"):
        scale(-1)
    with pytest.raises(ConfigError, match="timeout"):
        scale(1, timeout=0)
    handle = Fixed.remote()
    where = actorrpc.get(handle.where.remote())
    with pytest.raises(ConfigError, match=r"is for the driver.*a process of an actor"):
        rpc.rpc_sync(where, scale, args=(1,))
    assert os.getpid() == rpc.rpc_sync("driver", os.getpid)
