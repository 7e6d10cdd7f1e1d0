"""Sums of gradients that are the same to the last bit, whenever their parts come. Not thread-safe."""

from __future__ import annotations

from actorrpc.autograd import graph
from actorrpc.autograd.graph import Tensors

__all__ = ["Sum"]


class Sum:
    """The gradients that come to one node, added up in a given order, whatever the order in which they come.

    Attributes:
        total: the sum of what has been added up, for each tensor of the node; None where there is no gradient.
    """

    __slots__ = ("_at", "_held", "_order", "_own", "total")

    def __init__(self) -> None:
        self._order: list[int] = []
        self._at = 0
        self._held: dict[int, Tensors] = {}
        self._own: list[bool] = []
        self.total: Tensors = []

    def expect(self, key: int) -> None:
        """Say that gradients will come under ``key``, after those under the keys before it."""
        self._order.append(key)

    def add(self, key: int, gradients: Tensors) -> bool:
        """Take what comes under ``key``; say whether all is there."""
        if self._order[self._at] != key:
            self._held[key] = gradients
            return False
        found: Tensors | None = gradients
        while found is not None:
            self._add(found)
            self._at += 1
            if self._at == len(self._order):
                return True
            found = self._held.pop(self._order[self._at], None)
        return False

    def _add(self, gradients: Tensors) -> None:
        total = self.total
        if not total:
            self.total = gradients
            return
        own = self._own = self._own or [False] * len(total)
        for index, each in enumerate(gradients):
            before = total[index]
            if before is None:
                total[index] = each
            elif each is not None:
                # In place only what we have made ourselves: others may know the first gradient.
                total[index] = graph.add_to(before, each) if own[index] else graph.add(before, each)
                own[index] = True
