"""Seals protect the frames of a connection that has no TLS against modification.

Each frame carries a tag of 16 bytes, computed with a key that both ends derive from the handshake::

    a short frame                                            | tag
    prefix of a chunk, or of a long frame | SHA-256 of the rest | tag | the rest

The tag is a keyed BLAKE2b-128 of the bytes before it and of the number of earlier tags. Each direction has its own key. If a
frame was changed, left out, inserted, repeated, moved or reflected, it or the next frame has a wrong tag: the reader raises
ProtocolError and reads nothing more. A frame is checked before it is processed. A chunk is checked in two steps: its head is
checked before its bytes are written to the place that the head names, and the bytes are compared with the digest in the head
before the reader returns the chunk.

The reader must use the length of a short frame before it can check the tag. A forged length can make the reader wait for
at most ``SHORT`` bytes more; the next frames, or at least pings, fill these bytes, and then the check fails.

A seal belongs to the byte stream and not to a socket: when a connection is resumed over a new socket, the same bytes are sent
again, and the count of tags continues. No I/O, no locks: the writer's seal is used under the connection's write lock, the
reader's seal under its read lock. Seals do not encrypt. If the group has no key, an attacker can compute the tags, and seals only
detect accidental damage.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from actorrpc.errors import ProtocolError
from actorrpc.wire.frames import (
    CHUNK,
    FAILURE,
    LAST_KIND,
    MAX_EXTRA,
    PREFIX,
    PREFIX_SIZE,
    STREAM,
    UNREAD,
    Frame,
    FrameReader,
)

__all__ = ["DIGEST_SIZE", "SHORT", "TAG_SIZE", "Seal", "SealedReader", "Seals", "chunk_head"]

TAG_SIZE: Final = 16
DIGEST_SIZE: Final = 32
SHORT: Final = 512
"""The most bytes that follow the prefix in a short frame."""
_HEAD_SIZE: Final = PREFIX_SIZE + DIGEST_SIZE  # without its tag
_blake2b: Final = hashlib.blake2b
_sha256: Final = hashlib.sha256
_equal: Final = hmac.compare_digest
_new: Final[Any] = tuple.__new__


class Seal:
    """Computes the tags of one direction of a connection, in the order of the stream. Not thread-safe.

    Args:
        key: 32 secret bytes that are used for nothing else.
    """

    __slots__ = ("_count", "_key")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def tag(self, data: bytes | memoryview) -> bytes:
        """Return the tag of the next bytes in the stream, and count the tag."""
        count = self._count
        self._count = count + 1
        return _blake2b(data, digest_size=16, key=self._key, salt=count.to_bytes(16, "little")).digest()

    def tagged(self, head: bytes) -> bytes:
        """Return a head with its tag."""
        return head + self.tag(head)

    def sealed(self, frame: bytes) -> bytes:
        """Add the tag to a frame other than a chunk. Empty bytes, which replace the frame of a withdrawn call, stay empty."""
        if not frame:
            return b""
        if len(frame) <= PREFIX_SIZE + SHORT:
            return frame + self.tag(frame)
        rest = memoryview(frame)[PREFIX_SIZE:]
        return b"".join((self.tagged(chunk_head(frame[:PREFIX_SIZE], rest)), rest))


class Seals(NamedTuple):
    """The two seals of one end of a connection."""

    outgoing: Seal
    incoming: Seal

    @classmethod
    def of(cls, key: bytes, *, dialled: bool) -> Seals:
        """Derive both seals (HKDF-Expand of RFC 5869 with SHA-256) from ``Session.key``; ``dialled``: for the dialler's end."""
        dialler, acceptor = (
            Seal(hmac.digest(key, b"actorrpc seal 1\0" + role + b"\x01", "sha256"))
            for role in (b"dialler", b"acceptor")
        )
        return cls(dialler, acceptor) if dialled else cls(acceptor, dialler)


def chunk_head(prefix: bytes, data: memoryview) -> bytes:
    """Return the bytes that a chunk's tag protects: the chunk's prefix, and the SHA-256 of its data. Takes 0.5 ms/MiB or more."""
    return prefix + _sha256(data).digest()


