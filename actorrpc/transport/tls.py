"""TLS between workers: loads and checks certificates, and provides a socket with TLS that has the interface of a plain socket.

If certificates are configured, TCP connections use TLS 1.3 (or 1.2, if allowed) with certificates on both sides; a side without
certificates is refused. The handshake that proves the group's key runs inside the TLS connection. Its proofs cover a digest of
the TLS handshake (:attr:`TlsSocket.binding`). An attacker between two TLS connections can therefore not forward the proofs, even
with a valid certificate. Unix sockets and shared memory do not use TLS, because they do not leave the host.

OpenSSL may have decrypted bytes that were not read yet. A poll of the socket does not report these bytes;
:attr:`TlsSocket.pending` says whether there are any.

``TlsSocket._lock`` guards ``pending`` and the SSL object, which only one thread may use at a time. The socket is closed under the
lock as well, if the lock is free within 1 s. A thread holds the lock for one attempt to read or write, which does not block, and
takes no other lock meanwhile.

OpenSSL writes without ``MSG_NOSIGNAL``, and may write alerts even when it reads. If the program does not ignore SIGPIPE, the
signal is blocked during reads and writes.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import select
import signal
import socket
import ssl
import termios
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from actorrpc import _time
from actorrpc._exceptions import undo_on_error
from actorrpc.config import Settings
from actorrpc.errors import AuthenticationError, ConfigError, ProtocolError, RpcError, VersionError
from actorrpc.transport.stream import Stream
from actorrpc.wire.handshake import Dialler, Session
from actorrpc.wire.keys import check_private_file

__all__ = ["HELLO", "AnySocket", "Tls", "TlsSocket", "explain", "shake_hands"]

HELLO: Final = b"\x16"
"""The first byte of a TLS connection. Connections without TLS begin with another byte."""
_RECORD: Final = 16 << 10  # the most bytes of data in one TLS record
_SUITES: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"  # for TLS 1.2; all suites of 1.3 are allowed
_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_FILES: Final = (
    ("tls_cert", "ACTORRPC_TLS_CERT"),
    ("tls_key", "ACTORRPC_TLS_KEY"),
    ("tls_ca", "ACTORRPC_TLS_CA"),
)
_NAMES: Final = ", ".join(variable for _, variable in _FILES)
_ALL_OR_NONE: Final = f"start all workers with certificates of one CA ({_NAMES}), or all without"
_EXPIRED: Final = (9, 10)  # OpenSSL's codes for certificates that are not yet valid, and that have expired
_CLOSE_S: Final = 1.0  # how long close() waits for another thread's read or write, which is shorter
_SIGPIPE: Final = signal.SIGPIPE
# signal.getsignal without the conversion of its result to an enum, which takes most of the time.
_disposition: Final[Callable[[int], Any]] = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _unsignalled(
    method: Callable[Concatenate[TlsSocket, _P], _T],
) -> Callable[Concatenate[TlsSocket, _P], _T]:
    """Block SIGPIPE during a method: the signal would kill a process that has restored the signal's default action."""

    @functools.wraps(method)
    def called(self: TlsSocket, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if _disposition(_SIGPIPE) == signal.SIG_IGN:  # Python's default
            return method(self, *args, **kwargs)
        pending = _SIGPIPE in signal.sigpending()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (_SIGPIPE,))
        try:
            return method(self, *args, **kwargs)
        finally:
            if not pending:
                signal.sigtimedwait((_SIGPIPE,), 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return called


class TlsSocket(Stream):
    """A connected TCP socket with TLS. Thread-safe: one thread may read while another writes.

    ``recv_into``, ``recvmsg_into``, ``send`` and ``sendmsg`` never block, whatever flags are passed; ``recv`` and ``sendall``
    wait for at most the time-out. All raise the exceptions of sockets: BlockingIOError, and OSError (``ssl.SSLError`` is a
    subclass) when the connection has failed.

    Attributes:
        secured: whether the TLS handshake has finished.
        binding: a digest of the TLS handshake, which differs for every connection; empty until :attr:`secured`.
    """

    __slots__ = (
        "_count",
        "_error",
        "_lock",
        "_own",
        "_pid",
        "_ssl",
        "_timeout",
        "binding",
        "pending",
        "secured",
    )

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, own: bytes, server: bool) -> None:
        self._timeout = sock.gettimeout()
        sock.setblocking(False)
        # The handshakes exchange several small messages. Without TCP_NODELAY, each would wait for an acknowledgement.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._ssl = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
        except OSError as error:
            _close_half_made(error)
            raise
        self._own = own
        self._pid = os.getpid()
        self._lock = _time.Lock()
        self._count = array.array("i", [0])
        self._error: OSError | None = None
        self.pending = False
        self.binding = b""
        self.secured = False

    # -- the handshake -------------------------------------------------------------------------------

    @_unsignalled
    def handshake(self) -> bool:
        """Continue the TLS handshake without blocking; return whether it has finished.

        Raises:
            ssl.SSLError, OSError: the handshake has failed.
        """
        with self._lock:
            if self._ssl.fileno() < 0:
                raise _closed()
            return self._handshake()

    def _handshake(self) -> bool:
        try:
            self._ssl.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            # Not an SSLError, because the connection was closed, and the caller may try again.
            raise ConnectionResetError(errno.ECONNRESET, "closed during the handshake of TLS") from None
        theirs = self._ssl.getpeercert(True)
        if theirs is None:  # impossible with CERT_REQUIRED, which the contexts set
            raise ssl.SSLError("the other side has shown no certificate")
        # The digest covers the certificates of both sides, and the "finished" message, which depends on the session's keys.
        parts = [_digest(theirs), self._own] if self._ssl.server_side else [self._own, _digest(theirs)]
        parts.append(self._ssl.get_channel_binding("tls-unique") or b"")
        self.binding = hashlib.sha256(b"actorrpc tls 1\0" + b"".join(parts)).digest()
        self.secured = True
        return True

    def handshake_until(self, limit: float) -> None:
        """Finish the TLS handshake before the time ``limit``.

        Raises:
            TimeoutError: the handshake has not finished in time.
            ssl.SSLError, OSError: the handshake has failed.
        """
        while not self.handshake():
            # Wait for reading only: all messages of a handshake fit into the socket's send buffer, so writing never blocks.
            _wait(self._ssl.fileno(), select.POLLIN, limit - _time.now())

    # -- reading -------------------------------------------------------------------------------------

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0, /) -> int:
        """Read available bytes without blocking; 0 at the end of the stream."""
        count: int = self.recvmsg_into((buffer[:size] if size else buffer,))[0]
        return count

    @_unsignalled
    def recvmsg_into(self, buffers: Sequence[memoryview], *_: int) -> Any:
        """Read available bytes into several buffers without blocking; (0,) at the end of the stream."""
        total = 0
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                for buffer in buffers:
                    count = self._read(buffer)
                    total += count
                    if count < len(buffer):
                        break
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not total:
                    self.pending = False
                    raise BlockingIOError from None
            except ValueError:
                raise _closed() from None
            except OSError as error:
                if not total:
                    raise
                self._error = error
            self.pending = self._error is not None or self._ssl.pending() > 0
        return (total,)

    def _read(self, buffer: memoryview) -> int:
        """Read available records, as far as the buffer has room. Under the lock."""
        got, size, read = 0, len(buffer), self._ssl.read
        while True:
            try:
                count = int(read(size - got, buffer[got:] if got else buffer))
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not got:
                    raise
                return got
            except OSError as error:
                if not got:
                    raise
                self._error = error  # the next read raises it
                return got
            if not count:  # the end of the TLS stream
                return got
            got += count
            # OpenSSL returns at most one record. After a full record, another record is likely. After a shorter record, FIONREAD
            # tells whether there are more bytes. All available bytes are read together, as from a plain socket, so that the
            # reader sees a call and its cancellation at once.
            if got == size or (count < _RECORD and not self._has_more()):
                return got

    def _has_more(self) -> bool:
        """Return whether the kernel has received bytes. Cheaper than an attempt to read."""
        fcntl.ioctl(self._ssl.fileno(), termios.FIONREAD, self._count)
        return self._count[0] > 0

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

    # After a write would have blocked, OpenSSL requires that the next write has the same bytes and the same length. The
    # connection sends the rest of a message before anything else, and ``_records`` divides the same bytes into the same records.

    @_unsignalled
    def send(self, data: bytes, flags: int = 0, /) -> int:
        """Write as much as the kernel accepts; return the number of bytes."""
        if len(data) > _RECORD:
            return self.sendmsg((memoryview(data),))
        try:
            with self._lock:
                count: int = self._ssl.write(data)
                return count
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            raise BlockingIOError from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise _broken() from None
        except ValueError:
            raise _closed() from None

    @_unsignalled
    def sendmsg(self, parts: Sequence[memoryview], *_: Any) -> int:
        """Write as much of several buffers as the kernel accepts; return the number of bytes."""
        total = 0
        with self._lock:
            write = self._ssl.write
            try:
                for record in _records(parts):
                    total += write(record)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                if not total:
                    raise BlockingIOError from None
            except ValueError:
                raise _closed() from None
            except OSError as error:
                if not total:
                    ended = isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
                    raise (_broken() if ended else error) from None
                # Return how many bytes were written; the next write raises the error again.
        return total

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
        _wait(self._ssl.fileno(), events, None if limit is None else limit - _time.now())

    @property
    def sock(self) -> ssl.SSLSocket:  # type: ignore[override]
        """The socket, to poll and to set options."""
        return self._ssl

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 if it is closed."""
        return self._ssl.fileno()

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
        # Not SSLSocket.shutdown, which would also remove the TLS layer.
        socket.socket.shutdown(self._ssl, how)

    def discard(self) -> bool:
        """Read and discard bytes after a failed handshake; return whether there may be more. Never blocks."""
        try:
            return bool(socket.socket.recv(self._ssl, 4096))
        except BlockingIOError:
            return True

    def close(self) -> None:
        """Close the descriptors. Sends nothing to the other side, so that a forked child can call it."""
        # Wait until no other thread writes: OpenSSL would continue to write to the descriptor's number, which may then belong to
        # another socket. In a forked child, a thread that does not exist there may hold the lock, so the lock is not taken.
        held = os.getpid() == self._pid and self._lock.acquire(timeout=_CLOSE_S)
        try:
            self._ssl.close()
        finally:
            if held:
                self._lock.release()


AnySocket = socket.socket | TlsSocket
"""A socket on which a handshake runs."""


def shake_hands(
    sock: AnySocket, dialler: Dialler, limit: float, wait: Callable[[], None] | None = None
) -> Session:
    """Run the dialler's side of a handshake; return the session. Reads no bytes that follow the handshake.

    Args:
        limit: the time at which the handshake must have finished.
        wait: called before each read; it may wait until bytes arrive.

    Raises:
        OSError: the connection has ended (TimeoutError: the handshake has not finished in time).
        RpcError: the handshake has failed.
    """
    data = dialler.start()
    while True:
        sock.settimeout(max(0.05, limit - _time.now()))
        if data:
            sock.sendall(data)
        if dialler.done:
            return dialler.result
        data = b""
        if wait is not None:
            wait()
        sock.settimeout(max(0.05, _time.patience(limit - _time.now())))
        try:
            received = sock.recv(dialler.wanted)
        except TimeoutError:
            if _time.now() < limit:
                continue
            raise
        if not received:
            raise ConnectionResetError(errno.ECONNRESET, "closed during the handshake")
        data = dialler.feed(received)


def _records(parts: Sequence[memoryview]) -> Any:
    """Divide buffers into pieces of one TLS record each. Only pieces that span several buffers are copied."""
    held: list[memoryview] = []
    room = _RECORD
    for part in parts:
        at, size = 0, len(part)
        while at < size:
            piece = part[at : at + room]
            at += len(piece)
            room -= len(piece)
            held.append(piece)
            if not room:
                yield held[0] if len(held) == 1 else b"".join(held)
                held, room = [], _RECORD
    if held:
        yield held[0] if len(held) == 1 else b"".join(held)


def _wait(fd: int, events: int, seconds: float | None) -> None:
    """Wait for a descriptor.

    Raises:
        TimeoutError: nothing happened in time.
    """
    poller = _time.poll()
    poller.register(fd, events)
    if (seconds is not None and seconds <= 0) or not poller.poll(None if seconds is None else seconds * 1e3):
        raise TimeoutError("timed out")


def _broken() -> OSError:
    """Return the error that a plain socket raises after the other side has closed; OpenSSL raises an SSLError instead."""
    return BrokenPipeError(errno.EPIPE, "the other side has closed")


def _closed() -> OSError:
    """Return the error that a plain socket raises after this side has closed it."""
    return OSError(errno.EBADF, "closed")


def _digest(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


# -- certificates ------------------------------------------------------------------------------------


class Tls:
    """The certificates of a worker, loaded and checked. Immutable."""

    __slots__ = ("_client", "_own", "_server")

    def __init__(self, client: ssl.SSLContext, server: ssl.SSLContext, own: bytes) -> None:
        self._client, self._server, self._own = client, server, own

    @classmethod
    def load(cls, settings: Settings) -> Tls | None:
        """Load the certificates in the settings; None if no certificates are set, or if only Unix sockets are used.

        Raises:
            ConfigError: a file is missing, cannot be used or does not match the others, or a certificate is not valid now.
        """
        given = [(name, variable, getattr(settings, name)) for name, variable in _FILES]
        missing = [variable for _, variable, path in given if not path]
        if len(missing) == len(given):
            return None
        if missing:
            raise ConfigError(
                f"TLS needs a certificate, its key and a CA; {' and '.join(missing)} is not set: set all of {_NAMES}, or none"
            )
        if settings.transport == "unix":
            return None
        for name, variable, path in given:
            _check_file(path, f"{name} ({variable})", private=name == "tls_key")
        client = _context(ssl.PROTOCOL_TLS_CLIENT, settings)
        server = _context(ssl.PROTOCOL_TLS_SERVER, settings)
        _try_out(client, server, settings)
        return cls(client, server, _digest(_first_certificate(str(settings.tls_cert))))

    def dial(self, sock: socket.socket, limit: float) -> TlsSocket:
        """Perform the client's TLS handshake on a connected socket. The returned object owns the socket; on errors it is closed.

        Raises:
            TimeoutError: the handshake has not finished at the time ``limit``.
            ssl.SSLError: see :func:`explain`.
            OSError: the connection broke.
        """
        made = TlsSocket(sock, self._client, self._own, False)
        with undo_on_error(made.close):
            made.handshake_until(limit)
        return made

    def accept(self, sock: socket.socket) -> TlsSocket:
        """Return the server's end on an accepted socket. The caller performs the handshake by :meth:`TlsSocket.handshake`."""
        return TlsSocket(sock, self._server, self._own, True)


