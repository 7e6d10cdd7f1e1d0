"""The failure detector in virtual time, the state of a process according to its host, and membership events."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorrpc.agent.agent import Agent
from actorrpc.agent.peers import MembershipEvents, Peer, state_of
from actorrpc.config import Settings
from actorrpc.errors import PeerDiedError
from actorrpc.futures import Future
from actorrpc.transport.failure_detector import FailureDetector, is_direct, process_state, set_up_tcp
from actorrpc.wire.frames import PING, PONG, pack_frame
from tests.actors.e2e.kit import until
from tests.agent.agents import Stranger, agents, record


@given(
    st.floats(0.05, 20.0),
    st.integers(2, 8),
    st.floats(0.0, 0.1),
    st.floats(0.0, 8.0),
)
def test_a_silent_peer_is_lost_after_the_configured_number_of_misses_and_not_before(
    heartbeat: float, misses: int, round_trip: float, beats: float
) -> None:
    """The peer answers after `round_trip` heartbeats, until it hangs after `beats` heartbeats."""
    failure_detector = FailureDetector()
    hangs = beats * heartbeat
    now = last_received = 0.0
    answer = float("inf")
    states: list[str] = []
    while not states or states[-1] != "lost":
        look = failure_detector.look(now, last_received, heartbeat=heartbeat, misses=misses)
        if look.state != "alive":
            assert now > hangs
        states.append(look.state)
        if look.ping_due and now < hangs:
            answer = now + round_trip * heartbeat
        assert 0 < look.wait <= heartbeat * 1.01
        now += look.wait
        if answer <= min(now, hangs):
            last_received, answer = answer, float("inf")
        assert now < 100 * heartbeat
    found = now - look.wait
    assert hangs + (misses - 1.7) * heartbeat < found <= hangs + misses * heartbeat
    if misses > 2:
        assert "suspect" in states


@pytest.mark.parametrize("last_received", [0.0, 0.5])
def test_time_in_which_this_process_was_stopped_does_not_count_as_silence(last_received: float) -> None:
    """The check was due at 1 s and happens at 60 s; bytes that arrived meanwhile have not been read yet."""
    failure_detector = FailureDetector()
    assert failure_detector.look(0.0, 0.0, heartbeat=1.0, misses=5).state == "alive"
    late = failure_detector.look(60.0, last_received, heartbeat=1.0, misses=5, late=59.0)
    assert late.state == "alive"
    # Afterwards, silence counts again.
    states = [
        failure_detector.look(60.0 + t, last_received, heartbeat=1.0, misses=5).state for t in (1.5, 2.5, 4.6)
    ]
    assert states == ["suspect", "suspect", "lost"]


def test_a_peer_is_pinged_while_it_sends_a_long_message() -> None:
    """Its bytes prove that it is alive, but the peer needs signs of life as well."""
    failure_detector = FailureDetector()
    asked = [
        failure_detector.look(t / 4, t / 4, heartbeat=1.0, misses=5, receiving=True).ping_due
        for t in range(1, 41)
    ].count(True)
    assert 9 <= asked <= 14


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_process_state_is_running_stopped_or_gone(child: subprocess.Popen[bytes]) -> None:
    assert process_state(os.getpid()) == "running"
    assert process_state(child.pid) == "running"
    child.send_signal(signal.SIGSTOP)
    until(lambda: process_state(child.pid) == "stopped")
    child.send_signal(signal.SIGCONT)
    until(lambda: process_state(child.pid) == "running")
    child.kill()
    until(lambda: process_state(child.pid) == "gone")  # a zombie
    child.wait()
    assert process_state(child.pid) == "gone"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_is_direct_tells_a_direct_connection_from_a_relayed_one(
    child: subprocess.Popen[bytes], family: int
) -> None:
    with socket.socket(family) as listener:
        listener.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]) as near, listener.accept()[0] as far:
            assert is_direct(near, os.getpid())
            assert is_direct(far, os.getpid())
            assert not is_direct(near, child.pid)  # the other end belongs to another process, such as a relay
        assert not is_direct(near, os.getpid())
    one, other = socket.socketpair()
    with one, other:
        assert is_direct(one, os.getpid())
        assert not is_direct(one, child.pid)


class _Far(socket.socket):
    """A socket that pretends to be connected to another host."""

    def getpeername(self) -> Any:
        return ("192.0.2.1", 80)


def test_tcp_timeouts_to_another_host_follow_the_heartbeat_settings() -> None:
    with _Far(socket.AF_INET, socket.SOCK_STREAM) as sock:
        set_up_tcp(sock, Settings(heartbeat=0.2))
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
        set_up_tcp(sock, Settings(heartbeat=1e9, heartbeat_misses=1000))  # limited to the kernel's maximum
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 32767000


def _peer(name: str = "p1", **changes: Any) -> Peer:
    return Peer(
        dataclasses.replace(record(name, 1), **changes), own=record("own", 0), window=1, definitions=None
    )


def test_membership_events_are_reported_once_in_order_and_none_after_the_end() -> None:
    tasks: list[Callable[[], None]] = []
    changes = MembershipEvents(tasks.append)
    told: list[tuple[str, ...]] = []
    peer = _peer()
    assert changes.note(peer, "suspect", "before anybody listens")
    assert not tasks
    remove = changes.listen(lambda worker, *rest: told.append((worker.name, *rest)))
    assert not changes.note(peer, "suspect", "again")
    assert changes.note(peer, "alive", "one")
    assert changes.note(peer, "suspect", "two")
    assert changes.note(peer, "dead", "three")
    assert not changes.note(peer, "alive", "late")
    assert not changes.note(peer, "left", "late")
    assert told == []  # listeners do not run on the thread that calls note()
    assert len(tasks) == 1  # listeners run in one task at a time
    tasks.pop()()
    assert told == [
        ("p1", "suspect", "alive", "one"),
        ("p1", "alive", "suspect", "two"),
        ("p1", "suspect", "dead", "three"),
    ]
    assert changes.note(_peer("p2"), "left", "four")
    remove()
    remove()
    tasks.pop()()
    assert len(told) == 3
    assert changes.note(_peer("p3"), "left", "five")
    assert not tasks


@contextlib.contextmanager
def _stranger(agent: Agent, **changes: Any) -> Iterator[tuple[Stranger, Peer]]:
    """Connect a worker that sends nothing by itself; yield it and the agent's peer for it."""
    with contextlib.closing(Stranger(agent)) as stranger:
        stranger.record = dataclasses.replace(stranger.record, **changes)
        stranger.shake_hands()
        stranger.introduce()
        until(lambda: any(peer.name == "stranger" for peer in agent.peers()))
        yield stranger, next(peer for peer in agent.peers() if peer.name == "stranger")


