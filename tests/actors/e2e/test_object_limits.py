"""Limits of shared memory: errors when it is full, other hosts, which do not share it, and processes that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import actorrpc
from actorrpc.wire import keys
from tests.actors.e2e.kit import alive, until
from tests.actors.e2e.test_words import Speaker, take

pytestmark = [pytest.mark.limit(60)]

_MIB = 1 << 20


@actorrpc.remote
class Keeper:
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def keep(self, mib: int) -> str:
        self.kept.append(actorrpc.put(np.ones(mib * _MIB, np.uint8)))
        return str(os.getpid())

    def make(self, mib: int) -> Any:
        return np.ones(mib * _MIB, np.uint8)


@pytest.fixture
def keepers() -> Iterator[list[Any]]:
    with actorrpc.init(num_cpus=4, object_memory=96 * _MIB, object_wait=30.0):
        made = [Keeper.remote() for _ in range(2)]
        actorrpc.get([actorrpc.ready(each) for each in made])
        yield made
        made.clear()


def test_a_full_object_store_names_the_holders(keepers: list[Any]) -> None:
    pids = actorrpc.get([each.keep.remote(32) for each in keepers])
    with pytest.raises(actorrpc.ObjectStoreFullError) as caught:
        actorrpc.put(np.ones(100 * _MIB, np.uint8))  # more than the limit, so put() does not wait
    for pid in pids:
        assert f"(pid {pid})" in str(caught.value)
    assert str(caught.value).count("'Keeper-") == 2
    assert "test_object_limits.py" in str(caught.value)
    with pytest.raises(actorrpc.ObjectStoreFullError, match=r"the result of Keeper\.make") as of_call:
        actorrpc.get(keepers[0].make.remote(100))
    assert of_call.value.maybe_executed is True


def test_the_memory_of_a_killed_process_is_released(keepers: list[Any]) -> None:
    pid, _ = actorrpc.get([each.keep.remote(32) for each in keepers])
    os.kill(int(pid), signal.SIGKILL)
    assert actorrpc.get(actorrpc.put(np.full(40 * _MIB, 7, np.uint8)))[-1] == 7


def test_objects_beyond_the_limit_are_written_to_files(tmp_path: Any) -> None:
    with actorrpc.init(num_cpus=2, object_memory=64 * _MIB, spill_dir=str(tmp_path)):
        keeper = Keeper.remote()
        actorrpc.get([keeper.keep.remote(24) for _ in range(4)])
        here = [actorrpc.put(np.full(24 * _MIB, number, np.uint8)) for number in range(3)]
        assert [int(actorrpc.get(each)[-1]) for each in here] == [0, 1, 2]
        assert actorrpc.get(keeper.make.remote(24)).sum() == 24 * _MIB
        assert os.listdir(tmp_path) == []  # the files never had names
        del keeper, here


def test_a_result_that_was_not_fetched_is_lost_with_its_actor_if_hosts_share_no_memory() -> None:
    with actorrpc.init(lane=False):  # as if each process were on a host of its own
        actor = Speaker.remote()
        lost, fetched = actor.big.remote(), actor.big.remote()
        actorrpc.wait([lost, fetched], num_returns=2, fetch_local=False)
        value = actorrpc.get(fetched)
        actorrpc.kill(actor)
        with pytest.raises(actorrpc.ActorDiedError):
            actorrpc.get(actor.take.remote(1))
        with pytest.raises(
            actorrpc.PeerDiedError, match=r"the result of Speaker\.big .*is lost: the call was executed"
        ):
            actorrpc.get(take.remote(lost))
        assert torch.equal(actorrpc.get(fetched), value)


# -- killed processes ------------------------------------------------------------------------------------------------

_PROGRAM = """
import json, os, sys
import numpy as np, psutil
import actorrpc
from tests.actors.e2e.test_object_limits import Keeper
context = actorrpc.init(num_cpus=2, object_memory=256 << 20)
keepers = [Keeper.remote() for _ in range(2)]
actorrpc.get([each.keep.remote(24) for each in keepers])
held = [actorrpc.put(np.ones(16 << 20, np.uint8)), keepers[0].make.remote(16)]
read = actorrpc.get(held)
print(json.dumps([each.pid for each in psutil.Process().children(recursive=True)]), flush=True)
sys.stdin.read()
"""


def _objects_of(pid: int) -> set[int]:
    """Return the inodes of the shared segments that a process has open."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if "memfd:actorrpc" in os.readlink(path):
                found.add(os.stat(path).st_ino)
    return found


def _holders(segments: set[int]) -> list[int]:
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if segments & _objects_of(pid):
                found.append(pid)
        except (
            FileNotFoundError,
            PermissionError,
            ProcessLookupError,
        ):  # it has ended, or belongs to another user
            continue
    return found


@pytest.mark.parametrize("kill_all", [False, True], ids=["the driver", "all processes"])
def test_killed_processes_leave_no_shared_memory(kill_all: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        others = json.loads(driver.stdout.readline())
        segments = set().union(*map(_objects_of, [driver.pid, *others]))
        assert len(segments) >= 3
        assert len(_holders(segments)) >= 3
        for pid in [driver.pid, *(others if kill_all else ())]:
            os.kill(pid, signal.SIGKILL)
        driver.wait()
    until(lambda: not any(map(alive, others)))
    assert _holders(segments) == []
    # Remove the files of the dead processes. Earlier sweeps may have found some of these processes still ending.
    keys.sweep()
