"""The RRef protocol as a state machine: who holds which fork of which RRef, and when a value may go.

One :class:`RRefTable` per agent, used by any thread. It does no I/O, reads no clock and calls nobody: each
method changes the tables under one lock and returns :class:`Effects`, which the caller carries out afterwards
(messages to send, waiters to wake, values to let die).

What it promises while no worker dies: a value lives while a handle, or a message under way that carries one,
exists (a parent stays until the owner knows its child), and is released when the last is gone. What it needs
of the agent: each message arrives at least once unless its destination dies, in any order, however often; a
call arrives at most once. All that a dead worker held is released at once; its key never comes back.

The lock is re-entrant: the garbage collector may run a finaliser that uses an RRef on a thread that is in it.
It guards everything in the table and its Pendings but the queue of drops. No other lock is taken under it.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from actorrpc._exception_text import line_of
from actorrpc.errors import ProtocolError, RRefError, ShutdownError
from actorrpc.rpc.refcount.messages import (
    MAX_NAME,
    ForkAck,
    ForkData,
    ForkId,
    ForkRequest,
    Message,
    RRefId,
    UserDelete,
)
from actorrpc.rpc.refcount.tables import (
    Deaths,
    Effects,
    Handle,
    HandleTable,
    Outcome,
    Owned,
    Pending,
    ValueTable,
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
    """A fork that is still there when it should not be."""

    rref_id: RRefId
    fork_id: ForkId
    holder: WorkerKey


_SHUT_DOWN: Final = (
    "the cluster or group of this RRef or handle was shut down: make it again in the present one"
)


class HeldValue(NamedTuple):
    """A value that lives here, and who refers to it.

    Attributes:
        outcome: None where it is not there yet.
        handles: how many objects of this worker refer to it.
        holders: the worker of each fork.
    """

    outcome: Outcome | None
    handles: int
    holders: list[WorkerKey]


class PendingCounts(NamedTuple):
    """What still keeps this worker from leaving; all zero when nothing does."""

    users: int
    children: int
    owners: int  # with forks, or awaited by somebody and not yet created
    drops: int

    @property
    def idle(self) -> bool:
        """Whether nothing is left to wait for."""
        return not any(self)


class ReceivedFork(NamedTuple):
    """What came of the forks in a message: a handle for each, in order."""

    handles: list[Handle]
    pending: Pending
    effects: Effects


@uninterruptible
class RRefTable:
    """Everything one worker knows of RRefs. Thread-safe; see the module's docstring for the rules.

    Args:
        me: this life of this worker.
        tombstones: how many released ids are remembered, so that late messages do not bring them back.
    """

    def __init__(self, me: WorkerKey, *, tombstones: int = 10_000) -> None:
        self.me = me
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._count = itertools.count()
        self._drops: deque[Handle] = deque()
        self._deaths = Deaths(me)
        self._values = ValueTable(me, self._deaths, tombstones)
        self._held = HandleTable(me, self._deaths)
        self._closed = False

    # -- making RRefs ----------------------------------------------------------------------------

    def create_owner(self, value: object) -> Handle:
        """Put a value that is already here behind a new RRef.

        Raises:
            ShutdownError: after :meth:`close`.
        """
        with self._lock:
            self._open()
            rref_id = self._new_rref_id()
            self._values.entries[rref_id] = Owned(rref_id, created=True, outcome=Outcome(value), handles=1)
            return Handle(rref_id, None, self.me)

    def handle_on(self, rref_id: RRefId) -> Handle:
        """Return one more handle on a value of this worker, for a message whose sender holds one until it is answered.

        Raises:
            ShutdownError: after :meth:`close`.
        """
        with self._lock:
            self._open()
            self._values.hold(rref_id)
            return Handle(rref_id, None, self.me)

    def handle_if_held(self, rref_id: RRefId) -> Handle | None:
        """Return one more handle on a value of this worker; None where there is none of that name, or nothing holds it any more.

        Raises:
            ShutdownError: after :meth:`close`.
        """
        with self._lock:
            self._open()
            entry = self._values.entries.get(rref_id)
            if entry is None or not entry.created:
                return None
            entry.handles += 1
            return Handle(rref_id, None, self.me)

    def create_user(self, owner: WorkerKey) -> Handle:
        """Start a remote creation, which ends with :meth:`confirmed` or :meth:`creation_failed`.

        Where this worker is the owner, a fork of the RRef's own name holds the entry until then, and
        :meth:`creation_arrived` is not needed.

        Raises:
            ShutdownError: after :meth:`close`.
        """
        with self._lock:
            self._open()
            rref_id = self._new_rref_id()
            if owner == self.me:
                pin = {ForkId(*rref_id): self.me}
                self._values.entries[rref_id] = Owned(rref_id, created=True, forks=pin, handles=1)
                return Handle(rref_id, None, owner)
            fork_id = self._new_fork_id()
            self._held.add(rref_id, fork_id, owner)
            return Handle(rref_id, fork_id, owner)

    def confirmed(self, handle: Handle) -> Effects:
        """Note that the owner has answered the creation. After a failure of the same creation: no effect."""
        step = Effects()
        with self._lock:
            if handle.fork_id is None:
                self._values.remove(handle.rref_id, ForkId(*handle.rref_id), self.me, step)
            elif (user := self._held.entries.get(handle.fork_id)) is not None:
                user.tell_owner = True
                self._held.resolve(user, None, step)
            elif not self._closed and handle.owner not in self._deaths:
                step.add(handle.owner, UserDelete, (handle.rref_id, handle.fork_id))
        return step.done()

    def creation_failed(self, handle: Handle, error: BaseException, *, reached: bool = True) -> Effects:
        """Note that the creation was not answered. ``reached``: whether the owner may have heard of it."""
        step = Effects()
        with self._lock:
            if handle.fork_id is None:
                entry = self._values.entries.get(handle.rref_id)
                if entry is not None:
                    self._values.finish(entry, Outcome(error=error), step)
                self._values.remove(handle.rref_id, ForkId(*handle.rref_id), self.me, step)
            else:
                user = self._held.entries.get(handle.fork_id)
                if user is not None and user.pending:
                    user.tell_owner = reached
                    self._held.resolve(user, error, step)
        return step.done()

    def drop_later(self, handle: Handle) -> None:
        """Queue the end of one local RRef object, once for each handle given out.

        Takes no lock and calls nobody: made for ``__del__``. Does nothing in a forked child.
        """
        if os.getpid() == self._pid and not self._closed:
            self._drops.append(handle)

    def collect(self) -> Effects:
        """Carry out the queued drops; one message per owner for up to 100 of them."""
        step = Effects()
        with self._lock:
            self._collect(step)
        return step.done()

    # -- the owner's side of calls ---------------------------------------------------------------

    def creation_arrived(self, rref_id: RRefId, fork_id: ForkId, from_: WorkerKey) -> bool:
        """Register a creation before its function runs. ``False``: nobody wants the result any more, or it was given up.

        Raises:
            ProtocolError: the ids are not the sender's.
        """
        if rref_id.creator != from_ or fork_id.creator != from_:
            raise ProtocolError("creation of an RRef with ids of another worker")
        with self._lock:
            return not self._closed and self._values.arrived(rref_id, fork_id, from_)

    def creation_given_up(
        self, rref_id: RRefId, fork_id: ForkId, from_: WorkerKey, error: BaseException
    ) -> Effects:
        """Note that a creation has failed before its function ran, and never will: the RRef has ``error`` for good.

        Without effect where the function runs or has run: then its outcome counts.

        Raises:
            ProtocolError: the ids are not the sender's.
        """
        if rref_id.creator != from_ or fork_id.creator != from_:
            raise ProtocolError("the failure of a creation with ids of another worker")
        step = Effects()
        with self._lock:
            if not self._closed:
                self._values.given_up(rref_id, fork_id, from_, error, step)
        return step.done()

    def set_value(self, rref_id: RRefId, value: object) -> Effects:
        """Give an RRef its value. Without effect if it has a value or an error, or was released."""
        return self._set(rref_id, Outcome(value))

    def set_error(self, rref_id: RRefId, error: BaseException) -> Effects:
        """Give an RRef an error for good. Without effect if it has a value or an error, or was released."""
        return self._set(rref_id, Outcome(error=error))

    def outcome(self, rref_id: RRefId) -> Outcome | None:
        """Look at an RRef that this worker owns; ``None``: neither value nor error yet.

        Raises:
            RRefError: it is not here (any more).
        """
        with self._lock:
            entry = self._values.entries.get(rref_id)
            if entry is None:
                raise released(rref_id)
            return entry.outcome

    def known_outcome(self, rref_id: RRefId | tuple[int, int, str]) -> Outcome | None:
        """Give the outcome of an RRef that is here and has one. Takes no lock: an outcome never changes."""
        entry = self._values.entries.get(rref_id)  # type: ignore[arg-type]
        return None if entry is None else entry.outcome

    def fetch(self, rref_id: RRefId, waiter: Callable[[Outcome], object]) -> Outcome | None:
        """Give what :meth:`outcome` would, or keep ``waiter`` until there is an outcome.

        A fetch may overtake the creation. The caller bounds the wait and ends it by :meth:`cancel_fetch`.
        """
        with self._lock:
            entry = self._values.entries.get(rref_id)
            if entry is None:
                if self._closed:
                    return Outcome(
                        error=ShutdownError("the worker that holds the value of this RRef was shut down")
                    )
                if self._values.gone(rref_id):
                    return Outcome(error=released(rref_id))
                entry = self._values.expect(rref_id)
            if entry.outcome is None:
                entry.waiters.append(waiter)
            return entry.outcome

    def cancel_fetch(self, rref_id: RRefId, waiter: Callable[[Outcome], object]) -> Effects:
        """Forget the very object that was given to :meth:`fetch`."""
        step = Effects()
        with self._lock:
            entry = self._values.entries.get(rref_id)
            if entry is not None:
                entry.waiters = [kept for kept in entry.waiters if kept is not waiter]
                self._values.settle(entry, step)
        return step.done()

    # -- RRefs in messages -----------------------------------------------------------------------

    def fork(self, handle: Handle, to: WorkerKey, type_name: str = "") -> ForkData:
        """Make a fork for a message to ``to``, which may be any worker, this one too.

        Raises:
            RRefError: the RRef was released here, or failed (the error is the cause).
            ShutdownError: after :meth:`close`.
        """
        failed: BaseException | None = None
        with self._lock:
            self._open()
            fork_id = self._new_fork_id()
            if handle.fork_id is None:
                entry = self._values.entries.get(handle.rref_id)
                if entry is not None:
                    if to not in self._deaths:
                        entry.forks[fork_id] = to
                    return ForkData(self.me, handle.rref_id, fork_id, type_name[:MAX_NAME])
            else:
                user = self._held.entries.get(handle.fork_id)
                if user is not None:
                    failed = user.error
                    if failed is None:
                        if to not in self._deaths:
                            self._held.keep_for_child(user, fork_id, to)
                        return ForkData(user.owner, user.rref_id, fork_id, type_name[:MAX_NAME])
        if failed is None:
            raise released(handle.rref_id)
        raise RRefError(
            f"an RRef without a value cannot be sent to other workers: {line_of(failed)}"
        ) from failed

    def rollback(self, forks: Iterable[ForkData]) -> Effects:
        """Undo forks made for a message that certainly does not arrive (pickling or sending failed).

        Not for calls that timed out: their message may still arrive, and settles its forks then.
        """
        step = Effects()
        with self._lock:
            for data in forks:
                if data.owner == self.me:
                    self._values.remove(data.rref_id, data.fork_id, None, step)
                else:
                    self._held.child_settled(data.fork_id, step)
        return step.done()

    def receive(
        self, forks: Sequence[ForkData], from_: WorkerKey, *, into: Pending | None = None
    ) -> ReceivedFork:
        """Take the RRefs of a message; drop each handle once.

        The function that they are arguments of may start only when ``pending`` is done. ``into`` adds them to
        an earlier one.

        Raises:
            ProtocolError: a fork was not made by the sender.
            ShutdownError: after :meth:`close`.
        """
        _check_parent(forks, from_)
        step = Effects()
        pending = Pending(self._lock) if into is None else into
        handles: list[Handle] = []
        with self._lock:
            self._open()
            for data in forks:
                if data.owner == self.me:
                    self._values.take(data, from_, step)
                    if from_ != self.me:
                        self._held.accept(from_, data.fork_id, step)
                    handles.append(Handle(data.rref_id, None, self.me))
                else:
                    self._held.take(data, from_, pending, step)
                    handles.append(Handle(data.rref_id, data.fork_id, data.owner))
        return ReceivedFork(handles, pending, step.done())

    def refuse(self, forks: Sequence[ForkData], from_: WorkerKey) -> Effects:
        """Settle the forks of a message that is not decoded (late, cancelled, or it cannot be).

        Raises:
            ProtocolError: a fork was not made by the sender.
        """
        _check_parent(forks, from_)
        step = Effects()
        with self._lock:
            if not self._closed:
                for data in forks:
                    if data.owner != from_:
                        self._held.accept(from_, data.fork_id, step)
                    elif from_ == self.me:
                        self._values.remove(data.rref_id, data.fork_id, self.me, step)
                    elif from_ not in self._deaths:
                        step.add(from_, UserDelete, (data.rref_id, data.fork_id))
        return step.done()

    def is_confirmed(self, handle: Handle) -> bool:
        """Say whether the owner is known to know this handle."""
        with self._lock:
            if handle.fork_id is None:
                return True
            user = self._held.entries.get(handle.fork_id)
            return user is not None and not user.pending and user.error is None

    def failure(self, handle: Handle) -> BaseException | None:
        """Give the error that a user's handle failed with: creation not answered, owner dead, value gone. Takes no lock."""
        user = None if handle.fork_id is None else self._held.entries.get(handle.fork_id)
        return None if user is None else user.error

    # -- messages and deaths ---------------------------------------------------------------------

    def handle(self, from_: WorkerKey, message: Message) -> Effects:
        """Act on a message of another worker. Each may come twice, late, or from a worker that is dead."""
        step = Effects()
        with self._lock:
            if self._closed or from_ in self._deaths:
                return step
            if isinstance(message, UserDelete):
                for rref_id, fork_id in message.items:
                    self._values.remove(rref_id, fork_id, from_, step)
            elif isinstance(message, ForkRequest):
                for rref_id, fork_id in message.items:
                    held = self._values.register(rref_id, fork_id, from_)
                    step.add(from_, ForkAck, (rref_id, fork_id, held))
            elif isinstance(message, ForkAck):
                for rref_id, fork_id, held in message.items:
                    self._held.acknowledged(rref_id, fork_id, held, from_, step)
            else:
                for (fork_id,) in message.items:
                    child = self._held.children.get(fork_id)
                    if child is not None and child[1] == from_:
                        self._held.child_settled(fork_id, step)
        return step.done()

    def worker_died(self, worker: WorkerKey, error: BaseException) -> Effects:
        """Release all that ``worker`` held, and fail all that it owned with ``error``, for good."""
        step = Effects()
        with self._lock:
            if self._closed or worker in self._deaths or worker == self.me:
                return step
            self._deaths.put(worker, error)
            self._values.died(worker, error, step)
            self._held.died(worker, error, step)
        return step.done()

    # -- leaving, and looking --------------------------------------------------------------------

    def delete_all_users(self) -> Effects:
        """Let go of every handle on other workers' values, those still to come included."""
        step = Effects()
        with self._lock:
            self._collect(step)
            self._held.drop_all(step)
        return step.done()

    def close(self) -> Effects:
        """Release everything and fall silent: later drops and messages have no effect. Wakes the threads that wait."""
        step = Effects()
        with self._lock:
            self._closed = True
            error = ShutdownError(_SHUT_DOWN)
            self._values.close(error, step)
            self._held.close(error, step)
            self._drops.clear()
        return step.done()

    def pending_counts(self) -> PendingCounts:
        """Count what still has to end before this worker may leave."""
        with self._lock:
            owners = sum(1 for entry in self._values.entries.values() if entry.forks or not entry.created)
            return PendingCounts(len(self._held.entries), len(self._held.children), owners, len(self._drops))

    def leaks(self) -> list[Leak]:
        """List the forks of values that live here, and the handles that are held here.

        A fork that nothing here refers to any more is none of them, though its owner may not have said that it knows it:
        where the owner does not answer (it is stopped, or cut off), that is not for this worker to mend.
        """
        with self._lock:
            found = [
                Leak(entry.rref_id, fork_id, holder)
                for entry in self._values.entries.values()
                for fork_id, holder in entry.forks.items()
            ]
            found += [
                Leak(user.rref_id, user.fork_id, self.me)
                for user in self._held.entries.values()
                if user.handles
            ]
            return found

    def holders(self, rref_id: RRefId) -> dict[ForkId, WorkerKey] | None:
        """List who holds forks of a value that lives here; ``None``: it does not."""
        with self._lock:
            entry = self._values.entries.get(rref_id)
            return None if entry is None else dict(entry.forks)

    def held_values(self, first: int, most: int) -> tuple[list[HeldValue], bool]:
        """List up to ``most`` of the values that live here, in the order in which they came, and say whether there are more."""
        with self._lock:
            entries = list(self._values.entries.values())
            found = [
                HeldValue(entry.outcome, entry.handles, list(entry.forks.values()))
                for entry in entries[first : first + most]
            ]
        return found, len(entries) > first + most

    def debug_info(self) -> dict[str, int]:
        """Give the counters that torch has, under its names. A value that was never shared does not count."""
        with self._lock:
            counts = self.pending_counts()
            pending = sum(1 for user in self._held.entries.values() if user.pending)
            return {
                "num_owner_rrefs": counts.owners,
                "num_pending_users": pending,
                "num_pending_futures": counts.drops + counts.children,
                "num_forks": sum(len(entry.forks) for entry in self._values.entries.values()),
                "num_pending_children": counts.children,
                "num_users": counts.users,
            }

    # -- inside, under the lock ------------------------------------------------------------------

    def _open(self) -> None:
        if self._closed:
            raise ShutdownError(_SHUT_DOWN, maybe_executed=False)

    def _new_rref_id(self) -> RRefId:
        return RRefId(self.me.rank, next(self._count), self.me.incarnation)

    def _new_fork_id(self) -> ForkId:
        return ForkId(self.me.rank, next(self._count), self.me.incarnation)

    def _set(self, rref_id: RRefId, outcome: Outcome) -> Effects:
        step = Effects()
        with self._lock:
            entry = self._values.entries.get(rref_id)
            if entry is not None:
                self._values.finish(entry, outcome, step)
                self._values.settle(entry, step)
        return step.done()

    def _collect(self, step: Effects) -> None:
        for _ in range(len(self._drops)):
            handle = self._drops.popleft()
            if handle.fork_id is None:
                self._values.drop(handle.rref_id, step)
            else:
                self._held.drop(handle.fork_id, step)


def _check_parent(forks: Sequence[ForkData], from_: WorkerKey) -> None:
    for data in forks:
        if data.fork_id.creator != from_:
            raise ProtocolError("an RRef that was not sent by its parent")
