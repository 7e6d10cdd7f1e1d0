"""A module with a remote part and a local one, wrapped in DistributedDataParallel as a whole, on two trainers."""

import json
import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.nn.parallel import DistributedDataParallel as DDP


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.full((4,), factor))

    def forward(self, x):
        return x * self.factor


class Mixed(nn.Module):
    def __init__(self, remote):
        super().__init__()
        self.remote = remote
        torch.manual_seed(2)
        self.local = nn.Linear(4, 2)

    def forward(self, x):
        return self.local(self.remote(x))


def gradient_of_factor(module_rref, context_id):
    return dist_autograd.get_gradients(context_id)[module_rref.local_value().factor].tolist()


def train(remote, rank):
    model = DDP(Mixed(remote))
    dice = torch.Generator().manual_seed(rank)
    x, target = torch.randn(8, 4, generator=dice), torch.randint(2, (8,), generator=dice)
    with dist_autograd.context() as context_id:
        loss = nn.functional.cross_entropy(model(x), target)
        dist_autograd.backward(context_id, [loss])
        averaged = dist_autograd.get_gradients(context_id)[model.module.local.weight]
        there = rpc.rpc_sync("ps", gradient_of_factor, args=(remote.get_module_rref(), context_id))
    return {"rank": rank, "loss": loss.item(), "averaged": averaged.flatten().tolist(), "remote": there}


def run_worker(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    if rank < 2:
        dist.init_process_group(
            "gloo", rank=rank, world_size=2, init_method=f"file://{os.environ['DDP_STORE']}"
        )
    rpc.init_rpc(f"trainer{rank}" if rank < 2 else "ps", rank=rank, world_size=world_size)
    if rank == 0:
        remote = RemoteModule("ps", Scale, args=(2.0,))
        futures = [rpc.rpc_async(f"trainer{each}", train, args=(remote, each)) for each in range(2)]
        for future in futures:
            print(json.dumps(future.wait()))
    rpc.shutdown()
    if rank < 2:
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DDP_STORE", os.path.abspath("ddp_store"))
    mp.spawn(run_worker, args=(3,), nprocs=3, join=True)
