"""Limits of the system: on CPUs, threads, processes, memory and file descriptors.

The kernel reports several limits with the same error. The messages of this module therefore name the limits that are set, and
their usage.

A connection needs two file descriptors, and the usual soft limit is 1 024: a worker to which 600 workers connect would exceed the
limit. The soft limit is checked when an agent starts and with each new connection, and raised before it is reached. Near the hard
limit, some descriptors are reserved for existing connections, and new connections are refused until others have been closed.
Thread-safe without a lock, because the limit only grows.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
from pathlib import Path
from typing import Final

from actorrpc.errors import LimitError

__all__ = [
    "NO_DESCRIPTOR",
    "NO_THREAD",
    "SPARE_DESCRIPTORS",
    "explain_descriptors",
    "explain_fork",
    "explain_memory",
    "explain_missing",
    "explain_refusal",
    "explain_threads",
    "has_room",
    "host_cpus",
    "make_room",
    "memory_limit",
    "start_thread",
]

_log = logging.getLogger("actorrpc.links")

NO_THREAD: Final = (RuntimeError, MemoryError)
"""The exceptions that ``Thread.start()`` raises if the system allows no more threads."""
_GROUPS: Final = "/sys/fs/cgroup"
_AHEAD: Final = 256  # the limit is raised if fewer descriptors are free; fewer are opened between two checks
NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
"""The error numbers of a lack of descriptors or memory, which may be temporary."""
SPARE_DESCRIPTORS: Final = 16
"""Descriptors that are reserved for existing connections: for their shared memory, and for resuming over another socket."""


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
    return min([least, *(int(said) for said in _of_control_groups("", "memory.max") if said.isdecimal())])


def host_cpus(groups: Path = Path("/proc/self/cgroup"), root: Path = Path(_GROUPS)) -> int:
    """Return how many CPUs this host or container has, at least 1; the affinity mask of the process is not considered.

    A control group (v1 or v2) of the process, or a parent of the group, may limit the time on CPUs: 250 % are 2 CPUs.

    Args:
        groups: the file that lists the control groups of the process.
        root: the folder where the control groups are mounted.
    """
    quotas = [said.split() for said in _of_control_groups("", "cpu.max", groups, root)]
    times = _of_control_groups("cpu", "cpu.cfs_quota_us", groups, root)
    quotas += zip(times, _of_control_groups("cpu", "cpu.cfs_period_us", groups, root), strict=False)  # type: ignore[arg-type]
    limits = [int(time) // int(period) for time, period in quotas if time.isdecimal()]
    return max(1, min([os.cpu_count() or 1, *limits]))


def _of_control_groups(
    controller: str, name: str, groups: Path = Path("/proc/self/cgroup"), root: Path = Path(_GROUPS)
) -> list[str]:
    """Return the contents of a file of this process's control group and of its parents, where the file exists.

    Args:
        controller: a controller of version 1; empty for version 2.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        # In a container, the path may be the host's. Then only the mounted root exists, which is the container's own group.
        folder = root / controller / path.lstrip("/")
        for each in (folder, *folder.parents):
            try:
                found.append((each / name).read_text().strip())
            except OSError:
                continue
    return found


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
            base = Path(_GROUPS, "pids" if controllers else "", path.lstrip("/"))
            most = (base / "pids.max").read_text().strip()
            if most != "max":
                return most
    except (OSError, ValueError):
        pass
    return ""


# -- file descriptors ------------------------------------------------------------------------------


def make_room(fd: int) -> bool:
    """If a new descriptor is near the soft limit, double the limit, at most to the hard limit.

    Returns:
        Whether at least ``_AHEAD`` more descriptors can be opened; if not, call :func:`has_room` before opening another.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft
    while 0 < wanted < fd + _AHEAD:  # RLIM_INFINITY is negative
        wanted *= 2
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if wanted == soft:
        return soft == resource.RLIM_INFINITY or soft >= fd + _AHEAD
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        _log.warning(
            "%d files and connections are open, the limit is %d and cannot be raised (%s): start with a higher one (ulimit -n), "
            "or connections will fail",
            fd,
            soft,
            error,
        )
        return False
    return wanted >= fd + _AHEAD


def has_room(count: int) -> bool:
    """Return whether ``count`` more descriptors can be opened and :data:`SPARE_DESCRIPTORS` remain. Slow: counts all."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return (
            soft == resource.RLIM_INFINITY
            or len(os.listdir("/proc/self/fd")) - 1 + count + SPARE_DESCRIPTORS <= soft
        )
    except OSError:  # no descriptor is free for listing the directory
        return False


def explain_refusal(error: OSError) -> str:
    """Return why this worker has no descriptor for a connection, as a short text for the worker that is refused."""
    if error.errno == errno.EMFILE:
        return f"it may open no more descriptors (RLIMIT_NOFILE, ulimit -n: {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    if error.errno == errno.ENFILE:
        return "no process of its host may open more descriptors (sysctl fs.file-max)"
    return f"its system has nothing left for another connection ({error.strerror})"


def explain_missing() -> str:
    """Return the reason why a descriptor that was sent to this process could not be received."""
    try:
        os.close(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        return explain_descriptors(error)
    return "there was no descriptor left for it"


def explain_descriptors(error: OSError) -> str:
    """Return a text about a lack of descriptors, with advice; for other errors, return the error's own text."""
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"this process may open no more descriptors (RLIMIT_NOFILE: soft {soft}, hard {hard}). Start it with a higher hard "
            "limit: ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of Docker"
        )
    if error.errno == errno.ENFILE:
        return (
            "no process of this host may open more descriptors: raise the system's limit (sysctl fs.file-max)"
        )
    return str(error)
