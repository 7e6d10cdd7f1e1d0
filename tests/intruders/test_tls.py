"""Attackers against TLS: strangers at a worker, and relays between workers, with and without a certificate of the CA."""

from __future__ import annotations

import contextlib
import operator
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from actorrpc import _time
from actorrpc.agent.agent import Agent
from actorrpc.config import Settings
from actorrpc.errors import AuthenticationError, ProtocolError
from actorrpc.transport.tls import Tls, TlsSocket
from tests.agent.agents import KEY
from tests.certificates import Certificates, files, foreign, temporary_certificates
from tests.intruders.doors import WRONG, door, knock, reset, tcp_agents, until

_Address = tuple[str, int]
_PLAIN: dict[str, Any] = {}


def _workers(*each: dict[str, Any], **given: Any) -> AbstractContextManager[list[Agent]]:
    return tcp_agents(len(each), each=each, **given)


def _add(agent: Agent, to: str = "a1", timeout: float = 30.0) -> Any:
    return agent.call_sync(agent.peer(to), operator.add, (1, 2), {}, timeout)


def _address(agent: Agent) -> str:
    host, port = door(agent)
    return f"{host}:{port}"


# -- certificates -------------------------------------------------------------------------------------------


def test_workers_may_have_different_certificates_of_the_same_ca(tmp_path: Path) -> None:
    own = temporary_certificates(tmp_path, name="another", authority=files())
    with _workers(files().options, own.options) as (a0, a1):
        assert _add(a0) == 3
        assert _add(a1, "a0") == 3


@pytest.mark.prints("'a0' did not prove to worker 'a1' that it holds the group's key")
def test_a_valid_certificate_does_not_replace_the_key() -> None:
    with (
        _workers(files().options, files().options, keys=(WRONG, KEY)) as (a0, _),
        pytest.raises(AuthenticationError, match="ACTORRPC_KEY"),
    ):
        _add(a0)


@pytest.mark.prints("refuses the certificate of this worker, or shows none: .*unknown ca")
def test_the_dialling_worker_refuses_a_certificate_of_another_ca() -> None:
    with _workers(files().options, foreign().options) as (a0, a1):
        with pytest.raises(AuthenticationError, match="certificate of worker 'a1'") as caught:
            _add(a0)
        assert _address(a1) in str(caught.value)
        assert "ACTORRPC_TLS_CA" in str(caught.value)


def _lenient(tmp_path: Path, certificates: Certificates) -> dict[str, str]:
    """Return options of a worker that shows these certificates and trusts both CAs."""
    both = tmp_path / "both.pem"
    both.write_bytes(Path(files().ca).read_bytes() + Path(foreign().ca).read_bytes())
    return {**certificates.options, "tls_ca": str(both)}


@pytest.mark.prints(
    r"certificate of the process that connected from 127\.0\.0\.1 is refused: self.signed certificate"
)
def test_the_dialled_worker_refuses_a_certificate_of_another_ca(tmp_path: Path) -> None:
    with _workers(_lenient(tmp_path, foreign()), files().options, files().options) as (a0, a1, a2):
        for _ in range(3):
            with pytest.raises(
                AuthenticationError, match=r"refuses the certificate of this worker"
            ) as caught:
                _add(a0)
            assert f"worker 'a1' at {_address(a1)}" in str(caught.value)
        assert _add(a2) == 3


@pytest.mark.prints(
    "is refused: certificate has expired; renew it",
    "refuses the certificate of this worker, or shows none: .*certificate expired",
)
@pytest.mark.slow  # waits until the certificate expires
def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    """Also the certificate of a worker that started before it expired."""
    end = time.time() + 8
    expired = temporary_certificates(tmp_path, name="expired", days=6 / 86_400, authority=files())
    with _workers(expired.options, files().options) as (a0, a1):
        while time.time() < end:
            threading.Event().wait(0.1)
        with pytest.raises(AuthenticationError, match="expired") as caught:
            _add(a0)
        assert _address(a1) in str(caught.value)
        with pytest.raises(AuthenticationError, match=r"certificate of worker 'a0'.*expired.*renew"):
            _add(a1, "a0")


@pytest.mark.prints(
    "it does not speak TLS, and this worker speaks nothing else",
    "it speaks TLS, and this worker has no certificates",
)
def test_plain_and_tls_workers_refuse_each_other_without_a_downgrade() -> None:
    """Each error says which setting is missing, and names the address of the peer."""
    with _workers(_PLAIN, files().options) as (plain, secure):
        with pytest.raises(ProtocolError, match=r"speaks nothing else: set ACTORRPC_TLS_CERT") as caught:
            _add(plain)
        assert _address(secure) in str(caught.value)
        with pytest.raises(ProtocolError, match=r"does not speak TLS.*ACTORRPC_TLS_CERT") as caught:
            _add(secure, "a0")
        assert _address(plain) in str(caught.value)


# -- strangers --------------------------------------------------------------------------------------------------


