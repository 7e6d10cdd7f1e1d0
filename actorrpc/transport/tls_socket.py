"""A TCP socket with TLS that has the interface of a plain socket.

OpenSSL reads from and writes to buffers in memory, and this module moves the encrypted bytes between these buffers and the
socket. So several records of 16 KiB are sent and received with one system call. The buffers may contain received bytes that no
method has returned yet. A poll of the socket does not report such bytes, so a reader must also check :attr:`TlsSocket.pending`.

``TlsSocket._lock`` guards the SSL object, which only one thread may use at a time, and the attributes. A thread holds the lock
for one attempt to read or write, which does not block, and takes no other lock meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import select
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Any, Final

from actorrpc import _time
from actorrpc.transport.stream import Stream

__all__ = ["HELLO", "PlainTextError", "TlsSocket"]

HELLO: Final = b"\x16"
"""The first byte of a TLS connection. Connections without TLS begin with another byte."""
_ALERT: Final = b"\x15"  # the first byte of a TLS message that reports an error
_RECORD: Final = 16 << 10  # the most bytes of data in one TLS record
_BATCH: Final = 4 * _RECORD  # the most bytes of data that are encrypted for one system call
_READ: Final = 64 << 10  # the most bytes that one system call receives
_NO_SIGNAL: Final = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT


class PlainTextError(Exception):
    """The other side has answered the first message of TLS with ``data``, which is not TLS."""

    def __init__(self, data: bytes) -> None:
        super().__init__("the other side does not speak TLS")
        self.data = data


class TlsSocket(Stream):
    """A connected TCP socket with TLS. Thread-safe: one thread may read while another writes.

    ``recv_into``, ``recvmsg_into``, ``send`` and ``sendmsg`` never block, whatever flags are passed; ``recv`` and ``sendall``
    wait for at most the time-out. All raise the exceptions of sockets: BlockingIOError, and OSError (``ssl.SSLError`` is a
    subclass) when the connection has failed. If a write raises BlockingIOError, the next write
    must begin with the same bytes; if it writes only a part of its data, the next write must begin with the rest.

    Args:
        own: the digest of the certificate that this side shows, or of no bytes.

    Attributes:
        secured: whether the TLS handshake has finished.
        binding: a digest of the TLS handshake, which differs for every connection; empty until :attr:`secured`.
    """

    # RFC 8446, section 5.5: the keys of a connection should encrypt at most 2^24.5 full records with AES-GCM.
    capacity = float(_RECORD << 24)

    __slots__ = (
        "_encrypted",
        "_error",
        "_in",
        "_lock",
        "_out",
        "_own",
        "_rest",
        "_ssl",
        "_timeout",
        "binding",
        "pending",
        "secured",
        "sock",
    )

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, own: bytes, server: bool) -> None:
        self._timeout = sock.gettimeout()
        sock.setblocking(False)
        # The handshakes exchange several small messages. Without TCP_NODELAY, each would wait for an acknowledgement.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._in, self._out, server)
        self._own = own
        self._lock = _time.Lock()
        self._rest = b""  # encrypted bytes that the kernel has not accepted yet
        # The size of the caller's data whose encrypted form is in ``_rest``. No write has counted this data as written, so the
        # caller passes the data again; sendmsg() sends ``_rest``, and then skips this data.
        self._encrypted = 0
        self._error: OSError | None = None
        self.pending = False
        self.binding = b""
        self.secured = False

    # -- the handshake -------------------------------------------------------------------------------

    def handshake(self) -> bool:
        """Continue the TLS handshake without blocking; return whether it has finished.

        Raises:
            ssl.SSLError, OSError: the handshake has failed.
            PlainTextError: the other side, which accepted the connection, does not speak TLS.
        """
        with self._lock:
            while not self._continue():
                try:
                    data = self.sock.recv(_READ)
                except BlockingIOError:
                    return False
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, "closed during the handshake of TLS")
                if not (self.pending or self._ssl.server_side or data[:1] in (HELLO, _ALERT)):
                    raise PlainTextError(data)
                self._in.write(data)
                self.pending = True
            # The digest covers the certificates of both sides, and the "finished" message, which depends on the session's keys. A
            # side that showed no certificate counts as the empty certificate.
            theirs = hashlib.sha256(self._ssl.getpeercert(True) or b"").digest()
            parts = [theirs, self._own] if self._ssl.server_side else [self._own, theirs]
            finished = self._ssl.get_channel_binding("tls-unique")
            if not finished:
                raise ssl.SSLError("this version of OpenSSL does not identify the connection (tls-unique)")
            self.binding = hashlib.sha256(b"actorrpc tls 2\0" + b"".join(parts) + finished).digest()
            self.secured = True
            return True

    def _continue(self) -> bool:
        done = False
        try:
            self._ssl.do_handshake()
            done = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            with contextlib.suppress(OSError):  # the alert; the error of the handshake says more
                self._flush()
            raise
        self._flush()  # all messages of a handshake fit into the socket's send buffer
        return done

    def handshake_until(self, limit: float) -> None:
        """Finish the TLS handshake before the time ``limit``.

        Raises:
            TimeoutError: the handshake has not finished in time.
            ssl.SSLError, OSError, PlainTextError: the handshake has failed.
        """
        while not self.handshake():
            _wait(self.sock, select.POLLIN, limit)

    # -- reading -------------------------------------------------------------------------------------

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0, /) -> int:
        """Read available bytes without blocking; 0 at the end of the stream."""
        with self._lock:
            return self._read(buffer[:size] if size else buffer)

    def recvmsg_into(self, buffers: Sequence[memoryview], *_: int) -> Any:
        """Read available bytes into several buffers without blocking; (0,) at the end of the stream."""
        total = 0
        with self._lock:
            try:
                for buffer in buffers:
                    count = self._read(buffer)
                    total += count
                    if count < len(buffer):
                        break
            except OSError as error:
                if not total:
                    raise
                if not isinstance(error, BlockingIOError):
                    self._error = error  # the next read raises it
        return (total,)

    def _read(self, buffer: memoryview) -> int:
        """Read available bytes until the buffer is full or the socket is empty; return their number. Under the lock.

        If an error follows bytes that were read, return the bytes; the next read raises the error.
        """
        if self._error is not None:
            raise self._error
        got, size, read, incoming = 0, len(buffer), self._ssl.read, self._in
        is_last = False  # whether the last recv() has emptied the kernel's buffer
        before = -1  # the value of ``got`` at the last recv()
        try:
            while True:
                if not self.pending:
                    # A peer may send TLS messages without data (new keys, tickets) without end. Therefore return after a recv()
                    # that has brought no data, so that the caller can check its time limit.
                    if is_last or got == before:
                        if not got:
                            raise BlockingIOError
                        return got
                    before = got
                    data = self.sock.recv(_READ)
                    is_last = len(data) < _READ
                    if data:
                        incoming.write(data)
                    else:
                        incoming.write_eof()
                    self.pending = True
                try:
                    count = int(read(size - got, buffer[got:] if got else buffer))
                except ssl.SSLWantReadError:
                    self.pending = False
                    continue
                if not count:  # the end of the TLS stream
                    return got
                got += count
                if got == size:
                    self.pending = incoming.pending > 0 or self._ssl.pending() > 0
                    return got
                self.pending = incoming.pending > 0
        except OSError as error:
            if not got:
                raise
            if not isinstance(error, BlockingIOError):
                self._error = error
            return got

    def recv(self, size: int) -> bytes:
        """Read up to ``size`` bytes, waiting for at most the time-out; empty at the end of the stream."""
        buffer = memoryview(bytearray(size))
        limit = None if self._timeout is None else _time.now() + self._timeout
        while True:
            try:
                return bytes(buffer[: self.recv_into(buffer)])
            except BlockingIOError:
                self._wait(select.POLLIN, limit)

    # -- writing -------------------------------------------------------------------------------------

    def send(self, data: bytes, flags: int = 0, /) -> int:
        """Write as much as the kernel accepts; return the number of bytes."""
        if len(data) > _RECORD or self._rest:
            return self.sendmsg((memoryview(data),))
        with self._lock:
            self._ssl.write(data)
            if not self._flush():
                self._encrypted = len(data)
                raise BlockingIOError
        return len(data)

    def sendmsg(self, parts: Sequence[memoryview], *_: Any) -> int:
        """Write as much of several buffers as the kernel accepts; return the number of bytes."""
        with self._lock:
            if not self._flush():
                raise BlockingIOError
            total, self._encrypted = self._encrypted, 0
            try:
                for batch in _batches(parts, total):
                    size = sum(map(self._ssl.write, batch))
                    if not self._flush():
                        self._encrypted = size
                        break
                    total += size
            except OSError:
                if not total:
                    raise
                # The connection has failed after some bytes were sent. Return their number; the next write fails by itself.
        if not total and self._rest:
            raise BlockingIOError
        return total

    def _flush(self) -> bool:
        """Send the encrypted bytes; return whether the kernel has accepted all. Under the lock."""
        rest = self._rest or self._out.read()
        try:
            while rest:
                rest = rest[self.sock.send(rest, _NO_SIGNAL) :]
        except BlockingIOError:
            pass
        finally:
            self._rest = rest
        return not rest

    def sendall(self, data: bytes) -> None:
        """Write all bytes, waiting for at most the time-out."""
        left = memoryview(data)
        limit = None if self._timeout is None else _time.now() + self._timeout
        while left:
            try:
                left = left[self.sendmsg((left,)) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, limit)

    # -- other methods of sockets ----------------------------------------------------------------------

    def _wait(self, events: int, limit: float | None) -> None:
        if self._timeout == 0:
            raise BlockingIOError
        _wait(self.sock, events, limit)

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 if it is closed."""
        return self.sock.fileno()

    def setblocking(self, flag: bool) -> None:
        """Set the time-out to None (``flag`` is true) or 0."""
        self._timeout = None if flag else 0.0

    def settimeout(self, seconds: float | None) -> None:
        """Set the time-out, in seconds; None: wait without limit."""
        self._timeout = seconds

    def version(self) -> str:
        """Return the negotiated version of TLS, such as ``TLSv1.3``."""
        return self._ssl.version() or ""

    def shutdown(self, how: int, /) -> None:
        """Shut down the socket, without sending close_notify of TLS: workers send GOODBYE instead."""
        self.sock.shutdown(how)

    def discard(self) -> bool:
        """Read and discard bytes after a failed handshake; return whether there may be more. Never blocks."""
        try:
            return bool(self.sock.recv(4096))
        except BlockingIOError:
            return True

    def close(self) -> None:
        """Close the descriptor, without sending close_notify of TLS, so that a forked child can call it."""
        self.sock.close()


