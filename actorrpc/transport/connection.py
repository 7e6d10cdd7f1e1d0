"""One stream socket to a peer: who may read it, who may write it, and how neither ever blocks the other.

**Reading.** A connection is armed in the pool's epoll with EPOLLONESHOT. The thread that reads holds ``read_lock``: a
pool thread that the kernel woke, or a caller that waits for its own reply. The rules, each of which was paid
for in a hang:

* a thread that fails to get the lock goes away without arming; the thread that held it releases it *first* and then always
  arms;
* whether the connection is suspended is looked at *under* the lock: the other side has been told how far reading has
  come, and sends the rest again, although the failed socket may still have it;
* a pool thread reads with MSG_DONTWAIT only, because a wake-up may be stale;
* under the lock, frames are only split, and control frames handled (they are short and run no user code);
  everything else happens after the release.

**Writing.** Frames are put into ``outbox``; the thread that gets ``write_lock`` sends what is there, for everybody. A
thread that does not get it goes away: the holder looks again after releasing. Large buffers leave as chunks,
one at a time, each preceded by whatever small frames have come up. Nobody blocks in a send except the caller
whose data it is.

Lock order: ``read_lock`` before ``write_lock``, which is waited for only where the connection is suspended or broken: a writer
may wait for what has to be read. Neither is ever held while user code, or code that may run the garbage collector into
user code for long, is called on purpose. The functions that read, write and arm are marked
uninterruptible: signal handlers wait for their end, and any exception in one of them closes the connection.

**The agent.** A connection knows it by :class:`Events` only, which the agent's inbox implements; tests put in their own.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from actorrpc import _time
from actorrpc._exception_text import let_frames_go
from actorrpc._limits import explain_memory
from actorrpc.config import Settings
from actorrpc.errors import ProtocolError
from actorrpc.transport import signals
from actorrpc.transport.buffers import untouched
from actorrpc.transport.connection_state import CLOSED, OPEN, SUSPENDED, Goodbye, StateMachine
from actorrpc.transport.reader import ARMED, AT_ONCE_S, DISARMED, WEIGHT, ServerTurn, Spinning, spinner
from actorrpc.transport.session import Replay
from actorrpc.transport.signals import uninterruptible
from actorrpc.transport.tls import Stream, TlsSocket
from actorrpc.transport.writer import ChunkSender
from actorrpc.wire.frames import (
    ACK,
    FAILURE,
    LANE_FREE,
    LANE_RETIRE,
    MAIL,
    OBJECTS,
    STREAM,
    Frame,
    FrameReader,
    pack_frame,
)
from actorrpc.wire.integrity import SealedReader, Seals

__all__ = ["Connection", "Events", "ReadWaiter", "Sendable"]


class Sendable(Protocol):
    """Something in the outbox that wants to know when it has been handed to the kernel."""

    frame: bytes
    sent: bool


class ReadWaiter(Protocol):
    """Somebody for whom a thread waits at a connection.

    Attributes:
        polling: the connection that the thread reads meanwhile. Another thread sets ``awake``, then wakes ``polling``.
        awake: there is something to do besides waiting.
    """

    polling: Connection | None
    awake: bool


class Events(Protocol):
    """What a connection tells the rest of the agent."""

    def control(self, connection: Connection, frame: Frame) -> Frame | None:
        """Handle a control frame under the read lock; return the frame that is left to be delivered, if any."""

    def deliver(self, connection: Connection, frames: list[Frame], waiting: bool) -> bool:
        """Take the other frames, after the read lock was released; say whether any was not a reply.

        ``waiting``: the thread waits for one of them, and executes nothing for others.
        """

    def closed(self, connection: Connection, error: BaseException | None) -> None:
        """Record the end; called once, from any thread."""

    def suspended(self, connection: Connection, error: BaseException) -> None:
        """Record that a connection's socket is broken and another is wanted. Called under its locks."""

    def submit(self, task: Any) -> None:
        """Run ``task()`` on a pool thread."""


_DONTWAIT: Final = socket.MSG_DONTWAIT
_SEND: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_JOIN: Final = 256 << 10  # small frames are joined up to this many bytes for one send
_LOOKED_AT: Final = STREAM | MAIL | OBJECTS
_PARTS: Final = 512  # in one sendmsg; the kernel takes 1024
_SLICE_MS: Final = 1000  # an upper bound for one sleep in poll
_BULK_READS: Final = 64  # reads in one turn while chunks are coming in


