"""A connection to a peer over one stream socket. Readers and writers do not block each other.

**Reading.** A connection is armed in the pool's epoll with EPOLLONESHOT. The thread that reads holds ``read_lock``. It is a
pool thread that the kernel has woken or that has sent an answer, or a caller that waits for its own reply. Each of these rules
prevents a hang:

* A thread that cannot get the lock returns without arming. The thread that had the lock releases it *first*, and then arms an
  open connection.
* Whether the connection is suspended is checked *under* the lock. A suspended connection must not be read: the other side was
  told how many bytes this side has received, and sends all further bytes again, even if the failed socket still has them.
* A pool thread reads with MSG_DONTWAIT only, because another thread may have read the bytes for which it was woken.
* Under the lock, bytes are only split into frames, and control frames are handled, which is quick and runs no user code. All
  other frames are handled after the lock was released.

**Spinning.** A thread that waits for input may spin before it sleeps: a caller that waits for its reply, or a thread that has
executed a call and sent the answer, and so may read the next request before the kernel wakes another thread for it. If both ends
share a CPU, the other end has run while this thread was sending, and its input is available at the first poll. If they do not
share a CPU, the input may arrive while the thread spins for the setting ``spin_us``. Spinning is cheaper than sleeping only if
input arrives within that time. Each connection therefore measures two rates, separately for the two kinds of threads
(:class:`Spinning`): the rate of waits that found input at the first poll, and the rate of spins that found input later. If the
first rate is high, threads do not spin. Otherwise, they spin in every wait if the second rate is high enough, and else in one
wait of 64. Only one thread of a process spins at a time, because spinning threads compete for the GIL.

**Writing.** See :mod:`actorrpc.transport.writer`.

Lock order: ``read_lock`` before the writer's lock. A reader waits for the writer's lock only if the connection is suspended or
broken: otherwise the writer may be waiting until the other side reads, and the other side until this side reads. User code, or
code that may run the garbage collector for long, is not called under either lock. The functions that read, write and arm are
marked uninterruptible: signal handlers run after them. An error in such a function suspends or closes the connection.

**The agent.** A connection calls the agent through :class:`Events` only, which the agent's inbox implements.
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
from actorrpc._exceptions import let_frames_go
from actorrpc._limits import explain_memory
from actorrpc.config import Settings
from actorrpc.errors import ProtocolError, RpcError
from actorrpc.transport import signals
from actorrpc.transport.buffers import untouched
from actorrpc.transport.shared_memory import Lane
from actorrpc.transport.signals import uninterruptible
from actorrpc.transport.stream import (
    CLOSED,
    OPEN,
    SUSPENDED,
    ConnectionState,
    Goodbye,
    ReliableStream,
    Stream,
)
from actorrpc.transport.writer import Writer
from actorrpc.wire.frames import ACK, FAILURE, MAIL, OBJECTS, STREAM, Frame, FrameReader, pack_frame

__all__ = ["ARMED", "Connection", "Events", "ReadWaiter", "Spinner", "spinner"]


class ReadWaiter(Protocol):
    """The state of a thread that waits for bytes on a connection.

    Attributes:
        polling: the connection that the thread polls. To wake the thread, another thread sets ``awake`` and then wakes
            ``polling``.
        awake: whether the thread has to stop waiting.
    """

    polling: Connection | None
    awake: bool


class Events(Protocol):
    """The callbacks of a connection to the agent."""

    def control(self, connection: Connection, frame: Frame) -> Frame | None:
        """Handle a control frame under the read lock; return a frame to be delivered after the lock was released, or None."""

    def deliver(self, connection: Connection, frames: list[Frame], waiting: bool) -> bool:
        """Handle the frames that :meth:`control` has returned, after the read lock was released.

        ``waiting``: the calling thread waits for its own reply, so it must not execute requests. Return whether work was queued
        for the pool; if ``waiting``, notices do not count.
        """

    def closed(self, connection: Connection, error: BaseException | None) -> None:
        """Handle the end of the connection. Called once, on any thread."""

    def suspended(self, connection: Connection, error: BaseException) -> None:
        """Arrange that a connection whose socket has failed is resumed. Called under one of the connection's locks, or both."""

    def submit(self, task: Any) -> None:
        """Run ``task()`` on a pool thread."""


