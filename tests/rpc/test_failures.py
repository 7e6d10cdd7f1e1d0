"""Calls to workers that are killed, stopped, busy or forked, and calls that time out while they are sent."""

from __future__ import annotations

import ctypes
import operator
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from actorrpc import rpc
from actorrpc.errors import PeerDiedError, RpcTimeoutError
from tests.actors.e2e.kit import until
from tests.harness.kill_points import kill_at
from tests.layers import rest_is_slow
from tests.migration.rows import row
from tests.ranks import Died, rpc_group

_never_set = threading.Event()
_entered: dict[str, threading.Semaphore] = {}
_table = threading.Lock()


def _count(name: str) -> threading.Semaphore:
    with _table:
        return _entered.setdefault(name, threading.Semaphore(0))


def _notify_and_block(to: str, name: str) -> None:
    """Notify another worker that this call runs, and never return."""
    rpc.rpc_sync(to, _notify, (name,))
    _never_set.wait()


def _block() -> None:
    _never_set.wait()


def _notify(name: str) -> None:
    _count(name).release()


def _pid(worker: str) -> int:
    return next(row.pid for row in rpc.workers() if row.name == worker)


def _kill(worker: str, with_signal: int = signal.SIGKILL) -> None:
    os.kill(_pid(worker), with_signal)


def _await_stop(worker: str) -> None:
    until(lambda: Path(f"/proc/{_pid(worker)}/stat").read_text().rpartition(")")[2].split()[0] == "T")


def _is_blocked_in_send(worker: str) -> bool:
    conn = rpc.api.group().agent.peer(worker).conn  # type: ignore[attr-defined]
    return conn is not None and conn.writer.blocked.since is not None


def _running_there() -> None:
    future = rpc.rpc_async("worker1", _notify_and_block, ("worker0", "one"))
    futures = [rpc.rpc_async("worker1", _block) for _ in range(5)]
    _count("one").acquire()
    _kill("worker1")
    with pytest.raises(PeerDiedError, match="worker1") as caught:
        future.wait()
    assert caught.value.maybe_executed is True
    assert isinstance(caught.value, ConnectionError)
    for each in futures:
        with pytest.raises(PeerDiedError):
            each.wait()
    with pytest.raises(PeerDiedError) as caught:
        rpc.rpc_sync("worker1", operator.add, (1, 1))
    assert caught.value.maybe_executed is False
    with pytest.raises(PeerDiedError):
        rpc.rpc_async("worker1", operator.add, (1, 1))
    with pytest.raises(PeerDiedError):
        rpc.remote("worker1", operator.add, (1, 1))


def _never_called() -> None:
    """The first call to a worker that has died before raises PeerDiedError."""
    os.kill(_pid("worker2"), signal.SIGKILL)
    with pytest.raises(PeerDiedError) as caught:
        rpc.rpc_sync("worker2", operator.add, (1, 1))
    assert caught.value.maybe_executed is False


def _while_fetching() -> None:
    rref = rpc.remote("worker3", _notify_and_block, ("worker0", "three"))
    _count("three").acquire()
    peer = rpc.api.group().agent.peer("worker3")  # type: ignore[attr-defined]
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(rref.to_here), pool.submit(rref.rpc_sync().anything)]
        until(lambda: len(peer.pending) == 3)
        _kill("worker3")
    assert [type(each.exception()) for each in waits] == [PeerDiedError] * 2
    with pytest.raises(PeerDiedError):
        rref.to_here()


def _during_a_large_tensor() -> None:
    assert rpc.rpc_sync("worker4", operator.add, (1, 1)) == 2
    _kill("worker4", signal.SIGSTOP)
    _await_stop("worker4")
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(rpc.rpc_sync, "worker4", torch.neg, (torch.zeros(8 << 20),), timeout=0)
        until(lambda: _is_blocked_in_send("worker4"))
        assert rpc.rpc_sync("worker5", operator.add, (1, 1)) == 2  # other workers are not affected
        _kill("worker4")
    assert isinstance(sent.exception(), PeerDiedError)


