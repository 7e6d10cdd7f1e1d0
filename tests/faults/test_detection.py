"""Detection of workers that are killed, stopped, cut off or busy: membership events, and errors of calls.

Detection times are printed (`-s`) and not asserted; only the tests' limits bound them. The nightly part prints percentiles.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from actorrpc import rpc
from actorrpc.errors import PeerDiedError
from actorrpc.transport.failure_detector import process_state
from actorrpc.wire import keys
from tests.actors.e2e.kit import until
from tests.faults.hosts import Signals
from tests.harness.proxy import FaultProxy
from tests.ranks import Died, rpc_group, run_group

_nightly = pytest.mark.skipif(os.environ.get("ACTORRPC_NIGHTLY") != "1", reason="ACTORRPC_NIGHTLY is not 1")
_never_set = threading.Event()
_running = threading.Semaphore(0)


def _note_running() -> None:
    _running.release()


def _block() -> None:
    """Report to worker0 that this call runs, and never return."""
    rpc.rpc_sync("worker0", _note_running)
    _never_set.wait()


def _hold_the_gil(seconds: float) -> str:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "was busy"


def _pid(name: str) -> int:
    return next(row.pid for row in rpc.workers() if row.name == name)


class _Changes:
    """Membership events of worker0, with their times."""

    def __init__(self) -> None:
        self._events: list[tuple[str, str, float]] = []
        rpc.on_member_change(self)
        until(lambda: all(row.last_seen is not None for row in rpc.workers()))

    def __call__(self, worker: rpc.WorkerInfo, old: str, new: str, reason: str) -> None:
        self._events.append((worker.name, new, time.monotonic()))

    def of(self, name: str) -> list[str]:
        return [state for worker, state, _ in self._events if worker == name]

    def when(self, name: str, state: str) -> float:
        return next(at for worker, new, at in self._events if (worker, new) == (name, state))


def _kills(rank: int, world_size: int) -> list[float]:
    """Kill all other workers, one after the other; return how long the calls to each took to fail."""
    if rank:
        _never_set.wait()
    changes = _Changes()
    took = []
    for name in [f"worker{i}" for i in range(1, world_size)]:
        calls = [rpc.rpc_async(name, _block, timeout=0) for _ in range(4)]
        for _ in calls:
            _running.acquire()
        pid = _pid(name)
        begun = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        errors = [call.exception() for call in calls]
        took.append(time.monotonic() - begun)
        assert {type(error) for error in errors} == {PeerDiedError}
        assert all(getattr(error, "maybe_executed", None) for error in errors)
        until(lambda name=name: changes.of(name)[-1:] == ["dead"])
    return took


def _kill_round(victims: int, transport: str, **options: float) -> list[float]:
    found = rpc_group(
        _kills,
        victims + 1,
        options={"transport": transport, **options},
        may_die=range(1, victims + 1),
        timeout=100,
    )
    assert found[1:] == [Died(-signal.SIGKILL)] * victims
    took: list[float] = found[0]
    return took


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_killed_worker_is_declared_dead_and_all_calls_to_it_fail(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With these settings, only the end of the sockets can reveal the death: heartbeat and grace time are too long.
    monkeypatch.setenv("ACTORRPC_SESSION_GRACE", "600")
    took = _kill_round(3, transport, heartbeat=600.0)
    print(f"killed ({transport}): {_percentiles(took)}")


def _silence(rank: int, _: int, path: str, given: dict[str, Any], behind: dict[str, Any], busy: float) -> Any:
    """Worker1 is stopped, worker2 is busy, and worker3 is behind a relay that stops forwarding (only if ``behind``)."""
    options = given | behind if rank == 3 else given
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=4,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}/store", **options),
    )
    if rank in (1, 3):
        _never_set.wait()
    if rank == 2:
        rpc.shutdown()
        return None
    changes = _Changes()
    lost = ["worker1", "worker3"] if behind else ["worker1"]
    calls = {name: [rpc.rpc_async(name, _block, timeout=0) for _ in range(2)] for name in lost}
    for _each in range(2 * len(lost)):
        _running.acquire()
    begun = time.monotonic()
    os.kill(_pid("worker1"), signal.SIGSTOP)
    Signals(Path(path)).say("stall")
    held = rpc.rpc_async("worker2", _hold_the_gil, (busy,), timeout=0)
    assert held.wait() == "was busy"
    took = {}
    for name in lost:
        errors = [call.exception() for call in calls[name]]
        assert {type(error) for error in errors} == {PeerDiedError}
        assert all("silent" in str(error) and getattr(error, "maybe_executed", None) for error in errors)
        until(lambda name=name: changes.of(name)[-2:] == ["suspect", "dead"])
        took[name] = changes.when(name, "dead") - begun
    until(lambda: changes.of("worker2")[-2:] == ["suspect", "alive"])
    assert rpc.rpc_sync("worker2", abs, (-1,)) == 1
    for name in ("worker1", "worker3"):
        os.kill(_pid(name), signal.SIGKILL)
    rpc.shutdown()
    return took


def _silence_round(directory: Path, transport: str, heartbeat: float | None, busy: float) -> dict[str, float]:
    given = {"transport": transport} | ({} if heartbeat is None else {"heartbeat": heartbeat})
    arguments = (str(directory), given)
    for left in directory.iterdir():  # of an earlier round
        left.unlink()
    if transport == "tcp":
        signals = Signals(directory)
        with FaultProxy() as proxy:
            over = threading.Event()

            def stall_on_demand() -> None:
                while not signals.said("stall") and not over.wait(0.005):
                    pass
                proxy.stall()

            thread = threading.Thread(target=stall_on_demand)
            thread.start()
            try:
                found = run_group(_silence, 4, *arguments, dict(proxy.options), busy, may_die=(1, 3))
            finally:
                over.set()
                thread.join()
    else:
        found = run_group(_silence, 4, *arguments, {}, busy, may_die=(1, 3))
    keys.sweep()
    killed = Died(-signal.SIGKILL)
    assert found[1:] == [killed, None, killed]
    took: dict[str, float] = found[0]
    return took


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_silent_workers_are_declared_dead_and_a_busy_worker_is_not_with_heartbeat_0_2(
    tmp_path: Path, transport: str
) -> None:
    print(f"silent, heartbeat 0.2 s ({transport}): {_silence_round(tmp_path, transport, 0.2, 2.5)}")


@_nightly
def test_silent_workers_are_declared_dead_and_a_busy_worker_is_not_with_default_heartbeat(
    tmp_path: Path,
) -> None:
    print(f"silent, default: {_silence_round(tmp_path, 'tcp', None, 5.0)}")


def _pauses(rank: int, world_size: int) -> None:
    """Stop worker1 three times: no call is lost, and it is never declared dead."""
    if rank:
        return
    changes = _Changes()
    pid = _pid("worker1")
    for _ in range(3):
        os.kill(pid, signal.SIGSTOP)
        until(lambda: process_state(pid) == "stopped")
        calls = [rpc.rpc_async("worker1", abs, (-i,)) for i in range(20)]
        until(lambda: changes.of("worker1")[-1:] == ["suspect"])
        assert not any(call.done() for call in calls)
        os.kill(pid, signal.SIGCONT)
        assert [call.wait() for call in calls] == list(range(20))
        until(lambda: changes.of("worker1")[-1] == "alive")
    states = changes.of("worker1")
    assert states == ["suspect", "alive"] * (len(states) // 2)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_worker_stopped_for_a_while_is_suspect_then_alive_and_loses_no_call(transport: str) -> None:
    rpc_group(_pauses, 2, options={"heartbeat": 0.1, "heartbeat_misses": 200, "transport": transport})


def _percentiles(times: list[float]) -> str:
    times = sorted(times)
    middle, late = times[len(times) // 2], times[min(len(times) - 1, int(len(times) * 0.99))]
    return f"n={len(times)} p50={middle * 1e3:.1f} ms p99={late * 1e3:.1f} ms max={times[-1] * 1e3:.1f} ms"


@_nightly
@pytest.mark.limit(900)
def test_detection_times_of_killed_and_silent_workers_are_measured(tmp_path: Path) -> None:
    for transport in ("unix", "tcp"):
        killed = [each for _ in range(20) for each in _kill_round(10, transport)]
        print(f"killed ({transport}): {_percentiles(killed)}")
    for heartbeat, rounds in ((0.2, 20), (None, 5)):
        found = [
            _silence_round(tmp_path, "tcp", heartbeat, 5.0 if heartbeat is None else 2.0)
            for _ in range(rounds)
        ]
        for name, fault in (("worker1", "stopped"), ("worker3", "black hole")):
            print(
                f"{fault}, heartbeat {heartbeat or 'default'}: {_percentiles([each[name] for each in found])}"
            )
