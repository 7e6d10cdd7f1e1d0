"""Ends of drivers: a driver that is killed or exits leaves no processes and no files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.actors.e2e.kit import alive, until

pytestmark = pytest.mark.limit(40)

_ROOT = Path(__file__).resolve().parents[3]
_HEAD = """
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


class Script:
    """A driver in its own process."""

    def __init__(self, folder: Path, source: str) -> None:
        path = folder / "driver.py"
        path.write_text(textwrap.dedent(_HEAD) + textwrap.dedent(source))
        self.run_folder = folder / "run"
        self.run_folder.mkdir(mode=0o700)
        env = {**os.environ, "PYTHONPATH": str(_ROOT), "ACTORRPC_RUNTIME_DIR": str(self.run_folder)}
        self.process = subprocess.Popen(
            [sys.executable, str(path)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pids(self) -> list[int]:
        """Return the process ids that the driver prints."""
        assert self.process.stdout is not None
        line = ""
        while not line.startswith("pids"):
            line = self.process.stdout.readline()
            assert line or self.process.poll() is None, self.process.communicate()
        return [int(word) for word in line.split()[1:]]

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate()
        return self.process.returncode, out, err

    def is_tidy(self, pids: list[int]) -> None:
        until(lambda: not any(alive(pid) for pid in pids))
        until(lambda: not list(self.run_folder.iterdir()))


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Any]:
    made: list[Script] = []

    def make(source: str) -> Script:
        made.append(Script(tmp_path, source))
        return made[-1]

    yield make
    for script in made:
        if script.process.poll() is None:
            script.process.kill()
        script.process.communicate()


_PIDS = """
workers = [Worker.remote() for _ in range(3)]
pids = actorrpc.get([w.pid.remote() for w in workers] + [w.nest.remote() for w in workers] + [task.remote()])
busy = [w.wait.remote() for w in workers]
print("pids", *pids, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, 0], ids=["SIGKILL", "SIGTERM", "exit"])
def test_a_driver_that_is_killed_or_exits_without_shutdown_leaves_nothing(scripts: Any, how: int) -> None:
    script = scripts(_PIDS + ("\nthreading.Event().wait()\n" if how else ""))
    pids = script.pids()
    assert len(set(pids)) == 7
    if how:
        script.process.send_signal(how)
    code, _, err = script.end()
    assert (code, err) == (-how, "")
    script.is_tidy(pids)


def test_an_actor_of_a_scripts_class_can_create_actors_of_that_class(scripts: Any) -> None:
    script = scripts("""
        worker = Worker.remote()
        print("child", actorrpc.get(worker.nest.remote()) != actorrpc.get(worker.pid.remote()))
    """)
    code, out, err = script.end()
    assert (code, err) == (0, "")
    assert "child True" in out


@pytest.mark.slow
def test_on_stop_runs_at_a_graceful_shutdown(scripts: Any) -> None:
    script = scripts("""
    worker = Worker.remote()
    print("pids", actorrpc.get(worker.pid.remote()), flush=True)
    actorrpc.shutdown(timeout=30)
    """)
    pids = script.pids()
    code, out, err = script.end()
    assert (code, err) == (0, "")
    assert "on_stop" in out
    script.is_tidy(pids)
