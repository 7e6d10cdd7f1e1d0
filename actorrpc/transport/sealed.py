"""Seals: proofs that the bytes received are those that were sent, where nothing else protects a connection.

The bytes are cut into records of at most ``RECORD`` bytes::

    length u32 | tag | bytes | tag

A tag has 16 bytes. It is the keyed BLAKE2b-128 of what stands before it (the length, or the bytes) and of the number of tags
before it; each direction of each socket has a key of its own, from the handshake. So bytes that were changed, left out, put in,
repeated, moved or sent back are refused: the reader raises ProtocolError, and returns nothing more. No byte is returned before
its tag was checked, and no length is used before its tag was checked.

Seals are not secret against an eavesdropper. Without a key of the group they find damage, and stop nobody who means harm.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

from actorrpc.errors import ProtocolError
from actorrpc.transport.stream import Stream, records

__all__ = ["HEAD_SIZE", "RECORD", "TAG_SIZE", "Seal", "SealedStream"]

TAG_SIZE: Final = 16
RECORD: Final = 64 << 10
_LENGTH: Final = struct.Struct("<I")
HEAD_SIZE: Final = _LENGTH.size + TAG_SIZE
_blake2b: Final = hashlib.blake2b


class Seal:
    """Makes the tags of one direction, one after the other. Not thread-safe.

    Args:
        key: the key of a handshake's session.
        role: who sends in this direction: ``b"dialler"`` or ``b"acceptor"``.
    """

    __slots__ = ("_count", "_key")

    def __init__(self, key: bytes, role: bytes) -> None:
        # HKDF-Expand of RFC 5869 with SHA-256
        self._key = hmac.digest(key, b"actorrpc seal 1\0" + role + b"\x01", "sha256")
        self._count = 0

    def tag(self, data: bytes | memoryview) -> bytes:
        """Return the tag of the bytes that are sent, or must come, next."""
        count = self._count
        self._count = count + 1
        return _blake2b(data, digest_size=TAG_SIZE, key=self._key, salt=count.to_bytes(16, "little")).digest()

    def check(self, data: memoryview, size: int) -> memoryview:
        """Return the first ``size`` bytes of ``data``, whose tag must be behind them. After one wrong tag, all are refused.

        Raises:
            ProtocolError: the tag is another one.
        """
        if self._count < 0 or not hmac.compare_digest(self.tag(data[:size]), data[size : size + TAG_SIZE]):
            self._count = -1
            raise ProtocolError(
                "what came does not carry the seal of its sender: it was changed, left out, repeated or put in on the way"
            )
        return data[:size]

    def record(self, data: bytes | memoryview) -> bytes:
        """Return a record of these bytes."""
        data = bytes(
            data
        )  # a copy: the caller's memory may change between tag and join, and the tag would be wrong
        head = _LENGTH.pack(len(data))
        return b"".join((head, self.tag(head), data, self.tag(data)))


class SealedStream(Stream):
    """A socket whose bytes are sealed. One thread reads while another writes.

    A record that the kernel took in part has begun: the next bytes that are written must begin with those of that record.

    Args:
        sock: the socket; its own operations must not block.
        key: the key of the handshake's session.
        dialled: this side has dialled.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, dialled: bool) -> None:
        dialler, acceptor = Seal(key, b"dialler"), Seal(key, b"acceptor")
        self._outgoing, self._incoming = (dialler, acceptor) if dialled else (acceptor, dialler)
        self.sock = sock
        self._begun = memoryview(b"")  # the rest of a record
        self._view = memoryview(bytearray(4 * RECORD))
        self._start = self._end = 0  # of what has come
        self._length = -1  # of the record whose head was checked
        self._checked = memoryview(b"")  # bytes that were checked and not read
        self.pending = False

    def recvmsg_into(
        self, buffers: Sequence[memoryview], ancillary: int = 0, flags: int = 0, /
    ) -> tuple[int]:
        """Read into several buffers what is there; (0,) at the end.

        Raises:
            ProtocolError: bytes are not those that were sent.
        """
        total = 0
        self.pending = False
        for buffer in buffers:
            at = 0
            while at < len(buffer):
                try:
                    if not self._checked and not self._check_more(flags):
                        return (total,)
                except BlockingIOError:
                    if total:
                        return (total,)
                    raise
                part = self._checked[: len(buffer) - at]
                buffer[at : at + len(part)] = part
                self._checked = self._checked[len(part) :]
                at += len(part)
                total += len(part)
        self.pending = bool(self._checked) or self._end > self._start
        return (total,)

    def _check_more(self, flags: int) -> bool:
        """Check the next record; False at the end of the stream."""
        view = self._view
        while True:
            here = self._end - self._start
            if self._length < 0 and here >= HEAD_SIZE:
                (length,) = _LENGTH.unpack(self._incoming.check(view[self._start :], _LENGTH.size))
                if not 0 < length <= RECORD:
                    raise ProtocolError(f"a sealed record of {length} bytes")
                self._length = length
                self._start += HEAD_SIZE
            elif 0 <= self._length <= here - TAG_SIZE:
                self._checked = self._incoming.check(view[self._start :], self._length)
                self._start += self._length + TAG_SIZE
                self._length = -1
                return True
            else:
                view[:here] = bytes(view[self._start : self._end])
                self._start, self._end = 0, here
                count = self.sock.recv_into(view[here:], 0, flags)
                if not count:
                    return False
                self._end += count

    def sendmsg(self, parts: Sequence[memoryview], ancillary: Any = (), flags: int = 0, /) -> int:
        """Write what the kernel takes of several parts; return how many bytes that is."""
        total = 0
        for record in records(parts, RECORD):
            if not self._begun:
                self._begun = memoryview(self._outgoing.record(record))
            try:
                while self._begun:
                    self._begun = self._begun[self.sock.send(self._begun, flags) :]
            except BlockingIOError:
                if total:
                    return total
                raise
            total += len(record)
        return total
