"""Shutdown, graceful and forced, and Ctrl-C in every wait."""

from __future__ import annotations

import operator
import os
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from actorrpc import rpc
from actorrpc.agent import hooks
from actorrpc.errors import NotInitializedError, RpcTimeoutError, ShutdownError
from tests.actors.e2e.kit import open_gate, pass_gate, until
from tests.ranks import rpc_group, run_group

_gates: dict[str, threading.Event] = {}
_table = threading.Lock()


def _gate(name: str) -> threading.Event:
    with _table:
        return _gates.setdefault(name, threading.Event())


def _hold(name: str) -> str:
    _gate(name).wait()
    return name


def _open(name: str) -> None:
    _gate(name).set()


def _join(rank: int, world_size: int, store: str, **options: Any) -> None:
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{store}", **options),
    )


_reached: set[str] = set()  # kill points of this worker's shutdown


def _has_reached(point: str) -> bool:
    return point in _reached


def _serve_in_shutdown(rank: int, world_size: int) -> None:
    """Workers that wait in shutdown serve the calls of worker0 and of each other."""
    if rank:
        hooks.watch(lambda point, _: _reached.add(point))
        return
    for name in ("worker1", "worker2"):
        until(lambda name=name: rpc.rpc_sync(name, _has_reached, ("shutdown.called",)))
    for i in range(100):
        assert rpc.rpc_sync(f"worker{1 + i % 2}", operator.add, (i, 1)) == i + 1
    assert rpc.rpc_sync("worker1", rpc.rpc_sync, ("worker2", operator.add, (1, 2))) == 3
    rref = rpc.remote("worker1", torch.ones, (3,))
    assert torch.equal(rref.to_here(), torch.ones(3))


def test_a_worker_waiting_in_shutdown_serves_calls() -> None:
    rpc_group(_serve_in_shutdown, 3)


def _leave_as_asked() -> str:
    """Make this worker call shutdown, and return while it is leaving."""
    _open("leave")
    until(lambda: _has_reached("shutdown.called"))
    return "is leaving"


def _is_asked_to_leave(rank: int, _: int, store: str, gate: str) -> None:
    options = rpc.RpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=None, rpc_backend_options=options)
    if rank:
        hooks.watch(lambda point, _: _reached.add(point))
        open_gate(Path(gate))
        _hold("leave")
    else:
        pass_gate(Path(gate))
        assert rpc.rpc_sync("worker1", _leave_as_asked) == "is leaving"
    rpc.shutdown()