_DONTWAIT: Final = socket.MSG_DONTWAIT
_LOOKED_AT: Final = STREAM | MAIL | OBJECTS
_SLICE_MS: Final = 1000  # an upper bound for one sleep in poll
_NEXT: Final[dict[ConnectionState, tuple[ConnectionState, ...]]] = {
    OPEN: (SUSPENDED, CLOSED),
    SUSPENDED: (OPEN, CLOSED),
    CLOSED: (),
}
_BULK_READS: Final = 64  # the most reads in one call of receive(), while chunks arrive
_AT_ONCE_S: Final = 4e-6  # a shorter wait counts as having found input at the first poll
_WEIGHT: Final = 0.0625  # of the latest wait in the averages of Spinning
ARMED: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
_DISARMED: Final = select.EPOLLONESHOT


class Spinner:
    """The right to spin, which one thread of the process has at a time. Tests replace :data:`spinner`, or set its attributes.

    Attributes:
        shared: the rate of waits with input at the first poll above which both ends are assumed to share a CPU.
        worth: the rate of successful spins from which on threads spin in every wait.
        read_again: if more than this part of the answers is followed by a request at once, threads read after each answer.
    """

    def __init__(self) -> None:
        self.shared, self.worth, self.read_again = 0.3, 0.25, 0.15
        self.lock = _time.Lock()

    def acquire(self) -> bool:
        """Acquire the right to spin; return False if another thread has it."""
        return self.lock.acquire(False)

    def release(self) -> None:
        """Give the right back."""
        self.lock.release()


spinner = Spinner()


