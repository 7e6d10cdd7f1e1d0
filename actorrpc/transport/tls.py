"""TLS between workers: certificates that are checked before anything starts, and a socket that does what a plain one does.

With certificates set, TCP connections speak TLS 1.3 (or 1.2, where that is allowed), with certificates on both sides, and
nothing else: neither side goes on without. The handshake that proves the group's key runs inside, and its proofs cover what
both sides saw of the TLS connection (:attr:`TlsSocket.binding`), so nobody can sit between two TLS connections and pass the
proofs on, whatever certificate they have. Unix sockets and shared memory stay as they are: they do not leave the host.

A TLS connection differs from a socket in that bytes can have been decrypted that nobody has read yet, while the kernel has
nothing more: then :attr:`TlsSocket.pending` is true.

``TlsSocket._lock`` guards the SSL object, which two threads must not use at once, and ``pending``; the socket is closed under it,
between two attempts. It is a leaf, and held for one attempt to read or write at a time: nothing blocks under it.

OpenSSL writes without ``MSG_NOSIGNAL``, also when it reads (alerts): where SIGPIPE is not ignored, it is held up meanwhile.
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
from actorrpc.transport.stream import Stream
from actorrpc.wire.handshake import Dialler, Session
from actorrpc.wire.keys import check_private_file

__all__ = ["HELLO", "AnySocket", "Tls", "TlsSocket", "explain", "shake_hands"]

HELLO: Final = b"\x16"
"""What a TLS connection begins with; nothing else that workers say does."""
_RECORD: Final = 16 << 10  # the most that one record of TLS carries
_SUITES: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of 1.2; those of 1.3 are all fine
_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_FILES: Final = (
    ("tls_cert", "ACTORRPC_TLS_CERT"),
    ("tls_key", "ACTORRPC_TLS_KEY"),
    ("tls_ca", "ACTORRPC_TLS_CA"),
)
_NAMES: Final = ", ".join(variable for _, variable in _FILES)
_ALL_OR_NONE: Final = f"start all workers with certificates of one CA ({_NAMES}), or all without"
_EXPIRED: Final = (9, 10)  # OpenSSL's numbers for: not valid yet, not valid any more
_CLOSE_S: Final = 1.0  # how long closing waits for an attempt that is under way: more than any takes
_SIGPIPE: Final = signal.SIGPIPE
# What is to be done about a signal, as Python sees it; without what makes an enum of it, which takes longer than the rest.
_disposition: Final[Callable[[int], Any]] = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _unsignalled(
    method: Callable[Concatenate[TlsSocket, _P], _T],
) -> Callable[Concatenate[TlsSocket, _P], _T]:
    """Have a method never raise SIGPIPE, which ends a process that has set its default action."""

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

    What is called with flags never blocks, as with ``MSG_DONTWAIT``, whatever the flags are. The rest waits as long as the
    time-out says. Errors are those of sockets: BlockingIOError, and OSError (of which ``ssl.SSLError`` is one) for the end.

    Attributes:
        binding: a digest that only the two ends of this very connection know; empty until it is :attr:`secured`.
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
        # Several small messages go each way before anything else does: none waits for the last one's acknowledgement.
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
            # The connection was cut, and another one may do better.
            raise ConnectionResetError(errno.ECONNRESET, "closed during the handshake of TLS") from None
        theirs = self._ssl.getpeercert(True)
        if theirs is None:  # the contexts do not let it come to this
            raise ssl.SSLError("the other side has shown no certificate")
        # The certificates, and the last word of the handshake, which nobody knows who has not made these keys.
        parts = [_digest(theirs), self._own] if self._ssl.server_side else [self._own, _digest(theirs)]
        parts.append(self._ssl.get_channel_binding("tls-unique") or b"")
        self.binding = hashlib.sha256(b"actorrpc tls 1\0" + b"".join(parts)).digest()
        self.secured = True
        return True

    def shake_until(self, limit: float) -> None:
        """Bring the handshake to its end; ``limit`` is a moment.

        Raises:
            TimeoutError: it was not over in time.
            ssl.SSLError, OSError: it has failed.
        """
        while not self.shake():
            # The socket has room for all that a handshake says, so it is always the other side that is waited for.
            _wait(self._ssl.fileno(), select.POLLIN, limit - _time.now())

    # -- reading -------------------------------------------------------------------------------------

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0, /) -> int:
        """Read what is there, without blocking; 0 at the end."""
        count: int = self.recvmsg_into((buffer[:size] if size else buffer,))[0]
        return count

    @_unsignalled
    def recvmsg_into(self, buffers: Sequence[memoryview], *_: int) -> Any:
        """Read what is there into several buffers, without blocking; (0,) at the end."""
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
        """Read the records that are there, as far as there is room. Under the lock."""
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
                self._error = error  # what has come before it counts; it is told the next time
                return got
            if not count:  # the end; what the kernel has behind it is nothing that TLS knows of
                return got
            got += count
            # What is less than was asked for was the end of a record; behind a full one there is more, likely. All that is
            # there is read at once, as from a plain socket: of a call and its cancellation, not just the call.
            if got == size or (count < _RECORD and not self._has_more()):
                return got

    def _has_more(self) -> bool:
        """Say whether the kernel has bytes for us. Cheaper than to try."""
        fcntl.ioctl(self._ssl.fileno(), termios.FIONREAD, self._count)
        return self._count[0] > 0

    def recv(self, size: int) -> bytes:
        """Read up to ``size`` bytes, for as long as the time-out says; nothing at the end."""
        buffer = memoryview(bytearray(size))
        limit = None if self._timeout is None else _time.now() + self._timeout
        while True:
            try:
                return bytes(buffer[: self.recv_into(buffer)])
            except BlockingIOError:
                self._wait(select.POLLIN, limit)

    # -- writing -------------------------------------------------------------------------------------

    # What could not be written is begun nevertheless: the next thing that is written must begin with it, as the
    # connection sees to (it sends what is left first), and be as long, which is why records are cut in one way only.

    @_unsignalled
    def send(self, data: bytes, flags: int = 0, /) -> int:
        """Write what the kernel takes; return how much that was."""
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
        """Write what the kernel takes of several parts; return how much that was."""
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
                # The next attempt fails as well.
        return total

    def sendall(self, data: bytes) -> None:
        """Write everything, for as long as the time-out says."""
        left = memoryview(data)
        limit = None if self._timeout is None else _time.now() + self._timeout
        while left:
            try:
                left = left[self.sendmsg((left,)) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, limit)

    # -- what sockets do besides -----------------------------------------------------------------------

    def _wait(self, events: int, limit: float | None) -> None:
        if self._timeout == 0:
            raise BlockingIOError
        _wait(self._ssl.fileno(), events, None if limit is None else limit - _time.now())

    @property
    def sock(self) -> ssl.SSLSocket:  # type: ignore[override]
        """The socket, to poll and to set options."""
        return self._ssl

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 when closed."""
        return self._ssl.fileno()

    def setblocking(self, flag: bool) -> None:
        """Set no time-out, or one of 0."""
        self._timeout = None if flag else 0.0

    def settimeout(self, seconds: float | None) -> None:
        """Set the time-out, in seconds; None: none."""
        self._timeout = seconds

    def version(self) -> str:
        """Return the version of TLS that was agreed on, such as ``TLSv1.3``."""
        return self._ssl.version() or ""

    def shutdown(self, how: int, /) -> None:
        """Shut the socket. TLS's own farewell is not said: workers have one of theirs, inside."""
        # Not that of the SSL socket, which would be a plain one after it.
        socket.socket.shutdown(self._ssl, how)

    def discard(self) -> bool:
        """Read what comes after a failed handshake, and forget it; say whether there may be more. Never blocks."""
        try:
            return bool(socket.socket.recv(self._ssl, 4096))
        except BlockingIOError:
            return True

    def close(self) -> None:
        """Close the descriptors. Says nothing to the other side, so that a forked child can do it as well."""
        # Not in the middle of an attempt: OpenSSL would go on writing to that number, which may be another socket's by then.
        # In a forked child, the lock may be held by a thread that does not exist there.
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
        limit: the time at which it must be over.
        wait: called before each read.

    Raises:
        OSError: the connection has ended; TimeoutError: the time is over.
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
    """Cut parts into what one record takes each, copying only where parts are small."""
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
    """What a plain socket says where OpenSSL speaks of a violation: the other side has closed, and cannot be written to."""
    return BrokenPipeError(errno.EPIPE, "the other side has closed")


