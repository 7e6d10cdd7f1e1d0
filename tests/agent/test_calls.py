"""Calls by themselves: how a wait for one begins and ends."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from actorrpc import _time
from actorrpc.agent.calls import Call
from actorrpc.futures import WAITING, Future
from tests.agent.agents import agents


@pytest.mark.limit(10)
def test_a_wait_ends_with_the_future_and_does_not_spin_until_the_call_is_over() -> None:
    agent = cast(Any, SimpleNamespace(scheduler=SimpleNamespace(corked={}), pool=SimpleNamespace(queue=[])))
    future: Future[int] = Future()
    call = Call(agent, cast(Any, None), 1, "add", float("inf"), 0.0, 1, future)
    future.set_result(3)  # whoever does that ends the call next, as soon as it is let run
    call.drive(None)
    assert not call.done


class _Guest:
    """A thread of an actor that has something else to do as soon as it waits."""

    def __init__(self, conn: Any) -> None:
        self.work = ["an order"]
        self.left: list[int] = []
        self._conn = conn

    def begin_wait(self, stir: Any, what: Any) -> None:
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
