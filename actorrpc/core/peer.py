"""One other worker, as this one sees it: its connections, and the calls that are in flight both ways.

``pending`` maps call numbers to calls made to the peer that are not over; taking a call out of it
(``dict.pop``, atomic) is the right to end it. ``running`` maps the peer's numbers to its calls that are being
executed here.

``dial_lock`` guards the making of connections and is held while dialling; no other lock is held when it is
taken. ``_credit`` guards ``charged`` and is a leaf. Nothing calls out under either.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any, Final, Protocol

from actorrpc import moments
from actorrpc.core.identity import WorkerInfo, WorkerRecord
from actorrpc.core.interrupts import checkpoint, pending_here, uninterruptible
from actorrpc.core.liveness import Liveness
from actorrpc.core.repeats import Begun
from actorrpc.errors import BackpressureError, PeerDiedError

if TYPE_CHECKING:
    from actorrpc.core.connection import Connection

__all__ = ["Cancellable", "Peer"]

MAX_PENDING: Final = 1 << 17  # calls in flight to one peer before further ones wait


class Cancellable(Protocol):
    """What runs for a caller: an execution, a call in an actor's mailbox, or a stream."""

    def cancel(self, stop: bool = False) -> None:
        """Give it up; see :meth:`~actorrpc.core.calls.Execution.cancel`. Runs on a pool thread."""


class Peer:
    """One worker of the group, in one incarnation. Thread-safe."""

    def __init__(self, record: WorkerRecord, *, own: WorkerRecord, window: int, definitions: Any) -> None:
        self.record = record
        self.name = record.name
        self.rank = record.rank
        self.info = WorkerInfo(record.name, record.rank)
        self.is_self = record.incarnation == own.incarnation
        self.same_host = record.host == own.host
        self.same_main = bool(record.main) and record.main == own.main
        self.state = "alive"
        self.cause = ""
        self.conn: Connection | None = None
        self.conns: list[Connection] = []
        self.pending: dict[int, Any] = {}
        self.running: dict[int, Cancellable] = {}
        self.cancelled: dict[int, None] = {}
        self.begun = Begun()
        self.answered = Begun()
        self.ids = itertools.count(1)
        self.streams = itertools.count(1)
        self.known: set[bytes] = set()
        self.definitions = definitions
        self.dial_lock = threading.Lock()
        self.scan_at = float("inf")
        self.liveness = Liveness()
        #: the final state that was made known (``changes.py``), behind ``state``, which is what calls go by
        self.ending = ""
        # Device here -> device there, for what is sent to this peer: for answers, the caller's map comes first, reversed.
        self.device_map, self.answer_map = _device_maps(own, record)
        # -- back-pressure
        self._credit = threading.Condition()  # re-entrant: the collector may run user code here
        self.waiting = 0
        self.charged = 0
        self.window = window

    def __repr__(self) -> str:
        return f"<Peer {self.name!r} {self.state}, {len(self.pending)} calls out, {len(self.running)} in>"

    # -- back-pressure -------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether more is unread over there than the window allows."""
        return self.charged >= self.window or len(self.pending) >= MAX_PENDING

    def charge(self, call: Any, size: int) -> None:
        """Count ``size`` bytes of a call as sent and unread."""
        call.charge = size
        with self._credit:
            self.charged += size

    def release(self, call: Any) -> None:
        """Count a call's bytes as read; idempotent. Wakes those who wait for room."""
        size = call.charge
        if size:
            with self._credit:
                size, call.charge = call.charge, 0
                self.charged -= size
        if self.waiting:
            with self._credit:
                if not self.full:
                    self._credit.notify_all()

    def wait_for_room(self, deadline: float, what: str) -> None:
        """Sleep until the peer has read enough of what was sent to it. Interruptible.

        Raises:
            BackpressureError: it has not by the deadline; nothing was sent.
            PeerDiedError: it died meanwhile.
        """
        self._wait_for_room(deadline, what)
        checkpoint()

    @uninterruptible
    def _wait_for_room(self, deadline: float, what: str) -> None:
        # An exception between two steps of the condition would leave its lock taken for ever.
        with self._credit:
            self.waiting += 1
            try:
                while self.full and not pending_here():
                    self.check_alive(what)
                    remaining = deadline - moments.now()
                    if remaining <= 0:
                        raise BackpressureError(
                            f"{what}: {self.name!r} has {self.charged} bytes in {len(self.pending)} calls that it has not "
                            f"taken up yet, and takes no more within the time-out; nothing was sent. Call less "
                            f"often, wait for results, or raise ACTORRPC_WINDOW (now {self.window}).",
                            maybe_executed=False,
                            worker=self.name,
                        )
                    self._credit.wait(min(moments.patience(remaining), 0.1))
            finally:
                self.waiting -= 1

    # -- the end -----------------------------------------------------------------------------------

    def check_alive(self, what: str) -> None:
        """Raise PeerDiedError if the peer is gone."""
        if self.state != "alive":
            raise self.died(what, maybe_executed=False)

    def died(self, what: str, *, maybe_executed: bool) -> PeerDiedError:
        """Return the error of a call that the peer's end has ended."""
        how = "has left the group" if self.state == "left" else "died"
        ran = "may have run before" if maybe_executed else "was not executed"
        return PeerDiedError(
            f"{what}: worker {self.name!r} (pid {self.record.pid}) {how}{': ' if self.cause else ''}{self.cause}; "
            f"the call {ran}. Calls to it fail from now on; it comes back only as a new worker.",
            maybe_executed=maybe_executed,
            worker=self.name,
        )

    def relieve(self) -> None:
        """Let go of what only a living peer needs, and what it sent last no more."""
        self.known = set()
        self.cancelled = {}
        self.begun, self.answered = Begun(), Begun()
        self.definitions = None
        self.device_map = self.answer_map = None

    def wake_all(self) -> None:
        """Wake whoever waits for room."""
        with self._credit:
            self._credit.notify_all()


def _device_maps(
    own: WorkerRecord, other: WorkerRecord
) -> tuple[dict[str, str] | None, dict[str, str] | None]:
    """Return on which device of another worker tensors arrive that calls bring it, and that answers bring it.

    Answers go back the way that the other's map brings its calls here. Where a worker has no entry of its own for a device,
    the reverse of the other's serves for calls as well: gradients travel in them. What is on the CPU is moved only by
    the map that is meant.
    """
    forth = {here: there for worker, here, there in own.device_maps if worker == other.name}
    back = {there: here for worker, here, there in other.device_maps if worker == own.name}

    def merged(first: dict[str, str], second: dict[str, str]) -> dict[str, str] | None:
        return {**{here: there for here, there in second.items() if here != "cpu"}, **first} or None

    return merged(forth, back), merged(back, forth)
