"""The thread pool, the clock and daemon threads: each task runs although others block or raise, and threads end cleanly."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actorrpc.agent.daemon_threads import Daemon
from actorrpc.agent.threads import Pool, follow_torch
from actorrpc.agent.timers import Clock
from actorrpc.futures import Future
from tests import output
from tests.actors.e2e.kit import until


class _PoolAndClock:
    """A pool with its clock; its tasks are tuples of a function and a name."""

    def __init__(self, max_threads: int) -> None:
        self.clock = Clock()
        self.refused: list[Any] = []
        self.pool = Pool(
            clock=self.clock,
            execute=lambda task: task[0](),
            refuse=lambda task, why: self.refused.append((task[1], why)),
            max_threads=max_threads,
            starvation_s=0.004,
        )
        self.clock.start()
        self.pool.start(2)

    def call(self, function: Callable[[], Any], name: object = None) -> None:
        self.pool.queue.append((function, name))
        self.pool.wake()

    def close(self) -> None:
        assert self.pool.close() == []
        self.clock.close()


@pytest.fixture
def build() -> Iterator[Callable[[int], _PoolAndClock]]:
    made: list[_PoolAndClock] = []

    def make(max_threads: int) -> _PoolAndClock:
        made.append(_PoolAndClock(max_threads))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_more_blocked_tasks_than_the_pool_width_all_run(build: Callable[[int], _PoolAndClock]) -> None:
    """Each task waits for the last task."""
    harness = build(512)
    count = 40
    together = threading.Barrier(count)
    done = threading.Semaphore(0)

    def work() -> None:
        together.wait()
        done.release()

    for _ in range(2):
        for _ in range(count):
            harness.call(work)
        for _ in range(count):
            done.acquire()

    # A chain, in which each task submits the next one and waits for it.
    def deeper(depth: int) -> None:
        if depth:
            over = threading.Event()
            harness.call(lambda: (deeper(depth - 1), over.set()))
            over.wait()

    deeper(count)


@pytest.mark.prints("a task of the pool raised.*ZeroDivisionError")
def test_a_task_that_raises_is_logged_and_the_pool_keeps_running(
    build: Callable[[int], _PoolAndClock], caplog: pytest.LogCaptureFixture
) -> None:
    harness = build(3)
    for _ in range(10):
        harness.call(lambda: 1 / 0)
        harness.pool.submit(lambda: 1 / 0)
    done = threading.Event()
    harness.call(done.set)
    done.wait()
    until(lambda: caplog.text.count("a task of the pool raised") == 20)


def _openmp() -> ctypes.CDLL | None:
    """Return the OpenMP library that torch uses in this process."""
    with open("/proc/self/maps") as maps:
        paths = {
            line.split(None, 5)[5].strip() for line in maps if "omp" in line and len(line.split(None, 5)) > 5
        }
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        if hasattr(library, "omp_get_max_threads"):
            return library
    return None


def test_torch_set_num_threads_applies_to_new_threads_of_the_pool() -> None:
    library = _openmp()
    if library is None:
        pytest.skip("this torch does not use OpenMP")
    before = torch.get_num_threads()
    wanted = before + 2
    found: list[int] = []

    def look(follow: bool) -> None:
        if follow:
            follow_torch()
        found.append(library.omp_get_max_threads())

    torch.set_num_threads(wanted)
    try:
        for follow in (False, True):
            thread = threading.Thread(target=look, args=(follow,))
            thread.start()
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert found[0] != wanted  # otherwise the test checks nothing
    assert found[1] == wanted


def test_future_callbacks_run_although_the_pool_is_closing_or_closed(
    build: Callable[[int], _PoolAndClock],
) -> None:
    """Other tasks are discarded."""
    harness = build(4)
    before, after, nested = (Future[int]() for _ in range(3))
    following = [each.then(lambda done: done.wait() + 1) for each in (before, after)]
    ran: list[str] = []
    after.add_done_callback(lambda _: nested.conclude(3, None, harness.pool.submit))
    follows = nested.then(lambda done: done.wait() + 1)
    with harness.pool._lock:  # no thread can end meanwhile
        harness.pool.stopping = True
        before.conclude(1, None, harness.pool.queue.append)
        harness.pool.queue.append(lambda: ran.append("a task"))
    harness.close()
    after.conclude(2, None, harness.pool.submit)
    harness.pool.submit(lambda: ran.append("another"))
    assert [each.wait() for each in (*following, follows)] == [2, 3, 4]
    assert ran == []


# -- other threads ------------------------------------------------------------------------------------------


@pytest.mark.prints("a timer raised.*ZeroDivisionError")
def test_an_error_in_a_timer_is_logged_and_later_timers_run(caplog: pytest.LogCaptureFixture) -> None:
    clock, came = Clock(), threading.Event()
    clock.start()
    clock.after(0.0, lambda: 1 / 0)
    clock.after(0.01, came.set)
    came.wait()
    clock.close()
    assert "a timer raised" in caplog.text


# Torch drops its thread-local objects after the Python code of the thread has ended. The finaliser takes 0.3 s and needs
# the interpreter.
_SCRIPT = """if True:
    import sys, time
    import torch
    import actorrpc.rpc as rpc

    class Slow:
        def __del__(self):
            time.sleep(0.3)
            print("let go", flush=True)

    def keep():
        torch._C._stash_obj_in_tls("of this thread", Slow())

    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[1]))
    rpc.rpc_sync("worker0", keep)
    rpc.shutdown()
"""


@pytest.mark.slow
def test_interpreter_exit_waits_for_daemon_threads_that_are_ending(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, f"file://{tmp_path}/store"],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (0, "let go\n"), done.stderr
    output.check(done.stderr)


@pytest.mark.prints("the thread wrong has ended unexpectedly")
@pytest.mark.parametrize("error", [LookupError("no"), SystemExit(3)])
def test_a_daemon_thread_that_raises_logs_its_error_and_ends(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[object] = []

    def wrong() -> None:
        raise error

    thread = Daemon(wrong, "wrong", told.append)
    thread.start()
    thread.join()
    assert told == [error]
    assert "the thread wrong has ended unexpectedly\nTraceback" in caplog.text
    caplog.clear()
