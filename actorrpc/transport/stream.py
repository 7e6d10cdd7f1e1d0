"""The byte streams that a connection reads and writes, and the states of a connection (:class:`ConnectionState`).

:class:`SocketStream` is a plain socket, :class:`actorrpc.transport.tls_socket.TlsSocket` adds TLS, and :class:`ReliableStream`
replaces a failed socket by another socket:

Each direction of a connection is a stream of bytes, counted from the first byte after the handshake. The reader counts the bytes
that it has received and acknowledges them now and then; the writer keeps sent bytes until they are acknowledged. When the socket
breaks, the dialling side opens a new socket, both sides tell each other how many bytes they have received, and both send the
missing bytes again. Every byte arrives once and in order, so frames are not affected, even if a socket broke within a frame.

Several attempts to resume may run at once. Each attempt gets a number before it sends anything, and the latest attempt wins.
"""

from __future__ import annotations

import enum
import itertools
import math
import socket
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from actorrpc import _time
from actorrpc.errors import ProtocolError

__all__ = [
    "CLOSED",
    "OPEN",
    "SUSPENDED",
    "ConnectionState",
    "Goodbye",
    "ReliableStream",
    "SocketStream",
    "Stream",
]

_SAY_EVERY: Final = 1 << 20
_LIMIT: Final = 8 << 20  # more than the bandwidth-delay product of most networks
_LARGE: Final = 64 << 10  # copies from this size on use the ring buffer: fresh memory would cost more


class Stream:
    """A connected stream of bytes. One thread may read while another writes.

    The methods that read and write have the arguments and exceptions of a socket's methods: with the flag MSG_DONTWAIT,
    BlockingIOError if they would block; OSError if the stream has failed.

    Attributes:
        sock: the socket, for polling and for setting options.
        pending: whether the stream buffers received bytes that were not read yet; a poll of the socket does not report them.
        owed: if an acknowledgement is due, the total of received bytes, which it has to contain; otherwise 0.
        is_full: whether large messages have to wait until the other side has acknowledged more bytes.
        capacity: how many bytes may be sent over the stream before another stream should replace it.
    """

    __slots__ = ()

    capacity: float = math.inf
    sock: socket.socket
    pending: bool = False
    owed: int = 0
    is_full: bool = False

    @abstractmethod
    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0, /) -> int:
        """Read into one buffer; return the number of bytes, 0 at the end of the stream."""

    @abstractmethod
    def recvmsg_into(self, buffers: Sequence[memoryview], ancillary: int = 0, flags: int = 0, /) -> Any:
        """Read into several buffers; return a tuple whose first item is the number of bytes."""

    @abstractmethod
    def send(self, data: bytes, flags: int = 0, /) -> int:
        """Write as much as the kernel accepts; return the number of bytes."""

    @abstractmethod
    def sendmsg(self, parts: Sequence[memoryview], ancillary: Any = (), flags: int = 0, /) -> int:
        """Write as much of several buffers as the kernel accepts; return the number of bytes."""

    def wait(self, seconds: float) -> None:
        """Sleep while :attr:`is_full`, for at most ``seconds``."""

    def ack_sent(self) -> None:
        """Reset :attr:`owed`, because the acknowledgement is being sent."""

    @abstractmethod
    def shutdown(self, how: int, /) -> None:
        """Shut down the socket."""

    @abstractmethod
    def close(self) -> None:
        """Close the socket."""


class SocketStream(Stream):
    """A plain socket. Its methods are the bound methods of the socket, so a call runs no Python function."""

    __slots__ = ("close", "recv_into", "recvmsg_into", "send", "sendmsg", "shutdown", "sock")

    recv_into: Callable[..., int]
    recvmsg_into: Callable[..., Any]
    send: Callable[..., int]
    sendmsg: Callable[..., int]
    shutdown: Callable[[int], None]
    close: Callable[[], None]

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # the caller passes MSG_DONTWAIT if it must not block
        self.sock = sock
        self.recv_into, self.recvmsg_into = sock.recv_into, sock.recvmsg_into
        self.send, self.sendmsg = sock.send, sock.sendmsg
        self.shutdown, self.close = sock.shutdown, sock.close


