"""TLS between workers: wrong certificates are reported at the start; with correct ones, calls work as without TLS."""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
import random
import select
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc.rpc as rpc
from actorrpc import _time
from actorrpc.config import Settings
from actorrpc.errors import ConfigError, WrongTypeError
from actorrpc.transport.tls import Tls
from actorrpc.transport.tls_socket import TlsSocket
from tests.agent.agents import agents
from tests.agent.test_resumption import behind, call
from tests.certificates import Certificates, files, foreign, temporary_certificates
from tests.intruders.doors import reset
from tests.ranks import run_group

# -- the socket -----------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """Return both ends of a TLS connection."""
    with _pair(files().options) as ends:
        yield ends


def test_a_connection_reset_before_its_tls_handshake_leaks_no_socket() -> None:
    loaded = Tls.load(Settings(**files().options))
    assert loaded is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        reset(listener.accept()[0])
        number = ours.fileno()
        select.select([ours], [], [], 30)
        with pytest.raises(ConnectionResetError):
            loaded.dial(ours, _time.now() + 30)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


def _tls(**options: Any) -> Tls:
    loaded = Tls.load(Settings(**options))
    assert loaded is not None
    loaded.serve()
    return loaded


@contextlib.contextmanager
def _ends(client: Tls, accept: Callable[[socket.socket], TlsSocket]) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted = accept(listener.accept()[0])
    found: list[TlsSocket] = []
    thread = threading.Thread(target=lambda: found.append(client.dial(dialled, _time.now() + 30)))
    thread.start()
    accepted.handshake_until(_time.now() + 30)
    thread.join()
    assert found[0].version() == "TLSv1.3"
    yield found[0], accepted
    found[0].close()
    accepted.close()


@contextlib.contextmanager
def _pair(options: dict[str, Any]) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    loaded = _tls(**options)
    with _ends(loaded, loaded.accept) as (one, other):
        yield one, other


def test_the_binding_is_equal_at_both_ends_and_differs_for_each_connection() -> None:
    """It depends on a feature of this version of Python and OpenSSL."""
    for options in ({}, files().options):
        loaded, found = _tls(**options), set()
        for _ in range(3):
            with _ends(loaded, loaded.accept) as (one, other):
                assert one.binding == other.binding
                assert len(one.binding) == 32
                found.add(one.binding)
        assert len(found) == 3


def _server(shown: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown.cert, shown.key)
    return context


def test_the_binding_depends_on_the_certificate_that_the_dialling_side_receives() -> None:
    der = ssl.PEM_cert_to_DER_cert(Path(files().cert).read_text())
    for own, equal in ((der, True), (b"another certificate", False)):
        digest, context = hashlib.sha256(own).digest(), _server(files())
        with _ends(_tls(), partial(TlsSocket, context=context, own=digest, server=True)) as (one, other):
            assert (one.binding == other.binding) is equal


def test_without_a_ca_the_dates_of_the_accepting_sides_certificate_have_no_meaning(tmp_path: Path) -> None:
    """Only the key authenticates the workers, so their clocks may differ."""
    expired = _server(temporary_certificates(tmp_path, days=-3650))
    with _ends(_tls(), partial(TlsSocket, context=expired, own=b"", server=True)) as (one, _):
        assert one.secured


def _readable(sock: TlsSocket, wait_ms: int = 0) -> bool:
    if sock.pending:
        return True
    poller = select.poll()
    poller.register(sock.fileno(), select.POLLIN)
    return bool(poller.poll(wait_ms))


def test_bytes_arrive_in_order_for_all_sizes_of_writes_and_reads(pair: tuple[TlsSocket, TlsSocket]) -> None:
    one, other = pair
    one.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    other.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    dice = random.Random(3)
    data = dice.randbytes(3_000_000)
    got = bytearray()

    def read() -> None:
        cuts = random.Random(4)
        while len(got) < len(data):
            sizes = [cuts.choice((1, 40, 5_000, 100_000)) for _ in range(cuts.randrange(1, 4))]
            buffers = [memoryview(bytearray(size)) for size in sizes]
            assert _readable(other, 30_000)
            try:
                (count,) = other.recvmsg_into(buffers)
            except BlockingIOError:
                continue
            assert count
            got.extend(b"".join(buffers)[:count])

    thread = threading.Thread(target=read)
    rest: list[memoryview] = []
    left, blocked = memoryview(data), 0
    while left or rest:
        if not rest:
            for _ in range(dice.randrange(1, 5)):
                size = dice.choice((1, 40, 16_384, 16_385, 300_000))
                rest.append(left[:size])
                left = left[size:]
        try:
            count = one.sendmsg(rest) if len(rest) > 1 else one.send(bytes(rest[0]))
        except BlockingIOError:
            blocked += 1
            if not thread.is_alive():
                thread.start()
            poller = select.poll()
            poller.register(one.fileno(), select.POLLOUT)
            assert poller.poll(30_000)
            continue
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]
    assert blocked
    thread.join()
    assert bytes(got) == data


