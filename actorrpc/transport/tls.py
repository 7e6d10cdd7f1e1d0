"""TLS between workers: makes or loads certificates, and provides a socket with TLS that has the interface of a plain socket.

TCP connections use TLS 1.3. The handshake that proves the group's key runs inside the TLS connection, and its proofs cover a
digest of the TLS handshake (:attr:`TlsSocket.binding`): the certificates, and a message that depends on the keys of this
connection. An attacker between two TLS connections can therefore not forward the proofs. So the key alone authenticates both
sides, and a certificate proves nothing: the accepting side shows a self-signed certificate that its process has made, and the
dialler does not verify it.

If certificates of a CA are configured, both sides show and verify them in addition (with TLS 1.3, or 1.2 if allowed). With
``ACTORRPC_TLS=off``, TCP connections are not encrypted. Two workers with different settings do not connect. Unix sockets and
shared memory do not use TLS, because they do not leave the host.

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
import importlib
import logging
import os
import select
import signal
import socket
import ssl
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from actorrpc import _time
from actorrpc._exceptions import undo_on_error
from actorrpc.config import Settings
from actorrpc.errors import AuthenticationError, ConfigError, ProtocolError, RpcError, VersionError
from actorrpc.transport.stream import Stream
from actorrpc.wire.handshake import MAX_MESSAGE, Dialler, Session
from actorrpc.wire.keys import check_private_file

__all__ = ["HELLO", "AnySocket", "Tls", "TlsSocket", "authenticate", "describe"]

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
_ALERT: Final = b"\x15"  # the first byte of a TLS message that reports an error
_SAME: Final = "give all workers the same settings of TLS"
_EXPIRES_S: Final = 14 * 86400  # a certificate that expires sooner is reported
_SELF_SIGNED: Final = (
    18,
    19,
)  # OpenSSL's codes for certificates without a CA, and with an unknown CA at the end of their chain
_EXPIRED: Final = (9, 10)  # OpenSSL's codes for certificates that are not yet valid, and that have expired
_log = logging.getLogger("actorrpc.links")
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
        # The digest covers the certificates of both sides, and the "finished" message, which depends on the session's keys. A
        # side that showed no certificate counts as the empty certificate.
        theirs = _digest(self._ssl.getpeercert(True) or b"")
        parts = [theirs, self._own] if self._ssl.server_side else [self._own, theirs]
        finished = self._ssl.get_channel_binding("tls-unique")
        if not finished:
            raise ssl.SSLError("this version of OpenSSL does not identify the connection (tls-unique)")
        self.binding = hashlib.sha256(b"actorrpc tls 2\0" + b"".join(parts) + finished).digest()
        self.secured = True
        return True

    def handshake_until(self, limit: float) -> None:
        """Finish the TLS handshake before the time ``limit``.

        Raises:
            TimeoutError: the handshake has not finished in time.
            ssl.SSLError, OSError: the handshake has failed.
            _PlainTextError: the other side has answered without TLS.
        """
        first = not self._ssl.server_side
        while not self.handshake():
            # Wait for reading only: all messages of a handshake fit into the socket's send buffer, so writing never blocks.
            _wait(self._ssl.fileno(), select.POLLIN, limit - _time.now())
            if first and socket.socket.recv(self._ssl, 1, socket.MSG_PEEK) not in (HELLO, _ALERT, b""):
                raise _PlainTextError(socket.socket.recv(self._ssl, MAX_MESSAGE))
            first = False

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


def authenticate(
    sock: socket.socket,
    tls: Tls | None,
    dialler: Dialler,
    limit: float,
    whom: str,
    wait: Callable[[AnySocket], None] | None = None,
) -> tuple[AnySocket, Session]:
    """Run the dialler's side of the handshakes on a connected socket; return the socket for the session, and the session.

    Reads no bytes that follow the handshake. If it raises, the socket is closed.

    Args:
        tls: None for a connection without TLS, for example to a Unix socket.
        limit: the time at which the handshake must have finished.
        whom: describes the other side, for the errors.
        wait: called before each read of the second handshake; it may wait until bytes arrive.

    Raises:
        OSError: the connection has ended (TimeoutError: the handshake has not finished in time).
        RpcError: the handshake has failed.
    """
    used: AnySocket = sock
    try:
        if tls is None:
            return sock, _shake_hands(sock, dialler, b"", limit, wait)
        used = secured = tls.dial(sock, limit)
        return used, _shake_hands(used, dialler, secured.binding, limit, wait)
    except BaseException as error:
        used.close()
        if tls is not None and isinstance(
            error, ssl.SSLError
        ):  # also an OSError, but the connection has not ended
            raise tls.explain(error, whom) from error
        if isinstance(error, _PlainTextError):
            # The bytes may say why the other side refuses the connection. Nothing is sent without TLS.
            dialler.start()
            dialler.feed(error.data)
            raise ProtocolError(f"{whom} does not speak TLS; {describe(tls)} here: {_SAME}") from None
        raise


class _PlainTextError(Exception):
    """The other side has answered ``data`` without TLS."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def _shake_hands(
    sock: AnySocket,
    dialler: Dialler,
    binding: bytes,
    limit: float,
    wait: Callable[[AnySocket], None] | None,
) -> Session:
    data = dialler.start(binding)
    while True:
        sock.settimeout(max(0.05, limit - _time.now()))
        if data:
            sock.sendall(data)
        if dialler.done:
            return dialler.result
        data = b""
        if wait is not None:
            wait(sock)
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
    """The settings of TLS of a worker, and its certificates. Thread-safe.

    Attributes:
        has_certificates: whether the sides show certificates of a CA; otherwise, only the group's key authenticates them.
    """

    __slots__ = ("_client", "_own", "_server", "_shown", "has_certificates")

    def __init__(self, settings: Settings) -> None:
        self.has_certificates = bool(settings.tls_cert)
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, settings)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, settings)
        self._own, self._shown = (
            _digest(b""),
            b"",
        )  # of the certificates that this worker shows as client, and as server
        if self.has_certificates:
            _try_out(self._client, self._server, settings)
            self._own = self._shown = _digest(_first_certificate(str(settings.tls_cert)))

    @classmethod
    def load(cls, settings: Settings) -> Tls | None:
        """Return the settings of TLS, with the certificates that they name; None if connections are not encrypted.

        Raises:
            ConfigError: a file is missing, cannot be used or does not match the others, or a certificate is not valid now.
        """
        given = [(name, variable, getattr(settings, name)) for name, variable in _FILES]
        missing = [variable for _, variable, path in given if not path]
        if missing and len(missing) < len(given):
            raise ConfigError(
                f"TLS needs a certificate, its key and a CA; {' and '.join(missing)} is not set: set all of {_NAMES}, or none"
            )
        if not missing and not settings.tls:
            raise ConfigError(
                f"TLS is off (tls, ACTORRPC_TLS), but there are certificates: unset one of {_NAMES}"
            )
        if settings.transport == "unix" or not settings.tls:
            return None
        if not missing:
            for name, variable, path in given:
                _check_file(path, f"{name} ({variable})", private=name == "tls_key")
        return cls(settings)

    def serve(self) -> None:
        """Prepare :meth:`accept`: make the certificate that the accepting side shows, unless there is one of a CA.

        Raises:
            ConfigError: the package ``cryptography`` is missing.
        """
        if not self._shown:
            self._shown = _load_temporary(self._server)

    def dial(self, sock: socket.socket, limit: float) -> TlsSocket:
        """Perform the client's TLS handshake on a connected socket. The returned object owns the socket; on errors it is closed.

        Raises:
            TimeoutError: the handshake has not finished at the time ``limit``.
            ssl.SSLError: see :meth:`explain`.
            OSError: the connection broke.
        """
        made = TlsSocket(sock, self._client, self._own, False)
        with undo_on_error(made.close):
            made.handshake_until(limit)
        return made

    def accept(self, sock: socket.socket) -> TlsSocket:
        """Return the server's end on an accepted socket. The caller performs the handshake by :meth:`TlsSocket.handshake`."""
        return TlsSocket(sock, self._server, self._shown, True)

    def explain(self, error: ssl.SSLError, whom: str) -> RpcError:
        """Return an error of this package that explains a TLS error.

        Args:
            whom: describes the other side, for the message.

        Returns:
            AuthenticationError for certificates, VersionError if there is no common version, otherwise ProtocolError.
        """
        own = f"this worker has {describe(self)}: {_SAME}"
        if isinstance(error, ssl.SSLCertVerificationError):
            why = error.verify_message
            if error.verify_code in _EXPIRED:
                advice = "renew it, or set the clocks right"
            elif error.verify_code in _SELF_SIGNED:
                advice = f"it has another CA, or no certificates; {own}"
            else:
                advice = own
            return AuthenticationError(f"the certificate of {whom} is refused: {why}; {advice}")
        reason = (error.reason or str(error) or type(error).__name__).replace("_", " ").lower()
        if "certificate" in reason or "unknown ca" in reason or "decrypt error" in reason:
            return AuthenticationError(
                f"{whom} refuses the certificate of this worker, or one side has no certificate: {reason}; {own}"
            )
        if "protocol version" in reason or "unsupported protocol" in reason:
            return VersionError(
                f"{whom} and this worker speak no common version of TLS: {reason}; give all the same tls_min_version "
                "(ACTORRPC_TLS_MIN_VERSION)"
            )
        return ProtocolError(f"the TLS handshake with {whom} failed: {reason}; {own}")


