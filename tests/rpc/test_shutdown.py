"""Shutdown, graceful and forced, and Ctrl-C in every wait."""

from __future__ import annotations

import operator
import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actorrpc import rpc
from actorrpc._stacks import top_frame
from actorrpc.errors import NotInitializedError, RpcTimeoutError, ShutdownError
from tests.actors.e2e.kit import open_gate, pass_gate, until
from tests.layers import rest_is_slow
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


# -- graceful and forced -------------------------------------------------------------------------------


def _serve_in_shutdown(rank: int, world_size: int) -> None:
    """Workers that wait in shutdown serve the calls of worker0 and of each other."""
    if rank:
        return
    barrier = rpc.api.group().barrier  # type: ignore[attr-defined]
    until(lambda: len(barrier._reached.get(0, ())) == world_size - 1)
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
    return _hold("is leaving")


def _is_asked_to_leave(rank: int, _: int, store: str, gate: str) -> None:
    options = rpc.RpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=None, rpc_backend_options=options)
    if rank:
        group = rpc.api.group()  # type: ignore[attr-defined]
        wait_for_all = group.wait_for_all

        def waiting(stage: int, timeout: float) -> None:
            wait_for_all(stage, timeout)
            if not stage:
                _open("is leaving")

        group.wait_for_all = waiting
        open_gate(Path(gate))
        _hold("leave")
    else:
        pass_gate(Path(gate))
        assert rpc.rpc_sync("worker1", _leave_as_asked) == "is leaving"
    rpc.shutdown()


def _shut_down_in_a_finally(rank: int, world_size: int, store: str) -> list[str]:
    _join(rank, world_size, store)
    assert rpc.rpc_sync(f"worker{1 - rank}", operator.add, (1, 1)) == 2
    try:
        try:
            raise KeyError("the program's")
        finally:
            rpc.shutdown()
    except KeyError as error:
        return [each.name for each in traceback.extract_tb(error.__traceback__)]


def test_shutdown_in_a_finally_block_keeps_the_traceback_of_the_exception(tmp_path: Path) -> None:
    found = run_group(_shut_down_in_a_finally, 2, str(tmp_path / "store"))
    assert found == 2 * [["_shut_down_in_a_finally"]]


def test_a_call_that_makes_its_worker_shut_down_is_answered(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    run_group(_is_asked_to_leave, 2, str(tmp_path / "store"), str(tmp_path / "gate"))


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
        got: list[BaseException] = []

        def wait() -> None:
            try:
                rpc.rpc_sync("worker1", _hold, ("force",), timeout=0)
            except BaseException as error:
                got.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        pending = rpc.api.group().agent.peer("worker1").pending  # type: ignore[attr-defined]
        until(lambda: len(pending) == 2)
        _open("force")
        assert mine.wait() == "force"
        rpc.shutdown(graceful=False)
        thread.join()
        with pytest.raises(ShutdownError) as caught:
            future.wait()
        assert caught.value.maybe_executed
        assert [type(error) for error in got] == [ShutdownError]
        assert callbacks == ["called"]
        Path(f"{store}forced").touch()
    else:
        until(Path(f"{store}forced").exists)
        _open("force")
        rpc.shutdown(graceful=False)


def test_shutdown_may_be_repeated_time_out_or_be_forced(tmp_path: Path) -> None:
    run_group(_states, 2, str(tmp_path / "store"))


# -- Ctrl-C -------------------------------------------------------------------------------------------------


def _interrupt_in(function: Callable[[], Any], inside: tuple[str, ...]) -> None:
    """Run `function` on the main thread, and send Ctrl-C when it is in one of the functions `inside` of actorrpc."""
    main = threading.main_thread().ident
    assert main is not None
    caught = threading.Event()

    def interrupt() -> None:
        while not caught.is_set():
            frame = top_frame(main)
            while frame is not None:
                if frame.f_code.co_name in inside and "actorrpc" in frame.f_code.co_filename:
                    signal.pthread_kill(main, signal.SIGINT)
                    return
                frame = frame.f_back
            caught.wait(0.002)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        function()
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("was not interrupted")
    finally:
        caught.set()
        thread.join()


def _interrupts(rank: int, world_size: int, store: str) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if rank == 0:
        # In init_rpc, before the other worker has joined.
        _interrupt_in(lambda: _join(0, 2, f"{store}0"), ("poll", "_wait", "_apart"))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not rpc.api.is_initialized()
    _join(rank, world_size, f"{store}1", lane=False, heartbeat=30.0)
    if rank == 0:
        agent = rpc.api.group().agent  # type: ignore[attr-defined]
        pid = agent.peer("worker1").record.pid
        waits = ("_park", "park", "reading", "wait_for_room")
        _interrupt_in(lambda: rpc.rpc_sync("worker1", _hold, ("c",), timeout=0), waits)
        future = rpc.rpc_async("worker1", _hold, ("c",), timeout=0)
        _interrupt_in(future.wait, waits)
        assert not future.done()
        _interrupt_in(lambda: rpc.rpc_sync("worker0", _hold, ("c",), timeout=0), waits)
        rref = rpc.remote("worker1", _hold, ("c",), timeout=0)
        _interrupt_in(rref.to_here, waits)
        own = rpc.remote("worker0", _hold, ("c",), timeout=0)
        _interrupt_in(own.to_here, waits)
        _interrupt_in(own.local_value, waits)

        # Blocked in sending; the connection still works afterwards.
        large = torch.ones(16 << 20)
        os.kill(pid, signal.SIGSTOP)
        _interrupt_in(lambda: rpc.rpc_sync("worker1", torch.neg, (large,), timeout=0), ("_wait_writable",))
        _interrupt_in(
            lambda: rpc.rpc_async("worker1", torch.neg, (large,), timeout=0).wait(), ("_wait_writable",)
        )
        os.kill(pid, signal.SIGCONT)
        assert torch.equal(rpc.rpc_sync("worker1", torch.neg, (large,)), -large)

        # Waiting for room in the window.
        peer = agent.peer("worker1")
        peer.window.limit = 1
        held = rpc.rpc_async("worker1", _first, ("c", torch.ones(64)), timeout=0)
        peer.window.charged += 1
        _interrupt_in(lambda: rpc.rpc_sync("worker1", operator.add, (1, 1), timeout=0), waits)
        peer.window.charged -= 1
        peer.window.limit = 64 << 20

        rpc.rpc_sync("worker1", _open, ("c",))
        _open("c")
        assert future.wait() == "c"
        assert held.wait() == "c"
        assert rref.to_here() == own.to_here() == "c"

        # In the barrier of shutdown; this worker is shut down nevertheless.
        _interrupt_in(rpc.shutdown, waits)
        assert not rpc.api.is_initialized()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        Path(f"{store}done").touch()
    else:
        until(Path(f"{store}done").exists)
        rpc.shutdown()


def _first(name: str, _: torch.Tensor) -> str:
    return _hold(name)


@pytest.mark.slow
@pytest.mark.parametrize("transport", rest_is_slow(["unix", "tcp"]))
def test_ctrl_c_ends_every_wait(tmp_path: Path, transport: str) -> None:
    run_group(_interrupts, 2, str(tmp_path / "store"), env={"ACTORRPC_TRANSPORT": transport})
