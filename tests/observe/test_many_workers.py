"""A group of 64 processes, one of them stopped and one in code in C: whoever looks at it names both, and has all others whole."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import actorrpc
from actorrpc.cli.commands import main
from actorrpc.observe.processes import why_silent
from tests.actors.e2e.kit import until

pytestmark = [pytest.mark.slow, pytest.mark.limit(300)]
_COUNT = 64


@actorrpc.remote(num_cpus=0)
class Member:
    def pid(self) -> int:
        return os.getpid()

    def in_c(self, path: str) -> None:
        ctypes.PyDLL(None).open(path.encode(), os.O_RDONLY)  # the lock of the interpreter is kept meanwhile


@dataclass
class _Job:
    stopped: int
    in_c: int


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Job]:
    gate = tmp_path_factory.mktemp("many") / "gate"
    os.mkfifo(gate)
    # The one that is stopped is not taken for dead while the tests look at it.
    with actorrpc.init(num_cpus=1, log_to_driver=False, heartbeat=120.0):
        members = [Member.remote() for _ in range(_COUNT - 1)]
        pids = actorrpc.get([each.pid.remote() for each in members])
        call = members[3].in_c.remote(str(gate))
        os.kill(pids[7], signal.SIGSTOP)
        try:
            until(lambda: why_silent(pids[7])[0] == "stopped")
            until(lambda: _odd(actorrpc.state(5)) == {pids[3]: "busy", pids[7]: "stopped"})
            yield _Job(pids[7], pids[3])
        finally:
            os.kill(pids[7], signal.SIGCONT)
            os.close(os.open(gate, os.O_WRONLY))
        actorrpc.get(call)


def _odd(state: Any) -> dict[int, str]:
    return {each.pid: each.state for each in state.workers if each.state != "alive"}


# How long it waits is at most this: two do not answer. Beside a heavy load the others may be slow.
_PATIENCE_S = 3.0


@pytest.mark.parametrize("stacks", [False, True])
def test_state(job: _Job, stacks: bool) -> None:
    seen = actorrpc.state(_PATIENCE_S, stacks=stacks)
    assert _odd(seen) == {job.stopped: "stopped", job.in_c: "busy"}
    assert len(seen.workers) == _COUNT
    assert sum(each.answered for each in seen.actors) == _COUNT - 3
    if stacks:
        # The one in C is dumped by a signal; of the one that is stopped nobody knows.
        assert [each.pid for each in seen.workers if not each.threads] == [job.stopped]
        assert [each.pid for each in seen.workers if each.dumped] == [job.in_c]


@pytest.mark.parametrize("command", ["status", "stack"])
def test_commands(job: _Job, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--pid", str(os.getpid()), "--timeout", str(_PATIENCE_S), "--json"]
    assert main([command, *where]) == 1
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    states = {each["pid"]: each["state"] for each in group["workers"]}
    assert len(states) == _COUNT
    assert {pid: each for pid, each in states.items() if each != "alive"} == {
        job.stopped: "stopped",
        job.in_c: "busy",
    }
