"""Reads ``/proc``: age and size of a process, and the reason why it does not answer. Linux only."""

from __future__ import annotations

import os
import resource
import time
from typing import Any, Final

__all__ = ["descendants", "figures", "signal_is_caught", "why_silent"]

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def _stat(pid: int | str) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` from the state on; an empty list if the process does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field, the process's name in parentheses, may contain spaces and parentheses.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def figures(pid: int = 0) -> dict[str, Any]:
    """Return age, CPU time, memory, threads and descriptors of a process of this user (0: of this one); {} if it has ended."""
    name = str(pid) if pid else "self"
    fields = _stat(name)
    if len(fields) < 22:
        return {}
    found: dict[str, Any] = {
        "cpu": (int(fields[11]) + int(fields[12])) / _TICKS,
        "thread_count": int(fields[17]),
        "age": max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / _TICKS),
        "memory": int(fields[21]) * _PAGE,
    }
    try:
        found["descriptors"] = len(os.listdir(f"/proc/{name}/fd"))
        found["descriptor_limit"] = _descriptor_limit(pid)
    except OSError:
        pass
    return found


def _descriptor_limit(pid: int) -> int:
    soft = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else 0


def why_silent(pid: int) -> tuple[str, str]:
    """Return the state ("stopped", "dead" or "busy") of a process of this host that does not answer, and the reason."""
    fields = _stat(pid)
    state = fields[0] if fields else b""
    if state in (b"T", b"t"):
        by = "a debugger" if state == b"t" else "a signal (SIGSTOP, SIGTSTP)"
        return "stopped", f"its process was stopped by {by}"
    if state in (b"", b"Z", b"X", b"x"):
        return "dead", "its process has ended"
    if state == b"D":
        return "busy", "its process waits in the kernel (for a disk, a network file system, or a device)"
    used = (
        f"after {(int(fields[11]) + int(fields[12])) / _TICKS:.1f} s of processor time"
        if len(fields) > 12
        else ""
    )
    return (
        "busy",
        f"its process runs and does not answer: code in C holds the GIL, or it gets no CPU time ({used})",
    )


def signal_is_caught(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; without a handler, the signal may kill the process."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError, IndexError):
        pass
    return False


def descendants(pid: int) -> set[int]:
    """Return the ids of all processes that descend from a process."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and len(fields := _stat(name)) > 1:
            parents.setdefault(int(fields[1]), []).append(int(name))
    found: set[int] = set()
    left = [pid]
    while left:
        for child in parents.get(left.pop(), ()):
            if child not in found:
                found.add(child)
                left.append(child)
    return found
