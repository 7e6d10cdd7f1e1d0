"""Limits of shared memory: errors when it is full, and files for what it has no room for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import actorrpc

pytestmark = [pytest.mark.usefixtures("apart"), pytest.mark.limit(60)]

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
