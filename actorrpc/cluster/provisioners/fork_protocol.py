"""What the driver and its fork server say to each other: msgpack messages on a stream socket, with descriptors.

A message is its length (4 bytes), then a msgpack map. Descriptors come with the first byte of a length, so lengths
are always read by :meth:`MessageReader.feed`, which takes them. Both ends are one user's processes on one host, connected by
a socket pair that nobody else has: nothing here defends against a stranger. Not thread-safe.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import Any, Final

import msgpack

__all__ = ["MessageReader", "send"]

_LENGTH: Final = struct.Struct("!I")
_CHUNK: Final = 1 << 16
_MAX_FDS: Final = 16


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one message, all of it.

    Raises:
        OSError: the other end is gone, or takes nothing within the socket's time-out.
    """
    body: bytes = msgpack.packb(message, unicode_errors="surrogateescape")
    data = memoryview(_LENGTH.pack(len(body)) + body)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    while data:
        sent = sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        ancillary = []
        data = data[sent:]


class MessageReader:
    """Takes messages from a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = bytearray()
        self._fds: list[int] = []

    def feed(self, flags: int = 0) -> list[tuple[dict[str, Any], list[int]]] | None:
        """Receive once; return the messages that are whole, each with the descriptors that came with it.

        ``None``: the other end is closed.

        Raises:
            OSError: nothing can be received (BlockingIOError: now).
        """
        # One read never takes bytes of two messages if the second one has descriptors: the kernel sees to that.
        data, ancillary, _, _ = self._sock.recvmsg(
            _CHUNK, socket.CMSG_SPACE(_MAX_FDS * 4), flags | socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._fds.extend(received)
        if not data:
            return None
        self._data += data
        whole: list[tuple[dict[str, Any], list[int]]] = []
        while len(self._data) >= 4:
            (size,) = _LENGTH.unpack_from(self._data)
            if len(self._data) < 4 + size:
                break
            message = msgpack.unpackb(
                bytes(self._data[4 : 4 + size]), strict_map_key=False, unicode_errors="surrogateescape"
            )
            del self._data[: 4 + size]
            count = message.get("fds", 0)
            taken, self._fds = self._fds[:count], self._fds[count:]
            whole.append((message, taken))
        return whole

    def close(self) -> None:
        """Close descriptors that belong to no whole message."""
        while self._fds:
            os.close(self._fds.pop())
