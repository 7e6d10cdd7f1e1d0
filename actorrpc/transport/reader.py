"""Who reads a connection: the thread that waits for a reply, and the one that has just sent an answer.

The rules of reading are those of ``connection.py``: release the read lock, then arm; the thread that held the lock always arms.

**A thread that waits for a reply** (:class:`ReplyWaiter`) reads for itself, and may spin for a moment first.

**A thread that has executed a call** (:class:`ServerTurn`) sends the answer, and may find the next request before the kernel
wakes another thread for it: at once, where both ends share a processor (the caller has run while the answer was being sent), or
by spinning for a moment where they do not. Which of the two pays is measured, for each connection.

**Spinning** (:class:`Spin`) helps where the two ends of a connection run on different processors, and hurts where they share
one or where the machine has more to do than processors. So each place that waits keeps a running mean of its waits with and
without spinning, uses the shorter, and tries the other one now and then (the rarer, the worse it has proved). One thread of a
process may spin at a time, and none while more threads are runnable than there are processors.
"""

from __future__ import annotations

import itertools
import os
import select
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, Protocol

from actorrpc import _time
from actorrpc.transport.connection_state import CLOSED, OPEN, SUSPENDED
from actorrpc.transport.signals import uninterruptible
from actorrpc.wire.frames import FAILURE, REQUEST, Frame

if TYPE_CHECKING:
    from actorrpc.transport.connection import Connection

__all__ = [
    "ARMED",
    "AT_ONCE_S",
    "DISARMED",
    "ReplyWaiter",
    "ServerTurn",
    "ServingThread",
    "Spin",
    "Spinner",
    "spinner",
]

_LONG: Final = 2e-3  # waits are counted as at most this long: beyond it, spinning can make no difference
_PROBE_MIN: Final = 64
_PROBE_MAX: Final = 256
_CROWD_PERIOD: Final = 0.005


class Spin:
    """Decides for one place that waits. Used by one thread at a time (the holder of the read lock)."""

    __slots__ = ("_count", "_off", "_on", "_probe", "use")

    def __init__(self, off: float = -1.0) -> None:
        """``off``: what a wait without spinning counts as, where it is not measured."""
        self.use = False
        self._on = -1.0
        self._off = off
        self._count = 0
        self._probe = _PROBE_MIN

    def choose(self) -> bool:
        """Say whether to spin in the wait that now begins."""
        self._count += 1
        if self._count >= self._probe or self._on < 0.0:
            self._count = 0
            return not self.use
        return self.use

    @property
    def due(self) -> bool:
        """Whether the wait that now begins without spinning is one of those that are measured."""
        return not self._count & 7

    def note(self, spun: bool, waited: float) -> None:
        """Record how long a wait took, in seconds, with or without spinning."""
        waited = min(waited, _LONG)
        if spun:
            self._on = waited if self._on < 0.0 else self._on + 0.125 * (waited - self._on)
        else:
            self._off = waited if self._off < 0.0 else self._off + 0.125 * (waited - self._off)
        if self._on < 0.0 or self._off < 0.0:
            return
        use = self._on < 0.9 * self._off
        if use != self.use:
            self.use = use
            self._probe = _PROBE_MIN
        elif spun != use:
            # The other mode was tried and lost again: ask more rarely.
            self._probe = min(2 * self._probe, _PROBE_MAX)


