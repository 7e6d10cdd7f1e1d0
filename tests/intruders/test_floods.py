"""Strangers in large numbers, or slow, or wrong: members are served as ever, and places and answers are few."""

from __future__ import annotations

import contextlib
import operator
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from actorrpc import testing
from actorrpc.agent import acceptor
from actorrpc.agent.acceptor import FAILURES_PER_S
from actorrpc.agent.agent import Agent
from actorrpc.errors import AuthenticationError
from actorrpc.wire.handshake import Dialler
from tests.intruders.doors import WRONG, dialler, knock, reset, tcp_agents, until


def _works(caller: Agent, callee: Agent) -> bool:
    return bool(caller.ask(caller.peer(callee.name), operator.add, (1, 2), {}, 20.0) == 3)


def _shakes_hands(sock: socket.socket, side: Dialler) -> bool:
    """Shake hands as a member; say whether that was possible."""
    data = side.start()
    with contextlib.suppress(ConnectionError):
        while not side.done:
            sock.sendall(data)
            received = sock.recv(4096)
            if not received:
                break
            data = side.feed(received)
    return side.done


def _comes_in(agent: Agent, source: str = "127.0.0.1") -> socket.socket:
    """Shake hands as a member that tries again when it has lost its place; fail after many tries."""
    for _ in range(200):
        sock = knock(agent, source)
        if _shakes_hands(sock, dialler(agent)):
            return sock
        sock.close()
    raise AssertionError("a member was kept out")


def _places(agent: Agent, count: int) -> None:
    """Wait until so many guests have a place."""
    end = time.monotonic() + 20.0
    while len(agent.connector.admission) != count and time.monotonic() < end:
        threading.Event().wait(0.002)
    assert len(agent.connector.admission) == count


@pytest.fixture
def strangers() -> Iterator[list[socket.socket]]:
    """Sockets to be closed at the end."""
    made: list[socket.socket] = []
    yield made
    for sock in made:
        reset(sock)


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.9"], ids=["member's address", "other address"])
def test_those_that_say_nothing_keep_nobody_out(strangers: list[socket.socket], source: str) -> None:
    with tcp_agents(2, max_unauthenticated=8) as (one, other):
        for _ in range(40):
            strangers.append(knock(other, source))
        _places(other, 8)
        assert _works(one, other)
        _comes_in(other).close()


def test_those_that_speak_slowly_keep_nobody_out(strangers: list[socket.socket]) -> None:
    """Slow-loris: a valid hello, byte for byte, and half a proof; each holds its place for as long as it can."""
    with tcp_agents(2, max_unauthenticated=8) as (one, other):
        for number in range(24):
            sock = knock(other)
            hello = dialler(other).start()
            sock.sendall(hello[: 1 + number % len(hello)] if number % 2 else hello)
            strangers.append(sock)
        _places(other, 8)
        assert _works(one, other)
        for _ in range(20):
            _comes_in(other).close()


def test_who_has_said_hello_keeps_its_place_longer(strangers: list[socket.socket]) -> None:
    with tcp_agents(1, max_unauthenticated=4) as (agent,):
        polite, side = knock(agent), dialler(agent)
        polite.sendall(side.start())
        proof = side.feed(polite.recv(4096))
        for _ in range(50):
            strangers.append(knock(agent))
        _places(agent, 4)
        polite.sendall(proof)
        side.feed(polite.recv(4096))
        assert side.done
        reset(polite)


def test_the_crowd_goes_first(strangers: list[socket.socket]) -> None:
    """Guests from one address push each other out, not the only one from another."""
    with tcp_agents(1, max_unauthenticated=4) as (agent,):
        single = knock(agent, "127.0.0.7")
        _places(agent, 1)
        for _ in range(50):
            strangers.append(knock(agent))
        _places(agent, 4)
        side = dialler(agent)
        single.sendall(side.start())
        single.sendall(side.feed(single.recv(4096)))
        side.feed(single.recv(4096))
        assert side.done
        reset(single)


