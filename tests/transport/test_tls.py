"""TLS between workers: wrong certificates are reported at the start; with correct ones, calls work as without TLS."""

from __future__ import annotations

import contextlib
import operator
import os
import random
import select
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
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
from tests.agent.test_resumption import NIGHTLY, behind, call
from tests.certificates import files, foreign, temporary_certificates
from tests.harness.proxy import Disturbance
from tests.intruders.doors import reset
from tests.layers import rest_is_slow
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


@contextlib.contextmanager
def _pair(options: dict[str, Any]) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    loaded = Tls.load(Settings(**options))
    assert loaded is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted = loaded.accept(listener.accept()[0])
    found: list[TlsSocket] = []
    thread = threading.Thread(target=lambda: found.append(loaded.dial(dialled, _time.now() + 30)))
    thread.start()
    accepted.handshake_until(_time.now() + 30)
    thread.join()
    assert found[0].version() == "TLSv1.3"
    assert found[0].binding == accepted.binding != b""
    yield found[0], accepted
    found[0].close()
    accepted.close()


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
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files().cert, files().key)
    server = context.wrap_bio(here, back, server_side=True)

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


@pytest.mark.limit(120)
@pytest.mark.parametrize("kind", rest_is_slow(["reset", "cut"]))
@pytest.mark.parametrize("seed", range(20 if NIGHTLY else 1))
def test_calls_survive_breaking_tls_connections(kind: str, seed: int) -> None:
    disturbance = Disturbance(kind, after=(6_000, 60_000), part=0.5, times=4)
    each = files().options
    with behind(disturbance, seed=seed, each=(each, each)) as ((a0, a1), proxies):
        for number in range(60):
            data = torch.full((4_000,), number)
            assert torch.equal(call(a0 if number % 2 else a1, torch.neg, data), -data)
        assert sum(proxy.struck.total() for proxy in proxies)
        assert sum(proxy.connections for proxy in proxies) > 1


def test_a_damaged_tls_record_makes_the_session_resume_over_another_socket() -> None:
    each = files().options
    with behind(each=(each, each)) as ((a0, _), proxies):
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
    good = files().options
    expired = temporary_certificates(tmp_path, name="expired", days=-1, authority=files())
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    junk.chmod(0o600)
    open_key = tmp_path / "open.key"
    open_key.write_bytes(Path(files().key).read_bytes())
    open_key.chmod(0o640)
    return {
        "no key": ({"tls_key": None}, "ACTORRPC_TLS_KEY is not set"),
        "no certificate": ({"tls_cert": ""}, "ACTORRPC_TLS_CERT is not set"),
        "only a CA": (
            {"tls_cert": None, "tls_key": None},
            "ACTORRPC_TLS_CERT and ACTORRPC_TLS_KEY is not set",
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
    } | {"nothing": (dict.fromkeys(good), "")}


_CASES = """
no key, no certificate, only a CA, no such certificate, no such key, no such CA, a directory, no certificate in it, no key in it,
no CA in it, a key that others can read, the key of another, of another CA, expired, an old version, nothing
"""


@pytest.mark.parametrize("case", [case.strip() for case in _CASES.split(",")])
def test_wrong_tls_options_are_refused_before_a_store_is_opened(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in files().environment:
        monkeypatch.delenv(variable, raising=False)
    change, words = _wrong(tmp_path)[case]
    given = {**files().options, **change}
    if not words:
        loaded = Tls.load(Settings(**given))
        assert loaded is not None
        assert not loaded.has_certificates
        return
    with pytest.raises(ConfigError, match=words):
        rpc.init_rpc(
            "a",
            rank=0,
            world_size=1,
            rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/store", **given),
        )
    assert not (tmp_path / "store").exists()
    for name, value in given.items():
        if value:
            monkeypatch.setenv(f"ACTORRPC_{name.upper()}", value)
    with pytest.raises(ConfigError, match=words):
        rpc.init_rpc("a", rank=0, world_size=1)


def test_tls_options_are_checked_for_their_types_and_completeness() -> None:
    with pytest.raises(WrongTypeError, match="tls_cert"):
        rpc.RpcBackendOptions(tls_cert=3)  # type: ignore[arg-type]
    # With transport="unix", the files are not read.
    assert Tls.load(Settings(transport="unix", tls_cert="a", tls_key="b", tls_ca="c")) is None
    with pytest.raises(ConfigError, match="is not set"):
        Tls.load(Settings(transport="unix", tls_cert="a"))