class Spinner:
    """The limits on spinning that all connections of this process share, and the lock that lets one thread spin at a time.

    Tests replace :data:`spinner`, or set its attributes.

    Attributes:
        shared: share of replies, 0 to 1, that were there at the first read. Above it, both ends are taken to share a processor,
            and callers that wait for a reply do not spin.
        pays: share of answers, 0 to 1, after which the next request was there at once. Above it, a thread reads after each
            answer.
    """

    def __init__(self) -> None:
        self.shared = 0.3
        self.pays = 0.15
        self.lock = _time.Lock()
        self._processors = os.cpu_count() or 1
        self._checked = 0.0
        self._crowded = False
        self._runnable = 1.0
        self._fd = -1

    def estimate(self, off: float = -1.0) -> Spin:
        """Return a new :class:`Spin`, for one side of one connection. ``off``: as for :class:`Spin`."""
        return Spin(off)

    def acquire(self) -> bool:
        """Take the right to spin, if nobody has it and there are processors to spare."""
        now = _time.now()
        if now - self._checked > _CROWD_PERIOD:
            self._checked = now
            self._crowded = self._look()
        return not self._crowded and self.lock.acquire(False)

    def release(self) -> None:
        """Give the right back."""
        self.lock.release()

    def _look(self) -> bool:
        # The fourth field of /proc/loadavg is runnable/total, this thread included.
        try:
            if self._fd < 0:
                self._fd = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
            runnable = int(os.pread(self._fd, 128, 0).split()[3].split(b"/")[0])
        except (OSError, ValueError, IndexError):
            return False
        # A mean over some tens of milliseconds: one passer-by is no crowd.
        self._runnable += 0.25 * (runnable - self._runnable)
        return self._runnable > self._processors + 0.6

    def close(self) -> None:
        """Close the file that is looked at."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


spinner = Spinner()


AT_ONCE_S: Final = 4e-6  # seconds; a wait that is shorter was none
_SLICE_MS: Final = 1000  # an upper bound for one sleep in poll, so that nothing depends on a single wake-up


class ReplyWaiter:
    """The waits for replies, on one connection. Any thread may use it; one at a time reads."""

    __slots__ = ("_at_once", "_conn", "_spin")

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._spin = spinner.estimate()
        self._at_once = 0.0

    @uninterruptible
    def read_for(self, call: Any, deadline: float | None) -> bool | None:
        """Read one batch on behalf of ``call`` and deliver it; sleep for it if need be.

        Returns ``None`` if somebody else is reading, otherwise whether something else than replies came.
        """
        conn = self._conn
        if conn.state is SUSPENDED or not conn.read_lock.acquire(False):
            return None
        conn.reader = get_ident()
        frames: list[Frame] = []
        answered = False
        # Disarmed before the call is sent: otherwise the reply wakes a pool thread that has nothing to do here.
        modify = conn._epoll.modify
        if conn.unattended and call.future is not None:
            conn.unattended -= 1
        if conn.expecting:
            conn.expecting = False  # it is disarmed already
        else:
            try:
                modify(conn.fd, DISARMED)
            except (OSError, ValueError):
                pass
        try:
            if conn.state is SUSPENDED:
                return None
            if conn.outbox:
                conn.flush()
            # A completion by another thread either sees ``polling`` and wakes us, or is seen here.
            call.polling = conn
            if not call.done and not call.stirred:
                # Where replies are there as soon as somebody looks, both ends share a processor: spinning would keep it from
                # the other one.
                spin = self._spin if conn.settings.spin_us and self._at_once < spinner.shared else None
                spun = spin is not None and spin.choose() and spinner.acquire()
                begun = _time.now()
                came = 0
                if spun and spin is not None:
                    try:
                        came = conn.spin_for(frames)
                    finally:
                        spinner.release()
                    if came:
                        self._at_once += 0.0625 * ((came == 1) - self._at_once)
                        if came != 1:
                            spin.note(True, _time.now() - begun)
                if not came:
                    wait_ms = _SLICE_MS
                    if deadline is not None and deadline - begun < _time.near_s:
                        wait_ms = max(0, int(_time.patience(deadline - begun) * 1e3) + 1)
                    for fd, _ in conn._poller.poll(wait_ms):
                        if fd == conn.fd:
                            # What was there already says nothing about spinning.
                            at_once = _time.now() - begun < AT_ONCE_S
                            conn.receive(frames)
                            self._at_once += 0.0625 * (at_once - self._at_once)
                            if not at_once and spin is not None and (spun or spin.due):
                                spin.note(spun, _time.now() - begun)
                        elif fd == conn._wake_fd:
                            conn._quieten()
            if len(frames) == 1 and call.future is None:
                # The path of most calls, without a detour: one frame, and it is the reply. The call is taken out before others
                # read: the thread that finds the end of the connection behind the reply would end it as well.
                frame = frames[0]
                if frame[2] == call.id and frame[0] != REQUEST and frame[0] <= FAILURE:
                    answered = conn.peer.pending.pop(call.id, None) is call
        except BaseException as error:
            conn.failed(error)
        finally:
            call.polling = None
            if frames and not answered:
                conn.undelivered.append(None)
            conn.reader = 0
            conn.read_lock.release()
        if conn.state is not CLOSED:
            try:
                modify(conn.fd, ARMED)
            except (OSError, ValueError):
                pass
        if answered:
            peer = conn.peer
            if call.charge or peer.waiting:
                peer.release(call)
            call.reply = frames[0]
            call.done = True
            if conn.outbox:
                conn.flush()
            return False
        return conn._events.deliver(conn, frames, True) if frames else False


ARMED: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
DISARMED: Final = select.EPOLLONESHOT


class ServingThread(Protocol):
    """A thread that attends a connection."""

    attends: Connection | None

    def called(self) -> bool:
        """Say, once, whether there is something else for it to do."""


class ServerTurn:
    """The end of a call, for one connection. Any thread may use it; the measurements need no exactness."""

    __slots__ = ("_conn", "_hit", "_quick", "_replies", "_spin")

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._spin = spinner.estimate(off=2e-3)
        self._quick = 0.0
        self._hit = False
        self._replies = itertools.count()

    def reply(self) -> list[Frame] | None:
        """Send the answers in the outbox, and return what comes at once or soon after; ``None`` if nothing is read.

        Where both ends share a processor, the next request is here before ``send`` returns: then it is read here,
        instead of waking another thread for it. Where they do not, spinning may pay.
        """
        conn = self._conn
        if self._quick > spinner.pays or not next(self._replies) & 15:
            frames = self._turn_around()
            if frames is None or self._hit or self._quick > spinner.pays:
                return frames
        else:
            conn.flush(True)
        return self._linger() if conn.settings.spin_us and conn.state is not CLOSED else None

    @uninterruptible
    def _read(self, read: Callable[[list[Frame]], None]) -> list[Frame] | None:
        """Have ``read(frames)`` read, with nobody else reading before or between; ``None``: somebody else reads."""
        conn = self._conn
        if conn.state is not OPEN or not conn.read_lock.acquire(False):
            return None
        conn.reader = get_ident()
        frames: list[Frame] = []
        conn.expecting = False
        conn.arm(DISARMED)
        try:
            if conn.state is SUSPENDED:
                return None
            read(frames)
        except BaseException as error:
            conn.failed(error)
        finally:
            if frames:
                conn.undelivered.append(None)
            conn.reader = 0
            conn.read_lock.release()
        conn.arm(ARMED)
        return frames

    @uninterruptible
    def _turn_around(self) -> list[Frame] | None:
        """Send, and read without blocking, with nobody else reading between."""
        conn = self._conn
        self._hit = False
        before = conn.heard

        def read(frames: list[Frame]) -> None:
            conn.flush()
            conn.receive(frames)

        frames = self._read(read)
        if frames is None or conn.outbox or conn._rest:
            # What has come is others' answers as well: those do not wait until the other end reads.
            conn.flush(not frames)
        if frames is not None:
            # Time may stand still between two reads: what has come decides.
            hit = self._hit = bool(frames) or conn.heard != before
            self._quick += 0.03 * (hit - self._quick)
        return frames

    @uninterruptible
    def attend(self, server: ServingThread) -> list[Frame] | None:
        """Send what is in the outbox, and wait for what comes over this connection; ``None``: somebody else reads it.

        For a thread that has nothing to do but to execute what its last caller sends next: it reads that itself,
        instead of being woken by another thread that has. Returns also when the server is called, or the connection ends.
        """
        # What _read does, without the detour: an actor's thread comes here after each of its calls.
        conn = self._conn
        if conn.state is not OPEN or not conn.read_lock.acquire(False):
            return None
        conn.reader = get_ident()
        frames: list[Frame] = []
        conn.expecting = False
        modify = conn._epoll.modify
        try:
            modify(conn.fd, DISARMED)
        except (OSError, ValueError):  # it is closed
            pass
        try:
            if conn.state is SUSPENDED:
                return None
            if conn.outbox:
                conn.flush()
            # The thread that calls the server either sees where it is and wakes it, or is seen here.
            server.attends = conn
            try:
                if not server.called():
                    spin = self._spin
                    if (
                        conn.settings.spin_us
                        and self._quick < spinner.pays
                        and spin.choose()
                        and spinner.acquire()
                    ):
                        self._attend_spinning(frames)
                    else:
                        self._quick += 0.03 * (conn.sleep(frames) - self._quick)
            finally:
                server.attends = None
        except BaseException as error:
            conn.failed(error)
        finally:
            if frames:
                conn.undelivered.append(None)
            conn.reader = 0
            conn.read_lock.release()
        if conn.state is not CLOSED:
            try:
                modify(conn.fd, ARMED)
            except (OSError, ValueError):
                pass
        if conn.outbox or conn._rest:
            conn.flush(not frames)  # as in _turn_around
        return frames

    def _attend_spinning(self, frames: list[Frame]) -> None:
        conn = self._conn
        try:
            tries = conn.spin_for(frames)
        finally:
            spinner.release()
        self._note(tries)
        if not tries:
            self._quick += 0.03 * (conn.sleep(frames) - self._quick)

    def _note(self, tries: int) -> None:
        """Record what spinning has brought. What was there already says nothing about it."""
        if tries == 1:
            self._quick += 0.03 * (1 - self._quick)
        else:
            # Compared with sleeping, which is noted as a long wait: a hit counts for spinning, a miss against it.
            self._spin.note(True, 0.0 if tries else 2.0)

    @uninterruptible
    def _linger(self) -> list[Frame] | None:
        """Spin for the next frames after having answered, if that has paid here; ``None`` if nothing came."""
        conn = self._conn
        if not self._spin.choose() or not spinner.acquire():
            return None
        tries = 0

        def read(frames: list[Frame]) -> None:
            nonlocal tries
            tries = conn.spin_for(frames)

        try:
            frames = self._read(read)
        finally:
            spinner.release()
        if frames is not None:
            self._note(tries)
        return frames
