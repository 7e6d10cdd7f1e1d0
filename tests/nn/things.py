"""nn.Modules that other processes can import."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Busy",
    "Echo",
    "Hybrid",
    "Modes",
    "NotAModule",
    "Tied",
    "Untensored",
    "build_linear",
    "clone_of",
    "fill",
    "mark",
    "normed",
]


class Echo(nn.Module):
    """Returns its arguments in another order."""

    def __init__(self, first: int, second: int = -1) -> None:
        super().__init__()
        self.param1 = nn.Parameter(torch.ones(1))
        self.first, self.second = first, second

    def forward(self, tensor: Tensor, number: int, word: str = "default") -> tuple[str, int, Tensor]:
        return word, number, tensor

    def sum(self) -> int:
        return self.first + self.second


class NotAModule:
    def __init__(self, first: int, second: int = -1) -> None:
        pass


class Tied(nn.Module):
    """Has a shared parameter with two names, a direct parameter, a buffer, a non-persistent buffer, and extra state."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.second = nn.Linear(size, size)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.zeros(1), persistent=False)
        self.word = "new"

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.second(torch.relu(self.first(x))) * self.scale

    def get_extra_state(self) -> Any:
        return {"word": self.word}

    def set_extra_state(self, state: Any) -> None:
        self.word = state["word"]


class Modes(nn.Module):
    """Returns its mode."""

    def forward(self) -> bool:
        return self.training


class Untensored(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Busy(nn.Module):
    """Blocks until ``count`` threads are in its forward method."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.barrier = threading.Barrier(count)

    def forward(self) -> int:
        return self.barrier.wait(20)


def build_linear(size: int) -> nn.Module:
    """Return a module, as an example of a factory function."""
    torch.manual_seed(size)
    return nn.Linear(size, size)


def normed(size: int) -> nn.Module:
    """Return a module with buffers and with versions in its state."""
    return nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size), nn.Dropout(0.5))


def fill(module: nn.Module) -> None:
    """Fill the weights, as an argument for ``apply``."""
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight.fill_(0.5)
            module.bias.zero_()


def mark(module: nn.Module) -> None:
    """Register a forward hook that adds 100, as an argument for ``apply``."""
    module.register_forward_hook(lambda _module, _args, output: output + 100)


class Hybrid(nn.Module):
    """A local module with a remote part."""

    def __init__(self, remote: nn.Module, size: int = 3) -> None:
        super().__init__()
        self.local = nn.Linear(size, size)
        self.remote = remote

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.remote(torch.relu(self.local(x)))
        return out


def clone_of(hybrid: Hybrid, part: nn.Module) -> Hybrid:
    """Return the same model with a local part."""
    local = Hybrid(part)
    local.load_state_dict(hybrid.state_dict())
    return local
