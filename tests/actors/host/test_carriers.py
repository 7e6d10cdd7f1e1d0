"""Scheduling of the runners of a worker, and runners that share a thread."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import actorrpc
from actorrpc import CancelledError, cancel, get
from actorrpc.actors.context import Runtime
from actorrpc.actors.host import carriers
from actorrpc.actors.host.carriers import ActorThreads
from tests.actors.alone import alone
from tests.actors.e2e.kit import until
from tests.agent.virtual_clock import VirtualClock

# -- turns, without threads ----------------------------------------------------------------------------------


class Runner:
    """A runner with its own thread, which the test steps by hand.

    Attributes:
        work: number of waiting calls.
        has_it: whether it has been woken and has not slept since.
    """

    shared = False

    def __init__(self, there: World) -> None:
        self.there = there
        self.work = 0
        self.idle = True
        self.has_it = False

    @property
    def thread(self) -> Runner:
        return self

    def wake(self) -> None:
        self.has_it = True

    def call(self) -> None:
        self.work += 1
        if self.idle:
            self.idle = False
            self.there.threads.call(cast(Any, self))

    def run(self) -> None:
        """Run all waiting calls, sleep, and pass the turn on."""
        self.there.done.append(self)
        self.work, self.idle, self.has_it = 0, True, False
        self.there.threads.on.pop(cast(Any, self), None)
        self.there.threads.pass_on()


class World:
    """The runners of one worker; the test advances the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, runners: int) -> None:
        self.clock = VirtualClock()
        monkeypatch.setattr(carriers._time, "now", self.clock.now)
        self.threads = ActorThreads(cast(Any, SimpleNamespace(clock=self.clock, submit=None)))
        self.runners = [Runner(self) for _ in range(runners)]
        self.done: deque[Runner] = deque()
        for each in self.runners:
            assert self.threads.add(cast(Any, each))

    @property
    def woken(self) -> list[Runner]:
        return [each for each in self.runners if each.has_it]


def test_a_call_that_does_not_end_does_not_delay_other_runners_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, 40)
    for each in world.runners:
        each.call()
    rounds = 0
    while len(world.woken) < 40:
        rounds += 1
        world.clock.advance(carriers._STALLED_S)
    assert rounds < 8  # each round wakes more runners


def test_closing_the_shared_threads_wakes_all_runners_with_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runners must notice that their actors have ended, and a runner in user code may never pass its turn on."""
    world = World(monkeypatch, 5)
    for each in world.runners[:4]:
        each.call()
    assert world.woken == world.runners[:1]
    world.threads.close()
    assert world.woken == world.runners[:4]
    world.runners[4].call()
    assert world.woken == world.runners


@pytest.mark.parametrize("seed", range(20))
def test_every_runner_with_work_gets_its_turn(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(seed)
    world = World(monkeypatch, draw.choice((2, 10)))
    for _ in range(300):
        choice = draw.random()
        if choice < 0.5:
            draw.choice(world.runners).call()
        elif choice < 0.9 and world.woken:
            draw.choice(world.woken).run()
        elif choice < 0.95:
            world.clock.advance(draw.choice((0.001, 0.01)))
        else:
            world.threads.took(draw.choice((0.0, 0.1)))
    while world.woken:
        world.woken[0].run()
    assert not any(each.work for each in world.runners)
    assert not world.threads.ready


# -- shared threads ------------------------------------------------------------------------------------------

_of_the_actor: ContextVar[str] = ContextVar("_of_the_actor", default="unset")


_begun, _ended = threading.Event(), threading.Event()


@actorrpc.remote
class Plain:
    """Returns its thread and its context, and records numbers."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.gate = threading.Event()

    def add(self, number: int) -> list[int]:
        self.seen.append(number)
        return self.seen

    def thread(self) -> tuple[str, int]:
        return threading.current_thread().name, threading.get_ident()

    def sets(self, name: str) -> None:
        _of_the_actor.set(name)
        torch.set_grad_enabled(False)

    def has(self) -> tuple[str, bool]:
        return _of_the_actor.get(), torch.is_grad_enabled()

    def block(self) -> str:
        assert self.gate.wait(20)
        return "opened"

    def endless(self) -> None:
        _begun.set()
        try:
            while True:
                time.sleep(0.001)
        finally:
            _ended.set()


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Runtime]:
    """Join a group of one worker in which only the first runner has its own thread."""
    _begun.clear()
    _ended.clear()
    with alone(tmp_path) as runtime:
        runtime.registry._threads._most = 1
        first = Plain.remote()
        get(first.thread.remote())
        yield runtime
        del first
    until(lambda: not _shared())


