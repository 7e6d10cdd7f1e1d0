"""Actors that share a thread."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import CancelledError, cancel, get
from actorrpc.actors.context import Runtime
from actorrpc.actors.host import carriers
from tests.actors.alone import alone
from tests.actors.e2e.kit import until

_of_the_actor: ContextVar[str] = ContextVar("_of_the_actor", default="unset")


_begun, _ended, _gate = threading.Event(), threading.Event(), threading.Event()


@actorrpc.remote
class Plain:
    """Returns its thread and its context, and records numbers."""

    def __init__(self) -> None:
        self.seen: list[int] = []

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
        assert _gate.wait(20)
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
    """Join a group of one worker whose first actors have all threads of their own, so that further actors share threads."""
    for event in (_begun, _ended, _gate):
        event.clear()
    with alone(tmp_path) as runtime:
        first = [Plain.remote() for _ in range(carriers.MAX_RUNNERS)]
        get([each.thread.remote() for each in first])
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
    _gate.set()
    assert get(refs) == ["opened"] * 12
    until(lambda: len(_shared()) <= 8)  # more idle threads end
    del blocked, refs, free


@pytest.mark.parametrize("end", [cancel, actorrpc.kill])
def test_cancel_and_kill_interrupt_a_method_on_a_shared_thread(sharing: Runtime, end: Any) -> None:
    one, two = Plain.remote(), Plain.remote()
    ref = one.endless.remote()
    assert _begun.wait(20)
    assert get(two.add.remote(1)) == [1]
    end(ref if end is cancel else one)
    with pytest.raises(CancelledError if end is cancel else actorrpc.ActorDiedError):
        get(ref)
    assert _ended.wait(20)
    assert get(two.add.remote(2), timeout=20) == [1, 2]
    del one, two, ref


@pytest.mark.slow
@pytest.mark.limit(120)
def test_more_actors_than_max_runners_share_threads(tmp_path: Path) -> None:
    with alone(tmp_path):
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
        # The end of a group waits for at most five seconds.
        until(lambda: not any(each.name.startswith("actorrpc-actor-") for each in threading.enumerate()))
        until(lambda: len(_shared()) <= 8)
