"""When a thread that waits for input of a connection spins before it sleeps.

That is a caller that waits for its reply, or a thread that has executed a call: that sends the answer, and may find the next
request before the kernel wakes another thread for it. Where both ends share a processor, the caller has run while the answer was
being sent, and its next request is there at the first look. Where they do not, spinning for ``spin_us`` may find it.

Spinning is cheaper than sleeping only where something comes within that time, and only where the other end runs meanwhile. Each
place that waits keeps two shares: of the waits that found something at the first look (then both ends share a processor, and the
place does not spin), and of the spins that found something later. It spins while the second share is large enough, and tries
one wait in 64 otherwise. One thread of a process spins at a time, because threads that spin take the interpreter from
each other.
"""

from __future__ import annotations

import select
from typing import Final

from actorrpc import _time

__all__ = ["ARMED", "AT_ONCE_S", "DISARMED", "WEIGHT", "Spinning", "spinner"]

AT_ONCE_S: Final = 4e-6
"""A wait that is shorter (in seconds) found what it waited for at the first look."""

ARMED: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
DISARMED: Final = select.EPOLLONESHOT

WEIGHT: Final = 0.0625
"""Of the latest wait in the shares of :class:`Spinning`."""


class Spinner:
    """The right to spin, which one thread of the process has at a time. Tests replace :data:`spinner`, or set its attributes.

    Attributes:
        shared: share of waits with something at the first look, above which both ends are taken to share a processor.
        worth: share of spins that must find something.
        pays: share of answers, 0 to 1, after which the next request was there at once. Above it, a thread reads after each
            answer.
    """

    def __init__(self) -> None:
        self.shared, self.worth, self.pays = 0.3, 0.25, 0.15
        self.lock = _time.Lock()

    def acquire(self) -> bool:
        """Take the right to spin, if no other thread has it."""
        return self.lock.acquire(False)

    def release(self) -> None:
        """Give the right back."""
        self.lock.release()


spinner = Spinner()


class Spinning:
    """What one place that waits knows of spinning. One thread at a time uses it: the one that holds the read lock.

    Attributes:
        seconds: how long a thread spins; 0: never.
        at_once: share of the latest waits, 0 to 1, that found something at the first look.
        found: share of the latest spins that found something later.
        count: how many waits there were that did not; one in 64 spins in any case, unless both ends share a processor.
    """

    __slots__ = ("at_once", "count", "found", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.count = 0
        self.at_once = self.found = 0.0

    def pays(self) -> bool:
        """Say, where the ends do not share a processor, whether to spin in the next wait: it pays, or is tried again."""
        self.count += 1
        return self.seconds > 0 and (self.found >= spinner.worth or not self.count & 63)
