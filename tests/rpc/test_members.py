"""workers() and on_member_change(): states of workers and reports of changes."""

from __future__ import annotations

import operator
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc import rpc
from actorrpc.errors import NotInitializedError, WrongTypeError
from actorrpc.wire import keys
from tests.actors.e2e.kit import open_gate, pass_gate, until
from tests.cluster.drive import cluster, workers
from tests.ranks import Died, rpc_group, run_group


class _Listener:
    """A callback that records the reported changes."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, str, str]] = []
        self.reasons: list[str] = []
        self.threads: set[str] = set()

    def __call__(self, worker: rpc.WorkerInfo, old: str, new: str, reason: str) -> None:
        assert isinstance(worker, rpc.WorkerInfo)
        self.threads.add(threading.current_thread().name)
        self.reasons.append(reason)
        self.changes.append((worker.name, old, new))

    def of(self, name: str) -> list[str]:
        """Return the successive new states of a worker; on a loaded machine, it may be suspect in between."""
        mine = [(old, new) for worker, old, new in self.changes if worker == name]
        assert [old for old, _ in mine] == ["alive", *(new for _, new in mine[:-1])][: len(mine)]
        return [new for _, new in mine]


def _states() -> dict[str, str]:
    return {row.name: row.state for row in actorrpc.workers()}


def _row(name: str) -> rpc.WorkerState:
    return next(row for row in rpc.workers() if row.name == name)


def _pid(name: str) -> int:
    return _row(name).pid


_never_set = threading.Event()
_may_leave = threading.Event()


def _let_leave() -> None:
    _may_leave.set()


def _fixed(rank: int, world_size: int) -> None:
    if rank == 4:
        _may_leave.wait()  # calling shutdown would contact the other workers
        return
    if rank:
        _never_set.wait()
    rows = actorrpc.workers()
    assert [(row.name, row.rank, row.state) for row in rows] == [(f"worker{i}", i, "alive") for i in range(5)]
    assert rows[0].last_seen == 0.0
    assert {row.last_seen for row in rows[1:]} == {None}  # no contact yet
    assert rows[0].pid == os.getpid()
    assert {row.host for row in rows} == {socket.gethostname()}
    assert rpc.rpc_sync("worker1", os.getpid) == rows[1].pid
    seen = _row("worker1").last_seen
    assert seen is not None

    changes_seen, removed, other = _Listener(), _Listener(), _Listener()
    actorrpc.on_member_change(changes_seen)
    remove = actorrpc.on_member_change(removed)
    remove()
    remove()

    def raises(worker: Any, *_: Any) -> None:
        other(worker, *_)
        if worker.name != "worker4":  # the end of worker4 is reported as well
            assert rpc.rpc_sync("worker4", operator.add, (1, 1)) == 2  # calls may be made
        raise ValueError("of a user")

    rpc.on_member_change(raises)
    os.kill(rows[1].pid, signal.SIGKILL)  # a worker with a connection
    until(lambda: changes_seen.of("worker1")[-1:] == ["dead"])
    os.kill(rows[2].pid, signal.SIGKILL)  # a worker without a connection
    until(lambda: changes_seen.of("worker2")[-1:] == ["dead"])
    assert [row.state == "dead" for row in rpc.workers()] == [False, True, True, False, False]
    assert _row("worker1").last_seen is not None

    os.kill(rows[3].pid, signal.SIGSTOP)
    until(lambda: changes_seen.of("worker3")[-1:] == ["suspect"])
    assert _states()["worker3"] == "suspect"
    os.kill(rows[3].pid, signal.SIGCONT)
    until(lambda: changes_seen.of("worker3")[-1:] == ["alive"])
    os.kill(rows[3].pid, signal.SIGKILL)
    until(lambda: changes_seen.of("worker3")[-1:] == ["dead"])
    assert changes_seen.of("worker3").count("dead") == 1
    assert all(changes_seen.reasons)
    until(lambda: len(other.changes) == len(changes_seen.changes))
    assert other.changes[:5] == changes_seen.changes[:5]
    assert removed.changes == []
    assert all(name.startswith("actorrpc-") for name in changes_seen.threads | other.threads)
    with pytest.raises(WrongTypeError, match="callable"):
        rpc.on_member_change(3)  # type: ignore[arg-type]
    rpc.rpc_sync("worker4", _let_leave)


@pytest.mark.prints("a listener for changes of members raised.*ValueError: of a user$")
def test_workers_and_member_changes_of_a_fixed_group_follow_kills_and_stops() -> None:
    # A stopped worker is suspect after 2 heartbeats, and dead after 50.
    died = [Died(-signal.SIGKILL)] * 3
    options = {"heartbeat": 0.2, "heartbeat_misses": 50}
    assert rpc_group(_fixed, 5, options=options, may_die=[1, 2, 3]) == [None, *died, None]


def test_workers_and_on_member_change_raise_without_a_group() -> None:
    for function in (rpc.workers, lambda: rpc.on_member_change(print)):
        with pytest.raises(NotInitializedError):
            function()


def _ends(changes_seen: _Listener) -> list[tuple[str, str]]:
    """Return the reported ends; changes to and from suspect are left out."""
    return [(name, new) for name, _, new in changes_seen.changes if new in ("left", "dead")]


def _dynamic(rank: int, _: int, path: str) -> None:
    options = rpc.RpcBackendOptions(init_method=f"file://{path}/store")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=None, rpc_backend_options=options)
    if rank:
        open_gate(Path(path, f"{rank} is here"))
        pass_gate(f"{path}/{rank} leaves")
        rpc.shutdown()
        return
    for other in (1, 2):
        pass_gate(f"{path}/{other} is here")
    assert _states() == {f"worker{i}": "alive" for i in range(3)}
    changes_seen = _Listener()
    rpc.on_member_change(changes_seen)
    until(lambda: all(row.last_seen is not None for row in rpc.workers()))
    open_gate(Path(path, "1 leaves"))
    until(lambda: _ends(changes_seen))
    os.kill(_pid("worker2"), signal.SIGKILL)
    until(lambda: len(_ends(changes_seen)) == 2)
    assert _ends(changes_seen) == [("worker1", "left"), ("worker2", "dead")], (
        changes_seen.changes,
        changes_seen.reasons,
    )
    assert _states() == {"worker0": "alive", "worker1": "left", "worker2": "dead"}
    rpc.shutdown()


def test_member_changes_of_a_dynamic_group_tell_left_workers_from_dead_ones(tmp_path: Path) -> None:
    for name in ("1 is here", "2 is here", "1 leaves", "2 leaves"):
        os.mkfifo(tmp_path / name)
    assert run_group(_dynamic, 3, str(tmp_path), may_die=[2])[0] is None
    keys.sweep()


@pytest.mark.slow
def test_member_changes_of_the_embedded_cluster_reach_driver_and_workers() -> None:
    with actorrpc.init():
        changes_seen = _Listener()
        actorrpc.on_member_change(changes_seen)
        with workers(2) as (first, second):
            assert _states() == {"driver": "alive", first: "alive", second: "alive"}
            assert rpc.rpc_sync(first, _states) == _states()  # queries the driver
            assert rpc.rpc_sync(first, _watch_here)
            os.kill(_pid(second), signal.SIGKILL)
            until(lambda: changes_seen.changes)
            assert changes_seen.changes == [(second, "alive", "dead")]
            assert _states()[second] == "dead"
            until(lambda: rpc.rpc_sync(first, _heard_here) == [(second, "alive", "dead")])
            report = cluster().report(first)
            cluster().release(first)
            report.wait(30)
            until(lambda: len(changes_seen.changes) == 2)
            assert changes_seen.changes[1] == (first, "alive", "left")


_here = _Listener()


def _watch_here() -> bool:
    rpc.on_member_change(_here)
    until(lambda: all(row.last_seen is not None for row in rpc.workers()))
    return True


def _heard_here() -> list[tuple[str, str, str]]:
    return _here.changes
