"""Mail: requests for a mailbox. What the agent knows of them is where to drop them, and in which order.

Mail is a request frame with the MAIL flag. Its header names the addressee, so that it can be put into the
right mailbox while the connection's read lock is held, in the order of the wire, without being unpickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from actorrpc.errors import RpcError, UnknownWorkerError
from actorrpc.wire.frames import Frame
from actorrpc.wire.headers import Header, pack_header

if TYPE_CHECKING:
    from actorrpc.agent.peers import Peer
    from actorrpc.transport.connection import Connection

__all__ = ["MailHeader", "MailRouter", "NullRouter"]


class MailHeader:
    """The header of mail that is all alike, packed once. Never changed.

    Args:
        interrupts: what runs for a call that is late is to be interrupted, where that can be.
        late: what becomes of a call that is late, for the error of its time-out.
    """

    __slots__ = ("header", "interrupts", "late", "packed")

    def __init__(self, header: Header, *, interrupts: bool = False, late: str = "") -> None:
        self.header = header
        self.interrupts = interrupts
        self.late = late
        self.packed: bytes = pack_header(header)


class MailRouter(Protocol):
    """Where mail goes. Called under a connection's read lock: short, no user code, never unpickles."""

    def take(self, conn: Connection | None, peer: Peer, frame: Frame) -> None:
        """Take mail that is whole. ``conn`` is None for one of this worker to itself; then no lock is held.

        Its cancellation may have come before: see ``Peer.cancelled``.
        """

    def announce(self, conn: Connection | None, peer: Peer, frame: Frame) -> bool:
        """Keep the place of a message whose body, or larger part, follows, for :meth:`complete`; False: none is kept."""

    def complete(self, conn: Connection | None, peer: Peer, frame: Frame) -> None:
        """Take a message whose place was kept, unless it was given up or refused meanwhile."""

    def abandon(self, peer: Peer, id: int) -> None:
        """Give up the place of a message whose rest will not come."""


class NullRouter:
    """The router of a worker that has no mailboxes: its pool refuses mail.

    Args:
        name: of the worker.
        submit: runs a function on a pool thread.
        refuse: answers a request with an error.
    """

    def __init__(
        self,
        name: str,
        submit: Callable[[Callable[[], Any]], Any],
        refuse: Callable[[Connection | None, Frame, RpcError], None],
    ) -> None:
        self._name = name
        self._submit = submit
        self._refuse = refuse

    def take(self, conn: Connection | None, peer: Peer, frame: Frame) -> None:
        """Refuse the mail."""
        error = UnknownWorkerError(f"worker {self._name!r} has no actors")

        def refuse() -> None:
            self._refuse(conn, frame, error)
            if conn is not None:
                conn.flush()

        self._submit(refuse)

    def announce(self, conn: Connection | None, peer: Peer, frame: Frame) -> bool:
        """Keep no place: the message is refused when it is whole."""
        return False

    def complete(self, conn: Connection | None, peer: Peer, frame: Frame) -> None:
        """Refuse the mail."""
        self.take(conn, peer, frame)

    def abandon(self, peer: Peer, id: int) -> None:
        """Do nothing."""
