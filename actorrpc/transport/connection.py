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

**Writing.** See :mod:`actorrpc.transport.writer`.

Lock order: ``read_lock`` before the writer's, which is waited for only where the connection is suspended or broken: a writer may
wait for what has to be read. Neither is ever held while user code, or code that may run the garbage collector into
user code for long, is called on purpose. The functions that read, write and arm are marked
uninterruptible: signal handlers wait for their end, and any exception in one of them closes the connection.

**The agent.** A connection knows it by :class:`Events` only, which the agent's inbox implements; tests put in their own.
"""

from __future__ import annotations

import errno
import os
import select
import socket
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
from actorrpc.transport.lane import Lane
from actorrpc.transport.reader import ARMED, AT_ONCE_S, DISARMED, WEIGHT, Spinning, spinner
from actorrpc.transport.session import ReliableStream
from actorrpc.transport.signals import uninterruptible
from actorrpc.transport.stream import Stream
from actorrpc.transport.writer import Writer
from actorrpc.wire.frames import ACK, FAILURE, MAIL, OBJECTS, STREAM, Frame, FrameReader, pack_frame
from actorrpc.wire.integrity import SealedReader, Seals

__all__ = ["Connection", "Events", "ReadWaiter"]


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
_LOOKED_AT: Final = STREAM | MAIL | OBJECTS
_SLICE_MS: Final = 1000  # an upper bound for one sleep in poll
_BULK_READS: Final = 64  # reads in one turn while chunks are coming in


class Connection(StateMachine):
    """One connected, authenticated stream.

    Args:
        stream: the stream below. If it is a :class:`ReliableStream`, the connection goes on over another socket after the
            first breaks; otherwise a broken socket means that the peer died.
        attach: the token that names it.
        local: both ends are on this host, without TCP.
        seals: make and check the proofs that the bytes were not changed on the way.

    Attributes:
        session: the stream, if it goes on over another socket after the first breaks; otherwise None.
        peer: the worker at the other end, once it is known.
        assemblies: what takes the chunks that are coming in, by the number of their stream.
        undelivered: one entry for each batch that was read and is not delivered yet; put in under the read lock.
        heard: when bytes came last.
        reader: splits received bytes into frames. ``read_lock`` guards it, reading, and the poller.
        read_by: the number of the thread that holds the read lock, and may run finalisers meanwhile; 0 where that cannot be.
        outbox, flush: the writer's.
        spinning: for threads that wait for a reply; ``answering``: for threads that have executed a call.
        expecting: since when the socket is disarmed and has no reader: the caller will read its reply, or the clock re-arms the
            socket within some milliseconds. 0: it is not.
        unattended: replies that waiting callers still have to read before :meth:`expect` may disarm the socket again.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        epoll: select.epoll,
        events: Events,
        settings: Settings,
        attach: bytes,
        local: bool,
        seals: Seals | None = None,
    ) -> None:
        super().__init__()
        self.stream = stream
        self.session = stream if isinstance(stream, ReliableStream) else None
        self.fd = stream.sock.fileno()
        self.local = local
        self.attach = attach
        self.events = events
        self.peer: Any = None
        self.lane = Lane()
        self.assemblies: dict[int, Any] = {}
        self.undelivered: deque[None] = deque()
        self.goodbye: Goodbye | None = None
        self.heard = _time.now()
        self.read_lock = _time.Lock()
        self.read_by = 0
        self.writer = Writer(self, None if seals is None else seals.outgoing)
        self.outbox = self.writer.outbox
        self.flush = self.writer.flush
        self.reader = (FrameReader if seals is None else partial(SealedReader, seals.incoming))(
            max_frame=settings.max_frame,
            max_chunk=max(settings.chunk, 1 << 20),
            sink_for=self._sink_for,
            allocate=untouched,
        )
        self._epoll = epoll
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: wakes for what comes, for :meth:`wake` and, on the main thread, for a signal handler that was put off
        self._poller = _time.poll()
        for fd in (self.fd, self._wake_fd, signals.wake_fd()):
            if fd >= 0:
                self._poller.register(fd, select.POLLIN)
        spin_s = settings.spin_us * 1e-6
        self.spinning, self.answering = Spinning(spin_s), Spinning(spin_s)
        self.expecting = 0.0
        self.unattended = 0

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
            if self.stream.pending:
                self.events.submit(self.turn)
            return

    def arm(self, mask: int) -> None:
        """Arm (a pool thread reads the next bytes) or disarm. Harmless when closed."""
        if self.state is not CLOSED:
            try:
                self._epoll.modify(self.fd, mask)
            except (OSError, ValueError):
                pass
            if self.stream.pending and mask != DISARMED:
                self.events.submit(self.turn)  # the kernel does not report these bytes

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
        self.read_by = threading.get_ident()
        modify = self._epoll.modify
        frames: list[Frame] = []
        if self.expecting or woken:
            self.expecting = 0.0
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
            self.read_by = 0
            self.read_lock.release()
        if self.state is not CLOSED:
            try:
                modify(self.fd, ARMED)
            except (OSError, ValueError):
                pass
            if self.stream.pending:
                self.events.submit(self.turn)  # the kernel does not report these bytes
        return self.events.deliver(self, frames, waiter is not None) if frames else False

    @property
    def turn(self) -> Callable[[], object]:
        """The function that a woken pool thread calls: read the available bytes, unless another thread reads."""
        return partial(self.reading, None, None, None, True)  # no function between the two

    def reply(self) -> None:
        """Send the answers in the outbox, and read what comes at once or soon after: the end of a call that was executed here.

        Where both ends share a processor, the next request is here before ``send`` returns: then it is read here,
        instead of waking another thread for it. Where they do not, spinning may pay. Any thread may call it; the measurements
        need no exactness.
        """
        spinning = self.answering
        if spinning.at_once > spinner.pays or not spinning.count & 15:
            before = self.reader.received
            came = self.reading()
            if self.outbox:
                # It has answers to other threads' callers as well: with nothing to execute, this thread waits until they leave.
                self.flush(not came)
            if came is None:
                return
            hit = self.reader.received != before
            spinning.at_once += WEIGHT * (hit - spinning.at_once)
            if hit or spinning.at_once > spinner.pays:
                return
        else:
            self.flush(True)
        if spinning.pays():  # ``at_once`` is low here
            self.reading(None, spinning)

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
        self.expecting = _time.now()
        self.read_lock.release()
        return True

    @uninterruptible
    def listen(self) -> bool:
        """Listen again, if nobody has come to read what was expected; says whether that is so."""
        was = 0.0
        if self.expecting and self.read_lock.acquire(False):
            was, self.expecting = self.expecting, 0.0
            self.read_lock.release()
            if was:
                self.arm(ARMED)
        return was > 0

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
            if waiter.awake or (self.stream.pending and self.receive(frames)):
                return
            if spinning.at_once < spinner.shared and spinning.pays() and self._spin(frames, spinning):
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
        until = _time.now() + spinning.seconds
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

    def receive(self, frames: list[Frame]) -> bool:
        """Read without blocking; while chunks come in, read on for a while. Returns whether anything came.

        What is to be delivered is added to ``frames``; the connection acts on control frames.
        """
        reader, events, stream, came = self.reader, self.events, self.stream, False
        for _ in range(_BULK_READS):
            try:
                if reader.empty is not None:
                    count = stream.recv_into(reader.empty, 0, _DONTWAIT)
                else:
                    count = stream.recvmsg_into(reader.target(), 0, _DONTWAIT)[0]
            except BlockingIOError:
                if reader.sink is None or not self._poller.poll(1):
                    return came
                continue
            if not count:
                raise EOFError("end of file")
            self.heard = _time.now()
            if stream.owed:
                self.outbox.appendleft(pack_frame(ACK, stream.owed))
                stream.told()
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
            if frames or reader.sink is None or self.state is CLOSED:
                break
        return came

    def _sink_for(self, stream: int, position: int, length: int) -> memoryview:
        assembly = self.assemblies.get(stream)
        if assembly is None:
            raise ProtocolError(f"a chunk of unknown stream {stream}")
        sink: memoryview = assembly.sink(position, length)
        return sink

    # -- the end -----------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Take a failed read or write as the end of the connection, or of its socket only."""
        if isinstance(error, MemoryError):
            error = MemoryError(
                f"{error or 'no memory for what goes over the connection'}: {explain_memory()}"
            )
        # The error is kept for a while, and a thread that waits for its answer reads itself: its caller's frames would be, too.
        let_frames_go(error)
        if self.session is not None and self.goodbye is None and isinstance(error, (OSError, EOFError)):
            self.suspend(error)
        else:
            self.close(error)

    def suspend(self, error: BaseException) -> None:
        """Give the socket up, which has failed, and have another one looked for. Idempotent; never blocks."""
        if self.enter(SUSPENDED):
            self._shut()
            self.events.suspended(self, error)

    def standstill(self, attempt: int) -> int | None:
        """End all reading, until this attempt or a later one comes back; return how many bytes have come.

        ``None``: a later attempt has told it already. What is returned can be told: it stays true for this attempt.
        """
        assert self.session is not None
        with self.read_lock:
            if not self.session.may_tell(attempt):
                return None
            # An earlier attempt may have come back meanwhile, with what it was told then.
            self.suspend(ConnectionResetError("another attempt to come back has begun"))
            return self.session.received

    @uninterruptible
    def resume(self, stream: Stream, attempt: int, arrived: int, move: Callable[[], None]) -> bool:
        """Go on over another socket's stream; say whether that was possible. The caller registers it, and flushes.

        Args:
            attempt: its number, which :meth:`standstill` was called with. After a later one's, it cannot come back.
            arrived: how many bytes of ours the other side has.
            move: has the pool watch the new socket in place of the old one.

        Raises:
            ProtocolError: the other side cannot have had just so much.
        """
        assert self.session is not None
        with self.read_lock:
            if self.state is not SUSPENDED or self.session.is_overtaken(attempt):
                return False
            with self.writer.lock:
                self.writer.send_first(self.session.rewind(arrived))
                move()
                self._poller.unregister(self.fd)
                self.session.replace(stream)
                self.fd = stream.sock.fileno()
                self._poller.register(self.fd, select.POLLIN)
                self.expecting = 0.0
                self.heard = _time.now()
                return self.enter(OPEN)

    def close(self, error: BaseException | None = None) -> None:
        """Shut the connection, waking everybody who uses it. Idempotent; never blocks."""
        if self.enter(CLOSED):
            self._shut()
            self.events.closed(self, error)

    def _shut(self) -> None:
        try:
            self.stream.shutdown(socket.SHUT_RDWR)
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
        with self.read_lock, self.writer.lock:
            if self._wake_fd < 0:
                return
            try:
                self._epoll.unregister(self.fd)
            except (OSError, ValueError):
                pass
            self.stream.close()
            os.close(self._wake_fd)
            self._wake_fd = -1
        self.writer.clear()
        self.assemblies.clear()
        self.lane.close()

    def abandon(self) -> None:
        """Close the descriptors in a forked child, where locks may be held by threads that do not exist."""
        self.state = CLOSED  # not by enter(): another thread may have held the lock at the fork
        for close in (self.stream.close, lambda: os.close(self._wake_fd)):
            try:
                close()
            except OSError:
                pass
        self.lane.abandon()
