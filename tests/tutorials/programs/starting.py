"""Ways to start and to end, one after the other in the same two processes, and names that users look for."""

import json
import os
import sys
import tempfile
import threading
import time

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.rpc import BackendType, PyRRef, RRef, TensorPipeRpcBackendOptions, WorkerInfo

done = threading.Event()


def finish():
    done.set()


def who():
    info = rpc.get_worker_info()
    return [info.name, info.id]


def timed_out(timeout):
    """Seconds, whatever the unit of others."""
    try:
        rpc.rpc_sync("worker1", time.sleep, args=(0.6,), timeout=timeout)
    except RuntimeError as error:
        return "RPC ran for more than" in str(error)
    return None


def names():
    """What is there before anything is started."""
    options, registry = TensorPipeRpcBackendOptions(), rpc.backend_registry
    return {
        "available": [rpc.is_available(), torch.distributed.rpc.is_available()],
        "torch's own": torch.distributed.is_available(),
        "defaults": [options.num_worker_threads, options.rpc_timeout, options.init_method],
        "backend": [BackendType.TENSORPIPE.name, repr(BackendType.TENSORPIPE)],
        "registered": [registry.backend_registered("TENSORPIPE"), registry.backend_registered("no such")],
        "constructed": registry.construct_rpc_backend_options(BackendType.TENSORPIPE, 7).rpc_timeout,
        "constants": [
            rpc.constants.DEFAULT_RPC_TIMEOUT_SEC,
            rpc.constants.UNSET_RPC_TIMEOUT,
            rpc.api.UNSET_RPC_TIMEOUT,
        ],
        "initialised": is_initialised(),
        "classes": [issubclass(RRef, PyRRef), callable(WorkerInfo)],
    }


def is_initialised():
    return rpc._is_current_rpc_agent_set()


def refused():
    found = []
    for call in (
        lambda: rpc.rpc_sync("worker1", min, args=(1, 2)),
        rpc.get_worker_info,
        rpc.shutdown,
        lambda: rpc.init_rpc("x", backend="TENSORPIPE", rank=0, world_size=1),
        lambda: rpc.init_rpc("x", rank=0, world_size=1, rpc_backend_options={"rpc_timeout": 3}),
        lambda: TensorPipeRpcBackendOptions(num_worker_threads="many"),
    ):
        try:
            call()
            found.append(None)
        except (RuntimeError, TypeError) as error:
            found.append(isinstance(error, TypeError))
    return found


def inside():
    if "--rrefs" in sys.argv:
        rpc.remote("worker1", torch.add, args=(torch.ones(2), 1)).to_here()
    info = rpc.get_worker_info("worker1")
    return {
        "who": [who(), rpc.rpc_sync("worker1", who)],
        "classes": [issubclass(RRef, PyRRef), isinstance(info, WorkerInfo)],
        "infos": sorted(each.name for each in rpc.api._get_current_rpc_agent().get_worker_infos()),
        "equal": [info == rpc.get_worker_info("worker1"), info == rpc.get_worker_info(1)],
        "value": rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist(),
        "initialised": is_initialised(),
        "timeout": rpc.get_rpc_timeout(),
    }


def again(rank):
    try:
        rpc.init_rpc(f"other{rank}", rank=rank, world_size=2)
    except RuntimeError as error:
        return "already initialized" in str(error)
    return None


def work(rank, folder, port):
    if rank == 0:
        print(json.dumps({"names": names(), "refused": refused()}))

    def group(title, look, **settings):
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, **settings)
        found = look()
        if rank == 0:
            print(json.dumps({title: found}))
        rpc.shutdown()

    group("by the environment", inside)
    options = TensorPipeRpcBackendOptions(
        num_worker_threads=8, rpc_timeout=20, init_method=f"tcp://localhost:{port}"
    )
    group("by tcp", inside, backend=BackendType.TENSORPIPE, rpc_backend_options=options)
    options = TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/one",
        _transports=["uv"],
        _channels=["basic"],
        device_maps={},
        devices=[],
    )
    group("by a file", inside, rpc_backend_options=options)
    options = TensorPipeRpcBackendOptions()
    options.init_method = f"file://{folder}/two"
    options.rpc_timeout = 11
    options.num_worker_threads = 4
    group("twice", lambda: [rpc.get_rpc_timeout(), again(rank)], rpc_backend_options=options)

    options = TensorPipeRpcBackendOptions(init_method=f"file://{folder}/three")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
        print(json.dumps({"rref": [isinstance(rref, PyRRef), rref.to_here().tolist()]}))
        print(json.dumps({"not gracefully": [timed_out(0.1), timed_out(-1), timed_out(0)]}))
        try:
            rpc.rpc_sync("worker1", finish)
        except RuntimeError:
            pass  # it may be gone before it has answered
    else:
        done.wait()
    rpc.shutdown(graceful=False)
    if rank == 0:
        print(json.dumps({"over": is_initialised(), "refused": refused()}))


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    os.environ.setdefault("SECOND_PORT", "29501")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(folder, os.environ["SECOND_PORT"]), nprocs=2, join=True)
