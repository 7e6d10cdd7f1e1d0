"""TLS between workers: certificates, which are checked at the start, and a stream that speaks TLS.

With certificates set, TCP connections speak TLS 1.3 (or 1.2, if allowed), with certificates on both sides. The handshake that
proves the group's key runs inside, and its proofs cover what both sides saw of the TLS connection (:attr:`TlsSocket.binding`).
So a process between two TLS connections cannot pass the proofs on, whatever certificate it has. Unix sockets and shared memory
stay as they are: they do not leave the host.

``TlsSocket._lock`` guards the SSL object, which two threads must not use at once, and ``pending``; the socket is closed under
it. It is a leaf, and held for one attempt to read or write at a time: nothing blocks under it.

OpenSSL writes without ``MSG_NOSIGNAL``, also when it reads (alerts). If the program does not ignore SIGPIPE, the signal is
blocked meanwhile.
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
from actorrpc._undo import undo_on_error
from actorrpc.config import Settings
from actorrpc.errors import AuthenticationError, ConfigError, ProtocolError, RpcError, VersionError
from actorrpc.transport.stream import SocketStream, Stream, receive_exactly, records, send_all, wait_for
from actorrpc.wire.handshake import Dialler, Session
from actorrpc.wire.keys import check_private_file

__all__ = ["HELLO", "Tls", "TlsSocket", "connect", "explain", "shake_hands"]

HELLO: Final = b"\x16"
"""The first byte of a TLS connection, and of no other message that workers send."""
_RECORD: Final = 16 << 10  # the most that one record of TLS carries
_SUITES: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; all suites of 1.3 are allowed
_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_FILES: Final = (
    ("tls_cert", "ACTORRPC_TLS_CERT"),
    ("tls_key", "ACTORRPC_TLS_KEY"),
    ("tls_ca", "ACTORRPC_TLS_CA"),
)
_NAMES: Final = ", ".join(variable for _, variable in _FILES)
_ALL_OR_NONE: Final = f"start all workers with certificates of one CA ({_NAMES}), or all without"
_EXPIRED: Final = (9, 10)  # OpenSSL's numbers: not valid yet, expired
_CLOSE_S: Final = 1.0  # how long closing waits for a read or write to end: more than one takes
_SIGPIPE: Final = signal.SIGPIPE
# signal.getsignal without the wrapper that makes an enum of the result, which takes longer than the rest.
_disposition: Final[Callable[[int], Any]] = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _unsignalled(
    method: Callable[Concatenate[TlsSocket, _P], _T],
) -> Callable[Concatenate[TlsSocket, _P], _T]:
    """Block SIGPIPE while the method runs, unless it is ignored: its default action ends the process."""

    @functools.wraps(method)
    def called(self: TlsSocket, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if _disposition(_SIGPIPE) == signal.SIG_IGN:  # as Python sets it
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
    """A connected TCP socket with TLS on it. Thread-safe: one thread reads while another writes.

    Nothing blocks, whatever the flags are. Errors are those of sockets; ``ssl.SSLError`` is an OSError.

    Attributes:
        secured: the handshake of TLS is over.
        binding: a digest that only the two ends of this connection know; empty until it is :attr:`secured`.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, own: bytes, server: bool) -> None:
        sock.setblocking(False)
        # The small messages of both handshakes must not wait for acknowledgements.
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
    def shake(self) -> bool:
        """Go on with TLS's own handshake, without blocking; say whether it is over.

        Raises:
            ssl.SSLError, OSError: it has failed.
        """
        with self._lock:
            if self._ssl.fileno() < 0:
                raise _closed()
            return self._shake()

    def _shake(self) -> bool:
        try:
            self._ssl.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            # The line has failed, not the other side: the caller may dial again.
            raise ConnectionResetError(errno.ECONNRESET, "closed during the handshake of TLS") from None
        theirs = self._ssl.getpeercert(True)
        if theirs is None:  # the contexts do not let it come to this
            raise ssl.SSLError("the other side has shown no certificate")
        # Both certificates, and the last message of the handshake, which only the owners of its keys know.
        parts = [_digest(theirs), self._own] if self._ssl.server_side else [self._own, _digest(theirs)]
        parts.append(self._ssl.get_channel_binding("tls-unique") or b"")
        self.binding = hashlib.sha256(b"actorrpc tls 1\0" + b"".join(parts)).digest()
        self.secured = True
        return True

    def shake_until(self, limit: float) -> None:
        """Run the handshake to its end, before the time ``limit``.

        Raises:
            TimeoutError: it was not over in time.
            ssl.SSLError, OSError: it has failed.
        """
        while not self.shake():
            # The socket has room for a whole handshake, so only the other side can be waited for.
            wait_for(self._ssl, select.POLLIN, limit)

    # -- reading -------------------------------------------------------------------------------------

    @_unsignalled
    def recvmsg_into(self, buffers: Sequence[memoryview], *_: int) -> Any:
        """Read the available bytes into several buffers; (0,) at the end."""
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
        """Read the available records, as far as there is room. Under the lock."""
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
                self._error = error  # the next call raises it; this one returns the bytes before it
                return got
            if not count:  # the end of TLS; bytes that follow it in the kernel do not count
                return got
            got += count
            # A short read was the end of a record; a full one has probably more behind it. Read all that the kernel has, as
            # from a plain socket: a call together with its cancellation, for example.
            if got == size or (count < _RECORD and not self._has_more()):
                return got

    def _has_more(self) -> bool:
        """Say whether the kernel has bytes for us. Cheaper than to try."""
        fcntl.ioctl(self._ssl.fileno(), termios.FIONREAD, self._count)
        return self._count[0] > 0

    # -- writing -------------------------------------------------------------------------------------

    # Bytes that could not be written have begun nevertheless: the next bytes written must begin with them and be as many. The
    # writer sends its rest first, and records are always cut in the same way.

    @_unsignalled
    def send(self, data: bytes, flags: int = 0, /) -> int:
        """Write what the kernel takes; return how many bytes that is."""
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
        """Write what the kernel takes of several parts; return how many bytes that is."""
        total = 0
        with self._lock:
            write = self._ssl.write
            try:
                for record in records(parts, _RECORD):
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
                # The next attempt fails as well.
        return total

    @property
    def sock(self) -> ssl.SSLSocket:  # type: ignore[override]
        """The socket, to poll and to set options."""
        return self._ssl

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 when closed."""
        return self._ssl.fileno()

    def version(self) -> str:
        """Return the version of TLS that was agreed on, such as ``TLSv1.3``."""
        return self._ssl.version() or ""

    def shutdown(self, how: int, /) -> None:
        """Shut the socket, without TLS's own farewell: workers say GOODBYE inside."""
        # SSLSocket.shutdown() would turn the socket into a plain one.
        socket.socket.shutdown(self._ssl, how)

    def discard(self) -> bool:
        """Read and discard bytes after a failed handshake; say whether there may be more."""
        try:
            return bool(socket.socket.recv(self._ssl, 4096))
        except BlockingIOError:
            return True

    def close(self) -> None:
        """Close the socket. Sends nothing, so a forked child can call it as well."""
        # Not during a read or write: OpenSSL would go on with the number of the descriptor, which another socket may get.
        # In a forked child, a thread that does not exist there may hold the lock.
        held = os.getpid() == self._pid and self._lock.acquire(timeout=_CLOSE_S)
        try:
            self._ssl.close()
        finally:
            if held:
                self._lock.release()


