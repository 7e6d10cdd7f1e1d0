"""The two halves of what a worker knows of RRefs: the values it owns, and its handles on values of others.

Neither half takes a lock, sends or calls anything: :class:`RRefTable` (in ``forks``) calls them under its
lock, on any thread, and gives each step an :class:`Effects`, in which they leave what has to be done outside
of it. Values are never compared, hashed or printed, and are released into the Effects, never on the spot:
their end may run user code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from actorrpc.errors import PeerDiedError, RRefError
from actorrpc.rpc.refcount.messages import (
    BATCH,
    ChildAccept,
    ForkData,
    ForkId,
    ForkRequest,
    Message,
    RRefId,
    UserDelete,
)
from actorrpc.wire.identity import WorkerKey

__all__ = [
    "Deaths",
    "Effects",
    "Handle",
    "HandleTable",
    "HeldFork",
    "Outcome",
    "Owned",
    "Pending",
    "ValueTable",
    "released",
]

K = TypeVar("K")
V = TypeVar("V")


class Handle(NamedTuple):
    """What one local RRef object holds. On the owner ``fork_id`` is ``None``."""

    rref_id: RRefId
    fork_id: ForkId | None
    owner: WorkerKey


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Outcome:
    """The one terminal state of an RRef on its owner: a value, or an error."""

    value: object = None
    error: BaseException | None = None


class Effects:
    """What is to be done after a step, outside of the lock: send ``messages``, then call ``callbacks``.

    Keep no Effects: values released by the step die with it.
    """

    __slots__ = ("_batches", "_released", "callbacks", "messages")

    def __init__(self) -> None:
        self.messages: list[tuple[WorkerKey, Message]] = []
        self.callbacks: list[Callable[[], object]] = []
        self._batches: dict[tuple[WorkerKey, Any], list[Any]] = {}
        self._released: list[Outcome | None] = []

    def __bool__(self) -> bool:
        return bool(self.messages or self.callbacks)

    def add(self, to: WorkerKey, kind: type[Message], item: tuple[Any, ...]) -> None:
        """Add one item to the messages of a kind for a worker."""
        self._batches.setdefault((to, kind), []).append(item)

    def release(self, outcome: Outcome | None) -> None:
        """Keep an outcome until the Effects die."""
        self._released.append(outcome)

    def done(self) -> Effects:
        """Make messages of at most ``BATCH`` items from what was added."""
        for (to, kind), items in self._batches.items():
            for start in range(0, len(items), BATCH):
                self.messages.append((to, kind(tuple(items[start : start + BATCH]))))
        self._batches.clear()
        return self


class Pending:
    """Counts down until the owners know all forks of a message. Safe from any thread."""

    __slots__ = ("_callbacks", "_lock", "_remaining", "errors")

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._remaining = 0
        self._callbacks: list[Callable[[], object]] = []
        #: why forks could not be registered (owner dead, value gone); their RRefs fail when used
        self.errors: list[BaseException] = []

    @property
    def done(self) -> bool:
        """Whether every fork is confirmed or has failed."""
        return self._remaining == 0

    def when_done(self, callback: Callable[[], object]) -> bool:
        """Have ``callback`` among the callbacks of the step that ends the wait.

        Returns ``False``, and keeps nothing, if there is nothing left to wait for: go on yourself.
        """
        with self._lock:
            if self._remaining == 0:
                return False
            self._callbacks.append(callback)
            return True

    def expect(self) -> None:
        """Wait for one more. Under the lock."""
        self._remaining += 1

    def settle(self, error: BaseException | None, step: Effects) -> None:
        """Wait for one less. Under the lock."""
        self._remaining -= 1
        if error is not None:
            self.errors.append(error)
        if self._remaining == 0:
            callbacks, self._callbacks = self._callbacks, []
            step.callbacks += callbacks


class Recent(Generic[K, V]):
    """A dict that forgets all but the last ``limit`` keys that were put in."""

    __slots__ = ("_items", "_limit")

    def __init__(self, limit: int) -> None:
        self._items: dict[K, V] = {}
        self._limit = limit

    def __contains__(self, key: K) -> bool:
        return key in self._items

    def get(self, key: K) -> V | None:
        """Give the value of a key, or ``None``."""
        return self._items.get(key)

    def put(self, key: K, value: V) -> None:
        """Put a key in, and forget the oldest one if there are too many."""
        self._items[key] = value
        while len(self._items) > self._limit:
            self._items.pop(next(iter(self._items)), None)


class Deaths:
    """Which workers are dead, and why."""

    __slots__ = ("_errors", "_me")

    def __init__(self, me: WorkerKey) -> None:
        self._me = me
        self._errors: Recent[WorkerKey, BaseException] = Recent(10_000)

    def __contains__(self, worker: WorkerKey) -> bool:
        return worker in self._errors

    def put(self, worker: WorkerKey, error: BaseException) -> None:
        """Note a death."""
        self._errors.put(worker, error)

    def why(self, worker: WorkerKey) -> BaseException | None:
        """Give the error for a dead worker. Earlier lives of this very one are dead without being told."""
        error = self._errors.get(worker)
        if error is None and worker.rank == self._me.rank and worker != self._me:
            error = PeerDiedError(
                "the worker that held the value of this RRef was restarted: make the RRef anew",
                maybe_executed=False,
            )
        return error


def released(rref_id: RRefId) -> RRefError:
    """Make the error for a value that is no more."""
    return RRefError(f"the value of {rref_id} was released: nothing held it, or a worker that held it died")


# -- the owner's half ----------------------------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class Owned:
    """A value that lives here, or will, or is only asked for so far (not ``created``)."""

    rref_id: RRefId
    created: bool = False
    given_up: bool = False  # its creation has failed on the way here, and will not run
    outcome: Outcome | None = None
    forks: dict[ForkId, WorkerKey] = field(default_factory=dict)
    handles: int = 0
    waiters: list[Callable[[Outcome], object]] = field(default_factory=list)


class ValueTable:
    """The values that live on this worker, and who holds forks of them. Call it under the lock."""

    def __init__(self, me: WorkerKey, deaths: Deaths, tombstones: int) -> None:
        self.entries: dict[RRefId, Owned] = {}
        self._me = me
        self._deaths = deaths
        self._gone_rrefs: Recent[RRefId, None] = Recent(tombstones)
        self._gone_forks: Recent[ForkId, None] = Recent(tombstones)

    def expect(self, rref_id: RRefId) -> Owned:
        """Make an entry for a value of which nothing but its name is known."""
        entry = self.entries[rref_id] = Owned(rref_id)
        return entry

    def gone(self, rref_id: RRefId) -> bool:
        """Say whether a value that is not here will never be: only others' creations may be on their way."""
        creator = rref_id.creator
        return rref_id in self._gone_rrefs or creator.rank == self._me.rank or creator in self._deaths

    def arrived(self, rref_id: RRefId, fork_id: ForkId, from_: WorkerKey) -> bool:
        """Register a creation; ``False`` if its creator has let go of it or died, or has given it up before."""
        if from_ in self._deaths or rref_id in self._gone_rrefs:
            return False
        entry = self.entries.get(rref_id)
        if entry is not None and entry.given_up:
            return False
        if fork_id in self._gone_forks:
            if entry is None:
                self._gone_rrefs.put(rref_id, None)
                return False
        else:
            entry = self.expect(rref_id) if entry is None else entry
            entry.forks[fork_id] = from_
        entry.created = True
        return True

    def given_up(
        self, rref_id: RRefId, fork_id: ForkId, from_: WorkerKey, error: BaseException, step: Effects
    ) -> None:
        """End the wait for a creation that has failed on its way here. One that runs, or has run, stays as it is."""
        known = self.entries.get(rref_id)
        if (known is not None and known.created) or not self.arrived(rref_id, fork_id, from_):
            return
        entry = self.entries[rref_id]
        entry.given_up = True
        self.finish(entry, Outcome(error=error), step)
        self.settle(entry, step)

    def register(self, rref_id: RRefId, fork_id: ForkId, holder: WorkerKey) -> bool:
        """Add a child's fork, which may overtake the creation; ``False`` if the value is gone."""
        entry = self.entries.get(rref_id)
        if entry is not None and fork_id in entry.forks:
            return entry.forks[fork_id] == holder
        if fork_id in self._gone_forks or (entry is None and self.gone(rref_id)):
            return False
        entry = self.expect(rref_id) if entry is None else entry
        entry.forks[fork_id] = holder
        return True

    def remove(self, rref_id: RRefId, fork_id: ForkId, holder: WorkerKey | None, step: Effects) -> None:
        """Remove a fork, and remember that it is gone: what registers it may come after what deletes it."""
        entry = self.entries.get(rref_id)
        if entry is not None and holder is not None and entry.forks.get(fork_id, holder) != holder:
            return
        self._gone_forks.put(fork_id, None)
        if entry is not None:
            entry.forks.pop(fork_id, None)
            self.settle(entry, step)

    def finish(self, entry: Owned, outcome: Outcome, step: Effects) -> None:
        """Give an entry its outcome, unless it has one, and wake the threads that wait for it."""
        if entry.outcome is None:
            entry.outcome = outcome
            step.callbacks += [partial(waiter, outcome) for waiter in entry.waiters]
            entry.waiters = []

    def settle(self, entry: Owned, step: Effects) -> None:
        """Release a value that nothing holds. One not created yet is only forgotten: its creator holds it."""
        if entry.forks or entry.handles or (entry.waiters and not entry.created):
            return
        if entry.created:
            self._gone_rrefs.put(entry.rref_id, None)
            self.finish(entry, Outcome(error=released(entry.rref_id)), step)
            step.release(entry.outcome)
        self.entries.pop(entry.rref_id, None)

    def hold(self, rref_id: RRefId) -> None:
        """Add a local handle."""
        entry = self.entries.get(rref_id)
        if entry is None:
            gone = self.gone(rref_id)
            entry = self.expect(rref_id)
            if gone:
                entry.created = True
                entry.outcome = Outcome(error=released(rref_id))
        entry.handles += 1

    def take(self, data: ForkData, from_: WorkerKey, step: Effects) -> None:
        """Add a local handle for a fork that came home."""
        self.hold(data.rref_id)
        if from_ == self._me:
            self.remove(data.rref_id, data.fork_id, self._me, step)

    def drop(self, rref_id: RRefId, step: Effects) -> None:
        """Take a local handle away."""
        entry = self.entries.get(rref_id)
        if entry is not None:
            entry.handles = max(0, entry.handles - 1)
            self.settle(entry, step)

    def died(self, worker: WorkerKey, error: BaseException, step: Effects) -> None:
        """Release what a dead worker held, and end the wait for what it was to create."""
        for entry in list(self.entries.values()):
            for fork_id in [fork_id for fork_id, holder in entry.forks.items() if holder == worker]:
                entry.forks.pop(fork_id, None)
            if not entry.created and entry.rref_id.creator == worker:
                entry.created = True  # it never will be, by anyone else
                self.finish(entry, Outcome(error=error), step)
            self.settle(entry, step)

    def close(self, error: BaseException, step: Effects) -> None:
        """Release everything."""
        for entry in self.entries.values():
            self.finish(entry, Outcome(error=error), step)
            step.release(entry.outcome)
        self.entries.clear()


