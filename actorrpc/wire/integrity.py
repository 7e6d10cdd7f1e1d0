"""Seals: what proves that a frame is the one that was sent, where nothing else protects a connection.

Each frame carries a tag of 16 bytes, made with a key that both ends have from the handshake::

    a short frame                                            | tag
    prefix of a chunk, or of a long frame | SHA-256 of the rest | tag | the rest

The tag is a keyed BLAKE2b-128 of what stands before it and of how many tags were made before, each direction with a
key of its own. So a frame that was changed, left out, put in, said twice, moved or sent back is not taken: the reader
raises ProtocolError, and reads nothing more. A frame is checked before anything is made of it. Of a chunk, the
head is: its bytes go to the place that the head names, and are compared with the head before anybody is told of them.

So a length is believed without proof for ``SHORT`` bytes at most: where it was changed, the next few frames, pings if there
are no others, fill what the reader waits for, and are refused.

The seals belong to the stream of bytes, not to a socket: where a connection goes on over another one, what is sent again
is the same bytes, and the counts go on. No I/O, no locks: the writer's seal is used under the connection's write lock, the
reader's under its read lock. Nothing of this is secret against an eavesdropper; without a key of the group, it holds
off damage but no one who means harm.
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
"""How many bytes behind its prefix a short frame may have."""
_HEAD_SIZE: Final = PREFIX_SIZE + DIGEST_SIZE  # without its tag
_blake2b: Final = hashlib.blake2b
_sha256: Final = hashlib.sha256
_equal: Final = hmac.compare_digest
_new: Final[Any] = tuple.__new__


class Seal:
    """Makes the tags of one direction of a connection, one after the other. Not thread-safe.

    Args:
        key: 32 secret bytes that serve for nothing else.
    """

    __slots__ = ("_count", "_key")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def tag(self, data: bytes | memoryview) -> bytes:
        """Return the tag of what is sent, or must come, next."""
        count = self._count
        self._count = count + 1
        return _blake2b(data, digest_size=16, key=self._key, salt=count.to_bytes(16, "little")).digest()

    def tagged(self, head: bytes) -> bytes:
        """Return a head with its tag."""
        return head + self.tag(head)

    def sealed(self, frame: bytes) -> bytes:
        """Return a frame that is no chunk, as it is sent; nothing for nothing, which is left of a call that was taken back."""
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
        """Derive them (HKDF-Expand of RFC 5869 with SHA-256) from the key of a handshake's session."""
        dialler, acceptor = (
            Seal(hmac.digest(key, b"actorrpc seal 1\0" + role + b"\x01", "sha256"))
            for role in (b"dialler", b"acceptor")
        )
        return cls(dialler, acceptor) if dialled else cls(acceptor, dialler)


def chunk_head(prefix: bytes, data: memoryview) -> bytes:
    """Return what the tag of a chunk is made of: its prefix, and what names its bytes. Takes 0.5 ms/MiB or more."""
    return prefix + _sha256(data).digest()


class SealedReader(FrameReader):
    """Cuts a stream of sealed frames, and checks each seal. After an error it gives nothing any more.

    Args:
        seal: of what comes.
        max_frame, max_chunk, sink_for, capacity, allocate: as for :class:`FrameReader`.
    """

    __slots__ = ("_checked", "_digest", "_over", "_seal")

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
        self._checked = False  # the head of a long frame has been, and its rest is still to come
        self._over = False

    def target(self) -> list[memoryview]:
        """Return the memory that the next bytes go to, in order. Never empty."""
        sink = self.sink
        if sink is None:
            return [self._view[self._end :]] if self._end else self._whole
        self._start = self._end = 0
        return [sink[self._sink_got :], self._view[: _HEAD_SIZE + TAG_SIZE]]

    def fed(self, count: int) -> list[Frame]:
        """Record ``count`` new bytes and return the frames that are now whole, as :class:`FrameReader` does.

        Raises:
            ProtocolError: bytes are not those that were sent, make no sense, or something is over a limit.
        """
        if self._over:
            raise ProtocolError("nothing is read behind a frame that was refused")
        self._over = True  # unless this comes to its end
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
                if size == _HEAD_SIZE:  # else, a short frame of just this size, it is not looked at
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
                    self.more = True  # its chunks need the memory that is made when this frame is seen
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
        "what came does not carry the seal of its sender: it was changed, left out, repeated or put in on the way"
    )
