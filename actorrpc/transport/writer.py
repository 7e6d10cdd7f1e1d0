"""Chunks: how large memory leaves a connection, piece by piece, so that small frames can overtake it.

The thread that sends it sleeps here while the kernel is full, under the connection's write lock, or while the connection waits
for another socket, without it. It wakes for the deadline, signal handlers and the end of the connection.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from actorrpc import _time
from actorrpc.transport.blocked_sends import BlockedSends
from actorrpc.transport.connection_state import CLOSED, OPEN, SUSPENDED
from actorrpc.transport.signals import checkpoint, pending_here, uninterruptible
from actorrpc.wire.frames import CHUNK, STREAM_ABORT, pack_frame, pack_position
from actorrpc.wire.integrity import chunk_head

if TYPE_CHECKING:
    from actorrpc.transport.connection import Connection

__all__ = ["ChunkSender"]

_RESUMED_S: Final = 0.01  # how often it is looked whether a connection can go on


class ChunkSender:
    """Sends chunks over one connection. Any thread may use it, several at a time.

    Attributes:
        blocked: the time in which a thread had a chunk to send and the kernel took no byte. The write lock guards it.
    """

    __slots__ = ("_conn", "blocked")

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self.blocked = BlockedSends()

    @uninterruptible
    def send(
        self, stream: int, pieces: Iterable[tuple[int, int, memoryview]], deadline: float | None
    ) -> bool:
        """Send pieces (buffer index, offset, memory) of a stream as chunks, sleeping where the kernel is
        full.

        Small frames overtake between chunks. Returns False if it had to stop (deadline, closed); the stream was then aborted
        cleanly, as it is where a signal handler raises: the chunk that was under way is finished from a copy.
        """
        done = False
        try:
            done = self._send_all(stream, pieces, deadline)
            return done
        finally:
            if not done and self._conn.state is not CLOSED:
                self._conn.outbox.append(pack_frame(STREAM_ABORT, stream))
                self._conn.flush()

    def _send_all(
        self, stream: int, pieces: Iterable[tuple[int, int, memoryview]], deadline: float | None
    ) -> bool:
        conn = self._conn
        copy = memoryview(b"")
        for index, offset, piece in pieces:
            prefix = pack_frame(CHUNK, stream, chain=pack_position(index, offset), length=len(piece))
            if conn.seal is not None:
                # From a copy: what is sent must be what was sealed, also where the caller's memory changes meanwhile.
                # It can be made again for the next piece: what is left of this one is copied once more below.
                copy = copy if len(copy) >= len(piece) else memoryview(bytearray(len(piece)))
                copy[: len(piece)] = piece
                piece = copy[: len(piece)]
                prefix = chunk_head(prefix, piece)
            if not self._send(prefix, piece, deadline):
                return False
        return conn.state is not CLOSED

    def _send(self, prefix: bytes, piece: memoryview, deadline: float | None) -> bool:
        conn = self._conn
        while True:
            done = None if conn.state is SUSPENDED else self._try(prefix, piece, deadline)
            checkpoint()  # between chunks, without a lock
            if done is not None:
                return done
            if conn.state is CLOSED or (deadline is not None and _time.now() > deadline):
                return False
            if conn.state is SUSPENDED:
                _time.pause(_RESUMED_S)

    def _try(self, prefix: bytes, piece: memoryview, deadline: float | None) -> bool | None:
        """Send one chunk; None: before it began, the socket has failed or a signal handler was put off."""
        conn = self._conn
        while not conn.write_lock.acquire(timeout=0.1):
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
                if conn.flush(held=True):
                    if begun:
                        return True
                    head = prefix if conn.seal is None else conn.seal.tagged(prefix)
                    conn._rest = [memoryview(head), piece]
                    conn.chunk_bytes_out += len(piece)
                    begun = True
                    continue
                if conn.state is not OPEN:
                    continue
                if conn.bytes_out != sent:
                    sent, self.blocked.since = conn.bytes_out, _time.now()
                conn._wait_writable(deadline)
                self._note_blocked()
                late = deadline is not None and _time.now() > deadline
                if late or pending_here():
                    # The chunk must be finished, but not by us and not from the caller's memory.
                    conn._rest = [memoryview(bytes(part)) for part in conn._rest]
                    conn._events.submit(conn.flush_waiting)
                    if late:
                        return begun and not conn._rest  # all of it may have gone
                    return True if begun else None
        except BaseException as error:
            conn.failed(error)
            return self._leave(begun) if conn.state is SUSPENDED else False
        finally:
            self.blocked.since = None
            conn.write_lock.release()
            conn.flush()

    def _note_blocked(self) -> None:
        """Have a wait that takes long logged, elsewhere: a handler of the log may run anything. Under the write lock."""
        blocked, conn = self.blocked, self._conn
        if blocked.since is not None and blocked.is_due(blocked.since):
            name = conn.peer.name if conn.peer else "a stranger"
            what = f"a large message to worker {name!r}"
            why = "the worker does not read. Its process may be stopped, or the network between the two may be slow"
            conn._events.submit(partial(blocked.log, what, why))

    def _leave(self, begun: bool) -> bool | None:
        """Leave a chunk that has begun to the attempt that goes on over another socket, from a copy."""
        conn = self._conn
        if not begun:
            return None
        conn._rest = [memoryview(bytes(part)) for part in conn._rest]
        return True
