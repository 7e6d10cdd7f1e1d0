"""Ends of drivers: a driver that is killed, exits or shuts down leaves no processes and no files."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actors.e2e.kit import alive, until
from tests.cluster.drive import script

pytestmark = pytest.mark.limit(40)

_ACTORS = """
import os, threading
import actorrpc

@actorrpc.remote
class Worker:
    def __init__(self): self.child = None
    def pid(self): return os.getpid()
    def wait(self): threading.Event().wait()
    def nest(self):
        self.child = Worker.remote()
        return actorrpc.get(self.child.pid.remote())
    def on_stop(self):
        print("on_stop", flush=True)

@actorrpc.remote
def task(): return os.getpid()
"""


@contextlib.contextmanager
def _driver(folder: Path, source: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Run a driver; give its process, when it has printed process ids, and these. At the end, check that it left nothing."""
    files = folder / "run"
    files.mkdir(mode=0o700)
    with script(folder, _ACTORS + source, env={"ACTORRPC_RUNTIME_DIR": str(files)}) as process:
        assert process.stdout is not None
        line = ""
        while not line.startswith("pids"):
            line = process.stdout.readline()
            assert line or process.poll() is None, process.communicate()
        pids = [int(word) for word in line.split()[1:]]
        yield process, pids
        until(lambda: not any(alive(pid) for pid in pids))
        until(lambda: not list(files.iterdir()))


_BUSY = """
workers = [Worker.remote() for _ in range(3)]
pids = actorrpc.get([w.pid.remote() for w in workers] + [w.nest.remote() for w in workers] + [task.remote()])
busy = [w.wait.remote() for w in workers]
print("pids", *pids, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, 0], ids=["SIGKILL", "SIGTERM", "exit"])
def test_a_driver_that_is_killed_or_exits_without_shutdown_leaves_nothing(tmp_path: Path, how: int) -> None:
    with _driver(tmp_path, _BUSY + ("threading.Event().wait()" if how else "")) as (process, pids):
        assert len(set(pids)) == 7
        if how:
            process.send_signal(how)
        _, err = process.communicate()
        assert (process.returncode, err) == (-how, "")


def test_an_actor_of_a_scripts_class_can_create_actors_of_that_class_and_on_stop_runs_at_shutdown(
    tmp_path: Path,
) -> None:
    source = """
worker = Worker.remote()
print("pids", *actorrpc.get([worker.pid.remote(), worker.nest.remote()]), flush=True)
actorrpc.shutdown(timeout=30)
"""
    with _driver(tmp_path, source) as (process, pids):
        assert len(set(pids)) == 2
        out, err = process.communicate()
        assert (process.returncode, err) == (0, "")
        assert "on_stop" in out
