"""Limits of the system: what to say where no more threads can be had, or no more memory.

What the kernel answers is one word for several limits: those that are set are named, and how much of each is used.
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
"""What the start of a thread raises where there can be no more of them."""
_PIDS: Final = "/sys/fs/cgroup"


def explain_threads() -> str:
    """Say that this process can start no more threads, and which limits there are."""
    known = [f"{_count_threads()} run in it", *_limits()]
    return f"process {os.getpid()} cannot start another thread: {', '.join(known)}. Raise the limit, or run less in it"


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        LimitError: the system has none.
    """
    try:
        thread.start()
    except NO_THREAD:
        raise LimitError(explain_threads()) from None


def explain_fork(error: OSError) -> str:
    """Say why there can be no further process, and which limits there are."""
    return f"cannot fork: {error.strerror} ({', '.join(_limits()) or 'no limit of threads or memory is set'})"


def explain_memory() -> str:
    """Say which limit of memory there is, and how much of it is used."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return "the system has none left for it"
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() >> 20
    except (OSError, ValueError):
        return f"RLIMIT_AS (ulimit -v) is {soft >> 20} MiB"
    return f"RLIMIT_AS (ulimit -v) is {soft >> 20} MiB, of which {used} are used"


def memory_limit() -> int:
    """Return how many bytes of memory this process could have at most: the host's, or what its control groups allow."""
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
    """Return the limits that keep threads and processes from being started, as far as they are set."""
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
    except OSError:  # no descriptor left to look with
        return 0


def _most_pids() -> str:
    """Return the most processes and threads that this process's control group may have; empty where that is not bounded."""
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
