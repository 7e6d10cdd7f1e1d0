"""Which processes belong to a test session, and what they are doing.

Every process that a test starts, directly or not, carries a mark in its environment; so even those whose
parent has ended, and that now belong to init, are found. Used by the leak check and by the watchdog, from
the main thread and from the watchdog's.
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
    """A process: its number alone may be given to another one later."""

    pid: int
    started: int  # clock ticks after boot


def begin_session() -> None:
    """Make the session's private directory and mark this process's environment with its path; not thread-safe.

    A session inside a test of another session appends its own, so that both find the processes.
    """
    outer = os.environ.get(_MARK)
    # Short, because it holds Unix sockets, whose paths have at most 107 bytes.
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
    """The session's private directory; known to the processes of its tests as well."""
    return Path(os.environ[_MARK].rpartition(":")[2])


def _identify(pid: int) -> ProcessId | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None  # ended meanwhile
    return ProcessId(pid, int(stat.rpartition(")")[2].split()[19]))


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found.update(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    return found


def descendants() -> set[ProcessId]:
    """The children of this process, theirs, and so on; zombies included."""
    found: set[int] = set()
    new = _children(os.getpid())
    while new:
        found |= new
        new = set().union(*map(_children, new)) - found
    return {process for process in map(_identify, found) if process is not None}


def of_session() -> set[ProcessId]:
    """All processes that this session's tests started and that exist now; not this one."""
    token, me = scratch().name.encode(), os.getpid()
    found = descendants()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != me:
            with contextlib.suppress(OSError):  # ended meanwhile, or not ours to look at
                if token in Path(f"/proc/{entry}/environ").read_bytes():
                    process = _identify(int(entry))
                    if process is not None:
                        found.add(process)
    return found


def helper_pids() -> set[int]:
    """The processes that multiprocessing keeps for the whole session."""
    pids = {
        getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None),
        getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None),
    }
    return {pid for pid in pids if pid is not None}


def helper_fds() -> set[int]:
    """The descriptors by which multiprocessing talks to those processes."""
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
    """Say in one line what a process is."""
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
    """Kill these processes and wait, briefly, until they are gone; reap those that are our children."""
    killed = []
    for process in processes:
        found = _alive(process)
        if found is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.kill()
                killed.append(found)
    psutil.wait_procs(killed, timeout=5)


def wait_for_end(processes: Iterable[ProcessId], seconds: float) -> set[ProcessId]:
    """Wait until these processes have ended, for at most so many seconds; return those that have not."""
    until = time.monotonic() + seconds
    left = set(processes)
    while left and time.monotonic() < until:
        time.sleep(0.02)
        left = {process for process in left if _alive(process) is not None}
    return left


def stacks_file(pid: int) -> Path:
    """Where a process that takes part writes its stacks when it is asked for them."""
    return scratch() / f"stacks-{pid}"


def tell_stacks() -> None:
    """Have this process write its stacks whenever :func:`dump_stacks` asks for them. Before it has other threads.

    A thread that waits for the signal writes them, with the GIL: a handler that runs at any moment reads the frames of
    threads that run on meanwhile, or end, and may crash. Only where that thread does not get the GIL, the handler does it.
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
    """Return the stacks of all threads of those processes: told by themselves, or read from outside by py-spy.

    Args:
        processes: those whose environment has the session's mark tell them if they have called :func:`tell_stacks`. For the
            others py-spy has to be installed, and this process be allowed to trace them.
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
        if not told:  # no thread of it gets the GIL
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
        return "  (its stacks are shown where py-spy is installed)"
    why = ""
    for how in ([], ["--nonblocking"]):  # the second reads a process that is stopped, too
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
    # Bounded: a process that is stopped (SIGSTOP) or in an uninterruptible wait never answers.
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
