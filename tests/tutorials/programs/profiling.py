"""Profiling RPC-based workloads: calls of builtins, of functions, and RRefs, with what they ran remotely."""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.autograd import profiler, profiler_legacy
from torch.profiler import ProfilerActivity


def random_tensor():
    return torch.rand((3, 3), requires_grad=True)


def udf_with_ops():
    t1, t2 = random_tensor(), random_tensor()
    torch.add(t1, t2)
    return torch.mul(t1, t2)


def profile(name):
    if name == "legacy":
        return profiler_legacy.profile()
    return (
        profiler.profile()
        if name == "autograd"
        else torch.profiler.profile(activities=[ProfilerActivity.CPU])
    )


def show(name, section, prof):
    events = prof.events() if callable(getattr(prof, "events", None)) else prof.function_events
    remote = [event for event in events if event.is_remote]
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        prof.export_chrome_trace(trace.name)
        traced = Path(trace.name).read_text()
    print(
        json.dumps(
            {
                "profiler": name,
                "section": section,
                "names": sorted({event.name for event in events}),
                "remote": sorted({event.name for event in remote}),
                "nodes": sorted({event.node_id for event in remote}),
                "traced": "rpc_" in traced,
                "in table": "rpc_" in prof.key_averages().table(),
            }
        )
    )


def run(name, dst_worker_name):
    t1, t2 = random_tensor(), random_tensor()
    with profile(name) as prof:
        fut1 = rpc.rpc_async(dst_worker_name, torch.add, args=(t1, t2))
        fut2 = rpc.rpc_async(dst_worker_name, torch.mul, args=(t1, t2))
        fut1.wait()
        fut2.wait()
    show(name, "builtin functions", prof)
    with profile(name) as prof:
        rpc.rpc_async(dst_worker_name, udf_with_ops).wait()
    show(name, "user-defined function", prof)
    with profile(name) as prof:
        rref = rpc.remote(dst_worker_name, udf_with_ops)
        rref.to_here()
        if name == "legacy":
            rref._get_profiling_future().wait()  # the value may be here before its owner's word that it has made it
    show(name, "remote", prof)
    with profile(name) as prof, profiler.record_function("my_work"):
        rpc.rpc_sync(dst_worker_name, torch.add, args=(t1, t2))
    show(name, "sync, in a range", prof)


def worker(rank, world_size, names):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        for name in names:
            run(name, f"worker{(rank + 1) % world_size}")
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--profiler", nargs="+", default=["autograd"])
    args = parser.parse_args()
    mp.spawn(worker, args=(2, args.profiler), nprocs=2, join=True)
