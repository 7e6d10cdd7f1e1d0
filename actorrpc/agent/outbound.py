"""Packs calls, values and errors into frames, and opens frames.

A message is one frame with the pickled body. The memory of tensors and other large buffers is sent in one of three ways, which
the frame's flags name:

* ``INLINE``: small buffers, copied after the body in the same frame;
* ``LANE``: through shared memory, to a peer on the same host;
* ``STREAM``: as chunks on the same connection; other frames may be sent between chunks. A large body is sent in this way, too.

Before that, tensors for a device of a peer on the same host are sent from device to device if possible, and are not among the
buffers (:mod:`actorrpc.transport.device_memory`).

In every case the memory has been copied, here or by the kernel, when :func:`send` returns: the peer does not see a later change
of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from actorrpc import _time
from actorrpc._exceptions import is_of_handler
from actorrpc.agent.peers import MessageContext, Peer
from actorrpc.errors import LimitError, PeerDiedError, ProtocolError, RpcError
from actorrpc.flight_recorder import COPIED_BYTES
from actorrpc.serialization import codec, exceptions
from actorrpc.transport.signals import uninterruptible
from actorrpc.transport.stream import CLOSED
from actorrpc.wire import frames
from actorrpc.wire.frames import Frame, Header, pack_frame, pack_header, unpack_header, unpack_position

if TYPE_CHECKING:
    from actorrpc.agent.calls import Execution
    from actorrpc.agent.hooks import MessageReferences, Recorder
    from actorrpc.agent.scheduler import Scheduler
    from actorrpc.config import Settings
    from actorrpc.flight_recorder import FlightRecorder
    from actorrpc.transport.buffers import BufferPool
    from actorrpc.transport.connection import Connection
    from actorrpc.transport.device_memory import DeviceMemory
    from actorrpc.transport.object_store import Segment

__all__ = [
    "Assembly",
    "Packed",
    "begin_stream",
    "body_of",
    "discard",
    "opened",
    "pack",
    "send",
    "send_buffers",
]

CHARGED: Final = 16 << 10  # smaller messages do not count against the window; only their number is limited
INLINE: Final = 1
LANE: Final = 2
STREAM: Final = frames.STREAM
BODY: Final = 8  # flag: the body itself is the last buffer of the stream
_MEANING: Final = frames.MAIL | frames.CAST | frames.OBJECTS  # flags that say nothing about buffers
_BODY_ONLY: Final = frames.MAIL | frames.CAST  # flags that a message without buffers and objects may have
_CHARGED: Final = INLINE | LANE | STREAM
_SHARE_S: Final = 5.0  # how long a message waits for room in the descriptor socket
_SHARE_STEP_S: Final = 0.002
_MAX_SHARED: Final = 2048  # the most segments in a message; a receiver stores at most twice as many that no message has used yet
_INFINITE: Final = float("inf")
_nbytes: Final = attrgetter("nbytes")
_pack: Final = frames.PREFIX.pack
_STOP: Final = 0x2E  # the last byte of a plain pickle, which needs no buffers or definitions


class Assembly:
    """A message whose buffers are received in chunks. Used under the read lock of its connection.

    Attributes:
        frame: the message; None if there is no memory for its buffers, so that the chunks are dropped.
        size: bytes of all buffers.
    """

    __slots__ = ("_received", "_remaining", "buffers", "frame", "size")

    def __init__(self, frame: Frame, sizes: list[int], allocate: Callable[[int], memoryview]) -> None:
        self.frame: Frame | None = frame
        self.buffers: list[memoryview] = []
        self.size = self._remaining = sum(sizes)
        self._received: set[int] = set()
        try:
            self.buffers = [allocate(size) for size in sizes]
        except MemoryError:
            self.frame = None

    def sink(self, position: int, length: int) -> memoryview:
        """Return the memory for a chunk.

        Raises:
            ProtocolError: the chunk lies outside of its buffer.
        """
        if self.frame is None:
            return memoryview(bytearray(length))
        index, offset = unpack_position(position)
        if index >= len(self.buffers) or offset + length > len(self.buffers[index]):
            raise ProtocolError("a chunk lies outside of its buffer")
        return self.buffers[index][offset : offset + length]

    def record_chunk(self, position: int, length: int) -> bool:
        """Record a complete chunk; return whether it was the last chunk of the message."""
        if position in self._received:
            return False  # the chunk was received before
        self._received.add(position)
        self._remaining -= length
        if self._remaining < 0:
            raise ProtocolError("more chunks than were announced")
        return self._remaining == 0


def _check(buffers: int, total: int, settings: Settings) -> None:
    """Check a message against the limits.

    Raises:
        LimitError: there are too many or too large buffers; the message was not sent.
    """
    if buffers > settings.max_buffers:
        raise LimitError(
            f"a message with {buffers} tensors, arrays and buffers is over the limit of {settings.max_buffers}; it was not sent. "
            "Stack them, send fewer at once, or raise the setting max_buffers of all workers, as in init(max_buffers=...)"
        )
    if total > settings.max_message:
        raise LimitError(f"a message of {total} bytes is over the limit of {settings.max_message}")


class _SendingAgent(Protocol):
    """The parts of an agent that sending a message needs."""

    settings: Settings
    flight_recorder: FlightRecorder | None
    device_memory: DeviceMemory | None
    scheduler: Scheduler

    def lender(self, conn: Connection) -> Any: ...


class _OpeningAgent(Protocol):
    """The parts of an agent that opening a message needs."""

    device_memory: DeviceMemory | None
    recorder: Recorder
    scheduler: Scheduler
    references: MessageReferences


class Packed(NamedTuple):
    """A message as it is sent: one frame, and the buffers that follow the frame in chunks.

    Attributes:
        size: bytes of body and buffers; 0 for a message without buffers whose body fits into one chunk.
        stream: the number of the chunks' stream.
        buffers: index and memory of each buffer that is sent in chunks.
    """

    frame: bytes
    size: int = 0
    stream: int = 0
    buffers: Sequence[tuple[int, memoryview]] = ()


def send(
    agent: _SendingAgent,
    conn: Connection,
    kind: int,
    id: int,
    encoded: codec.Encoded | bytes,
    header: Header | None = None,
    *,
    remaining: float = _INFINITE,
    chain: int = 0,
    flags: int = 0,
) -> bool:
    """Put a message into the outbox, and send its chunks. The caller flushes. Calls are sent by ``Agent._dispatch`` instead.

    Returns whether all chunks were sent; False if the connection was closed meanwhile.

    Raises:
        LimitError: the message exceeds a limit and is not sent; definitions that it needs may have been sent.
        PeerDiedError: the connection is closed.
    """
    packed = pack(agent, conn, kind, id, encoded, header, b"", remaining, chain, flags)
    conn.outbox.append(packed if isinstance(packed, bytes) else packed.frame)
    if conn.state is CLOSED:
        raise PeerDiedError("the connection was closed", maybe_executed=False)
    return isinstance(packed, bytes) or not packed.buffers or send_buffers(agent, conn, packed, _INFINITE)


def pack(
    agent: _SendingAgent,
    conn: Connection,
    kind: int,
    id: int,
    encoded: codec.Encoded | bytes,
    header: Header | None = None,
    extra: bytes = b"",
    remaining: float = _INFINITE,
    chain: int = 0,
    flags: int = 0,
) -> bytes | Packed:
    """Return a message's frame. If the header must be packed, or there may be buffers or a large body, return a :class:`Packed`.

    Puts the definitions that the message needs into the outbox, and sends the descriptors of its shared memory.

    Args:
        extra: the packed header; empty: ``header`` is packed here.

    Raises:
        LimitError: the message exceeds a limit.
        PeerDiedError: the connection is closed.
    """
    settings = agent.settings
    if isinstance(encoded, bytes) and (extra or header is None) and len(encoded) <= settings.chunk:
        return (
            _pack(len(extra) + len(encoded), len(extra), kind, flags, remaining, id, chain) + extra + encoded
        )
    spans: Sequence[codec.TensorSpan] = ()
    if isinstance(encoded, bytes):
        body = encoded
    else:
        body, spans = encoded.body, encoded.spans
        peer = conn.peer
        for digest, definition in encoded.definitions.items():
            conn.outbox.append(pack_frame(frames.DEFINITION, body=digest + definition))
            peer.known.note(digest, len(definition))
    if header is not None and "objects" in header:
        header = header.copy()
        header["objects"] = _share(agent, conn, header["objects"], _time.now() + min(remaining, _SHARE_S))
        flags |= frames.OBJECTS
    if not spans and len(body) <= settings.chunk:
        extra = pack_header(header) if header else b""
        return Packed(pack_frame(kind, id, body, flags=flags, remaining=remaining, chain=chain, extra=extra))
    size = len(body) + sum(map(_nbytes, spans))
    _check(len(spans), size, settings)
    header = header.copy() if header else {}
    way, body, buffers = _place(agent, conn, body, spans, header)
    stream = header.get("stream", 0)
    frame = pack_frame(
        kind, id, body, flags=flags | way, remaining=remaining, chain=chain, extra=pack_header(header)
    )
    return Packed(frame, size, stream, buffers)


def _place(
    agent: _SendingAgent,
    conn: Connection,
    body: bytes,
    spans: Sequence[codec.TensorSpan],
    header: Header,
) -> tuple[int, bytes, list[tuple[int, memoryview]]]:
    """Choose how body and buffers are sent; set the header fields that say where they are.

    Returns:
        The flags that name the way, the body of the frame, and the buffers that are sent in chunks.
    """
    settings = agent.settings
    if agent.device_memory is not None and conn.lane.devices.peer_uuids:
        spans = _place_on_devices(agent, conn, agent.device_memory, spans, header)
    sizes = header["sizes"] = list(map(_nbytes, spans))
    size = len(body) + sum(sizes)
    if size < settings.lane_threshold or (not spans and len(body) <= settings.chunk):
        return INLINE, b"".join([body, *(bytes(span.view()) for span in spans)]), []
    if conn.local and spans and len(body) <= settings.chunk:
        begun = _time.now()
        lender = agent.lender(conn)
        placement = lender.place(spans) if lender is not None else None
        if placement is not None:
            copied = sum(sizes)
            if agent.flight_recorder is not None and copied >= COPIED_BYTES:
                text = f"of {copied} bytes into memory shared with {conn.peer.name}"
                agent.flight_recorder.noted(begun, "copy", text)
            header["placement"] = placement
            return LANE, body, []
    flags = STREAM
    buffers = [(index, span.view()) for index, span in enumerate(spans)]
    if len(body) > settings.chunk:
        flags |= BODY
        buffers.append((len(buffers), memoryview(body)))
        sizes.append(len(body))
        body = b""
    header["stream"] = next(conn.peer.ids)
    return flags, body, buffers


def _place_on_devices(
    agent: _SendingAgent,
    conn: Connection,
    memory: DeviceMemory,
    spans: Sequence[codec.TensorSpan],
    header: Header,
) -> Sequence[codec.TensorSpan]:
    """Copy tensors to memory of their devices that the peer can open; return the other spans, which are sent as usual."""
    settings = agent.settings
    placed = [(at, span) for at, span in enumerate(spans) if isinstance(span, codec.PlacedSpan)]
    rows, sent = conn.lane.devices.place(memory, placed, settings.device_lane_bytes, settings.lane_threshold)
    if rows:
        agent.scheduler.keep_trim()
        header["device_memory"] = rows
    return [span for at, span in enumerate(spans) if at not in sent]


def send_buffers(agent: _SendingAgent, conn: Connection, packed: Packed, deadline: float) -> bool:
    """Send the buffers of a message whose frame is in the outbox, in chunks; wait while the kernel's buffer is full.

    Returns whether all of them were sent; False if the deadline has passed or the connection was closed.
    """
    flight_recorder, begun = agent.flight_recorder, _time.now()
    limit = None if deadline == _INFINITE else deadline
    size = agent.settings.chunk
    pieces = (
        (index, offset, buffer[offset : offset + size])
        for index, buffer in packed.buffers
        for offset in range(0, len(buffer), size)
    )
    is_out = conn.writer.send_chunks(packed.stream, pieces, limit)
    if flight_recorder is not None and packed.size >= COPIED_BYTES:
        flight_recorder.noted(
            begun, "copy", f"of {packed.size} bytes into the connection to {conn.peer.name}"
        )
    return is_out


def _share(agent: _SendingAgent, conn: Connection, segments: Sequence[Segment], until: float) -> list[int]:
    """Send the descriptors of segments before the message that uses them; return their numbers.

    Raises:
        LimitError: there are too many segments, or the descriptor socket cannot be opened or is not read; nothing was sent.
        PeerDiedError: the connection is closed.
    """
    if len(segments) > _MAX_SHARED:
        raise LimitError(
            f"a message with {len(segments)} large objects in shared memory is over the limit of {_MAX_SHARED}: send fewer "
            "at once; nothing was sent"
        )
    numbers: list[int] = []
    is_asked = False
    for segment in segments:
        while True:
            lender = agent.lender(conn)
            reason = "its descriptor socket cannot be opened"
            if lender is not None:
                try:
                    number = lender.share(segment, segment.fd)
                except OSError as error:
                    number, reason = 0, str(error.strerror)
                else:
                    reason = "it does not read its descriptor socket"
                if number:
                    numbers.append(number)
                    is_asked = False
                    break
            if conn.state is CLOSED:
                raise PeerDiedError("the connection was closed", maybe_executed=False)
            if lender is None or _time.now() >= until:
                raise LimitError(
                    f"an object of {segment.size >> 20} MiB in shared memory cannot be sent to {conn.peer.name!r}: {reason}; "
                    "nothing was sent"
                )
            if not is_asked:
                # The peer reads descriptors when a message uses them. This frame makes the peer read all descriptors now.
                is_asked = True
                conn.outbox.append(pack_frame(frames.LANE_RETIRE))
            conn.flush()
            _time.sleep(_SHARE_STEP_S)
    return numbers


def begin_stream(settings: Settings, pool: BufferPool, frame: Frame) -> tuple[int, Assembly]:
    """Allocate the buffers of a message that is received in chunks; return its stream number and its assembly.

    Raises:
        ProtocolError: the sizes are invalid or exceed a limit; nothing was allocated.
    """
    header = unpack_header(frame.extra)
    sizes, stream = header.get("sizes"), header.get("stream")
    if (
        not isinstance(sizes, list)
        or not isinstance(stream, int)
        or not sizes
        or len(sizes) > settings.max_buffers + 1
        or not all(isinstance(size, int) and size >= 0 for size in sizes)
        or sum(sizes) > settings.max_message
        or sum(sizes) == 0
    ):
        raise ProtocolError("the sizes announced for a message exceed the limits")
    return stream, Assembly(frame, sizes, pool.allocate)


def opened(
    agent: _OpeningAgent,
    conn: Connection | None,
    frame: Frame,
    peer: Peer,
    header: Header | None = None,
    execution: Execution | None = None,
) -> Any:
    """Return the object that a message carries. Most messages are a plain pickle.

    Args:
        header: the header of a request, if it has one.
        execution: the execution of a request; the references in the request are confirmed for it.

    Raises:
        RpcError: the object cannot be rebuilt.
        BaseException: the error in a reply, or an exception of a signal handler or an interruption.
    """
    if not frame[1] & ~_BODY_ONLY and (
        (
            frame[0] == frames.REQUEST
            and (header is None or ("references" not in header and "tag" not in header))
        )
        or (frame[0] == frames.REPLY and not frame[5])
    ):
        body = frame[6]
        if body[-1] != _STOP:
            return codec.decode(body, (), definitions=peer.definitions, context=MessageContext(peer))
        try:
            return codec.unpickle(body)
        except BaseException as error:
            return _open_again(body, peer, error)
    return _open_whole(agent, conn, frame, peer, header, execution)


@uninterruptible
def _open_whole(
    agent: _OpeningAgent,
    conn: Connection | None,
    frame: Frame,
    peer: Peer,
    header: Header | None,
    execution: Execution | None,
) -> Any:
    """Open an error, or a message with buffers, references or a tag of the recorder.

    Uninterruptible, because an interruption would lose the references.
    """
    if frame.kind == frames.FAILURE:
        raise exceptions.load(body_of(frame), loads=codec.loads)
    if header is None:
        header = unpack_header(frame.extra) if frame.extra else {}
    message, body = MessageContext(peer), frame.body
    forks = header.get("references")
    if isinstance(forks, bytes):
        agent.references.received(message, forks)  # before the message is opened
    message.objects = frame.objects
    views: Sequence[Any] = ()
    if frame.flags & ~_MEANING:
        views, body = _buffers(conn, frame, header)
    tag = header.get("tag")
    tensors: list[Any] | None = None if tag is None else []
    value = codec.decode(body, views, definitions=peer.definitions, context=message, tensors=tensors)
    if views and agent.device_memory is not None and conn is not None:
        _list_devices(agent, conn, agent.device_memory)
    if tensors is not None:
        agent.recorder.received(tag, tensors, peer)
    if execution is not None:
        if conn is not None and (frame.flags & _CHARGED or len(frame.body) >= CHARGED):
            # The sender counts the bytes as read when it receives the answer, or a CREDIT frame if the answer takes longer.
            agent.scheduler.soon(conn, frame.id)
        if message.received:
            agent.references.confirm(message.received, execution)
    return value


def _list_devices(agent: _OpeningAgent, conn: Connection, memory: DeviceMemory) -> None:
    """List the devices of this worker to a peer of this host, once the peer has sent buffers. Later calls do nothing."""
    if conn.local and conn.lane.devices.borrower is None:
        if conn.lane.list_devices(memory, agent.scheduler.freed, conn.outbox):
            agent.scheduler.soon(conn)


def _open_again(body: bytes, peer: Peer, error: BaseException) -> Any:
    """Return the object of a plain pickle for which a first attempt has raised ``error``, or raise the cause."""
    if is_of_handler(error) or isinstance(error, RpcError):
        raise error
    if not isinstance(error, (AttributeError, ImportError, TypeError)):
        # No second attempt: user code may have run. Damaged bytes make pickle raise nearly any error.
        raise codec.not_rebuilt(error, f"a message of {peer.name!r}") from error
    # decode() searches for classes in more places, and raises errors that name the cause.
    return codec.decode(body, (), definitions=peer.definitions, context=MessageContext(peer))


def body_of(frame: Frame) -> bytes | memoryview:
    """Return the body of a message whose chunks have all arrived: a body longer than one chunk is the last buffer."""
    return frame.buffers[-1] if frame.flags & BODY and frame.buffers else frame.body


def _buffers(conn: Connection | None, frame: Frame, header: Header) -> tuple[Sequence[Any], Any]:
    """Return the buffers of a message, and its body.

    Raises:
        LimitError: this process has no memory for the buffers. All memory was returned to the sender.
        PeerDiedError: the buffers are in memory of a device, and the connection has ended.
        ProtocolError: the header does not say where the buffers are.
    """
    rows = header.get("device_memory") if conn is not None else None
    found: tuple[Sequence[Any], Any] | None = None
    try:
        found = _host_buffers(conn, frame, header)
        if rows and conn is not None:
            found = conn.lane.devices.read(rows, found[0]), found[1]
    except LimitError as error:
        error.maybe_executed = frame.kind == frames.REPLY
        if rows and found is None and conn is not None:
            conn.lane.devices.refuse(rows)
        raise
    return found


def _host_buffers(conn: Connection | None, frame: Frame, header: Header) -> tuple[Sequence[memoryview], Any]:
    buffers = frame.buffers
    if buffers is not None:
        return buffers[:-1] if frame.flags & BODY else buffers, body_of(frame)
    sizes = header.get("sizes")
    if not isinstance(sizes, list) or not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise ProtocolError("the sizes of a message's buffers cannot be read")
    if frame.flags & LANE:
        assert conn is not None
        match header.get("placement"):
            case [int(segment), int(loan)]:
                return conn.lane.borrowed().views(segment, loan, sizes), frame.body
        raise ProtocolError("a message does not say which shared memory it uses")
    start = len(frame.body) - sum(sizes)
    if start < 0:
        raise ProtocolError("inline buffers are larger than their message")
    views = []
    position = start
    for size in sizes:
        views.append(memoryview(bytearray(frame.body[position : position + size])))
        position += size
    return views, frame.body[:start]


def discard(conn: Connection | None, frame: Frame) -> None:
    """Return to the sender the memory of a message that will not be opened."""
    if frame.flags & ~_MEANING and frame.extra and conn is not None and conn.lane.is_open:
        try:
            header = unpack_header(frame.extra)
            if "device_memory" in header:
                conn.lane.devices.refuse(header["device_memory"])
            if frame.flags & LANE:
                _host_buffers(conn, frame, header)
        except ProtocolError:
            pass
