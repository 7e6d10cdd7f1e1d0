"""The time limit of tests, the leak check and the reports of failures, in separate pytest sessions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent


def run_session(directory: Path, source: str, *options: str) -> tuple[int, str]:
    """Run tests in a separate pytest process with this repository's conftest; return its status and output."""
    file = directory / "test_inner.py"
    file.write_text(textwrap.dedent(source))
    command = [sys.executable, "-m", "pytest", "-c", str(_ROOT / "pyproject.toml"), f"--rootdir={directory}"]
    command += ["-p", "tests.conftest", "-p", "no:cacheprovider", "-p", "no:randomly", str(file), *options]
    done = subprocess.run(
        command,
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        text=True,
    )
    print(
        textwrap.indent(done.stdout, "| ")
    )  # so that tests/output.py does not take its tracebacks for this session's
    return done.returncode, done.stdout


@pytest.mark.slow
def test_each_leak_fails_only_the_test_that_left_it_and_is_named(tmp_path: Path) -> None:
    status, output = run_session(
        tmp_path,
        """
        import os, pathlib, subprocess, tempfile, threading, _thread, time
        from actorrpc.testing import leaks

        # Instead of /dev/shm, which parallel sessions share.
        leaks._SHM = pathlib.Path(tempfile.mkdtemp(dir=pathlib.Path(__file__).parent))
        release = threading.Event()

        def test_thread():
            threading.Thread(target=release.wait, name="left-thread").start()

        def test_raw_thread():
            running = threading.Event()
            _thread.start_new_thread(lambda: (running.set(), release.wait()), ())
            running.wait()

        def test_after_the_threads():
            release.set()

        def test_child():
            global child
            child = subprocess.Popen(["sleep", "1001"])

        def test_after_the_child():
            child.wait()

        def test_zombie():
            global zombie
            zombie = subprocess.Popen(["true"])
            os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)

        def test_after_the_zombie():
            zombie.wait()

        def test_orphan():
            # Wait until `sleep` runs: a process cannot be inspected during exec.
            becomes = "until read name < /proc/$!/comm && [ $name = sleep ]; do :; done"
            subprocess.run(["sh", "-c", f"setsid sleep 1002 > /dev/null 2>&1 & {becomes}"], check=True)

        def test_descriptor():
            global pipe
            pipe = os.pipe()

        def test_after_the_descriptor():
            os.close(pipe[0]), os.close(pipe[1])

        def test_runtime_file():
            open(os.path.join(os.environ["ACTORRPC_RUNTIME_DIR"], "left-socket"), "w").close()

        def test_shared_memory():
            (leaks._SHM / "left-segment").touch()

        def test_after_the_memory():
            (leaks._SHM / "left-segment").unlink()

        def test_late_but_tidy():
            threading.Thread(target=time.sleep, args=(0.05,)).start()

        def test_failing():
            pipe = os.pipe()
            try:
                assert not pipe
            finally:
                global later
                later = pipe
        """,
        "--leak-wait=0.3",
    )
    assert status == pytest.ExitCode.TESTS_FAILED
    for leak in (
        "ERROR at teardown of test_thread ",
        "thread 'left-thread'",
        "ERROR at teardown of test_raw_thread ",
        "(not started by threading)",
        "ERROR at teardown of test_child ",
        ": sleep 1001",
        "ERROR at teardown of test_zombie ",
        "(zombie, parent ",
        "ERROR at teardown of test_orphan ",
        ": sleep 1002",
        "ERROR at teardown of test_descriptor ",
        "descriptor of pipe:",
        "ERROR at teardown of test_runtime_file ",
        "left-socket",
        "ERROR at teardown of test_shared_memory ",
        "left-segment",
        "test_inner.py::test_failing",
        "left behind teardown",
    ):
        assert leak in output
    assert "1 failed, 14 passed, 8 errors" in output


