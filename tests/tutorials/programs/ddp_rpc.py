"""Combining DistributedDataParallel with RPC: a remote embedding table, and layers that DDP replicates.

Two trainers, a master that drives them, and a parameter server that holds the table.
"""

import json
import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, TensorPipeRpcBackendOptions
from torch.nn.parallel import DistributedDataParallel as DDP

NUM_EMBEDDINGS = 30
EMBEDDING_DIM = 8


class HybridModel(torch.nn.Module):
    def __init__(self, remote_emb_module):
        super().__init__()
        self.remote_emb_module = remote_emb_module
        torch.manual_seed(11)
        self.fc = DDP(torch.nn.Linear(EMBEDDING_DIM, 4))

    def forward(self, indices, offsets):
        emb_lookup = self.remote_emb_module.forward(indices, offsets)
        return self.fc(emb_lookup)


def _set_table(module_rref):
    """The same table on each run, whatever else has drawn numbers there."""
    weight = module_rref.local_value().weight
    torch.manual_seed(12)
    with torch.no_grad():
        weight.copy_(torch.randn_like(weight))


def get_next_batch(rank):
    dice = torch.Generator().manual_seed(rank)
    for _ in range(8):
        indices = torch.randint(NUM_EMBEDDINGS, (24,), generator=dice)
        offsets = torch.arange(0, 24, 3)
        yield indices, offsets, torch.div(indices[offsets], 8, rounding_mode="floor")


def _run_trainer(remote_emb_module, rank):
    model = HybridModel(remote_emb_module)
    model_parameter_rrefs = model.remote_emb_module.remote_parameters()
    for param in model.fc.parameters():
        model_parameter_rrefs.append(RRef(param))
    opt = DistributedOptimizer(optim.SGD, model_parameter_rrefs, lr=0.1)
    criterion = torch.nn.CrossEntropyLoss()
    losses = []
    for _ in range(3):
        for indices, offsets, target in get_next_batch(rank):
            with dist_autograd.context() as context_id:
                loss = criterion(model(indices, offsets), target)
                dist_autograd.backward(context_id, [loss])
                opt.step(context_id)
                losses.append(loss.item())
            dist.barrier()
    return losses, model.fc.module.weight.sum().item()


def run_worker(rank, world_size):
    rpc_backend_options = TensorPipeRpcBackendOptions()
    rpc_backend_options.init_method = "tcp://localhost:" + os.environ["MASTER_PORT"]
    if rank == 2:
        rpc.init_rpc("master", rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options)
        remote_emb_module = RemoteModule(
            "ps", torch.nn.EmbeddingBag, args=(NUM_EMBEDDINGS, EMBEDDING_DIM), kwargs={"mode": "sum"}
        )
        rpc.rpc_sync("ps", _set_table, args=(remote_emb_module.get_module_rref(),))
        futs = []
        for trainer_rank in [0, 1]:
            trainer_name = f"trainer{trainer_rank}"
            fut = rpc.rpc_async(trainer_name, _run_trainer, args=(remote_emb_module, trainer_rank))
            futs.append(fut)
        for trainer_rank, fut in enumerate(futs):
            losses, weights = fut.wait()
            print(json.dumps({"trainer": trainer_rank, "losses": losses, "weights": weights}))
    elif rank <= 1:
        dist.init_process_group(
            backend="gloo", rank=rank, world_size=2, init_method=f"file://{os.environ['DDP_STORE']}"
        )
        rpc.init_rpc(
            f"trainer{rank}", rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options
        )
    else:
        rpc.init_rpc("ps", rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options)
    rpc.shutdown()
    if rank <= 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_PORT", "29501")
    os.environ.setdefault("DDP_STORE", os.path.abspath("ddp_store"))
    mp.spawn(run_worker, args=(4,), nprocs=4, join=True)
