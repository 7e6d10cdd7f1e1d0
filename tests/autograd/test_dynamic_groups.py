"""Gradients in a group that workers join and leave."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import actorrpc.autograd as dist_autograd
from actorrpc import rpc
from tests.ranks import run_group


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _through(to: str, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, _double, (x * 3,))


def _signal(path: str, name: str) -> None:
    # Opening the pipe for writing ends the `_wait` of its reader.
    with open(os.path.join(path, name), "w"):
        pass


def _wait(path: str, name: str) -> None:
    with open(os.path.join(path, name)) as file:
        file.read()


def _gradient(x: torch.Tensor, *call: Any) -> torch.Tensor:
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync(*call).sum()
        dist_autograd.backward(context, [loss])
        return dist_autograd.get_gradients(context)[x]


def _member(rank: int, _: int, path: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}/store")
    if rank == 2:
        _wait(path, "join")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=None, rpc_backend_options=options)
    if rank == 0:
        x = torch.ones(2, requires_grad=True)
        _wait(path, "first is here")
        assert _gradient(x, "worker1", _double, (x,)).tolist() == [2.0, 2.0]
        _signal(path, "join")
        _wait(path, "second is here")
        assert _gradient(x, "worker1", _through, ("worker2", x)).tolist() == [6.0, 6.0]
        _signal(path, "leave")
        _wait(path, "second has left")
        assert _gradient(x, "worker1", _double, (x,)).tolist() == [2.0, 2.0]
        _signal(path, "end")
    elif rank == 1:
        _signal(path, "first is here")
        _wait(path, "end")
    else:
        _signal(path, "second is here")
        _wait(path, "leave")
    rpc.shutdown(graceful=False)
    if rank == 2:
        _signal(path, "second has left")


def test_gradients_work_while_workers_join_and_leave(tmp_path: Path) -> None:
    for name in ("join", "first is here", "second is here", "leave", "second has left", "end"):
        os.mkfifo(tmp_path / name)
    run_group(_member, 3, str(tmp_path))
