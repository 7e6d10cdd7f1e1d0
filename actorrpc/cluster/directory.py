"""Who is in the cluster: the driver's list. Thread-safe; ``_lock`` guards all of it and is a leaf.

The lock is re-entrant, as the collector may run a finaliser on the thread that has it.
"""

from __future__ import annotations

import threading

from actorrpc.core.identity import WorkerRecord

__all__ = ["Directory"]


class Directory:
    """The workers of the cluster by name and rank. Ranks grow and are never given twice."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._names: dict[str, WorkerRecord] = {}
        self._ranks: dict[int, WorkerRecord] = {}
        self._next = 1  # the driver is 0

    def new_rank(self) -> int:
        """Return a rank that nobody has had."""
        with self._lock:
            rank = self._next
            self._next += 1
            return rank

    def add(self, record: WorkerRecord) -> None:
        """Put a worker on the list."""
        with self._lock:
            self._names[record.name] = record
            self._ranks[record.rank] = record

    def remove(self, name: str) -> None:
        """Take a worker off the list."""
        with self._lock:
            record = self._names.pop(name, None)
            if record is not None:
                self._ranks.pop(record.rank, None)

    def resolve(self, to: str | int) -> WorkerRecord | None:
        """Return the record of a worker by name or rank; None if there is none."""
        with self._lock:
            return self._names.get(to) if isinstance(to, str) else self._ranks.get(to)

    def members(self) -> list[WorkerRecord]:
        """Return the records of all workers."""
        with self._lock:
            return list(self._names.values())

    def leave(self) -> None:
        """Do nothing: the list ends with the driver."""

    def close(self) -> None:
        """Do nothing: the list ends with the driver."""

    def release(self) -> None:
        """Do nothing: the list ends with the driver."""
