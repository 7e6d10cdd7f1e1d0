"""Many, slow or failing strangers: members are still served, and the strangers get limited places and answers."""

from __future__ import annotations

import contextlib
import operator
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from actorrpc import _time, testing
from actorrpc.agent.acceptor import FAILURES_PER_S
from actorrpc.agent.agent import Agent
from actorrpc.errors import AuthenticationError
from actorrpc.transport.tls import AnySocket, authenticate
from actorrpc.wire.handshake import Dialler
from tests.intruders.doors import WRONG, dialler, knock, reset, reset_on_close, secure, tcp_agents, until


def _works(caller: Agent, callee: Agent) -> bool:
    return bool(caller.call_sync(caller.peer(callee.name), operator.add, (1, 2), {}, 20.0) == 3)


def _comes_in(agent: Agent) -> AnySocket:
    """Do the handshakes of a member, and retry when it was pushed out; fail after 200 attempts."""
    for _ in range(200):
        with contextlib.suppress(ConnectionError):
            return authenticate(
                knock(agent), agent.connector.tls, dialler(agent), _time.now() + 20.0, agent.record.name
            )[0]
    raise AssertionError("a member was kept out")


def _places(agent: Agent, count: int) -> None:
    """Wait until this number of unauthenticated peers has a place."""
    end = time.monotonic() + 20.0
    while len(agent.connector.admission) != count and time.monotonic() < end:
        threading.Event().wait(0.002)
    assert len(agent.connector.admission) == count


@pytest.fixture
def strangers() -> Iterator[list[socket.socket]]:
    """Sockets that are closed at the end."""
    made: list[socket.socket] = []
    yield made
    for sock in made:
        reset(sock)


@pytest.mark.parametrize(
    ("source", "says"),
    [("127.0.0.1", False), ("127.0.0.9", False), ("127.0.0.1", True)],
    ids=["silent at the member's address", "silent at another address", "slow loris"],
)
def test_silent_and_slow_strangers_keep_no_member_out(
    strangers: list[socket.socket], source: str, says: bool
) -> None:
    """Slow strangers send incomplete messages, and hold their places as long as possible."""
    with tcp_agents(2, tls=False, max_unauthenticated=8) as (one, other):
        for number in range(40):
            strangers.append(knock(other, source))
            hello = dialler(other).start()
            if says:
                strangers[-1].sendall(hello[: 1 + number % len(hello)] if number % 2 else hello)
        _places(other, 8)
        assert _works(one, other)
        for _ in range(20 if says else 1):
            _comes_in(other).close()


def test_a_guest_that_has_sent_hello_is_pushed_out_after_silent_guests(
    strangers: list[socket.socket],
) -> None:
    with tcp_agents(1, tls=False, max_unauthenticated=4) as (agent,):
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


def test_guests_from_a_crowded_address_are_pushed_out_first(strangers: list[socket.socket]) -> None:
    """They push each other out, but not the only guest from another address."""
    with tcp_agents(1, tls=False, max_unauthenticated=4) as (agent,):
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


def test_a_guest_is_disconnected_after_handshake_timeout() -> None:
    with tcp_agents(1, tls=False, handshake_timeout=0.3) as (agent,):
        silent, slow = knock(agent), knock(agent)
        slow.sendall(dialler(agent).start()[:20])
        assert until(silent) == until(slow) == b""
        _places(agent, 0)
        silent.close()
        slow.close()


def _flood(agent: Agent, action: str, stop: threading.Event) -> int:
    """Connect again and again; return how often. Each connection is closed with a reset, so that its port is free at once."""
    count = 0
    while not stop.is_set():
        with contextlib.suppress(OSError):
            sock: AnySocket = knock(agent)
            reset_on_close(sock)
            count += 1
            with contextlib.closing(secure(agent, sock) if action in _OVER_TLS else sock) as sock:
                _ACTIONS[action](agent, sock)
    return count


