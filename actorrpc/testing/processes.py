"""The processes of a test session, and the stacks of their threads.

Every process that a test starts, directly or not, inherits a mark in its environment. So processes are found even after their
parent has ended. Used by the leak check in the main thread, and by the watchdog in its own thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from multiprocessing import forkserver, resource_tracker
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil

from actorrpc._python import FORK_SERVER, RESOURCE_TRACKER

__all__ = [
    "begin_session",
    "descendants",
    "describe",
    "dump_stacks",
    "end_session",
    "helper_fds",
    "kill",
    "of_session",
    "scratch",
]

_MARK = "ACTORRPC_TEST_SESSION"
_READ_S = 5.0


def begin_session() -> None:
    """Make the session's private directory and put its path into this process's environment as the mark; not thread-safe.

    A session inside a test of another session appends its own path, so that both sessions find the processes.
    """
    outer = os.environ.get(_MARK)
    # The path is short, because the directory has Unix sockets, whose paths have at most 107 bytes.
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
    """The session's private directory, in this process and in the processes that its tests start."""
    return Path(os.environ[_MARK].rpartition(":")[2])


def descendants() -> set[psutil.Process]:
    """All descendants of this process, including zombies, without the helpers of multiprocessing."""
    found: set[int] = set()
    new = _children(os.getpid())
    while new:
        found |= new
        new = set().union(*map(_children, new)) - found
    return _processes(found)


def _children(pid: int) -> set[int]:
    # psutil would read the files of all processes, which takes some milliseconds.
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found.update(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    return found


def of_session() -> set[psutil.Process]:
    """All existing processes that this session's tests have started, without this process and the helpers of multiprocessing."""
    token, marked = scratch().name.encode(), set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if token in Path(f"/proc/{pid}/environ").read_bytes():
                marked.add(pid)
    return descendants() | _processes(marked - {os.getpid()})


def _processes(pids: Iterable[int]) -> set[psutil.Process]:
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(pid))
    helpers = (_helper(resource_tracker, RESOURCE_TRACKER, 1), _helper(forkserver, FORK_SERVER, 1))
    return {process for process in found if process.pid not in helpers}


def helper_fds() -> set[int]:
    """The descriptors of the pipes to the processes that multiprocessing starts once and keeps for the whole session."""
    return {_helper(resource_tracker, RESOURCE_TRACKER, 2), _helper(forkserver, FORK_SERVER, 2)}


def _helper(module: Any, names: tuple[str, ...], which: int) -> Any:
    return getattr(getattr(module, names[0], None), names[which], None)


def describe(process: psutil.Process) -> str:
    """Describe a process in one line."""
    try:
        with process.oneshot():
            text = f"process {process.pid} ({process.status()}, parent {process.ppid()}): "
            with contextlib.suppress(psutil.Error):  # a zombie has no command line
                return text + (" ".join(" ".join(process.cmdline()).split())[:200] or process.name())
            return text + process.name()
    except psutil.Error:
        return f"process {process.pid} (ended)"


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill processes and wait up to 5 s until they have ended; reap the children of this process."""
    killed = list(processes)
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(killed, timeout=5)


def dump_stacks(processes: Iterable[psutil.Process]) -> str:
    """Return the stacks of all threads of these processes, which py-spy reads if it is installed and may trace them."""
    parts = []
    for process in sorted(processes, key=attrgetter("pid")):
        parts.append(describe(process))
        if process.is_running():
            parts.append(_stacks(process.pid))
    return "\n".join(parts)


def _stacks(pid: int) -> str:
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