class SealedReader(FrameReader):
    """Cuts a stream of sealed bytes into frames, and checks each tag. After an error, it returns no more frames.

    Args:
        seal: the seal of the incoming direction.
        max_frame, max_chunk, sink_for, capacity, allocate: as for :class:`FrameReader`.
    """

    __slots__ = ("_checked", "_digest", "_over", "_seal")

    HEAD_SIZE = _HEAD_SIZE + TAG_SIZE

    def __init__(
        self,
        seal: Seal,
        *,
        max_frame: int,
        max_chunk: int,
        sink_for: Callable[[int, int, int], memoryview] | None = None,
        capacity: int = 1 << 18,
        allocate: Callable[[int], Any] = bytearray,
    ) -> None:
        super().__init__(
            max_frame=max_frame,
            max_chunk=max_chunk,
            sink_for=sink_for,
            capacity=capacity,
            allocate=allocate,
        )
        self._seal = seal
        self._digest = b""
        self._checked = False  # the head of a long frame was checked, and its rest has not arrived
        self._over = False

    def fed(self, count: int) -> list[Frame]:
        """Record ``count`` new bytes and return the frames that are now complete, as :class:`FrameReader` does.

        Raises:
            ProtocolError: a tag is wrong, the bytes are not valid frames, or a size exceeds a limit.
        """
        if self._over:
            raise ProtocolError("an earlier frame was refused, so this connection is not read any further")
        self._over = True  # stays True if this method raises: the reader then returns no more frames
        frames: list[Frame] = []
        self.more = False
        self.received += count
        if self.sink is not None:
            room = len(self.sink) - self._sink_got
            if count < room:
                self._sink_got += count
                self._over = False
                return frames
            self._end_chunk(frames)
            count -= room
        self._end += count
        start, end, view, tag = self._start, self._end, self._view, self._seal.tag
        needed = PREFIX_SIZE
        while end - start >= PREFIX_SIZE:
            length, extra, kind, flags, remaining, id, chain = PREFIX.unpack_from(view, start)
            if kind == CHUNK:
                if self._sink_for is None or not 0 < length <= self._max_chunk:
                    raise ProtocolError(self._nonsense(kind, length, 0))
                size = _HEAD_SIZE
            else:
                if length > self._max_frame or not 0 < kind <= LAST_KIND or remaining != remaining:
                    raise ProtocolError(self._nonsense(kind, length, extra))
                size = PREFIX_SIZE + length if length <= SHORT else _HEAD_SIZE
            stop = start + size
            if not self._checked:
                needed = size + TAG_SIZE
                if start + needed > end:
                    break
                if not _equal(tag(view[start:stop]), view[stop : stop + TAG_SIZE]):
                    raise _changed()
                if size == _HEAD_SIZE:  # a short frame may have this size, too: its digest is never read
                    self._digest = bytes(view[start + PREFIX_SIZE : stop])
            if kind == CHUNK:
                start = self._begin_chunk(
                    frames, stop + TAG_SIZE, end, length, Frame(kind, length, id, remaining, chain, b"", b"")
                )
                if self.sink is not None:
                    break
            else:
                after = stop + TAG_SIZE
                if length <= SHORT:
                    begin = start + PREFIX_SIZE
                else:
                    needed = _HEAD_SIZE + TAG_SIZE + length
                    self._checked = start + needed > end
                    if self._checked:
                        break
                    begin, stop = after, after + length
                    after = stop
                    if not _equal(_sha256(view[begin:stop]).digest(), self._digest):
                        raise _changed()
                header = b""
                if extra:
                    if extra > length or extra > MAX_EXTRA:
                        raise ProtocolError(self._nonsense(kind, length, extra))
                    header = bytes(view[begin : begin + extra])
                    begin += extra
                try:
                    body = bytes(view[begin:stop])
                except MemoryError:
                    if kind > FAILURE or flags & STREAM:
                        raise
                    frames.append(
                        Frame(UNREAD, flags, id, remaining, chain, header, b"", (kind, stop - begin))
                    )
                else:
                    frames.append(_new(Frame, (kind, flags, id, remaining, chain, header, body, None, None)))
                start = after
                if flags & STREAM and kind <= FAILURE:
                    self.more = True  # the caller allocates the chunks' memory when it handles this frame
                    break
            needed = PREFIX_SIZE
        self._start = start
        if start == end:
            self._start = self._end = 0
        elif self.sink is None and not self.more:
            self._make_room(needed)
        self.empty = None if self._end or self.sink is not None else self._view
        self._over = False
        return frames

    def _end_chunk(self, frames: list[Frame]) -> None:
        assert self.sink is not None
        if not _equal(_sha256(self.sink).digest(), self._digest):
            raise _changed()
        super()._end_chunk(frames)


def _changed() -> ProtocolError:
    return ProtocolError(
        "a frame does not carry the seal of its sender: it was changed, left out, repeated or inserted on the way"
    )