def test_a_call_that_makes_its_worker_shut_down_is_answered(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    run_group(_is_asked_to_leave, 2, str(tmp_path / "store"), str(tmp_path / "gate"))


def _shut_down_in_a_finally() -> None:
    try:
        raise KeyError("the program's")
    finally:
        rpc.shutdown()


def _states(rank: int, world_size: int, store: str) -> None:
    # shutdown before init_rpc does nothing. After shutdown, calls raise, and init_rpc works again.
    rpc.shutdown()
    for attempt in range(2):
        _join(rank, world_size, f"{store}{attempt}")
        assert rpc.rpc_sync(f"worker{1 - rank}", operator.add, (1, 1)) == 2
        rpc.shutdown()
        rpc.shutdown()
        with pytest.raises(NotInitializedError):
            rpc.rpc_sync("worker0", operator.add, (1, 1))

    # In a `finally` block, shutdown keeps the traceback of the program's exception.
    _join(rank, world_size, f"{store}finally")
    with pytest.raises(KeyError) as caught:
        _shut_down_in_a_finally()
    assert [each.name for each in traceback.extract_tb(caught.tb)] == ["_states", "_shut_down_in_a_finally"]

    # A graceful shutdown times out because the other worker does not call it; this worker is shut down nevertheless.
    _join(rank, world_size, f"{store}late")
    if rank == 0:
        with pytest.raises(RpcTimeoutError, match="worker1"):
            rpc.shutdown(timeout=0.2)
        assert not rpc.api.is_initialized()
        Path(f"{store}gave up").touch()
    else:
        until(Path(f"{store}gave up").exists)
        rpc.shutdown()  # the only other worker has left

    # Forced: running calls fail.
    _join(rank, world_size, f"{store}force")
    if rank == 0:
        future = rpc.rpc_async("worker1", _hold, ("force",), timeout=0)
        mine = rpc.rpc_async("worker0", _hold, ("force",), timeout=0)
        callbacks: list[str] = []
        future.add_done_callback(lambda _: callbacks.append("called"))
        with ThreadPoolExecutor() as pool:
            blocked = pool.submit(rpc.rpc_sync, "worker1", _hold, ("force",), timeout=0)
            pending = rpc.api.group().agent.peer("worker1").pending  # type: ignore[attr-defined]
            until(lambda: len(pending) == 2)
            _open("force")
            assert mine.wait() == "force"
            rpc.shutdown(graceful=False)
        with pytest.raises(ShutdownError) as ended:
            future.wait()
        assert ended.value.maybe_executed
        assert isinstance(blocked.exception(), ShutdownError)
        assert callbacks == ["called"]
        Path(f"{store}forced").touch()
    else:
        until(Path(f"{store}forced").exists)
        _open("force")
        rpc.shutdown(graceful=False)


def test_shutdown_may_be_repeated_time_out_be_forced_or_follow_an_exception(tmp_path: Path) -> None:
    run_group(_states, 2, str(tmp_path / "store"))


def _interrupt(pid: int) -> None:
    """Send Ctrl-C when the process has begun to wait."""
    threading.Event().wait(0.1)
    os.kill(pid, signal.SIGINT)


def _ctrl_c_ends(wait: Callable[[], Any]) -> None:
    def interrupted() -> None:
        rpc.rpc_async("worker2", _interrupt, (os.getpid(),))
        wait()

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def _hold_until(path: str, *_: Any) -> str:
    until(Path(path).exists)
    return "held"


def _interrupts(rank: int, world_size: int, path: str) -> None:
    if rank:
        until(Path(f"{path}done").exists)
        return
    # Blocked in sending; the connection still works afterwards.
    large = torch.ones(16 << 20)
    pid = rpc.rpc_sync("worker1", os.getpid)
    os.kill(pid, signal.SIGSTOP)
    _ctrl_c_ends(lambda: rpc.rpc_sync("worker1", torch.neg, (large,), timeout=0))
    _ctrl_c_ends(lambda: rpc.rpc_async("worker1", torch.neg, (large,), timeout=0).wait())
    os.kill(pid, signal.SIGCONT)
    assert torch.equal(rpc.rpc_sync("worker1", torch.neg, (large,)), -large)

    futures = [rpc.rpc_async(to, _hold_until, (path,), timeout=0) for to in ("worker0", "worker1")]
    rrefs = [rpc.remote(to, _hold_until, (path,), timeout=0) for to in ("worker0", "worker1")]
    for to, future, rref in zip(("worker0", "worker1"), futures, rrefs, strict=True):
        _ctrl_c_ends(lambda to=to: rpc.rpc_sync(to, _hold_until, (path,), timeout=0))
        _ctrl_c_ends(future.wait)
        assert not future.done()
        _ctrl_c_ends(rref.to_here)
    _ctrl_c_ends(rrefs[0].local_value)

    # Waiting for room in the window: the thread for calls of worker1 is occupied, so no more calls start.
    ballast = torch.zeros(64 << 10)
    futures += [rpc.rpc_async("worker1", _hold_until, (path, ballast), timeout=0) for _ in range(4)]
    _ctrl_c_ends(lambda: rpc.rpc_sync("worker1", operator.add, (ballast, 1), timeout=0))

    Path(path).touch()
    assert {future.wait() for future in futures} == {rref.to_here() for rref in rrefs} == {"held"}
    # In the barrier of shutdown; this worker is shut down nevertheless.
    _ctrl_c_ends(rpc.shutdown)
    assert not rpc.is_initialized()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    Path(f"{path}done").touch()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_ctrl_c_ends_every_wait(tmp_path: Path, transport: str) -> None:
    options = {"lane": False, "heartbeat": 30.0, "transport": transport, "max_threads": 2, "window": 1 << 20}
    rpc_group(_interrupts, 3, str(tmp_path / "open"), options=options)
