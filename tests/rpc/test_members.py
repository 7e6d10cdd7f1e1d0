"""workers() and on_member_change(): who is there, how they are, and word of every change; shutdown goes by them."""

from __future__ import annotations

import dataclasses
import logging
import operator
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc import rpc
from actorrpc.errors import NotInitializedError, RpcTimeoutError, WrongTypeError
from actorrpc.group import group as group_module
from actorrpc.transport.failure_detector import process_state
from actorrpc.wire import keys
from tests.cluster.drive import cluster, workers
from tests.ranks import Died, rpc_group, run_group


def _until(condition: Callable[[], Any]) -> None:
    """Wait for something that nothing announces; bounded by the test's limit."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)


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
    _until(lambda: heard.of("worker1")[-1:] == ["dead"])
    os.kill(rows[2].pid, signal.SIGKILL)  # there was none
    _until(lambda: heard.of("worker2")[-1:] == ["dead"])
    assert [row.state == "dead" for row in rpc.workers()] == [False, True, True, False, False]
    assert _row("worker1").last_seen is not None

    os.kill(rows[3].pid, signal.SIGSTOP)
    _until(lambda: heard.of("worker3")[-1:] == ["suspect"])
    assert _states()["worker3"] == "suspect"
    os.kill(rows[3].pid, signal.SIGCONT)
    _until(lambda: heard.of("worker3")[-1:] == ["alive"])
    os.kill(rows[3].pid, signal.SIGKILL)
    _until(lambda: heard.of("worker3")[-1:] == ["dead"])
    assert heard.of("worker3").count("dead") == 1
    assert all(heard.reasons)
    _until(lambda: len(other.changes) == len(heard.changes))
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
    _until(lambda: all(row.last_seen is not None for row in rpc.workers()))
    _meet(path, "1 leaves")
    _until(lambda: _ends(heard))
    os.kill(_pid("worker2"), signal.SIGKILL)
    _until(lambda: len(_ends(heard)) == 2)
    assert _ends(heard) == [("worker1", "left"), ("worker2", "dead")], (heard.changes, heard.reasons)
    assert _states() == {"worker0": "alive", "worker1": "left", "worker2": "dead"}
    rpc.shutdown()


def test_a_dynamic_group(tmp_path: Path) -> None:
    for name in ("1 is here", "2 is here", "1 leaves", "2 leaves"):
        os.mkfifo(tmp_path / name)
    assert run_group(_dynamic, 3, str(tmp_path), may_die=[2])[0] is None
    keys.sweep()


def _incarnations(rank: int, _: int, path: str) -> Any:
    options = rpc.RpcBackendOptions(init_method=f"file://{path}/store")
    if rank == 2:
        _wait(path, "worker1 is dead")
    # The third process takes the place of the second one, under its name.
    rpc.init_rpc(
        "worker1" if rank else "worker0", rank=min(rank, 1), world_size=None, rpc_backend_options=options
    )
    if rank:
        _meet(path, f"{rank} is here")
        _wait(path, f"{rank} leaves")
        rpc.shutdown()
        return _notes
    _wait(path, "1 is here")
    heard = _Heard()
    rpc.on_member_change(heard)
    first = _pid("worker1")
    assert rpc.rpc_sync("worker1", _note, ("to the old one",)) == first
    os.kill(first, signal.SIGSTOP)
    _until(lambda: process_state(first) == "stopped")
    # Behind what its socket holds, they lie in our outbox when it dies.
    # Sockets of TCP grow to some 10 MB.
    count = 400 if os.environ.get("ACTORRPC_TRANSPORT") == "tcp" else 40
    lost = [rpc.rpc_async("worker1", _note, (f"lost {i}", b"x" * 50_000)) for i in range(count)]
    os.kill(first, signal.SIGKILL)
    errors = [each.exception() for each in lost]
    assert {type(error) for error in errors} == {actorrpc.PeerDiedError}
    assert [getattr(errors[i], "maybe_executed", None) for i in (0, -1)] == [True, False]
    _until(lambda: heard.changes == [("worker1", "alive", "dead")])
    _meet(path, "worker1 is dead")
    _wait(path, "2 is here")
    second = rpc.rpc_sync("worker1", _note, ("to the new one",))
    assert second != first
    assert sorted((row.pid, row.state) for row in rpc.workers() if row.name == "worker1") in (
        [(second, "alive")],
        sorted([(first, "dead"), (second, "alive")]),
    )
    _meet(path, "2 leaves")
    _until(lambda: heard.changes[1:] == [("worker1", "alive", "left")])
    rpc.shutdown()
    return None


_notes: list[str] = []


def _note(text: str, _: bytes = b"") -> int:
    _notes.append(text)
    return os.getpid()


def test_a_new_incarnation_gets_nothing_that_was_meant_for_the_old(tmp_path: Path) -> None:
    for name in ("1 is here", "1 leaves", "2 is here", "2 leaves", "worker1 is dead"):
        os.mkfifo(tmp_path / name)
    found = run_group(_incarnations, 3, str(tmp_path), may_die=[1])
    keys.sweep()
    assert found == [None, Died(-signal.SIGKILL), ["to the new one"]]


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
            _until(lambda: heard.changes)
            assert heard.changes == [(second, "alive", "dead")]
            assert _states()[second] == "dead"
            _until(lambda: rpc.rpc_sync(first, _heard_here) == [(second, "alive", "dead")])
            report = cluster().report(first)
            cluster().release(first)
            report.wait(30)
            _until(lambda: len(heard.changes) == 2)
            assert heard.changes[1] == (first, "alive", "left")


_here = _Heard()


def _watch_here() -> bool:
    rpc.on_member_change(_here)
    _until(lambda: all(row.last_seen is not None for row in rpc.workers()))
    return True


def _heard_here() -> list[tuple[str, str, str]]:
    return _here.changes


# -- shutdown -------------------------------------------------------------------------------------------


def _cut(name: str) -> None:
    """Have connections to a member fail from now on, with time-outs, as behind a wall."""
    agent = rpc.api._require().agent  # type: ignore[attr-defined]
    peer, dial = agent.peer(name), agent.connector.dial

    def late(to: Any, *rest: Any) -> Any:
        if to is peer:
            raise TimeoutError("timed out")
        return dial(to, *rest)

    agent.connector.dial = late


def _unreachable_leader(rank: int, world_size: int) -> None:
    """Worker1 cannot reach worker0, whom all ask at the end; worker0 can reach it."""
    if rank == 1:
        _cut("worker0")


@pytest.mark.slow
def test_a_time_out_on_the_way_to_the_first_worker_is_not_its_death() -> None:
    rpc_group(_unreachable_leader, 3)


def _apart(rank: int, world_size: int) -> None:
    """Worker1 and worker0 can reach worker2, but not each other."""
    logging.getLogger("actorrpc.group").addHandler(_Warnings())
    group_module.PATIENCE_S = 0.5  # type: ignore[misc]
    if rank < 2:
        _cut(f"worker{1 - rank}")


class _Warnings(logging.Handler):
    """Prints warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage())


