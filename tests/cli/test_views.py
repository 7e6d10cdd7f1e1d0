"""Output of ``describe``, ``stack`` and ``top`` for dead, stuck and held actors of a fake group."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from actorrpc.cli import commands
from actorrpc.cli.commands import main
from actorrpc.observe.assemble import Silent
from actorrpc.observe.findings import span
from actorrpc.observe.outside import FoundGroup, GroupLook
from actorrpc.wire.identity import WorkerRecord

_STOPPED = "its process was stopped by a signal (SIGSTOP, SIGTSTP)"
_CALL = {"caller": "driver", "since": 5.0}


def _record(name: str, rank: int) -> WorkerRecord:
    return WorkerRecord(name=name, rank=rank, incarnation=f"{rank:032x}", host="here", pid=100 + rank)


def _supervised(number: int, kind: str, worker: str = "", **more: Any) -> dict[str, Any]:
    return {
        "actor_id": f"{number:016x}",
        "instance": f"{number:016x}",
        "class_name": kind,
        "state": "ALIVE" if worker else "DEAD",
        "worker": worker,
        **more,
    }


def _life(number: int, **more: Any) -> dict[str, Any]:
    return {"actor_id": f"{number:016x}", "instance": f"{number:016x}", "state": "alive", **more}


def _stack(ident: int, name: str, function: str) -> dict[str, Any]:
    return {
        "ident": ident,
        "name": name,
        "frames": [{"function": function, "file": "/usr/lib/pdb.py", "line": 433}],
    }


def _held(number: int, method: str, thread: int, why: str) -> dict[str, Any]:
    return {
        "session": f"Held-2:{thread}",
        "call": f"Held#{number:04x}.{method}()",
        "actor_id": f"{number:016x}",
        "why": why,
        "is_held": True,
        "thread": thread,
        "file": "/job.py",
        "line": 9,
        "function": method,
        "since": 7.0,
    }


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> GroupLook:
    """A look at a driver, a stopped worker, a worker with held calls, and a worker with a coroutine."""
    driver = {
        "supervised": [
            _supervised(0xA1, "Raiser", death_cause="Raiser#00a1 is dead: its constructor raised ValueError"),
            _supervised(0xA2, "Ended", death_cause="Ended#00a2 is dead: it was killed with kill()"),
            _supervised(0xA3, "Mixed", death_cause="Mixed#00a3 is dead: its last handle is gone"),
            _supervised(0xA4, "Mixed", death_cause="Mixed#00a4 is dead: its process was ended by SIGKILL"),
            _supervised(0xA5, "Mixed", "Other-3"),
            _supervised(0xA6, "Old", death_cause="Old#00a6 is dead: no place", dead_for=300.0),
            _supervised(0xA7, "Old", death_cause="Old#00a7 is dead: no place", dead_for=400.0),
            _supervised(0xB1, "Stuck", "Stuck-1", pid=101),
            _supervised(0xC1, "Held", "Held-2"),
            _supervised(0xC2, "Held", "Held-2"),
            _supervised(0xD1, "Waiter", "Other-3"),
        ]
    }
    holding = {
        "process": {
            "held": [
                _held(0xC1, "fail", 1, "KeyError, which it has raised"),
                _held(0xC2, "step", 2, "breakpoint()"),
            ]
        },
        "actors": [_life(0xC1), _life(0xC2, running=[{**_CALL, "method": "step", "thread": 2}])],
        "threads": [_stack(1, "one", "Pdb.interaction"), _stack(2, "two", "Held.step")],
    }
    other = {"actors": [_life(0xA5), _life(0xD1, running=[{**_CALL, "method": "wait", "thread": 0}])]}
    answers = {
        record.incarnation: (record, answer)
        for record, answer in (
            (_record("driver", 0), driver),
            (_record("Stuck-1", 1), Silent("stopped", _STOPPED)),
            (_record("Held-2", 2), holding),
            (_record("Other-3", 3), other),
        )
    }
    look = GroupLook(FoundGroup(what="a group"), answers, 0.0)
    monkeypatch.setattr(commands, "find_groups", lambda _: [look.group])
    monkeypatch.setattr(commands, "look", lambda *_, **__: look)
    return look


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    return main(arguments), re.sub(r"(?<=\S)  +", " ", capsys.readouterr().out)


def test_describe_finds_a_dead_actor_by_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _run(capsys, "describe", "Raiser")
    assert status == 1
    assert "died Raiser#00a1 is dead: its constructor raised ValueError" in text
    # An intended end is no fault.
    status, text = _run(capsys, "describe", "Ended")
    assert status == 0
    assert "it was killed with kill()" in text


def test_describe_shows_a_stopped_worker_and_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _run(capsys, "describe", "Stuck")
    assert status == 1
    assert f"  worker Stuck-1 (pid 101) is stopped: {_STOPPED}\n" in text
    assert "  remedy kill -CONT 101 resumes it\n" in text
    status, text = _run(capsys, "describe", "Stuck", "--json")
    (finding,) = json.loads(text)["actors"][0]["findings"]
    assert (status, finding["kind"], finding["wrong"]) == (1, "worker", True)
    assert finding["what"].startswith("worker 'Stuck-1' (pid 101) is stopped: ")
    assert finding["remedy"] == "kill -CONT 101 resumes it"


def test_stack_shows_the_cause_of_a_death_which_is_a_fault_for_some_minutes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, text = _run(capsys, "stack", "Raiser")
    assert status == 1
    assert text == (
        "a group: no thread: Raiser#00a1 is DEAD\n\nWrong:\n* Raiser#00a1 is dead: its constructor raised ValueError\n"
    )
    status, text = _run(capsys, "stack", "Ended")
    assert status == 0
    assert "To know:\n* Ended#00a2 is dead: it was killed with kill()\n" in text
    status, text = _run(capsys, "stack", "Old")
    assert status == 0
    assert "To know:\n* 2 actors ('Old#00a6', 'Old#00a7') are dead: no place\n" in text


def test_stack_shows_a_failed_call_that_is_held_in_the_debugger(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _run(capsys, "stack", "00c1")
    assert status == 0
    assert text.startswith("a group: 1 thread of 1 worker\n\n1 thread (worker Held-2: one)\n")
    held = "  Held#00c1.fail() is held by KeyError, which it has raised at /job.py:9, in fail()\n    Pdb.interaction"
    assert held in text
    assert "actorrpc debug Held-2:1 attaches to it" in text
    assert "step" not in text  # the call of another actor
    assert held in _run(capsys, "stack")[1]
    assert held in _run(capsys, "describe", "00c1")[1]


def test_stack_as_json_has_the_findings_and_the_running_calls(capsys: pytest.CaptureFixture[str]) -> None:
    (group,) = json.loads(_run(capsys, "stack", "--json")[1])["groups"]
    told = " ".join(each["what"] for each in group["findings"])
    assert all(each in told for each in ("is stopped", "is dead", "is held in the debugger"))
    assert [each["method"] for each in group["running"]] == ["step", "wait"]


def test_durations_are_printed_in_fitting_units() -> None:
    found = [span(seconds) for seconds in (119.0, 7199.0, 7260.0, 2e5, float("inf"))]
    assert found == ["119.0 s", "119 min", "2 h 01 min", "2 d 7 h", "inf s"]


def test_top_shows_calls_that_are_held_in_the_debugger(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = _run(capsys, "top", "--count", "1")
    assert "fail() held in a debugger 7.0 s\n" in text
    assert "step() held in a debugger 7.0 s\n" in text
    assert "wait() 5.0 s\n" in text
