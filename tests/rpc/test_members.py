"""workers() and on_member_change(): who is there, how they are, and word of every change; shutdown goes by them."""

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
from actorrpc.errors import NotInitializedError, RpcTimeoutError, WrongTypeError
from actorrpc.group import group as group_module
from actorrpc.wire import keys
from tests.actors.e2e.kit import until
from tests.cluster.drive import cluster, workers
from tests.ranks import Died, rpc_group, run_group


class _Heard:
    """A callback that keeps what it is told, and can be waited for."""

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
        """Return what a worker became, one after the other; on a loaded machine it may be suspect in between."""
        mine = [(old, new) for worker, old, new in self.changes if worker == name]
        assert [old for old, _ in mine] == ["alive", *(new for _, new in mine[:-1])][: len(mine)]
        return [new for _, new in mine]


def _states() -> dict[str, str]:
    return {row.name: row.state for row in actorrpc.workers()}


def _row(name: str) -> rpc.WorkerState:
    return next(row for row in rpc.workers() if row.name == name)


def _pid(name: str) -> int:
    return _row(name).pid


_for_ever = threading.Event()
_may_leave = threading.Event()


def _let_leave() -> None:
    _may_leave.set()


# -- a fixed group ------------------------------------------------------------------------------------


def _fixed(rank: int, world_size: int) -> None:
    if rank == 4:
        _may_leave.wait()  # a worker that calls shutdown gets in touch with the others
        return
    if rank:
        _for_ever.wait()
    rows = actorrpc.workers()
    assert [(row.name, row.rank, row.state) for row in rows] == [(f"worker{i}", i, "alive") for i in range(5)]
    assert rows[0].last_seen == 0.0
    assert {row.last_seen for row in rows[1:]} == {None}  # no contact yet
    assert rows[0].pid == os.getpid()
    assert {row.host for row in rows} == {socket.gethostname()}
    assert rpc.rpc_sync("worker1", os.getpid) == rows[1].pid
    seen = _row("worker1").last_seen
    assert seen is not None

    heard, removed, other = _Heard(), _Heard(), _Heard()
    actorrpc.on_member_change(heard)
    remove = actorrpc.on_member_change(removed)
    remove()
    remove()

    def raises(worker: Any, *_: Any) -> None:
        other(worker, *_)
        if worker.name != "worker4":  # whose end is heard of, too
            assert rpc.rpc_sync("worker4", operator.add, (1, 1)) == 2  # calls may be made
        raise ValueError("of a user")

    rpc.on_member_change(raises)
    os.kill(rows[1].pid, signal.SIGKILL)  # there was contact
    until(lambda: heard.of("worker1")[-1:] == ["dead"])
    os.kill(rows[2].pid, signal.SIGKILL)  # there was none
    until(lambda: heard.of("worker2")[-1:] == ["dead"])
    assert [row.state == "dead" for row in rpc.workers()] == [False, True, True, False, False]
    assert _row("worker1").last_seen is not None

    os.kill(rows[3].pid, signal.SIGSTOP)
    until(lambda: heard.of("worker3")[-1:] == ["suspect"])
    assert _states()["worker3"] == "suspect"
    os.kill(rows[3].pid, signal.SIGCONT)
    until(lambda: heard.of("worker3")[-1:] == ["alive"])
    os.kill(rows[3].pid, signal.SIGKILL)
    until(lambda: heard.of("worker3")[-1:] == ["dead"])
    assert heard.of("worker3").count("dead") == 1
    assert all(heard.reasons)
    until(lambda: len(other.changes) == len(heard.changes))
    assert other.changes[:5] == heard.changes[:5]
    assert removed.changes == []
    assert all(name.startswith("actorrpc-") for name in heard.threads | other.threads)
    with pytest.raises(WrongTypeError, match="callable"):
        rpc.on_member_change(3)  # type: ignore[arg-type]
    rpc.rpc_sync("worker4", _let_leave)


@pytest.mark.prints("a listener for changes of members raised.*ValueError: of a user$")
def test_a_fixed_group() -> None:
    # Stopped for a while is not dead: 50 heartbeats are the limit here, and 2 make it suspect.
    died = [Died(-signal.SIGKILL)] * 3
    options = {"heartbeat": 0.2, "heartbeat_misses": 50}
    assert rpc_group(_fixed, 5, options=options, may_die=[1, 2, 3]) == [None, *died, None]


def test_without_a_group() -> None:
    for function in (rpc.workers, lambda: rpc.on_member_change(print)):
        with pytest.raises(NotInitializedError):
            function()


