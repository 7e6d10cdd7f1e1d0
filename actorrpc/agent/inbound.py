"""Handling the frames that a connection has read.

``control`` runs under the connection's read lock, on whichever thread reads; it is short, runs no user code and never unpickles.
``deliver`` runs after the lock was released: it ends the calls that were answered and queues the requests. On the thread of a
caller that waits for a reply, it leaves requests to the pool, and the casts to this thread if ``WAITING.casts`` is set.

*Mail* is a request for the mailbox of an actor: a frame with the MAIL flag. Its header names the mailbox, so that mail is queued
in the order in which it arrives, without being unpickled, while the read lock is held.

A request that arrives a second time is not executed again, and the references in an answer are counted once
(:class:`~actorrpc.agent.peers.DuplicateFilter`). A connection delivers each byte once, even if it is resumed over another socket,
so a frame arrives twice only because of a fault in a peer or in the code that resumes connections. As an execution cannot be
undone, the number of each request is checked before it is executed.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from actorrpc._limits import explain_memory
from actorrpc.agent import outbound
from actorrpc.errors import LimitError, ProtocolError, UnknownWorkerError
from actorrpc.futures import WAITING
from actorrpc.transport.stream import Goodbye
from actorrpc.wire import frames
from actorrpc.wire.frames import Frame, pack_frame, unpack_header

if TYPE_CHECKING:
    from actorrpc.agent.agent import Agent
    from actorrpc.agent.calls import Call
    from actorrpc.agent.peers import Peer
    from actorrpc.transport.connection import Connection

__all__ = ["Inbox", "MailRouter"]

_log = logging.getLogger("actorrpc")
_REPLIES: Final = (frames.REPLY, frames.FAILURE)


class MailRouter(Protocol):
    """Delivers mail to mailboxes. Called under a connection's read lock: quick, runs no user code, never unpickles."""

    def deliver(self, conn: Connection | None, peer: Peer, frame: Frame) -> None:
        """Deliver complete mail.

        Args:
            conn: None for mail of this worker to itself; then the caller holds no read lock.
            peer: the sender, which may have cancelled the call already: see ``Peer.cancelled``.
        """

    def announce(self, conn: Connection | None, peer: Peer, frame: Frame) -> bool:
        """Reserve a place in the mailbox for mail whose body follows (:meth:`complete`); return whether a place is reserved."""

    def complete(self, conn: Connection | None, peer: Peer, frame: Frame) -> None:
        """Deliver mail whose place was reserved, unless its call was given up or refused meanwhile."""

    def abandon(self, peer: Peer, id: int) -> None:
        """Release the place in the mailbox that was reserved for mail whose rest will not arrive."""


