"""Attackers against TLS: strangers at a worker, and relays between workers, without and with certificates of a CA."""

from __future__ import annotations

import contextlib
import operator
import re
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
from actorrpc.errors import AuthenticationError, LimitError, ProtocolError, RpcError, VersionError
from actorrpc.transport.tls import Tls
from actorrpc.transport.tls_socket import TlsSocket
from actorrpc.wire.handshake import Acceptor, Refusal
from tests.agent.agents import KEY
from tests.certificates import Certificates, files, foreign, temporary_certificates
from tests.intruders.doors import WRONG, dialler, door, knock, reset, tcp_agents, tls_records, until

_Address = tuple[str, int]
_ON: dict[str, Any] = {}  # the default
_OFF: dict[str, Any] = {"tls": False}
_SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "off": lambda: _OFF,
    "on": lambda: _ON,
    "certificates": lambda: files().options,
}


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


@pytest.mark.parametrize("settings", ["on", "certificates"])
@pytest.mark.prints("'a0' did not prove to worker 'a1' that it holds the group's key")
def test_neither_tls_nor_a_valid_certificate_replaces_the_key(settings: str) -> None:
    options = _SETTINGS[settings]()
    with (
        _workers(options, options, keys=(WRONG, KEY)) as (a0, _),
        pytest.raises(AuthenticationError, match="ACTORRPC_KEY"),
    ):
        _add(a0)


@pytest.mark.prints("refuses the certificate of this worker: .*unknown ca")
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
    r"certificate of the process that connected from 127\.0\.0\.1 is refused: self.signed certificate in"
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
    "expires on .*: renew it, and restart the workers",
    "is refused: certificate has expired; renew it",
    "refuses the certificate of this worker: .*certificate expired",
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


# For the settings of the dialling and of the dialled worker: the error of the first one, and what the second one logs.
_DIFFERENT = {
    ("off", "on"): (
        r"refused worker 'a0': ADDRESS has ACTORRPC_TLS=on, no .* this connection has ACTORRPC_TLS=off",
        "it has ACTORRPC_TLS=off, or is no worker, and this worker has ACTORRPC_TLS=on, no certificates",
    ),
    ("off", "certificates"): (
        r"refused worker 'a0': ADDRESS has certificates \(.*\), and this connection has ACTORRPC_TLS=off",
        "it has ACTORRPC_TLS=off, or is no worker, and this worker has certificates",
    ),
    ("on", "off"): (
        r"refused worker 'a0': ADDRESS has ACTORRPC_TLS=off, and this connection has TLS",
        "it has TLS, and this worker has ACTORRPC_TLS=off",
    ),
    ("certificates", "off"): (
        r"refused worker 'a0': ADDRESS has ACTORRPC_TLS=off, and this connection has TLS",
        "it has TLS, and this worker has ACTORRPC_TLS=off",
    ),
    ("on", "certificates"): (
        r"'a1' at ADDRESS has certificates .* this worker has ACTORRPC_TLS=on, no certificates",
        "from 127.0.0.1 has no certificates: .* this worker has certificates",
    ),
    ("certificates", "on"): (
        r"certificate of worker 'a1' at ADDRESS is refused: .* no certificates of a CA; this worker has cert",
        "from 127.0.0.1 has certificates of a CA: .* this worker has ACTORRPC_TLS=on, no certificates",
    ),
}


@pytest.mark.parametrize(("dialling", "dialled"), _DIFFERENT)
@pytest.mark.prints("was refused: .*: give all workers the same settings of TLS$")
def test_workers_with_different_settings_refuse_each_other_and_name_both_settings(
    dialling: str, dialled: str, caplog: pytest.LogCaptureFixture
) -> None:
    error, log = _DIFFERENT[dialling, dialled]
    with _workers(_SETTINGS[dialling](), _SETTINGS[dialled]()) as (a0, a1):
        with pytest.raises(ProtocolError, match=error.replace("ADDRESS", _address(a1))):
            _add(a0)
        assert a0.peer("a1").conn is None
        assert not a1.connector.connections()
    assert re.search(log, caplog.text)


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


@pytest.mark.prints("has no certificates: peer did not return a certificate")
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
    "it has ACTORRPC_TLS=off, or is no worker, and this worker has certificates",
    "the TLS handshake with the process that connected from 127.0.0.1 failed",
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


# -- in place of a worker --------------------------------------------------------------------------------------


