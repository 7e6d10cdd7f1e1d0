"""One worker of three ends with an error of its own; what the others find, and that they end."""

import json
import os

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def broken():
    raise ValueError("a bug in the user's code")


def run_worker(rank, world_size):
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 2:
        broken()
    if rank == 0:
        found = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        print(json.dumps({"found": found.tolist()}), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.set_start_method("spawn")
    processes = [mp.Process(target=run_worker, args=(rank, 3)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(json.dumps({"exits": [process.exitcode for process in processes]}))
