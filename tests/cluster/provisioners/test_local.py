"""Workers of an embedded cluster: calls, environment of their processes, and reports of their ends."""

from __future__ import annotations

import operator
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from actorrpc import rpc
from actorrpc.actors.spec.actor_spec import DeathReport, ProcessSpec
from actorrpc.cluster import init
from actorrpc.errors import ConfigError, PeerDiedError
from tests.cluster import remotes
from tests.cluster.drive import cluster, engine, until, workers


@pytest.fixture(autouse=True, scope="module")
def _cluster() -> Iterator[None]:
    with init(log_to_driver=False, num_cpus=4):
        # Start a worker now, so that lasting resources exist before the first test.
        with workers(1):
            pass
        yield


@pytest.fixture(autouse=True)
def _test_leaves_nothing() -> None:
    """Disable the leak check of single tests: threads of the shared cluster start and end between tests."""


def _death(worker: str) -> DeathReport:
    return cluster().report(worker).wait(20)


# -- calls ---------------------------------------------------------------------------------------------


def test_a_worker_starts_a_worker_which_ends_with_it() -> None:
    with workers(1) as (name,):
        other = rpc.rpc_sync(name, remotes.spawn_another, ("Other",))
        assert rpc.rpc_sync(other, remotes.call, (name,)) == [
            rpc.rpc_sync(other, os.getpid),
            rpc.rpc_sync(name, os.getpid),
        ]
        report = cluster().report(other)
    assert report.wait(20).signal == signal.SIGKILL


def test_init_in_a_worker_raises_an_error() -> None:
    with workers(1) as (name,):
        assert f"a process of an actor ('{name}')" in rpc.rpc_sync(name, remotes.try_init)


# -- environment ------------------------------------------------------------------------------


def test_each_worker_has_its_own_process_random_state_and_frozen_imports() -> None:
    with workers(2) as names:
        mine, other = (rpc.rpc_sync(name, remotes.facts) for name in names)
        assert mine["pid"] != other["pid"] != os.getpid()
        assert all(a != b for a, b in zip(mine["random"], other["random"], strict=True))
        assert mine["directory"] == os.getcwd()
        assert mine["threads"] == 1
        assert mine["main"] is None
        assert mine["stdin"] == b""
        assert mine["group"] == mine["pid"]
        assert mine["sigint"]
        assert mine["frozen"]  # the garbage collector skips the objects of imports
        assert mine["worker"] == names[0]
        assert all(name == "MainThread" or name.startswith("actorrpc") for name in mine["names"])


def test_env_working_dir_and_num_cpus_apply_in_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_DRIVER", "since its start")
    monkeypatch.setenv("OVER", "the driver's")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.syspath_prepend("/somewhere/else")
    (tmp_path / "beside_the_work.py").write_text("value = 42")
    with workers(
        1,
        num_cpus=3,
        env={"OVER": "the actor's", "ODD": "\udcff é", "BIG": "x" * 100_000},
        working_dir=str(tmp_path),
    ) as (name,):
        found = rpc.rpc_sync(name, remotes.facts)
        environment = found["environment"]
        assert environment["OF_THE_DRIVER"] == "since its start"
        assert environment["OVER"] == "the actor's"
        assert environment["ODD"] == "\udcff é"
        assert len(environment["BIG"]) == 100_000  # the message to the fork server is larger than a pipe
        assert environment["OMP_NUM_THREADS"] == "3"
        assert environment["PATH"] == os.environ["PATH"]
        assert found["threads"] == 3
        assert found["directory"] == str(tmp_path)
        assert found["path"][:2] == [str(tmp_path), "/somewhere/else"]
        assert rpc.rpc_sync(name, eval, ("__import__('beside_the_work').value",)) == 42
    # The number of threads that the user has set applies, except the number that torchrun sets for all of its processes.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for env, threads in (({}, 1), ({"OMP_NUM_THREADS": "2"}, 2)):
        with workers(1, num_cpus=3, env=env) as (name,):
            assert rpc.rpc_sync(name, remotes.facts)["threads"] == threads
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with workers(1, num_cpus=3) as (name,):
        assert rpc.rpc_sync(name, remotes.facts)["threads"] == 3
    monkeypatch.delenv("OF_THE_DRIVER")
    with workers(1, label="train.<locals>.Agent") as (name,):
        assert re.fullmatch(r"train_locals_Agent-\d+", name)
        assert "OF_THE_DRIVER" not in rpc.rpc_sync(name, remotes.facts)["environment"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"working_dir": "/not/there"}, "'/not/there' of 'Bad' is not a directory"),
        ({"env": {"A=B": "c"}}, "A=B"),
        ({"env": {"A": "null\0byte"}}, "null"),
        ({"env": {"A": None}}, r"env\['A'\] must be"),
        ({"num_gpus": 1000}, "CUDA devices"),
        ({"num_gpus": 1.5}, "whole number"),
    ],
)
def test_wrong_options_of_a_worker_raise_config_error(spec: dict[str, object], says: str) -> None:
    future = cluster().start(ProcessSpec(label="Bad", **spec))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=says):
        future.wait(20)


