"""How the wait for a call begins and ends, and which thread reads its reply."""

from __future__ import annotations

import operator
import queue
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from actorrpc import _time, rpc
from actorrpc.agent.calls import Call
from actorrpc.agent.hooks import HookSet
from actorrpc.errors import RpcTimeoutError
from actorrpc.futures import WAITING, Future
from actorrpc.testing import InProcessCluster
from tests.agent.agents import agents


@pytest.mark.limit(10)
def test_a_wait_ends_with_its_future_without_spinning_until_the_call_is_done() -> None:
    agent = cast(
        Any,
        SimpleNamespace(
            hooks=HookSet(),
            scheduler=SimpleNamespace(corked={}),
            pool=SimpleNamespace(queue=[]),
            next_chain=lambda: 1,
        ),
    )
    future: Future[int] = Future()
    call = Call(agent, cast(Any, None), operator.add, 0.0, future)
    future.set_result(3)  # normally, the thread that does this marks the call as done afterwards
    call.drive(None)
    assert not call.done


class _ServingRunner:
    """The runner of an actor's thread that has work to serve as soon as the thread waits."""

    def __init__(self, conn: Any) -> None:
        self.work = ["an order"]
        self.left: list[int] = []
        self._conn = conn

    def begin_wait(self, wake: Any, what: Any) -> None:
        pass

    def end_wait(self) -> None:
        pass

    def serve(self) -> None:
        self.left.append(len(self._conn.outbox))
        self.work.clear()


def test_a_call_is_sent_before_its_waiting_thread_serves_other_work() -> None:
    """The other work may take long, or wait for an effect of the call."""
    with agents(2) as (one, other):
        to = one.peer(other.name)
        assert one.call_sync(to, operator.add, (1, 2), {}, 20.0) == 3
        guest = _ServingRunner(to.conn)
        WAITING.runner = cast(Any, guest)
        try:
            assert one.call_sync(to, operator.add, (1, 2), {}, 20.0) == 3
        finally:
            WAITING.runner = None
        assert guest.left == [0]


def test_replies_are_read_by_the_pool_while_their_callers_wait_in_c_code() -> None:
    """A thread in torch.futures.wait_all() does not read. The clock notices this once; later replies do not wait for it."""
    with agents(2) as (one, other):
        to = one.peer(other.name)
        expected = one.scheduler.expecting

        def ask() -> Future[int]:
            future: Future[int] = Future()
            one.call(to, operator.add, (1, 2), {}, 20.0, future=future)
            return future

        def wait_in_c() -> None:
            assert torch.futures.wait_all([ask()]) == [3]

        wait_in_c()
        while to.conn is None or not to.conn.unattended:  # a pool thread may have read the reply first
            wait_in_c()
        for _ in range(20):
            expected.clear()
            wait_in_c()
            assert not expected
        # After some replies that the waiting thread reads itself, the connection expects its callers to read again.
        while to.conn.unattended or not expected:
            assert ask().wait() == 3


class _Expecting:
    """A connection that expects callers to read their replies."""

    expecting = True
    expecting_since = 0.0
    unattended = 0

    def __init__(self, peer: Any) -> None:
        self.peer = peer

    def listen(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("calls", "ago", "marked"), [(0, -60.0, True), (64, -60.0, True), (65, -60.0, False), (65, 0.5, True)]
)
def test_a_connection_with_more_than_64_recent_calls_is_not_marked_as_unread(
    calls: int, ago: float, marked: bool
) -> None:
    with agents(1) as (one,):
        made = _time.now() - ago
        peer = SimpleNamespace(pending={number: SimpleNamespace(made=made) for number in range(calls)})
        conn = cast(Any, _Expecting(peer))
        one.scheduler.expecting[conn] = None
        one.scheduler._listen()
        assert bool(conn.unattended) is marked


_reached_last_worker = threading.Event()
_released = threading.Event()
_errors: queue.Queue[list[type[Exception]]] = queue.Queue()


def _forward(path: list[str]) -> None:
    """Call along a path twice: during the outer call, and after it has timed out. Record the errors."""
    if not path:
        _reached_last_worker.set()
        assert _released.wait(30)
        return
    found = []
    for _ in range(2):
        try:
            rpc.rpc_sync(path[0], _forward, (path[1:],), timeout=500)
        except Exception as error:
            found.append(type(error))
    _errors.put(found)


@pytest.mark.limit(60)
def test_nested_calls_time_out_with_the_outer_call_despite_a_later_deadline_of_their_own() -> None:
    """A deadline is sent as the remaining time; the time that the request took to arrive is subtracted."""
    with InProcessCluster(3) as cluster:
        caller = cluster["worker0"]
        caller.rpc_sync("worker1", int, (), timeout=0)
        cluster.cut("worker0", "worker1")
        call = caller.rpc_async("worker1", _forward, (["worker2", "worker0"],), timeout=60.0)
        cluster.clock.advance(5.0)
        cluster.heal("worker0", "worker1")
        assert _reached_last_worker.wait(30)
        cluster.clock.advance(56.0)
        with pytest.raises(RpcTimeoutError):
            call.wait()
        assert [_errors.get(timeout=30) for _ in range(2)] == [[RpcTimeoutError, RpcTimeoutError]] * 2
        _released.set()