@pytest.mark.slow
def test_two_workers_that_cannot_reach_each_other_both_end() -> None:
    rpc_group(_apart, 3)


def _suspect_at_the_end(rank: int, world_size: int, name: str) -> bool | None:
    """One is stopped and everybody else is in shutdown: nobody waits for it."""
    group_module.PATIENCE_S = 0.5  # type: ignore[misc]
    if f"worker{rank}" == name:
        _for_ever.wait()
    if rank == 1:
        rpc.rpc_sync(name, operator.add, (1, 1))
        os.kill(_pid(name), signal.SIGSTOP)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.prints(
    r"^shutdown does not wait for 'worker[02]' any longer: (it is suspect$|cannot call to watch it: .* cannot be reached)"
)
def test_shutdown_does_not_wait_for_a_suspect_when_all_others_have_come(number: int) -> None:
    expected: list[Any] = [True, True, True]
    expected[number] = Died(-signal.SIGKILL)

    options = {"heartbeat": 0.2, "heartbeat_misses": 1000}
    found = rpc_group(_stopped, 3, f"worker{number}", options=options, may_die=[number])
    assert found == expected


def _stopped(rank: int, world_size: int, name: str) -> bool:
    """As above; the last one that works ends what is stopped when it has shut down itself."""
    victim = _pid(name)
    _suspect_at_the_end(rank, world_size, name)
    if rank == 1:
        rpc.shutdown()
        os.kill(victim, signal.SIGKILL)
    return True


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
        _until(lambda: _row("worker0").last_seen is not None)
        os.kill(_pid("worker0"), signal.SIGSTOP)
        _until(lambda: heard.of("worker0")[-1:] == ["suspect"])
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


def test_states_are_plain_data() -> None:
    assert [field.name for field in dataclasses.fields(rpc.WorkerState)] == [
        *("name", "rank", "state", "last_seen", "host", "pid"),
    ]
