"""A program that torchrun starts on three hosts: rank 0 drives, other ranks serve. In the first run, one rank exits."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import torch

import actorrpc
from actorrpc import autograd, rpc


@actorrpc.remote
class Half:
    """An actor that multiplies tensors and returns its host."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def where(self) -> str:
        return socket.gethostname()

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def total(self) -> float:
        mine = torch.ones(5)
        torch.distributed.all_reduce(mine, group=actorrpc.collective_group())
        return float(mine.sum())


def main() -> None:
    """Drive on rank 0, or serve."""
    first = not Path(
        "begun"
    ).exists()  # hosts count restarts separately, so rank 0 marks its first run with a file
    with actorrpc.init():
        halves = [Half.options(host=host).remote(2.0 + n) for n, host in enumerate(("b", "c"))]
        hosts = actorrpc.get([each.where.remote() for each in halves])
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as number:
            value = actorrpc.get(halves[1].times.remote(actorrpc.get(halves[0].times.remote(x))))
            autograd.backward(number, [value.sum()])
            gradient = autograd.get_gradients(number)[x].tolist()
        totals = actorrpc.get(actorrpc.collective(halves, timeout=60).call("total"))
        Path("begun").touch()
        print("ran", socket.gethostname(), len(rpc.workers()), hosts, gradient, totals, flush=True)
        if first:
            worker = actorrpc.get(actorrpc.call(halves[1], lambda _: rpc.get_worker_info().name))
            try:
                rpc.rpc_sync(worker, os._exit, (3,))
            except actorrpc.PeerDiedError as error:
                print("lost", error.worker == worker, flush=True)
            threading.Event().wait()  # until the launcher restarts all ranks
    print("done", flush=True)


if __name__ == "__main__":
    main()
