"""The fault proxy between plain sockets, and between workers."""

from __future__ import annotations

import contextlib
import operator
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from actorrpc import rpc
from actorrpc.config import host_and_port
from actorrpc.errors import PeerDiedError
from actorrpc.rpc import api
from actorrpc.testing import processes
from tests.harness.proxy import Disturbance, FaultProxy
from tests.ranks import run_group

_NOBODY = ("127.0.0.1", 1)


class Echo:
    """Sends received bytes back, and records them and how each connection ended."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.got: list[bytes] = []
        self.ends: list[str] = []
        self.changed = threading.Condition()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.got.append(b"")
            thread = threading.Thread(target=self._serve, args=(sock, len(self.got) - 1))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        end = "end"
        with sock:
            try:
                while data := sock.recv(1 << 16):
                    with self.changed:
                        self.got[number] += data
                    sock.sendall(data)
            except OSError as error:
                end = type(error).__name__
        with self.changed:
            self.ends.append(end)
            self.changed.notify_all()

    def await_end(self) -> str:
        with self.changed:
            self.changed.wait_for(lambda: self.ends, 20)
            return self.ends[0]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


def _dial(proxy: FaultProxy) -> socket.socket:
    host, port = host_and_port(proxy.address)
    return socket.create_connection((host, port or 0), timeout=20)


def _read(sock: socket.socket, count: int) -> bytes:
    """Read ``count`` bytes, or less at the end of the connection, which is a reset if the peer had unread bytes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while len(found) < count and (data := sock.recv(count - len(found))):
            found += data
    return found


def _rest(sock: socket.socket) -> bytes:
    found = b""
    while data := sock.recv(1 << 16):
        found += data
    return found


