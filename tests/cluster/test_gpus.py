"""Assignment of CUDA devices to workers."""

from __future__ import annotations

import os

import pytest
import torch

from actorrpc import rpc
from actorrpc.actors.spec.actor_spec import ProcessSpec
from actorrpc.cluster import init
from actorrpc.cluster.join import JoinedResources
from actorrpc.cluster.scheduler import Devices
from actorrpc.errors import ConfigError, PlacementError
from tests.cluster.drive import cluster, workers


@pytest.fixture(autouse=True)
def _visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,GPU-abc")


def test_whole_devices_are_exclusive_and_reused_after_release() -> None:
    devices = Devices()
    assert devices.total == 3
    assert devices.allocate("a", 2) == ["4", "5"]
    assert devices.allocate("b", 2) is None
    assert devices.allocate("b", 1) == ["GPU-abc"]
    assert devices.allocate("c", 0) == []
    assert devices.has_room(0)
    assert not devices.has_room(0.5)
    devices.give_back("a")
    devices.give_back("a")
    assert devices.allocate("c", 2) == ["4", "5"]


def test_fractions_of_devices_are_packed_where_they_fit_best() -> None:
    devices = Devices()
    assert devices.allocate("a", 0.5) == ["4"]
    assert devices.allocate("b", 0.5) == ["4"]
    assert devices.allocate("c", 0.3) == ["5"]
    assert devices.allocate("d", 0.3) == ["5"]
    assert devices.allocate("e", 1) == ["GPU-abc"]
    assert devices.allocate("f", 0.5) is None
    assert devices.allocate("g", 0.4) == ["5"]
    devices.give_back("b")
    assert devices.allocate("h", 0.5) == ["4"]


def test_cuda_visible_devices_and_num_gpus_limit_the_number_of_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Devices(2).total == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,-1,2")
    assert Devices().total == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Devices().total == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert Devices(3).allocate("a", 3) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("count", "given", "booked", "shares"),
    [
        (1, None, 3, ["4,5,GPU-abc"]),
        (2, None, 1, ["4", "5"]),
        (4, None, 0.5, ["4", "5", "GPU-abc", "4"]),
        (9, None, 1 / 3, ["4", "5", "GPU-abc"] * 3),
        (3, 0.5, 0.5, ["4", "4", "5"]),
        (2, 0, 0, ["4, 5,GPU-abc"] * 2),
    ],
)
def test_the_workers_of_a_host_divide_its_devices(
    monkeypatch: pytest.MonkeyPatch, count: int, given: float | None, booked: float, shares: list[str]
) -> None:
    means = JoinedResources(num_gpus=given, num_cpus=torch.get_num_threads())
    for index, share in enumerate(shares):
        with monkeypatch.context() as of_worker:
            of_worker.setenv("CUDA_VISIBLE_DEVICES", os.environ["CUDA_VISIBLE_DEVICES"])
            assert means.take_share(index, count).num_gpus == booked
            assert os.environ["CUDA_VISIBLE_DEVICES"] == share


def test_workers_that_need_more_devices_than_the_host_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 workers with num_gpus=1 each need more CUDA devices than the 3"):
        JoinedResources(num_gpus=1).take_share(3, 4)


def _visible_devices_of(name: str) -> str | None:
    return rpc.rpc_sync(name, os.getenv, ("CUDA_VISIBLE_DEVICES",))


@pytest.mark.slow
def test_a_worker_sees_only_its_devices_and_later_workers_wait_for_free_ones() -> None:
    with init(num_gpus=3):
        with workers(1, num_gpus=2) as (two,):
            assert _visible_devices_of(two) == "4,5"
            with workers(1) as (all_of_them,), workers(1, num_gpus=0) as (none,):
                assert _visible_devices_of(all_of_them) == "4, 5,GPU-abc"
                assert _visible_devices_of(none) == ""
            waiting = cluster().spawn(ProcessSpec(label="Waiting", num_gpus=3, booking=1))
            assert not waiting.done()
        name = waiting.wait(20).name
        assert _visible_devices_of(name) == "4,5,GPU-abc"
        with pytest.raises(
            PlacementError, match=r"nothing became free within 0.01 s.*'Late' needs GPU 1; .*GPU 0/3"
        ):
            cluster().spawn(ProcessSpec(label="Late", num_gpus=1, wait_s=0.01)).wait(20)
