"""What a program of torch's RPC gains without a change, or with a word more: the README's table, tried out."""

import asyncio
import copy
import json
import os
import signal
import time

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer


class NotEnough(Exception):
    def __init__(self, wanted, there):
        super().__init__(f"wanted {wanted}, there are {there}")
        self.wanted, self.there = wanted, there


def take(wanted):
    raise NotEnough(wanted, 3)


def deeper(me, other, n):
    """Call back and forth, each waiting for the next."""
    return 0 if n == 0 else 1 + rpc.rpc_sync(other, deeper, args=(other, me, n - 1))


def nap_through(seconds, to):
    rpc.rpc_sync(to, time.sleep, args=(seconds,))


def caught(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


def errors():
    error = caught(rpc.rpc_sync, "worker1", take, args=(5,))
    return {
        "its own class": type(error).__mro__[1] is NotEnough or isinstance(error, NotEnough),
        "with its fields": [error.wanted, error.there],
        "says where": "take" in str(error.__cause__) and "worker1" in str(error.__cause__),
    }


def calls():
    wait = rpc.rpc_async("worker1", time.sleep, args=(0.5,))

    async def both():
        one, two = rpc.rpc_async("worker1", max, args=(1, 2)), rpc.rpc_async("worker2", max, args=(3, 4))
        return [await one, await two]

    offset = 5
    return {
        "wait with a time-out": isinstance(caught(wait.wait, timeout=0.05), TimeoutError),
        "the call goes on": wait.wait() is None,
        "await": asyncio.run(both()),
        "lambda": rpc.rpc_sync("worker1", lambda x: x + offset, args=(1,)),
        "40 deep on 2 threads": rpc.rpc_sync("worker1", deeper, args=("worker1", "worker2", 40)),
        "nested calls inherit": isinstance(
            caught(rpc.rpc_sync, "worker1", nap_through, args=(30, "worker2"), timeout=0.3), RuntimeError
        ),
    }


def gradients():
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", torch.mul, args=(x, 3))
        rpc.rpc_sync("worker1", torch.mul, args=(x, 100))  # nothing comes of it: torch's pass hangs
        dist_autograd.backward(context_id, [y.sum()])
        unused = dist_autograd.get_gradients(context_id)[x].tolist()
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", torch.mul, args=(x, 3))
        dist_autograd.backward(context_id, [y], gradient=torch.tensor([1.0, 2.0]))
        weighted = dist_autograd.get_gradients(context_id)[x].tolist()
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", torch.mul, args=(x, 3))
        dist_autograd.backward(context_id, [y.sum()], accumulate="grad")
    return {"unused result": unused, "gradient=": weighted, ".grad": x.grad.tolist()}


def modules():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 2), RemoteModule("worker1", nn.Linear, args=(2, 1)))
    optimizer = DistributedOptimizer(optim.Adam, [model[0], model[1]], lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [model(torch.ones(1, 2)).sum()])
        optimizer.clip_grad_norm_(context_id, 1.0)
        optimizer.step(context_id)
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    model.load_state_dict(before)
    optimizer.param_groups[0]["lr"] = 0.01
    return {
        "state_dict": sorted(before),
        "stepped": sorted(changed),
        "loaded": all(torch.equal(value, before[name]) for name, value in model.state_dict().items()),
        "optimizer's state": sorted(optimizer.state_dict()) != [],
    }


def deaths():
    future = rpc.rpc_async("worker2", time.sleep, args=(60,))
    pid = rpc.rpc_sync("worker2", os.getpid)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    error = caught(future.wait)
    return {
        "name": type(error).__name__,
        "worker": error.worker,
        "maybe executed": error.maybe_executed,
        "soon": time.monotonic() - began < 30,
        "others": rpc.rpc_sync("worker1", max, args=(1, 2)),
    }


def run_worker(rank, world_size):
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=2)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        for section in (errors, calls, gradients, modules, deaths):
            print(json.dumps({section.__name__: section()}), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    context = mp.get_context("spawn")
    processes = [context.Process(target=run_worker, args=(rank, 3)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(json.dumps({"exits": [process.exitcode for process in processes]}))