def describe(tls: Tls | None) -> str:
    """Return the settings of TLS of a worker, for messages: ``ACTORRPC_TLS=on``."""
    if tls is None:
        return "ACTORRPC_TLS=off"
    return f"certificates ({_FILES[0][1]})" if tls.has_certificates else "ACTORRPC_TLS=on, no certificates"


def _load_temporary(context: ssl.SSLContext) -> bytes:
    """Make a self-signed certificate for this process, load it into a context, and return its digest."""
    try:
        der, pem = importlib.import_module("actorrpc.transport.certificate").make()
    except ImportError as error:
        raise ConfigError(
            "TCP connections are encrypted, which needs the package cryptography: pip install cryptography. On a network whose "
            f"traffic nobody else can read or change, ACTORRPC_TLS=off is possible ({error})"
        ) from error
    with open(
        os.memfd_create("actorrpc", os.MFD_CLOEXEC), "wb"
    ) as file:  # the private key is not written to a disk
        file.write(pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return _digest(der)


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
    context.verify_mode = ssl.CERT_REQUIRED if settings.tls_cert else ssl.CERT_NONE
    context.minimum_version = _VERSIONS[settings.tls_min_version if settings.tls_cert else "1.3"]
    # Accept an end of file without close_notify, as plain sockets do: the frame reader notices a truncated frame.
    context.options |= (
        ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET | ssl.OP_IGNORE_UNEXPECTED_EOF
    )
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no session resumption: each connection makes a full handshake
    context.set_ciphers(_SUITES)
    if not settings.tls_cert:
        return context
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
    """Perform a TLS handshake in memory between both contexts: other workers would refuse a certificate that fails here.

    Logs a warning if the certificate expires soon.
    """
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
    shown = ends[0].getpeercert()
    assert shown is not None
    until = str(shown["notAfter"])
    if ssl.cert_time_to_seconds(until) - time.time() < _EXPIRES_S:
        _log.warning(
            "the certificate %r expires on %s: renew it, and restart the workers", settings.tls_cert, until
        )


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
