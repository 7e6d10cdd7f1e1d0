"""A group on three hosts: calls, tensors and gradients work over IPv4 alone and over IPv6 alone."""

from __future__ import annotations

import operator
import os
import socket
from typing import Any

import pytest
import torch

import actorrpc.autograd as dist_autograd
from actorrpc import rpc
from actorrpc.optim import DistributedOptimizer
from tests.faults.hosts import Network, host_group, needs_hosts

pytestmark = [
    needs_hosts,
    # torch's store prints this, as these hosts have addresses without names.
    pytest.mark.prints("The hostname of the client socket cannot be retrieved"),
]

# Inline; the least size for shared memory on one host; several chunks; many chunks.
_SIZES = (100, 64 << 10, 3 << 20, 24 << 20)


def _host_and_pid() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


def _twice(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def _forward(to: str, function: Any, args: tuple[Any, ...]) -> Any:
    return rpc.rpc_sync(to, function, args)


def _parameter(size: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(size))


def _multiply(parameter: rpc.RRef, x: torch.Tensor) -> torch.Tensor:
    return parameter.local_value() * x


def _connections() -> dict[str, bool]:
    agent = rpc.api._require().agent  # type: ignore[attr-defined]
    return {peer.name: conn.local for peer in agent.peers() for conn in peer.conns}


def _calls(world_size: int) -> None:
    places = [rpc.rpc_sync(f"worker{n}", _host_and_pid) for n in range(world_size)]
    assert [name for name, _ in places] == ["a", "b", "c", "b"]
    assert len({pid for _, pid in places}) == world_size
    # From any worker to any worker, through any worker.
    for through in range(1, world_size):
        for to in range(world_size):
            name = f"worker{to}"
            assert (
                rpc.rpc_sync(f"worker{through}", _forward, (name, operator.add, (through, to)))
                == through + to
            )
    # Unix sockets on one host, TCP between hosts.
    assert rpc.rpc_sync("worker1", _connections) == {"worker0": False, "worker2": False, "worker3": True}
    with pytest.raises(ZeroDivisionError):
        rpc.rpc_sync("worker2", operator.truediv, (1, 0))


def _tensors() -> None:
    for size in _SIZES:
        tensor = torch.arange(size // 4, dtype=torch.int32)
        for each in [rpc.rpc_async(f"worker{n}", _twice, (tensor,)) for n in (1, 2, 2)]:
            assert torch.equal(each.wait(), tensor * 2)
        # Forwarded from host a to b to c and back.
        assert torch.equal(rpc.rpc_sync("worker1", _forward, ("worker2", _twice, (tensor,))), tensor * 2)


def _gradients() -> None:
    weights = [rpc.remote(f"worker{n}", _parameter, (4,)) for n in (1, 2)]
    optimizer = DistributedOptimizer(torch.optim.SGD, weights, lr=0.5)
    x = torch.full((4,), 3.0)
    with dist_autograd.context() as context:
        first = rpc.rpc_sync("worker1", _multiply, (weights[0], x))
        second = rpc.rpc_sync("worker2", _multiply, (weights[1], first))
        dist_autograd.backward(context, [second.sum()])
        optimizer.step(context)
    for weight in weights:
        assert torch.equal(weight.to_here().detach(), torch.full((4,), 1 - 0.5 * 3.0))


def _everything(rank: int, world_size: int) -> None:
    if rank == 0:
        _calls(world_size)
        _tensors()
        _gradients()


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_calls_tensors_and_gradients_work_between_three_hosts(family: str) -> None:
    with Network("a", "b", "c", ipv4=family == "ipv4", ipv6=family == "ipv6") as network:
        host_group(_everything, network, ["a", "b", "c", "b"])
