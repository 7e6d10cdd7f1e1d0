"""Writing of frames and of large buffers to a connection.

Threads append frames to the outbox. The thread that gets the lock sends all frames in the outbox. A thread that does not get the
lock returns, because the thread that holds the lock checks the outbox again after it has released the lock. Large buffers are
sent in chunks, and the outbox is sent before each chunk, so small frames do not wait for a whole buffer. Only a thread that sends
chunks, or that calls ``flush(wait=True)``, sleeps while the kernel's buffer is full; it holds the lock meanwhile. A thread that
sends chunks also sleeps, without the lock, while the connection is suspended or too many sent bytes are not acknowledged. Its
sleep ends at the deadline, for signal handlers, and when the connection is closed.
"""

from __future__ import annotations

import logging
import select
import socket
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from actorrpc import _time
from actorrpc.transport.signals import checkpoint, pending_here, uninterruptible
from actorrpc.transport.stream import CLOSED, OPEN, SUSPENDED
from actorrpc.wire.frames import CHUNK, STREAM_ABORT, pack_frame, pack_position

if TYPE_CHECKING:
    from actorrpc.transport.connection import Connection

__all__ = ["SILENT_S", "BlockedSends", "Sendable", "Writer"]

_log = logging.getLogger("actorrpc.calls")
SILENT_S: Final = 2.0
"""A wait that takes longer than this many seconds is logged."""
_QUIET_S: Final = 60.0  # the shortest time between two log lines about waits


class BlockedSends:
    """Records how long threads have waited to send to one peer, and limits log lines about it.

    Attributes:
        since: the time since which at least one thread has been waiting; None: no thread waits.
    """

    __slots__ = ("_quiet_until", "since")

    def __init__(self) -> None:
        self.since: float | None = None
        self._quiet_until = 0.0

    def is_due(self, since: float) -> bool:
        """Return whether to log a wait that began at ``since``. If so, later waits are not logged for ``_QUIET_S``."""
        now = _time.now()
        if now < since + SILENT_S or now < self._quiet_until:
            return False
        self._quiet_until = now + _QUIET_S
        return True

    @staticmethod
    def log(what: str, why: str) -> None:
        """Log that a thread has waited for :data:`SILENT_S` to send something. The caller holds no lock."""
        _log.warning("%s has been blocked for %.0f s: %s", what, SILENT_S, why)


_SEND: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_JOIN: Final = 256 << 10  # small frames are joined into one send until they have this many bytes
_PARTS: Final = 512  # the most buffers in one sendmsg; the kernel allows 1024
_RESUMED_S: Final = 0.01  # how often a sender of chunks checks whether a suspended connection was resumed


class Sendable(Protocol):
    """An item of the outbox. The writer sets ``sent`` before it reads ``frame``, which is empty if the item was withdrawn."""

    frame: bytes
    sent: bool


