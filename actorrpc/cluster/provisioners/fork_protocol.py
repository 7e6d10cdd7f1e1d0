"""The protocol of the driver and its fork server: msgpack messages on a stream socket, with descriptors.

A message is a msgpack map. Its field ``fds`` is the number of its descriptors, which are sent with its first byte. Both ends are
processes of one user on one host, connected by a private socket pair, so messages are not checked for attacks. Not thread-safe.
``socket.send_fds`` and ``recv_fds`` are not used, because they ignore the flags in Python 3.11.
"""

from __future__ import annotations

import array
import os
import socket
from typing import Any, Final

import msgpack

__all__ = ["MessageReader", "send"]

_CHUNK: Final = 1 << 16
_MAX_FDS: Final = 16


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one whole message.

    Raises:
        OSError: the other end is closed, or accepts nothing within the socket's time-out.
    """
    data = memoryview(msgpack.packb(message, unicode_errors="surrogateescape"))
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
    sock.sendall(data[sent:], socket.MSG_NOSIGNAL)


class MessageReader:
    """Reads messages from a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unpacker = msgpack.Unpacker(
            strict_map_key=False, unicode_errors="surrogateescape", max_buffer_size=0
        )
        self._fds: list[int] = []

    def feed(self, flags: int = 0) -> list[tuple[dict[str, Any], list[int]]] | None:
        """Receive once; return the messages that are complete, each with its descriptors.

        ``None``: the other end is closed.

        Raises:
            OSError: receiving failed (BlockingIOError: no data now).
        """
        # The kernel ends a read after the first bytes that have descriptors: one read returns the descriptors of one message.
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
        self._unpacker.feed(data)
        whole: list[tuple[dict[str, Any], list[int]]] = []
        for message in self._unpacker:
            count = message.get("fds", 0)
            taken, self._fds = self._fds[:count], self._fds[count:]
            whole.append((message, taken))
        return whole

    def close(self) -> None:
        """Close descriptors of incomplete messages."""
        while self._fds:
            os.close(self._fds.pop())
