"""A call in a mailbox: the message that brought it, and what has become of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from actorrpc import _time
from actorrpc.actors.host.mailbox import NEW, Entry
from actorrpc.agent.calls import CALLER_BIT, FRAME_BIT
from actorrpc.agent.executor import path_of
from actorrpc.wire.headers import Header

if TYPE_CHECKING:
    import asyncio

    from actorrpc.actors.host.actor import HostedActor
    from actorrpc.agent.calls import Execution
    from actorrpc.agent.peers import Peer
    from actorrpc.wire.frames import Frame

__all__ = ["GRACE_S", "Envelope"]

GRACE_S: Final = 5.0
"""How long a coroutine that is cancelled may take to clean up, and make calls for it."""

_CALLER: Final = (1 << FRAME_BIT - CALLER_BIT) - 1


class Envelope(Entry):
    """A call in a mailbox.

    Attributes:
        whole: all of it is here; otherwise its larger part is still coming.
        opened: ``(args, kwargs)`` where they had to be looked at before their turn, or the error of an argument.
    """

    __slots__ = (
        "arrived",
        "circles",
        "conn",
        "deadline",
        "execution",
        "frame",
        "given_up",
        "header",
        "hosted",
        "opened",
        "peer",
        "sealed",
        "sole",
        "stopped",
        "suspected",
        "task",
        "whole",
    )

    def __init__(self, conn: Any, peer: Peer, frame: Frame, header: Header, whole: bool) -> None:
        chain = frame.chain
        # What Entry.__init__ does, without the detour: this is on the path of every call.
        self.caller = peer, chain >> CALLER_BIT & _CALLER
        self.payload = None
        self.path = path_of(header, chain) if chain >> FRAME_BIT else ()
        self.priority = int(header.get("priority", 0))
        self.ready = whole and "unresolved" not in header
        self.loose = bool(header.get("unordered"))
        again = header.get("place")
        self.place = frame.id if again is None else int(again)
        self.again = again is not None
        self.number = 0
        self.state = NEW
        self.parked = False
        self.queue = None
        self.slot = None
        self.conn = conn
        self.peer = peer
        self.frame = frame
        self.header = header
        self.arrived = _time.now()
        self.deadline = self.arrived + frame.remaining
        self.execution: Execution | None = None
        self.opened: Any = None  # (args, kwargs), or the error of an argument
        self.task: asyncio.Task[Any] | None = None
        self.hosted: HostedActor | None = None
        self.whole = whole
        self.sealed = True
        self.given_up = False  # it is not to run, if it does not yet
        self.stopped = False  # its coroutine has been told to end
        self.sole = False  # nobody but us has the result
        self.circles: dict[int, float] | None = None  # see deadlocks
        self.suspected = 0  # the execution that seems to wait for this call, which waits for it

    def unseal(self) -> bool:
        """Win the right to open the message, or to give back what is in it; exactly one caller ever does."""
        try:
            del self.sealed
        except AttributeError:
            return False
        return True

    def cancel(self, stop: bool = False) -> None:
        """Give the call up: its caller wants it no more. Runs on a pool thread.

        ``stop``: a method that runs is interrupted. It goes on where only its caller's time is over, or its caller is
        gone: then nobody has asked for an actor in the middle of something.
        """
        if self.hosted is not None:
            self.hosted.cancel(self, stop)
