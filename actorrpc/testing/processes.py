"""The processes of a test session, and the stacks of their threads.

Every process that a test starts, directly or not, inherits a mark in its environment. So processes are found even after their
parent has ended. Used by the leak check in the main thread, and by the watchdog in its own thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = [
    "ProcessId",
    "begin_session",
    "descendants",
    "describe",
    "dump_stacks",
    "end_session",
    "helper_fds",
    "helper_pids",
    "kill",
    "of_session",
    "scratch",
    "stacks_file",
    "tell_stacks",
    "wait_for_end",
]

_MARK = "ACTORRPC_TEST_SESSION"
_ASK = signal.SIGUSR2
_INSIST = signal.SIGRTMIN + 5
_READ_S = 5.0


class ProcessId(NamedTuple):
    """Identifies a process: a pid alone may be reused."""

    pid: int
    started: int  # clock ticks after boot


def begin_session() -> None:
    """Make the session's private directory and put its path into this process's environment as the mark; not thread-safe.

    A session inside a test of another session appends its own path, so that both sessions find the processes.
    """
    outer = os.environ.get(_MARK)
    # Short, because it holds Unix sockets: their paths have at most 107 bytes.
    private = tempfile.mkdtemp(prefix="arpct-", dir=scratch() if outer else "/tmp")
    os.environ[_MARK] = f"{outer}:{private}" if outer else private


def end_session() -> None:
    """Remove the session's private directory and the mark."""
    shutil.rmtree(scratch(), ignore_errors=True)
    outer = os.environ[_MARK].rpartition(":")[0]
    if outer:
        os.environ[_MARK] = outer
    else:
        del os.environ[_MARK]


def scratch() -> Path:
    """The session's private directory, in this process and in those that its tests start."""
    return Path(os.environ[_MARK].rpartition(":")[2])


def _identify(pid: int) -> ProcessId | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None  # it has ended
    return ProcessId(pid, int(stat.rpartition(")")[2].split()[19]))


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found.update(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    return found


def descendants() -> set[ProcessId]:
    """All descendants of this process, including zombies."""
    found: set[int] = set()
    new = _children(os.getpid())
    while new:
        found |= new
        new = set().union(*map(_children, new)) - found
    return {process for process in map(_identify, found) if process is not None}


def of_session() -> set[ProcessId]:
    """All existing processes that this session's tests have started, without this one."""
    token, me = scratch().name.encode(), os.getpid()
    found = descendants()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != me:
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if token in Path(f"/proc/{entry}/environ").read_bytes():
                    process = _identify(int(entry))
                    if process is not None:
                        found.add(process)
    return found


def helper_pids() -> set[int]:
    """The processes that multiprocessing starts once and keeps for the whole session."""
    pids = {
        getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None),
        getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None),
    }
    return {pid for pid in pids if pid is not None}


def helper_fds() -> set[int]:
    """The descriptors of the pipes to those processes."""
    fds = {
        getattr(getattr(resource_tracker, "_resource_tracker", None), "_fd", None),
        getattr(getattr(forkserver, "_forkserver", None), "_forkserver_alive_fd", None),
    }
    return {fd for fd in fds if fd is not None}


def _alive(process: ProcessId) -> psutil.Process | None:
    if _identify(process.pid) == process:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(process.pid)
    return None


def describe(process: ProcessId) -> str:
    """Describe a process in one line."""
    found = _alive(process)
    if found is None:
        return f"process {process.pid} (ended)"
    try:
        with found.oneshot():
            text = f"process {found.pid} ({found.status()}, parent {found.ppid()}): {found.name()}"
            with contextlib.suppress(psutil.Error):  # a zombie has no command line
                text = text.removesuffix(found.name()) + " ".join(" ".join(found.cmdline()).split())[:200]
            return text
    except psutil.Error:
        return f"process {process.pid} (ended)"


def kill(processes: Iterable[ProcessId]) -> None:
    """Kill processes and wait briefly until they have ended; reap the children of this process."""
    killed = []
    for process in processes:
        found = _alive(process)
        if found is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.kill()
                killed.append(found)
    psutil.wait_procs(killed, timeout=5)


def wait_for_end(processes: Iterable[ProcessId], seconds: float) -> set[ProcessId]:
    """Wait at most ``seconds`` until these processes have ended; return the others."""
    until = time.monotonic() + seconds
    left = set(processes)
    while left and time.monotonic() < until:
        time.sleep(0.02)
        left = {process for process in left if _alive(process) is not None}
    return left


def stacks_file(pid: int) -> Path:
    """The file into which a process writes its stacks after :func:`tell_stacks`."""
    return scratch() / f"stacks-{pid}"


def tell_stacks() -> None:
    """Make this process write its stacks whenever :func:`dump_stacks` asks for them. Call it before other threads start.

    A thread waits for the signal _ASK and writes the stacks while it holds the GIL. A signal handler would read the frames of
    threads that run meanwhile, and might crash. Only if the thread does not get the GIL, the handler of _INSIST writes them.
    """
    file = open(stacks_file(os.getpid()), "a")  # noqa: SIM115
    faulthandler.register(_INSIST, file=file, all_threads=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {_ASK})

    def tell() -> None:
        while True:
            signal.sigwait({_ASK})
            faulthandler.dump_traceback(file=file, all_threads=True)

    threading.Thread(target=tell, name="stacks", daemon=True).start()


def dump_stacks(processes: Iterable[ProcessId]) -> str:
    """Return the stacks of all threads of these processes.

    Args:
        processes: a process that has called :func:`tell_stacks` in this session writes its own stacks. py-spy reads the stacks
            of the others, if it is installed and may trace them.
    """
    asked: dict[ProcessId, tuple[Path, int]] = {}
    parts = []
    for process in sorted(processes):
        path = stacks_file(process.pid)
        parts.append(describe(process))
        if path.exists() and _alive(process) is not None:
            with contextlib.suppress(ProcessLookupError):
                asked[process] = (path, path.stat().st_size)
                os.kill(process.pid, _ASK)
        elif _alive(process) is not None:
            parts.append(_read_from_outside(process.pid))
    for process, (path, before) in asked.items():
        told = _read_growth(path, before)
        if not told:  # its thread does not get the GIL
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, _INSIST)
            told = _read_growth(path, before) or "  (no answer)"
        parts.append(f"stacks of process {process.pid}:\n{told}")
    return "\n".join(parts)


def _read_from_outside(pid: int) -> str:
    py_spy = shutil.which(
        "py-spy", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if py_spy is None:
        return "  (install py-spy to see its stacks)"
    why = ""
    for how in ([], ["--nonblocking"]):  # --nonblocking also reads a stopped process
        try:
            done = subprocess.run(
                [py_spy, "dump", *how, "--pid", str(pid)], capture_output=True, text=True, timeout=_READ_S
            )
        except subprocess.TimeoutExpired:
            why = f"no answer within {_READ_S:g} s"
        else:
            if done.returncode == 0:
                return done.stdout
            why = done.stderr.partition("\n\n")[0]
    return f"  (py-spy: {why})"


def _read_growth(path: Path, before: int) -> str:
    # Bounded: a process that is stopped (SIGSTOP) or in an uninterruptible wait writes nothing.
    size, give_up = before, time.monotonic() + 1.0
    try:
        while time.monotonic() < give_up:
            time.sleep(0.02)
            now = path.stat().st_size
            if now == size > before:
                break
            size = now
        with path.open(errors="replace") as file:
            file.seek(before)
            return file.read()
    except FileNotFoundError:  # it has ended
        return ""
