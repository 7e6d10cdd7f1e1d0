"""Frames, into which the byte stream of a connection is divided, and their headers. No I/O, no locks, no unpickling.

Every frame is a fixed prefix of 32 bytes and ``length`` more bytes::

    length u32 | extra u32 | kind u8 | flags u8 | 2 unused | remaining f32 | id u64 | chain u64 | extra bytes
    | body

``id`` is the number of the call (of the stream, for a chunk). ``remaining`` is the time in seconds until the call times out
(infinity without a time-out). ``chain`` is the id of the chain of nested calls that the call belongs to. ``extra`` is the size of
the header, which most frames do not have: a msgpack map of the fields (:class:`Header`) that are set. They are read without
unpickling the body. Large buffers are not part of a message's frame: they are sent through shared memory, or in CHUNK frames of
at most ``Settings.chunk`` bytes, between which other frames may be sent.

The thread that reads the socket calls :class:`FrameReader` under the connection's read lock. The reader checks each size before
it allocates memory.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypedDict

import msgpack

from actorrpc.errors import LimitError, ProtocolError

__all__ = [
    "ACK",
    "CANCEL",
    "CAST",
    "CHUNK",
    "CREDIT",
    "DEFINITION",
    "FAILURE",
    "GOODBYE",
    "INTRO",
    "LANE_DEVICES",
    "LANE_FREE",
    "LANE_RETIRE",
    "LAST_KIND",
    "LATE",
    "MAIL",
    "NOTICE",
    "OBJECTS",
    "PING",
    "PONG",
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
    "Header",
    "pack_frame",
    "pack_header",
    "pack_position",
    "unpack_header",
    "unpack_position",
]

PREFIX: Final = struct.Struct("<IIBBxxfQQ")
PREFIX_SIZE: Final = PREFIX.size
MAX_EXTRA: Final = 1 << 20

# -- kinds ---------------------------------------------------------------------------------
REQUEST: Final = 1  # a call
REPLY: Final = 2  # the value of a call
FAILURE: Final = 3  # the error of a call. Kinds up to FAILURE are messages; others are control frames
INTRO: Final = 4  # the first frame of the worker that opened the connection: its packed WorkerRecord
CANCEL: Final = 5  # the caller has given up the call; the flags STOP and LATE say how
PING: Final = 6
PONG: Final = 7
CREDIT: Final = 8  # the receiver has opened a large request, so the caller stops counting its bytes as unread
CHUNK: Final = 9  # a piece of a large buffer; chain holds (buffer index, offset)
STREAM_ABORT: Final = 10  # the sender has aborted this stream of chunks, and sends no more of its chunks
LANE_FREE: Final = 11  # the borrower of shared memory gives back the loans that the body lists
# With a body: the lender has retired the listed segments of shared memory, so the borrower unmaps them. Without a body: the
# borrower must receive the descriptors of new segments, which the lender has sent through the descriptor socket.
LANE_RETIRE: Final = 12
GOODBYE: Final = (
    13  # the sender will close the connection, and has not died; with flags: it considers the receiver dead
)
DEFINITION: Final = 14  # a function or class by value: 16 bytes of hash, then its definition
NOTICE: Final = 15  # a one-way message to the handler that its header names
ACK: Final = (
    16  # the sender has received ``id`` bytes in all; the other worker need not keep them for resending
)
LANE_DEVICES: Final = 17  # the devices whose memory the sender can open
LAST_KIND: Final = LANE_DEVICES
# Never sent: if there is no memory for a message, the reader returns a frame of this kind, whose ``buffers`` is (kind, size).
UNREAD: Final = 255

_OFFSET_BITS: Final = 40
_OFFSET_MASK: Final = (1 << _OFFSET_BITS) - 1
_new: Final[Any] = tuple.__new__


STREAM: Final = 4  # flag of a message whose buffers are sent in chunks
CAST: Final = 32  # flag of a request without an answer
OBJECTS: Final = 64  # flag of a message that uses objects in shared memory; descriptors were sent before
MAIL: Final = 16  # flag of a request to an actor's mailbox, which queues requests in sending order
STOP: Final = 1  # flag of CANCEL: interrupt the execution
LATE: Final = 2  # flag of CANCEL: the call has timed out
RESERVED: Final = 128  # flag of MAIL: a frame without a body reserves a place, and a second frame fills it


class Frame(NamedTuple):
    """A frame. ``body`` is a copy of the bytes read; ``extra`` is the packed header. A chunk has its length in ``flags``."""

    kind: int
    flags: int
    id: int
    remaining: float
    chain: int
    extra: bytes
    body: bytes
    buffers: Any = None  # the buffers that were sent in chunks
    objects: Any = None  # the shared-memory segments that the message uses


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
    """Return the bytes of one frame; the caller sends ``length`` more bytes of the frame after them.

    Raises:
        LimitError: the header is larger than its limit.
    """
    if len(extra) > MAX_EXTRA:
        raise LimitError(
            f"the tensors and RRefs of a message need a header of {len(extra)} bytes; the limit is {MAX_EXTRA}: send fewer in "
            f"one call, or stack the tensors; nothing was sent"
        )
    return (
        PREFIX.pack(len(extra) + len(body) + length, len(extra), kind, flags, remaining, id, chain)
        + extra
        + body
    )


def pack_position(index: int, offset: int) -> int:
    """Pack the position of a chunk into one number: the index of its buffer, and the offset in that buffer."""
    return index << _OFFSET_BITS | offset


def unpack_position(position: int) -> tuple[int, int]:
    """Return the (buffer index, offset) of a chunk."""
    return position >> _OFFSET_BITS, position & _OFFSET_MASK


# -- headers -------------------------------------------------------------------------------


class Header(TypedDict, total=False):
    """The fields of a header. A peer may send any values, so code that reads a field checks its value."""

    # -- any message

    sizes: list[int]  # the sizes of the message's buffers, in bytes
    stream: int  # the number of the stream of chunks that carries the buffers
    # The numbers of the segment of shared memory that contains the buffers, and of its loan (shared_memory.Lender).
    placement: tuple[int, int] | list[int]
    # The blocks of device memory that contain tensors of the message (device_memory.DeviceLane).
    device_memory: list[Any]
    # The numbers of the object segments that the message uses; until the message is sent, the segments themselves.
    objects: list[Any]
    references: Any  # the packed RRefs of the message (rpc.refcount.messages.pack_forks)
    tag: Any  # what the recorder of autograd (hooks.Recorder) has returned for the message's tensors
    profile: list[Any]  # of a profiled call: number and name of its range, the profiler's settings
    trace: bytes  # of a call in a sampled trace: 16 bytes trace id, 8 bytes id of the caller's span, 1 byte flags

    # -- notices

    notice: str  # the name of its handler

    # -- requests

    # The ids of the nested actor calls that led to the request, the outermost first; the innermost is the frame's ``chain``.
    path: tuple[int, ...] | list[int]
    mailbox: int  # the number of the mailbox that receives the request
    creates: bool  # the request creates the actor of the mailbox
    method: str
    group: str  # the concurrency group, if the caller has chosen another than the method's
    priority: int
    window: int  # the most items that a streamed result buffers; 0: only its bytes are limited
    num_returns: int  # if it is not 1
    rref: bytes  # with num_returns 0: the packed ids of the RRef whose value is the result (rpc.refcount.runtime)
    keep: bool  # a large result stays on the worker that computed it until it is fetched
    unordered: bool  # the request need not wait for earlier requests of the same caller
    place: int  # of a repeated request: the id of the first attempt, which gives its place in the order
    unresolved: bool  # the receiver has to fetch arguments before it can run the request


_TEXT: Final = frozenset({str})
pack_header: Final = msgpack.packb


def unpack_header(extra: bytes) -> Header:
    """Return the header of a frame.

    Raises:
        ProtocolError: ``extra`` is not a msgpack map with text keys.
    """
    try:
        header = msgpack.unpackb(extra)
    except Exception as error:
        raise ProtocolError(f"the header of a message cannot be read: {error!r}") from error
    if type(header) is not dict or not _TEXT.issuperset(map(type, header)):
        raise ProtocolError("the header of a message is not a map with text keys")
    return header  # type: ignore[return-value]


# -- reading -------------------------------------------------------------------------------


class FrameReader:
    """Cuts a stream of bytes into frames, incrementally.

    The thread that reads the socket receives into the buffers that :meth:`target` returns, and then calls :meth:`fed`. The bytes
    of a chunk are received directly into the memory that ``sink_for(stream, position, length)`` returns. Not thread-safe: the
    connection's read lock guards the reader.

    Args:
        max_frame: the largest frame (without its prefix) that is accepted, in bytes.
        max_chunk: the largest chunk that is accepted, in bytes.
        sink_for: returns the memory for a chunk, or raises ProtocolError; ``None``: chunks are refused.
        capacity: size of the read buffer, in bytes.
        allocate: allocates a zeroed, writable buffer of the given number of bytes.

    Attributes:
        empty: the read buffer, if it is empty and the next byte begins a frame; otherwise ``None``: call :meth:`target`.
        more: see :meth:`fed`.
        received: the number of bytes received; ``received_in_chunks``: the total length of the chunks that have begun.
        sink: the destination of the chunk that was read in part; ``None``: no chunk was read in part.
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
        """Whether a frame was read in part."""
        return self.sink is not None or self._end > self._start

    def target(self) -> list[memoryview]:
        """Return the buffers for the next bytes, in the order in which they are filled. Their total size is never zero."""
        sink = self.sink
        if sink is None:
            return [self._view[self._end :]] if self._end else self._whole
        # After a chunk, read no more than the prefix of the next chunk, so that its bytes can be read directly into their
        # destination.
        self._start = self._end = 0
        return [sink[self._sink_got :], self._view[:PREFIX_SIZE]]

    def fed(self, count: int) -> list[Frame]:
        """Record ``count`` new bytes and return the frames that are now complete.

        If ``more`` is true afterwards, the caller must handle the frames and call this method again with 0: the buffer has more
        bytes, which can only be cut into frames then.

        Raises:
            ProtocolError: the bytes are not valid frames, or a size exceeds a limit.
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
                # A message in one frame can be skipped: only its call fails. A missing control frame, or a missing message
                # whose chunks follow, would affect other calls, so the connection fails.
                if kind > FAILURE or flags & STREAM:
                    raise
                frames.append(Frame(UNREAD, flags, id, remaining, chain, header, b"", (kind, stop - start)))
            else:
                # The same as Frame(...), but without its Python-level __new__.
                frames.append(_new(Frame, (kind, flags, id, remaining, chain, header, body, None, None)))
            start = stop
            if flags & STREAM and kind <= FAILURE:
                # The message's chunks may be in the buffer already. The caller allocates their memory when it handles the frame.
                self.more = True
                break
        self._start = start
        if start == end:
            self._start = self._end = 0
        elif self.sink is None and not self.more:  # if ``more`` is set, the next length was not checked yet
            here = end - start
            self._make_room(PREFIX_SIZE + (PREFIX.unpack_from(view, start)[0] if here >= PREFIX_SIZE else 0))
        self.empty = None if self._end or self.sink is not None else self._view
        return frames

    def _begin_chunk(self, frames: list[Frame], start: int, end: int, length: int, frame: Frame) -> int:
        """Copy the buffered bytes of a chunk to its destination; return the index in the buffer at which these bytes end."""
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
        """Make sure that the frame or prefix of ``needed`` bytes that was read in part fits into the buffer."""
        here = self._end - self._start
        capacity = len(self._buffer)
        if needed > capacity:
            # The caller has checked ``needed`` against the limit. The larger buffer replaces the present one for good.
            try:
                larger = self._allocate(max(needed, 2 * capacity))
            except OSError as error:  # ``allocate`` may map memory
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
