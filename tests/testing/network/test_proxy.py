"""The fault proxy between plain sockets, and between workers."""

from __future__ import annotations

import contextlib
import operator
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from actorrpc import rpc, testing
from actorrpc.config import host_and_port
from actorrpc.errors import ConfigError, PeerDiedError
from actorrpc.rpc import api
from actorrpc.testing import FaultProxy
from tests import processes
from tests.agent.agents import agents
from tests.ranks import run_group

_NOBODY = ("127.0.0.1", 1)


class Echo:
    """Sends received bytes back, and records them and how each connection ended."""

    def __init__(self, family: int = socket.AF_INET, address: Any = ("127.0.0.1", 0)) -> None:
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen(16)
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
            assert (proxy.connections, proxy.live) == (1, 1)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""  # the end of one direction is relayed, and then the end of the other
        _until(lambda: not proxy.live)
        assert proxy.relayed == 2 * len(data)
        assert not proxy.struck
        assert echo.await_end() == "end"


def test_the_proxy_works_over_ipv6(echo: Echo) -> None:
    with FaultProxy(echo.address, host="::1") as proxy, _dial(proxy) as sock:
        assert proxy.address.startswith("[::1]:")
        sock.sendall(b"hello")
        assert _read(sock, 5) == b"hello"


def test_latency_keeps_the_order_of_bytes(echo: Echo) -> None:
    late = testing.latency(0.05, jitter=0.05, direction="to")
    with FaultProxy(echo.address, disturbances=[late]) as proxy, _dial(proxy) as sock:
        begun = time.monotonic()
        for number in range(20):
            sock.sendall(bytes([number]) * 10)
        assert _read(sock, 200) == b"".join(bytes([number]) * 10 for number in range(20))
        assert time.monotonic() - begun >= 0.05  # at least


def test_a_throttle_slows_the_sender(echo: Echo) -> None:
    slow = testing.throttle(100_000, direction="from")
    with FaultProxy(echo.address, disturbances=[slow]) as proxy, _dial(proxy) as sock:
        begun = time.monotonic()
        sock.sendall(bytes(20_000))
        assert len(_read(sock, 20_000)) == 20_000
        assert time.monotonic() - begun >= 0.2


@pytest.mark.parametrize("action", ["reset", "cut", "half_close"])
@pytest.mark.parametrize("pieces", [1, 10])
def test_reset_cut_and_half_close_strike_after_the_given_number_of_bytes(
    echo: Echo, action: str, pieces: int
) -> None:
    """Exactly the given number of bytes passes, whatever the sizes of the writes."""
    strike = getattr(testing, action)(after=700, direction="to")
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
    strike = testing.cut(after=4, part=0.5, direction="to")
    with FaultProxy(echo.address, disturbances=[strike]) as proxy, _dial(proxy) as sock:
        sock.sendall(b"1234")
        assert _read(sock, 4) == b"1234"
        sock.sendall(b"abcdef")
        assert _rest(sock) in (b"", b"abc")
        assert proxy.struck == {"cut": 1}
        assert echo.await_end()
    assert echo.got == [b"1234abc"]


def test_a_stall_delays_bytes_for_its_duration(echo: Echo) -> None:
    with FaultProxy(echo.address, disturbances=[testing.stall(0.1, after=3)]) as proxy, _dial(proxy) as sock:
        begun = time.monotonic()
        sock.sendall(b"123456")
        assert _read(sock, 6) == b"123456"
        assert time.monotonic() - begun >= 0.1
        assert proxy.struck == {"stall": 2}


def test_times_and_connections_limit_where_a_fault_strikes(echo: Echo) -> None:
    faults = [testing.cut(connections=[1, 2], direction="to", times=1)]
    with FaultProxy(echo.address, disturbances=faults) as proxy:
        for number in range(4):
            with _dial(proxy) as sock:
                sock.sendall(b"x")
                assert _read(sock, 1) == (b"" if number == 1 else b"x")
        assert (proxy.struck, proxy.connections) == ({"cut": 1}, 4)


def _flipped(seed: int, size: int) -> bytes:
    echo = Echo()
    try:
        flips = testing.bit_flips(500, direction="to", after=100)
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
        strike = testing.half_close(after=(1, 1000), direction="to")
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
            late = testing.half_close(after=2, direction="from")
            never = testing.reset(after=3)
            proxy.add(late)
            proxy.add(never)
            proxy.remove(never)
            sock.sendall(b"12345")
            assert _rest(sock) == b"12"
            proxy.remove(late)
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


