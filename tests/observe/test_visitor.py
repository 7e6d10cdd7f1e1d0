"""Visits to workers from outside: transports, keys, errors, and no traces left."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actorrpc import rpc
from actorrpc.agent.context import current_worker
from actorrpc.cli.commands import main
from actorrpc.cli.profile import Sampler
from actorrpc.errors import AuthenticationError
from actorrpc.observe.outside import FoundGroup, GroupLook, find_groups, look
from actorrpc.observe.processes import why_silent
from actorrpc.observe.visitor import KeptVisits, Visit
from actorrpc.wire.handshake import Acceptor, Refusal
from actorrpc.wire.identity import new_incarnation
from actorrpc.wire.keys import Key
from tests import certificates
from tests.actors.e2e.kit import until
from tests.ports import free_port

_KEY = "a key of more than sixteen characters"


@contextlib.contextmanager
def _alone(**settings: Any) -> Iterator[FoundGroup]:
    """Run a worker in this process, as found in the private directory."""
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}", **settings)
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        (group,) = find_groups(os.getpid())
        yield group
    finally:
        rpc.shutdown()


@pytest.fixture(params=["plain", "tls", "certificates"])
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """TCP address of a worker; its key and certificates are in the environment."""
    if certificates.OVER_TLS and request.param != "certificates":
        pytest.skip("the whole suite runs with certificates")
    monkeypatch.setenv("ACTORRPC_KEY", _KEY)
    monkeypatch.setenv("ACTORRPC_TLS", "off" if request.param == "plain" else "on")
    if request.param == "certificates":
        for name, value in certificates.files().environment.items():
            monkeypatch.setenv(name, value)
    with _alone(transport="tcp"):
        host, port = _agent().record.tcp[0]
        yield f"tcp://{host}:{port}"


@pytest.fixture
def worker() -> Iterator[FoundGroup]:
    """A worker with a generated key, as found in the private directory."""
    with _alone() as group:
        yield group


def _agent() -> Any:
    worker = current_worker()
    assert worker is not None
    return worker.agent


def test_a_worker_can_be_inspected_over_tcp(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--connect", address, "--timeout", "30"]) == 0
    assert "1 worker, 0 actors" in capsys.readouterr().out


def test_inspecting_a_worker_from_outside_leaves_nothing_behind(
    worker: FoundGroup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    agent = _agent()
    changes: list[Any] = []
    remove = rpc.on_member_change(lambda *change: changes.append(change))
    for _ in range(3):
        assert look(worker, ["process"], 30.0).state.workers[0].state == "alive"
    until(lambda: not agent.connector.connections())
    until(lambda: not agent.peers() or all(each.is_self for each in agent.peers()))
    remove()
    assert changes == []
    assert [each.name for each in rpc.workers()] == ["alone"]
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_kept_visit_is_reopened_after_a_lost_connection(worker: FoundGroup) -> None:
    kept = KeptVisits()
    for _ in range(2):
        assert look(worker, ["process"], 30.0, kept=kept).state.workers[0].state == "alive"
        (connection,) = _agent().connector.connections()
    connection.close()
    assert look(worker, ["process"], 30.0, kept=kept).state.workers[0].state == "alive"
    kept.close()
    until(lambda: not _agent().connector.connections())


def test_the_profile_of_a_worker_that_leaves_keeps_its_samples(worker: FoundGroup) -> None:
    sampler = Sampler("alone", worker.targets[0], None, with_idle=True)
    arguments = (time.monotonic(), 100.0, 10**6, 30.0, threading.Event())
    thread = threading.Thread(target=sampler.run, args=arguments)
    thread.start()
    until(lambda: sampler.samples)
    rpc.shutdown()
    thread.join()
    assert sampler.why.startswith("it was sampled ")
    assert sampler.threads


def test_logs_of_a_group_without_a_driver_say_where_the_output_goes(
    worker: FoundGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", "--pid", str(os.getpid()), "--timeout", "30"]) == 2
    error = capsys.readouterr().err
    assert "no logs are kept" in error
    place = os.readlink("/proc/self/fd/1")
    target = "a pipe of the process that started it" if place.startswith(("pipe:", "socket:")) else place
    assert f"'alone' (host {socket.gethostname()}) writes to {target}" in error


@pytest.mark.prints("did not prove to worker 'alone'", "more connections were refused")
def test_a_wrong_key_is_refused(worker: FoundGroup) -> None:
    wrong = Key.from_text(_KEY)
    with pytest.raises(AuthenticationError):
        Visit(replace(worker.targets[0], key=wrong), time.monotonic() + 30)
    (finding,) = _look(worker, key=wrong).state.findings
    assert "is refused: " in finding.what
    assert "ACTORRPC_KEY" in finding.remedy
    assert "network" not in finding.remedy


@pytest.mark.prints("ACTORRPC_TLS=off, or is no worker")
def test_other_settings_of_tls_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if certificates.OVER_TLS:
        pytest.skip("the whole suite runs with certificates")
    monkeypatch.setenv("ACTORRPC_KEY", _KEY)
    with _alone(transport="tcp"):
        host, port = _agent().record.tcp[0]
        monkeypatch.setenv("ACTORRPC_TLS", "off")
        assert main(["status", "--connect", f"tcp://{host}:{port}", "--timeout", "30"]) == 1
    shown = capsys.readouterr().out
    assert " is refused: " in shown
    assert "its settings of TLS" in shown


def test_inspecting_a_group_with_a_given_key_requires_that_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", _KEY)
    with _alone():
        assert main(["status", "--pid", str(os.getpid()), "--timeout", "30"]) == 0
        assert "1 worker, 0 actors" in capsys.readouterr().out
        monkeypatch.delenv("ACTORRPC_KEY")
        assert main(["status", "--pid", str(os.getpid())]) == 2
        error = capsys.readouterr().err
        assert "was given a key, which this command does not have: set ACTORRPC_KEY" in error
        assert _KEY not in error
        assert main(["doctor"]) == 1
        assert re.search(
            r"WRONG group: .* was given a key.*\n +-> set ACTORRPC_KEY.*\n\n1 fault\n$",
            capsys.readouterr().out,
        )


def _look(
    worker: FoundGroup, timeout: float = 30.0, silence: float = float("inf"), **changes: Any
) -> GroupLook:
    """Look at the worker with changes of its target."""
    target = replace(worker.targets[0], **changes)
    return look(FoundGroup(targets=[target], key=target.key), ["process"], timeout, silence=silence)


def test_a_worker_that_cannot_be_reached_is_reported_as_silent(worker: FoundGroup, tmp_path: Path) -> None:
    (seen,) = _look(worker, addresses=[str(tmp_path / "missing.sock")]).state.workers
    assert (seen.state, "cannot be reached" in seen.reason) == ("silent", True)


def test_a_worker_that_sends_nothing_is_given_up_after_the_silence_limit(
    worker: FoundGroup, tmp_path: Path
) -> None:
    path = str(tmp_path / "mute.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        (seen,) = _look(worker, 1e6, silence=0.05, addresses=[path]).state.workers
    assert seen.state == "busy"


def test_a_worker_of_another_version_is_reported_as_incompatible(worker: FoundGroup, tmp_path: Path) -> None:
    path = str(tmp_path / "other.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def refuse() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(Acceptor.refuse(Refusal.VERSION, "it speaks versions 250"))

        other = threading.Thread(target=refuse)
        other.start()
        (finding,) = _look(worker, addresses=[path]).state.findings
        other.join()
    assert "is incompatible: it runs another version of actorrpc than this process" in finding.what
    assert "it speaks versions 250; install the same version of actorrpc on both sides" in finding.what
    assert "network" not in finding.remedy


def test_a_restarted_worker_at_the_same_address_is_not_reported_as_a_wrong_key(worker: FoundGroup) -> None:
    record = worker.targets[0].record
    assert record is not None
    (finding,) = _look(worker, record=replace(record, incarnation=new_incarnation())).state.findings
    assert "the intended worker has ended or restarted" in finding.what
    assert "ACTORRPC_KEY" not in finding.remedy


@pytest.mark.parametrize("far", [True, False])
def test_a_data_only_worker_reports_only_figures_to_other_hosts(
    far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", _KEY)
    with _alone(transport="tcp" if far else "unix", data_only=True) as group:
        (seen,) = look(group, ["process", "threads"], 30.0).state.workers
        assert seen.state == "alive"
        assert ("takes data only" in seen.reason) == far
        assert bool(seen.threads) == (not far)
        assert seen.memory


_DRIVER = """
import sys
import actorrpc

@actorrpc.remote
class Idle:
    pass

with actorrpc.init(num_cpus=2):
    actor = Idle.remote()
    actorrpc.get(actorrpc.ready(actor))
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_workers_of_a_stopped_driver_are_found() -> None:
    """Workers are children of the driver, and their sockets are in its directory."""
    with subprocess.Popen(
        [sys.executable, "-c", _DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        (group,) = find_groups(driver.pid)
        os.kill(driver.pid, signal.SIGSTOP)
        try:
            until(lambda: why_silent(driver.pid)[0] == "stopped")
            state = look(group, ["process", "actors"], 5.0).state
        finally:
            os.kill(driver.pid, signal.SIGCONT)
        assert [(each.name, each.state) for each in state.workers] == [
            ("driver", "stopped"),
            ("Idle-1", "alive"),
        ]
        assert [(each.class_name, each.worker, each.state) for each in state.actors] == [
            ("Idle", "Idle-1", "ALIVE")
        ]
