"""Forwarding of the output of workers that have joined: one forwarder for each command, and what happens when it is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from actorrpc import rpc
from actorrpc.cli.commands import main
from actorrpc.cluster import ClusterContext, init
from actorrpc.errors import PeerDiedError
from tests.cluster.drive import until
from tests.cluster.joiners import KEY, joiner, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.limit(90)]


@pytest.fixture
def driver() -> Iterator[ClusterContext]:
    with init(listen="tcp://127.0.0.1:0", num_cpus=2, log_show=False) as context:
        yield context


def _say(*texts: str) -> int:
    for text in texts:
        print(text)
    return os.getpid()


def _forwarder(worker: subprocess.Popen[str], *workers: int) -> psutil.Process:
    """Return the only child of a command that is no worker."""
    (found,) = (each for each in psutil.Process(worker.pid).children() if each.pid not in workers)
    return found


def test_the_workers_of_a_command_share_a_forwarder_and_lines_name_their_worker(
    driver: ClusterContext, capsys: pytest.CaptureFixture[str]
) -> None:
    with joiner(driver.address, "--name", "many", "--count", "2", prints="ended by SIGKILL") as command:
        wait_for("many-0", "many-1")
        pids = [rpc.rpc_sync(name, _say, (f"here is {name}",)) for name in ("many-0", "many-1")]
        _forwarder(command, *pids)
        os.kill(pids[0], signal.SIGKILL)  # its last lines arrive, too
        command.terminate()
        command.communicate()
        assert main(["logs", "--pid", str(os.getpid())]) == 0
    shown = capsys.readouterr().out
    for name, pid in zip(("many-0", "many-1"), pids, strict=True):
        assert f"({name} pid={pid}, host={os.uname().nodename}) here is {name}\n" in shown


def test_logs_on_a_host_without_the_driver_name_the_address_of_the_driver(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", KEY)
    directory = {
        "ACTORRPC_RUNTIME_DIR": str(tmp_path)
    }  # this command finds only the processes of its directory
    with (
        init(listen="tcp://127.0.0.1:0") as context,
        joiner(context.address, "--name", "far", ACTORRPC_KEY=KEY, **directory),
    ):
        wait_for("far")
        with monkeypatch.context() as patch:
            patch.setenv(*directory.popitem())
            assert main(["logs", "--timeout", "30"]) == 2
        assert f"actorrpc logs --connect {context.address}\n" in capsys.readouterr().err


@pytest.mark.prints("its forwarder has ended. ")
def test_prints_of_a_worker_reach_its_launcher_after_its_forwarder_was_killed(
    driver: ClusterContext,
) -> None:
    ended = "not forwarded to the driver: its forwarder has ended. Earlier lines are at the driver"
    with joiner(driver.address, "--name", "alone", prints=ended) as worker:
        wait_for("alone")
        forwarder = _forwarder(worker)
        forwarder.kill()
        texts = [f"{number} {'x' * 100}" for number in range(2_000)]  # more than the pipe holds
        printing = rpc.rpc_async("alone", _say, texts)
        worker.terminate()
        out, err = worker.communicate()
        printing.wait()
    assert worker.returncode == 0
    assert out.splitlines() == texts
    assert f"worker 'alone' (pid {worker.pid}): the output of this worker is {ended}" in err


def test_a_forwarder_ends_although_the_launcher_of_its_killed_worker_does_not_read(
    driver: ClusterContext,
) -> None:
    with joiner(driver.address, "--name", "deaf") as worker:
        wait_for("deaf")
        forwarder = _forwarder(worker)
        printing = rpc.rpc_async("deaf", _say, ["x" * 1_000] * 1_000)  # more than the launcher's pipe holds
        assert worker.stdout is not None
        until(lambda: select.select([worker.stdout], (), (), 0)[0])
        worker.kill()
        until(lambda: not forwarder.is_running())
        with pytest.raises(PeerDiedError):
            printing.wait()