def test_the_proxy_replaces_a_unix_socket_and_restores_it() -> None:
    directory = tempfile.mkdtemp(dir=processes.scratch())
    path = os.path.join(directory, "s")
    echo = Echo(socket.AF_UNIX, path)
    try:
        with FaultProxy(path, disturbances=[testing.cut(after=10)]) as proxy:
            assert proxy.address == path
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(path)
                sock.sendall(b"12345678901234")
                assert _rest(sock) in (b"", b"1234567890")
            assert echo.await_end()
        assert echo.got == [b"1234567890"]
        with socket.socket(socket.AF_UNIX) as sock:  # the original socket is back at its path
            sock.connect(path)
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
    finally:
        echo.close()
    assert os.listdir(directory) == ["s"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: testing.latency(-1),
        lambda: testing.latency("1"),  # type: ignore[arg-type]
        lambda: testing.latency(1, direction="up"),
        lambda: testing.latency(1, connections=3),  # type: ignore[arg-type]
        lambda: testing.latency(1, connections=["first"]),  # type: ignore[list-item]
        lambda: testing.throttle(0),
        lambda: testing.bit_flips(0),
        lambda: testing.bit_flips(1.5),  # type: ignore[arg-type]
        lambda: testing.stall(float("nan")),
        lambda: testing.cut(after=(3, 1)),
        lambda: testing.cut(after=-1),
        lambda: testing.cut(after=0.5),  # type: ignore[arg-type]
        lambda: testing.cut(part=1.5),
        lambda: testing.reset(times=-1),
        lambda: testing.reset(times=True),
        lambda: testing.reset(probability=2),
        lambda: FaultProxy(seed="x"),  # type: ignore[arg-type]
        lambda: FaultProxy(disturbances=["reset"]),  # type: ignore[list-item]
        lambda: FaultProxy(3),  # type: ignore[arg-type]
        lambda: FaultProxy(host="192.0.2.1"),
    ],
)
def test_invalid_proxy_arguments_raise_config_error(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_a_proxy_can_be_started_once_and_raises_when_it_does_not_run(echo: Echo) -> None:
    proxy = FaultProxy(echo.address)
    with pytest.raises(RuntimeError, match="does not run"):
        proxy.reset()
    with pytest.raises(ConfigError, match="without target"):
        _ = proxy.options
    with proxy, pytest.raises(RuntimeError, match="once"):
        proxy.start()
    proxy.close()
    with pytest.raises(RuntimeError, match="does not run"):
        _ = proxy.live
    with pytest.raises(FileNotFoundError):
        FaultProxy("/nowhere/at/all").start()


# -- between workers -------------------------------------------------------------------------------


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
        os.environ.update(options)
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
    each = [dict(proxy.environment if by_variables else proxy.options) for proxy in proxies]
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
    faults = [testing.latency(0.001, jitter=0.002), testing.throttle(2e8)]
    with FaultProxy(disturbances=faults) as zero, FaultProxy(disturbances=faults) as one:
        dialled = _behind(calls, zero, one, by_variables=by_variables)
        assert dialled == [(host_and_port(one.address)[1], ""), (host_and_port(zero.address)[1], "")]
        assert zero.connections + one.connections >= 1
        assert zero.relayed + one.relayed > 8_000_000


def broken(rank: int) -> int:
    """Call until a call fails, at most 300 times."""
    try:
        for count in range(0 if rank else 300):
            assert rpc.rpc_sync("worker1", operator.add, (count, 2), timeout=10) == count + 2
    except PeerDiedError:
        return 1
    return 0


@pytest.mark.parametrize("action", ["reset", "cut", "half_close"])
def test_calls_over_breaking_connections_succeed_or_raise_peer_died_error(action: str) -> None:
    """Connections may break in the middle of a frame, whichever worker has dialled."""
    strike = getattr(testing, action)(after=5_000, part=0.5, times=2)
    with FaultProxy(disturbances=[strike]) as zero, FaultProxy(disturbances=[strike]) as one:
        assert _behind(broken, zero, one)[1] == 0
        assert set(zero.struck + one.struck) == {action}


def test_a_proxy_can_be_put_before_a_running_worker() -> None:
    with agents(2) as (first, second), pytest.MonkeyPatch.context() as patch:

        class Group:
            agent = first

        patch.setattr(api, "group", Group)
        with FaultProxy.before("a1") as proxy:
            peer = first.peer("a1")
            assert first.ask(peer, operator.add, (1, 2), {}, 20.0) == 3
            tensor = torch.arange(
                100_000
            )  # sent through shared memory, whose descriptor passes through the proxy
            assert first.ask(peer, torch.sum, (tensor,), {}, 20.0) == tensor.sum()
            assert proxy.connections == 2
            assert proxy.reset() == 2
            _until(lambda: peer.state != "alive")
        assert second.record.unix_path is not None
        assert os.path.exists(second.record.unix_path)


def test_a_proxy_cannot_be_put_before_a_worker_without_a_unix_socket() -> None:
    with agents(2, unix=False, transport="tcp") as (first, _), pytest.MonkeyPatch.context() as patch:

        class Group:
            agent = first

        patch.setattr(api, "group", Group)
        with pytest.raises(ConfigError, match="Unix socket"):
            FaultProxy.before("a1")