class ReliableStream(Stream):
    """A stream over a succession of sockets.

    The thread that holds the connection's read lock reads, and uses :meth:`acknowledged` and :meth:`claim_attempt`. The thread
    that holds the writer's lock writes. :meth:`rewind` and :meth:`replace` need both. :attr:`is_full` and :meth:`wait` need none.

    Args:
        stream: the stream over the first socket.
        other: authenticated name and incarnation of the worker at the other end.
        dialled: whether this side has opened the connection, and therefore opens new sockets.
        say_every: an acknowledgement is sent after so many received bytes.
        limit: large messages wait while so many sent bytes are not acknowledged.
        large: copies of sent buffers from this size on are made in a ring buffer.

    Attributes:
        attempts: the numbers for attempts to resume.
        received, sent: the numbers of bytes that were received and sent over all sockets.
    """

    __slots__ = (
        "_acknowledged",
        "_attempt",
        "_base",
        "_large",
        "_limit",
        "_moved",
        "_parts",
        "_replace_at",
        "_ring",
        "_said",
        "_say_every",
        "_stream",
        "attempts",
        "dialled",
        "other",
        "owed",
        "received",
        "sent",
    )

    def __init__(
        self,
        stream: Stream,
        other: tuple[str, str] = ("", ""),
        dialled: bool = True,
        *,
        say_every: int = _SAY_EVERY,
        limit: int = _LIMIT,
        large: int = _LARGE,
    ) -> None:
        self._stream = stream
        self._replace_at = stream.capacity  # the number of sent bytes at which the socket is replaced
        self.other = other
        self.dialled = dialled
        self.attempts = itertools.count(1)
        self._attempt = 0  # the latest attempt to resume that has claimed the number of received bytes
        self._say_every = say_every
        self._limit = limit
        self._large = large
        self.received = self.sent = 0
        self.owed = 0
        self._said = 0
        self._acknowledged = 0
        self._moved = _time.Event()  # set when an acknowledgement arrives
        self._base = 0  # the position in the stream of the first kept byte
        self._parts: deque[bytes | memoryview] = deque()
        self._ring: _Ring | None = None

    # -- reading -------------------------------------------------------------------------------------

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0, /) -> int:
        """Read into one buffer, and count the bytes."""
        count = self._stream.recv_into(buffer, size, flags)
        self._count(count)
        return count

    def recvmsg_into(self, buffers: Sequence[memoryview], ancillary: int = 0, flags: int = 0, /) -> Any:
        """Read into several buffers, and count the bytes."""
        found = self._stream.recvmsg_into(buffers, ancillary, flags)
        self._count(found[0])
        return found

    def _count(self, count: int) -> None:
        self.received += count
        if self.received - self._said >= self._say_every:
            self._said = self.owed = self.received

    def ack_sent(self) -> None:
        """Reset :attr:`owed`."""
        self.owed = 0

    # -- writing -------------------------------------------------------------------------------------

    def send(self, data: bytes, flags: int = 0, /) -> int:
        """Write as much as the kernel accepts, and keep these bytes until they are acknowledged."""
        if self.sent >= self._replace_at:
            raise ConnectionResetError("the socket has sent as many bytes as one socket may send")
        count = self._stream.send(data, flags)
        self._keep(data if count == len(data) else data[:count])
        self._trim()
        return count

    def sendmsg(self, parts: Sequence[memoryview], ancillary: Any = (), flags: int = 0, /) -> int:
        """Write as much as the kernel accepts, and keep a copy, because the caller may change its buffers."""
        if self.sent >= self._replace_at:
            raise ConnectionResetError("the socket has sent as many bytes as one socket may send")
        count = left = self._stream.sendmsg(parts, ancillary, flags)
        for part in parts:
            if left <= 0:
                break
            data = part[:left]
            left -= len(data)
            if len(data) < self._large:
                self._keep(bytes(data))
                continue
            if self._ring is None:
                self._ring = _Ring(2 * self._limit)  # the last piece may exceed the limit
            for copy in self._ring.copy(data):
                self._keep(copy)
        self._trim()
        return count

    def _keep(self, data: bytes | memoryview) -> None:
        self._parts.append(data)
        self.sent += len(data)

    def _trim(self) -> None:
        parts, acknowledged = self._parts, self._acknowledged
        while parts and self._base + len(parts[0]) <= acknowledged:
            part = parts.popleft()
            self._base += len(part)
            if self._ring is not None and type(part) is memoryview:
                self._ring.free(len(part))

    def acknowledged(self, count: int) -> None:
        """Record that the other side has received ``count`` bytes in all."""
        if count > self._acknowledged:
            self._acknowledged = count
            self._moved.set()

    @property
    def is_full(self) -> bool:  # type: ignore[override]
        """Whether large messages wait for an acknowledgement."""
        return self.sent - self._acknowledged >= self._limit

    def wait(self, seconds: float) -> None:
        """Sleep while :attr:`is_full`, until an acknowledgement arrives, for at most ``seconds``."""
        self._moved.clear()
        if self.is_full:
            self._moved.wait(seconds)

    # -- the socket ----------------------------------------------------------------------------------

    @property
    def sock(self) -> Any:  # type: ignore[override]
        """The current socket."""
        return self._stream.sock

    @property
    def pending(self) -> bool:  # type: ignore[override]
        """Whether the current socket's stream buffers bytes."""
        return self._stream.pending

    def shutdown(self, how: int, /) -> None:
        """Shut down the current socket."""
        self._stream.shutdown(how)

    def close(self) -> None:
        """Close the current socket."""
        self._stream.close()

    def is_overtaken(self, attempt: int) -> bool:
        """Whether a later attempt to resume was claimed (:meth:`claim_attempt`), so that ``attempt`` has to stop."""
        return attempt < self._attempt

    def claim_attempt(self, attempt: int) -> bool:
        """Claim the number of received bytes, to send it in an attempt to resume; False if a later attempt has claimed it."""
        self._attempt = max(self._attempt, attempt)
        return self._attempt == attempt

    def rewind(self, count: int) -> list[memoryview]:
        """Return the bytes that the other side has not received, to be sent again. They no longer count as sent.

        Args:
            count: how many bytes the other side has received.

        Raises:
            ProtocolError: the other side cannot have received that number of bytes.
        """
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
        self._ring = None  # the returned views refer to the memory of the ring, so a new ring is made later
        self._base = self.sent = count
        self.acknowledged(count)
        return left

    def replace(self, stream: Stream) -> None:
        """Close the current socket, and use another one."""
        self._stream.close()
        self._stream = stream
        self._replace_at = self.sent + stream.capacity


