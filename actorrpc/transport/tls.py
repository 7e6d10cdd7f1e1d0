"""TLS between workers: the settings, the certificates, and the dialler's side of the handshakes.

TCP connections use TLS 1.3. The handshake that proves the group's key runs inside the TLS connection, and its proofs cover a
digest of the TLS handshake (:attr:`TlsSocket.binding`): the certificates, and a message that depends on the keys of this
connection. An attacker between two TLS connections can therefore not forward the proofs. So the key alone authenticates both
sides, and a certificate proves nothing: the accepting side shows a self-signed certificate that its process has made, and the
dialler does not verify it.

If certificates of a CA are configured, both sides show and verify them in addition (with TLS 1.3, or 1.2 if allowed). With
``ACTORRPC_TLS=off``, TCP connections are not encrypted. A TCP connection fails if only one side uses TLS, or only one
side has certificates. Unix sockets and shared memory do not use TLS, because they do not leave the host.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Final

from actorrpc import _time
from actorrpc._exceptions import undo_on_error
from actorrpc.config import Settings
from actorrpc.errors import AuthenticationError, ConfigError, ProtocolError, RpcError, VersionError
from actorrpc.transport.tls_socket import PlainTextError, TlsSocket
from actorrpc.wire.handshake import Dialler, Session
from actorrpc.wire.keys import check_private_file

__all__ = ["SAME", "AnySocket", "Tls", "authenticate", "describe"]

_SUITES: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"  # for TLS 1.2; all suites of 1.3 are allowed
_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_FILES: Final = (
    ("tls_cert", "ACTORRPC_TLS_CERT"),
    ("tls_key", "ACTORRPC_TLS_KEY"),
    ("tls_ca", "ACTORRPC_TLS_CA"),
)
_NAMES: Final = ", ".join(variable for _, variable in _FILES)
SAME: Final = "give all workers the same settings of TLS"
"""What to do about two workers whose settings of TLS differ."""
_EXPIRES_S: Final = 14 * 86400  # a certificate that expires sooner is reported
# OpenSSL's codes for certificates without a CA, of an unknown CA, and for certificates that are not yet valid or have expired.
_SELF_SIGNED: Final = 18
_OTHER_CA: Final = (19, 20)
_EXPIRED: Final = (9, 10)
_log = logging.getLogger("actorrpc.links")

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
        wait: called before each read of the handshake that proves the key, which follows the TLS handshake; the function may wait
            until bytes arrive.

    Raises:
        OSError: the connection has ended (TimeoutError: the handshake has not finished in time).
        RpcError: the handshake has failed.
    """
    with undo_on_error(sock.close):
        if tls is None:
            return sock, _shake_hands(sock, dialler, b"", limit, wait)
        try:
            secured = tls.dial(sock, limit)
            return secured, _shake_hands(secured, dialler, secured.binding, limit, wait)
        except ssl.SSLError as error:
            # SSLError is an OSError, and callers dial again after an OSError. But this peer has answered: raise an RpcError.
            raise tls.explain(error, whom) from error
        except PlainTextError as error:
            # The bytes may be a REFUSE message without TLS: the dialler parses it and raises its reason. No answer is sent,
            # because this side sends nothing without TLS.
            dialler.start()
            try:
                dialler.feed(error.data)
            except RpcError as reason:
                raise reason from None
            raise ProtocolError(f"{whom} does not speak TLS; {describe(tls)} here: {SAME}") from None


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


