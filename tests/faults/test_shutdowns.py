"""``shutdown`` ends in time in every state of the group and in every mode, and raises the right error.

Each cell is a group of three workers: worker0 and worker1 shut down, and worker2 has the fault. Cells run at the same time. The
tests' limits assert that they end; the times are recorded as figures. The promise is 30 s for a graceful shutdown whose
missing workers are all dead or unreachable, 2 s for a forced one, and 1 s after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc import rpc
from actorrpc._stacks import top_frame
from actorrpc.errors import ActorError, PeerDiedError, RpcError, ShutdownError
from actorrpc.futures import Future
from actorrpc.wire import keys
from tests.actors.e2e.kit import until
from tests.faults.figures import NIGHTLY, note
from tests.faults.hosts import Signals
from tests.harness.proxy import FaultProxy
from tests.ranks import run_group

STATES = ("idle", "calls", "killed", "stopped", "cut off", "left", "passive")
MODES = ("graceful", "timeout", "forced", "ctrl-c")
_KILLED_BY_THE_CELL = ("killed", "stopped", "cut off")  # worker0 kills its process
_TIMEOUT = 1.5
_HEARTBEAT = None if NIGHTLY else 0.2  # seconds; None: the default

Cell = tuple[str, str]

_released = threading.Event()
_entered = threading.Semaphore(0)


def _hold(seconds: float) -> str:
    _entered.release()
    _released.wait(seconds)
    return "held"


def _pid_of(name: str) -> int:
    return next(row.pid for row in rpc.workers() if row.name == name)


def _member(rank: int, world_size: int, directory: str, cells: Sequence[Cell]) -> Any:
    cell, role = divmod(rank, 3)
    state, mode = cells[cell]
    place = f"{directory}/{cell}"
    signals = Signals(Path(place))
    options: dict[str, Any] = {} if _HEARTBEAT is None else {"heartbeat": _HEARTBEAT}
    with contextlib.ExitStack() as stack:
        proxy = None
        if state == "cut off":
            options["transport"] = "tcp"
            if role == 2:
                proxy = stack.enter_context(FaultProxy())
                options |= proxy.options
        given = rpc.RpcBackendOptions(init_method=f"file://{place}/store", **options)
        rpc.init_rpc(f"worker{role}", rank=role, world_size=3, rpc_backend_options=given)
        stack.callback(_released.set)  # release held calls
        if role == 2:
            return _faulty_worker(state, mode, signals, proxy)
        return _shut_down_and_report(role, state, mode, signals)


def _faulty_worker(state: str, mode: str, signals: Signals, proxy: FaultProxy | None) -> None:
    """Run worker2, which has the fault."""
    signals.wait("1 is ready")
    signals.wait("0 is ready")
    if state == "left":
        rpc.shutdown(graceful=False)
        signals.say("2 is ready")
        return
    if state == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if state == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
        _released.wait()
    if proxy is not None:
        proxy.stall()
        signals.say("2 is ready")
        _released.wait()  # worker0 kills this process
    signals.say("2 is ready")
    if state == "passive" or mode in ("forced", "ctrl-c"):
        signals.wait("0 has left")
    rpc.shutdown()


def _shut_down_and_report(role: int, state: str, mode: str, signals: Signals) -> dict[str, Any] | None:
    """Shut down as worker0 or worker1; worker0 returns a report."""
    pid = _pid_of("worker2")
    calls: list[Future[Any]] = []
    assert rpc.rpc_sync("worker2", abs, (-1,)) == 1
    if state == "calls" and role == 0:
        for name in ("worker0", "worker1", "worker2"):
            calls.append(rpc.rpc_async(name, _hold, (0.3 if mode == "graceful" else 30.0,), timeout=0))
    elif state != "idle":
        calls.append(rpc.rpc_async("worker2", _hold, (30.0,), timeout=0))
    signals.say(f"{role} is ready")
    if state == "stopped":
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    elif state != "killed":
        signals.wait("2 is ready")
    if role == 1:
        if mode in ("forced", "ctrl-c"):
            signals.wait("0 has left")
        rpc.shutdown()
        _ends(calls)
        return None
    begun, error = _shut_down(mode)
    took = time.monotonic() - begun
    signals.say("0 has left")
    assert not rpc.is_initialized()
    ends = _ends(calls)
    if state in ("stopped", "cut off"):
        os.kill(pid, signal.SIGKILL)
    return {"took": took, "error": type(error).__name__, "calls": sorted(ends)}


def _ends(calls: list[Future[Any]]) -> set[str]:
    """Wait for all calls, and return the types of their errors."""
    return {type(each.exception()).__name__ for each in calls}


def _shut_down(mode: str, shutdown: Callable[..., None] = rpc.shutdown) -> tuple[float, BaseException | None]:
    """Call ``shutdown``; return the time of its start (or of Ctrl-C) and its error."""
    begun = time.monotonic()
    try:
        if mode == "graceful":
            shutdown()
        elif mode == "timeout":
            shutdown(timeout=_TIMEOUT)
        elif mode == "forced":
            shutdown(graceful=False)
        else:
            with _ctrl_c() as when:
                shutdown()
    except (RpcError, KeyboardInterrupt) as error:
        return (when[0] if mode == "ctrl-c" else begun), error
    return begun, None


@contextlib.contextmanager
def _ctrl_c() -> Iterator[list[float]]:
    """Send SIGINT when the main thread waits for other workers."""
    main = threading.main_thread().ident
    assert main is not None
    over = threading.Event()
    when: list[float] = []

    def interrupt() -> None:
        while not over.is_set():
            frame = top_frame(main)
            while frame is not None:
                if frame.f_code.co_name in ("park", "reading", "_await_answer", "_wait"):
                    when.append(time.monotonic())
                    signal.pthread_kill(main, signal.SIGINT)
                    return
                frame = frame.f_back
            over.wait(0.002)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield when
    finally:
        over.set()
        thread.join()


def _expected(state: str, mode: str) -> set[str]:
    if mode == "ctrl-c":
        return {"KeyboardInterrupt"}
    if mode == "timeout" and state == "passive":
        return {"RpcTimeoutError"}
    if mode == "timeout" and state in _KILLED_BY_THE_CELL:
        return {"NoneType", "RpcTimeoutError"}  # the death of worker2 or the time-out, whichever is first
    return {"NoneType"}


def _check(directory: Path, cells: Sequence[Cell]) -> None:
    for number, (_, mode) in enumerate(cells):
        (directory / str(number)).mkdir(parents=True)
        # A graceful shutdown would wait for the passive worker.
        if mode == "graceful":
            assert cells[number] != ("passive", "graceful")
    may_die = [3 * number + 2 for number, (state, _) in enumerate(cells) if state in _KILLED_BY_THE_CELL]
    found = run_group(_member, 3 * len(cells), str(directory), cells, may_die=may_die, timeout=90)
    keys.sweep()
    for number, (state, mode) in enumerate(cells):
        report = found[3 * number]
        assert report["error"] in _expected(state, mode), (state, mode, report)
        ends = {"NoneType", "ShutdownError", "PeerDiedError"}
        if state == "calls" and mode != "graceful":
            ends -= {"PeerDiedError"}
        assert set(report["calls"]) <= ends, (state, mode, report)
        note(f"shutdown: {state}, {mode}", {"seconds": round(report["took"], 2), "raised": report["error"]})


def _cells() -> list[list[Cell]]:
    every = [(state, mode) for state in STATES for mode in MODES if (state, mode) != ("passive", "graceful")]
    if NIGHTLY:
        return [every[at : at + 3] for at in range(0, len(every), 3)]
    return [
        [("stopped", "graceful"), ("calls", "forced"), ("passive", "timeout"), ("cut off", "ctrl-c")],
    ]


@pytest.mark.limit(120)
@pytest.mark.parametrize("cells", _cells(), ids=lambda cells: "; ".join(map(", ".join, cells)))
@pytest.mark.prints("threads of 'worker[012]' are still in user code after shutdown")
def test_shutdown_of_a_group_ends_in_every_state_and_mode(cells: list[Cell], tmp_path: Path) -> None:
    _check(tmp_path, cells)


class Worker:
    """An actor that returns its process, or blocks."""

    def pid(self) -> int:
        return os.getpid()

    def hold(self) -> None:
        _released.wait()


def _cluster(rank: int, world_size: int, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = []
    for state, mode in cells:
        actorrpc.init()
        handles: list[Any] = [actorrpc.remote(Worker).remote() for _ in range(2)]
        pids = [actorrpc.get(handle.pid.remote()) for handle in handles]
        refs = []
        if state != "idle":
            refs = [handle.hold.remote() for handle in handles]
        if state in ("killed", "stopped"):
            os.kill(pids[0], signal.SIGKILL if state == "killed" else signal.SIGSTOP)
        begun, error = _shut_down(mode, actorrpc.shutdown)
        took = time.monotonic() - begun
        assert not actorrpc.is_initialized()
        for ref in refs:
            with pytest.raises((ActorError, ShutdownError, PeerDiedError)):  # not a time-out
                actorrpc.get(ref, timeout=20)
        until(lambda pids=pids: not any(_runs(pid) for pid in pids))
        reports.append({"took": took, "error": type(error).__name__})
        del refs, handles
    return reports


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.limit(240 if NIGHTLY else 60)
def test_shutdown_of_a_cluster_ends_in_every_state_and_mode() -> None:
    """Only the states that processes of one machine can be in."""
    cells = [(state, mode) for state in STATES[:4] for mode in MODES]
    if not NIGHTLY:
        cells = [("stopped", "forced"), ("calls", "ctrl-c")]
    (reports,) = run_group(_cluster, 1, cells, timeout=220 if NIGHTLY else 50)
    for (state, mode), report in zip(cells, reports, strict=True):
        allowed = {"NoneType", "KeyboardInterrupt"} if mode == "ctrl-c" else {"NoneType", "RpcTimeoutError"}
        assert report["error"] in allowed, (state, mode, report)
        note(
            f"shutdown of a cluster: {state}, {mode}",
            {"seconds": round(report["took"], 2), "raised": report["error"]},
        )
