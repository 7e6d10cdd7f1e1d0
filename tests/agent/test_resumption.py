"""TCP connections that break and are resumed: each call runs once, and each answer arrives."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from actorrpc.agent.acceptor import FAILURES_PER_S
from actorrpc.agent.agent import Agent
from actorrpc.config import Settings
from actorrpc.errors import PeerDiedError, ProtocolError
from actorrpc.futures import Future
from actorrpc.transport.connection import Connection
from actorrpc.transport.stream import CLOSED, ReliableStream, SocketStream
from actorrpc.transport.tls_socket import TlsSocket
from actorrpc.wire import handshake
from actorrpc.wire.frames import REPLY, Frame, pack_frame
from actorrpc.wire.identity import WorkerRecord
from tests.agent.agents import record, start_agent
from tests.harness.proxy import Disturbance, FaultProxy
from tests.layers import rest_is_slow

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"
_LIMIT_S = 60.0
_calls: Counter[int] = Counter()
_gate = threading.Event()


def note(number: int, value: Any) -> Any:
    _calls[number] += 1
    return value


def gated(value: Any) -> Any:
    assert _gate.wait(_LIMIT_S)
    return value


@contextlib.contextmanager
def behind(
    *disturbances: Disturbance, seed: int = 0, each: tuple[dict[str, Any], ...] = ({}, {})
) -> Iterator[tuple[list[Agent], list[FaultProxy]]]:
    """Run two agents over TCP, each behind its own proxy; ``each`` contains the settings of each agent."""
    records: dict[str | int, WorkerRecord] = {}
    made: list[Agent] = []
    proxies: list[FaultProxy] = []
    with contextlib.ExitStack() as stack:
        for rank, settings in enumerate(each):
            listener = socket.create_server(("127.0.0.1", 0))
            proxy = FaultProxy(listener.getsockname(), disturbances=disturbances, seed=seed + rank)
            stack.enter_context(proxy)
            host, _, port = proxy.address.rpartition(":")
            mine = replace(record(f"a{rank}", rank), tcp=((host, int(port)),))
            made.append(start_agent(mine, listener, records, transport="tcp", **settings))
            stack.callback(made[-1].close)
            proxies.append(proxy)
        yield made, proxies


def call(agent: Agent, function: Callable[..., Any], *args: Any, timeout: float = _LIMIT_S) -> Any:
    to = agent.peer("a1" if agent.name == "a0" else "a0")
    return agent.call_sync(to, function, args, {}, timeout)


def begin(agent: Agent, function: Callable[..., Any], *args: Any, timeout: float = _LIMIT_S) -> Future[Any]:
    future: Future[Any] = Future()
    to = agent.peer("a1" if agent.name == "a0" else "a0")
    agent.call(to, function, args, {}, timeout, future=future)
    agent.flush()
    return future


KINDS: dict[str, Callable[..., Disturbance]] = {
    "cut": partial(Disturbance, "cut"),
    "reset": partial(Disturbance, "reset"),
    "half_close": partial(Disturbance, "half_close"),
}


@pytest.mark.limit(120)
@pytest.mark.parametrize("kind", rest_is_slow(KINDS))
@pytest.mark.parametrize("seed", range(50 if NIGHTLY else 1))
def test_calls_run_once_although_their_connection_breaks_at_random_bytes(kind: str, seed: int) -> None:
    dice = random.Random(seed)
    disturbance = KINDS[kind](after=(700, 60_000), part=0.5)
    with behind(disturbance, seed=seed) as ((a0, a1), proxies):
        _calls.clear()
        waiting: list[tuple[Future[Any], int, Any]] = []
        for number in range(200):
            match dice.randrange(4):
                case 0:
                    size = dice.choice((10, 1_000, 20_000))
                    value = torch.full((size,), number % 1000)
                    waiting.append((begin(a0, note, number, value), number, value))
                case 1:
                    data = dice.randbytes(dice.choice((3, 3_000, 60_000)))
                    assert call(a1, note, number, data) == data
                case _:
                    waiting.append((begin(a0, note, number, number), number, number))
            if len(waiting) > 10:
                future, _, value = waiting.pop(dice.randrange(len(waiting)))
                assert torch.equal(torch.as_tensor(future.wait()), torch.as_tensor(value))
        for future, _, value in waiting:
            assert torch.equal(torch.as_tensor(future.wait()), torch.as_tensor(value))
        assert len(_calls) == 200
        assert set(_calls.values()) == {1}
        assert sum(proxy.struck.total() for proxy in proxies) >= 20  # otherwise the test has checked nothing
        assert [peer.state for agent in (a0, a1) for peer in agent.peers()] == ["alive"] * 2


@pytest.mark.parametrize("after", [*range(100, 1_000, 75)])
def test_a_connection_reset_during_its_setup_is_dialled_again(after: int) -> None:
    with behind(Disturbance("reset", after=after, connections={0})) as ((a0, _), _):
        assert [call(a0, note, 0, each) for each in range(3)] == [0, 1, 2]


class _LateEpoll:
    """An epoll that registers a socket only after another socket has replaced it."""

    def __init__(self, conn: Connection, strike: Callable[[], None]) -> None:
        self._conn, self._epoll, self._strike = conn, conn._epoll, strike

    def register(self, fd: int, mask: int) -> None:
        if self._conn._epoll is self:
            self._conn._epoll = self._epoll
            self._strike()
            pause = threading.Event()
            while self._conn.fd == fd:
                pause.wait(0.002)
        self._epoll.register(fd, mask)


def test_a_connection_that_breaks_before_it_is_registered_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    struck: list[Connection] = []
    register = Connection.register
    with behind() as ((a0, a1), proxies):

        def strike() -> None:
            pause = threading.Event()
            while a0.peer("a1").conn is None:  # set when the dialling side has finished its handshake
                pause.wait(0.002)
            proxies[1].reset()

        def registering(conn: Connection) -> None:
            if conn in a1.connector.connections() and not struck:
                struck.append(conn)
                conn._epoll = _LateEpoll(conn, strike)  # type: ignore[assignment]
            register(conn)

        monkeypatch.setattr(Connection, "register", registering)
        assert [call(a0, note, 0, each) for each in range(3)] == [0, 1, 2]
        assert struck
        assert a0.peer("a1").state == "alive"


@pytest.mark.limit(120)
def test_large_messages_survive_broken_connections() -> None:
    with behind(Disturbance("cut", after=(200_000, 3_000_000))) as ((a0, _), proxies):
        for number in range(4):
            value = torch.arange(1_000_000) + number
            assert torch.equal(call(a0, note, number, value), value)
        assert sum(proxy.struck.total() for proxy in proxies) >= 5


def test_a_tls_socket_is_replaced_before_its_keys_have_encrypted_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TlsSocket, "capacity", 3 << 20)
    with behind() as ((a0, _), _proxies):
        for number in range(6):
            value = torch.arange(500_000) + number
            assert torch.equal(call(a0, note, number, value), value)
        conn = a0.peer("a1").conn
        assert conn is not None
        assert conn.lapses >= 6


def test_full_resend_buffers_on_both_sides_do_not_deadlock() -> None:
    with behind() as ((a0, a1), _):
        assert call(a0, note, 0, 1) == 1
        value = torch.arange(1_500_000)  # 12 MB: more than the limit of the resend buffer
        futures = [begin(agent, note, number, value) for number in range(3) for agent in (a0, a1)]
        for future in futures:
            assert torch.equal(future.wait(), value)


def test_resent_data_ignores_later_changes_of_the_tensor() -> None:
    with behind() as ((a0, _), proxies):
        assert call(a0, note, 0, 1) == 1
        for proxy in proxies:
            proxy.stall()
        value = torch.zeros(1_000_000)
        future = begin(a0, note, 1, value[:200_000])
        value.fill_(7)
        for proxy in proxies:
            proxy.reset()
            proxy.resume()
        assert torch.equal(future.wait(), torch.zeros(200_000))


def test_a_running_call_is_not_repeated_after_reconnecting() -> None:
    _gate.clear()
    with behind() as ((a0, _), proxies):
        future = begin(a0, gated, 5)
        for _ in range(5):
            assert call(a0, note, 0, 2) == 2
            for proxy in proxies:
                proxy.reset()
        assert not future.done()
        _gate.set()
        assert future.wait() == 5


@pytest.mark.prints("refused.* no descriptors")
def test_reconnecting_is_retried_while_the_peer_has_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0  # more failures within a second than FAILURES_PER_S would not be answered

    with behind() as ((a0, a1), proxies):
        assert call(a0, note, 0, 1) == 1
        feed = handshake.Acceptor.feed

        def busy(self: handshake.Acceptor, data: bytes) -> bytes:
            nonlocal tries
            if not self.greeted:
                return feed(self, data)
            tries += 1
            if tries > FAILURES_PER_S:
                return feed(self, data)
            self.refusal = self.refuse(handshake.Refusal.BUSY, "no descriptors")
            raise ProtocolError("no descriptors")

        monkeypatch.setattr(handshake.Acceptor, "feed", busy)
        proxies[1].reset()
        assert call(a0, note, 0, 2) == 2
        assert tries == FAILURES_PER_S + 1
        assert a1.peers()[0].state == "alive"


def test_a_refused_reconnection_marks_the_peer_dead_at_once() -> None:
    _gate.clear()
    with behind() as ((a0, _), proxies):
        future = begin(a0, gated, 5)
        assert call(a0, note, 0, 1) == 1
        proxies[1].refuse()
        proxies[1].reset()
        with pytest.raises(PeerDiedError) as raised:
            future.wait()
        assert raised.value.maybe_executed is True
        _gate.set()


@pytest.mark.parametrize("grace", [0.0, 0.3])
@pytest.mark.parametrize("side", [0, 1])
def test_a_connection_not_resumed_within_session_grace_marks_the_peer_dead(side: int, grace: float) -> None:
    _gate.clear()
    short: dict[str, Any] = {"session_grace": grace}
    with behind(each=(short, short)) as (made, proxies):
        assert call(made[0], note, 0, 1) == 1
        to = made[side].peer(f"a{1 - side}")
        future: Future[Any] = Future()
        made[side].call(to, gated, (5,), {}, _LIMIT_S, future=future)
        made[side].flush()
        for proxy in proxies:
            proxy.stall()
            proxy.reset()
        with pytest.raises(PeerDiedError, match=r"did not come back within 0\.3 s" if grace else None):
            future.wait()
        _gate.set()


def test_a_worker_declared_dead_during_an_outage_is_told_on_reconnecting() -> None:
    _gate.clear()
    with behind(each=({}, {"session_grace": 0.2})) as ((a0, a1), proxies):
        future = begin(a0, gated, 5)
        assert call(a1, note, 0, 1) == 1
        gone = threading.Event()
        a1.on_peer_end.append(lambda _: gone.set())
        for proxy in proxies:
            proxy.stall()
            proxy.reset()
        assert gone.wait(_LIMIT_S)
        for proxy in proxies:
            proxy.resume()
        with pytest.raises(PeerDiedError):
            future.wait()
        _gate.set()


@pytest.mark.parametrize("count", [0, 9, 31, 1 << 63])
def test_resuming_at_a_position_that_was_never_sent_or_already_dropped_is_refused(count: int) -> None:
    here, there = socket.socketpair()
    with here, there:
        stream = ReliableStream(SocketStream(here))
        for _ in range(2):
            stream.send(bytes(10))
        stream.acknowledged(10)
        stream.send(bytes(10))  # drops the ten acknowledged bytes
        with pytest.raises(ProtocolError, match="bytes"):
            stream.rewind(count)


def test_bytes_to_resend_are_unchanged_after_many_acknowledged_small_messages() -> None:
    here, there = socket.socketpair()
    with here, there:
        stream = ReliableStream(SocketStream(here), limit=1000, large=100)
        first, second = b"1" * 1500, b"2" * 1500
        stream.sendmsg([memoryview(bytes(100))])  # copied like the large messages below
        for _ in range(30):
            stream.send(bytes(50))
        stream.acknowledged(stream.sent)
        acknowledged = stream.sent
        for content in (first, second):
            stream.sendmsg([memoryview(content)])
        assert b"".join(stream.rewind(acknowledged)) == first + second


def test_an_agent_can_close_while_its_connection_is_broken() -> None:
    with behind() as ((a0, _), proxies):
        assert call(a0, note, 0, 1) == 1
        future = begin(a0, note, 0, 1)
        future.wait()
        for proxy in proxies:
            proxy.stall()
            proxy.reset()


# -- one connection without an agent ---------------------------------------------------------------------


class _RecordedEvents:
    """Records the events of a connection."""

    def __init__(self) -> None:
        self.delivered: list[Frame] = []
        self.lapses = 0

    def control(self, connection: Connection, frame: Frame) -> Frame | None:
        return frame

    def deliver(self, connection: Connection, frames: list[Frame], waiting: bool) -> bool:
        self.delivered += frames
        return True

    def closed(self, connection: Connection, error: BaseException | None) -> None:
        raise AssertionError(f"closed: {error}")

    def suspended(self, connection: Connection, error: BaseException) -> None:
        self.lapses += 1

    def submit(self, task: Any) -> None:
        task()


@contextlib.contextmanager
def alone() -> Iterator[tuple[Connection, socket.socket, _RecordedEvents]]:
    """Create one end of a connection; the other end is a plain socket."""
    here, there = socket.socketpair()
    events = _RecordedEvents()
    with select.epoll() as epoll, there:
        conn = Connection(
            ReliableStream(SocketStream(here)),
            epoll=epoll,
            events=events,
            settings=Settings(),
            attach=b"",
            local=False,
        )
        try:
            conn.register()
            yield conn, there, events
        finally:
            conn.enter(CLOSED)
            conn.reap()


def _session(conn: Connection) -> ReliableStream:
    assert conn.session is not None
    return conn.session


@pytest.mark.parametrize("came_back", [False, True])
def test_an_older_reconnection_attempt_is_refused_after_a_newer_attempt(
    came_back: bool,
) -> None:
    with contextlib.ExitStack() as stack:
        first, first_there = socket.socketpair()
        second, second_there = socket.socketpair()
        for sock in (first, first_there, second, second_there):
            stack.enter_context(sock)
        conn, _, events = stack.enter_context(alone())
        early, late = next(_session(conn).attempts), next(_session(conn).attempts)
        conn.suspend(ConnectionResetError())
        assert conn.standstill(early) == 0
        first_there.sendall(pack_frame(REPLY, 1, b"sent at once"))
        if came_back:
            assert conn.resume(SocketStream(first), early, 0, lambda: None)
        # This tells the other side that nothing was received; it sends the frame again over the second socket.
        assert conn.standstill(late) == 0
        assert _session(conn).is_overtaken(early)
        assert conn.standstill(early) is None
        assert not conn.resume(SocketStream(first), early, 0, lambda: None)
        conn.turn()
        assert not events.delivered
        assert conn.resume(SocketStream(second), late, 0, lambda: None)
        second_there.sendall(pack_frame(REPLY, 1, b"sent again"))
        conn.turn()
        assert [frame.body for frame in events.delivered] == [b"sent again"]
        assert events.lapses == 1 + came_back