class _Ring:
    """A ring buffer for copies, which are freed in the order in which they were made."""

    __slots__ = ("_at", "_memory", "_used")

    def __init__(self, size: int) -> None:
        self._memory = memoryview(bytearray(size))
        self._at = 0
        self._used = 0

    def copy(self, data: memoryview) -> list[memoryview | bytes]:
        """Return copies of ``data`` in one or two parts; if the ring is full, as a bytes object outside the ring."""
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
        """Free the oldest ``size`` bytes."""
        self._used -= size


# -- the states of a connection --------------------------------------------------------------------


class ConnectionState(enum.Enum):
    OPEN = "open"
    SUSPENDED = "suspended"
    """The socket has failed, and another socket is being opened. Only TCP connections can have this state."""
    CLOSED = "closed"
    """The connection has ended, for whatever reason, and is never resumed."""


class Goodbye(enum.Enum):
    """The reason that the peer has given in its GOODBYE frame before it closed the connection."""

    LEAVES = "leaves"
    GIVES_UP = "gives up"
    """The peer considers this worker dead."""


# Not Final: a type checker would narrow the type of ``state`` after a comparison, but another thread may change the state between
# two comparisons.
OPEN: ConnectionState = ConnectionState.OPEN
SUSPENDED: ConnectionState = ConnectionState.SUSPENDED
CLOSED: ConnectionState = ConnectionState.CLOSED
