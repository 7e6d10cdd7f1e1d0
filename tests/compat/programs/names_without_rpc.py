"""A program of torch's RPC that imports each replaced module, and uses parts of torch that build on RPC."""

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.distributed.nn.api import remote_module
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.optim.optimizer import DistributedOptimizer as Same
from torch.distributed.rpc import RRef
from torch.nn.parallel import distributed as data_parallel


@torch.jit.script
def total(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values).sum()


@torch.jit.script
def twice(value):
    # type: (Tensor) -> Tensor
    return 2 * value


print(rpc.is_available(), dist_autograd.is_available(), Same is DistributedOptimizer)
print(
    {
        each.__module__.partition(".")[0]
        for each in (RRef, RemoteModule, DistributedOptimizer, remote_module.RemoteModule)
    }
)
print(total([torch.ones(2), torch.ones(2)]).item(), twice(torch.ones(())).item())
print(data_parallel.RPC_AVAILABLE, issubclass(data_parallel.RRef, RRef), nn.Module in RemoteModule.__mro__)