@pytest.mark.slow
# It starts several interpreters that import torch, which is slow on a busy machine.
@pytest.mark.limit(180)
@pytest.mark.prints(r"^E +process \d+ .*-Wdefault::ResourceWarning -c ")
def test_a_test_over_its_limit_shows_all_stacks_and_leaves_no_process(tmp_path: Path) -> None:
    status, output = run_session(
        tmp_path,
        """
        import subprocess, threading, time
        import pytest
        from actorrpc.testing import processes, watchdog
        from tests.test_infrastructure import hang_in_rank, return_at_once
        from tests.ranks import run_group

        watchdog._RETRY = 0.2

        def inner_wait():
            threading.Event().wait()

        @pytest.mark.limit(0.3)
        def test_hangs_in_python():
            global child
            child = subprocess.Popen(["sleep", "1003"])
            inner_wait()

        def test_reap():
            child.wait()  # returns only if the process was killed

        @pytest.mark.limit(0.3)
        def test_swallows_once():
            try:
                inner_wait()
            except BaseException:
                inner_wait()

        def test_server_is_there():
            run_group(return_at_once, 1)

        @pytest.mark.limit(3)
        def test_ranks_hang():
            run_group(hang_in_rank, 2, timeout=30)

        @pytest.mark.limit(0.3)
        @pytest.mark.parametrize("where", [None])
        def test_hangs_in_setup(where, hanging):
            pass

        @pytest.fixture
        def hanging():
            time.sleep(1004)

        def test_no_process_is_left():
            assert not processes.of_session()
        """,
    )
    assert status == pytest.ExitCode.TESTS_FAILED
    assert output.count("the test was not over within its 0.3 s") >= 3
    assert "in inner_wait" in output
    assert ": sleep 1003" in output
    assert output.count("hang_in_rank (") >= 2
    assert "3 failed, 3 passed, 1 error" in output


@pytest.mark.slow
@pytest.mark.limit(180)
def test_the_report_of_a_failed_test_shows_the_stacks_of_its_cluster(tmp_path: Path) -> None:
    status, output = run_session(
        tmp_path,
        """
        import actorrpc
        from tests.actors import things

        def test_red():
            with actorrpc.init(num_cpus=1):
                counter = things.Counter.remote(3)
                actorrpc.get(actorrpc.call(counter, lambda _: print("this is what it printed", flush=True)))
                assert actorrpc.get(counter.add.remote()) == 5
        """,
    )
    assert status == pytest.ExitCode.TESTS_FAILED
    shown = output.partition("processes of the test as it failed")[2].partition("to repeat it")
    assert re.search(r"(?m)^process \d+ \(\w+, parent \d+\): .*python", shown[0])
    assert "this is what it printed" in output
    assert re.search(r"python -m pytest .*test_inner\.py", shown[2])


def hang_in_rank(rank: int, world_size: int) -> None:
    """Run as a rank that never ends."""
    threading.Event().wait()


def return_at_once(rank: int, world_size: int) -> None:
    """Run as a rank that ends."""


@pytest.mark.slow
def test_a_test_that_swallows_the_time_limit_ends_the_session(tmp_path: Path) -> None:
    status, output = run_session(
        tmp_path,
        """
        import subprocess, threading
        import pytest
        from actorrpc.testing import watchdog

        watchdog._RETRY = 0.05

        @pytest.mark.limit(0.2)
        def test_never_lets_go():
            child = subprocess.Popen(["sleep", "1005"])
            while True:
                try:
                    threading.Event().wait()
                except BaseException:
                    pass
        """,
    )
    assert status == 70
    assert "test_never_lets_go" in output
    assert "The test could not be ended" in output


@pytest.mark.slow
def test_a_test_that_holds_the_gil_past_its_limit_ends_the_session(tmp_path: Path) -> None:
    status, output = run_session(
        tmp_path,
        """
        import ctypes
        import pytest
        from actorrpc.testing import watchdog

        watchdog._BACKSTOP = 0.3

        @pytest.mark.limit(0.2)
        def test_holds_the_gil():
            ctypes.PyDLL(None).pause()  # PyDLL keeps the GIL
        """,
    )
    assert status == 1
    assert "in test_holds_the_gil" in output
