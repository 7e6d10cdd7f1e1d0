"""A call in a mailbox: its message and its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from actorrpc import _time
from actorrpc.actors.host.mailbox import Entry
from actorrpc.agent.calls import CALLER_BIT, MAILBOX_BIT, Execution
from actorrpc.agent.executor import path_of
from actorrpc.wire.frames import MAIL, Header

if TYPE_CHECKING:
    import asyncio

    from actorrpc.actors.host.actor import HostedActor
    from actorrpc.agent.peers import Peer
    from actorrpc.agent.timers import Timer
    from actorrpc.transport.connection import Connection
    from actorrpc.wire.frames import Frame

__all__ = ["GRACE_S", "Envelope"]

GRACE_S: Final = 5.0
"""How many seconds a coroutine may take to clean up, and make calls, after it was cancelled."""

_UNUSUAL: Final = frozenset({"place", "priority", "unordered", "unresolved"})
"""The fields of a header that change how a call is queued."""

_CALLER: Final = (1 << MAILBOX_BIT - CALLER_BIT) - 1


class Envelope(Entry, Execution):
    """A call of an actor: it waits in the mailbox, is executed and is answered.

    Attributes:
        frame: the message; :meth:`claim_frame` removes the attribute.
        whole: the whole message has arrived; if False, only its beginning has: see HostedActor.receive_rest.
        opened: ``(args, kwargs)`` if they were decoded before the call's turn, or the error of an argument; otherwise None.
    """

    # Class attributes are the defaults: an envelope is made for each call, and most calls set few of these.
    frame: Frame
    header: Header
    hosted: HostedActor | None = None
    whole = True
    opened: Any = None
    task: asyncio.Task[Any] | None = None
    start_forbidden = False  # the call was cancelled: if it has not begun, it must not begin
    unwanted = False  # the caller has cancelled the call
    grace: Timer | None = None  # after the coroutine was cancelled: the time to its second cancellation
    sole = False  # only this package refers to the result
    _circles: dict[int, float] | None = None

    @property
    def caller(self) -> object:
        """The caller; calls of equal callers keep their order."""
        return self.peer, self.chain >> CALLER_BIT & _CALLER

    @property
    def circles(self) -> dict[int, float]:
        """Execution -> the time when the search for deadlocks first found it in one circle of waits with this call."""
        if self._circles is None:
            self._circles = {}
        return self._circles

    @property
    def title(self) -> str:
        """The actor and the method, for messages."""
        method = f"{self.header.get('method', '__init__')}()"
        return method if self.hosted is None else f"{self.hosted.title}.{method}"

    @property
    def reserved(self) -> bool:
        """Whether the call only reserves its place: the caller sends the message when its arguments are complete."""
        frame: Frame | None = getattr(self, "frame", None)  # another thread may remove it
        return not self.whole and frame is not None and frame.flags == MAIL

    def __init__(self, conn: Connection | None, peer: Peer, frame: Frame, header: Header) -> None:
        self.conn = conn
        self.peer = peer
        self.frame = frame
        self.header = header
        self.id = self.place = frame.id
        self.chain = frame.chain
        self.received_at = received_at = _time.now() if conn is None else conn.last_received
        self.deadline = received_at + frame.remaining
        self.nested = {}
        if frame.chain >> MAILBOX_BIT:
            self.path = path_of(header, frame.chain)
        if not _UNUSUAL.isdisjoint(header):
            self.apply_header(header)

    def apply_header(self, header: Header) -> None:
        """Set the attributes that depend on the header fields :data:`_UNUSUAL`."""
        self.ready = self.ready and "unresolved" not in header
        self.priority = int(header.get("priority", 0))
        self.loose = bool(header.get("unordered"))
        if "place" in header:
            self.place, self.again = int(header["place"]), True

    def claim_frame(self) -> Frame | None:
        """Remove and return the message, to decode or discard it. Exactly one caller gets the message; others get None."""
        try:
            frame = self.frame
            del self.frame  # atomic. ``__dict__.pop`` would make a dictionary, and slow down each later access to an attribute
        except AttributeError:
            return None
        return frame

    def cancel(self, stop: bool = False, late: bool = False) -> None:
        """Cancel the call for its caller. Runs on a pool thread.

        ``stop``: a method that runs in a thread is interrupted. Without ``stop`` it continues: if only the caller's time-out has
        passed or the caller has ended, no user has asked for an interruption. A coroutine is cancelled in both cases.
        """
        # Set before `running` is read: the thread that replaces the call in `running` by its stream reads `unwanted` afterwards.
        self.unwanted = True
        if self.hosted is not None:
            self.hosted.cancel(self, stop, late)
        stream = self.peer.running.get(self.id)
        if stream is not None and stream is not self:
            stream.cancel(stop)