def connect(sock: socket.socket, tls: Tls | None, limit: float) -> Stream:
    """Return the stream over a socket that has just connected. It owns the socket, which is closed if this fails.

    Args:
        tls: the certificates, if the stream is encrypted.
        limit: the time at which TLS must be ready.

    Raises:
        TimeoutError: the other side did not answer in time.
        ssl.SSLError: see :func:`explain`.
        OSError: the connection broke.
    """
    return SocketStream(sock) if tls is None else tls.dial(sock, limit)


def shake_hands(
    stream: Stream, dialler: Dialler, limit: float, wait: Callable[[], None] | None = None
) -> Session:
    """Run the dialler's side of a handshake; return what it has established. Reads nothing of what follows it.

    Args:
        limit: the time at which it must be over.
        wait: called before each read.

    Raises:
        OSError: the connection has ended; TimeoutError: the time is over.
        RpcError: the handshake has failed.
    """
    send_all(stream, dialler.start(), limit)
    while True:
        if wait is not None:
            wait()
        answer = dialler.feed(receive_exactly(stream, dialler.wanted, limit))
        if dialler.done:
            return dialler.result
        send_all(stream, answer, limit)


def _broken() -> OSError:
    """Return the error of a plain socket that the other side has closed, where OpenSSL reports a violation."""
    return BrokenPipeError(errno.EPIPE, "the other side has closed")