def test_bytes_before_a_damaged_record_are_delivered(pair: tuple[TlsSocket, TlsSocket]) -> None:
    one, other = pair
    one.sendall(b"good" * 5_000)  # two records
    socket.socket.send(one.sock, b"\x17\x03\x03\x00\x20" + bytes(32))
    data = b""
    while len(data) < 20_000:
        assert _readable(other, 30_000)
        data += other.recv(100_000)
    assert data == b"good" * 5_000
    assert _readable(other, 30_000)
    with pytest.raises(ssl.SSLError):
        other.recv(100_000)


def test_a_read_ends_although_the_other_side_sends_more_and_more_without_data() -> None:
    """A peer that has not proved the key could otherwise keep a thread, by sending new keys or tickets all the time."""
    context = _server(files())
    context.num_tickets = 2_000
    with _ends(_tls(), partial(TlsSocket, context=context, own=b"", server=True)) as (one, other):
        other.sendall(b"data")
        reads = 0
        while True:
            reads += 1
            assert _readable(one, 30_000)
            with contextlib.suppress(BlockingIOError):
                assert one.recv_into(memoryview(bytearray(100))) == 4
                break
        assert reads > 2


def test_operations_on_a_closed_tls_socket_raise_os_error(pair: tuple[TlsSocket, TlsSocket]) -> None:
    """A thread may use the socket just after another thread closed it, as when a guest's time has run out."""
    for sock in pair:
        sock.close()
        sock.close()
        attempts: list[Callable[[], object]] = [
            lambda sock=sock: sock.recv(10),
            lambda sock=sock: sock.send(b"a"),
            lambda sock=sock: sock.sendmsg((memoryview(b"a"),)),
        ]
        for attempt in attempts:
            with pytest.raises(OSError, match="Bad file descriptor"):
                attempt()


def test_a_tls_socket_may_have_descriptor_0() -> None:
    """A process without a standard input may get this descriptor for a connection."""
    loaded = Tls.load(Settings(**files().options))
    assert loaded is not None
    kept = os.dup(0)
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()),
        ):
            os.close(0)
            accepted = loaded.accept(listener.accept()[0])
            assert accepted.fileno() == 0
            assert not accepted.handshake()  # the other side has sent nothing yet
            accepted.close()
    finally:
        os.dup2(kept, 0)
        os.close(kept)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_connection_cut_during_the_handshake_is_not_reported_as_a_certificate_error(part: float) -> None:
    """The dialling side retries after a ConnectionResetError."""
    loaded = Tls.load(Settings(**files().options))
    assert loaded is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        there = listener.accept()[0]
    here, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = _server(files()).wrap_bio(here, back, server_side=True)

    def answer() -> None:
        with there:
            while not here.pending:
                here.write(there.recv(1 << 16))
                with pytest.raises(ssl.SSLWantReadError):
                    server.do_handshake()
                if back.pending:
                    flight = back.read()
                    there.sendall(flight[: int(len(flight) * part)])
                    return

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(ConnectionResetError):
        loaded.dial(dialled, _time.now() + 30)
    thread.join()


def _write_into_nothing(rank: int, world_size: int, options: dict[str, Any]) -> str:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with _pair(options) as (one, other):
        other.close()
        try:
            while True:
                one.send(bytes(100))
        except BlockingIOError:
            return "the kernel took it all"
        except ConnectionError:
            # Write once more to the connection that is known to be reset.
            with pytest.raises(ConnectionError):
                one.sendmsg((memoryview(bytes(100)),))
            assert not signal.sigpending()
            assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            return "refused"


def test_writing_to_a_closed_connection_raises_without_sigpipe() -> None:
    assert run_group(_write_into_nothing, 1, files().options) == ["refused"]


def test_recv_on_a_tls_socket_honours_its_timeout(pair: tuple[TlsSocket, TlsSocket]) -> None:
    one, other = pair
    one.settimeout(0.05)
    with pytest.raises(TimeoutError):
        one.recv(10)
    one.setblocking(False)
    with pytest.raises(BlockingIOError):
        one.recv(10)
    other.shutdown(socket.SHUT_RDWR)
    one.settimeout(30)
    assert one.recv(10) == b""


# -- workers ----------------------------------------------------------------------------------------------


def test_a_damaged_tls_record_makes_the_session_resume_over_another_socket() -> None:
    with behind() as ((a0, _), proxies):
        for number in range(5):
            assert call(a0, operator.add, number, 1) == number + 1
            conn = a0.peer("a1").conn
            assert conn is not None
            with conn.writer.lock:
                socket.socket.send(conn.stream.sock, b"\x17\x03\x03\x00\x20" + bytes(32))
            data = torch.full((50_000,), number)
            assert torch.equal(call(a0, torch.neg, data), -data)
            assert a0.peer("a1").conn is conn
            assert conn.lapses > number
        assert sum(proxy.connections for proxy in proxies) > 5


