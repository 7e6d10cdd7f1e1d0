"""While a task waits, other actors and tasks can book its CPUs, as in Ray. Actors keep theirs."""

from __future__ import annotations

import threading
from typing import Protocol

from actorrpc.actors.spec.actor_spec import Spawner

__all__ = ["CpuLender"]


class _Counts(Protocol):
    """How many tasks of a mailbox run, and how many of these wait."""

    running: int
    resting: int


class CpuLender:
    """Tells the cluster when all tasks that an actor executes have begun to wait, and when one of them continues.

    ``_lock`` guards ``_lent``. Thread-safe; does not block.
    """

    def __init__(self, spawner: Spawner, booking: int) -> None:
        self._spawner = spawner
        self._booking = booking
        self._lock = threading.Lock()
        self._lent = False

    def update(self, queue: _Counts) -> None:
        """Compare the numbers of the tasks that run and that wait. Called after each change of these numbers."""
        with self._lock:  # the last caller reads the last numbers
            waits = 0 < queue.running <= queue.resting
            if waits is self._lent:
                return
            self._lent = waits
        self._spawner.lend(self._booking, 1 if waits else -1)
