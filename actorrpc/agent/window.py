"""How much of what calls have sent to one peer may be unread there: those who call more wait, or are told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from actorrpc import _time
from actorrpc.errors import BackpressureError
from actorrpc.transport.blocked_sends import SILENT_S, BlockedSends
from actorrpc.transport.signals import checkpoint, pending_here, uninterruptible

if TYPE_CHECKING:
    from actorrpc.agent.peers import Peer

__all__ = ["MAX_PENDING", "Window"]

MAX_PENDING: Final = 1 << 17  # calls in flight to one peer before further ones wait


class Window:
    """The back-pressure of one peer. Thread-safe. Its lock guards ``charged`` and is a leaf.

    Attributes:
        limit: bytes that may be unread.
        charged: bytes that are.
        waiting: how many threads wait for room.
        blocked: the time in which they have.
    """

    __slots__ = ("_lock", "_peer", "_room", "blocked", "charged", "limit", "waiting")

    def __init__(self, peer: Peer, limit: int) -> None:
        self._peer = peer
        self._lock = _time.RLock()  # re-entrant: the collector may run user code here
        self._room = _time.Condition(self._lock)
        self.limit = limit
        self.charged = 0
        self.waiting = 0
        self.blocked = BlockedSends()

    @property
    def full(self) -> bool:
        """Whether more is unread over there than it allows."""
        return self.charged >= self.limit or len(self._peer.pending) >= MAX_PENDING

    def charge(self, call: Any, size: int) -> None:
        """Count ``size`` bytes of a call as sent and unread, unless it is over."""
        with self._lock:  # not the condition: that enters and leaves in Python
            call.charge = size
            self.charged += size
        # The thread that ends the call takes it out first and then releases what it has: nothing yet, or this.
        if self._peer.pending.get(call.id) is not call:
            self.release(call)

    def release(self, call: Any) -> None:
        """Count a call's bytes as read; idempotent. Wakes those who wait for room."""
        size = call.charge
        if size:
            with self._lock:
                size, call.charge = call.charge, 0
                self.charged -= size
        if self.waiting:
            with self._room:
                if not self.full:
                    self._room.notify_all()

    def wait_for_room(self, deadline: float, what: str) -> None:
        """Sleep until the peer has read enough of what was sent to it. Interruptible.

        Raises:
            BackpressureError: it has not by the deadline; nothing was sent.
            PeerDiedError: it died meanwhile.
        """
        begun = _time.now()
        late_at = begun + SILENT_S
        while not self._wait_for_room(deadline, late_at, what):
            checkpoint()
            if late_at <= _time.now():
                late_at = float("inf")
                if self.blocked.is_due(begun):
                    self.blocked.log(what, self._too_much())

    @uninterruptible
    def _wait_for_room(self, deadline: float, late_at: float, what: str) -> bool:
        # An exception between two steps of the condition would leave its lock taken for ever.
        with self._room:
            self.waiting += 1
            if self.blocked.since is None:
                self.blocked.since = _time.now()
            try:
                while self.full and not pending_here():
                    self._peer.check_alive(what)
                    now = _time.now()
                    if now >= deadline:
                        raise BackpressureError(
                            f"{what} was not sent within its time-out: {self._too_much()}",
                            maybe_executed=False,
                            worker=self._peer.name,
                        )
                    if now >= late_at:
                        break
                    self._room.wait(min(_time.patience(min(deadline, late_at) - now), 0.1))
                return not self.full
            finally:
                self.waiting -= 1
                if not self.waiting:
                    self.blocked.since = None

    def _too_much(self) -> str:
        peer = self._peer
        return (
            f"worker {peer.name!r} has not started calls of {self.charged} bytes, and {len(peer.pending)} calls to it are not "
            f"over. The setting window (ACTORRPC_WINDOW) allows {self.limit} bytes that have not started; at most "
            f"{MAX_PENDING} calls may be pending. Call less often, wait for results, or raise window"
        )

    def wake_all(self) -> None:
        """Wake the threads that wait for room."""
        with self._room:
            self._room.notify_all()