def test_unix_sockets_are_not_encrypted() -> None:
    with agents(2, transport="auto", **files().options) as (a0, _):
        if a0.record.unix_path is None:
            pytest.skip("this run is forced over TCP")
        assert call(a0, operator.add, 1, 2) == 3
        assert not isinstance(a0.peer("a1").conn.stream, TlsSocket)


# -- the start ----------------------------------------------------------------------------------------------


def _wrong(tmp_path: Path) -> dict[str, tuple[dict[str, Any], str]]:
    expired = temporary_certificates(tmp_path, name="expired", days=-1, authority=files())
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    junk.chmod(0o600)
    open_key = tmp_path / "open.key"
    open_key.write_bytes(Path(files().key).read_bytes())
    open_key.chmod(0o640)
    return {
        "no key": ({"tls_key": None}, "not set: ACTORRPC_TLS_KEY"),
        "no certificate": ({"tls_cert": ""}, "not set: ACTORRPC_TLS_CERT"),
        "only a CA": (
            {"tls_cert": None, "tls_key": None},
            "not set: ACTORRPC_TLS_CERT, ACTORRPC_TLS_KEY",
        ),
        "no such certificate": ({"tls_cert": "/nowhere/at.pem"}, "ACTORRPC_TLS_CERT.*No such file"),
        "no such key": ({"tls_key": "/nowhere/at.key"}, "ACTORRPC_TLS_KEY.*No such file"),
        "no such CA": ({"tls_ca": "/nowhere/ca.pem"}, "ACTORRPC_TLS_CA.*No such file"),
        "a directory": ({"tls_cert": str(tmp_path)}, "ACTORRPC_TLS_CERT.*directory"),
        "no certificate in it": ({"tls_cert": str(junk)}, "ACTORRPC_TLS_CERT"),
        "no key in it": ({"tls_key": str(junk)}, "ACTORRPC_TLS_KEY"),
        "no CA in it": ({"tls_ca": str(junk)}, "ACTORRPC_TLS_CA"),
        "a key that others can read": ({"tls_key": str(open_key)}, "chmod 600"),
        "the key of another": ({"tls_key": foreign().key}, "key values mismatch"),
        "of another CA": ({"tls_ca": foreign().ca}, "signed by that CA"),
        "expired": ({"tls_cert": expired.cert, "tls_key": expired.key}, "expired"),
        "an old version": ({"tls_min_version": "1.1"}, "one of '1.2', '1.3'"),
        "certificates although TLS is off": ({"tls": False}, "TLS is off"),
    }


_CASES = """
no key, no certificate, only a CA, no such certificate, no such key, no such CA, a directory, no certificate in it, no key in it,
no CA in it, a key that others can read, the key of another, of another CA, expired, an old version,
certificates although TLS is off
"""


@pytest.mark.parametrize("case", [case.strip() for case in _CASES.split(",")])
def test_wrong_tls_options_are_refused_before_a_store_is_opened(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("ACTORRPC_TLS", *files().environment):
        monkeypatch.delenv(variable, raising=False)
    change, words = _wrong(tmp_path)[case]
    given = {**files().options, **change}
    with pytest.raises(ConfigError, match=words):
        rpc.init_rpc(
            "a",
            rank=0,
            world_size=1,
            rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/store", **given),
        )
    assert not (tmp_path / "store").exists()
    for name, value in given.items():
        if value is not None:
            monkeypatch.setenv(f"ACTORRPC_{name.upper()}", "off" if value is False else value)
    with pytest.raises(ConfigError, match=words):
        rpc.init_rpc("a", rank=0, world_size=1)


def test_tls_options_are_checked_for_their_types_and_completeness() -> None:
    with pytest.raises(WrongTypeError, match="tls_cert"):
        rpc.RpcBackendOptions(tls_cert=3)  # type: ignore[arg-type]
    # With transport="unix", the files are not read.
    assert Tls.load(Settings(transport="unix", tls_cert="a", tls_key="b", tls_ca="c")) is None
    with pytest.raises(ConfigError, match="not set: "):
        Tls.load(Settings(transport="unix", tls_cert="a"))


@pytest.mark.prints("expires on .*: renew it, and restart the workers")
@pytest.mark.parametrize(("days", "warns"), [(13, True), (15, False)])
def test_a_certificate_that_expires_within_14_days_logs_a_warning(
    days: int, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = temporary_certificates(tmp_path, days=days)
    Tls.load(Settings(**made.options))
    assert (made.cert in caplog.text) is warns
