"""The pytest plugin as a user has it: in a separate session, without the conftest of this repository."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent.parent


def _session(directory: Path, source: str, *options: str) -> tuple[int, str]:
    """Run tests in a separate pytest process; return its status and output."""
    file = directory / "test_inner.py"
    file.write_text(textwrap.dedent(source))
    (directory / "pytest.ini").write_text(
        "[pytest]\naddopts = -p no:timeout -p no:cacheprovider -p no:randomly\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "actorrpc.testing.pytest_plugin", str(file), *options],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(_ROOT), "OUTER": os.environ["ACTORRPC_RUNTIME_DIR"]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=50,
        check=False,
        text=True,
    )
    print(done.stdout)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_the_plugin_fails_tests_that_leak_or_exceed_their_limit(tmp_path: Path) -> None:
    status, output = _session(
        tmp_path,
        """
        import operator, os, threading, time
        import pytest
        import actorrpc
        from actorrpc import autograd, rpc

        kept = []

        @pytest.fixture(scope="module", autouse=True)
        def worker(tmp_path_factory):
            store = f"file://{tmp_path_factory.mktemp('store')}/store"
            options = rpc.TensorPipeRpcBackendOptions(init_method=store)
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
            assert rpc.rpc_sync("alone", operator.add, (1, 2)) == 3
            yield
            rpc.shutdown(graceful=False)

        def test_tidy(no_leaks):
            assert rpc.rpc_sync("alone", operator.add, (1, 2)) == 3
            with autograd.context():
                pass

        def test_pending(no_leaks):
            release = threading.Event()
            kept.append(release)
            kept.append(rpc.rpc_async("alone", wait_for_release, (len(kept) - 1,)))

        def wait_for_release(index):
            kept[index].wait(30)

        def test_after_it():
            kept[0].set()
            kept[1].wait()

        def test_context(no_leaks):
            context = autograd.context()
            context.__enter__()
            kept.append(context)

        def test_after_the_context():
            kept.pop().__exit__(None, None, None)

        def test_unchecked():
            kept.append(os.pipe())

        def test_runtime_directory():
            assert os.environ["ACTORRPC_RUNTIME_DIR"] != os.environ["OUTER"]

        @pytest.mark.limit(0.2)
        def test_slow():
            time.sleep(20)
        """,
        "--leak-wait=0.3",
    )
    assert status == pytest.ExitCode.TESTS_FAILED
    for text in (
        "ERROR at teardown of test_pending ",
        "call that is under way (1 of them)",
        "call that is executed here (1 of them)",
        "ERROR at teardown of test_context ",
        "autograd context (1 of them)",
        "the test was not over within its 0.2 s",
        "stacks of the test process",
        "FAILED test_inner.py::test_slow",
        "1 failed, 7 passed, 2 errors",
    ):
        assert text in output, text
    assert "ERROR at teardown of test_tidy" not in output


@pytest.mark.slow
def test_the_option_times_runs_each_test_repeatedly(tmp_path: Path) -> None:
    status, output = _session(
        tmp_path,
        """
        import pytest

        ran = []

        @pytest.mark.parametrize("which", "ab")
        def test_often(which):
            ran.append(which)

        def test_how_often():
            assert ran == ["a"] * 3 + ["b"] * 3
        """,
        "--times",
        "3",
    )
    assert status == 0
    assert "9 passed" in output
