"""Mail: requests for the mailbox of an actor, which queues them in the order in which they arrive.

Mail is a request frame with the MAIL flag. The header names the mailbox, so that mail is queued without being unpickled, while
the connection's read lock is held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from actorrpc.wire.frames import Header, pack_header

if TYPE_CHECKING:
    from actorrpc.agent.peers import Peer
    from actorrpc.transport.connection import Connection
    from actorrpc.wire.frames import Frame

__all__ = ["MailHeader", "MailRouter"]


class MailHeader:
    """The header of all mail of one kind, which is packed once. Immutable.

    Args:
        interrupts: whether the actor interrupts, if possible, the method of a call whose deadline has passed.
        late: what the actor does with a call whose deadline has passed, for the text of the error.
    """

    __slots__ = ("header", "interrupts", "late", "packed")

    def __init__(self, header: Header, *, interrupts: bool = False, late: str = "") -> None:
        self.header = header
        self.interrupts = interrupts
        self.late = late
        self.packed: bytes = pack_header(header)


class MailRouter(Protocol):
    """Delivers mail to mailboxes. Called under a connection's read lock: quick, runs no user code, never unpickles."""

    def deliver(self, conn: Connection | None, peer: Peer, frame: Frame) -> None:
        """Deliver complete mail.

        Args:
            conn: None for mail of this worker to itself; then the caller holds no read lock.
            peer: the sender, which may have cancelled the call already: see ``Peer.cancelled``.
        """

    def announce(self, conn: Connection | None, peer: Peer, frame: Frame) -> bool:
        """Reserve a place in the mailbox for mail whose body follows (:meth:`complete`); return whether a place is reserved."""

    def complete(self, conn: Connection | None, peer: Peer, frame: Frame) -> None:
        """Deliver mail whose place was reserved, unless its call was given up or refused meanwhile."""

    def abandon(self, peer: Peer, id: int) -> None:
        """Release the place in the mailbox that was reserved for mail whose rest will not arrive."""
