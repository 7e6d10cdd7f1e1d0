"""A group that nobody uses wakes no thread, but for what its connections need: events are counted, in virtual time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import _time
from actorrpc.agent.context import current_worker
from actorrpc.agent.threads import Pool
from actorrpc.agent.timers import Clock, Tick, Timer
from actorrpc.testing import InProcessCluster
from actorrpc.wire.frames import FrameReader

_BEATS = 60  # of a minute each


@actorrpc.remote
class Echo:
    def back(self, value: Any) -> Any:
        return value


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What has had a thread wake up, and how often: timers, work for the pool, and what was read."""
    counted: Counter[str] = Counter()
    lock = threading.Lock()

    def count(name: str) -> None:
        with lock:
            counted[name] += 1

    at, submit, read = Clock.at, Pool.submit, FrameReader.fed

    def timer(clock: Clock, due: float, run: Callable[[], Any]) -> Timer:
        def counted() -> None:
            tick = getattr(run, "__self__", None)
            count(tick._look.__name__ if isinstance(tick, Tick) else "timer")
            run()

        return at(clock, due, counted)

    def work(pool: Pool, task: Callable[[], Any]) -> None:
        count("work")
        submit(pool, task)

    def reads(reader: FrameReader, *given: Any) -> Any:
        found = read(reader, *given)
        count("read")
        return found

    monkeypatch.setattr(Clock, "at", timer)
    monkeypatch.setattr(Pool, "submit", work)
    monkeypatch.setattr(FrameReader, "fed", reads)
    return counted


def _get(echo: Any, value: Any) -> Any:
    return actorrpc.get(echo.back.remote(value))


def _keep_memory_in_virtual_time() -> None:
    worker = current_worker()
    assert worker is not None
    agent = worker.agent
    lenders = [conn.lane.lender for peer in agent.peers() for conn in peer.conns]
    for keeper in (agent.buffers, agent.objects, *lenders):
        if keeper is not None:
            keeper._clock = lambda: _time.now()


def test_a_group_that_has_made_calls_wakes_nobody_but_for_heartbeats(events: Counter[str]) -> None:
    with InProcessCluster(2, heartbeat=60.0) as cluster:
        here, there = cluster["worker0"], cluster["worker1"]
        echo = here.run(Echo.options(worker="worker1").remote)
        for value in (1, torch.zeros(10), torch.zeros(1 << 18)):
            for _ in range(3):
                assert type(here.run(_get, echo, value)) is type(value)
                there.rpc_sync("worker0", type, (value,))
        here.run(_keep_memory_in_virtual_time)
        there.run(_keep_memory_in_virtual_time)
        cluster.clock.advance(300.0)  # what is kept for the next call goes
        events.clear()
        cluster.clock.advance(60.0 * _BEATS)
        found = dict(events)
        del echo
    workers = 2
    assert 0 < found.pop("_beat") <= 2 * workers * _BEATS
    assert 0 < found.pop("read") <= 2 * workers * _BEATS  # a question and an answer
    assert sum(found.values()) <= 10 * workers, (
        found
    )  # a look at the contexts of autograd, four times in an hour


def test_a_group_without_connections_wakes_a_worker_twice_a_minute_at_most(events: Counter[str]) -> None:
    with InProcessCluster(2) as cluster:
        cluster.clock.advance(300.0)
        events.clear()
        cluster.clock.advance(3600.0)
        found = dict(events)
    assert sum(found.values()) <= 2 * 60 * 2, found
