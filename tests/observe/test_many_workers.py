"""A group of 64 processes, of which one is stopped and one holds the GIL: both are named, and all others answer."""

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
        ctypes.PyDLL(None).open(path.encode(), os.O_RDONLY)  # holds the GIL


@dataclass
class _Job:
    stopped: int
    in_c: int


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Job]:
    gate = tmp_path_factory.mktemp("many") / "gate"
    os.mkfifo(gate)
    # With this heartbeat, the stopped worker is not declared dead during the tests.
    with actorrpc.init(num_cpus=1, log_to_driver=False, heartbeat=120.0):
        members = [Member.remote() for _ in range(_COUNT - 1)]
        pids = actorrpc.get([each.pid.remote() for each in members])
        call = members[3].in_c.remote(str(gate))
        os.kill(pids[7], signal.SIGSTOP)
        try:
            until(lambda: why_silent(pids[7])[0] == "stopped")
            until(lambda: _not_alive(actorrpc.state(5)) == {pids[3]: "busy", pids[7]: "stopped"})
            yield _Job(pids[7], pids[3])
        finally:
            os.kill(pids[7], signal.SIGCONT)
            os.close(os.open(gate, os.O_WRONLY))
        actorrpc.get(call)


def _not_alive(state: Any) -> dict[int, str]:
    return {each.pid: each.state for each in state.workers if each.state != "alive"}


# Time-out of a look, as two workers do not answer. Under load, the other workers may be slow.
_PATIENCE_S = 3.0


@pytest.mark.parametrize("stacks", [False, True])
def test_state_names_the_stopped_and_the_busy_worker_of_64(job: _Job, stacks: bool) -> None:
    seen = actorrpc.state(_PATIENCE_S, stacks=stacks)
    assert _not_alive(seen) == {job.stopped: "stopped", job.in_c: "busy"}
    assert len(seen.workers) == _COUNT
    assert sum(each.answered for each in seen.actors) == _COUNT - 3
    if stacks:
        # A signal dumps the stacks of the busy process; the stopped process has none.
        assert [each.pid for each in seen.workers if not each.threads] == [job.stopped]
        assert [each.pid for each in seen.workers if each.dumped] == [job.in_c]


@pytest.mark.parametrize("command", ["status", "stack"])
def test_commands_name_the_stopped_and_the_busy_worker_of_64(
    job: _Job, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--pid", str(os.getpid()), "--timeout", str(_PATIENCE_S), "--json"]
    assert main([command, *options]) == 1
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    states = {each["pid"]: each["state"] for each in group["workers"]}
    assert len(states) == _COUNT
    assert {pid: each for pid, each in states.items() if each != "alive"} == {
        job.stopped: "stopped",
        job.in_c: "busy",
    }
