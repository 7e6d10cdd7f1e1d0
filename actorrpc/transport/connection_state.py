"""The states of a connection, and which one may follow which."""

from __future__ import annotations

import enum
from typing import Final

from actorrpc import _time
from actorrpc.transport.signals import uninterruptible

__all__ = ["CLOSED", "OPEN", "SUSPENDED", "ConnectionState", "Goodbye", "StateMachine"]


class ConnectionState(enum.Enum):
    """Where a connection is in its life."""

    OPEN = "open"
    SUSPENDED = "suspended"
    """The socket has failed, and another one is looked for. Only connections between hosts have this state."""
    CLOSED = "closed"
    """It has ended for good, for whatever reason."""


class Goodbye(enum.Enum):
    """What the peer has said before it ended the connection."""

    LEAVES = "leaves"
    GIVES_UP = "gives up"
    """The peer takes this worker for dead."""


# Not Final: a type checker would take a look at the state for the last one, and other threads change it between two.
OPEN: ConnectionState = ConnectionState.OPEN
SUSPENDED: ConnectionState = ConnectionState.SUSPENDED
CLOSED: ConnectionState = ConnectionState.CLOSED

_NEXT: Final[dict[ConnectionState, tuple[ConnectionState, ...]]] = {
    OPEN: (SUSPENDED, CLOSED),
    SUSPENDED: (OPEN, CLOSED),
    CLOSED: (),
}


class StateMachine:
    """Has a state, which any thread may read at any time. ``_state_lock`` guards its change, and is a leaf.

    Without the lock, thread A could see an open connection that is to be suspended, thread B close it, and A write over that:
    nobody would find it closed any more.
    """

    def __init__(self) -> None:
        self.state: ConnectionState = OPEN
        #: how many times it has been suspended: says of an attempt to come back which time that was for
        self.lapses = 0
        self._state_lock = _time.Lock()

    @uninterruptible
    def enter(self, state: ConnectionState) -> bool:
        """Go over into another state; False if it cannot follow the present one. Never blocks for long."""
        with self._state_lock:
            if state not in _NEXT[self.state]:
                return False
            if state is SUSPENDED:
                self.lapses += 1
            self.state = state
        return True
