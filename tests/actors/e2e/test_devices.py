"""Actors on GPUs: visible devices, computations, and NCCL collectives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import actorrpc
from actorrpc import get
from tests.actors.e2e.choir import equal, make_batch, make_model, train
from tests.devices import DEVICES

pytestmark = pytest.mark.limit(150)


@pytest.fixture(scope="module")
def embedded() -> Iterator[None]:
    """A cluster with the GPUs of this machine."""
    with actorrpc.init(log_to_driver=False):
        yield


@pytest.fixture(autouse=True)
def _running(embedded: None) -> None:
    """Run all tests of this module in the cluster."""


@actorrpc.remote
class Worker:
    """Computes on a device and returns CPU tensors."""

    def __init__(self, device: str = "cuda:0") -> None:
        self.device = device

    def visible(self) -> tuple[str | None, int]:
        """Return CUDA_VISIBLE_DEVICES and the number of visible GPUs."""
        return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()

    def product(self, size: int) -> tuple[str, torch.Tensor]:
        """Multiply a matrix by itself."""
        one = torch.arange(float(size * size)).view(size, size).to(self.device)
        return str(one.device), (one @ one).cpu()

    def too_much(self) -> None:
        """Allocate more memory than the device has."""
        torch.empty(1 << 50, dtype=torch.uint8, device=self.device)

    def operations(self) -> dict[str, torch.Tensor]:
        """Run each operation of the collective, of which this is the only rank."""
        group = actorrpc.collective_group()
        assert (group.rank(), group.size()) == (0, 1)
        mine = torch.arange(4.0, device=self.device)
        reduced, copied = mine.clone(), mine.clone()
        dist.all_reduce(reduced, group=group)
        dist.broadcast(copied, src=0, group=group)
        gathered = [torch.empty_like(mine)]
        dist.all_gather(gathered, mine, group=group)
        work = dist.all_reduce(mine.clone(), op=dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        work.wait()
        dist.barrier(group=group)
        return {"reduced": reduced.cpu(), "copied": copied.cpu(), "gathered": gathered[0].cpu()}

    def train(self, steps: int) -> list[torch.Tensor]:
        """Train the model of make_model() with DistributedDataParallel."""
        model = make_model().to(self.device)
        batch, wanted = (each.to(self.device) for each in make_batch())
        parallel = DistributedDataParallel(model, process_group=actorrpc.collective_group())
        train(parallel, batch, wanted, steps)
        return [each.detach().cpu() for each in model.parameters()]


def needs(device: str) -> dict[str, Any]:
    """Return options of an actor that uses a device: a quarter of a GPU, so that several fit on one."""
    return {"num_gpus": 0.25} if device != "cpu" else {"num_gpus": 0}


@pytest.mark.parametrize("device", DEVICES)
def test_actors_compute_on_their_devices(device: str) -> None:
    actors = [Worker.options(**needs(device)).remote(device) for _ in range(2)]
    wanted = torch.arange(400.0).view(20, 20)
    for place, found in get([each.product.remote(20) for each in actors]):
        assert place == device
        torch.testing.assert_close(found, wanted @ wanted)


@pytest.mark.gpu
def test_an_actor_sees_only_the_gpus_that_it_requested() -> None:
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    none = Worker.options(num_gpus=0).remote("cpu")
    assert get(none.visible.remote()) == ("", 0)
    one = Worker.options(num_gpus=1).remote()
    name, count = get(one.visible.remote())
    assert (name in names, count) == (True, 1)
    assert get(one.product.remote(3))[0] == "cuda:0"


@pytest.mark.gpu
def test_out_of_memory_is_an_error_of_the_call() -> None:
    actor = Worker.options(num_gpus=0.5).remote()
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        get(actor.too_much.remote())
    assert get(actor.product.remote(2))[0] == "cuda:0"


@pytest.mark.parametrize("device", DEVICES)
def test_collective_operations_work_with_one_rank(device: str) -> None:
    """NCCL allows one rank for each GPU."""
    actor = Worker.options(**needs(device)).remote(device)
    for _ in range(2):  # a second group in the same process
        collective = actorrpc.collective([actor], backend="gloo" if device == "cpu" else "nccl")
        for found in get(collective.call("operations")):
            for each in found.values():
                equal(each, torch.arange(4.0))
        collective.destroy()


@pytest.mark.parametrize("device", DEVICES)
def test_data_parallel_training_with_one_rank_equals_local_training(device: str) -> None:
    actor = Worker.options(**needs(device)).remote(device)
    collective = actorrpc.collective([actor], backend="gloo" if device == "cpu" else "nccl")
    model: nn.Module = make_model()
    train(model, *make_batch(), steps=4)
    (found,) = get(collective.call("train", 4))
    for mine, wanted in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted.detach(), rtol=1e-4, atol=1e-5)
    collective.destroy()
