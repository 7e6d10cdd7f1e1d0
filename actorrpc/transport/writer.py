"""Writing: how small frames and large memory leave a connection, and neither waits for the other.

Frames are put into the outbox; the thread that gets the lock sends what is there, for everybody. A thread that does not get it
goes away: the holder looks again after releasing. Large memory leaves as chunks, piece by piece, each preceded by whatever small
frames have come up. Nobody blocks in a send except the thread whose chunk it is. That one sleeps while the kernel is full, under
the lock, or while the connection waits for another socket, without it. It wakes for the deadline, signal handlers and the end of
the connection.
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
from actorrpc.transport.connection_state import CLOSED, OPEN, SUSPENDED
from actorrpc.transport.signals import checkpoint, pending_here, uninterruptible
from actorrpc.wire.frames import CHUNK, STREAM_ABORT, pack_frame, pack_position
from actorrpc.wire.integrity import Seal, chunk_head

if TYPE_CHECKING:
    from actorrpc.transport.connection import Connection

__all__ = ["SILENT_S", "BlockedSends", "Sendable", "Writer"]

_log = logging.getLogger("actorrpc.calls")
SILENT_S: Final = 2.0
"""A wait that takes longer is logged."""
_QUIET_S: Final = 60.0  # at least so long passes between two such log lines


class BlockedSends:
    """The waits of one kind for one peer.

    Attributes:
        since: since when threads have waited without a break; None while no thread waits. A lock of the owner guards it.
    """

    __slots__ = ("_quiet_until", "since")

    def __init__(self) -> None:
        self.since: float | None = None
        self._quiet_until = 0.0

    def is_due(self, since: float) -> bool:
        """Return whether to log a wait that has lasted since then. If so, later waits are not logged for ``_QUIET_S``."""
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
_JOIN: Final = 256 << 10  # small frames are joined up to this many bytes for one send
_PARTS: Final = 512  # in one sendmsg; the kernel takes 1024
_RESUMED_S: Final = 0.01  # how often it is looked whether a connection can go on


class Sendable(Protocol):
    """An item of the outbox whose ``sent`` the writer sets before it takes the frame."""

    frame: bytes
    sent: bool


class Writer:
    """The writing side of one connection. Any thread may use it, several at a time.

    Attributes:
        outbox: the frames to send next.
        lock: guards sending, and the counts.
        sent: bytes that were written to the connection's sockets; ``sent_in_chunks``: the part of them in chunks.
        seal: seals what is sent, in the order of the wire; None: nothing is sealed.
        blocked: the time in which a thread had a chunk to send and could send no byte.
    """

    __slots__ = (
        "_conn",
        "_flushing",
        "_poller",
        "_rest",
        "blocked",
        "lock",
        "outbox",
        "seal",
        "sent",
        "sent_in_chunks",
    )

    def __init__(self, conn: Connection, seal: Seal | None) -> None:
        self._conn = conn
        self.outbox: deque[bytes | Sendable] = deque()
        self.lock = _time.Lock()
        self.sent = self.sent_in_chunks = 0
        self.seal = seal
        self.blocked = BlockedSends()
        self._rest: list[memoryview] = []  # what was sent in part
        self._flushing = False  # a pool thread is to send the outbox
        self._poller: select.poll | None = None

    # -- small frames ------------------------------------------------------------------------------

    @uninterruptible
    def flush(self, wait: bool = False, held: bool = False) -> bool:
        """Send what is in the outbox. Returns whether all of it was handed to the kernel.

        Args:
            wait: sleep while the kernel takes no more; otherwise a pool thread sends the rest.
            held: this thread holds the lock, and sends the rest itself.
        """
        conn, outbox = self._conn, self.outbox
        if conn.lane.is_open:
            conn.lane.hand_back(outbox)
        while outbox or self._rest:
            if conn.state is not OPEN:
                return False
            if not held and not self.lock.acquire(False):
                return False  # the holder looks at the outbox again when it is done
            full = False
            try:
                try:
                    while True:
                        if self._rest:
                            self._send_rest()
                            continue
                        if not outbox:
                            break
                        item = outbox.popleft()  # only the thread that holds the lock takes items out
                        if type(item) is not bytes:
                            item.sent = True  # type: ignore[union-attr]
                            item = item.frame  # type: ignore[union-attr]
                        if outbox or self.seal is not None:
                            item = self._join(item)
                        try:
                            count = conn.stream.send(item, _SEND)
                        except OSError:
                            self._rest = [memoryview(item)]  # another socket may take it
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
                if not held and not self._flushing:  # one thread that waits for the peer to read is enough
                    self._flushing = True
                    conn.events.submit(self.flush_waiting)
                return False
        return True

    def flush_waiting(self) -> None:
        """Send everything, on a pool thread that may sleep meanwhile."""
        self.flush(wait=True)
        self._flushing = False
        self.flush()  # another thread may have seen `_flushing` and left its frames

    def is_drained(self, wait: bool = False) -> bool:
        """Return whether the kernel has all frames; False while another thread sends, unless ``wait`` waits for its end."""
        if not self.lock.acquire(wait):
            return False
        try:
            return not self.outbox and not self._rest
        finally:
            self.lock.release()
            self.flush()  # another thread may have found the lock taken and left its frames

    def _send_rest(self) -> None:
        """Send the rest of a frame that was sent in part. Under the lock.

        Raises:
            BlockingIOError: the kernel takes no more.
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
        outbox, seal = self.outbox, self.seal
        parts = [first if seal is None else seal.sealed(first)]
        size = len(first)
        while size < _JOIN:
            try:
                item = outbox.popleft()
            except IndexError:
                break
            if type(item) is not bytes:
                item.sent = True  # type: ignore[union-attr]
                item = item.frame  # type: ignore[union-attr]
            parts.append(item if seal is None else seal.sealed(item))
            size += len(item)
        return b"".join(parts)

    def _wait_writable(self, deadline: float | None = None) -> None:
        """Sleep until the kernel takes more, for at most a slice. Under the lock."""
        if (poller := self._poller) is None:
            poller = self._poller = _time.poll()
            poller.register(self._conn.fd, select.POLLOUT)
        left = 0.1 if deadline is None else min(0.1, max(0.0, deadline - _time.now()))
        poller.poll(left * 1e3)

    def send_first(self, parts: list[memoryview]) -> None:
        """Queue bytes before everything else, to be sent over another socket. Under the lock."""
        self._rest = parts + self._rest
        self._poller = None

    def clear(self) -> None:
        """Drop the frames that were not sent: the connection is closed."""
        self.outbox.clear()
        self._rest = []

    # -- chunks ------------------------------------------------------------------------------------

    @uninterruptible
    def send_chunks(
        self, stream: int, pieces: Iterable[tuple[int, int, memoryview]], deadline: float | None
    ) -> bool:
        """Send pieces (buffer index, offset, memory) of a stream as chunks, sleeping where the kernel is
        full.

        Small frames overtake between chunks. Returns False if it had to stop (deadline, closed); the stream was then aborted
        cleanly, as it is where a signal handler raises: the chunk that was under way is finished from a copy.
        """
        conn, done, copy = self._conn, False, memoryview(b"")
        try:
            for index, offset, piece in pieces:
                prefix = pack_frame(CHUNK, stream, chain=pack_position(index, offset), length=len(piece))
                if self.seal is not None:
                    # From a copy: what is sent must be what was sealed, also where the caller's memory changes meanwhile.
                    # It can be made again for the next piece: what is left of this one is copied once more below.
                    copy = copy if len(copy) >= len(piece) else memoryview(bytearray(len(piece)))
                    copy[: len(piece)] = piece
                    piece = copy[: len(piece)]
                    prefix = chunk_head(prefix, piece)
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
            checkpoint()  # between chunks, without a lock
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
        """Send one chunk; None: before it began, the socket has failed or a signal handler was put off."""
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
                    return self._leave(begun)
                if self.flush(held=True):
                    if begun:
                        return True
                    head = prefix if self.seal is None else self.seal.tagged(prefix)
                    self._rest = [memoryview(head), piece]
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
                    # The chunk must be finished, but not by us and not from the caller's memory.
                    left = self._leave(begun)
                    conn.events.submit(self.flush_waiting)
                    return begun and not self._rest if late else left  # all of it may have gone
        except BaseException as error:
            conn.failed(error)
            return self._leave(begun) if conn.state is SUSPENDED else False
        finally:
            self.blocked.since = None
            self.lock.release()
            self.flush()

    def _note_blocked(self) -> None:
        """Have a wait that takes long logged on another thread: a handler of the log may run anything."""
        blocked, conn = self.blocked, self._conn
        if blocked.since is not None and blocked.is_due(blocked.since):
            name = conn.peer.name if conn.peer else "a stranger"
            what = f"a large message to worker {name!r}"
            why = "the worker does not read. Its process may be stopped, or the network between the two may be slow"
            conn.events.submit(partial(blocked.log, what, why))

    def _leave(self, begun: bool) -> bool | None:
        """Leave a chunk that has begun to another thread, from a copy."""
        self._rest = [memoryview(bytes(part)) for part in self._rest]
        return True if begun else None
