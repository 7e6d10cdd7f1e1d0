"""Stacks of a process that cannot answer, because code in C holds its interpreter's lock: dumped by a signal handler.

Every worker has ``faulthandler`` write the stacks of its threads into a memfd of its own when a certain signal comes: that
needs no lock, and interrupts nothing. One who looks, of the same user and on the same host, sends the signal when the worker
has been silent, and reads the memfd through ``/proc``. The signal is sent through a pidfd, and only where the process has that
memfd and a handler for the signal: another process would end of it. At most 100 threads and 100 lines of each are dumped.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any, Final

from actorrpc.observe.processes import signal_is_caught
from actorrpc.transport.signals import uninterruptible

__all__ = ["prepare", "take"]

_NAME: Final = "actorrpc-stacks-"
_LINK: Final = re.compile(r"/memfd:actorrpc-stacks-(\d+) \(deleted\)", re.ASCII)
_LOOK_S: Final = 0.005
_QUIET_S: Final = 0.03  # a dump to which nothing is added for so long is whole
_MOST: Final = 1 << 20
_THREAD: Final = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+) .*\(most recent call first\):", re.ASCII)
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def prepare(number: int) -> Callable[[], None]:
    """Have this process dump its stacks at a signal; returns what ends that. Does nothing where somebody else handles it.

    Args:
        number: of the signal; 0: none.
    """
    if not 0 < number < signal.NSIG or signal_is_caught(os.getpid(), number):
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
    def end() -> None:
        # Not to be cut short: the caller would call again, and close a descriptor that another thread has opened meanwhile.
        faulthandler.unregister(number)
        os.close(fd)

    return end


def take(pid: int, until: float) -> list[dict[str, Any]] | str:
    """Have a process of this user on this host dump its stacks.

    Args:
        until: when they are to be there at latest, on the monotonic clock.

    Returns:
        The threads, as workers answer with them; or why there are none, in words.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return "it is gone"
    try:
        return _take(pid, pidfd, until)
    except OSError as error:
        return f"its stacks cannot be dumped: {error.strerror}"
    finally:
        os.close(pidfd)


def _take(pid: int, pidfd: int, until: float) -> list[dict[str, Any]] | str:
    found = _memfd(pid)
    if found is None:
        return "it has nothing into which its stacks could be dumped"
    path, number = found
    if not signal_is_caught(pid, number):
        return f"it has no handler for the signal that dumps its stacks ({number}): the program has taken that away"
    # Both were seen of the process that the pidfd means, if that lives still: its number is nobody else's before.
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
        # It writes where it has ended before: what was cut off there is a hole.
        data = os.pread(fd, _MOST, max(0, size - _MOST)).lstrip(b"\0")
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)
    threads = _threads(data.decode("utf-8", "replace"))
    return threads or f"no dump has come in time: the program may have taken the signal ({number}) for itself"


def _memfd(pid: int) -> tuple[str, int] | None:
    """Return the path of a process's memfd for stacks, and the number of the signal."""
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        try:
            match = _LINK.fullmatch(os.readlink(path))
        except OSError:  # it has been closed
            continue
        if match is not None:
            return path, int(match[1])
    return None


def _threads(text: str) -> list[dict[str, Any]]:
    """Return the threads of a dump."""
    found: list[dict[str, Any]] = []
    for line in text.splitlines():
        if (begun := _THREAD.fullmatch(line)) is not None:
            found.append({"name": "", "ident": int(begun[1], 16), "frames": []})
        elif found and (frame := _FRAME.fullmatch(line)) is not None:
            found[-1]["frames"].append({"file": frame[1], "line": int(frame[2]), "function": frame[3]})
    for thread in found:
        thread["frames"].reverse()
    return found