class Inbox:
    """Handles what the connections of one agent read. Thread-safe.

    Attributes:
        prompt: names of notices whose handlers are quick and never wait. A pool thread that has read such a notice runs the
            handler itself, before it handles the requests after the notice.
        mail_router: delivers requests to mailboxes; None: this worker has no mailboxes and refuses these requests.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.submit = agent.pool.submit
        self.prompt: set[str] = set()
        self.mail_router: MailRouter | None = None

    def control(self, conn: Connection, frame: Frame) -> Frame | None:
        """Handle a control frame under the read lock; return a frame to be delivered after the lock was released, or None."""
        kind, peer = frame.kind, conn.peer
        if kind == frames.INTRO:
            self._agent.connector.introduced(conn, frame.body)
        elif peer is None:
            raise ProtocolError("the peer did not introduce itself")
        elif kind == frames.REQUEST or kind in _REPLIES or kind == frames.CHUNK:
            whole: Frame | None = frame
            if kind == frames.CHUNK:
                whole = self._chunk(conn, frame)
            elif frame.flags & (frames.OBJECTS | outbound.STREAM):
                whole = self._message(conn, peer, frame)
            if whole is None or not whole.flags & frames.MAIL:
                return whole
            self.deliver_mail(conn, peer, whole)
        elif kind == frames.UNREAD:
            kind, size = frame.buffers
            self._refuse_large(conn, frame._replace(kind=kind, buffers=None), size)
        elif kind == frames.CANCEL:
            peer.on_cancel(frame.id, frame.flags, self._agent.pool.submit)
        elif kind == frames.CREDIT:
            call = peer.pending.get(frame.id)
            if call is not None:
                peer.window.release(call)
        elif kind == frames.PING:
            # PING is answered on this thread, because all other threads may be in user code. Both calls return at once.
            conn.outbox.append(pack_frame(frames.PONG, frame.id))
            conn.flush()
        elif kind == frames.ACK:
            if conn.session is not None:
                conn.session.acknowledged(frame.id)
        elif kind == frames.LANE_FREE:
            conn.lane.heard_freed(frame.body)
        elif kind == frames.LANE_RETIRE:
            conn.lane.heard_retired(frame.body, self._agent.pool.submit)
        elif kind == frames.LANE_DEVICES:
            conn.lane.heard_devices(frame.body)
        elif kind == frames.DEFINITION:
            peer.definitions.add(frame.body[:16], frame.body[16:])
        elif kind == frames.STREAM_ABORT:
            begun = conn.assemblies.pop(frame.id, None)
            if begun is not None and begun.frame is not None and begun.frame.flags & frames.MAIL:
                self._abandon(peer, begun.frame.id)
        elif kind == frames.GOODBYE:
            conn.goodbye = Goodbye.GIVES_UP if frame.flags else Goodbye.LEAVES
        elif kind == frames.NOTICE:
            return frame
        return None

    def _message(self, conn: Connection, peer: Peer, frame: Frame) -> Frame | None:
        """Return a message together with its object segments; None if its buffers will arrive in chunks."""
        if frame.flags & frames.OBJECTS:
            numbers = unpack_header(frame.extra).get("objects")
            if not isinstance(numbers, list):
                raise ProtocolError("a message with objects does not list them")
            # If the message is never opened, its segments are released when the frame is freed.
            frame = frame._replace(objects=conn.lane.borrowed().claim_objects(numbers))
        if not frame.flags & outbound.STREAM:
            return frame
        stream, assembly = outbound.begin_stream(self._agent.settings, self._agent.buffers, frame)
        if stream not in conn.assemblies:  # otherwise the frame is a duplicate
            self._agent.scheduler.keep_trim()
            conn.assemblies[stream] = assembly
            if assembly.frame is None:
                self._refuse_large(conn, frame, assembly.size)
            elif frame.flags & (frames.MAIL | frames.RESERVED) == frames.MAIL and frame.id not in peer.begun:
                if self.mail_router is not None and self.mail_router.announce(conn, peer, frame):
                    assembly.frame = frame._replace(flags=frame.flags | frames.RESERVED)
        return None

    @staticmethod
    def _chunk(conn: Connection, frame: Frame) -> Frame | None:
        """Record a chunk that has been read; return its message if it was the last chunk."""
        begun = conn.assemblies.get(frame.id)
        if begun is None or not begun.record_chunk(frame.chain, frame.flags):
            return None
        del conn.assemblies[frame.id]
        whole: Frame | None = begun.frame
        return None if whole is None else whole._replace(buffers=begun.buffers)

    def deliver_mail(self, conn: Connection | None, peer: Peer, frame: Frame) -> None:
        """Pass mail to the mail router. ``conn`` is None for mail of this worker to itself."""
        router, is_reserved = self.mail_router, frame.flags & frames.RESERVED
        if is_reserved and not frame.body and not frame.buffers:
            # The frame only reserves a place in the mailbox, for mail that follows.
            if router is not None and frame.id not in peer.begun and frame.id not in peer.running:
                router.announce(conn, peer, frame._replace(flags=frames.MAIL))
        elif not peer.begun.first(frame.id):
            _log.warning("message %d of %r came twice; it is delivered once", frame.id, peer.name)
        elif router is None:
            error = UnknownWorkerError(f"worker {self._agent.name!r} has no actors")
            self.submit(partial(self._agent.executor.refuse, conn, frame, error))
        elif is_reserved:
            router.complete(conn, peer, frame)
        else:
            router.deliver(conn, peer, frame)

    def _abandon(self, peer: Peer, id: int) -> None:
        if self.mail_router is not None:
            self.mail_router.abandon(peer, id)

    def _refuse_large(self, conn: Connection, frame: Frame, size: int) -> None:
        """Refuse a message for which there is no memory: answer a request with an error, or fail the call of a reply."""
        peer = conn.peer
        where = f"worker {self._agent.name!r}: {explain_memory()}"
        much = f"{size >> 20} MiB" if size >> 20 else f"{size} bytes"
        if frame.kind == frames.REQUEST:
            name = unpack_header(frame.extra).get("method") if frame.extra else None
            what = f"the call of {name}()" if isinstance(name, str) else "the call"
            error = LimitError(
                f"{what} was not executed: there is no memory for its arguments, of {much}, in {where}"
            )

            def refuse() -> None:
                self._agent.executor.refuse(conn, frame, error)
                if frame.flags & frames.MAIL:
                    self._abandon(peer, frame.id)  # the call may have a reserved place in the mailbox

            self.submit(refuse)
            return
        call: Call | None = peer.pending.pop(frame.id, None)
        if call is not None:
            error = LimitError(f"there is no memory for the result of {call}, of {much}, in {where}")
            error.maybe_executed = True
            call.fail(error, self._agent.pool.submit)
        if not frame.flags & outbound.STREAM:  # a message in chunks has no buffers in shared memory
            self._agent.pool.submit(partial(self.discard, conn, frame))

    def deliver(self, conn: Connection, batch: list[Frame], waiting: bool) -> bool:
        """Queue requests and end the calls that were answered, after the read lock was released.

        ``waiting``: the calling thread waits for its own reply, so the pool executes the requests. Return whether requests were
        queued; if not ``waiting``, also whether notices were queued.
        """
        try:
            peer = conn.peer
            if peer is None:  # the peer has not sent its record yet
                conn.close(ProtocolError("the peer did not introduce itself"))
                return False
            pool = self._agent.pool
            if not waiting and not pool.idle:
                pool.ensure_reader()  # unpickling a reply may run user code, during which another thread has to read
            received_at = conn.last_received
            count = requests = 0
            for frame in batch:
                kind = frame[0]
                if kind != frames.REQUEST and kind <= frames.FAILURE:
                    self.reply(peer, frame, waiting, conn)
                elif kind == frames.REQUEST:
                    if waiting and frame.flags & frames.CAST and WAITING.casts is not None:
                        WAITING.casts.append((conn, frame, received_at))
                        continue
                    count += 1
                    requests += 1
                    pool.queue.append((conn, frame, received_at))
                elif self._notice(peer, frame, conn, waiting):
                    count += 1
            if conn.outbox:
                conn.flush()
            if waiting:
                for _ in range(min(count, 4)):
                    pool.wake()
            elif count > 1:
                pool.hand_out()
            return requests > 0 if waiting else count > 0
        finally:
            conn.undelivered.pop()

    def reply(self, peer: Peer, frame: Frame, waiting: bool, conn: Connection | None = None) -> None:
        """End the call of a reply; without a future, the caller opens the reply. ``waiting``: wake the pool for callbacks."""
        call: Call | None = peer.pending.pop(frame[2], None)
        is_plain = not frame[1] and not frame[5]
        if not is_plain and not peer.answered.first(frame.id):
            return  # a duplicate
        if call is None:
            self.discard(conn, frame)  # the call was given up
            return
        if peer.window.charged or peer.window.waiting:
            peer.window.release(call)
        if call.introduces is not None and frame[0] == frames.REPLY:
            peer.functions.numbers[call.introduces[1]] = call.introduces[0]
        call.keep = None
        agent, future = self._agent, call.future
        call.outcome = frame
        if future is not None:
            value: Any = None
            error: BaseException | None = None
            try:
                value = outbound.opened(agent, conn, frame, peer)
            except BaseException as caught:
                error = caught
                error.__traceback__ = None
            for ended in call.ending:
                ended(call, error)
            call.outcome = None
            if future.claim():
                # Callbacks are queued, since they may wait for a reply of this batch. A pool thread runs them after the batch.
                future.conclude(value, error, agent.pool.submit if waiting else agent.pool.queue.append)
            # The future refers to the call: break the cycle, so that values are freed without the garbage collector.
            call.future = None
        call.done = call.awake = True
        if call.polling is not None or call.lock is not None:
            call.wake()

    def _notice(self, peer: Peer, frame: Frame, conn: Connection, waiting: bool) -> bool:
        """Handle a notice; return whether it was queued."""
        try:
            name = unpack_header(frame.extra).get("notice")
        except ProtocolError as error:
            conn.close(error)
            return False
        handler = self._agent.on_notice.get(name) if isinstance(name, str) else None
        if handler is None:
            _log.warning("a notice %r of %r has no handler here", name, peer.name)
            return False
        if waiting or name not in self.prompt:
            self._agent.pool.queue.append(lambda: handler(peer, frame.body))
            return True
        try:
            handler(peer, frame.body)
        except Exception:
            _log.exception("a notice %r of %r raised in its handler", name, peer.name)
        return False

    def discard(self, conn: Connection | None, frame: Frame) -> None:
        """Return the shared memory and the references of a message that will not be opened."""
        outbound.discard(conn, frame)
        if frame.extra:
            try:
                header = unpack_header(frame.extra)
                peer = self._agent.self_peer if conn is None else conn.peer
                forks = header.get("references")
                if isinstance(forks, bytes):
                    self._agent.references.refuse(peer, forks)
            except ProtocolError as error:
                if conn is not None:
                    conn.close(error)

    def suspended(self, conn: Connection, error: BaseException) -> None:
        """Begin to resume a connection whose socket has failed."""
        self._agent.connector.resumption.begin(conn, error)

    def closed(self, conn: Connection, error: BaseException | None) -> None:
        """Handle the end of a connection: log protocol errors and lack of memory, and end its peer on a pool thread."""
        if isinstance(error, (ProtocolError, MemoryError)):
            _log.error(
                "the connection to %s was closed: %s", conn.peer.name if conn.peer else "a stranger", error
            )
        if not self._agent.closed_down:
            self._agent.pool.submit(lambda: self._agent.lost(conn, error))
