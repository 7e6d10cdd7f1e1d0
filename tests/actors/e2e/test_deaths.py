"""Processes that die under their actors, on the embedded cluster."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

import actorrpc
from actorrpc import actors
from actorrpc.errors import ActorDiedError, ActorUnavailableError
from tests.actors.e2e.kit import alive, until
from tests.actors.e2e.mortals import Fragile, Keeper, Parent, error_of
from tests.announced import LAST_WORDS

pytestmark = [
    pytest.mark.usefixtures("embedded"),
    pytest.mark.prints(LAST_WORDS),
]


def test_the_death_report_is_in_theerror_of() -> None:
    fragile = Fragile.remote()
    pid = actorrpc.get(fragile.pid.remote())
    error = error_of(fragile.crash.remote(3))
    assert isinstance(error, ActorDiedError)
    assert error.maybe_executed is True
    assert error.method == "crash"
    for part in (f"pid {pid}", "exited with code 3", "the last words", "max_restarts is 0", "Fragile"):
        assert part in str(error)
    assert error.report.exit_code == 3  # type: ignore[attr-defined]


def test_a_restart_and_what_becomes_of_the_calls() -> None:
    fragile = Fragile.options(max_restarts=1).remote(5)
    first = actorrpc.get(fragile.pid.remote())
    error = error_of(fragile.crash.remote())
    assert isinstance(error, ActorUnavailableError)
    assert error.maybe_executed is True
    assert "exited with code 3" in str(error)
    assert actorrpc.get(fragile.step.remote()) == 6
    assert actorrpc.get(fragile.pid.remote()) != first
    assert isinstance(error_of(fragile.crash.remote()), ActorDiedError)


def test_retries(tmp_path: Path) -> None:
    fragile = Fragile.options(max_restarts=-1).remote()
    path = str(tmp_path / "once")
    assert isinstance(error_of(fragile.crash_once.remote(path)), ActorUnavailableError)
    path = str(tmp_path / "again")
    patient = fragile.crash_once.options(max_task_retries=1)
    first = fragile.echo.options(max_task_retries=1).remote(0)
    refs = [patient.remote(path), fragile.echo.options(max_task_retries=1).remote([1])]
    assert actorrpc.get([first, *refs]) == [0, "done", [1]]


def test_the_state_is_carried_over() -> None:
    keeper = Keeper.options(max_restarts=-1).remote()
    assert actorrpc.get([keeper.add.remote(1), keeper.add.remote(2)])[-1] == [1, 2]
    error_of(keeper.crash.remote())
    assert actorrpc.get(keeper.add.remote(3)) == [1, 2, -1, 3]


def test_the_process_ends_with_the_last_handle() -> None:
    fragile = Fragile.remote()
    pid = actorrpc.get(fragile.pid.remote())
    del fragile
    gc.collect()
    until(lambda: not alive(pid))


def test_the_process_ends_with_its_creator() -> None:
    parent = Parent.remote()
    child = actorrpc.get(parent.make.remote())
    pid = actorrpc.get(child.pid.remote())
    actors.kill(parent)
    until(lambda: not alive(pid))
    assert isinstance(error_of(child.step.remote()), ActorDiedError)


def test_beside_another_actor() -> None:
    first = Fragile.remote()
    second = Fragile.options(worker=first).remote()
    assert actorrpc.get(first.pid.remote()) == actorrpc.get(second.pid.remote())
    actors.kill(second)
    assert actorrpc.get(first.step.remote()) == 1


@pytest.mark.slow
def test_many_kills_in_a_row() -> None:
    fragile = Fragile.options(max_restarts=-1, restart_backoff_s=0.0).remote()
    values = []
    for _ in range(5):
        pid = actorrpc.get(fragile.pid.options(max_task_retries=-1).remote())
        refs = [fragile.echo.options(max_task_retries=-1).remote(n) for n in range(50)]
        os.kill(pid, signal.SIGKILL)
        refs += [fragile.echo.options(max_task_retries=-1).remote(n) for n in range(50, 100)]
        values.append(actorrpc.get(refs, timeout=30))
    assert values == [list(range(100))] * 5
