"""An unchanged program of torch's RPC with two ranks; the argument is the start method.

It prints the module of the agent's class on the other worker, and results of calls.
"""

import sys
import tempfile

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.rpc import RRef


def agent():
    return type(rpc.api._get_current_rpc_agent()).__module__


def work(rank, folder):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
        with dist_autograd.context() as context_id:
            leaf = torch.ones(2, requires_grad=True)
            loss = rpc.rpc_sync("worker1", torch.mul, args=(leaf, 3)).sum()
            dist_autograd.backward(context_id, [loss])
            gradient = dist_autograd.get_gradients(context_id)[leaf].tolist()
        print(
            rpc.rpc_sync("worker1", agent), rref.to_here().tolist(), RRef(3).to_here(), gradient, flush=True
        )
    rpc.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (folder,), nprocs=2, start_method=sys.argv[1])
    print("over", *sys.argv[1:])
