"""A program of three workers that sends at least one message of every type."""

from __future__ import annotations

import operator
from typing import Any

import torch

import actorrpc
from actorrpc import autograd, rpc
from actorrpc.rpc import api
from tests.actors.e2e.kit import until

__all__ = ["Keeper", "everything"]


class Keeper:
    """An actor whose state is kept."""

    def __init__(self) -> None:
        self.number = 0

    def add(self, number: int) -> int:
        """Add to the state."""
        self.number += number
        return self.number

    def checkpoint(self) -> int:
        """Return the state."""
        return self.number

    def restore(self, state: int) -> None:
        """Restore a state."""
        self.number = state


def _square(t: torch.Tensor) -> torch.Tensor:
    return t * t


_held: list[Any] = []


def _hold(rref: Any) -> None:
    _held.append(rref)


def _drop_held() -> None:
    _held.clear()


def _hand_on(rref: Any, to: str) -> None:
    rpc.rpc_sync(to, _hold, (rref,))


def everything(rank: int) -> None:
    """Run the program of a rank of three; rank 0 sends, and checks the results."""
    if rank:
        return
    assert rpc.rpc_sync("worker1", operator.add, (1, 2)) == 3
    rref = rpc.remote("worker1", operator.add, (1, 2))
    assert rref.to_here() == 3
    rpc.rpc_sync("worker2", _hand_on, (rref, "worker0"))
    rpc.rpc_sync("worker2", _hold, (rref,))
    rpc.rpc_sync("worker2", _hold, (rpc.RRef(7),))
    for number in (1, 2):
        rpc.rpc_sync(f"worker{number}", _drop_held)
    del rref
    leaf = torch.ones(3, requires_grad=True)
    for fast in (False, True):
        with autograd.context() as id:
            one = rpc.rpc_sync("worker1", _square, (rpc.rpc_sync("worker2", _square, (leaf,)),))
            unused = rpc.rpc_sync("worker2", _square, (one,))
            autograd.backward(id, [(one if fast else unused * 0 + one).sum()])
    handle: Any = actorrpc.remote(Keeper).options(worker="worker1").remote()
    assert actorrpc.get(handle.add.remote(2)) == 2
    actorrpc.kill(handle)
    until(lambda: not int(api.references().table.debug_info()["num_forks"]))