def _shared() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "actorrpc-actors"]


def test_actors_that_share_threads_keep_order_and_state(sharing: Runtime) -> None:
    actors = [Plain.remote() for _ in range(30)]
    refs = [[actor.add.remote(number) for actor in actors] for number in range(10)]
    assert [get(each) for each in refs][-1] == [list(range(10))] * 30
    assert {name for name, _ in get([actor.thread.remote() for actor in actors])} == {"actorrpc-actors"}
    del actors, refs


def test_context_variables_and_grad_mode_of_actors_on_a_shared_thread_are_separate(sharing: Runtime) -> None:
    one, two = Plain.remote(), Plain.remote()
    for _ in range(3):
        get(one.sets.remote("one's"))
        assert get(two.has.remote()) == ("unset", True)
        assert get(one.has.remote()) == ("one's", False)
    del one, two


def test_an_actor_that_blocks_a_shared_thread_does_not_block_others(sharing: Runtime) -> None:
    blocked = [Plain.remote() for _ in range(12)]
    refs = [actor.block.remote() for actor in blocked]
    free = Plain.remote()
    assert get(free.add.remote(1), timeout=20) == [1]
    for actor in blocked:
        get(actorrpc.ready(actor), timeout=20)  # pool threads help, so construction may take a moment longer
        hosted = next(each for each in sharing.registry.all() if each.title == _title(actor))
        hosted.instance.gate.set()
    assert get(refs) == ["opened"] * 12
    until(lambda: len(_shared()) <= carriers._KEPT)
    del blocked, refs, free, hosted


def _title(actor: Any) -> str:
    title: str = actor.__dict__["_actorrpc_descriptor"].title
    return title


def test_cancel_interrupts_a_method_on_a_shared_thread(sharing: Runtime) -> None:
    one, two = Plain.remote(), Plain.remote()
    ref = one.endless.remote()
    assert _begun.wait(20)
    assert get(two.add.remote(1)) == [1]
    assert cancel(ref)
    with pytest.raises(CancelledError):
        get(ref)
    assert get(one.add.remote(1), timeout=20) == [1]
    del one, two, ref


def test_killing_an_actor_frees_its_shared_thread(sharing: Runtime) -> None:
    one, two = Plain.remote(), Plain.remote()
    ref = one.endless.remote()
    assert _begun.wait(20)
    actorrpc.kill(one)
    with pytest.raises(actorrpc.ActorDiedError):
        get(ref)
    assert _ended.wait(20)
    assert get(two.add.remote(1), timeout=20) == [1]
    del one, two, ref


@pytest.mark.slow
@pytest.mark.limit(120)
def test_more_actors_than_max_runners_share_threads(tmp_path: Path) -> None:
    with alone(tmp_path) as runtime:
        count = carriers.MAX_RUNNERS + 76
        actors = [Plain.remote() for _ in range(count)]
        for number in range(3):
            found = get([actor.add.remote(number) for actor in actors])
        assert found == [[0, 1, 2]] * count
        threads = get([actor.thread.remote() for actor in actors])
        own = [ident for name, ident in threads if name != "actorrpc-actors"]
        assert len(own) == len(set(own)) == carriers.MAX_RUNNERS
        del actors
        gc.collect()
        until(lambda: not runtime.registry._threads._all)  # the end of a group waits for at most five seconds