def _close_half_made(error: OSError) -> None:
    """Close the socket that a failed ``wrap_socket`` has created.

    If the other side has reset the connection, CPython 3.11 leaves this new socket open, and only the frames of the error's
    traceback refer to the socket.
    """
    trace = error.__traceback__
    while trace is not None:
        made = trace.tb_frame.f_locals.get("self")
        if isinstance(made, ssl.SSLSocket):
            made.close()
        trace = trace.tb_next


def explain(error: ssl.SSLError, whom: str) -> RpcError:
    """Return an error of this package that explains a TLS error.

    Args:
        whom: describes the other side, for the message.

    Returns:
        AuthenticationError for certificates, VersionError if there is no common version, otherwise ProtocolError.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _EXPIRED:
            return AuthenticationError(
                f"the certificate of {whom} is refused: {error.verify_message}; renew it, or set the clocks right"
            )
        return AuthenticationError(
            f"the certificate of {whom} is refused: {error.verify_message}; {_ALL_OR_NONE}"
        )
    reason = (error.reason or str(error) or type(error).__name__).replace("_", " ").lower()
    if "certificate" in reason or "unknown ca" in reason or "decrypt error" in reason:
        return AuthenticationError(
            f"{whom} refuses the certificate of this worker, or shows none: {reason}; {_ALL_OR_NONE}"
        )
    if "protocol version" in reason or "unsupported protocol" in reason:
        return VersionError(
            f"{whom} and this worker speak no common version of TLS: {reason}; give all the same tls_min_version "
            "(ACTORRPC_TLS_MIN_VERSION)"
        )
    return ProtocolError(
        f"{whom} does not speak TLS, or the TLS handshake with it failed: {reason}; {_ALL_OR_NONE}"
    )


def _check_file(path: str, what: str, private: bool) -> None:
    if private:
        check_private_file(path, what)
        return
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigError(f"{what} {path!r} cannot be read: {error.strerror}") from error


def _no_password(*_: Any) -> str:
    return ""  # without this function, OpenSSL would ask for a password on the terminal


def _context(protocol: int, settings: Settings) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    # Workers may move between hosts, so a worker is identified by the CA and the group's key, and not by a host name.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = _VERSIONS[settings.tls_min_version]
    # Accept an end of file without close_notify, as plain sockets do: the frame reader notices a truncated frame.
    context.options |= (
        ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET | ssl.OP_IGNORE_UNEXPECTED_EOF
    )
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no session resumption: each connection makes a full handshake
    context.set_ciphers(_SUITES)
    try:
        context.load_verify_locations(cafile=settings.tls_ca)
    except OSError as error:
        raise ConfigError(
            f"tls_ca (ACTORRPC_TLS_CA) {settings.tls_ca!r} has no certificate of a CA: {_reason(error)}"
        ) from None
    try:
        context.load_cert_chain(str(settings.tls_cert), settings.tls_key, _no_password)
    except OSError as error:
        raise ConfigError(
            f"tls_cert (ACTORRPC_TLS_CERT) {settings.tls_cert!r} and tls_key (ACTORRPC_TLS_KEY) {settings.tls_key!r} are no "
            f"certificate and its key, without a password: {_reason(error)}"
        ) from None
    return context


def _try_out(client: ssl.SSLContext, server: ssl.SSLContext, settings: Settings) -> None:
    """Perform a TLS handshake in memory between both contexts: other workers would refuse a certificate that fails here."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
    for _ in range(4):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                try:
                    end.do_handshake()
                except ssl.SSLError as error:
                    if isinstance(error, ssl.SSLWantReadError):
                        raise
                    raise ConfigError(
                        f"tls_cert (ACTORRPC_TLS_CERT) {settings.tls_cert!r} is of no use with tls_ca (ACTORRPC_TLS_CA) "
                        f"{settings.tls_ca!r}: {_reason(error)}. It must be valid now, be signed by that CA, and be meant for "
                        "servers and clients"
                    ) from None


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else (error.strerror or str(error))


def _first_certificate(path: str) -> bytes:
    with open(path, encoding="ascii", errors="replace") as file:
        text = file.read()
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    found = text[text.index(begin) : text.index(end) + len(end)]
    return ssl.PEM_cert_to_DER_cert(found)
