"""Tensors of ``share()``: readers in other processes see the owner's writes, and the memory is released.

"fake" is a GPU whose memory is in files, so that the way of GPUs is tested on machines without one.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import get, share
from actorrpc.agent.agent import Agent
from actorrpc.agent.context import current_worker
from tests.actors.e2e.kit import until
from tests.devices import DEVICES
from tests.fake_devices import FakeMemory, memory_here

# Tests kill processes, so each actor has its own.
pytestmark = [pytest.mark.usefixtures("embedded"), pytest.mark.limit(60)]

_COUNT = 1 << 22  # float32 numbers: 16 MiB


def _agent() -> Agent:
    worker = current_worker()
    assert worker is not None
    return worker.agent


class Place:
    """A kind of memory, and the actors that can map it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.device = "cpu" if name == "fake" else name

    def reader(self) -> Any:
        reader = Reader.options(num_gpus=0.25 if self.device != "cpu" else 0).remote()
        get(reader.prepare.remote(self.folder if self.name == "fake" else None))
        return reader

    def used(self) -> int:
        """Return how much memory is used that this process has shared."""
        gc.collect()
        if self.name == "fake":
            return len(memory_here().shared)
        if self.name != "cpu":
            return torch.cuda.memory_allocated()
        stats = _agent().objects.stats()
        return stats.host_bytes - stats.free_bytes


@pytest.fixture(params=["fake", *DEVICES])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    agent = _agent()
    before = agent.device_memory
    if request.param == "fake":
        agent.device_memory = FakeMemory(tmp_path)
    yield Place(request.param, tmp_path)
    agent.device_memory = before


@actorrpc.remote
class Reader:
    """Keeps tensors, and shares one of its own."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def prepare(self, folder: Path | None) -> None:
        if folder is not None:
            _agent().device_memory = FakeMemory(folder)

    def pid(self) -> int:
        return os.getpid()

    def keep(self, value: torch.Tensor) -> None:
        self.kept.append(value)

    def open(self, refs: list[Any], other: Any = None) -> None:
        """Keep the value of a reference or of its pickle; pass the reference on to another reader."""
        ref = pickle.loads(refs[0]) if isinstance(refs[0], bytes) else refs[0]
        if other is not None:
            get(other.open.remote([ref]))
        self.keep(get(ref))

    def first(self) -> list[float]:
        return [float(each.flatten()[0]) for each in self.kept]

    def write(self, number: float) -> None:
        self.kept[0][:1] = number

    def drop(self) -> None:
        self.kept.clear()

    def make(self, device: str) -> list[Any]:
        self.kept = [torch.full((_COUNT,), 3.0, device=device)]
        return [share(self.kept[0])]


def test_readers_see_the_steps_of_an_optimizer_wherever_they_got_the_reference(place: Place) -> None:
    weights = torch.nn.Parameter(torch.ones(_COUNT, 1, device=place.device))
    reader, other = place.reader(), place.reader()
    used = place.used()
    ref = share(weights)
    once = place.used()
    again = share(weights.detach().view(-1))
    assert place.used() == once
    assert place.name == "cuda:0" or used < once
    get(
        [reader.keep.remote(ref), reader.open.remote([ref], other), reader.open.remote([pickle.dumps(again)])]
    )
    assert get([reader.first.remote(), other.first.remote()]) == [[1] * 3, [1]]
    mine, copy = get(ref), get(ref, copy=True)
    assert (mine.requires_grad, mine.shape, mine.device) == (False, weights.shape, weights.device)
    optimizer = torch.optim.SGD([weights], lr=0.5)
    weights.sum().backward()
    optimizer.step()
    if place.device != "cpu":
        torch.cuda.synchronize()
    assert get([reader.first.remote(), other.first.remote()]) == [[0.5] * 3, [0.5]]
    assert (float(mine[0]), float(copy[0])) == (0.5, 1)
    with pytest.raises(TypeError, match="no read-only tensors"):
        get(ref, copy=False)


def test_memory_is_released_when_owner_and_readers_have_dropped_it_or_were_killed(place: Place) -> None:
    reader, killed = place.reader(), place.reader()
    pid = get(killed.pid.remote())
    before = place.used()
    tensor = torch.full((_COUNT,), 2.0, device=place.device)
    ref = share(tensor)
    get([reader.open.remote([ref]), killed.open.remote([ref])])
    del tensor, ref
    os.kill(pid, signal.SIGKILL)
    assert get(reader.first.remote()) == [2]
    assert place.used() > before
    get(reader.drop.remote())
    until(lambda: place.used() <= before)


def test_after_the_death_of_the_owner_only_memory_of_the_host_can_be_read(place: Place) -> None:
    owner, reader = place.reader(), place.reader()
    (ref,) = get(owner.make.remote(place.device))
    get(reader.open.remote([ref]))
    os.kill(get(owner.pid.remote()), signal.SIGKILL)
    with pytest.raises(actorrpc.RpcError):
        get(owner.first.remote())
    if place.name == "cpu":
        assert (float(get(ref)[0]), get(reader.first.remote())) == (3, [3])
    else:
        with pytest.raises(actorrpc.PeerDiedError, match=r"a shared tensor on .*, of 16 MiB, is lost"):
            get(ref)


def test_a_write_of_a_reader_is_not_seen_by_others_and_broadcast_sends_a_copy() -> None:
    reader, other = Reader.remote(), Reader.remote()
    tensor = torch.zeros(1000)  # in a segment with other objects
    ref = share(tensor)
    get([each.open.remote([ref]) for each in (reader, other)])
    get(reader.write.remote(5))
    tensor += 1
    (copy,) = actorrpc.broadcast(ref, [other])
    tensor += 1
    assert get([reader.first.remote(), other.first.remote()]) == [[5], [2]]
    assert (float(tensor[0]), float(get(copy)[0])) == (2, 1)


@pytest.mark.gpu
def test_memory_of_expandable_segments_is_refused_with_the_setting_to_change() -> None:
    change = getattr(
        torch._C, "_accelerator_setAllocatorSettings", None
    )  # the older function warns in torch 2.13
    change = change or torch.cuda.memory._set_allocator_settings
    change("expandable_segments:True")
    try:
        tensor = torch.ones(64 << 20, device="cuda:0")
    finally:
        change("expandable_segments:False")
    with pytest.raises(ValueError, match=r"cuda:0, of 256 MiB: .*PYTORCH_CUDA_ALLOC_CONF"):
        share(tensor)


@pytest.mark.gpu
def test_a_reader_that_sees_no_gpu_gets_an_error_that_names_the_remedy() -> None:
    ref = share(torch.ones(_COUNT, device="cuda:0"))
    with pytest.raises(
        actorrpc.errors.SerializationError, match=r"on cuda:0, of 16 MiB.*put\(tensor\.cpu\(\)\)"
    ):
        get(Reader.options(num_gpus=0).remote().open.remote([ref]))