class Connection(StateMachine):
    """One connected, authenticated stream socket."""

    def __init__(
        self,
        sock: Stream,
        *,
        epoll: select.epoll,
        events: Events,
        settings: Settings,
        attach: bytes,
        local: bool,
        seals: Seals | None = None,
        leftover: bytes = b"",
    ) -> None:
        super().__init__()
        sock.setblocking(True)  # non-blocking operations say so themselves (MSG_DONTWAIT)
        self.sock: Stream = sock
        self.fd = sock.fileno()
        self.local = local
        self.attach = attach
        self.peer: Any = None
        self.lender: Any = None
        self.borrower: Any = None
        self.lane_failed = False
        self.lane_after = 0.0  # when opening a tensor lane may be tried again
        self.assemblies: dict[int, Any] = {}
        #: large requests that have been taken up, of which the other side has not been told
        self.credits: dict[int, None] = {}
        #: one entry for each batch that was read and is not delivered yet; put in under the read lock
        self.undelivered: deque[None] = deque()
        #: bytes that have gone over its sockets, those of them that were chunks, and those that have come; counted under
        #: the lock of the direction
        self.bytes_out = self.chunk_bytes_out = self.bytes_in = self.chunk_bytes_in = 0
        self.goodbye: Goodbye | None = None
        # What is between hosts may break and go on over another socket; on one host, the end of a socket is a death.
        self.replay = Replay() if not local and settings.session_grace else None
        self.dialled = False
        self.other = ("", "")  # name and incarnation of the worker at the other end, as it has proved itself
        #: attempts to come back; each draws its number before it says anything
        self.attempts = itertools.count(1)
        self._told = 0  # the latest attempt over which the other side was told how far reading has come
        self.heard = _time.now()
        # Guards reading, the frame reader and the read side's poller.
        self.read_lock = _time.Lock()
        #: the number of the thread that holds it, and may run finalisers meanwhile; 0 where that cannot be
        self.reader = 0
        # Guards sending and ``_rest``.
        self.write_lock = _time.Lock()
        self.outbox: deque[bytes | Sendable] = deque()
        self._rest: list[memoryview] = []
        self._flushing = False
        self._epoll = epoll
        self._events = events
        self.settings = settings
        #: what is sent is sealed, in the order of the wire, under the write lock
        self.seal = None if seals is None else seals.outgoing
        reader = FrameReader if seals is None else partial(SealedReader, seals.incoming)
        self._reader = reader(
            max_frame=settings.max_frame,
            max_chunk=max(settings.chunk, 1 << 20),
            sink_for=self._sink_for,
            allocate=untouched,
        )
        self.fresh = bool(leftover)  # what came with the handshake has not been looked at
        if leftover:
            self._reader.put(leftover)
            if self.replay is not None:
                self.replay.count(len(leftover))
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: wakes for what comes, for :meth:`wake` and, on the main thread, for a signal handler that was put off
        self._poller = _time.poll()
        for fd in (self.fd, self._wake_fd, signals.wake_fd()):
            if fd >= 0:
                self._poller.register(fd, select.POLLIN)
        self._writer_poller: select.poll | None = None
        self.answering = ServerTurn(self)
        self.spinning = Spinning()  # of the threads that wait for a reply
        self.chunks = ChunkSender(self)
        self.send_chunks = self.chunks.send
        #: disarmed although nobody reads: the thread that made a call is about to wait for it, or the clock listens again soon
        self.expecting = False
        self.expecting_since = 0.0
        #: how many more replies are to be read by the threads that wait for them before one is expected again
        self.unattended = 0

    @property
    def receiving(self) -> bool:
        """Whether a message has come in part."""
        return bool(self.assemblies) or self._reader.mid_frame

    # -- the pool's side of reading -------------------------------------------------------------

    def register(self) -> None:
        """Put the connection into the epoll, armed: from now on the pool reads it.

        Raises:
            OSError: it has been closed, or the kernel has no room for it.
            ValueError: the epoll is closed.
        """
        while True:
            fd = self.fd
            try:
                self._epoll.register(fd, ARMED)
            except FileExistsError:  # it has gone on over another socket meanwhile, which is there already
                self.arm(ARMED)
            except OSError as error:
                # The other side may come back over another socket before this one is in the epoll: the thread that lets it go
                # on closes this one, then names the other one, and then registers that.
                if error.errno == errno.EBADF:
                    if self.state is SUSPENDED:
                        return
                    if self.fd != fd:
                        continue
                raise
            return

    def arm(self, mask: int) -> None:
        """Arm (the kernel wakes a pool thread for the next bytes) or disarm. Harmless when closed."""
        if self.state is not CLOSED:
            try:
                self._epoll.modify(self.fd, mask)
            except (OSError, ValueError):
                pass

    @uninterruptible
    def reading(
        self,
        waiter: ReadWaiter | None = None,
        spinning: Spinning | None = None,
        deadline: float | None = None,
        woken: bool = False,
    ) -> bool | None:
        """Send the outbox, read while no other thread reads, and deliver what has come.

        Returns whether something besides replies came; ``None``: another thread reads, or the connection is not open. An
        exception in reading closes the connection.

        Args:
            waiter: wait until something comes for it, at most until ``deadline``; see :meth:`_wait`. By default the thread reads
                what is there, and with ``spinning`` spins for it.
            woken: the kernel has woken this thread for the connection, which is disarmed by that.
        """
        if self.state is not OPEN or not self.read_lock.acquire(False):
            return None
        self.reader = threading.get_ident()
        modify = self._epoll.modify
        frames: list[Frame] = []
        if self.expecting or woken:
            self.expecting = False
        else:
            try:
                modify(self.fd, DISARMED)  # otherwise what comes wakes a pool thread as well
            except (OSError, ValueError):  # it is closed
                pass
        try:
            if self.state is not SUSPENDED:
                if self.outbox:
                    self.flush()
                if waiter is not None and spinning is not None:
                    self._wait(frames, waiter, spinning, deadline)
                elif spinning is not None:
                    self._spin(frames, spinning)
                else:
                    self.receive(frames)
        except BaseException as error:
            self.failed(error)
        finally:
            if frames:
                self.undelivered.append(None)
            self.reader = 0
            self.read_lock.release()
        if self.state is not CLOSED:
            try:
                modify(self.fd, ARMED)
            except (OSError, ValueError):
                pass
        return self._events.deliver(self, frames, waiter is not None) if frames else False

    def turn(self) -> None:
        """Read what is there, as a thread that the kernel has woken for it, unless another thread reads."""
        self.reading(woken=True)

    @uninterruptible
    def expect(self) -> bool:
        """Stop listening for a moment, because the reply to what is sent now is read by the thread that sends it.

        Otherwise that reply wakes a pool thread, which has nothing to do with it. Returns False where somebody reads, or where
        that thread did not come lately. The caller has :meth:`listen` called soon.
        """
        if self.expecting or self.unattended or not self.read_lock.acquire(False):
            return False
        try:
            self._epoll.modify(self.fd, DISARMED)
        except (OSError, ValueError):  # it is closed
            pass
        self.expecting = True
        self.expecting_since = _time.now()
        self.read_lock.release()
        return True

    @uninterruptible
    def listen(self) -> bool:
        """Listen again, if nobody has come to read what was expected; says whether that is so."""
        was = False
        if self.expecting and self.read_lock.acquire(False):
            was, self.expecting = self.expecting, False
            self.read_lock.release()
            if was:
                self.arm(ARMED)
        return was

    def wake(self) -> None:
        """End the sleep of the thread that polls this connection for a reply."""
        try:
            os.eventfd_write(self._wake_fd, 1)
        except (OSError, ValueError):  # closed meanwhile, or just now
            pass

    def _wait(
        self, frames: list[Frame], waiter: ReadWaiter, spinning: Spinning, deadline: float | None
    ) -> None:
        """Wait until something comes, the waiter is woken or the deadline has passed, and read. Under the read lock.

        With a deadline it returns after a second at the latest: nothing depends on a single wake-up.
        """
        # Another thread that wakes the waiter sees ``polling`` and wakes this thread, or this thread sees ``awake``.
        waiter.polling = self
        try:
            if waiter.awake:
                return
            if spinning.at_once < spinner.shared and self.settings.spin_us and spinning.pays():
                if self._spin(frames, spinning):
                    return
            begun = _time.now()
            wait_ms = None if deadline is None else _SLICE_MS
            if deadline is not None and deadline - begun < _time.near_s:
                wait_ms = max(0, int(_time.patience(deadline - begun) * 1e3) + 1)
            ready = self._poller.poll(wait_ms)
            spinning.at_once += WEIGHT * ((_time.now() - begun < AT_ONCE_S) - spinning.at_once)
            for fd, _ in ready:
                if fd == self.fd:
                    self.receive(frames)
                elif fd == self._wake_fd:
                    try:
                        os.eventfd_read(fd)
                    except BlockingIOError:
                        pass
        finally:
            waiter.polling = None

    def _spin(self, frames: list[Frame], spinning: Spinning) -> bool:
        """Try to read for at most the spin time, unless another thread spins; say whether something came. Under the read lock."""
        if not spinner.acquire():
            return False
        until = _time.now() + self.settings.spin_us * 1e-6
        first = came = self.receive(frames)
        try:
            while not came and _time.now() <= until:
                came = self.receive(frames)
        finally:
            spinner.release()
        spinning.at_once += WEIGHT * (first - spinning.at_once)
        if not first:  # what was there at the first look says nothing about spinning
            spinning.found += WEIGHT * (came - spinning.found)
        return came

    def receive(self, frames: list[Frame], fresh: bool = False) -> bool:
        """Read without blocking; while chunks come in, read on for a while. Returns whether anything came.

        What is to be delivered is added to ``frames``; the connection acts on control frames.

        Args:
            fresh: look at what came with the handshake, and read nothing else.
        """
        reader, events, came = self._reader, self._events, False
        for _ in range(_BULK_READS):
            count = 0
            if not fresh:
                try:
                    if reader.empty is not None:
                        count = self.sock.recv_into(reader.empty, 0, _DONTWAIT)
                    else:
                        count = self.sock.recvmsg_into(reader.target(), 0, _DONTWAIT)[0]
                except BlockingIOError:
                    if reader.sink is None or not self._poller.poll(1):
                        return came
                    continue
                if not count:
                    raise EOFError("end of file")
                self.heard = _time.now()
                self.bytes_in += count
                if self.replay is not None and self.replay.count(count):
                    self.flush()
            came = True
            found = reader.fed(count)
            while True:
                for frame in found:
                    # Whole messages pass; what controls the connection, is in chunks, has objects or is for a mailbox does not.
                    if frame[0] <= FAILURE and not frame[1] & _LOOKED_AT:
                        frames.append(frame)
                        continue
                    left = events.control(self, frame)
                    if left is not None:
                        frames.append(left)
                if not reader.more:
                    break
                found = reader.fed(0)
            if fresh or frames or reader.sink is None or self.state is CLOSED:
                break
        return came

    @uninterruptible
    def begin(self) -> list[Frame]:
        """Take what came right behind the handshake, unless somebody who waits for a reply has."""
        frames: list[Frame] = []
        self.fresh = False
        with self.read_lock:
            try:
                self.receive(frames, fresh=True)
            except BaseException as error:
                self.failed(error)
            if frames:
                self.undelivered.append(None)
        return frames

    def _sink_for(self, stream: int, position: int, length: int) -> memoryview:
        assembly = self.assemblies.get(stream)
        if assembly is None:
            raise ProtocolError(f"a chunk of unknown stream {stream}")
        self.chunk_bytes_in += length
        sink: memoryview = assembly.sink(position, length)
        return sink

    # -- writing -----------------------------------------------------------------------------------

    @uninterruptible
    def flush(self, wait: bool = False, held: bool = False) -> bool:
        """Send what is in the outbox. Returns whether all of it was handed to the kernel.

        Args:
            wait: sleep while the kernel takes no more; otherwise a pool thread sends the rest.
            held: this thread holds the write lock, and sends the rest itself. False then also means that nothing more may be
                sent until the other side acknowledges what it has.
        """
        outbox, replay = self.outbox, self.replay
        borrower, lender = self.borrower, self.lender
        if (borrower is not None and borrower.freed) or (lender is not None and lender.retired):
            self.hand_back()
        while outbox or self._rest or (replay is not None and replay.owed):
            if self.state is not OPEN:
                return False
            if not held and not self.write_lock.acquire(False):
                return False  # the holder looks at the outbox again when it is done
            full = False
            try:
                try:
                    while True:
                        if self._rest:
                            self._send_rest()
                            continue
                        if replay is not None:
                            if replay.owed:
                                replay.owed = False
                                outbox.appendleft(pack_frame(ACK, replay.received))
                            elif replay.full:
                                full = True
                                break
                        if not outbox:
                            break
                        item = outbox.popleft()  # only the thread that holds the write lock takes items out
                        if type(item) is not bytes:
                            item.sent = True  # type: ignore[union-attr]
                            item = item.frame  # type: ignore[union-attr]
                        if outbox or self.seal is not None:
                            item = self._join(item)
                        try:
                            count = self.sock.send(item, _SEND)
                        except OSError:
                            self._rest = [memoryview(item)]  # another socket may take it
                            raise
                        self.bytes_out += count
                        if count != len(item):
                            self._rest = [memoryview(item)[count:]]
                            item = item[:count]
                        if replay is not None:
                            replay.note(item)
                except BlockingIOError:
                    full = True
                if full and wait:
                    self._wait_writable()
            except BaseException as error:
                self.failed(error)
                return False
            finally:
                if not held:
                    self.write_lock.release()
            if full and not wait:
                if not held and not self._flushing:  # one thread that waits for the peer to read is enough
                    self._flushing = True
                    self._events.submit(self.flush_waiting)
                return False
        return not held or replay is None or not replay.full

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

    def _send_rest(self) -> None:
        """Send on what was sent in part. Under the write lock.

        Raises:
            BlockingIOError: the kernel takes no more.
        """
        rest = self._rest
        count = self.sock.sendmsg(rest if len(rest) <= _PARTS else rest[:_PARTS], (), _SEND)
        self.bytes_out += count
        if self.replay is not None:
            self.replay.note_parts(rest, count)
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
        """Sleep until the kernel takes more, for at most a slice. Under the write lock."""
        if not self._rest and self.replay is not None and self.replay.full:
            self.replay.wait(0.1)
            return
        if (poller := self._writer_poller) is None:
            poller = self._writer_poller = _time.poll()
            poller.register(self.sock.wire() if type(self.sock) is TlsSocket else self.fd, select.POLLOUT)
        left = 0.1 if deadline is None else min(0.1, max(0.0, deadline - _time.now()))
        poller.poll(left * 1e3)

    # -- the end -----------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Take a failed read or write as the end of the connection, or of its socket only."""
        if isinstance(error, MemoryError):
            error = MemoryError(
                f"{error or 'no memory for what goes over the connection'}: {explain_memory()}"
            )
        # The error is kept for a while, and a thread that waits for its answer reads itself: its caller's frames would be, too.
        let_frames_go(error)
        if self.replay is not None and self.goodbye is None and isinstance(error, (OSError, EOFError)):
            self.suspend(error)
        else:
            self.close(error)

    def suspend(self, error: BaseException) -> None:
        """Give the socket up, which has failed, and have another one looked for. Idempotent; never blocks."""
        if self.enter(SUSPENDED):
            self._shut()
            self._events.suspended(self, error)

    def overtaken(self, attempt: int) -> bool:
        """Whether a later attempt to come back has told the other side how far reading has come."""
        return attempt < self._told

    def standstill(self, attempt: int) -> int | None:
        """End all reading, until this attempt or a later one comes back; return how many bytes have come.

        ``None``: a later attempt has told it already. What is returned can be told: it stays true for this attempt.
        """
        assert self.replay is not None
        with self.read_lock:
            if self.overtaken(attempt):
                return None
            self._told = attempt
            # An earlier attempt may have come back meanwhile, with what it was told then.
            self.suspend(ConnectionResetError("another attempt to come back has begun"))
            return self.replay.received

    @uninterruptible
    def resume(self, sock: Stream, attempt: int, arrived: int, move: Callable[[], None]) -> bool:
        """Go on over another socket; say whether that was possible. The caller registers it, and flushes.

        Args:
            attempt: its number, which :meth:`standstill` was called with. After a later one's, it cannot come back.
            arrived: how many bytes of ours the other side has.
            move: has the pool watch ``sock`` in place of the old one.

        Raises:
            ProtocolError: the other side cannot have had just so much.
        """
        assert self.replay is not None
        with self.read_lock:
            # Before the other lock: the thread that has that may wait for an acknowledgement, which somebody has to read.
            if self.state is not SUSPENDED or self.overtaken(attempt):
                return False
            with self.write_lock:
                self._rest = self.replay.rewind(arrived) + self._rest
                move()
                self._poller.unregister(self.fd)
                self.sock.close()
                self.sock, self.fd, self._writer_poller = sock, sock.fileno(), None
                self._poller.register(self.fd, select.POLLIN)
                self.expecting = False
                self.heard = _time.now()
                return self.enter(OPEN)

    def close(self, error: BaseException | None = None) -> None:
        """Shut the connection, waking everybody who uses it. Idempotent; never blocks."""
        if self.enter(CLOSED):
            self._shut()
            self._events.closed(self, error)

    def _shut(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.wake()

    @uninterruptible
    def read_rest(self, patience_s: float = -1.0) -> list[Frame]:
        """Return what has arrived and no thread has read.

        Args:
            patience_s: how long to wait for a thread that reads now; -1: for as long as it takes.
        """
        frames: list[Frame] = []
        if not self.read_lock.acquire(timeout=patience_s):
            return frames
        try:
            while self.receive(frames):
                pass
        except (OSError, EOFError, ProtocolError, MemoryError):
            pass
        finally:
            if frames:
                self.undelivered.append(None)
            self.read_lock.release()
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
        self.state = CLOSED  # not by enter(): another thread may have held the lock at the fork
        for close in (self.sock.close, lambda: os.close(self._wake_fd)):
            try:
                close()
            except OSError:
                pass
        for lane in (self.lender, self.borrower):
            if lane is not None:
                lane.abandon()
