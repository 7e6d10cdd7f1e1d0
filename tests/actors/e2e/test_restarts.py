"""Restarts of actors whose process dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from tests.actors.e2e.kit import row_of
from tests.forks import exit_at_once
from tests.migration.rows import row

pytestmark = [pytest.mark.usefixtures("embedded"), pytest.mark.limit(20)]


@actorrpc.remote
class Phoenix:
    def __init__(self, start: int = 0, *, path: str = "") -> None:
        self.value = start
        self.path = path

    def add(self, n: int) -> int:
        self.value += n
        return self.value

    def pid(self) -> int:
        return os.getpid()

    def die(self) -> None:
        exit_at_once(3)

    def die_with_words(self) -> None:
        os.write(2, b"these are my last words\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def die_once(self) -> str:
        if not os.path.exists(self.path):
            Path(self.path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "second"

    def fail_once(self) -> str:
        if not os.path.exists(self.path):
            Path(self.path).touch()
            raise ValueError("first")
        return "second"

    def again(self) -> bool:
        return actorrpc.get_runtime_context().was_current_actor_reconstructed

    def ask(self, other: Any) -> list[Any]:
        return [other.pid.remote()]

    def text(self, size: int) -> list[Any]:
        return [actorrpc.put("x" * size)]

    def first(self, refs: list[Any]) -> Any:
        return actorrpc.get(refs[0])


def _retry(call: Any) -> Any:
    while True:
        try:
            return actorrpc.get(call())
        except actorrpc.ActorUnavailableError:
            pass


def test_a_restarted_actor_is_constructed_with_the_same_arguments_and_keeps_its_name_and_monitors() -> None:
    actor = Phoenix.options(max_restarts=2, name="phoenix").remote(10)
    watched = actorrpc.monitor(actor)
    assert actorrpc.get(actor.add.remote(1)) == 11
    pids = set()
    for n in range(2):
        pids.add(actorrpc.get(actor.pid.remote()))
        with pytest.raises(actorrpc.ActorUnavailableError, match="exited with code 3") as caught:
            actorrpc.get(actor.die.remote())
        assert caught.value.maybe_executed
        assert _retry(lambda: actorrpc.get_actor("phoenix").add.remote(1)) == 11
        assert row_of(actor).restarts == n + 1
        assert actorrpc.get(actor.again.remote()) is True
    pids.add(actorrpc.get(actor.pid.remote()))
    assert len(pids) == 3
    assert not watched.done()
    with pytest.raises(actorrpc.ActorDiedError, match="max_restarts is 2"):
        actorrpc.get(actor.die.remote())
    with pytest.raises(actorrpc.ActorDiedError):
        actorrpc.get(actor.add.remote(1))
    assert "code 3" in str(watched.wait(10))
    del caught


def test_max_task_retries_repeats_calls_after_deaths_and_listed_exceptions(tmp_path: Path) -> None:
    actor = Phoenix.options(max_restarts=1, max_task_retries=1).remote(path=str(tmp_path / "died"))
    assert actorrpc.get(actor.die_once.remote()) == "second"
    other = Phoenix.remote(path=str(tmp_path / "failed"))
    retried = other.fail_once.options(max_task_retries=2, retry_exceptions=[ValueError])
    assert actorrpc.get(retried.remote()) == "second"
    os.unlink(tmp_path / "failed")
    with pytest.raises(ValueError, match="first"):
        actorrpc.get(other.fail_once.options(max_task_retries=2, retry_exceptions=[KeyError]).remote())


@pytest.mark.prints("^these are my last words$")
@row("process.exitcode, process.sentinel", "from-multiprocessing")
@row('"The actor is dead because', "from-ray")
def test_actor_died_error_reports_method_exit_code_signal_and_the_last_lines_of_stderr() -> None:
    actor = Phoenix.remote()
    actorrpc.get(actor.pid.remote())
    with pytest.raises(actorrpc.ActorDiedError) as caught:
        actorrpc.get(actor.die.remote())
    text, report = str(caught.value), caught.value.report
    for word in ("Phoenix", "die", "exited with code 3", "up ", "peak memory", "max_restarts is 0"):
        assert word in text
    assert (report.exit_code, caught.value.method, caught.value.maybe_executed) == (3, "die", True)
    victim = Phoenix.remote()
    ended = actorrpc.monitor(victim)
    for call, executed in ((victim.die_with_words.remote, True), (victim.pid.remote, False)):
        with pytest.raises(actorrpc.ActorDiedError, match=r"(?s)SIGKILL.*these are my last words") as caught:
            actorrpc.get(call())
        assert caught.value.maybe_executed is executed
    report = ended.wait(30).report
    assert report.signal == signal.SIGKILL
    assert report.peak_memory > 0
    del caught


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_lost_argument_fails_its_call_and_not_the_actor(max_restarts: int) -> None:
    source, target = Phoenix.remote(), Phoenix.options(max_restarts=max_restarts).remote()
    refs, rref = actorrpc.get(source.ask.remote(target)), source.rref
    with pytest.raises(actorrpc.ActorDiedError):
        actorrpc.get(source.die.remote())
    with pytest.raises(actorrpc.PeerDiedError, match=r"the value of .* is lost"):
        actorrpc.get(target.first.remote(refs))
    assert actorrpc.get(target.add.remote(1)) == 1
    with pytest.raises(actorrpc.PeerDiedError, match="an argument cannot be sent") as refused:
        actorrpc.get(target.first.remote([rref]))
    assert refused.value.maybe_executed is False
    assert actorrpc.get(target.add.remote(1)) == 2


def test_a_fetched_string_can_be_passed_on_after_its_process_died() -> None:
    source, target = Phoenix.remote(), Phoenix.remote()
    refs = actorrpc.get(source.text.remote(1_000_000))
    text = actorrpc.get(refs[0])
    with pytest.raises(actorrpc.ActorDiedError):
        actorrpc.get(source.die.remote())
    assert actorrpc.get(target.first.remote(refs)) == text