# -- the users' half -----------------------------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class HeldFork:
    """A handle on a value that lives elsewhere."""

    rref_id: RRefId
    fork_id: ForkId
    owner: WorkerKey
    parent: WorkerKey | None  # to be told when the owner knows this fork
    pending: bool
    error: BaseException | None = None
    handles: int = 1
    children: int = 0  # forks made of this one that the owner does not know yet
    tell_owner: bool = True  # whether the owner may know this fork
    waiting: list[Pending] = field(default_factory=list)


class HandleTable:
    """This worker's handles on values of others, and the children they wait for. Call it under the lock."""

    def __init__(self, me: WorkerKey, deaths: Deaths) -> None:
        self.entries: dict[ForkId, HeldFork] = {}
        self.children: dict[ForkId, tuple[HeldFork, WorkerKey]] = {}
        self.draining = False
        self._me = me
        self._deaths = deaths

    def add(self, rref_id: RRefId, fork_id: ForkId, owner: WorkerKey) -> None:
        """Add the handle of a creation that is about to be sent."""
        error = self._deaths.why(owner)
        self.entries[fork_id] = HeldFork(rref_id, fork_id, owner, None, error is None, error)

    def settle(self, held: HeldFork, step: Effects) -> None:
        """Let go of a handle that is dropped, that the owner knows, and that has no child to keep alive."""
        if held.handles or held.children or held.pending or self.entries.pop(held.fork_id, None) is None:
            return
        if held.tell_owner and held.owner not in self._deaths:
            step.add(held.owner, UserDelete, (held.rref_id, held.fork_id))

    def resolve(self, held: HeldFork, error: BaseException | None, step: Effects) -> None:
        """End the wait for the owner; an error stays for good, also with a handle that was confirmed."""
        if held.error is None:
            held.error = error
        if held.pending:
            held.pending = False
            waiting, held.waiting = held.waiting, []
            for pending in waiting:
                pending.settle(error, step)
            if held.parent is not None:
                self.accept(held.parent, held.fork_id, step)
        self.settle(held, step)

    def wait(self, held: HeldFork, pending: Pending) -> None:
        """Have ``pending`` wait for a handle, if there is something to wait for."""
        if held.pending:
            held.waiting.append(pending)
            pending.expect()
        elif held.error is not None:
            pending.errors.append(held.error)

    def keep_for_child(self, parent: HeldFork, fork_id: ForkId, to: WorkerKey) -> None:
        """Keep a parent until the owner knows its child, which is on its way to ``to``."""
        self.children[fork_id] = (parent, to)
        parent.children += 1

    def child_settled(self, fork_id: ForkId, step: Effects) -> None:
        """Stop keeping the parent of a child. Unknown children change nothing."""
        child = self.children.pop(fork_id, None)
        if child is not None:
            child[0].children -= 1
            self.settle(child[0], step)

    def accept(self, parent: WorkerKey, fork_id: ForkId, step: Effects) -> None:
        """Tell the parent of a fork that it need not stay for it."""
        if parent == self._me:
            self.child_settled(fork_id, step)
        elif parent not in self._deaths:
            step.add(parent, ChildAccept, (fork_id,))

    def request(self, held: HeldFork, step: Effects) -> None:
        """Ask the owner to register a fork that came from another user."""
        step.add(held.owner, ForkRequest, (held.rref_id, held.fork_id))

    def take(self, data: ForkData, from_: WorkerKey, pending: Pending, step: Effects) -> None:
        """Add a handle for a fork that came in. One from the owner itself was registered when it was sent."""
        held = self.entries.get(data.fork_id)
        if held is None:
            direct = data.owner == from_
            parent = None if direct else from_
            held = HeldFork(data.rref_id, data.fork_id, data.owner, parent, not direct, handles=0)
            self.entries[data.fork_id] = held
            held.error = self._deaths.why(data.owner)
            if held.error is not None:
                held.pending = held.tell_owner = False
                if parent is not None:
                    self.accept(parent, data.fork_id, step)
            elif not direct:
                self.request(held, step)
        self.wait(held, pending)
        if not self.draining:
            held.handles += 1
        self.settle(held, step)

    def acknowledged(
        self, rref_id: RRefId, fork_id: ForkId, known: bool, owner: WorkerKey, step: Effects
    ) -> None:
        """Note the owner's answer to a request."""
        held = self.entries.get(fork_id)
        if held is None:
            if known:  # a late request brought back a fork that is not held here any more
                step.add(owner, UserDelete, (rref_id, fork_id))
        elif held.pending and held.owner == owner and held.parent is not None:
            held.tell_owner = known
            self.resolve(held, None if known else released(rref_id), step)

    def drop(self, fork_id: ForkId, step: Effects) -> None:
        """Take a local handle away."""
        held = self.entries.get(fork_id)
        if held is not None:
            held.handles = max(0, held.handles - 1)
            self.settle(held, step)

    def died(self, worker: WorkerKey, error: BaseException, step: Effects) -> None:
        """Stop waiting for a dead worker as child, and fail what it owned."""
        for fork_id, (parent, to) in list(self.children.items()):
            if worker in (to, parent.owner):
                self.child_settled(fork_id, step)
        for held in list(self.entries.values()):
            if held.owner == worker:
                held.tell_owner = False
                self.resolve(held, error, step)

    def drop_all(self, step: Effects) -> None:
        """Drop every handle, and those still to come."""
        self.draining = True
        for held in list(self.entries.values()):
            held.handles = 0
            self.settle(held, step)

    def close(self, error: BaseException, step: Effects) -> None:
        """Forget everything, telling nobody."""
        for held in list(self.entries.values()):
            held.parent = None
            held.tell_owner = False
            self.resolve(held, error, step)
        self.entries.clear()
        self.children.clear()
