"""A worker's records about RRefs: one for each value that it owns, and one for each handle on a value of another worker.

:class:`~actorrpc.rpc.refcount.protocol.RRefTable` changes these records under its lock. Values are never compared, hashed or
printed. The :class:`Effects` of a step keep the values that it releases until the lock has been released, because finalisers of
values may run user code. :mod:`actorrpc.rpc.refcount.messages` explains forks, parents and children.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from actorrpc.errors import RRefError
from actorrpc.rpc.refcount.messages import BATCH, ForkId, Message, RRefId
from actorrpc.wire.identity import WorkerKey

__all__ = [
    "Effects",
    "Handle",
    "HeldFork",
    "Outcome",
    "Owned",
    "Pending",
    "Recent",
    "released",
]

K = TypeVar("K")
V = TypeVar("V")


class Handle(NamedTuple):
    """The ids in one RRef object. ``fork_id`` is ``None`` if this worker is the owner of the value."""

    rref_id: RRefId
    fork_id: ForkId | None
    owner: WorkerKey


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Outcome:
    """The final state of an RRef on its owner: a value, or an error."""

    value: object = None
    error: BaseException | None = None


class Effects:
    """The work that a step leaves to its caller, after the lock is released: send ``messages``, then call ``callbacks``.

    Do not keep Effects: the values that the step has released are freed with them.
    """

    __slots__ = ("_items", "_released", "callbacks")

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], object]] = []
        self._items: dict[tuple[WorkerKey, Any], list[Any]] = {}
        self._released: list[Outcome | None] = []

    def __bool__(self) -> bool:
        return bool(self._items or self.callbacks)

    @property
    def messages(self) -> list[tuple[WorkerKey, Message]]:
        """The messages and their destinations. A message has at most ``BATCH`` items."""
        return [
            (to, kind(tuple(items[start : start + BATCH])))
            for (to, kind), items in self._items.items()
            for start in range(0, len(items), BATCH)
        ]

    def add(self, to: WorkerKey, kind: type[Message], item: tuple[Any, ...]) -> None:
        """Add one item to the messages of class ``kind`` to worker ``to``."""
        self._items.setdefault((to, kind), []).append(item)

    def release(self, outcome: Outcome | None) -> None:
        """Keep a released outcome until these Effects are freed."""
        self._released.append(outcome)


class Pending:
    """Counts the forks of a received message about which their owners have not answered yet. Thread-safe."""

    __slots__ = ("_callbacks", "_lock", "_remaining")

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._remaining = 0
        self._callbacks: list[Callable[[], object]] = []

    @property
    def done(self) -> bool:
        """Whether every fork is confirmed or has failed."""
        return self._remaining == 0

    def when_done(self, callback: Callable[[], object]) -> bool:
        """Add ``callback`` to the callbacks of the step that settles the last fork.

        Returns ``False``, and does not keep the callback, if all forks are settled already.
        """
        with self._lock:
            if self._remaining == 0:
                return False
            self._callbacks.append(callback)
            return True

    def expect(self) -> None:
        """Count one more fork. Under the lock."""
        self._remaining += 1

    def settle(self, step: Effects) -> None:
        """Count one fork less. Under the lock."""
        self._remaining -= 1
        if self._remaining == 0:
            callbacks, self._callbacks = self._callbacks, []
            step.callbacks += callbacks


class Recent(dict[K, V]):
    """A dict from which :meth:`put` removes the oldest keys when there are more than ``limit``."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def put(self, key: K, value: V) -> None:
        """Add a key; if there are more than ``limit`` keys, remove the oldest key."""
        self[key] = value
        while len(self) > self._limit:
            self.pop(next(iter(self)), None)


def released(rref_id: RRefId) -> RRefError:
    """Make the error for a value that has been released."""
    return RRefError(f"the value of {rref_id} was released: nothing held it, or a worker that held it died")


@dataclass(slots=True, eq=False, repr=False)
class Owned:
    """A value that this worker owns, or will own when its creation arrives.

    Attributes:
        created: the creation has arrived, or will never arrive. Before, this worker knows the value only from messages about it.
        outcome: None until the value has been set, or its creation has failed.
        forks: the worker that holds each registered fork of the value.
        handles: how many RRef objects of this worker refer to the value.
        waiters: functions to call with the outcome when it is set.
    """

    rref_id: RRefId
    created: bool = False
    outcome: Outcome | None = None
    forks: dict[ForkId, WorkerKey] = field(default_factory=dict)
    handles: int = 0
    waiters: list[Callable[[Outcome], object]] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class HeldFork:
    """A handle (fork) of this worker on a value that another worker owns.

    Attributes:
        parent: the sender, which keeps its fork until the owner knows this fork; None for a creation, and if the owner sent it.
        pending: the owner has not confirmed or refused this fork yet.
        error: the error that every use of the RRef raises.
        handles: how many RRef objects of this worker use this fork.
        children: how many forks were made of this fork that the owner does not know yet.
        tell_owner: the owner may know this fork, so it is sent a UserDelete when this worker removes the fork.
        waiting: the counters of messages that contained this fork; their functions may start when no fork is pending.
    """

    rref_id: RRefId
    fork_id: ForkId
    owner: WorkerKey
    parent: WorkerKey | None
    pending: bool
    error: BaseException | None = None
    handles: int = 1
    children: int = 0
    tell_owner: bool = True
    waiting: list[Pending] = field(default_factory=list)
