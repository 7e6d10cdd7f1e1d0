"""Replay: what a connection has sent and the other side may not have, so that another socket can take its place.

Each direction of a connection is a stream of bytes, counted from the first one behind the handshake. The reader counts
what has come and says so now and then; the writer keeps what was sent until then. When the socket breaks, both sides tell
each other how far they have come, over a new one, and the rest is sent again: every byte arrives once, in order, and as it
was when it was first sent. What is above (frames, also half ones) does not notice.

Several attempts may be under way at both ends. The latest counts, by the number that each draws before it says anything.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Final

from actorrpc import _time
from actorrpc.errors import ProtocolError

__all__ = ["Replay"]

_SAY_EVERY: Final = 1 << 20
_LIMIT: Final = 8 << 20  # more than are on their way on most lines that this is for
_LARGE: Final = 64 << 10  # fresh memory for so much costs more than copying


class Replay:
    """The memory of one connection.

    The reader, under the connection's read lock, uses :meth:`count`, :meth:`acknowledged` and :meth:`may_tell`; the writer, under
    its lock, everything else. No lock of its own: they share numbers which only grow, and a mark.

    Args:
        other: name and incarnation of the worker at the other end, as it has proved itself.
        dialled: this side has dialled, and dials again.
        say_every: bytes that come before the other side is told.
        limit: bytes that may be on their way.
        large: copies of at least so many bytes go into memory that is kept for them.

    Attributes:
        attempts: numbers of attempts to come back.
        received: bytes that have come.
        owed: whether the other side is to be told so. That is done also while :attr:`full`, or two sides that are both
            full would wait for each other.
    """

    __slots__ = (
        "_acknowledged",
        "_base",
        "_large",
        "_limit",
        "_moved",
        "_parts",
        "_ring",
        "_said",
        "_say_every",
        "_size",
        "_told",
        "attempts",
        "dialled",
        "other",
        "owed",
        "received",
    )

    def __init__(
        self,
        other: tuple[str, str] = ("", ""),
        dialled: bool = True,
        *,
        say_every: int = _SAY_EVERY,
        limit: int = _LIMIT,
        large: int = _LARGE,
    ) -> None:
        self.other = other
        self.dialled = dialled
        self.attempts = itertools.count(1)
        self._told = 0  # the latest attempt over which the other side was told how far reading has come
        self._say_every = say_every
        self._limit = limit
        self._large = large
        self.received = 0
        self.owed = False
        self._said = 0
        self._acknowledged = 0
        self._moved = _time.Event()  # wakes a writer that has to wait for an acknowledgement
        self._base = 0  # what was sent before the parts
        self._size = 0
        self._parts: deque[bytes | memoryview] = deque()
        self._ring: _Ring | None = None

    def is_overtaken(self, attempt: int) -> bool:
        """Whether a later attempt to come back has told the other side how far reading has come."""
        return attempt < self._told

    def may_tell(self, attempt: int) -> bool:
        """Note that an attempt tells the other side how far reading has come, unless it is overtaken."""
        self._told = max(self._told, attempt)
        return self._told == attempt

    def count(self, count: int) -> bool:
        """Note that bytes have come; say whether the other side is to be told from now on."""
        self.received += count
        if self.received - self._said < self._say_every:
            return False
        self._said = self.received
        self.owed = True
        self._moved.set()
        return True

    def acknowledged(self, count: int) -> None:
        """Note that the other side has ``count`` bytes."""
        if count > self._acknowledged:
            self._acknowledged = count
            self._moved.set()

    @property
    def sent(self) -> int:
        """Bytes that were sent."""
        return self._base + self._size

    @property
    def full(self) -> bool:
        """Whether as much is on its way as may be: then nothing is begun until an acknowledgement comes."""
        self._trim()
        # Not what is kept: of a part that has come but for its end, all is.
        return self.sent - max(self._acknowledged, self._base) >= self._limit

    def wait(self, seconds: float) -> None:
        """Sleep until an acknowledgement comes, or one is owed, for at most so long."""
        self._moved.clear()
        if self.full and not self.owed:
            self._moved.wait(seconds)

    def note(self, data: bytes) -> None:
        """Keep bytes that were sent."""
        self._parts.append(data)
        self._size += len(data)

    def note_parts(self, parts: Sequence[memoryview], count: int) -> None:
        """Keep a copy of the first ``count`` bytes of what was sent in parts: their memory may change."""
        for part in parts:
            if count <= 0:
                return
            data = part[:count]
            count -= len(data)
            if len(data) < self._large:
                self.note(bytes(data))
                continue
            if self._ring is None:
                self._ring = _Ring(2 * self._limit)  # the last piece may go beyond the limit
            for copy in self._ring.copy(data):
                self._parts.append(copy)
                self._size += len(copy)

    def rewind(self, count: int) -> list[memoryview]:
        """Return what was sent behind the first ``count`` bytes, which are there; it counts as not sent any more.

        Raises:
            ProtocolError: the other side cannot have had just so much.
        """
        self._trim()
        if not self._base <= count <= self.sent:
            raise ProtocolError(
                f"the other side says that it has {count} bytes of {self._base} to {self.sent}"
            )
        left: list[memoryview] = []
        skip = count - self._base
        for part in self._parts:
            if skip < len(part):
                left.append(memoryview(part)[skip:])
            skip = max(0, skip - len(part))
        self._parts.clear()
        self._ring = None  # what is in it is to be sent again, from there
        self._base, self._size = count, 0
        return left

    def _trim(self) -> None:
        parts, acknowledged = self._parts, self._acknowledged
        while parts and self._base + len(parts[0]) <= acknowledged:
            part = parts.popleft()
            size = len(part)
            self._base += size
            self._size -= size
            if self._ring is not None and type(part) is memoryview:
                self._ring.free(size)


class _Ring:
    """Memory for copies that are made and given back in the same order."""

    __slots__ = ("_at", "_memory", "_used")

    def __init__(self, size: int) -> None:
        self._memory = memoryview(bytearray(size))
        self._at = 0
        self._used = 0

    def copy(self, data: memoryview) -> list[memoryview | bytes]:
        """Return copies of ``data``, in one or two parts; as bytes where there is no room."""
        size, end = len(data), len(self._memory)
        if self._used + size > end:
            return [bytes(data)]
        self._used += size
        first = min(size, end - self._at)
        parts: list[memoryview | bytes] = []
        for piece in (data[:first], data[first:]):
            if len(piece):
                place = self._memory[self._at : self._at + len(piece)]
                place[:] = piece
                parts.append(place)
                self._at = (self._at + len(piece)) % end
        return parts

    def free(self, size: int) -> None:
        """Take back the oldest ``size`` bytes."""
        self._used -= size
