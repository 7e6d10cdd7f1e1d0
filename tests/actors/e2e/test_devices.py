"""Actors on GPUs: visible devices, computations, and NCCL collectives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import get
from actorrpc.errors import SerializationError
from tests.actors.e2e.choir import Member, check_operations, check_training
from tests.devices import DEVICES

pytestmark = pytest.mark.limit(150)


@pytest.fixture(scope="module")
def embedded(apart: None) -> Iterator[None]:
    """A cluster with the GPUs of this machine."""
    with actorrpc.init(log_to_driver=False):
        yield


@pytest.fixture(autouse=True)
def _running(embedded: None) -> None:
    """Run all tests of this module in the cluster."""


@actorrpc.remote
class Worker(Member):
    """Computes on a device and returns CPU tensors."""

    def visible(self) -> tuple[str | None, int]:
        """Return CUDA_VISIBLE_DEVICES and the number of visible GPUs."""
        return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()

    def product(self, size: int) -> tuple[str, torch.Tensor]:
        """Multiply a matrix by itself."""
        one = torch.arange(float(size * size)).view(size, size).to(self.device)
        return str(one.device), (one @ one).cpu()

    def plus(self, x: torch.Tensor, one: float) -> tuple[str, torch.Tensor]:
        """Add a number on the device on which the tensor has arrived."""
        return str(x.device), x + one

    def ones(self, size: int) -> torch.Tensor:
        """Return a tensor on the device."""
        return torch.ones(size, device=self.device)

    def value_in(self, refs: list[Any]) -> Any:
        """Return the value of the reference in a list."""
        return get(refs[0])

    def too_much(self) -> None:
        """Allocate more memory than the device has."""
        torch.empty(1 << 50, dtype=torch.uint8, device=self.device)


def needs(device: str) -> dict[str, Any]:
    """Return options of an actor that uses a device: a quarter of a GPU, so that several fit on one."""
    return {"num_gpus": 0.25} if device != "cpu" else {"num_gpus": 0}


@pytest.mark.parametrize("device", DEVICES)
def test_actors_compute_on_their_devices(device: str) -> None:
    actors = [Worker.options(**needs(device)).remote(device=device) for _ in range(2)]
    wanted = torch.arange(400.0).view(20, 20)
    for place, found in get([each.product.remote(20) for each in actors]):
        assert place == device
        torch.testing.assert_close(found, wanted @ wanted)


@pytest.mark.gpu
def test_an_actor_sees_only_the_gpus_that_it_requested() -> None:
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    none = Worker.options(num_gpus=0).remote(device="cpu")
    assert get(none.visible.remote()) == ("", 0)
    one = Worker.options(num_gpus=1).remote(device="cuda:0")
    name, count = get(one.visible.remote())
    assert (name in names, count) == (True, 1)
    assert get(one.product.remote(3))[0] == "cuda:0"


@pytest.mark.parametrize("size", [0, 3, 5_000, 500_000])
@pytest.mark.parametrize("device", DEVICES)
def test_actors_take_and_return_tensors_of_their_device(device: str, size: int) -> None:
    actor = Worker.options(**needs(device)).remote(device=device)
    x = torch.arange(float(size), device=device)
    where, found = get(actor.plus.remote(x, 1.0))
    assert (where, found.device) == (device, x.device)
    assert torch.equal(found, x + 1)
    stored = actorrpc.put({"x": x, "same": x})
    x.zero_()  # put() has copied the tensor
    for value in (get(stored), get(actor.value_in.remote([stored])), get(stored)):
        assert (value["x"].device, value["x"].numel()) == (x.device, size)
        assert torch.equal(value["x"], torch.arange(float(size), device=device))
        value["same"].fill_(7)  # each reader has a value of its own, in which the tensors still share memory
        assert torch.equal(value["x"], torch.full((size,), 7.0, device=device))
    large = actor.ones.remote(size)
    for _ in range(2):
        assert torch.equal(get(large), torch.ones(size, device=device))


@pytest.mark.gpu
def test_a_gpu_tensor_for_an_actor_without_a_gpu_raises_an_error_that_names_both() -> None:
    actor = Worker.options(num_gpus=0).remote(device="cpu")
    x = torch.ones(3, device="cuda:0")
    with pytest.raises(SerializationError, match=r"cuda:0 of worker '.*' cannot .* sees no CUDA device"):
        get(actor.plus.remote(x, 1.0))
    with pytest.raises(SerializationError, match="no CUDA device"):
        get(actor.value_in.remote([actorrpc.put(x)]))
    assert torch.equal(get(actor.plus.remote(x.cpu(), 1.0))[1], torch.full((3,), 2.0))


@pytest.mark.gpu
def test_out_of_memory_is_an_error_of_the_call() -> None:
    actor = Worker.options(num_gpus=0.5).remote(device="cuda:0")
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        get(actor.too_much.remote())
    assert get(actor.product.remote(2))[0] == "cuda:0"


@pytest.mark.parametrize("device", DEVICES)
def test_a_collective_of_one_rank_works_on_each_device(device: str) -> None:
    """NCCL allows one rank for each GPU."""
    actor = Worker.options(**needs(device)).remote(device=device)
    for _ in range(2):  # a second group in the same process
        collective = actorrpc.collective([actor], backend="gloo" if device == "cpu" else "nccl")
        check_operations(get(collective.call("operations")))
        check_training(collective)
        collective.destroy()
