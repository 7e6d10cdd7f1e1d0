"""Decides when a thread that waits for input of a connection spins before it sleeps.

Such a thread is a caller that waits for its reply, or a thread that has executed a call and sent the answer: it may read the next
request itself before the kernel wakes another thread for it. If both ends share a CPU, the caller has run while the answer was
being sent, and its next request is available at the first poll. If the ends do not share a CPU, the request may arrive while the
thread spins for the setting ``spin_us``.

Spinning is cheaper than sleeping only if input arrives within that time. Each connection measures two rates, separately for the
two kinds of threads (:class:`Spinning`): the rate of waits that found input at the first poll, and the rate of spins that found
input later. If the first rate is high, both ends share a CPU, and threads do not spin. Otherwise, they spin in every wait if the
second rate is high enough, and else in one wait of 64. Only one thread of a process spins at a time, because spinning threads
compete for the GIL.
"""

from __future__ import annotations

import select
from typing import Final

from actorrpc import _time

__all__ = ["ARMED", "AT_ONCE_S", "DISARMED", "WEIGHT", "Spinning", "spinner"]

AT_ONCE_S: Final = 4e-6
"""If a wait is shorter than this many seconds, it counts as having found input at the first poll."""

ARMED: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
DISARMED: Final = select.EPOLLONESHOT

WEIGHT: Final = 0.0625
"""The weight of the latest wait in the averages of :class:`Spinning`."""


class Spinner:
    """The right to spin, which one thread of the process has at a time. Tests replace :data:`spinner`, or set its attributes.

    Attributes:
        shared: the rate of waits with input at the first poll above which both ends are assumed to share a CPU.
        worth: the rate of successful spins from which on threads spin in every wait.
        read_again: if more than this part of the answers is followed by a request at once, threads read after each answer.
    """

    def __init__(self) -> None:
        self.shared, self.worth, self.read_again = 0.3, 0.25, 0.15
        self.lock = _time.Lock()

    def acquire(self) -> bool:
        """Acquire the right to spin; return False if another thread has it."""
        return self.lock.acquire(False)

    def release(self) -> None:
        """Give the right back."""
        self.lock.release()


spinner = Spinner()


class Spinning:
    """The measurements of one connection for one kind of waits. Not exact: :meth:`Connection.reply` updates them without a lock.

    Attributes:
        seconds: how long a thread spins; 0: never.
        at_once: moving average, 0 to 1: the rate of waits that found input at the first poll.
        found: moving average, 0 to 1: the rate of spins that found input.
        count: the number of calls of :meth:`should_spin`; if ``seconds`` is not 0, every 64th call returns True.
    """

    __slots__ = ("at_once", "count", "found", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.count = 0
        self.at_once = self.found = 0.0

    def should_spin(self) -> bool:
        """Return whether to spin in the next wait. Called only if the two ends do not share a CPU."""
        self.count += 1
        return self.seconds > 0 and (self.found >= spinner.worth or not self.count & 63)