def _fork_that_lives_on(directory: str) -> None:
    """The fork of a worker does not hide the worker's death, and cannot use RPC."""
    child = rpc.rpc_sync("worker5", _fork, (directory,))
    future = rpc.rpc_async("worker5", _notify_and_block, ("worker0", "five"))
    _count("five").acquire()
    assert rpc.rpc_sync("worker5", operator.add, (1, 1)) == 2  # the parent still works after the fork
    _kill("worker5")
    with pytest.raises(PeerDiedError):
        future.wait()
    assert os.path.exists(f"/proc/{child}")
    with open(os.path.join(directory, "end"), "wb"):
        pass
    with open(os.path.join(directory, "said")) as said:
        words = said.read()
    assert words == "NotInitializedError False"


def _fork(directory: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        try:
            rpc.rpc_sync("worker0", operator.add, (1, 1))
            words = "no error"
        except BaseException as error:
            words = f"{type(error).__name__} {rpc.api.is_initialized()}"
        rpc.shutdown()
        with open(os.path.join(directory, "end"), "rb") as end:
            end.read()
        with open(os.path.join(directory, "said"), "w") as said:
            said.write(words)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def _victims(rank: int, world_size: int, directory: str) -> str:
    if rank == 0:
        _running_there()
        _never_called()
        _while_fetching()
        _during_a_large_tensor()
        _fork_that_lives_on(directory)
        return "survived"
    _never_set.wait()
    return "not killed"


@pytest.mark.parametrize("transport", rest_is_slow(["unix", "tcp"]))
@row("a peer dies", "from-torch-rpc")
def test_calls_to_killed_workers_raise_peer_died_error(tmp_path: Path, transport: str) -> None:
    os.mkfifo(tmp_path / "end")
    os.mkfifo(tmp_path / "said")
    options = {"lane": False, "transport": transport}
    results = rpc_group(_victims, 6, str(tmp_path), options=options, may_die=range(1, 6))
    assert results == ["survived", *([Died(-signal.SIGKILL)] * 5)]


def _first_dies(rank: int, world_size: int) -> None:
    """Worker0 coordinates the shutdown, and dies when all workers have called it."""
    if rank == 0:
        kill_at("shutdown.together", action="kill").start()


@row("rpc.shutdown()", "from-torch-rpc")
def test_shutdown_completes_although_the_coordinating_worker_dies() -> None:
    assert rpc_group(_first_dies, 4, may_die=[0]) == [Died(-signal.SIGKILL), None, None, None]


def _hold_the_gil(seconds: float) -> str:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "was busy"


def _stopped_and_busy(rank: int, world_size: int) -> None:
    if rank == 1:
        _never_set.wait()
    if rank == 0:
        # Five heartbeats of 0.2 s pass without an answer, but the process is running.
        assert rpc.rpc_sync("worker2", _hold_the_gil, (2.5,)) == "was busy"
        assert rpc.rpc_sync("worker2", operator.add, (1, 1)) == 2
        future = rpc.rpc_async("worker1", _notify_and_block, ("worker0", "stopped"), timeout=0)
        _count("stopped").acquire()
        _kill("worker1", signal.SIGSTOP)
        with pytest.raises(PeerDiedError, match="silent") as caught:
            future.wait()
        assert caught.value.maybe_executed
        _kill("worker1")


@pytest.mark.slow
def test_a_stopped_worker_is_declared_dead_and_a_busy_one_is_not() -> None:
    rpc_group(_stopped_and_busy, 3, options={"heartbeat": 0.2}, may_die=[1])


def _large_timeouts(rank: int, world_size: int) -> None:
    if rank:
        return
    large = torch.arange(6 << 20, dtype=torch.float32)  # 24 MiB
    assert torch.equal(rpc.rpc_sync("worker1", torch.neg, (large,)), -large)
    for _ in range(3):
        _kill("worker1", signal.SIGSTOP)
        _await_stop("worker1")
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", torch.neg, (large,), timeout=0.2)
        _kill("worker1", signal.SIGCONT)
        assert rpc.rpc_sync("worker1", operator.add, (1, 1)) == 2
    assert torch.equal(rpc.rpc_sync("worker1", torch.neg, (large,)), -large)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_message_that_is_given_up_half_sent_leaves_the_connection_usable(transport: str) -> None:
    rpc_group(_large_timeouts, 2, options={"lane": False, "transport": transport, "heartbeat": 30.0})
