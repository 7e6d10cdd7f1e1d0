"""The byte streams that a connection reads and writes.

:class:`SocketStream` is a plain socket, :class:`actorrpc.transport.tls.TlsSocket` adds TLS, and
:class:`actorrpc.transport.stream.ReliableStream` replaces a failed socket by another socket.
"""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["SocketStream", "Stream"]


class Stream:
    """A connected stream of bytes. One thread may read while another writes.

    The methods that read and write have the arguments and exceptions of a socket's methods: with the flag MSG_DONTWAIT,
    BlockingIOError if they would block; OSError if the stream has failed.

    Attributes:
        sock: the socket, for polling and for setting options.
        pending: whether the stream buffers received bytes that were not read yet; a poll of the socket does not report them.
        owed: if an acknowledgement is due, the total of received bytes, which it has to contain; otherwise 0.
        is_full: whether large messages have to wait until the other side has acknowledged more bytes.
    """

    __slots__ = ()

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
        """Close the descriptors."""


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
