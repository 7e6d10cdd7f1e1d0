"""The actor that takes, gives and keeps tensors."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.actors_tiny import Tiny

__all__ = ["Holder"]


class Holder(Tiny):
    """Keeps one tensor of each requested size, and returns it repeatedly."""

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
        """Take a tensor, read its first and last elements, and return a number."""
        return int(tensor[0]) + int(tensor[-1])

    def forget(self) -> None:
        """Drop all tensors."""
        self.tensors.clear()
