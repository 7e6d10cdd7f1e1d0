"""Waits for calls: what happens meanwhile, and how long nested ones may take."""

from __future__ import annotations

import operator
import queue
import threading
from typing import Any, cast

import pytest

from actorrpc import rpc
from actorrpc.errors import RpcTimeoutError
from actorrpc.futures import WAITING
from actorrpc.testing import InProcessCluster
from tests.agent.agents import agents


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
