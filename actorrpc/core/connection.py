"""One stream socket to a peer: who may read it, who may write it, and how neither ever blocks the other.

**Reading.** A connection is armed in the pool's epoll with EPOLLONESHOT. Whoever reads holds ``read_lock``: a
pool thread that the kernel woke, or a caller that waits for its own reply. The rules, each of which was paid
for in a hang:

* whoever fails to get the lock goes away without arming; whoever held it releases it *first* and then always
  arms;
* a pool thread reads with MSG_DONTWAIT only, because a wake-up may be stale;
* under the lock, frames are only split, and control frames handled (they are short and run no user code);
  everything else happens after the release.

**Writing.** Frames are put into ``outbox``; whoever gets ``write_lock`` sends what is there, for everybody. A
thread that does not get it goes away: the holder looks again after releasing. Large buffers leave as chunks,
one at a time, each preceded by whatever small frames have come up. Nobody blocks in a send except the caller
whose data it is.

Lock order: ``read_lock`` before ``write_lock``; neither is ever held while user code, or code that may run
the garbage collector into user code for long, is called on purpose. The functions that read, write and arm
are marked
uninterruptible: Ctrl-C waits for their end, and any other exception in one of them closes the connection.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from actorrpc.config import Settings
from actorrpc.core import interrupts
from actorrpc.core.answering import ARMED, DISARMED, Answering
from actorrpc.core.events import Events, Sendable
from actorrpc.core.frames import (
    CHUNK,
    FAILURE,
    LANE_FREE,
    LANE_RETIRE,
    LETTER,
    STREAM,
    STREAM_ABORT,
    Frame,
    FrameReader,
    pack_frame,
    pack_position,
)
from actorrpc.core.interrupts import pending_here, uninterruptible
from actorrpc.core.waiting import AT_ONCE_S, Waiting
from actorrpc.errors import ProtocolError

__all__ = ["Connection"]

_DONTWAIT: Final = socket.MSG_DONTWAIT
_SEND: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_JOIN: Final = 256 << 10  # small frames are joined up to this many bytes for one send
_LOOKED_AT: Final = STREAM | LETTER
_BULK_READS: Final = 64  # reads in one turn while chunks are coming in


class Connection:
    """One connected, authenticated stream socket."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        epoll: select.epoll,
        events: Events,
        settings: Settings,
        attach: bytes,
        local: bool,
    ) -> None:
        sock.setblocking(True)  # non-blocking operations say so themselves (MSG_DONTWAIT)
        self.sock = sock
        self.fd = sock.fileno()
        self.local = local
        self.attach = attach
        self.peer: Any = None
        self.lender: Any = None
        self.borrower: Any = None
        self.lane_failed = False
        # A stripe carries chunks for its main connection and nothing else.
        self.main: Connection | None = None
        self.stripes: list[Connection] = []
        self.assemblies: dict[int, Any] = {}
        self.goodbye = False
        self.broken = False
        self.heard = time.monotonic()
        # Guards reading, the frame reader and the read side's poller.
        self.read_lock = threading.Lock()
        # Guards sending and ``_rest``.
        self.write_lock = threading.Lock()
        self.outbox: deque[bytes | Sendable] = deque()
        self._rest: list[memoryview] = []
        self._flushing = False
        self._epoll = epoll
        self._events = events
        self.settings = settings
        self._reader = FrameReader(
            max_frame=settings.max_frame, max_chunk=max(settings.chunk, 1 << 20), sink_for=self._sink_for
        )
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self.fd, select.POLLIN)
        self._poller.register(self._wake_fd, select.POLLIN)
        if interrupts.wake_fd() >= 0:  # ends the poll of the main thread when a Ctrl-C was put off
            self._poller.register(interrupts.wake_fd(), select.POLLIN)
        self._writer_poller: select.poll | None = None
        self.answering = Answering(self)
        self.waiting = Waiting(self)
        #: disarmed although nobody reads: whoever made a call is about to wait for it, or the clock listens again soon
        self.expecting = False
        self.expecting_since = 0.0

    # -- the pool's side of reading -------------------------------------------------------------

    def register(self) -> None:
        """Put the connection into the epoll, armed: from now on the pool reads it."""
        self._epoll.register(self.fd, ARMED)

    def arm(self, mask: int) -> None:
        """Arm (the kernel wakes a pool thread for the next bytes) or disarm. Harmless when closed."""
        if not self.broken:
            try:
                self._epoll.modify(self.fd, mask)
            except (OSError, ValueError):
                pass

    @uninterruptible
    def turn(self) -> list[Frame] | None:
        """Read what is there, as a pool thread that was woken for it. ``None``: somebody else is reading."""
        if not self.read_lock.acquire(False):
            return None
        frames: list[Frame] = []
        try:
            self.receive(frames)
        except BaseException as error:
            self.failed(error)
        finally:
            self.expecting = False
            self.read_lock.release()
        if not self.broken:
            try:
                self._epoll.modify(self.fd, ARMED)
            except (OSError, ValueError):
                pass
        return frames

    @uninterruptible
    def expect(self) -> bool:
        """Stop listening for a moment, because the reply to what is sent now is read by the thread that sends it.

        Otherwise that reply wakes a pool thread, which has nothing to do with it. Returns False where somebody reads.
        Whoever calls this sees to it that :meth:`listen` is called soon.
        """
        if self.expecting or not self.read_lock.acquire(False):
            return False
        self.arm(DISARMED)
        self.expecting = True
        self.expecting_since = time.monotonic()
        self.read_lock.release()
        return True

    @uninterruptible
    def listen(self) -> None:
        """Listen again, if nobody has come to read what was expected."""
        if self.expecting and self.read_lock.acquire(False):
            was, self.expecting = self.expecting, False
            self.read_lock.release()
            if was:
                self.arm(ARMED)

    def wake(self) -> None:
        """End the sleep of whoever polls this connection for a reply."""
        try:
            os.eventfd_write(self._wake_fd, 1)
        except (OSError, ValueError):  # closed meanwhile, or just now
            pass

    def sleep(self, frames: list[Frame]) -> bool:
        """Wait, for as long as it takes, until something comes or :meth:`wake` is called. Under the read lock.

        Returns whether it was there already.
        """
        begun = time.monotonic()
        ready = self._poller.poll()
        at_once = time.monotonic() - begun < AT_ONCE_S
        for fd, _ in ready:
            if fd == self.fd:
                self.receive(frames)
            elif fd == self._wake_fd:
                self._quieten()
        return at_once

    def _quieten(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass

    def spin_for(self, frames: list[Frame]) -> int:
        """Try to read for at most the spin time; return how many tries it took, 0 if nothing came."""
        until = time.monotonic() + self.settings.spin_us * 1e-6
        tries = 1
        reader, sock = self._reader, self.sock
        while True:
            try:
                target = reader.target()
                count = (
                    sock.recv_into(target[0], 0, _DONTWAIT)
                    if len(target) == 1
                    else sock.recvmsg_into(target, 0, _DONTWAIT)[0]
                )
            except BlockingIOError:
                if time.monotonic() > until:
                    return 0
                tries += 1
                continue
            self._take(count, frames)
            return tries

    def receive(self, frames: list[Frame]) -> None:
        """Read without blocking; while chunks come in, read on for a while."""
        reader = self._reader
        target = reader.target()
        if len(target) == 1:
            try:
                self._take(self.sock.recv_into(target[0], 0, _DONTWAIT), frames)
            except BlockingIOError:
                return
        if reader.in_chunk:
            self._receive_chunks(frames)

    def _receive_chunks(self, frames: list[Frame]) -> None:
        reader, sock = self._reader, self.sock
        for _ in range(_BULK_READS):
            if frames or self.broken:
                return
            target = reader.target()
            try:
                if len(target) == 1:
                    self._take(sock.recv_into(target[0], 0, _DONTWAIT), frames)
                    if not reader.in_chunk:
                        return
                else:
                    self._take(sock.recvmsg_into(target, 0, _DONTWAIT)[0], frames)
            except BlockingIOError:
                if not reader.in_chunk or not self._poller.poll(1):
                    return

    def _take(self, count: int, frames: list[Frame]) -> None:
        if count == 0:
            raise EOFError("end of file")
        self.heard = time.monotonic()
        reader = self._reader
        while True:
            for frame in reader.fed(count):
                # Whole messages pass; what controls the connection, comes in chunks or is for a mailbox is looked at.
                if frame[0] <= FAILURE and not frame[1] & _LOOKED_AT:
                    frames.append(frame)
                    continue
                left = self._events.control(self, frame)
                if left is not None:
                    frames.append(left)
            if not reader.more:
                return
            count = 0

    @uninterruptible
    def preload(self, data: bytes) -> list[Frame]:
        """Take bytes that came right behind the handshake, before the connection is registered."""
        frames: list[Frame] = []
        with self.read_lock:
            try:
                self._reader.target()[0][: len(data)] = data
                self._take(len(data), frames)
            except BaseException as error:
                self.failed(error)
        return frames

    def _sink_for(self, stream: int, position: int, length: int) -> memoryview:
        assembly = self.assemblies.get(stream)
        if assembly is None:
            if (
                self.main is not None
            ):  # the stream was given up, and its other connection was faster to say so
                return memoryview(bytearray(length))
            raise ProtocolError(f"a chunk of unknown stream {stream}")
        sink: memoryview = assembly.sink(position, length)
        return sink

    # -- writing -----------------------------------------------------------------------------------

    @uninterruptible
    def flush(self, wait: bool = False) -> bool:
        """Send what is in the outbox. Returns whether all of it was handed to the kernel.

        Without ``wait`` nothing blocks: what the kernel does not take now is sent by a pool thread.
        """
        if self.borrower is not None or self.lender is not None:
            self.hand_back()
        while self.outbox or self._rest:
            if self.broken:
                return False
            if not self.write_lock.acquire(False):
                return False  # the holder looks at the outbox again when it is done
            try:
                done = self._drain()
                if not done and wait:
                    done = self._wait_writable()
                    continue
            except BaseException as error:
                self.failed(error)
                return False
            finally:
                self.write_lock.release()
            if not done:
                if not self._flushing:  # one thread that waits for the peer to read is enough
                    self._flushing = True
                    self._events.submit(self.flush_waiting)
                return False
        return True

    def hand_back(self) -> bool:
        """Put word of shared memory that has died on either side before what is sent next; say whether there was any."""
        found = False
        borrower, lender = self.borrower, self.lender
        if borrower is not None and borrower.freed:
            freed = borrower.drain_freed()
            if freed:
                found = True
                self.outbox.appendleft(
                    pack_frame(LANE_FREE, body=struct.pack(f"<{2 * len(freed)}Q", *itertools.chain(*freed)))
                )
        if lender is not None:
            retired = lender.drain_retired()
            if retired:
                found = True
                self.outbox.append(pack_frame(LANE_RETIRE, body=struct.pack(f"<{len(retired)}Q", *retired)))
        return found

    def flush_waiting(self) -> None:
        """Send everything, on a pool thread that may sleep meanwhile."""
        self.flush(wait=True)
        self._flushing = False
        self.flush()  # what was left by somebody who saw the mark

    def _drain(self) -> bool:
        """Send until the outbox is empty (True) or the kernel takes no more (False). Under the write lock."""
        outbox, sock = self.outbox, self.sock
        while True:
            rest = self._rest
            if rest:
                try:
                    count = sock.sendmsg(rest, (), _SEND)
                except BlockingIOError:
                    return False
                self._consume(count)
                continue
            try:
                item = outbox.popleft()
            except IndexError:
                return True
            if type(item) is not bytes:
                item.sent = True  # type: ignore[union-attr]
                item = item.frame  # type: ignore[union-attr]
            if outbox:
                item = self._join(item)
            try:
                count = sock.send(item, _SEND)
            except BlockingIOError:
                self._rest = [memoryview(item)]
                return False
            if count != len(item):
                self._rest = [memoryview(item)[count:]]

    def _join(self, first: bytes) -> bytes:
        parts = [first]
        size = len(first)
        outbox = self.outbox
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

    def _consume(self, count: int) -> None:
        rest = self._rest
        while rest and count >= len(rest[0]):
            count -= len(rest[0])
            del rest[0]
        if rest and count:
            rest[0] = rest[0][count:]

    def _wait_writable(self, deadline: float | None = None) -> bool:
        """Sleep until the kernel takes more, for at most a slice. Under the write lock."""
        poller = self._writer_poller
        if poller is None:
            poller = self._writer_poller = select.poll()
            poller.register(self.fd, select.POLLOUT)
        wait_ms = 100.0
        if deadline is not None:
            wait_ms = min(wait_ms, max(0.0, (deadline - time.monotonic()) * 1e3))
        poller.poll(wait_ms)
        return False

    @uninterruptible
    def send_chunks(
        self, stream: int, pieces: Iterable[tuple[int, int, memoryview]], deadline: float | None
    ) -> bool:
        """Send pieces (buffer index, offset, memory) of a stream as chunks, sleeping where the kernel is
        full.

        Small frames overtake between chunks. Returns False if it had to stop (deadline, Ctrl-C, closed); the
        stream was then aborted cleanly: the chunk that was under way is finished from a copy.
        """
        for index, offset, piece in pieces:
            prefix = pack_frame(CHUNK, stream, chain=pack_position(index, offset), length=len(piece))
            if not self._send_chunk(prefix, piece, deadline):
                if not self.broken:
                    self.outbox.append(pack_frame(STREAM_ABORT, stream))
                    self.flush()
                return False
        return not self.broken

    def _send_chunk(self, prefix: bytes, piece: memoryview, deadline: float | None) -> bool:
        while not self.write_lock.acquire(timeout=0.1):
            if self.broken or pending_here() or (deadline is not None and time.monotonic() > deadline):
                return False
        try:
            begun = False
            while True:
                if self.broken:
                    return False
                if self._drain():
                    if begun:
                        return True
                    self._rest = [memoryview(prefix), piece]
                    begun = True
                    continue
                self._wait_writable(deadline)
                if pending_here() or (deadline is not None and time.monotonic() > deadline):
                    # The chunk must be finished, but not by us and not from the caller's memory.
                    self._rest = [memoryview(bytes(part)) for part in self._rest]
                    self._events.submit(self.flush_waiting)
                    return begun and not self._rest
        except BaseException as error:
            self.failed(error)
            return False
        finally:
            self.write_lock.release()
            if self.outbox:
                self.flush()

    # -- the end -----------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Take a failed read or write as the end of the connection."""
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Shut the connection, waking everybody who uses it. Idempotent; never blocks."""
        if self.broken:
            return
        self.broken = True
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.wake()
        self._events.closed(self, error)

    @uninterruptible
    def read_rest(self) -> list[Frame]:
        """Return what had arrived before the connection ended."""
        frames: list[Frame] = []
        with self.read_lock:
            try:
                while True:
                    target = self._reader.target()
                    self._take(self.sock.recvmsg_into(target, 0, _DONTWAIT)[0], frames)
            except (OSError, EOFError, ProtocolError):
                return frames

    def reap(self) -> None:
        """Close the descriptors, once nobody reads or writes any more. Runs on a pool thread or at the very end."""
        with self.read_lock, self.write_lock:
            if self.sock.fileno() < 0:
                return
            try:
                self._epoll.unregister(self.fd)
            except (OSError, ValueError):
                pass
            self.sock.close()
            os.close(self._wake_fd)
            self._wake_fd = -1
        self.outbox.clear()
        self._rest = []
        self.assemblies.clear()
        for lane in (self.lender, self.borrower):
            if lane is not None:
                lane.close()

    def abandon(self) -> None:
        """Close the descriptors in a forked child, where locks may be held by threads that do not exist."""
        self.broken = True
        for close in (self.sock.close, lambda: os.close(self._wake_fd)):
            try:
                close()
            except OSError:
                pass
        for lane in (self.lender, self.borrower):
            if lane is not None:
                lane.abandon()