def test_a_guest_has_little_time() -> None:
    with tcp_agents(1, handshake_timeout=0.3) as (agent,):
        silent, slow = knock(agent), knock(agent)
        slow.sendall(dialler(agent).start()[:20])
        assert until(silent) == until(slow) == b""
        _places(agent, 0)
        silent.close()
        slow.close()


def _flood(agent: Agent, act: Callable[[socket.socket], None], stop: threading.Event, sources: int) -> int:
    rng, count = random.Random(1), 0
    while not stop.is_set():
        try:
            sock = knock(agent, f"127.0.0.{1 + rng.randrange(sources)}")
        except OSError:
            continue
        with contextlib.suppress(OSError):
            act(sock)
        reset(sock)
        count += 1
    return count


_ACTS: dict[str, Callable[[Agent, socket.socket], None]] = {
    "connects": lambda agent, sock: None,
    "garbage": lambda agent, sock: sock.sendall(bytes(range(256)) * 16),
    "hello": lambda agent, sock: sock.sendall(dialler(agent).start()),
    "wrong key": lambda agent, sock: _prove(agent, sock),
}


def _prove(agent: Agent, sock: socket.socket) -> None:
    side = dialler(agent, WRONG)
    sock.sendall(side.start())
    sock.sendall(side.feed(sock.recv(4096)))


@pytest.mark.parametrize("act", _ACTS)
@pytest.mark.parametrize("sources", [1, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.prints(
    "these bytes are not an actorrpc handshake",
    "'stranger' did not prove to worker 'a1' that it holds the group's key",
)
def test_a_flood_keeps_no_member_out(act: str, sources: int, caplog: pytest.LogCaptureFixture) -> None:
    """Connections as fast as they can be made: a member is served meanwhile, and new ones come in."""
    stop, counts = threading.Event(), []
    with tcp_agents(2, max_unauthenticated=16) as (one, other):
        run = lambda: counts.append(_flood(other, lambda sock: _ACTS[act](other, sock), stop, sources))  # noqa: E731
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(20):
                assert _works(one, other)
                _comes_in(other).close()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert _works(one, other)
    assert sum(counts) > 20
    # Words are few, too: one at once, and one for all others of the minute, or at the end.
    assert len([record for record in caplog.records if "refused" in record.getMessage()]) <= 2


# -- failures ------------------------------------------------------------------------------------------


def _fail(agent: Agent, source: str = "127.0.0.1") -> tuple[socket.socket, Dialler]:
    """Fail to prove the key."""
    sock = knock(agent, source)
    side = dialler(agent, WRONG)
    sock.sendall(side.start())
    sock.sendall(side.feed(sock.recv(4096)))
    return sock, side


def _is_told(sock: socket.socket, side: Dialler) -> None:
    with pytest.raises(AuthenticationError, match="key"):
        side.feed(sock.recv(4096))
    sock.close()


@pytest.mark.prints("'stranger' did not prove to worker 'a1' that it holds the group's key")
def test_failures_are_answered_at_a_rate() -> None:
    """The fourth failure within a second learns nothing; a member of the same address comes in all the same."""
    with testing.VirtualTime() as clock, tcp_agents(2) as (one, other):
        for _ in range(FAILURES_PER_S):
            _is_told(*_fail(other))
        unanswered = [_fail(other)[0] for _ in range(3)]
        clock.advance(0.0)
        _places(other, 3)  # they hold their places, and know no more
        assert _works(one, other)
        _comes_in(other).close()
        _is_told(*_fail(other, "127.0.0.5"))
        clock.advance(1.1)
        _is_told(*_fail(other))
        for sock in unanswered:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)
            sock.close()


@pytest.mark.prints("these bytes are not an actorrpc handshake")
def test_what_is_remembered_of_failures_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_MAX_ADDRESSES", 8)
    with tcp_agents(1) as (agent,):
        for number in range(1, 20):
            sock = knock(agent, f"127.0.1.{number}")
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            until(sock)
            sock.close()
        assert len(agent.connector.admission._failures) <= 8


_held, _free = threading.Event(), threading.Event()
