"""The RRef protocol as a state machine: which worker holds which fork (``messages.py``), and when a value may be released.

One :class:`RRefTable` per agent, used by any thread. It does no I/O, reads no clock and runs no callbacks: each
method changes the tables under one lock and returns :class:`Effects`, which the caller carries out afterwards
(messages to send, waiters to wake, values to release).

While no worker dies, a value lives as long as a worker has a handle on it or an undelivered message contains a fork of it (the
parent keeps its own fork until the owner knows the child's). The last release of a handle releases the value. The table needs an
agent that delivers each message at least once unless its destination dies, in any order, and each call at most once. All handles
of a dead worker are released at once; the key of that worker is never used again.

The lock is re-entrant: the garbage collector may run a finaliser that uses an RRef on a thread that holds the lock.
The lock guards the table and its Pending objects, but not the queue of drops. No other lock is taken under it.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

from actorrpc._exceptions import line_of
from actorrpc.errors import PeerDiedError, ProtocolError, RRefError, ShutdownError
from actorrpc.rpc.refcount.messages import (
    ChildAccept,
    ForkAck,
    ForkData,
    ForkId,
    ForkRequest,
    Message,
    RRefId,
    UserDelete,
)
from actorrpc.rpc.refcount.tables import (
    Effects,
    Handle,
    HeldFork,
    Outcome,
    Owned,
    Pending,
    Recent,
    released,
)
from actorrpc.transport.signals import uninterruptible
from actorrpc.wire.identity import WorkerKey

__all__ = [
    "Effects",
    "Handle",
    "HeldValue",
    "Leak",
    "Outcome",
    "Pending",
    "PendingCounts",
    "RRefTable",
    "ReceivedFork",
]


class Leak(NamedTuple):
    """A fork that was not released before this worker has left its group."""

    rref_id: RRefId
    fork_id: ForkId
    holder: WorkerKey


_Id = TypeVar("_Id", RRefId, ForkId)
_SHUT_DOWN: Final = (
    "the cluster or group of this RRef or handle was shut down: make it again in the present one"
)


class HeldValue(NamedTuple):
    """A value that this worker owns, and the references to the value.

    Attributes:
        outcome: None while the value has not been set.
        handles: how many RRef objects of this worker refer to the value.
        holders: for each fork, the worker that holds the fork.
    """

    outcome: Outcome | None
    handles: int
    holders: list[WorkerKey]


class PendingCounts(NamedTuple):
    """Counts of entries that must be removed before this worker may leave."""

    users: int
    children: int
    owners: int  # values that have forks, or whose creation has not arrived
    drops: int

    @property
    def idle(self) -> bool:
        """Whether all counts are zero."""
        return not any(self)


class ReceivedFork(NamedTuple):
    """The handles that were made of the forks in a message, in order."""

    handles: list[Handle]
    pending: Pending
    effects: Effects


@uninterruptible
class RRefTable:
    """All records of one worker about RRefs. Thread-safe; see the module's docstring for the rules.

    Args:
        me: the key of this incarnation of this worker.
        tombstones: how many released ids are remembered, so that late messages do not register them again.
    """

    def __init__(self, me: WorkerKey, *, tombstones: int = 10_000) -> None:
        self.me = me
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._count = itertools.count()
        self._drops: deque[Handle] = deque()
        self._owned: dict[RRefId, Owned] = {}
        self._held: dict[ForkId, HeldFork] = {}
        # By child: the fork from which this worker made the child, and the receiver. Removed when the owner knows the child.
        self._children: dict[ForkId, tuple[HeldFork, WorkerKey]] = {}
        self._gone_rrefs: Recent[RRefId, None] = Recent(tombstones)
        self._gone_forks: Recent[ForkId, None] = Recent(tombstones)
        self._deaths: Recent[WorkerKey, BaseException] = Recent(10_000)
        self._draining = False
        self._closed = False

    # -- making RRefs ----------------------------------------------------------------------------

    def create_owner(self, value: object, keep: Callable[[Handle], object] | None = None) -> Handle:
        """Create an RRef to a value of this worker.

        Args:
            keep: called with the handle, before a signal handler can run.

        Raises:
            ShutdownError: after :meth:`close`.
        """
        with self._lock:
            self._open()
            rref_id = self._new_id(RRefId)
            self._owned[rref_id] = Owned(rref_id, created=True, outcome=Outcome(value), handles=1)
        handle = Handle(rref_id, None, self.me)
        if keep is not None:
            keep(handle)
        return handle

    def handle_on(self, rref_id: RRefId) -> Handle:
        """Return one more handle on a value of this worker, for an RRef in a call whose caller keeps its RRef until the answer.

        Raises:
            ShutdownError: after :meth:`close`.
        """
        with self._lock:
            self._open()
            return self._hold(rref_id)

    def handle_if_held(self, rref_id: RRefId) -> Handle | None:
        """Return one more handle on a value; None if this worker does not own the value, or has released it.

        Raises:
            ShutdownError: after :meth:`close`.
        """
        with self._lock:
            self._open()
            entry = self._owned.get(rref_id)
            return None if entry is None or not entry.created else self._hold(rref_id)

    def create_user(self, owner: WorkerKey) -> Handle:
        """Make the handle of a remote creation. When the creation ends, call :meth:`confirmed` or :meth:`creation_failed`.

        If this worker is the owner itself, a fork whose id is the RRef's keeps the entry until then, and
        :meth:`creation_arrived` is not called.

        Raises:
            ShutdownError: after :meth:`close`.
        """
        with self._lock:
            self._open()
            rref_id = self._new_id(RRefId)
            if owner == self.me:
                pin = {ForkId(*rref_id): self.me}
                self._owned[rref_id] = Owned(rref_id, created=True, forks=pin, handles=1)
                return Handle(rref_id, None, owner)
            fork_id = self._new_id(ForkId)
            error = self._why_dead(owner)
            self._held[fork_id] = HeldFork(rref_id, fork_id, owner, None, error is None, error)
            return Handle(rref_id, fork_id, owner)

    def confirmed(self, handle: Handle) -> Effects:
        """Record that the owner has answered the creation. If the creation has failed before, the RRef keeps its error."""
        step = Effects()
        with self._lock:
            if handle.fork_id is None:
                self._remove(handle.rref_id, ForkId(*handle.rref_id), self.me, step)
            elif (user := self._held.get(handle.fork_id)) is not None:
                user.tell_owner = True
                self._resolve(user, None, step)
            elif not self._closed:
                self._tell(handle.owner, UserDelete, (handle.rref_id, handle.fork_id), step)
        return step

    def creation_failed(self, handle: Handle, error: BaseException, *, reached: bool = True) -> Effects:
        """Record that the creation has failed. ``reached``: whether the owner may have received the creation."""
        step = Effects()
        with self._lock:
            if handle.fork_id is None:
                entry = self._owned.get(handle.rref_id)
                if entry is not None:
                    self._finish(entry, Outcome(error=error), step)
                self._remove(handle.rref_id, ForkId(*handle.rref_id), self.me, step)
            else:
                user = self._held.get(handle.fork_id)
                if user is not None and user.pending:
                    user.tell_owner = reached
                    self._resolve(user, error, step)
        return step

    def drop_later(self, handle: Handle) -> None:
        """Queue the release of a handle, because its RRef object is deleted. Call once for each handle that the table returned.

        For ``__del__``: takes no lock and runs no other code. Does nothing in a forked child.
        """
        if os.getpid() == self._pid and not self._closed:
            self._drops.append(handle)

    def collect(self) -> Effects:
        """Release the queued handles; each owner is sent one message for up to 100 of them."""
        step = Effects()
        with self._lock:
            for _ in range(len(self._drops)):
                handle = self._drops.popleft()
                if handle.fork_id is None:
                    entry = self._owned.get(handle.rref_id)
                    if entry is not None:
                        entry.handles = max(0, entry.handles - 1)
                        self._settle_value(entry, step)
                elif (held := self._held.get(handle.fork_id)) is not None:
                    held.handles = max(0, held.handles - 1)
                    self._settle_handle(held, step)
        return step

    # -- the owner's side of calls ---------------------------------------------------------------

    def creation_arrived(self, rref_id: RRefId, fork_id: ForkId, from_: WorkerKey) -> bool:
        """Register a creation before its function runs.

        Returns ``False`` if the function must not run: the RRef has been deleted, the creator has died, or the creation
        has failed before (:meth:`creation_given_up`).

        Raises:
            ProtocolError: an id was not made by ``from_``.
        """
        _check_creation(rref_id, fork_id, from_)
        with self._lock:
            if self._closed or from_ in self._deaths or rref_id in self._gone_rrefs:
                return False
            entry = self._owned.get(rref_id)
            if entry is not None and entry.outcome is not None:
                return False
            if fork_id not in self._gone_forks:
                entry = self._expect(rref_id)
                entry.forks[fork_id] = from_
            elif entry is None:
                self._gone_rrefs.put(rref_id, None)
                return False
            entry.created = True
            return True

    def creation_given_up(
        self, rref_id: RRefId, fork_id: ForkId, from_: WorkerKey, error: BaseException
    ) -> Effects:
        """Record that a creation has failed before its function ran: the function will not run, and the RRef keeps ``error``.

        Has no effect if the function runs or has run.

        Raises:
            ProtocolError: an id was not made by ``from_``.
        """
        _check_creation(rref_id, fork_id, from_)
        step = Effects()
        with self._lock:
            known = self._owned.get(rref_id)
            is_running = known is not None and known.created
            if not is_running and self.creation_arrived(rref_id, fork_id, from_):
                entry = self._owned[rref_id]
                self._finish(entry, Outcome(error=error), step)
                self._settle_value(entry, step)
        return step

    def set_value(self, rref_id: RRefId, value: object) -> Effects:
        """Set the value of an RRef. Has no effect if the RRef has a value or an error, or was released."""
        return self._set(rref_id, Outcome(value))

    def set_error(self, rref_id: RRefId, error: BaseException) -> Effects:
        """Set the error of an RRef. Has no effect if the RRef has a value or an error, or was released."""
        return self._set(rref_id, Outcome(error=error))

    def known_outcome(self, rref_id: RRefId | tuple[int, int, str]) -> Outcome | None:
        """Return the outcome of an RRef of this worker, or None. Takes no lock, because an outcome never changes."""
        entry = self._owned.get(rref_id)  # type: ignore[arg-type]
        return None if entry is None else entry.outcome

    def fetch(self, rref_id: RRefId, waiter: Callable[[Outcome], object]) -> Outcome | None:
        """Return the outcome of an RRef that this worker owns, or keep ``waiter`` until there is an outcome.

        A fetch may arrive before the creation. The caller limits the wait, and ends it by :meth:`cancel_fetch`.
        """
        with self._lock:
            if rref_id not in self._owned:
                if self._closed:
                    return Outcome(
                        error=ShutdownError("the worker that holds the value of this RRef was shut down")
                    )
                if self._is_gone(rref_id):
                    return Outcome(error=released(rref_id))
            entry = self._expect(rref_id)
            if entry.outcome is None:
                entry.waiters.append(waiter)
            return entry.outcome

    def cancel_fetch(self, rref_id: RRefId, waiter: Callable[[Outcome], object]) -> Effects:
        """Remove a waiter: pass the same object that was passed to :meth:`fetch`."""
        step = Effects()
        with self._lock:
            entry = self._owned.get(rref_id)
            if entry is not None:
                entry.waiters = [kept for kept in entry.waiters if kept is not waiter]
                self._settle_value(entry, step)
        return step

    # -- RRefs in messages -----------------------------------------------------------------------

    def fork(self, handle: Handle, to: WorkerKey) -> ForkData:
        """Make a fork for an RRef in a message to worker ``to``, which may also be this worker.

        Raises:
            RRefError: the RRef was released here, or failed (the error is the cause).
            ShutdownError: after :meth:`close`.
        """
        with self._lock:
            self._open()
            fork_id = self._new_id(ForkId)
            user = None if handle.fork_id is None else self._held.get(handle.fork_id)
            entry = self._owned.get(handle.rref_id) if handle.fork_id is None else None
            failed = None if user is None else user.error
            if failed is None and to not in self._deaths:
                if entry is not None:
                    entry.forks[fork_id] = to
                elif user is not None:
                    self._children[fork_id] = (user, to)
                    user.children += 1
        if failed is not None:
            raise RRefError(
                f"an RRef without a value cannot be sent to other workers: {line_of(failed)}"
            ) from failed
        if entry is None and user is None:
            raise released(handle.rref_id)
        return ForkData(handle.owner, handle.rref_id, fork_id)

    def rollback(self, forks: Iterable[ForkData]) -> Effects:
        """Undo forks made for a message that cannot arrive (pickling or sending failed).

        Do not use it for calls that timed out: the receiver may still get the message, and then settles its forks.
        """
        step = Effects()
        with self._lock:
            for data in forks:
                if data.owner == self.me:
                    self._remove(data.rref_id, data.fork_id, None, step)
                else:
                    self._child_settled(data.fork_id, step)
        return step

    def receive(self, forks: Sequence[ForkData], from_: WorkerKey) -> ReceivedFork:
        """Register the RRefs of a received message, and return their handles. The caller must drop each handle once.

        If the RRefs are arguments of a function, the function may start only when ``pending`` is done.

        Raises:
            ProtocolError: a fork was not made by ``from_``.
            ShutdownError: after :meth:`close`.
        """
        _check_parent(forks, from_)
        step = Effects()
        pending = Pending(self._lock)
        handles: list[Handle] = []
        with self._lock:
            self._open()
            for data in forks:
                if data.owner != self.me:
                    self._add_received_fork(data, from_, pending, step)
                    handles.append(Handle(data.rref_id, data.fork_id, data.owner))
                    continue
                handles.append(self._hold(data.rref_id))
                if from_ == self.me:
                    self._remove(data.rref_id, data.fork_id, self.me, step)
                else:
                    self._accept(from_, data.fork_id, step)
        return ReceivedFork(handles, pending, step)

    def refuse(self, forks: Sequence[ForkData], from_: WorkerKey) -> Effects:
        """Release the forks of a message that is not decoded, because it is late, cancelled or unreadable.

        Raises:
            ProtocolError: a fork was not made by ``from_``.
        """
        _check_parent(forks, from_)
        step = Effects()
        with self._lock:
            if not self._closed:
                for data in forks:
                    if data.owner != from_:
                        self._accept(from_, data.fork_id, step)
                    elif from_ == self.me:
                        self._remove(data.rref_id, data.fork_id, self.me, step)
                    else:
                        self._tell(from_, UserDelete, (data.rref_id, data.fork_id), step)
        return step

    def is_confirmed(self, handle: Handle) -> bool:
        """Say whether the owner has confirmed this handle."""
        with self._lock:
            if handle.fork_id is None:
                return True
            user = self._held.get(handle.fork_id)
            return user is not None and not user.pending and user.error is None

    def failure(self, handle: Handle) -> BaseException | None:
        """Return the error of a user's handle (creation not answered, owner dead, value released), or None. Takes no lock."""
        user = None if handle.fork_id is None else self._held.get(handle.fork_id)
        return None if user is None else user.error

    # -- messages and deaths ---------------------------------------------------------------------

    def handle(self, from_: WorkerKey, message: Message) -> Effects:
        """Process a message of another worker. A message may arrive twice, late, or after its sender has died."""
        step = Effects()
        with self._lock:
            if self._closed or from_ in self._deaths:
                return step
            if isinstance(message, UserDelete):
                for rref_id, fork_id in message.items:
                    self._remove(rref_id, fork_id, from_, step)
            elif isinstance(message, ForkRequest):
                for rref_id, fork_id in message.items:
                    is_known = self._register(rref_id, fork_id, from_)
                    step.add(from_, ForkAck, (rref_id, fork_id, is_known))
            elif isinstance(message, ForkAck):
                for rref_id, fork_id, is_known in message.items:
                    held = self._held.get(fork_id)
                    if held is None:
                        if is_known:  # a late ForkRequest has registered a released fork again
                            step.add(from_, UserDelete, (rref_id, fork_id))
                    elif held.pending and held.owner == from_ and held.parent is not None:
                        held.tell_owner = is_known
                        self._resolve(held, None if is_known else released(rref_id), step)
            else:
                for (fork_id,) in message.items:
                    child = self._children.get(fork_id)
                    if child is not None and child[1] == from_:
                        self._child_settled(fork_id, step)
        return step

    def worker_died(self, worker: WorkerKey, error: BaseException) -> Effects:
        """Release all forks that ``worker`` held, and fail all RRefs to values that ``worker`` owned with ``error``."""
        step = Effects()
        with self._lock:
            if self._closed or worker in self._deaths or worker == self.me:
                return step
            self._deaths.put(worker, error)
            for entry in list(self._owned.values()):
                for fork_id in [fork_id for fork_id, holder in entry.forks.items() if holder == worker]:
                    entry.forks.pop(fork_id, None)
                if not entry.created and entry.rref_id.creator == worker:
                    entry.created = True  # no worker will create this value
                    self._finish(entry, Outcome(error=error), step)
                self._settle_value(entry, step)
            for fork_id, (parent, to) in list(self._children.items()):
                if worker in (to, parent.owner):
                    self._child_settled(fork_id, step)
            for held in list(self._held.values()):
                if held.owner == worker:
                    held.tell_owner = False
                    self._resolve(held, error, step)
        return step

    # -- leaving, and counters --------------------------------------------------------------------

    def delete_all_users(self) -> Effects:
        """Release every handle on other workers' values; handles that are received later are released at once."""
        step = self.collect()
        with self._lock:
            self._draining = True
            for held in list(self._held.values()):
                held.handles = 0
                self._settle_handle(held, step)
        return step

    def close(self) -> Effects:
        """Release all values and handles; waiting threads get ShutdownError. Later drops and messages have no effect."""
        step = Effects()
        with self._lock:
            self._closed = True
            error = ShutdownError(_SHUT_DOWN)
            for entry in self._owned.values():
                self._finish(entry, Outcome(error=error), step)
                step.release(entry.outcome)
            for held in list(self._held.values()):
                held.parent = None
                held.tell_owner = False
                self._resolve(held, error, step)
            self._owned.clear()
            self._held.clear()
            self._children.clear()
            self._drops.clear()
        return step

    def pending_counts(self) -> PendingCounts:
        """Count the entries that must be removed before this worker may leave."""
        with self._lock:
            owners = sum(1 for entry in self._owned.values() if entry.forks or not entry.created)
            return PendingCounts(len(self._held), len(self._children), owners, len(self._drops))

    def leaks(self) -> list[Leak]:
        """List the forks of values that this worker owns, and this worker's forks of other workers' values.

        A fork that no RRef object of this worker uses is not a leak, even if its owner has not confirmed it: such an owner is
        stopped, or cannot be reached.
        """
        with self._lock:
            found = [
                Leak(entry.rref_id, fork_id, holder)
                for entry in self._owned.values()
                for fork_id, holder in entry.forks.items()
            ]
            found += [
                Leak(user.rref_id, user.fork_id, self.me) for user in self._held.values() if user.handles
            ]
            return found

    def holders(self, rref_id: RRefId) -> dict[ForkId, WorkerKey] | None:
        """List which worker holds which fork of a value; ``None`` if this worker does not own the value."""
        with self._lock:
            entry = self._owned.get(rref_id)
            return None if entry is None else dict(entry.forks)

    def held_values(self, first: int, most: int) -> tuple[list[HeldValue], bool]:
        """List up to ``most`` values that this worker owns, in order of age, and say whether there are more."""
        with self._lock:
            entries = list(self._owned.values())
            found = [
                HeldValue(entry.outcome, entry.handles, list(entry.forks.values()))
                for entry in entries[first : first + most]
            ]
        return found, len(entries) > first + most

    def debug_info(self) -> dict[str, int]:
        """Return torch's counters, under torch's names. A value that was never shared does not count."""
        with self._lock:
            counts = self.pending_counts()
            return {
                "num_owner_rrefs": counts.owners,
                "num_pending_users": sum(1 for user in self._held.values() if user.pending),
                "num_pending_futures": counts.drops + counts.children,
                "num_forks": sum(len(entry.forks) for entry in self._owned.values()),
                "num_pending_children": counts.children,
                "num_users": counts.users,
            }

    # -- inside, under the lock ------------------------------------------------------------------

    def _open(self) -> None:
        if self._closed:
            raise ShutdownError(_SHUT_DOWN, maybe_executed=False)

    def _new_id(self, kind: type[_Id]) -> _Id:
        return kind(self.me.rank, next(self._count), self.me.incarnation)

    def _why_dead(self, worker: WorkerKey) -> BaseException | None:
        """Return the error for a dead worker, or None. Former incarnations of this worker count as dead without a report."""
        error = self._deaths.get(worker)
        if error is None and worker.rank == self.me.rank and worker != self.me:
            error = PeerDiedError(
                "the worker that held the value of this RRef was restarted: create the RRef again",
                maybe_executed=False,
            )
        return error

    def _tell(self, to: WorkerKey, kind: type[Message], item: tuple[object, ...], step: Effects) -> None:
        if to not in self._deaths:
            step.add(to, kind, item)

    # -- values of this worker -------------------------------------------------------------------

    def _expect(self, rref_id: RRefId) -> Owned:
        """Return the entry of a value; if there is none, add an entry of a value whose creation has not arrived."""
        entry = self._owned.get(rref_id)
        if entry is None:
            entry = self._owned[rref_id] = Owned(rref_id)
        return entry

    def _is_gone(self, rref_id: RRefId) -> bool:
        """Say whether a value without an entry here will never be created.

        The value was released, its creator has died, or its creator is this worker, which adds the entry when it makes the id.
        """
        creator = rref_id.creator
        return rref_id in self._gone_rrefs or creator.rank == self.me.rank or creator in self._deaths

    def _register(self, rref_id: RRefId, fork_id: ForkId, holder: WorkerKey) -> bool:
        """Register a fork for its holder; the message may arrive before the creation of the value.

        Return False if the value is gone or will never exist, the fork was removed before, or another worker holds the fork.
        """
        entry = self._owned.get(rref_id)
        if entry is not None and fork_id in entry.forks:
            return entry.forks[fork_id] == holder
        if fork_id in self._gone_forks or (entry is None and self._is_gone(rref_id)):
            return False
        self._expect(rref_id).forks[fork_id] = holder
        return True

    def _remove(self, rref_id: RRefId, fork_id: ForkId, holder: WorkerKey | None, step: Effects) -> None:
        """Remove a fork, and remember its id, so that a late message does not register the fork again."""
        entry = self._owned.get(rref_id)
        if entry is not None and holder is not None and entry.forks.get(fork_id, holder) != holder:
            return
        self._gone_forks.put(fork_id, None)
        if entry is not None:
            entry.forks.pop(fork_id, None)
            self._settle_value(entry, step)

    def _set(self, rref_id: RRefId, outcome: Outcome) -> Effects:
        step = Effects()
        with self._lock:
            entry = self._owned.get(rref_id)
            if entry is not None:
                self._finish(entry, outcome, step)
                self._settle_value(entry, step)
        return step

    def _finish(self, entry: Owned, outcome: Outcome, step: Effects) -> None:
        """Set the outcome of an entry, unless it has one, and wake the threads that wait for it."""
        if entry.outcome is None:
            entry.outcome = outcome
            step.callbacks += [partial(waiter, outcome) for waiter in entry.waiters]
            entry.waiters = []

    def _settle_value(self, entry: Owned, step: Effects) -> None:
        """Release a value that has no forks and handles. If it is not created yet, only remove its entry."""
        if entry.forks or entry.handles or (entry.waiters and not entry.created):
            return
        if entry.created:
            self._gone_rrefs.put(entry.rref_id, None)
            self._finish(entry, Outcome(error=released(entry.rref_id)), step)
            step.release(entry.outcome)
        self._owned.pop(entry.rref_id, None)

    def _hold(self, rref_id: RRefId) -> Handle:
        """Add a handle on a value of this worker; if the value was released, each use of the handle raises an RRefError."""
        is_gone = rref_id not in self._owned and self._is_gone(rref_id)
        entry = self._expect(rref_id)
        if is_gone:
            entry.created = True
            entry.outcome = Outcome(error=released(rref_id))
        entry.handles += 1
        return Handle(entry.rref_id, None, self.me)

    # -- handles on values of other workers --------------------------------------------------------

    def _add_received_fork(self, data: ForkData, from_: WorkerKey, pending: Pending, step: Effects) -> None:
        """Add a handle for a received fork. If the owner itself sent the fork, it has registered the fork before."""
        held = self._held.get(data.fork_id)
        if held is None:
            direct = data.owner == from_
            parent = None if direct else from_
            error = self._why_dead(data.owner)
            held = self._held[data.fork_id] = HeldFork(
                data.rref_id, data.fork_id, data.owner, parent, not direct and error is None, error, handles=0
            )
            if error is not None:
                held.tell_owner = False
                if parent is not None:
                    self._accept(parent, data.fork_id, step)
            elif not direct:
                step.add(held.owner, ForkRequest, (held.rref_id, held.fork_id))
        if held.pending:
            held.waiting.append(pending)
            pending.expect()
        if not self._draining:
            held.handles += 1
        self._settle_handle(held, step)

    def _settle_handle(self, held: HeldFork, step: Effects) -> None:
        """If a fork has no RRef objects and no children and is not pending, remove the fork, and tell the owner."""
        if held.handles or held.children or held.pending or self._held.pop(held.fork_id, None) is None:
            return
        if held.tell_owner:
            self._tell(held.owner, UserDelete, (held.rref_id, held.fork_id), step)

    def _resolve(self, held: HeldFork, error: BaseException | None, step: Effects) -> None:
        """Record the owner's answer for a fork, or the ``error`` that replaces the answer. A fork keeps its first error."""
        if held.error is None:
            held.error = error
        if held.pending:
            held.pending = False
            waiting, held.waiting = held.waiting, []
            for pending in waiting:
                pending.settle(step)
            if held.parent is not None:
                self._accept(held.parent, held.fork_id, step)
        self._settle_handle(held, step)

    def _child_settled(self, fork_id: ForkId, step: Effects) -> None:
        """Remove a child, and release its parent fork if nothing else needs the parent. An unknown child has no effect."""
        child = self._children.pop(fork_id, None)
        if child is not None:
            child[0].children -= 1
            self._settle_handle(child[0], step)

    def _accept(self, parent: WorkerKey, fork_id: ForkId, step: Effects) -> None:
        """Tell the worker ``parent`` that the owner knows the child ``fork_id``, so that it may release its own fork."""
        if parent == self.me:
            self._child_settled(fork_id, step)
        else:
            self._tell(parent, ChildAccept, (fork_id,), step)


def _check_creation(rref_id: RRefId, fork_id: ForkId, from_: WorkerKey) -> None:
    if rref_id.creator != from_ or fork_id.creator != from_:
        raise ProtocolError("a worker has created an RRef with ids of another worker")


def _check_parent(forks: Sequence[ForkData], from_: WorkerKey) -> None:
    for data in forks:
        if data.fork_id.creator != from_:
            raise ProtocolError("a worker has sent an RRef that another worker has forked")
