"""Streams: what a connection reads and writes. :class:`SocketStream` is a plain socket.

:class:`actorrpc.transport.tls.TlsSocket` speaks TLS, :class:`actorrpc.transport.sealed.SealedStream` proves that bytes were not
changed, and :class:`actorrpc.transport.session.ReliableStream` replaces a socket that has failed. The connection above them
knows bytes and frames only.
"""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from actorrpc import _time

__all__ = ["RECEIVE", "SEND", "SocketStream", "Stream", "receive_exactly", "records", "send_all", "wait_for"]

RECEIVE: Final = socket.MSG_DONTWAIT
SEND: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Stream:
    """A connected stream of bytes that never blocks. One thread reads while another writes.

    The methods that read and write take the arguments of a socket's methods, with the flags :data:`RECEIVE` or :data:`SEND`, and
    raise what a socket raises: BlockingIOError, and OSError when the stream has failed.

    Attributes:
        sock: the socket, to poll and to set options.
        binding: bytes that only the two ends of this very stream know, where it is encrypted.
        pending: the stream holds bytes that were received and not yet read, so a poll of the socket does not report them.
        owed: how many bytes have been received, if the other side should be told now; otherwise 0.
        is_full: no large message may be sent until the other side has acknowledged more bytes.
    """

    sock: socket.socket
    binding: bytes = b""
    pending: bool = False
    owed: int = 0
    is_full: bool = False

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0, /) -> int:
        """Read into one buffer; 0 at the end."""
        count: int = self.recvmsg_into((buffer,), 0, flags)[0]
        return count

    def recvmsg_into(self, buffers: Sequence[memoryview], ancillary: int = 0, flags: int = 0, /) -> Any:
        """Read into several buffers; the first item of the result is the number of bytes."""
        raise NotImplementedError

    def send(self, data: bytes, flags: int = 0, /) -> int:
        """Write what the kernel takes; return how many bytes that is."""
        return self.sendmsg((memoryview(data),), (), flags)

    def sendmsg(self, parts: Sequence[memoryview], ancillary: Any = (), flags: int = 0, /) -> int:
        """Write what the kernel takes of several parts; return how many bytes that is."""
        raise NotImplementedError

    def told(self) -> None:
        """Note that the other side is told how many bytes are :attr:`owed`."""

    def wait(self, seconds: float) -> None:
        """Sleep while :attr:`is_full`, for at most ``seconds``."""

    def shutdown(self, how: int, /) -> None:
        """Shut the socket."""
        self.sock.shutdown(how)

    def close(self) -> None:
        """Close the descriptors."""
        self.sock.close()


class SocketStream(Stream):
    """A plain socket. Its methods are the socket's own, so a call of them runs no function in Python."""

    __slots__ = ("recv_into", "recvmsg_into", "send", "sendmsg", "sock")

    recv_into: Callable[..., int]
    recvmsg_into: Callable[..., Any]
    send: Callable[..., int]
    sendmsg: Callable[..., int]

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # operations that must not block say so themselves (MSG_DONTWAIT)
        self.sock = sock
        self.recv_into, self.recvmsg_into = sock.recv_into, sock.recvmsg_into
        self.send, self.sendmsg = sock.send, sock.sendmsg


def records(parts: Sequence[memoryview], most: int) -> Iterator[memoryview | bytes]:
    """Cut parts into records of ``most`` bytes and a last one, copying only where a record has bytes of several parts."""
    held: list[memoryview] = []
    room = most
    for part in parts:
        at, size = 0, len(part)
        while at < size:
            piece = part[at : at + room]
            at += len(piece)
            room -= len(piece)
            held.append(piece)
            if not room:
                yield held[0] if len(held) == 1 else b"".join(held)
                held, room = [], most
    if held:
        yield held[0] if len(held) == 1 else b"".join(held)


def wait_for(sock: socket.socket, events: int, limit: float) -> None:
    """Wait for events of a poll; ``limit`` is the time at which to give up.

    Raises:
        TimeoutError: nothing happened in time.
    """
    poller = _time.poll()
    poller.register(sock.fileno(), events)
    while (left := limit - _time.now()) > 0:
        if poller.poll(_time.patience(left) * 1e3):
            return
    raise TimeoutError("timed out")


def send_all(stream: Stream, data: bytes, limit: float) -> None:
    """Send all of the bytes before the time ``limit``.

    Raises:
        OSError: the stream has failed; TimeoutError: the other side did not take the bytes in time.
    """
    left = memoryview(data)
    while left:
        try:
            left = left[stream.sendmsg((left,), (), SEND) :]
        except BlockingIOError:
            wait_for(stream.sock, select.POLLOUT, limit)


def receive_exactly(stream: Stream, size: int, limit: float) -> bytes:
    """Return the next ``size`` bytes, which must come before the time ``limit``.

    Raises:
        OSError: the stream has failed or ended; TimeoutError: the bytes did not come in time.
    """
    got, data = 0, memoryview(bytearray(size))
    while got < size:
        try:
            count = stream.recv_into(data[got:], 0, RECEIVE)
        except BlockingIOError:
            wait_for(stream.sock, select.POLLIN, limit)
            continue
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, "the other side has closed")
        got += count
    return bytes(data)
