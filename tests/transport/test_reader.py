"""Answering: whichever way a thread goes on after an answer, every call is served, and nobody is left waiting."""

from __future__ import annotations

import operator
import select
import socket
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actorrpc.config import Settings
from actorrpc.futures import Future, wait_all
from actorrpc.transport import reader
from actorrpc.transport.connection import Connection
from actorrpc.transport.connection_state import CLOSED
from actorrpc.transport.stream import SocketStream
from actorrpc.wire.frames import REPLY, REQUEST, Frame, pack_frame
from tests.agent.agents import agents


@pytest.mark.parametrize("pays", [-1.0, 2.0], ids=["always read at once", "never"])
def test_calls_are_served_whichever_way_answers_are_sent(
    pays: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader.spinner, "pays", pays)
    with agents(3) as (a0, a1, a2):

        def calls(caller: Any, sums: list[int]) -> None:
            for number in range(150):
                sums.append(caller.ask(caller.peer("a1"), operator.add, (number, 1), {}, 20.0))

        sums: list[list[int]] = [[] for _ in range(4)]
        threads = [
            threading.Thread(target=calls, args=(caller, mine))
            for caller, mine in zip((a0, a0, a2, a2), sums, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sums == [list(range(1, 151))] * 4

        many: list[Future[Any]] = [Future() for _ in range(500)]
        for number, future in enumerate(many):
            a0.call(a0.peer("a1"), operator.neg, (number,), {}, 20.0, future=future)
        assert wait_all(many, 20) == [-number for number in range(500)]
        assert a1.peer("a0").state == "alive"


def test_a_request_that_is_there_at_once_is_read_by_the_thread_that_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader.spinner, "pays", -1.0)
    with agents(2) as (a0, a1):
        assert a0.ask(a0.peer("a1"), operator.add, (1, 1), {}, 20.0) == 2
        conn = a1.peer("a0").conn
        assert conn is not None
        with conn.read_lock:  # nobody else reads meanwhile
            later: Future[int] = Future()
            a0.call(a0.peer("a1"), operator.add, (2, 2), {}, 20.0, future=later)
            a0.flush()
        conn.reply()  # unless a pool thread was faster
        a1.pool.wake()
        assert later.wait(20) == 4


@pytest.mark.limit(20)
@pytest.mark.parametrize("attends", [False, True], ids=["answers", "attends"])
def test_what_has_come_does_not_wait_until_the_other_end_reads(attends: bool) -> None:
    here, there = socket.socketpair()
    left: list[Any] = []
    delivered: list[bytes] = []

    def deliver(conn: Connection, frames: list[Frame], waiting: bool) -> bool:
        delivered.extend(frame.body for frame in frames)
        return True

    with select.epoll() as epoll:
        conn = Connection(
            SocketStream(here),
            epoll=epoll,
            events=cast(Any, SimpleNamespace(submit=left.append, closed=lambda *_: None, deliver=deliver)),
            settings=Settings(),
            attach=b"",
            local=True,
        )
        conn.outbox.append(pack_frame(REPLY, 1, bytes(1 << 22)))  # more than the kernel takes
        there.sendall(pack_frame(REQUEST, 2, b"from somebody else"))
        if attends:
            waiter = cast(Any, SimpleNamespace(polling=None, awake=False))
            conn.reading(waiter, conn.answering)
        else:
            conn.reply()
        assert delivered == [b"from somebody else"]
        assert left == [conn.writer.flush_waiting]  # the rest is sent by a thread that may wait
        assert conn.state is not CLOSED
        conn.close()
        conn.reap()
    there.close()


def test_what_comes_while_it_is_looked_whether_all_is_sent_is_sent_after_that() -> None:
    here, there = socket.socketpair()
    frame = pack_frame(REPLY, 1, b"late")

    class Lock:
        """Another thread has something to send while this one has the lock."""

        def __init__(self, lock: threading.Lock) -> None:
            self._lock = lock
            self.release = lock.release

        def acquire(self, wait: bool = True) -> bool:
            taken = self._lock.acquire(wait)
            if taken and not late:
                late.append(frame)
                conn.outbox.append(frame)
                conn.flush()
            return taken

    late: list[bytes] = []
    with select.epoll() as epoll, there:
        conn = Connection(
            SocketStream(here),
            epoll=epoll,
            events=cast(Any, SimpleNamespace(closed=lambda *_: None)),
            settings=Settings(),
            attach=b"",
            local=True,
        )
        conn.writer.lock = cast(Any, Lock(conn.writer.lock))
        assert not conn.writer.is_drained()
        assert conn.writer.is_drained()
        assert there.recv(4096, socket.MSG_DONTWAIT) == frame
        conn.writer.lock = threading.Lock()
        conn.close()
        conn.reap()
