"""Functions that answer later: ``async_execution`` as its page shows it, on three workers."""

import json
import os

import torch
import torch.multiprocessing as mp
from torch.distributed import rpc


@rpc.functions.async_execution
def async_add_chained(to, x, y, z):
    return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda fut: fut.wait() + z)


@rpc.functions.async_execution
def async_add_multi(to, x, n):
    """One after the other, with no thread that waits."""
    fut = rpc.rpc_async(to, torch.add, args=(x, 1))
    for _ in range(n - 1):
        fut = fut.then(lambda done: done.wait() + 1)
    return fut


@rpc.functions.async_execution
def async_fan_out(targets, x):
    futs = [rpc.rpc_async(to, torch.mul, args=(x, i + 1)) for i, to in enumerate(targets)]
    return torch.futures.collect_all(futs).then(lambda done: sum(each.wait() for each in done.wait()))


@rpc.functions.async_execution
def async_fails(to):
    return rpc.rpc_async(to, torch.add, args=(torch.ones(2), torch.ones(3)))


@rpc.functions.async_execution
def async_raises_in_callback(to):
    def callback(fut):
        raise ValueError(f"expected {fut.wait()}")

    return rpc.rpc_async(to, min, args=(3, 4)).then(callback)


@rpc.functions.async_execution
def not_a_future():
    return 3


class AsyncExecutionClass:
    @staticmethod
    @rpc.functions.async_execution
    def static_async_add(to, x, y, z):
        return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda fut: fut.wait() + z)

    @classmethod
    @rpc.functions.async_execution
    def class_async_add(cls, to, x, y, z):
        ret_fut = torch.futures.Future()
        rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda fut: ret_fut.set_result(fut.wait() + z))
        return ret_fut

    @rpc.functions.async_execution
    def bound_async_add(self, to, x, y, z):
        return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda fut: fut.wait() + z)


def caught(function, *args):
    try:
        return function("worker1", *args)
    except Exception as error:
        return type(error).__mro__[0].__name__ != "", isinstance(error, RuntimeError), "3" in str(error)


def run_worker(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        ones = torch.ones(2)
        rref = rpc.remote("worker1", AsyncExecutionClass)
        found = {
            "chained": rpc.rpc_sync("worker1", async_add_chained, args=("worker2", ones, 1, 1)).tolist(),
            "to itself": rpc.rpc_sync("worker1", async_add_chained, args=("worker1", ones, 1, 1)).tolist(),
            "multi": rpc.rpc_sync("worker1", async_add_multi, args=("worker2", ones, 30)).tolist(),
            "fan out": rpc.rpc_sync(
                "worker1", async_fan_out, args=(["worker0", "worker1", "worker2"], ones)
            ).tolist(),
            "static": rpc.rpc_sync(
                "worker1", AsyncExecutionClass.static_async_add, args=("worker2", ones, 1, 2)
            ).tolist(),
            "class": rpc.rpc_sync(
                "worker1", AsyncExecutionClass.class_async_add, args=("worker2", ones, 1, 2)
            ).tolist(),
            "remote": rpc.remote("worker1", async_add_chained, args=("worker2", ones, 1, 1))
            .to_here()
            .tolist(),
            "rref static": rref.rpc_sync().static_async_add("worker2", ones, 1, 2).tolist(),
            "rref class": rref.rpc_async().class_async_add("worker2", ones, 1, 2).wait().tolist(),
            "rref bound": rref.remote().bound_async_add("worker2", ones, 1, 2).to_here().tolist(),
            "many": sum(
                fut.wait().sum().item()
                for fut in [
                    rpc.rpc_async("worker1", async_add_chained, args=("worker2", ones, i, 1))
                    for i in range(50)
                ]
            ),
            "fails": caught(rpc.rpc_sync, async_fails, ("worker2",)),
            "callback": caught(rpc.rpc_sync, async_raises_in_callback, ("worker2",)),
            "not a future": caught(rpc.rpc_sync, not_a_future)[1],
        }
        for name, value in found.items():
            print(json.dumps({name: value}))
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(3,), nprocs=3, join=True)