def _batches(parts: Sequence[memoryview], skip: int) -> Iterator[list[Any]]:
    """Divide buffers, without their first ``skip`` bytes, into lists of pieces that are at most one TLS record each.

    A piece that spans several buffers is copied.
    """
    batch: list[Any] = []
    held: list[memoryview] = []  # parts of the next piece
    room = _RECORD
    for part in parts:
        at, size = skip, len(part)
        while at < size:
            piece = part[at : at + room]
            at += len(piece)
            room -= len(piece)
            held.append(piece)
            if not room:
                batch.append(held[0] if len(held) == 1 else b"".join(held))
                held, room = [], _RECORD
                if len(batch) * _RECORD == _BATCH:
                    yield batch
                    batch = []
        skip = at - size
    if held:
        batch.append(held[0] if len(held) == 1 else b"".join(held))
    if batch:
        yield batch


def _wait(sock: socket.socket, events: int, limit: float | None) -> None:
    """Wait for a socket.

    Raises:
        TimeoutError: nothing has happened at the time ``limit``.
    """
    poller = _time.poll()
    poller.register(sock.fileno(), events)
    while True:
        remaining = None if limit is None else limit - _time.now()
        if remaining is not None and remaining <= 0:
            raise TimeoutError("timed out")
        if poller.poll(None if remaining is None else 1e3 * _time.patience(remaining)):
            return