def _until(condition: Callable[[], Any]) -> None:
    """Poll until the condition holds; the limit of the test bounds the wait."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.002)


# -- between sockets -------------------------------------------------------------------------------


def test_the_proxy_relays_bytes_and_counts_them(echo: Echo) -> None:
    data = os.urandom(3_000_000)
    with FaultProxy(echo.address) as proxy:
        with _dial(proxy) as sock:
            sender = threading.Thread(target=sock.sendall, args=(data,))
            sender.start()
            assert _read(sock, len(data)) == data
            sender.join()
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""  # the end of one stream passes, and then that of the other
        assert (proxy.connections, proxy.struck) == (1, {})
    assert echo.got == [data]


@pytest.mark.parametrize("action", ["reset", "cut", "half_close"])
@pytest.mark.parametrize("pieces", [1, 10])
def test_reset_cut_and_half_close_strike_after_the_given_number_of_bytes(
    echo: Echo, action: Any, pieces: int
) -> None:
    """However the bytes come, exactly so many pass."""
    strike = Disturbance(action, after=700, direction="to")
    with FaultProxy(echo.address, disturbances=[strike]) as proxy, _dial(proxy) as sock:
        got_reset = False  # the kernel reports a reset once, to the next send or read
        for _ in range(pieces):
            try:
                sock.sendall(bytes(1000 // pieces))
            except ConnectionError as error:
                got_reset = got_reset or isinstance(error, ConnectionResetError)
        if action == "reset":
            if not got_reset:
                with pytest.raises(ConnectionResetError):
                    _rest(sock)
            assert echo.await_end() == "ConnectionResetError"
        elif action == "cut":
            with contextlib.suppress(ConnectionError):  # sending to a closed end causes a reset
                assert len(_rest(sock)) <= 700
            assert echo.await_end() in ("end", "BrokenPipeError", "ConnectionResetError")
        else:
            assert _rest(sock) == bytes(700)  # the other direction stays open until echo closes it
            assert echo.await_end() == "end"
        if action == "reset":
            assert len(echo.got[0]) <= 700  # a reset discards bytes that were not read yet
        else:
            assert echo.got == [bytes(700)]
        assert proxy.struck == {action: 1}


def test_a_cut_may_pass_a_part_of_a_write(echo: Echo) -> None:
    strike = Disturbance("cut", after=4, part=0.5, direction="to")
    with FaultProxy(echo.address, disturbances=[strike]) as proxy, _dial(proxy) as sock:
        sock.sendall(b"1234")
        assert _read(sock, 4) == b"1234"
        sock.sendall(b"abcdef")
        assert _rest(sock) in (b"", b"abc")
        assert proxy.struck == {"cut": 1}
        assert echo.await_end()
    assert echo.got == [b"1234abc"]


def test_times_and_connections_limit_where_a_fault_strikes(echo: Echo) -> None:
    faults = [Disturbance("cut", connections=[1, 2], direction="to", times=1)]
    with FaultProxy(echo.address, disturbances=faults) as proxy:
        for number in range(4):
            with _dial(proxy) as sock:
                sock.sendall(b"x")
                assert _read(sock, 1) == (b"" if number == 1 else b"x")
        assert (proxy.struck, proxy.connections) == ({"cut": 1}, 4)


def _flipped(seed: int, size: int) -> bytes:
    echo = Echo()
    try:
        flips = Disturbance("bit_flips", every=500, direction="to", after=100)
        with FaultProxy(echo.address, disturbances=[flips], seed=seed) as proxy, _dial(proxy) as sock:
            for start in range(0, 20_000, size):
                sock.sendall(bytes(min(size, 20_000 - start)))
            found = _read(sock, 20_000)
            ones = sum(each.bit_count() for each in found)
            assert not any(found[:100])
            assert 10 < ones < 200
            assert proxy.struck == {"bit_flips": ones}
            return found
    finally:
        echo.close()


def test_bit_flips_of_the_same_seed_change_the_same_bytes() -> None:
    assert _flipped(1, 20_000) == _flipped(1, 313)
    assert _flipped(1, 20_000) != _flipped(2, 20_000)


def test_the_position_of_a_strike_follows_from_the_seed(echo: Echo) -> None:
    def lengths(seed: int) -> list[int]:
        before = len(echo.got)
        strike = Disturbance("half_close", after=(1, 1000), direction="to")
        with FaultProxy(echo.address, disturbances=[strike], seed=seed) as proxy:
            for _ in range(4):
                with _dial(proxy) as sock:
                    sock.sendall(bytes(1000))
                    _rest(sock)
        return [len(each) for each in echo.got[before:]]

    first = lengths(3)
    assert len(set(first)) > 1
    assert lengths(3) == first != lengths(4)


def test_a_running_proxy_can_stall_refuse_reset_cut_and_change_its_faults(echo: Echo) -> None:
    with FaultProxy(echo.address) as proxy:
        with _dial(proxy) as sock:
            proxy.stall()
            sock.sendall(b"held")
            sock.settimeout(0.05)
            with pytest.raises(TimeoutError):
                sock.recv(1)
            proxy.resume()
            sock.settimeout(20)
            assert _read(sock, 4) == b"held"
            late = Disturbance("half_close", after=2, direction="from", connections=[0])
            proxy.add(late)
            sock.sendall(b"12345")
            assert _rest(sock) == b"12"
        with _dial(proxy) as one, _dial(proxy) as two:
            for sock in (one, two):
                sock.sendall(b"x")
                assert sock.recv(1) == b"x"
            proxy.refuse()
            with pytest.raises(ConnectionRefusedError):
                _dial(proxy)
            assert proxy.reset() == 2
            for sock in (one, two):
                with pytest.raises(ConnectionResetError):
                    sock.recv(1)
            proxy.resume()
        with _dial(proxy) as sock:
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
            assert proxy.cut() == 1
            assert sock.recv(1) == b""
        assert proxy.struck == {"half_close": 1, "reset": 2, "cut": 1}


def test_the_proxy_refuses_connections_while_its_target_does_not_listen() -> None:
    with FaultProxy(_NOBODY) as proxy:

        def dialled() -> str:
            try:
                with _dial(proxy) as sock:
                    return repr(sock.recv(1))
            except OSError as error:
                return type(error).__name__

        _until(lambda: dialled() == "ConnectionRefusedError")
        _until(lambda: dialled() == "ConnectionResetError")  # the proxy has dialled its target again


# -- before workers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("host", ("host", None)),
        ("host:1", ("host", 1)),
        ("::1", ("::1", None)),
        ("[::1]", ("::1", None)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
    ],
)
def test_host_and_port_parses_addresses(text: str, parts: tuple[str, int | None]) -> None:
    assert host_and_port(text) == parts


def _member(
    rank: int,
    world_size: int,
    fn: Callable[[int], Any],
    store: str,
    each: list[dict[str, Any]],
    by_variables: bool,
) -> Any:
    options = dict(each[rank])
    if by_variables:
        os.environ.update({f"ACTORRPC_{name.upper()}": str(value) for name, value in options.items()})
        options = {}
    given = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}/store", **options)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=given)
    try:
        result = fn(rank)
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    rpc.shutdown()
    return result


def _behind(fn: Callable[[int], Any], *proxies: FaultProxy, by_variables: bool = False) -> list[Any]:
    store = tempfile.mkdtemp(prefix="store-", dir=processes.scratch())
    each = [proxy.options for proxy in proxies]
    return run_group(_member, len(proxies), fn, store, each, by_variables)


def calls(rank: int) -> tuple[int, str]:
    other = f"worker{1 - rank}"
    assert rpc.rpc_sync(other, operator.add, (1, 2)) == 3
    tensor = torch.arange(500_000)
    assert rpc.rpc_sync(other, torch.add, (tensor, 1)).sum() == tensor.sum() + len(tensor)
    rref = rpc.remote(other, operator.mul, (3, 4))
    assert rref.to_here() == 12
    record = api.group().agent.peer(other).record
    return record.tcp[0][1], record.unix_path or ""


@pytest.mark.parametrize("by_variables", [False, True])
def test_workers_with_proxies_reach_each_other_through_the_proxies(by_variables: bool) -> None:
    with FaultProxy() as zero, FaultProxy() as one:
        dialled = _behind(calls, zero, one, by_variables=by_variables)
        assert dialled == [(host_and_port(one.address)[1], ""), (host_and_port(zero.address)[1], "")]
        assert zero.connections + one.connections >= 1


def broken(rank: int) -> int:
    """Call until a call fails, at most 300 times."""
    try:
        for count in range(0 if rank else 300):
            assert rpc.rpc_sync("worker1", operator.add, (count, 2), timeout=10) == count + 2
    except PeerDiedError:
        return 1
    return 0


@pytest.mark.parametrize("action", ["reset", "cut", "half_close"])
def test_calls_over_breaking_connections_succeed_or_raise_peer_died_error(action: Any) -> None:
    """In the middle of a frame, too; whichever of the two has dialled. Calls end well, or say that they did not."""
    strike = Disturbance(action, after=5_000, part=0.5, times=2)
    with FaultProxy(disturbances=[strike]) as zero, FaultProxy(disturbances=[strike]) as one:
        assert _behind(broken, zero, one)[1] == 0
        assert set(zero.struck + one.struck) == {action}
