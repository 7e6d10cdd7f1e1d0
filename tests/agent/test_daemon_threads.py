"""How daemon threads end: at interpreter exit, and after an exception."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actorrpc.agent.daemon_threads import Daemon
from tests import output

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