def _closed() -> OSError:
    """Return the error of a plain socket that was closed on this side."""
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
        """Load the certificates that the settings name; None if they name none, or if only Unix sockets are used.

        Raises:
            ConfigError: a file is missing, cannot be used or does not go with the others, or a certificate has expired.
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
            what = f"{name} ({variable})"
            if name == "tls_key":
                check_private_file(path, what)
                continue
            try:
                open(path, "rb").close()
            except OSError as error:
                raise ConfigError(f"{what} {path!r} cannot be read: {error.strerror}") from error
        client = _context(ssl.PROTOCOL_TLS_CLIENT, settings)
        server = _context(ssl.PROTOCOL_TLS_SERVER, settings)
        _try_out(client, server, settings)
        return cls(client, server, _digest(_first_certificate(str(settings.tls_cert))))

    def dial(self, sock: socket.socket, limit: float) -> TlsSocket:
        """Return the client's end on a connected socket, as :func:`connect` does."""
        made = TlsSocket(sock, self._client, self._own, False)
        with undo_on_error(made.close):
            made.shake_until(limit)
        return made

    def accept(self, sock: socket.socket) -> TlsSocket:
        """Return the server's end on an accepted socket. The caller calls :meth:`TlsSocket.shake`."""
        return TlsSocket(sock, self._server, self._own, True)


def _close_half_made(error: OSError) -> None:
    """Close the socket that ``wrap_socket`` has made of the given one before it has failed.

    CPython 3.11 leaves it open, and in no hands but those of the error's frames, where the other side had reset the connection.
    """
    trace = error.__traceback__
    while trace is not None:
        made = trace.tb_frame.f_locals.get("self")
        if isinstance(made, ssl.SSLSocket):
            made.close()
        trace = trace.tb_next


def explain(error: ssl.SSLError, whom: str) -> RpcError:
    """Return the error that says why TLS has failed; ``whom`` names the other side and its address.

    Returns:
        AuthenticationError: about certificates. VersionError: no version in common. ProtocolError: anything else.
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
        f"{whom} does not speak TLS as this worker does, or not at all: {reason}; {_ALL_OR_NONE}"
    )


def _no_password(*_: Any) -> str:
    return ""  # asked for on the terminal otherwise


def _context(protocol: int, settings: Settings) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    # Workers move between hosts: the CA and the group's key identify them, not the name of a host.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = _VERSIONS[settings.tls_min_version]
    # The end of the file is an end, as without TLS: the frames above notice what is missing.
    context.options |= (
        ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET | ssl.OP_IGNORE_UNEXPECTED_EOF
    )
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # each connection proves everything anew
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
    """Run a handshake of this worker with itself: the others would refuse a certificate that it refuses."""
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
