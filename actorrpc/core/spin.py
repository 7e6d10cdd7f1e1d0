"""Whether to spin before sleeping: measured, not believed.

Spinning helps where the two ends of a connection run on different processors, and hurts where they share one
or where the machine has more to do than processors. So each place that waits keeps a running mean of its
waits with and without spinning, uses the shorter, and tries the other one now and then (the rarer, the worse
it has proved). One thread of a process may spin at a time, and none while more threads are runnable than
there are processors.
"""

from __future__ import annotations

import os
import threading
from typing import Final

from actorrpc import moments

__all__ = ["Spin", "spinner"]

_LONG: Final = 2e-3  # waits are counted as at most this long: beyond it, spinning can make no difference
_PROBE_MIN: Final = 64
_PROBE_MAX: Final = 256
_CROWD_PERIOD: Final = 0.005


class Spin:
    """Decides for one place that waits. Used by one thread at a time (the holder of the read lock)."""

    __slots__ = ("_count", "_off", "_on", "_probe", "use")

    def __init__(self, off: float = -1.0) -> None:
        """``off``: what a wait without spinning counts as, where it is not measured."""
        self.use = False
        self._on = -1.0
        self._off = off
        self._count = 0
        self._probe = _PROBE_MIN

    def choose(self) -> bool:
        """Say whether to spin in the wait that now begins."""
        self._count += 1
        if self._count >= self._probe or self._on < 0.0:
            self._count = 0
            return not self.use
        return self.use

    @property
    def due(self) -> bool:
        """Whether the wait that now begins without spinning is one of those that are measured."""
        return not self._count & 7

    def note(self, spun: bool, waited: float) -> None:
        """Take note of how long a wait took, in seconds, with or without spinning."""
        waited = min(waited, _LONG)
        if spun:
            self._on = waited if self._on < 0.0 else self._on + 0.125 * (waited - self._on)
        else:
            self._off = waited if self._off < 0.0 else self._off + 0.125 * (waited - self._off)
        if self._on < 0.0 or self._off < 0.0:
            return
        use = self._on < 0.9 * self._off
        if use != self.use:
            self.use = use
            self._probe = _PROBE_MIN
        elif spun != use:
            # The other mode was tried and lost again: ask more rarely.
            self._probe = min(2 * self._probe, _PROBE_MAX)


class _Spinner:
    """The process's one right to spin, and the look at how crowded the machine is."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._processors = os.cpu_count() or 1
        self._checked = 0.0
        self._crowded = False
        self._runnable = 1.0
        self._fd = -1

    def acquire(self) -> bool:
        """Take the right to spin, if nobody has it and there are processors to spare."""
        now = moments.now()
        if now - self._checked > _CROWD_PERIOD:
            self._checked = now
            self._crowded = self._look()
        return not self._crowded and self.lock.acquire(False)

    def release(self) -> None:
        """Give the right back."""
        self.lock.release()

    def _look(self) -> bool:
        # The fourth field of /proc/loadavg is runnable/total, this thread included.
        try:
            if self._fd < 0:
                self._fd = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
            runnable = int(os.pread(self._fd, 128, 0).split()[3].split(b"/")[0])
        except (OSError, ValueError, IndexError):
            return False
        # A mean over some tens of milliseconds: one passer-by is no crowd.
        self._runnable += 0.25 * (runnable - self._runnable)
        return self._runnable > self._processors + 0.6

    def close(self) -> None:
        """Close the file that is looked at."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


spinner = _Spinner()
