"""Calls whose arguments are results that are not there yet: their order, their ends, and that they have not run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import errors
from tests.actors.e2e.kit import open_gate, pass_gate, until

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(30)]


@actorrpc.remote
def later(path: str, value: Any) -> Any:
    pass_gate(path)
    if isinstance(value, BaseException):
        raise value
    return value


class Notes:
    """Writes down its arguments in the order of its calls."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, *values: Any, **named: Any) -> int:
        self.seen.append((*values, *named.values()))
        return len(self.seen)

    def add(self, value: int) -> int:
        return value + 1

    def total(self, value: torch.Tensor, more: list[int]) -> float:
        return float(value.sum()) + sum(more)

    def all(self) -> list[Any]:
        return self.seen

    def pid(self) -> int:
        return os.getpid()


class AsyncNotes(Notes):
    """The same, on an event loop."""

    async def add(self, value: int) -> int:
        return value + 1


def test_the_failure_of_an_argument_is_the_failure_of_the_call(gates: Callable[[], Path]) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    fails, never = gates(), gates()
    call = notes.note.remote(
        later.remote(str(never), 1), more=later.remote(str(fails), LookupError("no such row"))
    )
    after = notes.note.remote("after")
    open_gate(fails)
    with pytest.raises(LookupError, match="no such row"):
        actorrpc.get(call)
    assert actorrpc.get(after) == 1
    open_gate(never)
    assert actorrpc.get(notes.all.remote()) == [("after",)]


def test_a_cancelled_call_whose_argument_is_pending_has_not_run(gate: Path) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    call = notes.note.remote(later.remote(str(gate), 1))
    after = notes.note.remote("after")
    assert actorrpc.cancel(call)
    with pytest.raises(errors.CancelledError) as caught:
        actorrpc.get(call)
    assert caught.value.maybe_executed is False
    assert actorrpc.get(after) == 1
    open_gate(gate)
    assert actorrpc.get(notes.all.remote()) == [("after",)]


def test_a_call_whose_argument_comes_too_late_has_not_run(gate: Path) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    call = notes.note.options(timeout=0.2).remote(later.remote(str(gate), 1))
    after = notes.note.remote("after")
    with pytest.raises(errors.RpcTimeoutError) as caught:
        actorrpc.get(call)
    assert caught.value.maybe_executed is False
    assert actorrpc.get(after) == 1
    open_gate(gate)
    assert actorrpc.get(notes.all.remote()) == [("after",)]


def test_a_killed_actor_has_not_run_the_calls_whose_arguments_were_pending(gate: Path) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    call = notes.note.remote(later.remote(str(gate), 1))
    actorrpc.get(notes.pid.options(allow_out_of_order=True).remote())
    actorrpc.kill(notes)
    with pytest.raises(errors.ActorDiedError) as caught:
        actorrpc.get(call)
    assert caught.value.maybe_executed is False
    open_gate(gate)


def test_a_restarted_actor_gets_the_calls_whose_arguments_were_pending(gate: Path) -> None:
    notes: Any = actorrpc.remote(Notes).options(max_restarts=1).remote()
    actorrpc.get(notes.pid.remote())
    call = notes.note.remote(later.remote(str(gate), 7), more=[1])
    actorrpc.kill(notes, no_restart=False)
    # Answered by the next life only: before that, the message might leave for the one that was killed.
    actorrpc.get(notes.pid.options(allow_out_of_order=True, max_task_retries=-1).remote())
    open_gate(gate)
    assert actorrpc.get(call) == 1
    assert actorrpc.get(notes.all.remote()) == [(7, [1])]


def test_the_other_arguments_are_taken_as_of_the_call(gate: Path) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    others, tensor = [1, 2], torch.ones(3)
    call = notes.note.remote(later.remote(str(gate), 1), others, named=tensor)
    others.append(3)
    tensor.zero_()
    open_gate(gate)
    actorrpc.get(call)
    ((value, numbers, sent),) = actorrpc.get(notes.all.remote())
    assert (value, numbers, sent.tolist()) == (1, [1, 2], [1, 1, 1])


def test_an_argument_that_cannot_be_sent_is_refused_at_once(gate: Path) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    pending = later.remote(str(gate), 1)
    with pytest.raises(errors.SerializationError):
        notes.note.remote(pending, threading.Lock())
    open_gate(gate)
    assert actorrpc.get(notes.note.remote(pending)) == 1


def test_large_results_and_small_ones_arrive_together(gates: Callable[[], Path]) -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    small, large = gates(), gates()
    total = notes.total.remote(
        later.remote(str(large), torch.ones(1 << 18)), later.remote(str(small), [1, 2])
    )
    open_gate(small)
    open_gate(large)
    assert actorrpc.get(total) == (1 << 18) + 3


@pytest.mark.parametrize(
    "kinds",
    [(Notes,), (Notes, Notes), (AsyncNotes,), (AsyncNotes, Notes)],
    ids=lambda kinds: "-".join(k.__name__ for k in kinds),
)
def test_dependent_calls_give_what_they_give_one_by_one(kinds: tuple[type, ...]) -> None:
    actors: list[Any] = [actorrpc.remote(kind).remote() for kind in kinds]
    ref = actorrpc.put(0)
    for number in range(1000):
        ref = actors[number % len(actors)].add.remote(ref)
    assert actorrpc.get(ref) == 1000


def test_a_failure_ends_all_calls_that_depend_on_it() -> None:
    notes: Any = actorrpc.remote(Notes).remote()
    ref = notes.total.remote("no tensor", [])
    for _ in range(1000):
        ref = notes.add.remote(ref)
    with pytest.raises(AttributeError):
        actorrpc.get(ref)
    assert actorrpc.get(notes.add.remote(1)) == 2


def test_an_actor_calls_its_own_process_with_pending_arguments() -> None:
    class Parent:
        def run(self) -> int:
            child = actorrpc.remote(Notes).options(worker=actorrpc.rpc.get_worker_info().name).remote()
            ref = actorrpc.put(0)
            for _ in range(100):
                ref = child.add.remote(ref)
            return actorrpc.get(ref)

    assert actorrpc.get(actorrpc.remote(Parent).remote().run.remote()) == 100


def test_a_pending_argument_does_not_hold_up_an_actor_that_takes_calls_out_of_order(
    gate: Path,
) -> None:
    notes: Any = actorrpc.remote(Notes).options(max_concurrency=2).remote()
    call = notes.note.remote(later.remote(str(gate), 1))
    assert actorrpc.get(notes.add.remote(1)) == 2
    open_gate(gate)
    until(lambda: actorrpc.get(call))
    assert actorrpc.get(notes.all.remote()) == [(1,)]