def test_a_process_that_fails_during_its_start_reports_the_error(tmp_path: Path) -> None:
    # The child finds that the directory was removed after the driver had checked it.
    gone = tmp_path / "gone"
    gone.mkdir()
    cluster().start(ProcessSpec(label="Warm")).wait(20)
    server = engine().server
    assert server is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        future = cluster().start(ProcessSpec(label="Bad", working_dir=str(gone)))
        gone.rmdir()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    with pytest.raises(
        PeerDiedError, match=r"(?s)'Bad' could not be started.*exited with code 1.*FileNotFound"
    ):
        future.wait(20)
    for name in [info.name for info in rpc.get_worker_infos() if info.id]:
        report = cluster().report(name)
        cluster().kill(name)
        report.wait(20)


# -- ends of workers --------------------------------------------------------------------------------------


def test_an_exit_code_is_reported_with_the_last_20_lines_of_stderr() -> None:
    with workers(1) as (name,):
        rpc.rpc_sync(name, remotes.say, tuple(f"line {i}" for i in range(30)), {"to": "stderr"})
        with pytest.raises(PeerDiedError):
            rpc.rpc_sync(name, remotes.leave_with, (7,))
        report = _death(name)
        assert (report.exit_code, report.signal, report.worker) == (7, None, name)
        assert report.stderr == (*(f"line {i}" for i in range(11, 30)), "about to exit")
        assert report.pid
        assert report.uptime > 0
        assert "exited with code 7" in report.describe()
        assert _death(name) == report
        assert name not in rpc.rpc_sync("driver", remotes.names)
        with pytest.raises(PeerDiedError):
            rpc.rpc_sync(name, os.getpid)


def test_a_kill_is_reported_with_its_peak_memory() -> None:
    with workers(1) as (name,):
        rpc.rpc_sync(name, remotes.allocate, (300 << 20,))
        waiting = rpc.rpc_async(name, remotes.wait_for_ever, timeout=0)
        cluster().kill(name)
        report = _death(name)
        assert (report.exit_code, report.signal) == (None, signal.SIGKILL)
        assert report.peak_memory > 300 << 20
        with pytest.raises(PeerDiedError, match="died"):
            waiting.wait(20)
        cluster().kill(name)
        cluster().release(name)


def test_a_crash_in_c_is_reported_with_its_stack() -> None:
    with workers(1) as (name,):
        with pytest.raises(PeerDiedError):
            rpc.rpc_sync(name, remotes.crash)
        report = _death(name)
        assert report.signal == signal.SIGSEGV
        assert any("in crash" in line for line in report.stderr)
        assert "SIGSEGV" in report.describe()


@pytest.mark.slow
def test_child_processes_of_a_worker_end_with_it() -> None:
    with workers(2) as names:
        pids = [rpc.rpc_sync(name, remotes.sleeper) for name in names]
        cluster().kill(names[0])
        with pytest.raises(PeerDiedError):
            rpc.rpc_sync(names[1], remotes.leave_with, (0,))
        for name in names:
            _death(name)
        until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_worker_can_be_killed_before_it_has_joined() -> None:
    future = cluster().start(ProcessSpec(label="Early"))
    name = next(name for name in engine()._workers if name.startswith("Early"))
    report = cluster().report(name)
    cluster().kill(name)
    error = future.exception(20)  # it may have joined just before
    assert error is None or "killed before it had joined" in str(error)
    assert report.wait(20).worker == name


def test_a_released_worker_ends_when_its_last_rref_is_dropped() -> None:
    with workers(2) as names:
        rref = rpc.remote(names[0], torch.arange, (5,))
        assert torch.equal(rref.to_here(), torch.arange(5))
        report = cluster().report(names[0])
        cluster().release(names[0])
        cluster().release(names[1])
        assert _death(names[1]).exit_code == 0
        # It still serves calls.
        assert torch.equal(rref.to_here(), torch.arange(5))
        assert not report.done()
        del rref
        assert report.wait(20).exit_code == 0


def test_a_released_worker_finishes_its_running_calls() -> None:
    with workers(1) as (name,):
        waiting = rpc.rpc_async(name, remotes.wait_for_ever, timeout=0)
        rpc.rpc_sync(name, os.getpid)
        report = cluster().report(name)
        cluster().release(name)
        assert rpc.rpc_sync(name, operator.add, (1, 2)) == 3
        waiting.cancel()
        assert not report.done()
