"""What a connection tells the rest of the agent, and asks of it: interfaces only.

The agent's inbox implements :class:`Events`; tests put in their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from actorrpc.core.frames import Frame

if TYPE_CHECKING:
    from actorrpc.core.connection import Connection

__all__ = ["Events", "Sendable"]


class Sendable(Protocol):
    """Something in the outbox that wants to know when it has been handed to the kernel."""

    frame: bytes
    sent: bool


class Events(Protocol):
    """What a connection tells the rest of the agent."""

    def control(self, connection: Connection, frame: Frame) -> Frame | None:
        """Handle a control frame under the read lock; return the frame that is left to be delivered, if any."""

    def deliver(self, connection: Connection, frames: list[Frame], waiting: bool) -> bool:
        """Take the other frames, after the read lock was released; say whether any was not a reply."""

    def closed(self, connection: Connection, error: BaseException | None) -> None:
        """Take note of the end; called once, from any thread."""

    def suspended(self, connection: Connection, error: BaseException) -> None:
        """Take note that a connection's socket is broken and another is wanted. Called under its locks."""

    def submit(self, task: Any) -> None:
        """Run ``task()`` on a pool thread."""
