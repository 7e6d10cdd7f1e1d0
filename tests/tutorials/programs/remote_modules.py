"""RemoteModule as its page shows it, and as a layer of a Sequential."""

import json
import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer


class Scale(nn.Module):
    def __init__(self, factor, bias=0.0):
        super().__init__()
        self.factor = nn.Parameter(torch.full((4,), factor))
        self.bias = bias

    def forward(self, x, shift=0.0):
        return x * self.factor + self.bias + shift


def is_training(module_rref):
    return module_rref.local_value().training


def basics():
    m = RemoteModule("ps", Scale, args=(3.0,), kwargs={"bias": 1.0})
    x = torch.ones(2, 4)
    layers = nn.Sequential(RemoteModule("ps/cpu", Scale, args=(2.0,)), nn.ReLU(), m)
    m.eval()
    seen = rpc.rpc_sync("ps", is_training, args=(m.get_module_rref(),))
    m.train()
    return {
        "forward": m.forward(x)[0].tolist(),
        "call": m(x)[0].tolist(),
        "keyword": m.forward(x, shift=5.0)[0].tolist(),
        "async": m.forward_async(x).wait()[0].tolist(),
        "parameters": [[p.owner_name(), p.to_here().tolist()] for p in m.remote_parameters()],
        "rref": m.get_module_rref().owner_name(),
        "training": [seen, rpc.rpc_sync("ps", is_training, args=(m.get_module_rref(),))],
        "sequential": layers(x)[0].tolist(),
        "is a module": isinstance(m, nn.Module),
    }


def train_split():
    """A Sequential of local and remote layers, one optimizer for all of their parameters."""
    torch.manual_seed(6)
    first = nn.Linear(3, 4)
    remote = RemoteModule("ps", Scale, args=(0.5,))
    model = nn.Sequential(first, remote, nn.Tanh())
    rrefs = [rpc.RRef(p) for p in first.parameters()] + remote.remote_parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.3)
    x = torch.randn(6, 3)
    target = torch.tanh(x.sum(1, keepdim=True)).expand(6, 4)
    losses = []
    for _ in range(5):
        with dist_autograd.context() as context_id:
            loss = ((model(x) - target) ** 2).mean()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
            losses.append(loss.item())
    return losses


def run_worker(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    rpc.init_rpc("ps" if rank else "trainer", rank=rank, world_size=world_size)
    if rank == 0:
        print(json.dumps({"basics": basics()}))
        print(json.dumps({"split": train_split()}))
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(2,), nprocs=2, join=True)
