"""Streams: what a connection reads and writes. :class:`SocketStream` is a plain socket.

:class:`actorrpc.transport.tls.TlsSocket` speaks TLS, and :class:`actorrpc.transport.session.ReliableStream` replaces a socket
that has failed. The connection above them knows bytes and frames only.
"""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["SocketStream", "Stream"]


class Stream:
    """A connected stream of bytes that never blocks. One thread reads while another writes.

    The methods that read and write take the arguments of a socket's methods, and raise what a socket raises: BlockingIOError,
    and OSError when the stream has failed.

    Attributes:
        sock: the socket, to poll and to set options.
        pending: the stream holds bytes that were received and not yet read, so a poll of the socket does not report them.
        owed: how many bytes have been received, if the other side should be told now; otherwise 0.
        is_full: no large message may be sent until the other side has acknowledged more bytes.
    """

    __slots__ = ()

    sock: socket.socket
    pending: bool = False
    owed: int = 0
    is_full: bool = False

    @abstractmethod
    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0, /) -> int:
        """Read into one buffer; 0 at the end."""

    @abstractmethod
    def recvmsg_into(self, buffers: Sequence[memoryview], ancillary: int = 0, flags: int = 0, /) -> Any:
        """Read into several buffers; the first item of the result is the number of bytes."""

    @abstractmethod
    def send(self, data: bytes, flags: int = 0, /) -> int:
        """Write what the kernel takes; return how many bytes that is."""

    @abstractmethod
    def sendmsg(self, parts: Sequence[memoryview], ancillary: Any = (), flags: int = 0, /) -> int:
        """Write what the kernel takes of several parts; return how many bytes that is."""

    def wait(self, seconds: float) -> None:
        """Sleep while :attr:`is_full`, for at most ``seconds``."""

    def told(self) -> None:
        """Note that the other side is told how many bytes are :attr:`owed`."""

    @abstractmethod
    def shutdown(self, how: int, /) -> None:
        """Shut the socket."""

    @abstractmethod
    def close(self) -> None:
        """Close the descriptors."""


class SocketStream(Stream):
    """A plain socket. Its methods are the socket's own, so a call of them runs no function in Python."""

    __slots__ = ("close", "recv_into", "recvmsg_into", "send", "sendmsg", "shutdown", "sock")

    recv_into: Callable[..., int]
    recvmsg_into: Callable[..., Any]
    send: Callable[..., int]
    sendmsg: Callable[..., int]
    shutdown: Callable[[int], None]
    close: Callable[[], None]

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # operations that must not block say so themselves (MSG_DONTWAIT)
        self.sock = sock
        self.recv_into, self.recvmsg_into = sock.recv_into, sock.recvmsg_into
        self.send, self.sendmsg = sock.send, sock.sendmsg
        self.shutdown, self.close = sock.shutdown, sock.close
