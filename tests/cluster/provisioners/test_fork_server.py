"""The fork server: its death, failed imports, and the secrecy of the key."""

from __future__ import annotations

import operator
import os
import signal
from pathlib import Path

import psutil
import pytest

from actorrpc import rpc
from actorrpc.actors.spec.actor_spec import ProcessSpec
from actorrpc.cluster import init
from actorrpc.errors import PeerDiedError
from tests.cluster.drive import cluster, engine, script, until, workers


def _server_pid() -> int:
    server = engine().server
    assert server is not None
    return server.pid


@pytest.mark.slow
@pytest.mark.prints(r"the fork server \(pid \d+\) has ended")
def test_workers_end_with_a_killed_fork_server_and_the_next_start_uses_a_new_one() -> None:
    with init():
        first = _server_pid()
        names = [cluster().start(ProcessSpec(label="Counter")).wait(50).name for _ in range(2)]
        pids = [rpc.rpc_sync(name, os.getpid) for name in names]
        reports = [cluster().report(name) for name in names]
        os.kill(first, signal.SIGKILL)
        assert [report.wait(20).signal for report in reports] == [signal.SIGKILL] * 2
        until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
        with workers(1) as (name,):
            assert rpc.rpc_sync(name, operator.add, (1, 2)) == 3
            assert _server_pid() != first


@pytest.mark.slow
@pytest.mark.prints(r"the fork server \(pid \d+\) has ended")
def test_the_start_of_a_worker_fails_if_the_fork_server_dies_meanwhile() -> None:
    with init():
        future = cluster().start(ProcessSpec(label="Unlucky"))
        os.kill(_server_pid(), signal.SIGKILL)
        with pytest.raises(PeerDiedError, match="'Unlucky' could not be started: the fork server"):
            future.wait(20)
        with workers(1) as (name,):
            assert rpc.rpc_sync(name, operator.add, (1, 2)) == 3


@pytest.mark.prints(r"the fork server \(pid \d+\) has ended", "Traceback.*ImportError: this is not torch")
def test_a_fork_server_whose_import_fails_reports_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('this is not torch')")
    monkeypatch.syspath_prepend(str(tmp_path))
    says = r"(?s)'Unlucky' could not be started.*this is not torch"
    with init(), pytest.raises(PeerDiedError, match=says):
        cluster().start(ProcessSpec(label="Unlucky")).wait(30)


_KEY = """
with init():
    name = spawn()
    key = current_cluster().reception.secret.encode()
    pids = [os.getpid(), current_cluster().engine.server.pid, rpc.rpc_sync(name, os.getpid)]
    for pid in pids:
        for what in ("cmdline", "environ"):
            with open(f"/proc/{pid}/{what}", "rb") as file:
                data = file.read()
            assert key not in data and key.hex().encode() not in data, (pid, what)
    server = pids[1]
    tasks = os.listdir(f"/proc/{server}/task")
    assert len(tasks) == 1, tasks
    found = {os.readlink(f"/proc/{server}/fd/{fd}").split(":")[0] for fd in os.listdir(f"/proc/{server}/fd")}
    print(sorted(found))
"""


@pytest.mark.slow
def test_the_key_is_in_no_command_line_and_the_server_has_one_thread(tmp_path: Path) -> None:
    with script(tmp_path, _KEY) as process:
        out, err = process.communicate()
        assert process.returncode == 0, err
    assert "/dev/null" in out