class _Impostor:
    """Listens at a worker's address, answers each connection, and records the bytes that come before and after the answer."""

    def __init__(self, answer: Callable[[socket.socket], object]) -> None:
        self.seen = b""
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> _Impostor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def instead(self, _: _Address) -> _Address:
        found: _Address = self._listener.getsockname()[:2]
        return found

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self._listener.accept()[0] as sock, contextlib.suppress(OSError):
                    self._answer(sock)
                    self.seen += until(sock)


def _forged(to: Agent, what: str) -> bytes:
    """Return an answer of the handshake that needs no key."""
    if what == "challenge":
        side = Acceptor(name=to.record.name, incarnation=to.record.incarnation, key=WRONG.reveal())
        return side.feed(dialler(to).start())
    return Acceptor.refuse(Refusal[what], "forged")


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("challenge", ProtocolError),
        ("KEY", AuthenticationError),
        ("VERSION", VersionError),
        ("BUSY", LimitError),
        ("PROTOCOL", ProtocolError),
    ],
)
def test_a_plain_answer_raises_an_error_and_no_plain_byte_is_sent(
    what: str, error: type[RpcError], at_once: bool
) -> None:
    """The answer is sent before or after the first bytes of the dialling worker."""
    agents: list[Agent] = []

    def answer(sock: socket.socket) -> None:
        if not at_once:
            impostor.seen += sock.recv(4096)
        sock.sendall(_forged(agents[1], what))

    with _Impostor(answer) as impostor, _workers(_ON, _ON, through=impostor.instead) as (a0, a1):
        agents += [a0, a1]
        with pytest.raises(error):
            _add(a0)
    assert impostor.seen
    assert tls_records(impostor.seen)
    assert b"aRPC" not in impostor.seen


def _server(kind: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if kind != "no certificate":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    if kind == "anonymous":
        context.set_ciphers("aNULL:@SECLEVEL=0")
    elif kind == "TLS 1.2":
        context.load_cert_chain(files().cert, files().key)
    return context


@pytest.mark.parametrize("kind", ["TLS 1.2", "anonymous", "no certificate"])
def test_a_server_without_tls_1_3_or_without_a_certificate_is_refused(kind: str) -> None:
    with (
        _Impostor(lambda sock: _server(kind).wrap_socket(sock, server_side=True)) as impostor,
        _workers(_ON, _ON, through=impostor.instead) as (a0, _),
        pytest.raises(ProtocolError, match="version of TLS" if "1.2" in kind else "TLS"),
    ):
        _add(a0)


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
def test_an_eavesdropper_reads_plaintext_only_without_tls_which_is_logged(
    secure: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = _ON if secure else _OFF
    with (
        _Relay(lambda sock: sock, lambda sock: sock) as relay,
        _workers(options, options, through=lambda address: relay.before(address)) as (a0, _),
    ):
        # The relay is in front of a1, the last agent.
        assert a0.call_sync(a0.peer("a1"), operator.add, (_SECRET, b"!"), {}, 30.0) == _SECRET + b"!"
        recorded = bytes(relay.seen)
    assert len(recorded) > 2 * len(_SECRET)
    assert caplog.text.count("are not encrypted (ACTORRPC_TLS=off)") == (0 if secure else 2)
    pieces = [_SECRET[at : at + 8] for at in range(0, len(_SECRET), 8)]
    assert any(piece in recorded for piece in pieces) is not secure
    for word in (b"operator", b"a0", b"aRPC\x01"):  # from pickles, introductions, the handshake
        if len(word) > 2:
            assert (word in recorded) is not secure


def _terminating(options: dict[str, str]) -> tuple[Any, Any]:
    """Return the two ends of a relay that speaks TLS to both sides with these certificates, or with its own temporary one."""
    mine = Tls.load(Settings(**options))
    assert mine is not None
    mine.serve()

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


@pytest.mark.parametrize("shown", ["its own", "of the same CA", "stolen"])
@pytest.mark.prints("'a0' did not prove to worker 'a1' that it holds the group's key")
def test_a_relay_that_terminates_tls_is_refused_by_both_sides(shown: str, tmp_path: Path) -> None:
    """It shows its own certificate, a certificate of the same CA, or that of a worker, but it does not have the group's key."""
    workers = _ON if shown == "its own" else files().options
    own = temporary_certificates(tmp_path, authority=files()).options if "CA" in shown else workers
    with (
        _Relay(*_terminating(own)) as relay,
        _workers(workers, workers, through=lambda address: relay.before(address)) as (a0, a1),
    ):
        with pytest.raises(AuthenticationError, match="it has another key"):
            _add(a0)
        assert b"aRPC" in relay.seen
        assert b"operator" not in relay.seen
        assert a0.peer("a1").conn is None
        assert not a1.connector.connections()
