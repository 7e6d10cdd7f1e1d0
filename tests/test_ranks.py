"""tests/ranks.py: running functions in ranks, each a process, and reports of ranks that fail."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from actorrpc.testing import processes
from tests.ranks import Died, GroupError, rpc_group, run_group


def _pid(rank: int, world_size: int) -> tuple[int, str | None]:
    return os.getpid(), os.environ.get("OF_THIS_GROUP")


def _raise(rank: int, world_size: int) -> None:
    print("said before")
    if rank == 1:
        raise KeyError("of rank 1")


def _compare(rank: int, world_size: int) -> None:
    left, right = 4, 5
    assert left == right


def _die(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def _rank_1_never_returns(rank: int, world_size: int) -> None:
    if rank == 1:
        _in_this_function()


def _in_this_function() -> None:
    threading.Event().wait()


def _leak_descriptor(rank: int, world_size: int) -> None:
    os.pipe()


def _sum_at_next(rank: int, world_size: int, number: int) -> int:
    from actorrpc import rpc

    result: int = rpc.rpc_sync(f"worker{(rank + 1) % world_size}", operator.add, (number, rank))
    return result


def test_ranks_are_processes_with_the_test_s_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THIS_GROUP", "test")
    answers = run_group(_pid, 2)
    assert len({os.getpid(), *(pid for pid, _ in answers)}) == 3
    assert [value for _, value in answers] == ["test", "test"]
    assert run_group(_pid, 1, env={"OF_THIS_GROUP": "group"})[0][1] == "group"


def test_a_failing_rank_shows_its_traceback_and_output() -> None:
    with pytest.raises(GroupError) as caught:
        run_group(_raise, 2)
    assert list(caught.value.failures) == [1]
    text = str(caught.value)
    assert "KeyError: 'of rank 1'" in text
    assert "in _raise" in text
    assert "said before" in text


def test_a_bare_assertion_shows_its_variables() -> None:
    with pytest.raises(GroupError, match="left = 4"):
        run_group(_compare, 1)


def test_the_death_of_a_rank_is_a_failure_unless_it_may_die() -> None:
    with pytest.raises(GroupError, match=r"rank 1: ended without a result \(signal SIGKILL\)"):
        run_group(_die, 2)
    assert run_group(_die, 2, may_die=[1]) == ["alive", Died(-signal.SIGKILL)]


@pytest.mark.slow
def test_a_rank_that_does_not_end_shows_its_stacks_and_is_killed() -> None:
    with pytest.raises(GroupError) as caught:
        run_group(_rank_1_never_returns, 2, timeout=3)
    assert list(caught.value.failures) == [1]
    assert "did not end in time" in caught.value.failures[1]
    assert "_in_this_function (" in caught.value.failures[1]


def test_a_rank_must_leave_nothing_behind() -> None:
    with pytest.raises(GroupError, match="descriptor of pipe:"):
        run_group(_leak_descriptor, 1, leak_wait=0.1)
    run_group(_leak_descriptor, 1, leak_wait=None)


@pytest.mark.parametrize("init", ["file", "tcp", "env"])
def test_an_rpc_group_starts_and_ends_with_each_kind_of_store(init: str) -> None:
    assert rpc_group(_sum_at_next, 2, 10, init=init, options={"rpc_timeout": 30}) == [10, 11]


@pytest.mark.parametrize("stopped", [False, True])
def test_stacks_are_dumped_of_a_running_or_stopped_process_outside_the_session(stopped: bool) -> None:
    script = "def wait_here():\n    print('here', flush=True)\n    input()\nwait_here()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if stopped:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        found = processes.dump_stacks([psutil.Process(process.pid)])
        process.send_signal(signal.SIGCONT)
        process.communicate(b"\n")
    assert "wait_here" in found or "Permission denied" in found  # if only root may trace processes
