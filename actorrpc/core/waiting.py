"""Waiting: how the thread that made a call reads its own reply, and whether it spins for it first.

The rules of reading are those of ``connection.py``: release the read lock, then arm; whoever held the lock always arms.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any, Final

from actorrpc import moments
from actorrpc.core.answering import ARMED, DISARMED
from actorrpc.core.frames import FAILURE, REQUEST, Frame
from actorrpc.core.interrupts import beneath, holding, uninterruptible
from actorrpc.core.spin import Spin, spinner
from actorrpc.errors import DeadlockError

if TYPE_CHECKING:
    from actorrpc.core.connection import Connection

__all__ = ["AT_ONCE_S", "Waiting"]

AT_ONCE_S: Final = 4e-6  # seconds; a wait that is shorter was none
_SHARED: Final = (
    0.3  # how often a reply must have been there at once for both ends to be taken for sharing a processor
)
_MOST_WITHIN: Final = 8  # waits of signal handlers that have interrupted each other
_SLICE_MS: Final = 1000  # an upper bound for one sleep in poll, so that nothing depends on a single wake-up


class Waiting:
    """The waits for replies, on one connection. Any thread may use it; one at a time reads."""

    __slots__ = ("_asleep", "_at_once", "_conn", "_spin")

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._spin = Spin()
        self._at_once = 0.0
        self._asleep = False  # the thread with the read lock is in poll, and has touched nothing yet

    @holding
    @uninterruptible
    def read_for(self, call: Any, deadline: float | None) -> bool | None:
        """Read one batch on behalf of ``call`` and deliver it; sleep for it if need be.

        Returns ``None`` if somebody else is reading, otherwise whether something else than replies came.
        """
        conn = self._conn
        if conn.suspended or not conn.read_lock.acquire(False):
            return None
        frames: list[Frame] = []
        raised: BaseException | None = None
        # Disarmed before the call is sent: otherwise the reply wakes a pool thread that has nothing to do here.
        modify = conn._epoll.modify
        if conn.expecting:
            conn.expecting = False  # it is disarmed already
        else:
            try:
                modify(conn.fd, DISARMED)
            except (OSError, ValueError):
                pass
        try:
            if conn.suspended:
                return None
            if conn.outbox:
                conn.flush()
            # A completion by another thread either sees ``polling`` and wakes us, or is seen here.
            call.polling = conn
            if not call.done and not call.stirred:
                self._receive(frames, call, deadline, conn._poller)
        except BaseException as error:
            raised = self._raised(error)
        finally:
            call.polling = None
            conn.read_lock.release()
        if not conn.broken:
            try:
                modify(conn.fd, ARMED)
            except (OSError, ValueError):
                pass
        if raised is not None:
            raise raised
        if len(frames) == 1:
            # The path of most calls, without a detour: one frame, and it is the reply.
            frame = frames[0]
            if frame[2] == call.id and frame[0] != REQUEST and frame[0] <= FAILURE and call.future is None:
                peer = conn.peer
                if peer.pending.pop(call.id, None) is call:
                    if call.charge or peer.waiting:
                        peer.release(call)
                    call.reply = frame
                    call.done = True
                    if conn.outbox:
                        conn.flush()
                    return False
        return conn._events.deliver(conn, frames, True) if frames else False

    def _raised(self, error: BaseException) -> BaseException | None:
        """Take what reading has raised as the connection's end; return what a signal handler has raised in the sleep."""
        if self._asleep:
            self._asleep = False
            return error
        self._conn.failed(error)
        return None

    @holding
    @uninterruptible
    def read_within(self, call: Any, deadline: float | None) -> bool | None:
        """Read for a call that a signal handler waits for, where the thread that it has interrupted has the read lock.

        Returns as :meth:`read_for`; ``None``: another thread has the lock.

        Raises:
            DeadlockError: the thread is in the midst of reading or sending: what the handler waits for comes when it has
                returned.
        """
        conn = self._conn
        reads = max(0, beneath(self) - 1) if conn.read_lock.locked() else 0  # but for this one
        sends = beneath(conn, conn.chunks) if conn.write_lock.locked() and not call.sent else 0
        if not reads and not sends:
            return None
        if sends or not self._asleep or reads > _MOST_WITHIN:
            raise DeadlockError(
                f"{call} cannot be waited for here: a signal handler waits for it that has interrupted "
                + (
                    f"{reads} others, each in its wait"
                    if reads > _MOST_WITHIN
                    else "the main thread while it sends or receives, which goes on when the handler returns"
                )
                + ". Have the handler note what is to be done, or make the call without waiting for it",
                maybe_executed=call.may_arrive,
                worker=conn.peer.name if conn.peer is not None else None,
            )
        frames: list[Frame] = []
        raised: BaseException | None = None
        self._asleep = False
        try:
            if conn.outbox:
                conn.flush()
            call.polling = conn
            if not call.done and not call.stirred:
                self._receive(frames, call, deadline, conn.poller())
        except BaseException as error:
            raised = self._raised(error)
        finally:
            call.polling = None
            self._asleep = True  # as it was
        if raised is not None:
            raise raised
        return conn._events.deliver(conn, frames, True) if frames else False

    def _receive(self, frames: list[Frame], call: Any, deadline: float | None, poller: select.poll) -> None:
        conn = self._conn
        # Where replies are there as soon as somebody looks, both ends share a processor: spinning would keep it from
        # the other one.
        spin = self._spin if conn.settings.spin_us and self._at_once < _SHARED else None
        spun = spin is not None and spin.choose() and spinner.acquire()
        begun = moments.now()
        if spun and spin is not None:
            try:
                came = conn.spin_for(frames)
            finally:
                spinner.release()
            if came:
                if not self._came_at_once(came == 1):
                    spin.note(True, moments.now() - begun)
                return
        wait_ms = _SLICE_MS
        if deadline is not None and deadline - begun < moments.near_s:
            wait_ms = max(0, int(moments.patience(deadline - begun) * 1e3) + 1)
        self._asleep = True
        ready = poller.poll(wait_ms)
        self._asleep = False
        for fd, _ in ready:
            if fd == conn.fd:
                waited = moments.now() - begun
                conn.receive(frames)
                if not self._came_at_once(waited < AT_ONCE_S) and spin is not None and (spun or spin.due):
                    spin.note(spun, moments.now() - begun)
            elif fd == conn._wake_fd:
                conn._quieten()

    def _came_at_once(self, at_once: bool) -> bool:
        """Note whether what somebody waited for was there already: such a wait says nothing about spinning."""
        self._at_once += 0.0625 * (at_once - self._at_once)
        return at_once
