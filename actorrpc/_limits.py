"""Limits of the system: the messages for a process that cannot start a thread or another process, or has no more memory.

The kernel reports several limits with the same error. The messages therefore name the limits that are set, and their usage.
"""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path
from typing import Final

from actorrpc.errors import LimitError

__all__ = ["NO_THREAD", "explain_fork", "explain_memory", "explain_threads", "memory_limit", "start_thread"]

NO_THREAD: Final = (RuntimeError, MemoryError)
"""The exceptions that ``Thread.start()`` raises if the system allows no more threads."""
_PIDS: Final = "/sys/fs/cgroup"


def explain_threads() -> str:
    """Return the error message of a process that cannot start another thread. It lists the limits that the system sets."""
    known = [f"{_count_threads()} run in it", *_limits()]
    return (
        f"process {os.getpid()} cannot start another thread: {', '.join(known)}. Raise the limit that is reached, or run fewer "
        "threads and processes under it"
    )


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        LimitError: the system allows no more threads.
    """
    try:
        thread.start()
    except NO_THREAD:
        raise LimitError(explain_threads()) from None


def explain_fork(error: OSError) -> str:
    """Return the error message for a failed ``fork()``: the reason, and the limits that the system sets."""
    return f"cannot fork: {error.strerror} ({', '.join(_limits()) or 'no limit of threads or memory is set'})"


def explain_memory() -> str:
    """Return an error message: the limit of this process's memory and its usage, or, without a limit, that memory is full."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return "the system has no more memory"
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() >> 20
    except (OSError, ValueError):
        return f"RLIMIT_AS (ulimit -v) is {soft >> 20} MiB"
    return f"RLIMIT_AS (ulimit -v) is {soft >> 20} MiB, of which {used} are used"


def memory_limit() -> int:
    """Return how many bytes of memory this process may use: the host's memory, or less if a control group (v2) limits it."""
    least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return least
    for line in lines:
        hierarchy, _, path = line.partition("::")
        if hierarchy != "0":
            continue
        folder = Path(_PIDS + path)
        for each in (folder, *folder.parents):
            try:
                said = (each / "memory.max").read_text().strip()
            except OSError:
                continue
            if said.isdecimal():
                least = min(least, int(said))
    return least


def _limits() -> list[str]:
    """Describe the limits of the system that apply when this process starts a thread or a process."""
    known = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY:
        known.append(f"RLIMIT_NPROC (ulimit -u) is {soft} for all processes of user {os.getuid()}")
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        known.append(f"RLIMIT_AS (ulimit -v) is {soft >> 20} MiB, stacks included")
    most = _most_pids()
    if most:
        known.append(f"pids.max of its control group is {most}")
    return known


def _count_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # no file descriptor is left
        return 0


def _most_pids() -> str:
    """Return how many processes and threads the control group of this process may have; empty if not limited."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "pids" not in controllers.split(","):
                continue
            base = Path(_PIDS, "pids" if controllers else "", path.lstrip("/"))
            most = (base / "pids.max").read_text().strip()
            if most != "max":
                return most
    except (OSError, ValueError):
        pass
    return ""
