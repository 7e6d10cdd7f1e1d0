"""Remote references as the pages on RPC and RRefs show them, and as users pass them around, on three workers."""

import json
import os

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.rpc import RRef


class Counter:
    kind = "counter"

    def __init__(self, start=0):
        self.value = start

    def add(self, n, times=1):
        self.value += n * times
        return self.value

    def raise_key_error(self):
        raise KeyError("nothing here")

    @property
    def doubled(self):
        return 2 * self.value

    @staticmethod
    def twice(x):
        return x * 2

    @classmethod
    def named(cls, suffix):
        return cls.kind + suffix

    @staticmethod
    def add_to(counter_rref, n):
        return counter_rref.local_value().add(n)


kept = {}


def keep(name, rref):
    """Hold on to a reference that another worker has sent."""
    kept[name] = rref
    return rref.is_owner(), rref.confirmed_by_owner(), rref.owner_name()


def use_kept(name, n):
    return kept[name].rpc_sync().add(n)


def make_and_return():
    return RRef(Counter(100))


def pass_on(rref, to, name):
    return rpc.rpc_sync(to, keep, args=(name, rref))


def sum_of(rrefs):
    return sum(rref.to_here() for rref in rrefs)


def local_sum(rref):
    return rref.local_value().sum()


def fails(message):
    raise ValueError(message)


def caught(kind, function, *args):
    """Say what a clause for errors of a kind would get to see."""
    try:
        function(*args)
    except kind as error:
        return "nothing here" in str(error) or "wrong on purpose" in str(error)
    return None


def basics():
    info = rpc.get_worker_info("worker1")
    ret = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
    fut1 = rpc.rpc_async(info, torch.add, args=(torch.ones(2), 3))
    fut2 = rpc.rpc_async(1, min, args=(1, 2))
    rref1 = rpc.remote("worker1", torch.add, args=(torch.ones(2), 3))
    rref2 = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
    mine = RRef(torch.arange(3))
    return {
        "sync": ret.tolist(),
        "async": (fut1.wait() + fut2.wait()).tolist(),
        "then": rpc.rpc_async("worker1", max, args=(1, 2)).then(lambda fut: fut.wait() + 10).wait(),
        "remote": (rref1.to_here() + rref2.to_here()).tolist(),
        "size": list(rref1.rpc_sync().size()),
        "numel": rref1.rpc_async().numel().wait(),
        "view": list(rref1.remote().view(1, 2).to_here().shape),
        "owner": [rref1.owner().name, rref1.owner().id, rref1.owner_name(), rref1.is_owner()],
        "local": [mine.is_owner(), mine.local_value().tolist(), mine.owner_name(), mine.confirmed_by_owner()],
        "info": [info.name, info.id, rpc.get_worker_info().name],
        "fast": rpc.rpc_sync("worker1", local_sum, args=(rref1,)).item(),
    }


def methods():
    rref = rpc.remote("worker1", Counter, args=(5,))
    return {
        "sync": rref.rpc_sync().add(1),
        "keywords": rref.rpc_sync(timeout=10).add(1, times=3),
        "async": rref.rpc_async().add(1).wait(),
        "remote": rref.remote().add(1).to_here(),
        "static": rref.rpc_sync().twice(21),
        "class": rref.rpc_sync().named("!"),
        "static of a reference": rpc.rpc_sync(rref.owner(), Counter.add_to, args=(rref, 10)),
        "value": rref.to_here().value,
        "copy": rref.to_here() is not rref.to_here(),
        "own": RRef(Counter(1)).rpc_sync().add(1),
    }


def sharing():
    rref = rpc.remote("worker1", Counter)
    found = {
        "to owner": rpc.rpc_sync("worker1", keep, args=("a", rref)),
        "to user": rpc.rpc_sync("worker2", keep, args=("a", rref)),
        "by a user": rpc.rpc_sync("worker2", pass_on, args=(rref, "worker1", "b")),
        "of mine": rpc.rpc_sync("worker1", pass_on, args=(RRef(Counter(40)), "worker2", "mine")),
    }
    found["uses"] = [
        rpc.rpc_sync("worker2", use_kept, args=("a", 1)),
        rpc.rpc_sync("worker1", use_kept, args=("a", 1)),
        rpc.rpc_sync("worker1", use_kept, args=("b", 1)),
        rref.rpc_sync().add(1),
        rpc.rpc_sync("worker2", use_kept, args=("mine", 2)),
    ]
    theirs = rpc.rpc_sync("worker2", make_and_return)
    found["returned"] = [theirs.owner_name(), theirs.is_owner(), theirs.rpc_sync().add(1)]
    nested = rpc.remote("worker1", make_and_return).to_here()
    found["nested"] = [nested.owner_name(), nested.rpc_sync().add(2)]
    many = [rpc.remote(f"worker{i % 3}", torch.add, args=(torch.ones(1), i)) for i in range(6)]
    found["many"] = rpc.rpc_sync("worker1", sum_of, args=(many,)).item()
    chain = rpc.remote(
        "worker2", sum_of, args=([rpc.remote("worker1", torch.neg, args=(torch.ones(2),)), many[0]],)
    )
    found["chain"] = chain.to_here().tolist()
    return found


def errors():
    rref = rpc.remote("worker1", Counter)
    fail = ("worker1", fails, ("wrong on purpose",))
    return {
        "sync": caught(ValueError, rpc.rpc_sync, *fail),
        "async": caught(ValueError, rpc.rpc_async(*fail).wait),
        "remote": caught(ValueError, rpc.remote(*fail).to_here),
        "method": caught(RuntimeError, rref.rpc_sync().raise_key_error),
        "unknown worker": caught(RuntimeError, rpc.rpc_sync, "nobody", min, (1, 2)),
        "not the owner": caught(RuntimeError, rref.local_value),
        "no such method": caught(AttributeError, lambda: rref.rpc_sync().no_such_method()),
        "afterwards": rref.rpc_sync().add(1),
    }


def run_worker(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        for section in (basics, methods, sharing, errors):
            print(json.dumps({section.__name__: section()}))
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(3,), nprocs=3, join=True)
