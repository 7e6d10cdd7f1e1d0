"""Actors that die, are killed, exit, come back and are looked for, on real processes."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc import actors
from actorrpc.errors import (
    ActorDiedError,
    ActorUnavailableError,
    CancelledError,
    NameTakenError,
    PendingCallsLimitExceeded,
    RpcTimeoutError,
    UnknownActorError,
)
from tests.actors.e2e.kit import alive, open_gate, pass_gate, until


@actorrpc.remote
class Fragile:
    """Counts, and dies in all the ways that there are."""

    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ValueError("a count cannot be negative")
        self.count = start

    def step(self) -> int:
        self.count += 1
        return self.count

    def pid(self) -> int:
        return os.getpid()

    def echo(self, value: Any) -> Any:
        return value

    def block(self, path: str) -> str:
        return pass_gate(path)

    def leave(self) -> None:
        actors.exit_actor()

    def crash(self, code: int = 3) -> None:
        sys.stderr.write("the last words\n")
        sys.stderr.flush()
        os._exit(code)

    def crash_once(self, path: str) -> str:
        if not os.path.exists(path):
            Path(path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "done"


@actorrpc.remote
class Keeper:
    """Carries its state over a restart."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def add(self, number: int) -> list[int]:
        self.seen.append(number)
        return self.seen

    def checkpoint(self) -> list[int]:
        return self.seen

    def restore(self, state: list[int]) -> None:
        self.seen = [*state, -1]

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@actorrpc.remote
class Parent:
    """Makes actors of its own."""

    def make(self, **options: Any) -> Any:
        self.child = Fragile.options(**options).remote(10)
        return self.child

    def pid(self) -> int:
        return os.getpid()


def _error(ref: Any) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        actorrpc.get(ref, timeout=30)
    return caught.value


# -- anywhere ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("place")
class TestAnywhere:
    """On the embedded cluster, and in a group."""

    def test_a_constructor_error_reaches_every_call(self) -> None:
        fragile = Fragile.remote(-1)
        for ref in (fragile.step.remote(), fragile.pid.remote()):
            error = _error(ref)
            assert isinstance(error, ActorDiedError)
            assert type(error.cause) is ValueError
            assert error.__cause__ is error.cause
            assert "a count cannot be negative" in str(error)
            assert error.maybe_executed is False
        assert not actors.is_alive(fragile)
        assert isinstance(actors.monitor(fragile).wait(10), ActorDiedError)

    def test_calls_before_it_is_there(self) -> None:
        fragile = Fragile.remote()
        assert actorrpc.get([fragile.step.remote() for _ in range(200)]) == list(range(1, 201))

    def test_kill_is_for_good(self, gate: Path) -> None:
        fragile = Fragile.options(max_restarts=-1).remote()
        fired: list[Any] = []
        actors.monitor(fragile).add_done_callback(lambda done: fired.append(done.value()))
        running = fragile.block.remote(str(gate))
        waiting = fragile.step.remote()
        actors.ready(fragile)
        actors.kill(fragile)
        for ref in (running, waiting, fragile.step.remote()):
            error = _error(ref)
            assert isinstance(error, ActorDiedError)
            assert "it was killed with kill()" in str(error)
        until(lambda: fired)
        assert len(fired) == 1
        assert not actors.is_alive(fragile)
        # Where it shared a worker, its thread is still at the gate.
        descriptor = os.open(gate, os.O_RDWR)
        os.close(descriptor)

    def test_kill_and_restart(self) -> None:
        fragile = Fragile.options(max_restarts=2).remote(5)
        assert actorrpc.get(fragile.step.remote()) == 6
        for _ in range(2):
            actors.kill(fragile, no_restart=False)
            value = None
            while value is None:
                try:
                    value = actorrpc.get(fragile.step.remote(), timeout=30)
                except ActorUnavailableError:
                    pass  # it was still sent to the former incarnation
            assert value in (6, 7)
        actors.kill(fragile, no_restart=False)
        error: BaseException | None = None
        while not isinstance(error, ActorDiedError):
            error = _error(fragile.step.remote())
        assert "max_restarts is 2" in str(error)

    def test_exit_is_for_good(self) -> None:
        fragile = Fragile.options(max_restarts=-1).remote()
        error = _error(fragile.leave.remote())
        assert isinstance(error, ActorDiedError)
        assert "exit_actor()" in str(error)
        assert isinstance(_error(fragile.step.remote()), ActorDiedError)

    def test_names(self) -> None:
        fragile = Fragile.options(name="one").remote(1)
        assert actorrpc.get(actors.get_actor("one").step.remote()) == 2
        with pytest.raises(NameTakenError):
            Fragile.options(name="one").remote()
        again = Fragile.options(name="one", get_if_exists=True).remote(7)
        assert actorrpc.get(again.step.remote()) == 3
        parent = Parent.remote()
        with pytest.raises(NameTakenError, match="'one'"):
            actorrpc.get(parent.make.remote(name="one"))
        actors.kill(fragile)
        with pytest.raises(UnknownActorError):
            actors.get_actor("one")

    def test_a_weak_handle_does_not_keep_it(self) -> None:
        strong = Fragile.options(name="weak").remote()
        weak = actors.get_actor("weak")
        assert actorrpc.get(weak.step.remote()) == 1
        ended = actors.monitor(weak)
        del strong
        gc.collect()
        assert "its last handle is gone" in str(ended.wait(30))
        assert isinstance(_error(weak.step.remote()), ActorDiedError)

    def test_a_handle_that_travelled_keeps_it(self) -> None:
        fragile = Fragile.remote()
        holder = Fragile.remote()
        ended = actors.monitor(fragile)
        kept = holder.echo.remote([fragile])
        del fragile
        gc.collect()
        (back,) = actorrpc.get(kept)
        assert actorrpc.get(back.step.remote()) == 1
        assert not ended.done()
        del back, kept
        gc.collect()
        assert isinstance(ended.wait(30), ActorDiedError)

    def test_owned_actors_end_with_their_creator_and_detached_ones_do_not(self) -> None:
        parent = Parent.remote()
        owned = actorrpc.get(parent.make.remote())
        detached = actorrpc.get(parent.make.remote(lifetime="detached", name="stays"))
        assert actorrpc.get([owned.step.remote(), detached.step.remote()]) == [11, 11]
        actors.kill(parent)
        found = actors.get_actor("stays")
        assert actorrpc.get(found.step.remote()) == 12
        actors.kill(found)
        assert isinstance(_error(found.step.remote()), ActorDiedError)

    def test_deadlines_and_cancellation_while_it_is_made(self, gate: Path) -> None:
        blocked = Slow.remote(str(gate))
        refs = [blocked.step.remote() for _ in range(4)]
        assert actorrpc.actors.cancel(refs[1])
        error = _error(refs[1])
        assert isinstance(error, CancelledError)
        assert error.maybe_executed is False
        late = blocked.step.options(timeout=0.05).remote()
        error = _error(late)
        assert isinstance(error, RpcTimeoutError)
        assert error.maybe_executed is False
        open_gate(gate)
        assert actorrpc.get([refs[0], refs[2], refs[3]]) == [1, 2, 3]

    def test_max_pending_calls(self, gate: Path) -> None:
        fragile = Fragile.options(max_pending_calls=2).remote()
        refs = [fragile.block.remote(str(gate)), fragile.step.remote()]
        with pytest.raises(PendingCallsLimitExceeded, match="max_pending_calls=2"):
            fragile.step.remote()
        open_gate(gate)
        assert actorrpc.get(refs) == ["go", 1]
        assert actorrpc.get(fragile.step.remote()) == 2


