"""A module of the program that only the driver's host has."""

from __future__ import annotations

import socket
import threading
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

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
    """An actor with a layer and a place in a collective."""

    def __init__(self, seed: int = 0) -> None:
        self.layer = Layer(seed)

    def where(self) -> tuple[str, str]:
        return socket.gethostname(), rpc.get_worker_info().name

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
