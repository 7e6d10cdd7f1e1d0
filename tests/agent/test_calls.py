"""Calls by themselves: how a wait for one begins and ends."""

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
def test_a_wait_ends_with_the_future_and_does_not_spin_until_the_call_is_over() -> None:
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
    future.set_result(3)  # whoever does that ends the call next, as soon as it is let run
    call.drive(None)
    assert not call.done


class _Guest:
    """A thread of an actor that has something else to do as soon as it waits."""

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


def test_a_call_is_on_its_way_before_whoever_waits_for_it_does_something_else() -> None:
    """What an actor's thread runs meanwhile may take long, or wait for what the call is to bring about."""
    with agents(2) as (one, other):
        to = one.peer(other.name)
        assert one.ask(to, operator.add, (1, 2), {}, 20.0) == 3
        guest = _Guest(to.conn)
        WAITING.runner = cast(Any, guest)
        try:
            assert one.ask(to, operator.add, (1, 2), {}, 20.0) == 3
        finally:
            WAITING.runner = None
        assert guest.left == [0]


def test_replies_whose_callers_wait_elsewhere_are_left_to_the_pool() -> None:
    """In C, as torch.futures.wait_all() does: nobody else reads until the clock looks. That is to be so once, not each time."""
    with agents(2) as (one, other):
        to = one.peer(other.name)
        expected = one.scheduler.expecting

        def ask() -> Future[int]:
            future: Future[int] = Future()
            one.call(to, operator.add, (1, 2), {}, 20.0, future=future)
            return future

        def in_c() -> None:
            assert torch.futures.wait_all([ask()]) == [3]

        in_c()
        while to.conn is None or not to.conn.unattended:  # unless a pool thread was at it already
            in_c()
        for _ in range(20):
            expected.clear()
            in_c()
            assert not expected
        # A thread that waits for its replies itself reads them: with time, they are expected again.
        while to.conn.unattended or not expected:
            assert ask().wait() == 3


class _Expecting:
    """A connection whose replies nobody has come to read."""

    expecting = True
    expecting_since = 0.0
    unattended = 0

    def __init__(self, peer: Any) -> None:
        self.peer = peer

    def listen(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("calls", "ago", "waits"), [(0, -60.0, True), (64, -60.0, True), (65, -60.0, False), (65, 0.5, True)]
)
def test_who_has_just_made_many_calls_may_make_more_and_then_read(
    calls: int, ago: float, waits: bool
) -> None:
    with agents(1) as (one,):
        made = _time.now() - ago
        peer = SimpleNamespace(pending={number: SimpleNamespace(made=made) for number in range(calls)})
        conn = cast(Any, _Expecting(peer))
        one.scheduler.expecting[conn] = None
        one.scheduler._listen()
        assert bool(conn.unattended) is waits


_at_the_end = threading.Event()
_released = threading.Event()
_ends: queue.Queue[list[type[Exception]]] = queue.Queue()


def _forward(path: list[str]) -> None:
    """Call along a path, and note how a call ends that is under way, and one that is made afterwards."""
    if not path:
        _at_the_end.set()
        assert _released.wait(30)
        return
    found = []
    for _ in range(2):
        try:
            rpc.rpc_sync(path[0], _forward, (path[1:],), timeout=500)
        except Exception as error:
            found.append(type(error))
    _ends.put(found)


@pytest.mark.limit(60)
def test_calls_nested_in_one_that_times_out_time_out_where_their_own_deadline_is_later() -> None:
    """A deadline travels as what is left of it: the time that the request was under way is added."""
    with InProcessCluster(3) as cluster:
        caller = cluster["worker0"]
        caller.rpc_sync("worker1", int, (), timeout=0)
        cluster.cut("worker0", "worker1")
        call = caller.rpc_async("worker1", _forward, (["worker2", "worker0"],), timeout=60.0)
        cluster.clock.advance(5.0)
        cluster.heal("worker0", "worker1")
        assert _at_the_end.wait(30)
        cluster.clock.advance(56.0)
        with pytest.raises(RpcTimeoutError):
            call.wait()
        assert [_ends.get(timeout=30) for _ in range(2)] == [[RpcTimeoutError, RpcTimeoutError]] * 2
        _released.set()