def _closed() -> OSError:
    """What a plain socket says that was closed on this side."""
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
        """Load what the settings name; None where they name nothing, or nothing but Unix sockets is used.

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
            _check_file(path, f"{name} ({variable})", private=name == "tls_key")
        client = _context(ssl.PROTOCOL_TLS_CLIENT, settings)
        server = _context(ssl.PROTOCOL_TLS_SERVER, settings)
        _try_out(client, server, settings)
        return cls(client, server, _digest(_first_certificate(str(settings.tls_cert))))

    def dial(self, sock: socket.socket, limit: float) -> TlsSocket:
        """Speak TLS on a socket that has just connected, which belongs to what is returned, or is closed.

        Raises:
            TimeoutError: the other side did not answer until ``limit``, a moment.
            ssl.SSLError: see :func:`explain`.
            OSError: the connection broke.
        """
        made = TlsSocket(sock, self._client, self._own, False)
        with undo_on_error(made.close):
            made.shake_until(limit)
        return made

    def accept(self, sock: socket.socket) -> TlsSocket:
        """Return the server's end on an accepted socket; :meth:`TlsSocket.shake` is still to be called."""
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
    """Say in our words why TLS with somebody has failed; ``whom`` names who, and where.

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
    return ""  # asked for on the terminal otherwise


def _context(protocol: int, settings: Settings) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    # Workers move between hosts: who they are is for the CA and the group's key to say, not for the name of a host.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = _VERSIONS[settings.tls_min_version]
    # The end of the file is an end, as without TLS: what is cut off is noticed by what it belongs to.
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
    """Have this worker speak with itself: what it would refuse of itself, the others refuse as well."""
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
