"""The actor that takes, gives and keeps tensors."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.actors_tiny import Tiny

__all__ = ["Holder"]


class Holder(Tiny):
    """Has a tensor of each size that it was asked for, and gives it away again and again."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[int, str], Any] = {}

    def give(self, size: int, kind: str) -> Any:
        """Return a tensor (or numpy array) of this many bytes."""
        key = size, kind
        if key not in self.tensors:
            tensor = torch.full((size,), 1, dtype=torch.uint8)
            self.tensors[key] = tensor.numpy() if kind == "numpy" else tensor
        return self.tensors[key]

    def take(self, tensor: Any) -> int:
        """Take one, look at its ends, answer with a number."""
        return int(tensor[0]) + int(tensor[-1])

    def forget(self) -> None:
        """Drop all."""
        self.tensors.clear()
