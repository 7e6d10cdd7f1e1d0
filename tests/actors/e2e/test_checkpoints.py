"""Checkpoints of actors: a restarted actor has the state of every call that was answered."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc.actors.supervision.supervisor import Supervisor
from actorrpc.errors import ActorDiedError, ActorError, ActorUnavailableError, CheckpointError
from tests.actors.e2e.kit import row_of, until

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(60)]


class _Counting:
    def __init__(self) -> None:
        self.seen = 0

    def checkpoint(self) -> int:
        return self.seen

    def restore(self, seen: int) -> None:
        self.seen = seen


@actorrpc.remote(max_restarts=-1)
class Counter(_Counting):
    def add(self) -> int:
        self.seen += 1
        return self.seen

    def refuse(self) -> int:
        self.seen += 1
        raise ValueError("refused by the test")

    def count(self, more: int) -> Iterator[int]:
        for _ in range(more):
            self.seen += 1
            yield self.seen

    def ask(self, other: Any) -> int:
        return actorrpc.get(other.add.remote())

    def wait(self, note: Path) -> int:
        until(note.exists)
        self.seen += 1
        return self.seen


@actorrpc.remote(max_restarts=-1)
class AsyncCounter(_Counting):
    async def add(self) -> int:
        self.seen += 1
        return self.seen

    async def count(self, more: int) -> AsyncIterator[int]:
        for _ in range(more):
            self.seen += 1
            yield self.seen


class Gate:
    """Delays the first checkpoint before the supervisor (the driver) stores it.

    Attributes:
        first: set when the first checkpoint has arrived.
        stored: set when the first checkpoint has been stored.
        second: set when another checkpoint has been stored.
        open: set by the test to let the first checkpoint continue.
        count: how many checkpoints have arrived.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first, self.stored, self.second, self.open = (threading.Event() for _ in range(4))
        self.count = 0
        note = Supervisor.note_checkpoint

        def held(*args: Any) -> bool:
            self.count += 1
            is_first = not self.first.is_set()
            if is_first:
                self.first.set()
                assert self.open.wait(30)
            kept = note(*args)
            (self.stored if is_first else self.second).set()
            return kept

        monkeypatch.setattr(Supervisor, "note_checkpoint", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def _die(actor: Any) -> None:
    actorrpc.kill(actor, no_restart=False)


def _next_answer(actor: Any) -> int:
    """Return the answer of the next incarnation."""
    return _retry(actor.add.remote)[0]


def _retry(call: Callable[[], Any]) -> tuple[int, int]:
    """Retry a call; return its answer and how many failed attempts may have been executed."""
    unsure = 0
    while True:
        try:
            return actorrpc.get(call()), unsure
        except ActorUnavailableError as error:
            unsure += bool(error.maybe_executed)


def test_a_restarted_actor_has_the_state_of_calls_answered_to_another_worker() -> None:
    actor, front = Counter.remote(), Counter.remote()
    known = 0
    for _ in range(2):
        # The killed incarnation may still execute a call from the other worker.
        found, unsure = _retry(lambda: front.ask.remote(actor))
        assert known < found <= known + 1 + unsure
        known = found
        _die(actor)


@pytest.mark.parametrize("cls", [Counter, AsyncCounter])
def test_a_call_is_not_answered_before_its_checkpoint_is_stored(cls: Any, gate: Gate) -> None:
    actor = cls.remote()
    ref = actor.add.remote()
    assert gate.first.wait(30)
    _die(actor)
    with pytest.raises(ActorUnavailableError) as caught:
        actorrpc.get(ref)
    assert caught.value.maybe_executed is True
    until(lambda: row_of(actor).restarts == 1)
    gate.open.set()  # the checkpoint of the dead incarnation arrives now and must be ignored
    assert _next_answer(actor) == 1


@pytest.mark.parametrize("cls", [Counter, AsyncCounter])
def test_a_stream_does_not_end_before_its_checkpoint_is_stored(cls: Any, gate: Gate) -> None:
    actor = cls.remote()
    items = iter(actor.count.remote(2))
    assert [actorrpc.get(next(items)) for _ in range(2)] == [1, 2]
    assert gate.first.wait(30)
    _die(actor)
    with pytest.raises(ActorError):
        actorrpc.get(next(items))
    gate.open.set()
    until(lambda: row_of(actor).restarts == 1)
    assert [actorrpc.get(each) for each in actor.count.remote(3)] == [1, 2, 3]
    _die(actor)
    assert _next_answer(actor) == 4


@pytest.mark.parametrize("cls", [Counter, AsyncCounter])
def test_the_newest_checkpoint_is_kept_even_if_an_older_one_arrives_later(cls: Any, gate: Gate) -> None:
    actor = cls.options(max_concurrency=2).remote()
    first = actor.add.remote()
    assert gate.first.wait(30)
    second = actor.add.remote()
    assert gate.second.wait(30)
    assert actorrpc.get(second) == 2
    gate.open.set()
    assert actorrpc.get(first) == 1
    _die(actor)
    assert _next_answer(actor) == 3


def test_one_checkpoint_can_cover_many_calls_and_answers_do_not_wait_for_later_calls(
    gate: Gate, tmp_path: Path
) -> None:
    gate.open.set()
    actor = Counter.remote()
    notes = tmp_path / "first", tmp_path / "second"
    first, second = (actor.wait.remote(note) for note in notes)
    refs = [actor.add.remote() for _ in range(200)]
    notes[0].touch()
    assert actorrpc.get(first, timeout=20) == 1
    notes[1].touch()
    assert actorrpc.get([second, *refs]) == list(range(2, 203))
    assert gate.count < 100
    _die(actor)
    assert _next_answer(actor) == 203


@pytest.mark.parametrize("end", ["dropped", "killed"])
def test_calls_that_wait_for_a_checkpoint_are_answered_if_the_actor_is_dropped_but_not_if_it_is_killed(
    gate: Gate, end: str
) -> None:
    actor = Counter.remote()
    refs = [actor.add.remote() for _ in range(10)]
    assert gate.first.wait(30)
    if end == "killed":
        actorrpc.kill(actor)
        for ref in refs:
            with pytest.raises(ActorDiedError):
                actorrpc.get(ref)
        return
    del actor
    gate.open.set()
    assert actorrpc.get(refs, timeout=20) == list(range(1, 11))


def test_a_stream_that_is_closed_early_is_checkpointed(gate: Gate) -> None:
    gate.open.set()
    actor = Counter.remote()
    items = iter(actor.count.remote(1000))
    assert actorrpc.get(next(items)) == 1
    items.close()
    assert gate.stored.wait(30)
    _die(actor)
    assert _next_answer(actor) > 1


class _Full(_Counting):
    """Its checkpoint() fails at a count of 2 and returns an object that cannot be pickled from 4 on."""

    full = 2

    def checkpoint(self) -> Any:
        if self.seen == self.full:
            raise OSError("no room")
        return self.seen if self.seen < self.full + 2 else threading.Lock()


@actorrpc.remote(max_restarts=-1, max_task_retries=3)
class Full(_Full):
    def add(self) -> int:
        self.seen += 1
        return self.seen

    def value(self) -> int:
        return self.seen

    @actorrpc.method(retry_exceptions=True)
    def eager(self) -> int:
        return self.add()

    def count(self, more: int) -> Iterator[int]:
        for _ in range(more):
            self.seen += 1
            yield self.seen

    def wait(self, note: Path) -> int:
        until(note.exists)
        return 0


@actorrpc.remote(max_restarts=-1)
class AsyncFull(_Full):
    async def add(self) -> int:
        self.seen += 1
        return self.seen

    async def value(self) -> int:
        return self.seen


@pytest.mark.parametrize("cls", [Full, AsyncFull])
def test_a_call_fails_if_its_checkpoint_fails(cls: Any) -> None:
    actor = cls.remote()
    assert actorrpc.get(actor.add.remote()) == 1
    with pytest.raises(CheckpointError, match="OSError: no room") as caught:
        actorrpc.get(actor.add.remote())
    assert caught.value.maybe_executed
    assert actorrpc.get(actor.add.remote()) == 3  # the actor lives on with its state
    with pytest.raises(CheckpointError, match="lock"):
        actorrpc.get(actor.add.remote())
    _die(actor)
    assert _retry(actor.value.remote)[0] == 3


def test_a_failed_checkpoint_fails_only_its_own_call_which_is_not_retried(tmp_path: Path) -> None:
    actor = Full.remote()
    first = actor.wait.remote(tmp_path / "note")
    refs = [
        actor.eager.remote() for _ in range(3)
    ]  # while other calls wait for the thread, answers are delayed
    (tmp_path / "note").touch()
    assert actorrpc.get([first, refs[0], refs[2]]) == [0, 1, 3]
    with pytest.raises(CheckpointError):
        actorrpc.get(refs[1])


def test_a_stream_fails_if_its_checkpoint_fails() -> None:
    actor = Full.remote()
    items = actor.count.remote(2)
    assert [actorrpc.get(next(items)) for _ in range(2)] == [1, 2]
    with pytest.raises(CheckpointError):
        actorrpc.get(next(items))
    assert actorrpc.get(actor.add.remote()) == 3


def test_checkpoint_every_counts_only_calls_that_did_not_raise() -> None:
    actor = Counter.options(checkpoint_every=2).remote()
    assert actorrpc.get(actor.add.remote()) == 1
    with pytest.raises(ValueError):
        actorrpc.get(actor.refuse.remote())
    assert actorrpc.get(actor.add.remote()) == 3  # the second successful call
    assert actorrpc.get(actor.add.remote()) == 4
    _die(actor)
    assert _next_answer(actor) == 4