# -- a group that workers join and leave ----------------------------------------------------------------


def _meet(path: str, name: str) -> None:
    with open(os.path.join(path, name), "w"):
        pass


def _wait(path: str, name: str) -> None:
    with open(os.path.join(path, name)) as file:
        file.read()


def _ends(heard: _Heard) -> list[tuple[str, str]]:
    """Who has ended, and how; on a crowded machine one may have been suspect before."""
    return [(name, new) for name, _, new in heard.changes if new in ("left", "dead")]


def _dynamic(rank: int, _: int, path: str) -> None:
    options = rpc.RpcBackendOptions(init_method=f"file://{path}/store")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=None, rpc_backend_options=options)
    if rank:
        _meet(path, f"{rank} is here")
        _wait(path, f"{rank} leaves")
        rpc.shutdown()
        return
    for other in (1, 2):
        _wait(path, f"{other} is here")
    assert _states() == {f"worker{i}": "alive" for i in range(3)}
    heard = _Heard()
    rpc.on_member_change(heard)
    until(lambda: all(row.last_seen is not None for row in rpc.workers()))
    _meet(path, "1 leaves")
    until(lambda: _ends(heard))
    os.kill(_pid("worker2"), signal.SIGKILL)
    until(lambda: len(_ends(heard)) == 2)
    assert _ends(heard) == [("worker1", "left"), ("worker2", "dead")], (heard.changes, heard.reasons)
    assert _states() == {"worker0": "alive", "worker1": "left", "worker2": "dead"}
    rpc.shutdown()


def test_a_dynamic_group(tmp_path: Path) -> None:
    for name in ("1 is here", "2 is here", "1 leaves", "2 leaves"):
        os.mkfifo(tmp_path / name)
    assert run_group(_dynamic, 3, str(tmp_path), may_die=[2])[0] is None
    keys.sweep()


# -- the embedded cluster ----------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_of_the_embedded_cluster() -> None:
    with actorrpc.init():
        heard = _Heard()
        actorrpc.on_member_change(heard)
        with workers(2) as (first, second):
            assert _states() == {"driver": "alive", first: "alive", second: "alive"}
            assert rpc.rpc_sync(first, _states) == _states()  # the driver is asked
            assert rpc.rpc_sync(first, _watch_here)
            os.kill(_pid(second), signal.SIGKILL)
            until(lambda: heard.changes)
            assert heard.changes == [(second, "alive", "dead")]
            assert _states()[second] == "dead"
            until(lambda: rpc.rpc_sync(first, _heard_here) == [(second, "alive", "dead")])
            report = cluster().report(first)
            cluster().release(first)
            report.wait(30)
            until(lambda: len(heard.changes) == 2)
            assert heard.changes[1] == (first, "alive", "left")


_here = _Heard()


def _watch_here() -> bool:
    rpc.on_member_change(_here)
    until(lambda: all(row.last_seen is not None for row in rpc.workers()))
    return True


def _heard_here() -> list[tuple[str, str, str]]:
    return _here.changes


# -- shutdown -------------------------------------------------------------------------------------------


def _others_still_work(rank: int, world_size: int, path: str) -> None:
    """A suspect is waited for while somebody else works; when it is back, it is a member like all others."""
    group_module.PATIENCE_S = 0.2  # type: ignore[misc]
    if rank == 0:
        rpc.rpc_sync("worker1", operator.add, (1, 1))
        rpc.rpc_sync("worker2", operator.add, (1, 1))
    if rank == 2:
        # Worker1 waits in shutdown; worker0, whom it asks, is stopped for a while.
        heard = _Heard()
        rpc.on_member_change(heard)
        until(lambda: _row("worker0").last_seen is not None)
        os.kill(_pid("worker0"), signal.SIGSTOP)
        until(lambda: heard.of("worker0")[-1:] == ["suspect"])
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker0", operator.add, (1, 1), timeout=2)
        assert rpc.rpc_sync("worker1", rpc.is_initialized)
        os.kill(_pid("worker0"), signal.SIGCONT)
        assert rpc.rpc_sync("worker0", operator.add, (1, 1)) == 2
        assert rpc.rpc_sync("worker1", rpc.is_initialized)


@pytest.mark.slow
def test_a_suspect_comes_back_while_others_wait_for_all(tmp_path: Path) -> None:
    options = {"heartbeat": 0.1, "heartbeat_misses": 1000}
    assert rpc_group(_others_still_work, 3, str(tmp_path), options=options) == [None, None, None]