class Writer:
    """The writing side of one connection. Any thread may use it, several at a time.

    Attributes:
        outbox: the frames to send next.
        lock: guards sending, and the counts of bytes.
        sent: bytes that were written to the connection's sockets; ``sent_in_chunks``: the length of all chunks begun.
        blocked: the waits of threads that have a chunk to send and can send no byte.
    """

    __slots__ = (
        "_conn",
        "_flushing",
        "_poller",
        "_rest",
        "blocked",
        "lock",
        "outbox",
        "sent",
        "sent_in_chunks",
    )

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self.outbox: deque[bytes | Sendable] = deque()
        self.lock = _time.Lock()
        self.sent = self.sent_in_chunks = 0
        self.blocked = BlockedSends()
        self._rest: list[memoryview] = []  # the unsent rest of a frame that was sent in part
        self._flushing = False  # whether flush_waiting() was submitted to the pool and has not finished
        self._poller: select.poll | None = None

    # -- small frames ------------------------------------------------------------------------------

    @uninterruptible
    def flush(self, wait: bool = False, held: bool = False) -> bool:
        """Send the frames in the outbox. Returns whether the kernel has accepted all; False if another thread is sending.

        Args:
            wait: sleep while the kernel's buffer is full; otherwise a pool thread sends the rest.
            held: whether the calling thread holds the lock already, and will send the rest itself.
        """
        conn, outbox = self._conn, self.outbox
        if conn.lane.is_open:
            conn.lane.hand_back(outbox)
        while outbox or self._rest:
            if conn.state is not OPEN:
                return False
            if not held and not self.lock.acquire(False):
                return False  # the thread with the lock checks the outbox again after releasing it
            full = False
            try:
                try:
                    while True:
                        if self._rest:
                            self._send_rest()
                            continue
                        if not outbox:
                            break
                        item = outbox.popleft()  # only the thread that holds the lock removes items
                        if type(item) is not bytes:
                            item.sent = True  # type: ignore[union-attr]
                            item = item.frame  # type: ignore[union-attr]
                        if outbox:
                            item = self._join(item)
                        try:
                            count = conn.stream.send(item, _SEND)
                        except OSError:
                            self._rest = [memoryview(item)]  # sent again if the connection is resumed
                            raise
                        self.sent += count
                        if count != len(item):
                            self._rest = [memoryview(item)[count:]]
                except BlockingIOError:
                    full = True
                    if wait:
                        self._wait_writable()
            except BaseException as error:
                conn.failed(error)
                return False
            finally:
                if not held:
                    self.lock.release()
            if full and not wait:
                if not held and not self._flushing:  # one pool thread that waits for the kernel is enough
                    self._flushing = True
                    conn.events.submit(self.flush_waiting)
                return False
        return True

    def flush_waiting(self) -> None:
        """Send the outbox, on a pool thread, which sleeps while the kernel's buffer is full."""
        self.flush(wait=True)
        self._flushing = False
        self.flush()  # another thread that saw `_flushing` relies on this thread to send its frames

    def is_drained(self, wait: bool = False) -> bool:
        """Return whether the kernel has accepted all frames. While another thread sends, return False, or wait if ``wait``."""
        if not self.lock.acquire(wait):
            return False
        try:
            return not self.outbox and not self._rest
        finally:
            self.lock.release()
            self.flush()  # another thread that found the lock taken relies on this thread to send its frames

    def _send_rest(self) -> None:
        """Send the rest of a frame that was sent in part. Under the lock.

        Raises:
            BlockingIOError: the kernel's buffer is full.
        """
        conn, rest = self._conn, self._rest
        count = conn.stream.sendmsg(rest if len(rest) <= _PARTS else rest[:_PARTS], (), _SEND)
        self.sent += count
        while rest and count >= len(rest[0]):
            count -= len(rest[0])
            del rest[0]
        if rest and count:
            rest[0] = rest[0][count:]

    def _join(self, first: bytes) -> bytes:
        outbox, parts = self.outbox, [first]
        size = len(first)
        while size < _JOIN:
            try:
                item = outbox.popleft()
            except IndexError:
                break
            if type(item) is not bytes:
                item.sent = True  # type: ignore[union-attr]
                item = item.frame  # type: ignore[union-attr]
            parts.append(item)
            size += len(item)
        return b"".join(parts)

    def _wait_writable(self, deadline: float | None = None) -> None:
        """Sleep until the kernel's buffer has room, for at most 0.1 s. Under the lock."""
        if (poller := self._poller) is None:
            poller = self._poller = _time.poll()
            poller.register(self._conn.fd, select.POLLOUT)
        left = 0.1 if deadline is None else min(0.1, max(0.0, deadline - _time.now()))
        poller.poll(left * 1e3)

    def send_first(self, parts: list[memoryview]) -> None:
        """Queue bytes before all other bytes, when the connection is resumed over another socket. Under the lock."""
        self._rest = parts + self._rest
        self._poller = None

    def clear(self) -> None:
        """Discard the frames that were not sent, after the connection was closed."""
        self.outbox.clear()
        self._rest = []

    # -- chunks ------------------------------------------------------------------------------------

    @uninterruptible
    def send_chunks(
        self, stream: int, pieces: Iterable[tuple[int, int, memoryview]], deadline: float | None
    ) -> bool:
        """Send pieces (buffer index, offset, memory) of a stream as chunks; sleep while the kernel's buffer is full.

        Returns False if the deadline has passed or the connection was closed. If the deadline has passed or a signal handler
        raises, the rest of a chunk that was sent in part is sent from a copy, and STREAM_ABORT after it.
        """
        conn, done = self._conn, False
        try:
            for index, offset, piece in pieces:
                prefix = pack_frame(CHUNK, stream, chain=pack_position(index, offset), length=len(piece))
                if not self._send(prefix, piece, deadline):
                    return False
            done = conn.state is not CLOSED
            return done
        finally:
            self.blocked.since = None
            if not done and conn.state is not CLOSED:
                self.outbox.append(pack_frame(STREAM_ABORT, stream))
                self.flush()

    def _send(self, prefix: bytes, piece: memoryview, deadline: float | None) -> bool:
        conn, done = self._conn, None
        while True:
            stream = conn.stream
            if conn.state is not SUSPENDED and not stream.is_full:
                done = self._try(prefix, piece, deadline)
            checkpoint()  # runs deferred signal handlers; no lock is held here
            if done is not None:
                return done
            if conn.state is CLOSED or (deadline is not None and _time.now() > deadline):
                return False
            if conn.state is SUSPENDED:
                _time.pause(_RESUMED_S)
            elif stream.is_full:
                if self.blocked.since is None:
                    self.blocked.since = _time.now()
                stream.wait(0.1)
                self._note_blocked()

    def _try(self, prefix: bytes, piece: memoryview, deadline: float | None) -> bool | None:
        """Send one chunk.

        Returns:
            True if it was sent, or another thread sends the rest of it; False if the connection has ended or the deadline has
            passed; None if the chunk was not begun, because the socket failed or a signal handler was deferred: try again.
        """
        conn = self._conn
        while not self.lock.acquire(timeout=0.1):
            if conn.state is CLOSED or (deadline is not None and _time.now() > deadline):
                return False
            if pending_here():
                return None
        begun = False
        sent = -1
        try:
            while True:
                if conn.state is CLOSED:
                    return False
                if conn.state is SUSPENDED:
                    return self._pass_rest(begun)
                if self.flush(held=True):
                    if begun:
                        return True
                    self._rest = [memoryview(prefix), piece]
                    self.sent_in_chunks += len(piece)
                    begun = True
                    continue
                if conn.state is not OPEN:
                    continue
                if self.sent != sent:
                    sent, self.blocked.since = self.sent, _time.now()
                self._wait_writable(deadline)
                self._note_blocked()
                late = deadline is not None and _time.now() > deadline
                if late or pending_here():
                    # A pool thread sends the rest of the chunk, from a copy: the caller may change its memory after this method
                    # returns.
                    result = self._pass_rest(begun)
                    conn.events.submit(self.flush_waiting)
                    # At the deadline, only a whole chunk counts as sent: after a part, the caller sends STREAM_ABORT.
                    return begun and not self._rest if late else result
        except BaseException as error:
            conn.failed(error)
            return self._pass_rest(begun) if conn.state is SUSPENDED else False
        finally:
            self.blocked.since = None
            self.lock.release()
            self.flush()

    def _note_blocked(self) -> None:
        """Let a pool thread log a long wait of this thread: a log handler may run any code, and this thread may hold the lock."""
        blocked, conn = self.blocked, self._conn
        if blocked.since is not None and blocked.is_due(blocked.since):
            name = conn.peer.name if conn.peer else "a stranger"
            what = f"a large message to worker {name!r}"
            why = "the worker does not read. Its process may be stopped, or the network between the two may be slow"
            conn.events.submit(partial(blocked.log, what, why))

    def _pass_rest(self, begun: bool) -> bool | None:
        """Replace the unsent rest by a copy, which another thread sends. Return True if ``begun``, else None."""
        self._rest = [memoryview(bytes(part)) for part in self._rest]
        return True if begun else None
