"""Closing an agent: it waits, for a limited time, until its goodbye is sent; without one, peers consider it dead."""

from __future__ import annotations

import contextlib
import operator
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from actorrpc.agent.agent import Agent
from actorrpc.futures import Future
from actorrpc.transport.connection import Connection
from actorrpc.wire import frames
from actorrpc.wire.frames import pack_frame, pack_header
from tests import certificates
from tests.agent.agents import Stranger, agents


def _conn(agent: Agent, to: str) -> Connection:
    conn = agent.peer(to).conn
    assert conn is not None
    return conn


def _watch(agent: Agent) -> tuple[threading.Event, list[str]]:
    """Return an event that is set when a peer ends, and the list of the states in which peers ended."""
    ended_event, states = threading.Event(), []

    def ended(peer: Any) -> None:
        states.append(peer.state)
        ended_event.set()

    agent.on_peer_end.append(ended)
    return ended_event, states


def _nothing() -> None:
    """Do nothing; the call is only made to connect."""


def _connect_both_ways(first: Agent, second: Agent) -> None:
    for here, there in ((first, "a1"), (second, "a0")):
        here.call_sync(here.peer(there), _nothing, (), {}, 20.0)


@contextmanager
def _unread(first: Agent, second: Agent) -> Iterator[None]:
    """Stop the second agent from reading, and fill the kernel's buffers with messages of the first agent."""
    mine, theirs = _conn(first, "a1"), _conn(second, "a0")
    with theirs.read_lock:
        while not mine.outbox:
            mine.outbox.append(
                pack_frame(frames.NOTICE, body=bytes(1 << 20), extra=pack_header({"notice": "x"}))
            )
            mine.flush()
        yield
    theirs.arm(1)  # as each reader does after reading; the pool was not able to read meanwhile


@pytest.mark.prints("a notice 'x' of 'a0' has no handler here")
def test_close_waits_until_its_goodbye_is_sent_to_a_slow_reader() -> None:
    with agents(2) as (first, second):
        _connect_both_ways(first, second)
        ended_event, states = _watch(second)
        with _unread(first, second):
            thread = threading.Thread(target=first.close, kwargs={"parting": 60.0})
            thread.start()
            thread.join(1.2)
            assert thread.is_alive()
        thread.join(20)
        assert not thread.is_alive()
        assert ended_event.wait(20)
        assert states == ["left"]


def test_close_sends_goodbye_to_a_peer_that_has_not_sent_its_name() -> None:
    """That peer considers the connection complete, and would consider an end without a goodbye a death."""
    with agents(2) as (agent, _):
        stranger = Stranger(agent)
        with contextlib.closing(stranger.sock):
            stranger.shake_hands()
            while not agent.connector.connections():
                threading.Event().wait(0.001)
            agent.close()
            assert frames.GOODBYE in {frame.kind for frame in stranger.read_to_the_end()}


@pytest.mark.parametrize("end", ["left", "dead"])
def test_a_second_connection_of_a_peer_that_has_ended_is_closed_without_an_error(end: str) -> None:
    """Two workers that call each other at the same moment open two connections, read by different threads."""
    with agents(1) as (agent,):
        ended_event, states = _watch(agent)
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
            assert ended_event.wait(20)
            assert states == [end]
            late.introduce()
            told = [frame.flags for frame in late.read_to_the_end() if frame.kind == frames.GOODBYE]
            assert told == ([1] if end == "dead" else [])  # a peer that is still alive would wait for answers


# -- a worker that dies ----------------------------------------------------------------------------------------


@pytest.mark.skipif(certificates.OVER_TLS, reason="over TCP, a connection that breaks is resumed")
def test_a_reply_unread_in_one_connection_is_delivered_when_the_other_connection_ends() -> None:
    """Both sides dialled at once and opened two connections. Chance decides the end of which connection is noticed first."""
    with agents(2) as (here, there):
        _connect_both_ways(here, there)
        first = _conn(here, "a1")
        there.peer("a0").conn = None  # as if `there` had dialled before it accepted the first connection
        there.call_sync(there.peer("a0"), _nothing, (), {}, 20.0)
        (second,) = [each for each in here.peer("a1").conns if each is not first]
        future: Future[int] = Future()
        with first.read_lock:  # keeps pool threads from reading
            here.call(here.peer("a1"), operator.add, (1, 2), {}, 20.0, future=future)
            poll = select.poll()
            poll.register(first.fd, select.POLLIN)
            assert poll.poll(20_000)
            here.pool.forget(first.fd)  # no thread is woken to read the reply
        ended_event = threading.Event()
        future.add_done_callback(lambda _: ended_event.set())
        second.stream.shutdown(socket.SHUT_RD)
        assert ended_event.wait(20)  # waiting for the future itself would read the reply in this thread
        assert future.wait() == 3
