"""The states of a connection, and the permitted transitions."""

from __future__ import annotations

import enum
from typing import Final

from actorrpc import _time
from actorrpc.transport.signals import uninterruptible

__all__ = ["CLOSED", "OPEN", "SUSPENDED", "ConnectionState", "Goodbye", "StateMachine"]


class ConnectionState(enum.Enum):
    OPEN = "open"
    SUSPENDED = "suspended"
    """The socket has failed, and another socket is being opened. Only TCP connections can have this state."""
    CLOSED = "closed"
    """The connection has ended, for whatever reason, and is never resumed."""


class Goodbye(enum.Enum):
    """The reason that the peer has given in its GOODBYE frame before it closed the connection."""

    LEAVES = "leaves"
    GIVES_UP = "gives up"
    """The peer considers this worker dead."""


# Not Final: a type checker would narrow the type of ``state`` after a comparison, but another thread may change the state between
# two comparisons.
OPEN: ConnectionState = ConnectionState.OPEN
SUSPENDED: ConnectionState = ConnectionState.SUSPENDED
CLOSED: ConnectionState = ConnectionState.CLOSED

_NEXT: Final[dict[ConnectionState, tuple[ConnectionState, ...]]] = {
    OPEN: (SUSPENDED, CLOSED),
    SUSPENDED: (OPEN, CLOSED),
    CLOSED: (),
}


class StateMachine:
    """The state of a connection, which any thread may read without a lock. ``_state_lock`` guards changes, and is a leaf.

    Without this lock: 1. Thread A reads OPEN and is about to suspend the connection. 2. Thread B closes the connection. 3. Thread
    A writes SUSPENDED. The closed connection would then count as suspended.
    """

    def __init__(self) -> None:
        self.state: ConnectionState = OPEN
        #: how often the connection was suspended: an attempt to resume stores the number, and stops if it has changed
        self.lapses = 0
        self._state_lock = _time.Lock()

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
