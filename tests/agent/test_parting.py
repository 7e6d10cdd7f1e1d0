"""The last word: who leaves waits, within bounds, until its goodbye is on its way, or others would take it for dead."""

from __future__ import annotations

import contextlib
import operator
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from actorrpc import _time
from actorrpc.agent.agent import Agent
from actorrpc.errors import ShutdownError
from actorrpc.futures import Future
from actorrpc.transport.connection import Connection
from actorrpc.wire import frames
from actorrpc.wire.frames import pack_frame
from actorrpc.wire.headers import pack_header
from tests.agent.agents import Stranger, agents
from tests.intruders.doors import tcp_agents

_SYN_SENT = 2  # of the kernel's tcp_states.h


class _Time:
    """Time that goes by, one second at once, whenever somebody sleeps in this thread."""

    def __init__(self, patch: pytest.MonkeyPatch, thread: threading.Thread) -> None:
        self._now, self._sleep, self._thread = _time.now, _time.sleep, thread
        self._over = 0.0
        self.slept = threading.Event()
        patch.setattr(_time, "now", lambda: self._now() + self._over)
        patch.setattr(_time, "sleep", self._doze)

    def _doze(self, seconds: float) -> None:
        if threading.current_thread() is not self._thread:
            self._sleep(seconds)
            return
        if not self.slept.is_set():
            self._over += 1.0
            self.slept.set()
        self._sleep(seconds)


def _conn(agent: Agent, to: str) -> Connection:
    conn = agent.peer(to).conn
    assert conn is not None
    return conn


def _watch(agent: Agent) -> tuple[threading.Event, list[str]]:
    """Return what is set at the end of a peer, and how each has ended."""
    over, states = threading.Event(), []

    def ended(peer: Any) -> None:
        states.append(peer.state)
        over.set()

    agent.on_peer_end.append(ended)
    return over, states


def _nothing() -> None:
    """Answer."""


def _meet(first: Agent, second: Agent) -> None:
    for here, there in ((first, "a1"), (second, "a0")):
        here.ask(here.peer(there), _nothing, (), {}, 20.0)


@contextmanager
def _unread(first: Agent, second: Agent) -> Iterator[None]:
    """Have the second one not read meanwhile, and the first one with more to send than the kernel takes."""
    mine, theirs = _conn(first, "a1"), _conn(second, "a0")
    with theirs.read_lock:
        while not mine.outbox:
            mine.outbox.append(
                pack_frame(frames.NOTICE, body=bytes(1 << 20), extra=pack_header({"notice": "x"}))
            )
            mine.flush()
        yield
    theirs.arm(1)  # whoever has read arms again: this has kept it from the pool


def _is_connecting(sock: socket.socket) -> bool:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _SYN_SENT


@pytest.mark.parametrize("accepts", [True, False])
def test_who_leaves_does_not_dial_on(accepts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it said that its threads are in user code."""
    with contextlib.ExitStack() as stack:
        (agent, _) = stack.enter_context(tcp_agents(2))
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        if not accepts:  # no more than those who wait already
            for _ in range(3):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(door.getsockname())
        monkeypatch.setattr(agent.connector, "addresses", lambda _: [(socket.AF_INET, door.getsockname())])
        ended: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

        def dial() -> None:
            try:
                agent.connector.connect(agent.peer("a1"), _time.now() + 1000.0, "somebody")
            except BaseException as error:
                ended.put(error)

        agent.submit(dial)
        if accepts:
            somebody, _ = door.accept()
            stack.enter_context(somebody)
            assert somebody.recv(1)  # its hello, which is not answered
        else:
            while not any(_is_connecting(sock) for sock in agent.connector._dialling.copy()):
                threading.Event().wait(0.001)
        agent.close()
        assert isinstance(ended.get(timeout=20), ShutdownError)


@pytest.mark.parametrize("together", [agents, tcp_agents])
@pytest.mark.prints("a notice 'x' of 'a0' has no handler here")
def test_who_leaves_while_the_other_does_not_read_is_not_taken_for_dead(
    together: Callable[[int], AbstractContextManager[list[Agent]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with together(2) as (first, second):
        _meet(first, second)
        over, states = _watch(second)
        with _unread(first, second):
            thread = threading.Thread(target=first.close, kwargs={"parting": 60.0})
            time = _Time(monkeypatch, thread)
            thread.start()
            assert time.slept.wait(20)  # a second is over, and it still waits
        thread.join(20)
        assert not thread.is_alive()
        assert over.wait(20)
        assert states == ["left"]


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(2) as (first, second):
        _meet(first, second)
        over, states = _watch(second)
        with _unread(first, second):
            thread = threading.Thread(target=first.close)
            _Time(monkeypatch, thread)
            thread.start()
            thread.join(20)
            assert not thread.is_alive()
        assert over.wait(20)
        assert states == ["dead"]


def test_who_has_not_introduced_itself_yet_hears_a_goodbye() -> None:
    """It takes the connection for made, and an end without a goodbye for a death."""
    with agents(2) as (agent, _):
        stranger = Stranger(agent)
        with contextlib.closing(stranger.sock):
            stranger.shake_hands()
            while not agent.connector.connections():
                threading.Event().wait(0.001)
            agent.close()
            assert frames.GOODBYE in {frame.kind for frame in stranger.read_to_the_end()}


@pytest.mark.parametrize("end", ["left", "dead"])
def test_a_connection_whose_introduction_is_read_after_the_end_of_its_peer_ends_quietly(end: str) -> None:
    """Two workers that call each other first at the same moment have two, and each is read by another thread."""
    with agents(1) as (agent,):
        over, states = _watch(agent)
        first = Stranger(agent)
        late = Stranger(agent, attach=bytes(16), incarnation=first.record.incarnation)
        late.record = first.record
        with contextlib.closing(first), contextlib.closing(late):
            first.shake_hands()
            late.shake_hands()
            first.introduce()
            if end == "left":
                first.sock.sendall(pack_frame(frames.GOODBYE))
            first.close()
            assert over.wait(20)
            assert states == [end]
            late.introduce()
            told = [frame.flags for frame in late.read_to_the_end() if frame.kind == frames.GOODBYE]
            assert told == ([1] if end == "dead" else [])  # a living one would wait for answers


# -- a worker that dies ----------------------------------------------------------------------------------------


def test_an_answer_counts_that_lies_in_the_other_connection_when_the_end_of_one_is_found() -> None:
    """As both sides dialled at once, there are two connections; which end is found first is chance."""
    with agents(2) as (here, there):
        _meet(here, there)
        first = _conn(here, "a1")
        there.peer("a0").conn = None  # as if it had not heard of the first one when it dialled
        there.ask(there.peer("a0"), _nothing, (), {}, 20.0)
        (second,) = [each for each in here.peer("a1").conns if each is not first]
        future: Future[int] = Future()
        with first.read_lock:  # a pool thread that would read finds the lock taken
            here.call(here.peer("a1"), operator.add, (1, 2), {}, 20.0, future=future)
            poll = select.poll()
            poll.register(first.fd, select.POLLIN)
            assert poll.poll(20_000)
            here.pool.forget(first.fd)  # no thread is woken for it: it comes too late
        over = threading.Event()
        future.add_done_callback(lambda _: over.set())
        second.stream.shutdown(socket.SHUT_RD)
        assert over.wait(20)  # a thread that waited for the future itself would read
        assert future.wait() == 3
