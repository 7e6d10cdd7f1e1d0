"""Frames: how bytes on a connection are cut into messages. No I/O, no locks, no unpickling.

Every frame is a fixed prefix of 32 bytes and ``length`` more bytes::

    length u32 | extra u32 | kind u8 | flags u8 | 2 unused | remaining f32 | id u64 | chain u64 | extra bytes
    | body

``id`` names the call (or the stream, for a chunk); ``remaining`` is what is left of its time in seconds
(infinity where it has no bound); ``chain`` names the chain of nested calls that it belongs to; ``extra`` is a
msgpack map, there only when something has to be said (sizes of raw buffers, fields of hooks). Large
memory never sits in a frame: it travels through shared memory or as CHUNK frames of at most ``Limits.chunk``
bytes, which other frames may overtake.

:class:`FrameReader` is fed by the thread that reads the socket (under the connection's read lock) and checks each
size before any memory is allocated for it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from actorrpc.errors import LimitError, ProtocolError

__all__ = [
    "ACK",
    "CANCEL",
    "CHUNK",
    "CREDIT",
    "DEFINITION",
    "FAILURE",
    "GOODBYE",
    "INTRO",
    "LANE_FREE",
    "LANE_RETIRE",
    "LAST_KIND",
    "LATE",
    "MAIL",
    "NOTICE",
    "OBJECTS",
    "PING",
    "PONG",
    "POST",
    "PREFIX",
    "REPLY",
    "REQUEST",
    "RESERVED",
    "STOP",
    "STREAM",
    "STREAM_ABORT",
    "UNREAD",
    "Frame",
    "FrameReader",
    "pack_frame",
    "pack_position",
    "unpack_position",
]

PREFIX: Final = struct.Struct("<IIBBxxfQQ")
PREFIX_SIZE: Final = PREFIX.size
MAX_EXTRA: Final = 1 << 20

# -- kinds ---------------------------------------------------------------------------------
REQUEST: Final = 1  # a call
REPLY: Final = 2  # its value
FAILURE: Final = 3  # its error: up to here, a frame is a message; what follows controls
INTRO: Final = 4  # first frame of the side that dialled: who is speaking (a packed WorkerRecord)
CANCEL: Final = 5  # the caller gave the call up; its flags are STOP and LATE
PING: Final = 6
PONG: Final = 7
CREDIT: Final = 8  # a large request has been taken up: its bytes no longer count as unread
CHUNK: Final = 9  # a piece of a large buffer; chain holds (buffer index, offset)
STREAM_ABORT: Final = 10  # the rest of a stream of chunks will not come
LANE_FREE: Final = 11  # shared memory handed back
LANE_RETIRE: Final = (
    12  # shared memory that the lender no longer uses; none: descriptors wait that are to be taken in
)
GOODBYE: Final = 13  # end of file after this is no death: the peer leaves; with flags, it takes us for dead
DEFINITION: Final = 14  # a function or class by value: 16 bytes of hash, then its definition
NOTICE: Final = 15  # one way, for the floors above: its header names the handler
ACK: Final = 16  # id counts the bytes of this connection that have come: so much need not be kept any more
LAST_KIND: Final = ACK
UNREAD: Final = (
    255  # never sent: a message for whose body there was no memory; ``buffers`` has its kind and size
)

_OFFSET_BITS: Final = 40
_OFFSET_MASK: Final = (1 << _OFFSET_BITS) - 1
_new: Final[Any] = tuple.__new__


STREAM: Final = 4  # flag of a message whose buffers come in chunks
POST: Final = 32  # flag of a request that has no answer
OBJECTS: Final = (
    64  # flag of a message with objects in shared memory, whose descriptors have been sent before it
)
MAIL: Final = 16  # flag of a request that is for a mailbox, which is entered in the order of the wire
STOP: Final = 1  # flag of CANCEL: the caller wants what runs to be interrupted
LATE: Final = 2  # flag of CANCEL: the time of the call is over
RESERVED: Final = (
    128  # flag of mail in two frames: one without a body reserves its place, the other is the message
)


class Frame(NamedTuple):
    """One whole frame. ``body`` is the frame's own copy; ``extra`` is still packed. A chunk has its length in ``flags``."""

    kind: int
    flags: int
    id: int
    remaining: float
    chain: int
    extra: bytes
    body: bytes
    buffers: Any = None  # the memory of a message that came in chunks
    objects: Any = None  # the segments that the message names


