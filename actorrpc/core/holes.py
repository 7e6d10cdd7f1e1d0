"""Holes: long bytes and texts leave a pickle, travel beside it, and come back into it.

The C pickler hands long payloads to its file as the very objects that they are; :func:`punch` leaves them out of the
body, and :class:`Pieces` reads body and payloads as the one stream that they were. No I/O; used by one thread at a time.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any, Final

from actorrpc.core.layout import Span
from actorrpc.errors import ProtocolError

__all__ = ["HOLE", "Pieces", "punch"]

_LONG: Final = 64 << 10  # from here on the C pickler hands bytes and text over as they are
HOLE: Final = struct.Struct("<QQ")  # position in the pickle as sent, length of what is missing there
_HEADERS: Final = {0x42: 4, 0x58: 4, 0x8E: 8, 0x8D: 8, 0x96: 8}  # opcode before long bytes -> width of length


def punch(chunks: list[Any], spans: list[Span], inline: bool) -> tuple[bytes, tuple[bytes, ...]]:
    """Join what the pickler wrote, leaving long bytes and texts out: they become spans.

    A chunk is taken for such a payload if the one before ends with an opcode that announces its length. To be
    wrong does no harm, as the receiver puts the same stream together again.
    """
    pieces: list[Any] = []
    holes: list[bytes] = []
    position = 0
    before: Any = b""
    for chunk in chunks:
        size = len(chunk) if isinstance(chunk, bytes) else memoryview(chunk).nbytes
        if size >= _LONG and not inline and _announces(before, size):
            holes.append(HOLE.pack(position, size))
            spans.append(Span.of(chunk))
            before = b""
        else:
            pieces.append(chunk)
            before = chunk
        position += size
    return b"".join(pieces), tuple(holes)


def _announces(before: Any, size: int) -> bool:
    for width in (8, 4):
        if len(before) > width and _HEADERS.get(before[-1 - width]) == width:
            if int.from_bytes(before[-width:], "little") == size:
                return True
    return False


class Pieces:
    """A file over a pickle with holes and what fills them; long bytes are read straight into their object."""

    __slots__ = ("_at", "_parts")

    def __init__(self, body: memoryview, holes: Sequence[tuple[int, int]], fillings: Sequence[Any]) -> None:
        self._parts: list[memoryview] = []
        self._at = 0
        position = start = 0
        for (where, size), filling in zip(holes, fillings, strict=True):
            view = memoryview(filling).cast("B")
            length = where - position
            if length < 0 or start + length > len(body) or len(view) != size:
                raise ProtocolError("the holes in a message do not fit its buffers")
            self._parts += [body[start : start + length], view]
            start += length
            position = where + size
        self._parts.append(body[start:])
        self._parts.reverse()

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        done = 0
        while done < len(view) and self._parts:
            part = self._parts[-1]
            step = min(len(view) - done, len(part) - self._at)
            view[done : done + step] = part[self._at : self._at + step]
            done += step
            self._at += step
            if self._at == len(part):
                self._parts.pop()
                self._at = 0
        return done

    def read(self, size: int) -> Any:
        if self._parts and size <= len(self._parts[-1]) - self._at:
            self._at += size
            return self._parts[-1][self._at - size : self._at]
        if size > sum(map(len, self._parts)) - self._at:
            raise pickle.UnpicklingError("pickle data was truncated")
        found = bytearray(size)
        self.readinto(found)
        return found

    def rest(self) -> bytearray:
        """Return everything, body and payloads in one piece."""
        found = bytearray(sum(map(len, self._parts)) - self._at)
        self.readinto(found)
        return found

    def readline(self) -> bytes:
        raise pickle.UnpicklingError("a pickle of an old protocol")
