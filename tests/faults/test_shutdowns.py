"""Leaving, whatever state the group is in and however it is asked for: it ends, in time, and says what it has to say.

Each cell is a group of three: worker0 leaves, worker1 leaves with it, and worker2 is what is wrong with the group. Cells run
side by side. That they end is asserted (by the limits); how long each took is written down with the figures. What is
promised: a graceful end within 30 s of the moment when the only ones missing are dead or out of reach; by force, 2 s;
Ctrl-C, 1 s.
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
from tests.faults.figures import NIGHTLY, note
from tests.harness.proxy import FaultProxy
from tests.ranks import run_group

STATES = ("idle", "calls", "killed", "stopped", "cut off", "left", "passive")
MODES = ("graceful", "timeout", "forced", "ctrl-c")
_GONE = ("killed", "stopped", "cut off")  # its process is ended by the cell, not by itself
_TIMEOUT = 1.5
_HEARTBEAT = None if NIGHTLY else 0.2  # seconds; None: what users have

Cell = tuple[str, str]

_for_ever = threading.Event()
_entered = threading.Semaphore(0)


def _until(condition: Callable[[], Any]) -> None:
    """Wait for something that nothing announces; bounded by the test's limit."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)


def _hold(seconds: float) -> str:
    _entered.release()
    _for_ever.wait(seconds)
    return "held"


