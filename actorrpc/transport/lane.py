"""The shared memory of a connection between two processes of one host: both directions, and the notices about freed memory."""

from __future__ import annotations

import itertools
import struct
from collections import deque
from typing import Any, Final

from actorrpc import _time
from actorrpc.errors import ProtocolError
from actorrpc.transport.shared_memory import Borrower, Lender
from actorrpc.wire.frames import LANE_FREE, LANE_RETIRE, pack_frame

__all__ = ["Lane"]

_AGAIN_S: Final = 10.0  # time between two attempts to open the descriptor socket
_LOANS: Final = struct.Struct("<QQ")
_NUMBERS: Final = struct.Struct("<Q")


class Lane:
    """The two directions of sharing memory with a peer, each of which is opened when it is first used. Thread-safe.

    Attributes:
        lender: lends memory to the peer; None until this worker has opened it.
        borrower: uses the peer's memory; None until the peer has opened it.
        is_open: whether at least one direction is open; tested before each send.
        opens_at: the earliest time at which the lender may be opened, after an attempt has failed.
    """

    __slots__ = ("borrower", "is_open", "lender", "opens_at")

    def __init__(self) -> None:
        self.lender: Lender | None = None
        self.borrower: Borrower | None = None
        self.is_open = False
        self.opens_at = 0.0

    def lend(self, lender: Lender) -> None:
        """Lend memory from now on."""
        self.lender, self.is_open = lender, True

    def cannot_lend(self, passes: bool) -> None:
        """Record that the lender could not be opened. ``passes``: whether another attempt may succeed later."""
        self.opens_at = _time.now() + _AGAIN_S if passes else float("inf")

    def borrow(self, borrower: Borrower) -> None:
        """Use the peer's memory from now on."""
        self.borrower, self.is_open = borrower, True

    def borrowed(self) -> Borrower:
        """Return the borrower, for a message with buffers in the peer's memory.

        Raises:
            ProtocolError: the peer has not opened this direction.
        """
        if self.borrower is None:
            raise ProtocolError("a message names shared memory, but there is no descriptor socket")
        return self.borrower

    # -- notices about freed memory ------------------------------------------------------------------

    def hand_back(self, outbox: deque[Any]) -> bool:
        """Put notices about freed loans and retired segments into the outbox; return whether there were any."""
        borrower, lender = self.borrower, self.lender
        freed = borrower.drain_freed() if borrower is not None else []
        if freed:
            outbox.appendleft(
                pack_frame(LANE_FREE, body=struct.pack(f"<{2 * len(freed)}Q", *itertools.chain(*freed)))
            )
        retired = lender.drain_retired() if lender is not None and lender.retired else []
        if retired:
            outbox.append(pack_frame(LANE_RETIRE, body=struct.pack(f"<{len(retired)}Q", *retired)))
        return bool(freed or retired)

    def heard_freed(self, body: bytes) -> None:
        """Take back memory that the peer no longer uses."""
        if self.lender is not None:
            self.lender.reclaim(_LOANS.iter_unpack(body))

    def heard_retired(self, body: bytes) -> None:
        """Release segments that the peer has retired; if ``body`` is empty, receive the descriptors that the peer has sent."""
        if self.borrower is not None and body:
            self.borrower.retire(number for (number,) in _NUMBERS.iter_unpack(body))
        elif self.borrower is not None:
            self.borrower.gather()

    # -- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close both sides."""
        for side in (self.lender, self.borrower):
            if side is not None:
                side.close()

    def abandon(self) -> None:
        """Close both sides in a forked child."""
        for side in (self.lender, self.borrower):
            if side is not None:
                side.abandon()