class Spinning:
    """The measurements of one connection for one kind of waits. Not exact: :meth:`Connection.reply` updates them without a lock.

    Attributes:
        seconds: how long a thread spins; 0: never.
        at_once: moving average, 0 to 1: the rate of waits that found input at the first poll.
        found: moving average, 0 to 1: the rate of spins that found input.
        count: the number of calls of :meth:`should_spin`; if ``seconds`` is not 0, every 64th call returns True.
    """

    __slots__ = ("at_once", "count", "found", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.count = 0
        self.at_once = self.found = 0.0

    def should_spin(self) -> bool:
        """Return whether to spin in the next wait. Called only if the two ends do not share a CPU."""
        self.count += 1
        return self.seconds > 0 and (self.found >= spinner.worth or not self.count & 63)


class Connection:
    """One connected, authenticated stream.

    Args:
        stream: the byte stream. With a :class:`ReliableStream`, the connection is resumed over another socket when the socket
            breaks; with other streams, a broken socket means that the peer died.
        attach: the token that identifies the connection.
        local: both ends are on this host, without TCP.

    Attributes:
        peer: the worker at the other end, once it is known.
        assemblies: the objects that receive chunks, by the number of the stream of chunks.
        undelivered: one entry for each batch of frames that was read and not delivered yet; added under the read lock.
        last_received: when the last bytes arrived.
        reader: splits received bytes into frames. ``read_lock`` guards it, reading, and the poller.
        read_by: the identifier of the thread that holds the read lock in :meth:`reading`, where it may run finalisers; otherwise
            0.
        outbox, flush: the writer's outbox, and its method that sends the outbox.
        spinning: measurements for threads that wait for a reply; ``answering``: for threads that have executed a call.
        expecting: since when the socket is disarmed and has no reader: the caller will read its reply, or the clock re-arms the
            socket within some milliseconds. 0: the socket is armed, or a thread reads it.
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
    ) -> None:
        #: any thread may read it without a lock; :meth:`enter` changes it
        self.state: ConnectionState = OPEN
        #: how often the connection was suspended: an attempt to resume stores the number, and stops if it has changed
        self.lapses = 0
        # A leaf that guards changes of the state. Without it: 1. Thread A reads OPEN and is about to suspend the connection.
        # 2. Thread B closes the connection. 3. Thread A writes SUSPENDED. The closed connection would then count as suspended.
        self._state_lock = _time.Lock()
        self.stream = stream
        self.fd = stream.sock.fileno()
        self.local = local
        self.attach = attach
        self.events = events
        self.peer: Any = None
        self.lane = Lane()
        self.assemblies: dict[int, Any] = {}
        self.undelivered: deque[None] = deque()
        self.goodbye: Goodbye | None = None
        self.last_received = _time.now()
        self.read_lock = _time.Lock()
        self.read_by = 0
        self.writer = Writer(self)
        self.outbox = self.writer.outbox
        self.flush = self.writer.flush
        self.reader = FrameReader(
            max_frame=settings.max_frame,
            max_chunk=max(settings.chunk, 1 << 20),
            sink_for=self._sink_for,
            allocate=untouched,
        )
        self._epoll = epoll
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: polls three descriptors: for arriving bytes, for :meth:`wake`, and for deferred signal handlers
        self._poller = _time.poll()
        for fd in (self.fd, self._wake_fd, signals.wake_fd()):
            if fd >= 0:
                self._poller.register(fd, select.POLLIN)
        spin_s = settings.spin_us * 1e-6
        self.spinning, self.answering = Spinning(spin_s), Spinning(spin_s)
        self.expecting = 0.0
        self.unattended = 0

    @property
    def session(self) -> ReliableStream | None:
        """The stream, if it can be resumed over another socket."""
        return self.stream if isinstance(self.stream, ReliableStream) else None

    # -- reading --------------------------------------------------------------------------------

    def register(self) -> None:
        """Add the connection to the epoll, armed, so that pool threads read it.

        Raises:
            OSError: the connection is closed, or the kernel lacks memory.
            ValueError: the epoll is closed.
        """
        while True:
            fd = self.fd
            try:
                self._epoll.register(fd, ARMED)
            except FileExistsError:  # a resuming thread has registered the new socket already
                self.arm(ARMED)
            except OSError as error:
                # The connection may be resumed over another socket before this one is registered. The resuming thread closes this
                # socket, then sets ``fd`` to the new one, and then registers the new one.
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
        """Arm the epoll entry, so that a pool thread reads the next bytes, or disarm it. No effect on a closed connection."""
        if self.state is not CLOSED:
            try:
                self._epoll.modify(self.fd, mask)
            except (OSError, ValueError):
                pass
            if self.stream.pending and mask != _DISARMED:
                self.events.submit(self.turn)  # epoll does not report bytes that the stream buffers

    @uninterruptible
    def reading(
        self,
        waiter: ReadWaiter | None = None,
        spinning: Spinning | None = None,
        deadline: float | None = None,
        woken: bool = False,
    ) -> bool | None:
        """Send the outbox, read unless another thread reads, and deliver the received frames.

        Returns whether the received frames have queued work for the pool (see :meth:`Events.deliver`); ``None``: another thread
        reads, or the connection is not open. An error while reading suspends or closes the connection.

        Args:
            waiter: wait until bytes arrive or the waiter is woken, at most until ``deadline``; see :meth:`_wait`. Without a
                waiter, the thread only reads the available bytes, and with ``spinning`` spins for them.
            woken: whether the epoll has woken this thread for the connection, and has thereby disarmed the connection.
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
                modify(self.fd, _DISARMED)  # otherwise arriving bytes would wake a pool thread as well
            except (OSError, ValueError):  # the socket or the epoll is closed
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
                self.events.submit(self.turn)  # epoll does not report bytes that the stream buffers
        return self.events.deliver(self, frames, waiter is not None) if frames else False

    @property
    def turn(self) -> Callable[[], object]:
        """The function that a woken pool thread calls: read the available bytes, unless another thread reads."""
        return partial(self.reading, None, None, None, True)

    def reply(self) -> None:
        """Send the answers in the outbox after a call was executed, and try to read the next request on this thread.

        If both ends share a CPU, the next request has often arrived before the system call that sends returns. Reading it on this
        thread is cheaper than waking another thread. If the ends do not share a CPU, the request may arrive while this thread
        spins. Any thread may call this method; the measurements are updated without a lock, as they need not be exact.
        """
        spinning = self.answering
        if spinning.at_once > spinner.read_again or not spinning.count & 15:
            before = self.reader.received
            came = self.reading()
            if self.outbox:
                # The outbox may have answers of other threads. If no work arrived, this thread may sleep until the kernel has
                # accepted all answers; otherwise a pool thread sends the rest.
                self.flush(not came)
            if came is None:
                return
            hit = self.reader.received != before
            spinning.at_once += _WEIGHT * (hit - spinning.at_once)
            if hit or spinning.at_once > spinner.read_again:
                return
        else:
            self.flush(True)
        if spinning.should_spin():  # ``at_once`` is low at this point: the two ends do not share a CPU
            self.reading(None, spinning)

    @uninterruptible
    def expect(self) -> bool:
        """Disarm the connection for a moment, because the calling thread will send a request and read the reply itself.

        Otherwise the reply would wake a pool thread as well. Returns False if another thread reads, or if callers have not read
        earlier replies yet. The caller arranges that :meth:`listen` is called soon, in case the reply is not read.
        """
        if self.expecting or self.unattended or not self.read_lock.acquire(False):
            return False
        try:
            self._epoll.modify(self.fd, _DISARMED)
        except (OSError, ValueError):  # the socket or the epoll is closed
            pass
        self.expecting = _time.now()
        self.read_lock.release()
        return True

    @uninterruptible
    def listen(self) -> bool:
        """Arm the connection again, if no thread has read it since :meth:`expect`; return whether that was necessary."""
        was = 0.0
        if self.expecting and self.read_lock.acquire(False):
            was, self.expecting = self.expecting, 0.0
            self.read_lock.release()
            if was:
                self.arm(ARMED)
        return was > 0

    def wake(self) -> None:
        """Wake the thread that polls this connection for a reply."""
        try:
            os.eventfd_write(self._wake_fd, 1)
        except (OSError, ValueError):  # the connection is closed
            pass

    def _wait(
        self, frames: list[Frame], waiter: ReadWaiter, spinning: Spinning, deadline: float | None
    ) -> None:
        """Wait until bytes arrive, the waiter is woken or the deadline has passed, and read. Under the read lock.

        With a deadline, returns after at most a second, so that a lost wake-up does not cause a hang.
        """
        # A waking thread sets ``awake`` and then reads ``polling``; this thread sets ``polling`` and then reads ``awake``. So
        # either the other thread sees ``polling`` and wakes this thread, or this thread sees ``awake``.
        waiter.polling = self
        try:
            if waiter.awake or (self.stream.pending and self.receive(frames)):
                return
            if spinning.at_once < spinner.shared and spinning.should_spin() and self._spin(frames, spinning):
                return
            begun = _time.now()
            wait_ms = None if deadline is None else _SLICE_MS
            if deadline is not None and deadline - begun < _time.near_s:
                wait_ms = max(0, int(_time.patience(deadline - begun) * 1e3) + 1)
            for fd, _ in self._poller.poll(wait_ms):
                if fd == self.fd:
                    self.receive(frames)
                elif fd == self._wake_fd:
                    try:
                        os.eventfd_read(fd)
                    except BlockingIOError:
                        pass
            spinning.at_once += _WEIGHT * (
                (begun <= self.last_received < begun + _AT_ONCE_S) - spinning.at_once
            )
        finally:
            waiter.polling = None

    def _spin(self, frames: list[Frame], spinning: Spinning) -> bool:
        """Poll for up to ``spinning.seconds`` unless another thread spins; return whether bytes arrived. Under the read lock."""
        if not spinner.acquire():
            return False
        until = _time.now() + spinning.seconds
        first = came = self.receive(frames)
        try:
            while not came and _time.now() <= until:
                came = self.receive(frames)
        finally:
            spinner.release()
        spinning.at_once += _WEIGHT * (first - spinning.at_once)
        if not first:  # otherwise the thread did not spin, because the first read found bytes
            spinning.found += _WEIGHT * (came - spinning.found)
        return came

    def receive(self, frames: list[Frame]) -> bool:
        """Read the available bytes; return whether there were any. Under the read lock.

        Within a chunk, read repeatedly, and wait for up to 1 ms before each read; otherwise, do not block. Control frames are
        handled at once. Frames that have to be delivered are appended to ``frames``.
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
            self.last_received = _time.now()
            if stream.owed:
                self.outbox.appendleft(pack_frame(ACK, stream.owed))
                stream.ack_sent()
                self.flush()
            came = True
            found = reader.fed(count)
            while True:
                for frame in found:
                    # Handle under the lock: control frames, and messages in chunks, with objects, or for a mailbox.
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

    # -- failure and closing -----------------------------------------------------------------------

    @uninterruptible
    def enter(self, state: ConnectionState) -> bool:
        """Change the state; return False if the current state does not permit that. Never blocks for long."""
        with self._state_lock:
            if state not in _NEXT[self.state]:
                return False
            if state is SUSPENDED:
                self.lapses += 1
            self.state = state
        return True

    def failed(self, error: BaseException) -> None:
        """Handle the error of a read or write: suspend the connection if it can be resumed, otherwise close it."""
        if isinstance(error, MemoryError):
            error = MemoryError(f"{error or 'no memory for a message of the connection'}: {explain_memory()}")
        # The error is stored. Its traceback would keep the frames alive of a caller that has read for its reply.
        let_frames_go(error)
        if self.session is not None and self.goodbye is None and isinstance(error, (OSError, EOFError)):
            self.suspend(error)
        else:
            self.close(error)

    def suspend(self, error: BaseException) -> None:
        """Shut down the failed socket, and request another socket (:meth:`Events.suspended`). Idempotent; never blocks."""
        if self.enter(SUSPENDED):
            self._shut()
            self.events.suspended(self, error)

    def standstill(self, attempt: int) -> int | None:
        """Stop reading until an attempt resumes the connection; return the number of received bytes, to be sent to the peer.

        The number stays valid for this attempt, because nothing is read until the connection is resumed. ``None``: a later
        attempt has got the number already, so the caller has to give up.
        """
        assert self.session is not None
        with self.read_lock:
            if not self.session.claim_attempt(attempt):
                return None
            # An earlier attempt may have resumed the connection meanwhile; this attempt replaces that attempt's socket.
            self.suspend(ConnectionResetError("another attempt to resume the connection has begun"))
            return self.session.received

    @uninterruptible
    def resume(self, stream: Stream, attempt: int, received: int, move: Callable[[], None]) -> bool:
        """Resume the connection over a new stream; return False if it is not suspended or a later attempt has begun.

        The caller then calls :meth:`register` and :meth:`flush`.

        Args:
            attempt: the number of the attempt, with which :meth:`standstill` was called.
            received: how many bytes the other side has received.
            move: makes the pool watch the new socket instead of the old one.

        Raises:
            ProtocolError: the other side cannot have received that many bytes.
        """
        session = self.session
        assert session is not None
        with self.read_lock:
            if self.state is not SUSPENDED or session.is_overtaken(attempt):
                return False
            with self.writer.lock:
                self.writer.send_first(session.rewind(received))
                move()
                self._poller.unregister(self.fd)
                session.replace(stream)
                self.fd = stream.sock.fileno()
                self._poller.register(self.fd, select.POLLIN)
                self.expecting = 0.0
                self.last_received = _time.now()
                return self.enter(OPEN)

    def close(self, error: BaseException | None = None) -> None:
        """Close the connection, and wake the threads that use it. Idempotent; never blocks."""
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
        """Read all bytes that have arrived, and return their frames.

        Args:
            patience_s: how many seconds to wait until no other thread reads; -1: without a limit.
        """
        frames: list[Frame] = []
        if not self.read_lock.acquire(timeout=patience_s):
            return frames
        try:
            while self.receive(frames):
                pass
        except (OSError, EOFError, RpcError, MemoryError):
            pass
        finally:
            if frames:
                self.undelivered.append(None)
            self.read_lock.release()
        return frames

    def reap(self) -> None:
        """Wait until no thread reads or writes, and close the descriptors. Runs on a pool thread, or when the agent is closed."""
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
        """Close the descriptors in a forked child. Takes no lock: a thread that does not exist there may hold it."""
        self.state = CLOSED  # not by enter(): another thread may have held the state lock at the fork
        for close in (self.stream.close, lambda: os.close(self._wake_fd)):
            try:
                close()
            except OSError:
                pass
        self.lane.abandon()