def _client(version: ssl.TLSVersion, certificates: Certificates | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    if certificates is not None:
        context.load_cert_chain(certificates.cert, certificates.key)
    return context


def _try(agent: Agent, context: ssl.SSLContext) -> bytes:
    """Connect to an agent with TLS, send the first bytes of a HELLO, and read until the agent closes."""
    with knock(agent) as plain, context.wrap_socket(plain) as sock:
        sock.sendall(b"aRPC")
        return until(sock)


@pytest.mark.prints("or shows none: peer did not return a certificate")
def test_a_client_without_a_certificate_is_refused() -> None:
    with _workers(files().options, files().options) as (a0, a1):
        with pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"):
            _try(a1, _client(ssl.TLSVersion.TLSv1_3))
        assert _add(a0) == 3


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2])
@pytest.mark.prints("this worker speak no common version of TLS")
def test_tls_versions_below_the_minimum_are_refused(version: ssl.TLSVersion) -> None:
    with _workers(files().options, files().options | {"tls_min_version": "1.2"}) as (a0, a1):
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
            _try(a0, _client(version, files()))
        if version == ssl.TLSVersion.TLSv1_1:
            with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
                _try(a1, _client(version, files()))
        else:
            with knock(a1) as plain, _client(version, files()).wrap_socket(plain) as sock:
                assert sock.version() == "TLSv1.2"
        assert _add(a0) == 3


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01\x40", b"\x16\x03\x01\x00\x05\x01"])
def test_slow_tls_handshakes_time_out_and_keep_no_member_out(begun: bytes) -> None:
    settings = {**files().options, "max_unauthenticated": 8, "handshake_timeout": 0.6}
    with _workers(files().options, settings) as (a0, a1):
        slow = [knock(a1) for _ in range(40)]
        for sock in slow:
            with contextlib.suppress(OSError):
                sock.sendall(begun)
        assert _add(a0) == 3
        assert len(a1.connector.admission) <= 8
        for sock in slow:
            sock.settimeout(30)
            until(sock)  # the agent closes each connection
            reset(sock)
        assert _add(a0) == 3


@pytest.mark.prints(
    "it does not speak TLS, and this worker speaks nothing else",
    "does not speak TLS, or the TLS handshake with it failed",
)
def test_bytes_that_are_no_tls_are_refused_and_members_still_served() -> None:
    with _workers(files().options, files().options) as (a0, a1):
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\x16" * 4_000, b"\x80\x2e\x01\x00\x02", bytes(5_000)):
            with knock(a1) as sock:
                with contextlib.suppress(OSError):
                    sock.sendall(junk)
                    sock.shutdown(socket.SHUT_WR)
                assert b"a1" not in until(sock)
        assert _add(a0) == 3


# -- between two workers --------------------------------------------------------------------------------------


class _Relay:
    """A relay in front of a worker: accepts with ``front``, connects to the worker with ``back``, and records all bytes."""

    def __init__(self, front: Callable[[socket.socket], Any], back: Callable[[socket.socket], Any]) -> None:
        self.seen = bytearray()
        self._ends = front, back
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._behind: _Address = ("", 0)
        self._open: list[Any] = []
        self._threads = [threading.Thread(target=self._accept)]

    def before(self, address: _Address) -> _Address:
        self._behind = address
        found: _Address = self._listener.getsockname()[:2]
        return found

    def __enter__(self) -> _Relay:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._open:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(client)
            try:
                one = self._ends[0](client)
                self._open[-1] = one
                plain = socket.create_connection(self._behind)
                self._open.append(plain)
                other = self._ends[1](plain)
                self._open[-1] = other
            except OSError:
                continue
            for pair in ((one, other), (other, one)):
                self._threads.append(threading.Thread(target=self._pump, args=pair))
                self._threads[-1].start()

    def _pump(self, one: Any, other: Any) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65_536):
                self.seen += data
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)


_SECRET = b"".join(b"%08x" % (number * 2654435761 % 2**32) for number in range(2_000))


@pytest.mark.parametrize("secure", [True, False])
def test_an_eavesdropper_reads_plaintext_only_without_tls(secure: bool) -> None:
    options = files().options if secure else _PLAIN
    with (
        _Relay(lambda sock: sock, lambda sock: sock) as relay,
        _workers(_PLAIN | options, options, through=lambda address: relay.before(address)) as (a0, _),
    ):
        # The relay is in front of a1, the last agent.
        assert a0.call_sync(a0.peer("a1"), operator.add, (_SECRET, b"!"), {}, 30.0) == _SECRET + b"!"
        recorded = bytes(relay.seen)
    assert len(recorded) > 2 * len(_SECRET)
    pieces = [_SECRET[at : at + 8] for at in range(0, len(_SECRET), 8)]
    assert any(piece in recorded for piece in pieces) is not secure
    for word in (b"operator", b"a0", b"aRPC\x01"):  # from pickles, introductions, the handshake
        if len(word) > 2:
            assert (word in recorded) is not secure


def _stolen(certificates: Certificates) -> tuple[Any, Any]:
    """Return the two ends of a relay that speaks TLS to both sides with these certificates."""
    mine = Tls.load(Settings(**certificates.options))
    assert mine is not None

    def front(sock: socket.socket) -> TlsSocket:
        made = mine.accept(sock)
        made.handshake_until(_time.now() + 30)
        made.settimeout(None)
        return made

    def back(sock: socket.socket) -> TlsSocket:
        made = mine.dial(sock, _time.now() + 30)
        made.settimeout(None)
        return made

    return front, back


@pytest.mark.parametrize("stolen", [False, True])
@pytest.mark.prints("'a0' did not prove to worker 'a1' that it holds the group's key")
def test_a_relay_that_terminates_tls_with_a_valid_certificate_is_detected(
    stolen: bool, tmp_path: Path
) -> None:
    """It has a certificate of the same CA, or even the stolen certificate of a worker, but not the group's key."""
    own = files()
    theirs = own if stolen else temporary_certificates(tmp_path, authority=own)
    with (
        _Relay(*_stolen(theirs)) as relay,
        _workers(own.options, own.options, through=lambda address: relay.before(address)) as (a0, a1),
    ):
        with pytest.raises(AuthenticationError):
            _add(a0)
        assert b"aRPC" in relay.seen
        assert b"operator" not in relay.seen
        assert a0.peer("a1").conn is None
        assert not a1.connector.connections()