def _digest(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


# -- certificates ------------------------------------------------------------------------------------


class Tls:
    """The TLS settings and certificates of a worker. Thread-safe, except :meth:`serve`, which one thread calls once.

    Attributes:
        has_certificates: whether the sides show certificates of a CA; otherwise, only the group's key authenticates them.
    """

    __slots__ = ("_client", "_own", "_server", "_shown", "has_certificates")

    def __init__(self, settings: Settings) -> None:
        self.has_certificates = bool(settings.tls_cert)
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, settings)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, settings)
        # The digests of the certificates that this worker shows as client and as server. Without a CA, the client shows none, and
        # serve() makes the certificate of the server.
        self._own, self._shown = _digest(b""), b""
        if self.has_certificates:
            _try_out(self._client, self._server, settings)
            self._own = self._shown = _digest(_first_certificate(str(settings.tls_cert)))

    @classmethod
    def load(cls, settings: Settings) -> Tls | None:
        """Load the certificates that the settings name; return None if the settings turn TLS off or allow only Unix sockets.

        Raises:
            ConfigError: a file is missing, cannot be used or does not match the others, or a certificate is not valid now.
        """
        given = [(name, variable, getattr(settings, name)) for name, variable in _FILES]
        missing = [variable for _, variable, path in given if not path]
        if missing and len(missing) < len(given):
            raise ConfigError(
                f"TLS needs a certificate, its key and a CA: set all of {_NAMES}, or none (not set: {', '.join(missing)})"
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
        """Prepare :meth:`accept`: without certificates of a CA, make the self-signed certificate that the accepting side shows.

        Raises:
            ConfigError: the package ``cryptography`` is missing.
        """
        if not self._shown:
            self._shown = _load_temporary(self._server)

    def dial(self, sock: socket.socket, limit: float) -> TlsSocket:
        """Perform the client's TLS handshake on a connected socket. The returned object owns the socket; an error closes it.

        Raises:
            TimeoutError: the handshake has not finished at the time ``limit``.
            ssl.SSLError: see :meth:`explain`.
            OSError: the connection broke.
            PlainTextError: the other side does not speak TLS.
        """
        made = TlsSocket(sock, self._client, self._own, False)
        with undo_on_error(made.close):
            made.handshake_until(limit)
        return made

    def accept(self, sock: socket.socket) -> TlsSocket:
        """Return a TLS socket for an accepted socket. The caller then performs the handshake by :meth:`TlsSocket.handshake`."""
        return TlsSocket(sock, self._server, self._shown, True)

    def explain(self, error: ssl.SSLError, whom: str) -> RpcError:
        """Return an error of this package that explains a TLS error.

        Args:
            whom: describes the other side, for the message.

        Returns:
            AuthenticationError for certificates, VersionError if there is no common version, otherwise ProtocolError.
        """
        own = f"this worker has {describe(self)}: {SAME}"
        if isinstance(error, ssl.SSLCertVerificationError):
            why = error.verify_message
            if error.verify_code in _EXPIRED:
                advice = "renew it, or set the clocks right"
            elif error.verify_code == _SELF_SIGNED:
                advice = f"it has no certificates of a CA; {own}"
            elif error.verify_code in _OTHER_CA:
                advice = f"it has another CA than tls_ca (ACTORRPC_TLS_CA); {own}"
            else:
                advice = own
            return AuthenticationError(f"the certificate of {whom} is refused: {why}; {advice}")
        reason = (error.reason or str(error) or type(error).__name__).replace("_", " ").lower()
        if not self.has_certificates and ("certificate required" in reason or "unknown ca" in reason):
            return AuthenticationError(f"{whom} has certificates of a CA: {reason}; {own}")
        if "did not return a certificate" in reason:
            return AuthenticationError(f"{whom} has no certificates: {reason}; {own}")
        if "certificate" in reason or "unknown ca" in reason or "decrypt error" in reason:
            return AuthenticationError(f"{whom} refuses the certificate of this worker: {reason}; {own}")
        if "protocol version" in reason or "unsupported protocol" in reason:
            return VersionError(
                f"{whom} and this worker speak no common version of TLS: {reason}; give all the same tls_min_version "
                "(ACTORRPC_TLS_MIN_VERSION)"
            )
        return ProtocolError(f"the TLS handshake with {whom} failed: {reason}; {own}")


def describe(tls: Tls | None) -> str:
    """Return a worker's TLS settings for messages, for example ``ACTORRPC_TLS=on, no certificates``."""
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
            f"traffic only you can read and change, ACTORRPC_TLS=off is possible ({error})"
        ) from error
    # The private key is not written to a disk.
    with open(os.memfd_create("actorrpc", os.MFD_CLOEXEC), "wb") as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return _digest(der)


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
    """Check the worker's own certificate by a TLS handshake in memory between both contexts.

    Raises ConfigError if the handshake fails, because other workers would refuse the certificate too. Logs a warning if the
    certificate expires within 14 days.
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