def _call(agent: Agent, peer: Peer, argument: Any = None) -> Future[Any]:
    future: Future[Any] = Future()
    agent.call(peer, print, (argument,), {}, 0, future=future)
    return future


class _Listener:
    """A listener that can be waited for."""

    def __init__(self, agent: Agent) -> None:
        self.changes: list[tuple[str, str]] = []
        self.came = threading.Semaphore(0)
        agent.scheduler.changes.listen(self)

    def __call__(self, worker: Any, old: str, new: str, reason: str) -> None:
        self.changes.append((old, new))
        self.came.release()


def test_a_silent_peer_whose_process_runs_on_this_host_is_suspect_until_it_answers() -> None:
    """The peer's process is this process."""
    with agents(1, heartbeat=0.05) as (agent,):
        told = _Listener(agent)
        with _stranger(agent) as (stranger, peer):
            call = _call(agent, peer)
            told.came.acquire()
            assert state_of(peer) == "suspect"
            until(
                lambda: peer.failure_detector.silent > 0.05 * 10
            )  # twice the time after which a remote peer is lost
            assert told.changes == [("alive", "suspect")]
            assert not call.done()
            answering = threading.Thread(target=_answer_pings, args=(stranger,))
            answering.start()
            told.came.acquire()
            assert told.changes[1] == ("suspect", "alive")
            stranger.sock.shutdown(socket.SHUT_RDWR)
            answering.join()
        with pytest.raises(PeerDiedError):
            call.wait()


def _answer_pings(stranger: Stranger) -> None:
    while found := stranger.frames():
        for frame in found:
            if frame.kind == PING:
                try:
                    stranger.sock.sendall(pack_frame(PONG, frame.id))
                except OSError:
                    return
