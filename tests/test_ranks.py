"""tests/ranks.py: running functions in ranks, each a process, and reports of ranks that fail."""

from __future__ import annotations

import ctypes
import operator
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from actorrpc.testing import processes
from tests import output
from tests.ranks import _ROOT, Died, GroupError, rpc_group, run_group


def _product(rank: int, world_size: int, factor: int) -> tuple[int, int, int]:
    return rank, world_size, rank * factor


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


def _leave_a_thread(rank: int, world_size: int) -> None:
    if rank == 1:
        threading.Thread(target=_in_this_function, name="stays").start()


def _holds_the_gil(rank: int, world_size: int, place: str) -> str:
    pid, way = Path(place) / "pid", Path(place) / "way"
    if rank:
        os.mkfifo(way)
        fd = os.open(way, os.O_RDWR)
        (pid.parent / "new").write_text(str(os.getpid()))
        (pid.parent / "new").rename(pid)
        ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1)  # with the GIL
        os.close(fd)
        return ""
    while not pid.exists():
        threading.Event().wait(0.01)
    try:
        return processes.dump_stacks([psutil.Process(int(pid.read_text()))])
    finally:
        way.write_bytes(b"x")


def _return_thread(rank: int, world_size: int) -> object:
    return threading.Lock()


def _large(rank: int, world_size: int) -> bytes:
    return bytes(4 << 20)


def _leak_descriptor(rank: int, world_size: int) -> None:
    os.pipe()


def _sum_at_next(rank: int, world_size: int, number: int) -> int:
    from actorrpc import rpc

    result: int = rpc.rpc_sync(f"worker{(rank + 1) % world_size}", operator.add, (number, rank))
    return result


def _raise_in_rpc(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("of rank 1")


def test_each_rank_gets_its_arguments_and_gives_its_result() -> None:
    assert run_group(_product, 3, 5) == [(0, 3, 0), (1, 3, 5), (2, 3, 10)]


def test_ranks_are_processes_with_the_test_s_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THIS_GROUP", "test")
    answers = run_group(_pid, 2)
    assert len({os.getpid(), *(pid for pid, _ in answers)}) == 3
    assert [value for _, value in answers] == ["test", "test"]
    assert run_group(_pid, 1, env={"OF_THIS_GROUP": "group"})[0][1] == "group"


def test_large_results_arrive() -> None:
    assert [len(result) for result in run_group(_large, 2)] == [4 << 20, 4 << 20]


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


@pytest.mark.slow
def test_a_rank_whose_thread_stays_is_a_failure() -> None:
    with pytest.raises(GroupError, match="did not end after its function returned"):
        run_group(_leave_a_thread, 2, leak_wait=None, timeout=3)


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(GroupError, match="its result cannot be pickled"):
        run_group(_return_thread, 1)


@pytest.mark.parametrize("init", ["file", "tcp", "env"])
def test_an_rpc_group_starts_and_ends_with_each_kind_of_store(init: str) -> None:
    assert rpc_group(_sum_at_next, 2, 10, init=init, options={"rpc_timeout": 30}) == [10, 11]


def test_a_rank_that_fails_in_an_rpc_group_shows_its_own_error() -> None:
    with pytest.raises(GroupError) as caught:
        rpc_group(_raise_in_rpc, 2)
    assert "KeyError: 'of rank 1'" in caught.value.failures[1]


@pytest.mark.slow
def test_stacks_are_dumped_of_a_process_whose_gil_is_held(tmp_path: Path) -> None:
    found, _ = run_group(_holds_the_gil, 2, str(tmp_path))
    assert "_holds_the_gil" in found


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


def print_environment() -> None:
    """Run in a process of the server, and print its environment."""
    print(os.getenv("ACTORRPC_DATA_ONLY"), os.getenv("OF_SESSION"), flush=True)


@pytest.mark.slow
def test_the_server_has_the_environment_of_the_session() -> None:
    script = """if True:
        import multiprocessing, os
        from tests.ranks import remember_environment, start_server, stop_server
        remember_environment()
        os.environ["ACTORRPC_DATA_ONLY"] = "1"  # as the first test with ranks may do
        start_server()
        assert os.environ["ACTORRPC_DATA_ONLY"] == "1"
        from tests.test_ranks import print_environment
        process = multiprocessing.get_context("forkserver").Process(target=print_environment)
        process.start()
        process.join()
        stop_server()
    """
    environment = {**os.environ, "OF_SESSION": "yes"}
    environment.pop("ACTORRPC_DATA_ONLY", None)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=_ROOT, capture_output=True, text=True
    )
    assert done.stdout.split() == ["None", "yes"], done.stderr
    output.check(done.stderr)