@actorrpc.remote
class Slow(Fragile):
    """Takes its time to be made."""

    def __init__(self, path: str) -> None:
        super().__init__()
        pass_gate(path)


# -- in processes of their own ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("embedded")
class TestProcesses:
    """On the embedded cluster."""

    def test_the_death_report_is_in_the_error(self) -> None:
        fragile = Fragile.remote()
        pid = actorrpc.get(fragile.pid.remote())
        error = _error(fragile.crash.remote(3))
        assert isinstance(error, ActorDiedError)
        assert error.maybe_executed is True
        assert error.method == "crash"
        for part in (f"pid {pid}", "exited with code 3", "the last words", "max_restarts is 0", "Fragile"):
            assert part in str(error)
        assert error.report.exit_code == 3  # type: ignore[attr-defined]

    def test_a_restart_and_what_becomes_of_the_calls(self) -> None:
        fragile = Fragile.options(max_restarts=1).remote(5)
        first = actorrpc.get(fragile.pid.remote())
        error = _error(fragile.crash.remote())
        assert isinstance(error, ActorUnavailableError)
        assert error.maybe_executed is True
        assert "exited with code 3" in str(error)
        assert actorrpc.get(fragile.step.remote()) == 6
        assert actorrpc.get(fragile.pid.remote()) != first
        assert isinstance(_error(fragile.crash.remote()), ActorDiedError)

    def test_retries(self, tmp_path: Path) -> None:
        fragile = Fragile.options(max_restarts=-1).remote()
        path = str(tmp_path / "once")
        assert isinstance(_error(fragile.crash_once.remote(path)), ActorUnavailableError)
        path = str(tmp_path / "again")
        patient = fragile.crash_once.options(max_task_retries=1)
        first = fragile.echo.options(max_task_retries=1).remote(0)
        refs = [patient.remote(path), fragile.echo.options(max_task_retries=1).remote([1])]
        assert actorrpc.get([first, *refs]) == [0, "done", [1]]

    def test_the_state_is_carried_over(self) -> None:
        keeper = Keeper.options(max_restarts=-1).remote()
        assert actorrpc.get([keeper.add.remote(1), keeper.add.remote(2)])[-1] == [1, 2]
        _error(keeper.crash.remote())
        assert actorrpc.get(keeper.add.remote(3)) == [1, 2, -1, 3]

    def test_the_process_ends_with_the_last_handle(self) -> None:
        fragile = Fragile.remote()
        pid = actorrpc.get(fragile.pid.remote())
        del fragile
        gc.collect()
        until(lambda: not alive(pid))

    def test_the_process_ends_with_its_creator(self) -> None:
        parent = Parent.remote()
        child = actorrpc.get(parent.make.remote())
        pid = actorrpc.get(child.pid.remote())
        actors.kill(parent)
        until(lambda: not alive(pid))
        assert isinstance(_error(child.step.remote()), ActorDiedError)

    def test_beside_another_actor(self) -> None:
        first = Fragile.remote()
        second = Fragile.options(worker=first).remote()
        assert actorrpc.get(first.pid.remote()) == actorrpc.get(second.pid.remote())
        actors.kill(second)
        assert actorrpc.get(first.step.remote()) == 1

    def test_many_kills_in_a_row(self) -> None:
        fragile = Fragile.options(max_restarts=-1, restart_backoff_s=0.0).remote()
        values = []
        for _ in range(5):
            pid = actorrpc.get(fragile.pid.options(max_task_retries=-1).remote())
            refs = [fragile.echo.options(max_task_retries=-1).remote(n) for n in range(50)]
            os.kill(pid, signal.SIGKILL)
            refs += [fragile.echo.options(max_task_retries=-1).remote(n) for n in range(50, 100)]
            values.append(actorrpc.get(refs, timeout=30))
        assert values == [list(range(100))] * 5
