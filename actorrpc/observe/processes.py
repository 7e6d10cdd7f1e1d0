"""Inspects processes of this host: age and size, the reason why one does not answer, and its stacks. Linux only.

The stacks of a process whose GIL is held by code in C come from a signal handler. A process with a worker registers
``faulthandler`` for one signal (setting ``dump_signal``). When the signal arrives, ``faulthandler`` writes the stacks of all
threads into a memfd of the process; the handler needs neither a lock nor the GIL. If a worker does not answer, an observer of the
same user on the same host sends it the signal and reads the memfd through ``/proc``. The signal would kill a process that has no
handler for it. Therefore the observer sends it through a pidfd, and only to a process with such a memfd and a handler.
``faulthandler`` dumps at most 100 threads and 100 frames of each.
"""

from __future__ import annotations

import faulthandler
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from typing import Any, Final

from actorrpc.transport.signals import uninterruptible

__all__ = ["descendants", "dump_stacks", "figures", "prepare_dumps", "why_silent"]

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_NAME: Final = "actorrpc-stacks-"
_LINK: Final = re.compile(r"/memfd:actorrpc-stacks-(\d+) \(deleted\)", re.ASCII)
_LOOK_S: Final = 0.005
_QUIET_S: Final = 0.03  # a dump that has not grown for so long is complete
_MAX_DUMP: Final = 1 << 20  # bytes
_THREAD: Final = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+) .*\(most recent call first\):", re.ASCII)
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)')


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
        limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
        found["descriptor_limit"] = limit if limit != resource.RLIM_INFINITY else 0
    except OSError:
        pass
    return found


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


def _is_caught(pid: int, number: int) -> bool:
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


# -- stacks of a process that does not answer --------------------------------------------------------------------


def prepare_dumps(number: int) -> Callable[[], None]:
    """Register a signal handler that dumps the stacks of this process; return a function that unregisters it.

    If the process already has a handler for the signal, or no handler can be registered, both functions do nothing.

    Args:
        number: the number of the signal; 0: register nothing.
    """
    if not 0 < number < signal.NSIG or _is_caught(os.getpid(), number):
        return lambda: None
    try:
        fd = os.memfd_create(f"{_NAME}{number}")
    except OSError:
        return lambda: None
    try:
        faulthandler.register(number, file=fd, all_threads=True)
    except (OSError, ValueError, RuntimeError):
        os.close(fd)
        return lambda: None

    @uninterruptible
    def release() -> None:
        # Uninterruptible: an interrupted caller would call release() again, and then close a descriptor number that another
        # thread may have reused.
        faulthandler.unregister(number)
        os.close(fd)

    return release


def dump_stacks(pid: int, until: float) -> list[dict[str, Any]] | str:
    """Make a process of this user on this host dump its stacks, and read them.

    Args:
        until: the time limit, on the monotonic clock.

    Returns:
        The threads, in the form in which workers answer; or a text that says why there are none.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return "its process has ended"
    try:
        return _dump(pid, pidfd, until)
    except OSError as error:
        return f"its stacks cannot be dumped: {error.strerror}"
    finally:
        os.close(pidfd)


def _dump(pid: int, pidfd: int, until: float) -> list[dict[str, Any]] | str:
    found = _memfd(pid)
    if found is None:
        return "it has no memfd into which its stacks could be dumped"
    path, number = found
    if not _is_caught(pid, number):
        return f"it has no handler for the signal that dumps its stacks ({number}): the program has removed the handler"
    # The checks above used the pid, which is not reused while the process of the pidfd exists. If that process has ended,
    # sending the signal fails.
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, 0)
        signal.pidfd_send_signal(pidfd, number)
        size, since = 0, time.monotonic()
        while not size or time.monotonic() - since < _QUIET_S:
            if time.monotonic() >= until:
                break
            time.sleep(_LOOK_S)
            now = os.fstat(fd).st_size
            if now != size:
                size, since = now, time.monotonic()
        # faulthandler continues at its old file offset, so after the truncation the file begins with a hole of zeros.
        data = os.pread(fd, _MAX_DUMP, max(0, size - _MAX_DUMP)).lstrip(b"\0")
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)
    threads = _threads(data.decode("utf-8", "replace"))
    return threads or f"no dump arrived in time: the program may use the signal ({number}) itself"


def _memfd(pid: int) -> tuple[str, int] | None:
    """Return the path of a process's memfd for stacks, and the signal number in its name; None if there is no such memfd."""
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        try:
            match = _LINK.fullmatch(os.readlink(path))
        except OSError:  # the descriptor was closed meanwhile
            continue
        if match is not None:
            return path, int(match[1])
    return None


def _threads(text: str) -> list[dict[str, Any]]:
    """Parse a dump of ``faulthandler``."""
    found: list[dict[str, Any]] = []
    for line in text.splitlines():
        if (begun := _THREAD.fullmatch(line)) is not None:
            found.append({"name": "", "ident": int(begun[1], 16), "frames": []})
        elif found and (frame := _FRAME.fullmatch(line)) is not None:
            found[-1]["frames"].append({"file": frame[1], "line": int(frame[2]), "function": frame[3]})
    for thread in found:
        thread["frames"].reverse()
    return found
