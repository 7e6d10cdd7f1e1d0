"""Groups without a driver, group files in the private directory, and processes outside of groups."""

from __future__ import annotations

import logging
import operator
import os
import signal
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import rpc
from actorrpc.errors import AuthenticationError
from actorrpc.observe.outside import find_groups, look
from actorrpc.wire import keys
from tests.actors.e2e.kit import open_gate, pass_gate, until
from tests.ranks import rpc_group


def test_state_outside_of_a_group_raises_not_initialized_error() -> None:
    with pytest.raises(actorrpc.errors.NotInitializedError, match=r"actorrpc\.init"):
        actorrpc.state()


def _look(rank: int, world_size: int) -> tuple[list[tuple[str, str]], list[str], int, bool]:
    (path,) = [path for _, path in keys.group_files() if f"-{os.getpid()}-" in path]
    read = keys.read_group_file(path)
    assert read is not None
    (group,) = find_groups(os.getpid())
    return (
        [(each.name, each.state) for each in actorrpc.state(30).workers],
        [each.name for each in look(group, ["process"], 30.0).state.workers],
        stat.S_IMODE(os.stat(path).st_mode),
        read[0] is None,
    )


@pytest.mark.parametrize("given", [False, True])
def test_a_group_can_be_observed_and_its_file_does_not_contain_a_given_key(
    given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given:
        monkeypatch.setenv("ACTORRPC_KEY", "given to all of the workers")
    everybody = [("worker0", "alive"), ("worker1", "alive")]
    assert rpc_group(_look, 2) == [(everybody, ["worker0", "worker1"], 0o600, given)] * 2


def _warnings() -> list[str]:
    """Collect the warnings about calls in a list from now on."""
    texts: list[str] = []
    logger = logging.getLogger("actorrpc.calls")
    logger.addFilter(lambda record: texts.append(record.getMessage()) is not None)
    return texts


def _reported(kind: str) -> str:
    """Wait for a finding of this kind; return its text."""
    found: list[str] = []

    def is_reported() -> bool:
        found[:] = [each.what for each in actorrpc.state(30).findings if each.kind == kind]
        return bool(found)

    until(is_reported)
    (reported,) = found
    return reported


def _blocked(rank: int, world_size: int, gates: list[str]) -> list[str]:
    if rank:
        return []
    lines = _warnings()
    ballast = torch.zeros(1 << 16)
    calls = [rpc.rpc_async("worker1", pass_gate, (each,), timeout=0) for each in gates]
    sender = threading.Thread(
        target=lambda: calls.extend(
            rpc.rpc_async("worker1", operator.mul, (ballast, 1), timeout=0) for _ in range(6)
        )
    )
    sender.start()
    reported = _reported("window")
    until(lambda: lines)
    for each in gates:
        open_gate(Path(each))
    sender.join()
    for call in calls:
        call.wait()
    assert not any(each.blocked for each in actorrpc.state(30).workers[0].connections)
    return [reported, *lines]


def test_calls_blocked_by_the_window_are_logged_and_reported(tmp_path: Path) -> None:
    gates = [str(tmp_path / "one"), str(tmp_path / "other")]
    for each in gates:
        os.mkfifo(each)
    options = {"max_threads": 2, "window": 1 << 20}
    (reported, logged), _ = rpc_group(_blocked, 2, gates, options=options)
    assert reported.startswith("calls of worker 'worker0' to 'worker1' have been blocked for ")
    assert logged.startswith(
        "the call of mul has been blocked for 2 s: worker 'worker1' has not started calls of 1"
    )
    assert "6 calls to it are not over. The setting window (ACTORRPC_WINDOW) allows 1048576 bytes" in logged


def _stalled(rank: int, world_size: int) -> list[str]:
    if rank:
        return []
    lines = _warnings()
    pid = rpc.rpc_sync("worker1", os.getpid)
    os.kill(pid, signal.SIGSTOP)
    try:
        large = torch.zeros(16 << 20)
        calls: list[Any] = []
        sender = threading.Thread(
            target=lambda: calls.append(rpc.rpc_async("worker1", torch.numel, (large,), timeout=0))
        )
        sender.start()
        reported = _reported("stalled")
        until(lambda: lines)
    finally:
        os.kill(pid, signal.SIGCONT)
    sender.join()
    assert calls[0].wait() == 16 << 20
    assert not any(each.stalled for each in actorrpc.state(30).workers[0].connections)
    return [reported, *lines]


def test_unread_large_messages_are_logged_and_reported() -> None:
    options = {"lane": False, "heartbeat": 60.0}
    (reported, logged), _ = rpc_group(_stalled, 2, options=options)
    assert reported.startswith("a large message of worker 'worker0' to 'worker1' has been blocked for ")
    assert logged.startswith(
        "a large message to worker 'worker1' has been blocked for 2 s: the worker does not read"
    )


# -- the files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, default_parent: Path) -> Path:
    monkeypatch.setenv("ACTORRPC_RUNTIME_DIR", str(default_parent / "run"))
    return Path(keys.runtime_directory())


@pytest.mark.parametrize("damage", ["mode", "size", "link"])
def test_group_files_with_a_wrong_mode_size_or_type_are_refused(
    directory: Path, tmp_path: Path, damage: str
) -> None:
    path = keys.group_path(None)
    keys.create_group_file(path, b"", b"about")
    if damage == "mode":
        os.chmod(path, 0o640)
    elif damage == "size":
        Path(path).write_bytes(b"\x07nonsense")
    else:
        os.replace(path, tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", path)
    with pytest.raises(AuthenticationError):
        keys.read_group_file(path)
    assert find_groups() == []
