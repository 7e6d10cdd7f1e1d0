"""A stream that is used as a socket that blocks."""

from __future__ import annotations

import select
from typing import Any

from actorrpc import _time
from actorrpc.transport.stream import RECEIVE, Stream, send_all, wait_for

__all__ = ["Blocking"]


class Blocking:
    """Sends all, and waits for what comes; has all else that the stream has."""

    def __init__(self, stream: Stream, timeout: float = 30.0) -> None:
        self.stream = stream
        self._timeout = timeout

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def settimeout(self, timeout: float | None) -> None:
        """Do as a socket does."""
        self._timeout = 30.0 if timeout is None else timeout

    def sendall(self, data: bytes) -> None:
        """Do as a socket does."""
        send_all(self.stream, data, _time.now() + self._timeout)

    def recv(self, size: int) -> bytes:
        """Do as a socket does."""
        limit = _time.now() + self._timeout
        buffer = memoryview(bytearray(size))
        while True:
            try:
                return bytes(buffer[: self.stream.recv_into(buffer, 0, RECEIVE)])
            except BlockingIOError:
                wait_for(self.stream.sock, select.POLLIN, limit)