def pack_frame(
    kind: int,
    id: int = 0,
    body: bytes = b"",
    *,
    flags: int = 0,
    remaining: float = math.inf,
    chain: int = 0,
    extra: bytes = b"",
    length: int = 0,
) -> bytes:
    """Return the bytes of one frame; ``length`` counts bytes of it that the caller sends itself, behind
    these.

    Raises:
        LimitError: the extra header is over its limit.
    """
    if len(extra) > MAX_EXTRA:
        raise LimitError(
            f"the tensors and RRefs of a message need a header of {len(extra)} bytes, and {MAX_EXTRA} may be: send fewer in one "
            f"call, or stack the tensors; nothing was sent"
        )
    return (
        PREFIX.pack(len(extra) + len(body) + length, len(extra), kind, flags, remaining, id, chain)
        + extra
        + body
    )


def pack_position(index: int, offset: int) -> int:
    """Return where a chunk belongs (which buffer, at which byte) as one number."""
    return index << _OFFSET_BITS | offset


def unpack_position(position: int) -> tuple[int, int]:
    """Return the (buffer index, offset) of a chunk."""
    return position >> _OFFSET_BITS, position & _OFFSET_MASK


class FrameReader:
    """Cuts a stream of bytes into frames, incrementally.

    The reader of the socket asks :meth:`target` where to put the next bytes, and tells :meth:`fed` how many
    came. A chunk's bytes go straight to their destination: ``sink_for(stream, position, length)`` gives the
    memory, or raises ProtocolError. Not thread-safe: the connection's read lock guards it.

    Args:
        max_frame: the largest frame (without its prefix) that is accepted, in bytes.
        max_chunk: the largest chunk that is accepted, in bytes.
        sink_for: gives the memory for a chunk; ``None`` refuses chunks.
        capacity: size of the read buffer, in bytes.
        allocate: makes the read buffer: zeros that can be written to, of so many bytes.

    Attributes:
        empty: the whole read buffer, where the next bytes begin a frame; ``None``: see :meth:`target`.
        more: see :meth:`fed`.
        received: how many bytes have come; ``received_in_chunks``: the part of them in chunks.
        sink: where a chunk goes that has begun and whose rest has not been read; ``None``: there is none.
    """

    __slots__ = (
        "_allocate",
        "_buffer",
        "_chunk",
        "_end",
        "_max_chunk",
        "_max_frame",
        "_sink_for",
        "_sink_got",
        "_start",
        "_view",
        "_whole",
        "empty",
        "more",
        "received",
        "received_in_chunks",
        "sink",
    )

    def __init__(
        self,
        *,
        max_frame: int,
        max_chunk: int,
        sink_for: Callable[[int, int, int], memoryview] | None = None,
        capacity: int = 1 << 18,
        allocate: Callable[[int], Any] = bytearray,
    ) -> None:
        self._allocate = allocate
        self._buffer = allocate(capacity)
        self._view = memoryview(self._buffer)
        self._whole = [self._view]
        self._start = 0
        self._end = 0
        self._max_frame = max_frame
        self._max_chunk = max_chunk
        self._sink_for = sink_for
        self.sink: memoryview | None = None
        self.empty: memoryview | None = self._view
        self._sink_got = 0
        self.more = False
        self.received = self.received_in_chunks = 0
        self._chunk: Frame | None = None

    @property
    def mid_frame(self) -> bool:
        """Whether part of a frame has been read and the rest has not."""
        return self.sink is not None or self._end > self._start

    def target(self) -> list[memoryview]:
        """Return the memory that the next bytes go to, in order. Never empty, never of zero size."""
        sink = self.sink
        if sink is None:
            return [self._view[self._end :]] if self._end else self._whole
        # Behind a chunk, read no more than the next prefix: further chunk bytes go to their own place
        # directly.
        self._start = self._end = 0
        return [sink[self._sink_got :], self._view[:PREFIX_SIZE]]

    def fed(self, count: int) -> list[Frame]:
        """Record ``count`` new bytes and return the frames that are now whole.

        Where ``more`` is true after that, handle them and call this again with 0: the rest waits for it.

        Raises:
            ProtocolError: the bytes make no sense, or something is over a limit.
        """
        frames: list[Frame] = []
        self.more = False
        self.received += count
        if self.sink is not None:
            room = len(self.sink) - self._sink_got
            if count < room:
                self._sink_got += count
                return frames
            self._end_chunk(frames)
            count -= room
        self._end += count
        start, end, view, max_frame = self._start, self._end, self._view, self._max_frame
        while end - start >= PREFIX_SIZE:
            length, extra, kind, flags, remaining, id, chain = PREFIX.unpack_from(view, start)
            if kind == CHUNK:
                start += PREFIX_SIZE
                start = self._begin_chunk(
                    frames, start, end, length, Frame(kind, length, id, remaining, chain, b"", b"")
                )
                if self.sink is not None:
                    break
                continue
            if length > max_frame or not 0 < kind <= LAST_KIND or remaining != remaining:
                raise ProtocolError(self._nonsense(kind, length, extra))
            start += PREFIX_SIZE
            stop = start + length
            if stop > end:
                start -= PREFIX_SIZE
                break
            header = b""
            if extra:
                if extra > length or extra > MAX_EXTRA:
                    raise ProtocolError(self._nonsense(kind, length, extra))
                header = bytes(view[start : start + extra])
                start += extra
            try:
                body = bytes(view[start:stop])
            except MemoryError:
                if kind > FAILURE or flags & STREAM:  # more depends on it than one call
                    raise
                frames.append(Frame(UNREAD, flags, id, remaining, chain, header, b"", (kind, stop - start)))
            else:
                # As Frame(...), without the call in Python that it is.
                frames.append(_new(Frame, (kind, flags, id, remaining, chain, header, body, None, None)))
            start = stop
            if flags & STREAM and kind <= FAILURE:
                # Its chunks may be here already, and need the memory that is made when this frame is seen.
                self.more = True
                break
        self._start = start
        if start == end:
            self._start = self._end = 0
        elif self.sink is None and not self.more:  # what is behind a frame that has more is not checked yet
            here = end - start
            self._make_room(PREFIX_SIZE + (PREFIX.unpack_from(view, start)[0] if here >= PREFIX_SIZE else 0))
        self.empty = None if self._end or self.sink is not None else self._view
        return frames

    def _begin_chunk(self, frames: list[Frame], start: int, end: int, length: int, frame: Frame) -> int:
        """Move what is here of a chunk to its place; return where the next frame starts."""
        if self._sink_for is None or not 0 < length <= self._max_chunk:
            raise ProtocolError(self._nonsense(CHUNK, length, 0))
        sink = self._sink_for(frame.id, frame.chain, length)
        self.received_in_chunks += length
        here = min(length, end - start)
        sink[:here] = self._view[start : start + here]
        self.sink, self._sink_got, self._chunk = sink, here, frame
        if here == length:
            self._end_chunk(frames)
        return start + here

    def _end_chunk(self, frames: list[Frame]) -> None:
        assert self._chunk is not None
        frames.append(self._chunk)
        self.sink = self._chunk = None

    def _make_room(self, needed: int) -> None:
        """Make sure that what has begun, a frame of ``needed`` bytes or its prefix, fits into the buffer."""
        here = self._end - self._start
        capacity = len(self._buffer)
        if needed > capacity:
            # Checked against the limit above; grown once, and kept.
            try:
                larger = self._allocate(max(needed, 2 * capacity))
            except OSError as error:  # of a mapping
                raise MemoryError(f"no memory to read a message of {needed} bytes") from error
            larger[:here] = self._view[self._start : self._end]
            self._buffer, self._view = larger, memoryview(larger)
            self._whole = [self._view]
            self._start, self._end = 0, here
        elif self._start and (self._start + needed > capacity or capacity - self._end < 4096):
            self._view[:here] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, here

    def _nonsense(self, kind: int, length: int, extra: int) -> str:
        if kind == CHUNK and length > self._max_chunk:
            return f"a chunk of {length} bytes is over the limit of {self._max_chunk}"
        if 0 < kind <= LAST_KIND and length > self._max_frame:
            return f"a frame of {length} bytes is over the limit of {self._max_frame}"
        return f"not a frame: kind {kind}, {length} bytes of which {extra} are header"
