"""The RRefs of one agent: connects the protocol's state machine to the agent.

The table (``protocol.py``) returns the messages to send; :class:`References` sends them, reports deaths to the table, and puts
forks into the header of every message that carries an RRef, so that they are processed even if the message is never unpickled.
``RRef.__del__`` only puts the handle into a queue: deletes are sent in batches, from the pool. Thread-safe.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgpack

from actorrpc import _time
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import Call, Execution, MailHeader
from actorrpc.agent.hooks import RECEIPT, MessageReferences
from actorrpc.agent.peers import MessageContext, Peer
from actorrpc.errors import PeerDiedError, ProtocolError, RemoteError, RpcError, RpcTimeoutError, RRefError
from actorrpc.futures import Future
from actorrpc.rpc.refcount.messages import (
    ForkId,
    RRefId,
    UserDelete,
    pack_forks,
    pack_message,
    unpack_forks,
    unpack_message,
)
from actorrpc.rpc.refcount.protocol import Effects, Handle, Pending, RRefTable
from actorrpc.serialization import codec, exceptions
from actorrpc.transport.signals import uninterruptible
from actorrpc.wire.frames import Header
from actorrpc.wire.identity import WorkerKey

__all__ = ["References"]

_BATCH_S: Final = 0.05
_GIVEN_UP: Final = "rref-failed"  # creator to owner: this creation has failed before its function ran


class References(MessageReferences):
    """The RRefs of one agent. Thread-safe.

    Args:
        default_timeout: a function that returns the default time-out of fetches and calls, in seconds.
        wrap: a function that makes the user's object from a handle and the future of the call that creates the value.
        make: the function that is called on an owner to create a value there.
    """

    def __init__(
        self,
        agent: Agent,
        default_timeout: Callable[[], float],
        *,
        wrap: Callable[[References, Handle, Future[None] | None], Any],
        make: Callable[..., Any],
    ) -> None:
        self.agent = agent
        self._wrap = wrap
        self._make = make
        self.default_timeout = default_timeout
        self.me = WorkerKey(agent.record.rank, agent.record.incarnation)
        self.table = RRefTable(self.me)
        #: The pending futures of the RRefs that :meth:`promise` has made. The search for deadlocks uses them.
        self.promised: weakref.WeakValueDictionary[RRefId, Future[Any]] = weakref.WeakValueDictionary()
        self._collecting = False
        self._peers: dict[WorkerKey, Peer] = {}  # living peers that peer_of() has found
        agent.on_notice[RECEIPT] = self._noticed
        agent.on_notice[_GIVEN_UP] = self._creation_given_up
        agent.on_peer_end.append(self._peer_ended)
        agent.references = self

    def wrapped(self, handle: Handle, creation: Future[None] | None = None) -> Any:
        """Return the user's object for a handle."""
        return self._wrap(self, handle, creation)

    # -- carrying out the effects of the table ------------------------------------------------------

    def carry_out(self, effects: Effects) -> None:
        """Send the messages of a step of the table and run its callbacks. The caller holds no lock."""
        for to, message in effects.messages:
            self._notify(to, RECEIPT, pack_message(message))
        for callback in effects.callbacks:
            callback()

    def _notify(self, to: WorkerKey, name: str, body: bytes) -> None:
        """Send a message of the protocol. Do nothing if its destination is dead, because _peer_ended() tells the table."""
        peer = self._peer(to)
        if peer is not None:
            self.agent.notify_surely(peer, name, body)

    def _peer(self, key: WorkerKey) -> Peer | None:
        """Return the peer of a key; None if it has ended. If another incarnation has the rank, report the death to the table."""
        try:
            peer = self.agent.peer(key.rank)
        except RpcError:
            return None
        if peer.record.incarnation == key.incarnation:
            return peer
        error = PeerDiedError(
            f"the worker of rank {key.rank} that held the value of this RRef has ended, and another one, {peer.name!r}, has "
            f"taken its place: create the RRef again there",
            maybe_executed=True,
            worker=peer.name,
        )
        self.carry_out(self.table.worker_died(key, error))
        return None

    def peer_of(self, key: WorkerKey) -> Peer:
        """Return the peer of a worker, which may be this worker.

        Raises:
            RRefError: the incarnation that ``key`` names has ended.
        """
        if key == self.me:
            return self.agent.self_peer
        peer = self._peers.get(key)
        if peer is not None and peer.state == "alive":
            return peer
        peer = self._peer(key)
        if peer is None:
            raise RRefError(
                f"the worker of rank {key.rank} that held the value of this RRef has ended: create the RRef again"
            )
        if peer.state == "alive":
            self._peers[key] = peer
        return peer

    def _noticed(self, peer: Peer, body: bytes) -> None:
        self.carry_out(self.table.handle(peer.key, unpack_message(body)))

    def _give_up(self, handle: Handle, error: BaseException) -> None:
        """Tell the owner that a creation has failed, so that threads there do not wait for its value."""
        owner = self._peer(handle.owner)
        dumps = codec.dumper(owner is not None and owner.same_main)
        limit = self.agent.settings.chunk // 4  # a notice is one frame, and the error may be in it twice
        packed = exceptions.dump(error, worker=self.agent.name, dumps=dumps, limit=limit)
        self._notify(handle.owner, _GIVEN_UP, msgpack.packb([_creation_of(handle), packed]))

    def _creation_given_up(self, peer: Peer, body: bytes) -> None:
        try:
            named, packed = msgpack.unpackb(body)
        except (ValueError, TypeError, msgpack.UnpackException) as unreadable:
            raise ProtocolError("the notice of a failed creation cannot be read") from unreadable
        if type(packed) is not bytes:
            raise ProtocolError("the notice of a failed creation contains no error")
        rref_id, fork_id = _created(named)
        error = exceptions.load(packed, loads=codec.loads)
        self.carry_out(self.table.creation_given_up(rref_id, fork_id, peer.key, error))

    def _peer_ended(self, peer: Peer) -> None:
        self._peers.pop(peer.key, None)
        if peer.record.is_visitor:
            return  # visitors hold no RRefs
        error = peer.died("an RRef", maybe_executed=True)
        self.carry_out(self.table.worker_died(peer.key, error))

    # -- in messages ---------------------------------------------------------------------------------

    def pack(self, sent: list[Any]) -> bytes:
        return pack_forks(sent)

    def roll_back(self, context: MessageContext) -> None:
        if context.sent:
            sent, context.sent = context.sent, None
            self.carry_out(self.table.rollback(sent))

    def received(self, context: MessageContext, packed: bytes) -> None:
        received = self.table.receive(unpack_forks(packed), context.peer.key)
        context.received = [received.pending, *map(self.wrapped, received.handles)]
        self.carry_out(received.effects)

    def refuse(self, peer: Peer, packed: bytes) -> None:
        self.carry_out(self.table.refuse(unpack_forks(packed), peer.key))

    def confirm(self, received: list[Any], execution: Execution) -> None:
        """Wait until the owners have registered all RRefs in the arguments of a call; only then may the call be executed."""
        pending: Pending = received[0]
        if pending.done:
            return
        done = threading.Lock()
        done.acquire()
        if not pending.when_done(done.release):
            return
        while not pending.done:
            remaining = execution.deadline - _time.now()
            if remaining <= 0:
                raise RpcTimeoutError(
                    "the call was not executed: the workers that hold the values of the RRefs in its arguments did not answer in "
                    "time. Give a longer timeout=, or look at what they are doing",
                    maybe_executed=False,
                )
            if done.acquire(timeout=min(_time.patience(remaining), 5.0)):
                return

    # -- the end of handles --------------------------------------------------------------------------

    def drop(self, handle: Handle) -> None:
        """Queue the release of a handle. Takes no lock, because ``__del__`` calls this method."""
        self.table.drop_later(handle)
        if not self._collecting:
            self._collecting = True
            clock = self.agent.clock
            clock.call_soon(lambda: clock.after(_BATCH_S, self._collect_soon))

    def _collect_soon(self) -> None:
        if not self.agent.closed_down:
            self.agent.submit(self.collect)

    def settle(self, until: float) -> None:
        """Wait until no handle or fork is left (``PendingCounts.idle``), at most until ``until`` (``_time.now()``)."""
        pause = 0.0005
        while not self.table.pending_counts().idle and _time.now() < until:
            self.collect()
            _time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def collect(self) -> None:
        """Release the queued handles now."""
        self._collecting = False
        self.carry_out(self.table.collect())

    # -- creating and fetching -------------------------------------------------------------------------

    def copy_of(self, error: BaseException) -> BaseException:
        """Return a copy of an error of the table: callers raise only copies.

        Each raise adds frames to the traceback, and the frames may refer to the RRef whose entry keeps the error.
        """
        try:
            if isinstance(error, RemoteError):
                dumps = codec.dumper(self.agent.self_peer.same_main)
                packed = exceptions.dump(error, worker=self.agent.name, dumps=dumps)
                return exceptions.load(packed, loads=codec.loads)
            made = copy.copy(error)
            made.__cause__ = error.__cause__
        except Exception:  # a user's class that cannot be copied
            return error.with_traceback(None)
        return made if type(made) is type(error) else error.with_traceback(None)

    def promise(self, future: Future[Any]) -> Any:
        """Return an RRef, owned by this worker, to the value of a future. If the future fails, the RRef gets its error."""
        handle = self.table.create_user(self.me)
        # No call creates the value: remove the fork that a creation would hold, so that only the RRef's holders keep the entry.
        self.carry_out(self.table.confirmed(handle))
        rref = self.wrapped(handle)
        rref_id = handle.rref_id
        self.promised[rref_id] = future

        def fulfil(done: Future[Any]) -> None:
            error = done.error
            if error is None:
                self.carry_out(self.table.set_value(rref_id, done))
            else:
                done.acknowledge()  # holders of the RRef get the error
                self.carry_out(self.table.set_error(rref_id, self.copy_of(error)))

        future.add_done_callback(fulfil)
        return rref

    @uninterruptible
    def create(
        self,
        peer: Peer,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        label: str,
        *,
        mail: MailHeader | None = None,
        future: Future[Any] | None = None,
    ) -> Any:
        """Call a function on a worker, which keeps the result; return an RRef to the result at once.

        A signal handler (Ctrl-C) runs while this method blocks, or after it has returned. If a handler raised at another point,
        an entry of the reference table would never be released.

        Args:
            mail: the header that names the mailbox to which the call is sent, in place of ``function``. The worker stores the
                result with :meth:`keep`.
            future: the future of the call; by default a new one.
        """
        handle = self.table.create_user(peer.key)
        if future is None:
            future = Future()
        rref = self.wrapped(handle, future)
        is_unsent = False

        def created(done: Future[None]) -> None:
            done.acknowledge()  # the next use of the RRef raises the error
            error = done.error
            if is_unsent:
                return
            if error is None:
                self.carry_out(self.table.confirmed(handle))
            else:
                may_exist = (
                    handle.fork_id is not None and peer.state == "alive" and not self.agent.closed_down
                )
                reached = may_exist or getattr(error, "maybe_executed", True) is not False
                self.carry_out(self.table.creation_failed(handle, error, reached=reached))
                if may_exist:  # a pool thread tells the owner, because this thread may be writing frames
                    self.agent.submit(partial(self._give_up, handle, error))

        future.add_done_callback(created)
        if mail is None:
            args, kwargs = (handle.rref_id, handle.fork_id, function, args, kwargs), {}
        else:
            header: Header = {**mail.header, "num_returns": 0, "rref": _creation_of(handle)}
            mail = MailHeader(header, interrupts=mail.interrupts, late=mail.late)
        try:
            call = Call(self.agent, peer, self._make, timeout, future, label, None, mail)
            self.agent.send(call, self._make, args, kwargs)
        except BaseException as error:
            if future.claim():  # otherwise the call has ended, and ``created`` gets the outcome
                is_unsent = True
                self.carry_out(self.table.creation_failed(handle, error, reached=False))
                future.conclude(None, error)
                future.cover()  # an actor's route may fail it later, with another error
            raise
        self.agent.flush()
        return rref

    def keep(self, creation: bytes, creator: WorkerKey, value: Any) -> None:
        """Store the result of a mailbox's call, as the value of the RRef that the header of the call names.

        Raises:
            ProtocolError: ``creation`` names no RRef, or an RRef that ``creator`` did not create.
        """
        rref_id, fork_id = _created(creation)
        if creator == self.me or self.table.creation_arrived(rref_id, fork_id, creator):
            self.carry_out(self.table.set_value(rref_id, value))


def _creation_of(handle: Handle) -> bytes:
    """Return the bytes that identify a creation in messages."""
    fork_id = handle.fork_id or ForkId(*handle.rref_id)  # the RRef's own id, if this worker is the owner
    return pack_message(UserDelete(((handle.rref_id, fork_id),)))


def _created(creation: Any) -> tuple[RRefId, ForkId]:
    """Return the ids of the creation that a message names.

    Raises:
        ProtocolError: the message names no creation.
    """
    message = unpack_message(creation) if type(creation) is bytes else None
    if type(message) is not UserDelete or len(message.items) != 1:
        raise ProtocolError("the ids of the creation of an RRef cannot be read")
    return message.items[0]
