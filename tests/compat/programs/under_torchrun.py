"""An unchanged program of torch's RPC for torchrun."""

import os

import torch.distributed.rpc as rpc


def agent():
    return type(rpc.api._get_current_rpc_agent()).__module__


rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
if rank == 0:
    print(rpc.rpc_sync("worker1", agent), flush=True)
rpc.shutdown()