class _Signals:
    """How the members of a cell tell each other how far they are, whatever has become of their group."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def tell(self, what: str) -> None:
        (self._directory / what).touch()

    def wait(self, what: str) -> None:
        _until((self._directory / what).exists)


def _pid_of(name: str) -> int:
    return next(row.pid for row in rpc.workers() if row.name == name)


def _member(rank: int, world_size: int, directory: str, cells: Sequence[Cell]) -> Any:
    cell, role = divmod(rank, 3)
    state, mode = cells[cell]
    place = f"{directory}/{cell}"
    signals = _Signals(place)
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
        stack.callback(_for_ever.set)  # what was held may go
        if role == 2:
            return _the_third(state, mode, signals, proxy)
        return _leave(role, state, mode, signals)


def _the_third(state: str, mode: str, signals: _Signals, proxy: FaultProxy | None) -> None:
    """Be what is wrong."""
    signals.wait("1 is ready")
    signals.wait("0 is ready")
    if state == "left":
        rpc.shutdown(graceful=False)
        signals.tell("2 is ready")
        return
    if state == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if state == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
        _for_ever.wait()
    if proxy is not None:
        proxy.stall()
        signals.tell("2 is ready")
        _for_ever.wait()  # it is ended by worker0
    signals.tell("2 is ready")
    if state == "passive" or mode in ("forced", "ctrl-c"):
        signals.wait("0 has left")
    rpc.shutdown()


def _leave(role: int, state: str, mode: str, signals: _Signals) -> dict[str, Any] | None:
    """Be one that leaves, and say how it was."""
    pid = _pid_of("worker2")
    calls: list[Future[Any]] = []
    assert rpc.rpc_sync("worker2", abs, (-1,)) == 1
    if state == "calls" and role == 0:
        for name in ("worker0", "worker1", "worker2"):
            calls.append(rpc.rpc_async(name, _hold, (0.3 if mode == "graceful" else 30.0,), timeout=0))
    elif state != "idle":
        calls.append(rpc.rpc_async("worker2", _hold, (30.0,), timeout=0))
    signals.tell(f"{role} is ready")
    if state == "stopped":
        _until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
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
    signals.tell("0 has left")
    assert not rpc.is_initialized()
    ends = _ends(calls)
    if state in ("stopped", "cut off"):
        os.kill(pid, signal.SIGKILL)
    return {"took": took, "error": type(error).__name__, "calls": sorted(ends)}


def _ends(calls: list[Future[Any]]) -> set[str]:
    """Look at how calls have ended: all of them are over, or this does not end."""
    return {type(each.exception()).__name__ for each in calls}


def _shut_down(mode: str) -> tuple[float, BaseException | None]:
    """Leave; return since when it has been on, and what it has raised."""
    begun = time.monotonic()
    try:
        if mode == "graceful":
            rpc.shutdown()
        elif mode == "timeout":
            rpc.shutdown(timeout=_TIMEOUT)
        elif mode == "forced":
            rpc.shutdown(graceful=False)
        else:
            with _ctrl_c() as when:
                rpc.shutdown()
    except (RpcError, KeyboardInterrupt) as error:
        return (when[0] if mode == "ctrl-c" else begun), error
    return begun, None


@contextlib.contextmanager
def _ctrl_c() -> Iterator[list[float]]:
    """Have Ctrl-C come when the main thread waits for the others."""
    main = threading.main_thread().ident
    assert main is not None
    over = threading.Event()
    when: list[float] = []

    def interrupt() -> None:
        while not over.is_set():
            frame = top_frame(main)
            while frame is not None:
                if frame.f_code.co_name in ("_park", "park", "reading", "_hear", "_wait_gone"):
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
    if mode == "timeout" and state in _GONE:
        return {"NoneType", "RpcTimeoutError"}  # whichever comes first: its death, or the time
    return {"NoneType"}


def _check(directory: Path, cells: Sequence[Cell]) -> None:
    for number, (_, mode) in enumerate(cells):
        (directory / str(number)).mkdir(parents=True)
        # A graceful end waits for who is passive: here until it is told to go.
        if mode == "graceful":
            assert cells[number] != ("passive", "graceful")
    gone = [3 * number + 2 for number, (state, _) in enumerate(cells) if state in _GONE]
    found = run_group(_member, 3 * len(cells), str(directory), cells, may_die=gone, timeout=90)
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
def test_leaving_a_group(cells: list[Cell], tmp_path: Path) -> None:
    _check(tmp_path, cells)


def _passive(rank: int, world_size: int, directory: str) -> bool:
    """worker0 waits for as long as worker1 only serves, and not longer."""
    signals = _Signals(directory)
    options = rpc.RpcBackendOptions(init_method=f"file://{directory}/store")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank:
        # It waits for this worker: it serves calls, and has not left.
        _until(lambda: rpc.rpc_sync("worker0", _is_leaving))
        for number in range(200):
            assert rpc.rpc_sync("worker0", abs, (-number,)) == number
        assert rpc.rpc_sync("worker0", _is_leaving)
        signals.tell("over")
        rpc.shutdown()
        return True
    rpc.shutdown()
    return (Path(directory) / "over").exists()


def _is_leaving() -> bool:
    barrier = rpc.api.group().barrier  # type: ignore[attr-defined]
    return "worker0" in barrier._arrived.get(0, ())


def test_a_graceful_end_waits_for_who_only_serves(tmp_path: Path) -> None:
    assert run_group(_passive, 2, str(tmp_path)) == [True, True]


# -- the embedded cluster ------------------------------------------------------------------------------------


class Worker:
    """An actor that does as it is told."""

    def pid(self) -> int:
        """Return its process."""
        return os.getpid()

    def hold(self) -> None:
        """Never return."""
        _for_ever.wait()


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
        begun = time.monotonic()
        error: BaseException | None = None
        try:
            if mode == "graceful":
                actorrpc.shutdown()
            elif mode == "timeout":
                actorrpc.shutdown(timeout=_TIMEOUT)
            elif mode == "forced":
                actorrpc.shutdown(graceful=False)
            else:
                with _ctrl_c() as when:
                    actorrpc.shutdown()
        except (RpcError, KeyboardInterrupt) as raised:
            error = raised
        if mode == "ctrl-c" and error is not None:
            begun = when[0]
        took = time.monotonic() - begun
        assert not actorrpc.is_initialized()
        for ref in refs:
            with pytest.raises((ActorError, ShutdownError, PeerDiedError)):  # not that it takes too long
                actorrpc.get(ref, timeout=20)
        _until(lambda pids=pids: not any(_runs(pid) for pid in pids))
        reports.append({"took": took, "error": type(error).__name__})
        del refs, handles
    return reports


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.limit(240 if NIGHTLY else 60)
def test_ending_a_cluster() -> None:
    """Its processes are on this machine: none is cut off, and none is passive or has left before."""
    cells = [(state, mode) for state in STATES[:4] for mode in MODES]
    if not NIGHTLY:
        cells = [("stopped", "forced"), ("calls", "ctrl-c")]
    (reports,) = run_group(_cluster, 1, cells, timeout=220 if NIGHTLY else 50)
    for (state, mode), report in zip(cells, reports, strict=True):
        allowed = {"NoneType", "KeyboardInterrupt"} if mode == "ctrl-c" else {"NoneType", "RpcTimeoutError"}
        assert report["error"] in allowed, (state, mode, report)
        note(
            f"cluster's end: {state}, {mode}",
            {"seconds": round(report["took"], 2), "raised": report["error"]},
        )