def _prove(agent: Agent, sock: AnySocket) -> Dialler:
    """Do a handshake with a wrong key."""
    side = dialler(agent, WRONG)
    sock.sendall(side.start(getattr(sock, "binding", b"")))
    sock.sendall(side.feed(sock.recv(4096)))
    return side


_ACTIONS: dict[str, Callable[[Agent, AnySocket], object]] = {
    "connects": lambda agent, sock: None,
    "garbage": lambda agent, sock: sock.sendall(bytes(range(256)) * 16),
    "hello": lambda agent, sock: sock.sendall(dialler(agent).start()),
    "wrong key": _prove,
}
_OVER_TLS = ("hello", "wrong key")


@pytest.mark.parametrize("action", _ACTIONS)
@pytest.mark.prints(
    "ACTORRPC_TLS=off, or is no worker",
    "'stranger' did not prove to worker 'a1' that it holds the group's key",
)
def test_a_flood_of_connections_keeps_no_member_out(action: str, caplog: pytest.LogCaptureFixture) -> None:
    """Strangers connect as fast as possible; members are served, and new members are admitted meanwhile."""
    stop, counts = threading.Event(), []
    with tcp_agents(2, max_unauthenticated=16) as (one, other):
        run = lambda: counts.append(_flood(other, action, stop))  # noqa: E731
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
    # Few log lines as well: one line at once, and one line for all others of the minute, or at the end.
    assert len([record for record in caplog.records if "refused" in record.getMessage()]) <= 2


@pytest.mark.prints("are not an actorrpc handshake", "did not prove", "1 more connections were refused")
def test_the_first_refusal_of_each_cause_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with tcp_agents(1, tls=False) as (agent,):
        for source in ("127.0.0.1", "127.0.0.9"):
            with knock(agent, source) as sock:
                sock.sendall(b"no handshake at all")
                until(sock)
        with knock(agent) as sock:
            _prove(agent, sock)
            until(sock)
        said = [each.getMessage() for each in caplog.records if "was refused" in each.getMessage()]
    assert ["are not an actorrpc handshake" in each for each in said] == [True, False]


# -- failures ------------------------------------------------------------------------------------------


def _fail(agent: Agent, source: str = "127.0.0.1") -> tuple[socket.socket, Dialler]:
    sock = knock(agent, source)
    return sock, _prove(agent, sock)


def _assert_answered(sock: socket.socket, side: Dialler) -> None:
    with pytest.raises(AuthenticationError, match="key"):
        side.feed(sock.recv(4096))
    sock.close()


@pytest.mark.prints("'stranger' did not prove to worker 'a1' that it holds the group's key")
def test_failed_handshakes_are_answered_at_a_limited_rate() -> None:
    """The fourth failure within a second gets no answer; a member at the same address is still admitted."""
    with testing.VirtualTime() as clock, tcp_agents(2, tls=False) as (one, other):
        for _ in range(FAILURES_PER_S):
            _assert_answered(*_fail(other))
        unanswered = [_fail(other)[0] for _ in range(3)]
        clock.advance(0.0)
        _places(other, 3)  # they keep their places, without an answer
        assert _works(one, other)
        _comes_in(other).close()
        _assert_answered(*_fail(other, "127.0.0.5"))
        clock.advance(1.1)
        _assert_answered(*_fail(other))
        for sock in unanswered:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)
            sock.close()


@pytest.mark.prints("these bytes are not an actorrpc handshake", "'stranger' did not prove to worker 'a0'")
def test_the_table_of_failed_handshakes_is_bounded() -> None:
    """After failures of 1024 other addresses, an address that has failed too often is forgotten, and gets answers again."""
    with testing.VirtualTime(), tcp_agents(1, tls=False) as (agent,):
        for _ in range(FAILURES_PER_S):
            _assert_answered(*_fail(agent))
        for number in range(1024):
            sock = knock(agent, f"127.0.{1 + number // 250}.{1 + number % 250}")
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            until(sock)
            sock.close()
        _assert_answered(*_fail(agent))
