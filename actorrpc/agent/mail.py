"""Mail: requests for a mailbox, which are queued there in the order in which they arrive.

Mail is a request frame with the MAIL flag. Its header names the mailbox, so that it can be queued while the connection's read
lock is held, without being unpickled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from actorrpc.wire.headers import Header, pack_header

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
    """Delivers mail to mailboxes. Called under a connection's read lock: it is quick, runs no user code and never unpickles."""

    def deliver(self, conn: Connection | None, peer: Peer, frame: Frame) -> None:
        """Deliver complete mail.

        Args:
            conn: None for mail of this worker to itself; then no lock is held.
            peer: the sender. It may have cancelled the call before: see ``Peer.cancelled``.
        """

    def announce(self, conn: Connection | None, peer: Peer, frame: Frame) -> bool:
        """Reserve the place of mail whose body follows, for :meth:`complete`; return whether a place is reserved."""

    def complete(self, conn: Connection | None, peer: Peer, frame: Frame) -> None:
        """Deliver mail whose place was reserved, unless its call was given up or refused meanwhile."""

    def abandon(self, peer: Peer, id: int) -> None:
        """Release the reserved place of mail whose rest will not arrive."""
