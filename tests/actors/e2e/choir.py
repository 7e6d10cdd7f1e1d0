"""Actors for tests of collectives, and the local computations with which their results are compared."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import actorrpc
from actorrpc import get
from tests.actors.e2e.kit import pass_gate

__all__ = ["Async", "Maker", "Member", "check_operations", "check_training", "equal", "totals"]


def make_model() -> nn.Module:
    """Return the same model each time, from its own generator: other actors of the process use torch's global one."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    dice = torch.Generator().manual_seed(5)
    for each in model.parameters():
        nn.init.uniform_(each, -0.4, 0.4, generator=dice)
    return model


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(6)
    return torch.randn(12, 6, generator=dice), torch.randn(12, 3, generator=dice)


def train(model: nn.Module, batch: torch.Tensor, wanted: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), wanted).backward()
        optimizer.step()


@actorrpc.remote
class Member:
    def __init__(self, start: float = 0.0, device: str = "cpu") -> None:
        self.device = device
        self.weights = {"a": torch.full((3,), start), "b": [torch.full((2, 2), start)]}
        self.model = nn.Linear(2, 2)
        nn.init.constant_(self.model.weight, start)
        self.kept: Any = None

    def total(self, values: list[float], name: str | None = None) -> torch.Tensor:
        group = actorrpc.collective_group(name)
        mine = torch.tensor(values) * (group.rank() + 1)
        dist.all_reduce(mine, group=group)
        return mine

    def operations(self) -> dict[str, Any]:
        group = actorrpc.collective_group()
        rank, size = group.rank(), group.size()
        mine = torch.arange(4.0, device=self.device) + 10 * rank
        copied = mine.clone()
        dist.broadcast(copied, src=size - 1, group=group)
        gathered = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(gathered, mine, group=group)
        part = torch.empty(2, device=self.device)
        parts = [torch.full((2,), float(rank + at), device=self.device) for at in range(size)]
        dist.reduce_scatter(part, parts, group=group)
        most = mine.clone()
        work = dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        work.wait()
        things: list[Any] = [None] * size
        dist.all_gather_object(things, {"rank": rank}, group=group)
        dist.barrier(group=group)
        tensors = {"copied": copied, "gathered": torch.stack(gathered), "part": part, "most": most}
        return {name: tensor.cpu() for name, tensor in tensors.items()} | {"things": things}

    def train(self, steps: int) -> list[torch.Tensor]:
        group = actorrpc.collective_group()
        model = make_model().to(self.device)
        batch, wanted = (each.chunk(group.size())[group.rank()].to(self.device) for each in make_batch())
        train(DistributedDataParallel(model, process_group=group), batch, wanted, steps)
        # If several threads leave forward() of their DDP models out of order, torch leaves one of the models in
        # this attribute.
        DistributedDataParallel._active_ddp_module = None
        return [each.detach().cpu() for each in model.parameters()]

    def wait_for(self, rank: int, name: str | None = None) -> None:
        dist.recv(torch.empty(1), src=rank, group=actorrpc.collective_group(name))

    def keep(self) -> None:
        self.kept = actorrpc.collective_group()

    def receive_from_kept(self, rank: int) -> None:
        dist.recv(torch.empty(1), src=rank, group=self.kept)

    def use_kept(self) -> None:
        dist.all_reduce(torch.ones(1), group=self.kept)

    def block(self, gate: str) -> str:
        return pass_gate(gate)

    def die(self) -> None:
        actorrpc.kill(actorrpc.current_actor(), no_restart=False)
        self.wait_for(0)  # until this actor is killed

    def state(self) -> tuple[Any, ...]:
        return self.weights["a"], self.weights["b"][0], self.model.weight.detach(), self.model.bias.detach()

    def resources(self) -> tuple[int, int]:
        """Count file descriptors, and threads that are not Python's (actorrpc's pool may grow at any time)."""
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")) - threading.active_count()

    def default_group(self) -> tuple[bool, float, int]:
        """Use a default group of one rank next to the collective."""
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            theirs = actorrpc.collective_group()
            value = torch.ones(1)
            dist.all_reduce(value, group=theirs)
            own = torch.ones(1)
            dist.all_reduce(own)
            return dist.group.WORLD is not theirs, value.item(), dist.get_world_size()
        finally:
            dist.destroy_process_group(dist.group.WORLD)


@actorrpc.remote
class Maker:
    """Makes a collective of other actors, with or without itself."""

    def total(self, others: list[Any]) -> list[float]:
        self.collective = actorrpc.collective([actorrpc.current_actor(), *others], name="of one of them")
        refs = self.collective.call(_total)
        return [each.item() for each in get(refs)]

    def make(self, others: list[Any]) -> None:
        self.collective = actorrpc.collective(others)


def _total(instance: Any) -> torch.Tensor:
    value = torch.ones(1)
    dist.all_reduce(value, group=actorrpc.collective_group())
    return value


@actorrpc.remote
class Async:
    async def step(self) -> None: ...


def equal(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def check_operations(results: list[dict[str, Any]]) -> None:
    """Compare what the members returned from ``operations`` with a local computation."""
    size = len(results)
    mine = torch.stack([torch.arange(4.0) + 10 * rank for rank in range(size)])
    for rank, found in enumerate(results):
        equal(found["copied"], mine[-1])
        equal(found["gathered"], mine)
        equal(found["part"], torch.full((2,), float(sum(range(size)) + size * rank)))
        equal(found["most"], mine[-1])
        assert found["things"] == [{"rank": other} for other in range(size)]


def check_training(collective: Any) -> None:
    """Compare data-parallel training of all members with training on the whole batch."""
    model = make_model()
    train(model, *make_batch(), steps=4)
    for parameters in get(collective.call("train", 4)):
        for found, wanted in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-5)


def totals(refs: list[Any]) -> list[float]:
    """Return the results of the members as numbers."""
    return [each.item() for each in get(refs)]
