"""A module of the program that only the driver's host has."""

from __future__ import annotations

import socket
import threading
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import actorrpc
from actorrpc import rpc

SCALE = 3.0


class OwnError(ValueError):
    """An error class of this program."""


class Layer(nn.Module):
    """Half of a model."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.tanh(self.linear(x)) * SCALE
        return out


@actorrpc.remote
class Part:
    """An actor with a layer, a count and a place in a collective."""

    def __init__(self, seed: int = 0) -> None:
        self.layer = Layer(seed)
        self.count = 0

    def where(self) -> tuple[str, str]:
        return socket.gethostname(), rpc.get_worker_info().name

    def add(self) -> int:
        self.count += 1
        return self.count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def twice(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    def through(self, other: Any, tensor: torch.Tensor) -> Any:
        return actorrpc.get(other.twice.remote(tensor))

    def fail(self) -> None:
        raise OwnError("on purpose")

    def hang(self) -> None:
        threading.Event().wait()

    def total(self) -> float:
        group = actorrpc.collective_group()
        mine = torch.ones(100_000) * (group.rank() + 1)
        dist.all_reduce(mine, group=group)
        return float(mine[-1])

    def train(self, x: torch.Tensor, steps: int) -> list[torch.Tensor]:
        group = actorrpc.collective_group()
        model = DistributedDataParallel(Layer(7), process_group=group)
        descend(model, x.chunk(group.size())[group.rank()], steps)
        return [each.detach() for each in model.parameters()]


@actorrpc.remote
class Keeper:
    """An actor that can move."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count

    def where(self) -> tuple[str, str]:
        return socket.gethostname(), rpc.get_worker_info().name

    def checkpoint(self) -> int:
        return self.count

    def restore(self, count: int) -> None:
        self.count = count


def descend(model: nn.Module, x: torch.Tensor, steps: int) -> None:
    """Train a model to give zeros."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def parameter(value: float) -> nn.Parameter:
    """Return a parameter, for an RRef."""
    return nn.Parameter(torch.full((4,), value))


def times(held: Any, x: torch.Tensor) -> torch.Tensor:
    """Multiply by a parameter of any worker."""
    product: torch.Tensor = held.to_here() * x
    return product
