"""One caller and one callee for :mod:`benchmarks.ab`.

`benchmarks.ab` copies this file next to each checkout that it compares, so that both checkouts run the same operations. Therefore
this file uses only public names that every compared commit has.

The caller process reads one JSON request per line from its standard input and writes one JSON line per request:
``{"operation": "sync", "times": 1000, "cpus": [0, 1]}`` gives ``{"wall": seconds, "cpu": seconds of both processes}``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import actorrpc
from actorrpc import rpc

__all__ = ["OPERATIONS", "call_main", "serve_main"]

CALLEE = "callee"
_BATCH = 100


def nothing() -> int:
    """Return a number."""
    return 1


def echo(value: Any) -> Any:
    """Return the argument."""
    return value


@actorrpc.remote
class Counter:
    """An actor with a number as its state."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, step: int) -> int:
        """Add to the state."""
        self.value += step
        return self.value


def _sync() -> Callable[[], object]:
    return lambda: rpc.rpc_sync(CALLEE, nothing)


def _pipelined() -> Callable[[], object]:
    return lambda: torch.futures.wait_all([rpc.rpc_async(CALLEE, nothing) for _ in range(_BATCH)])


def _actor() -> Callable[[], object]:
    actor = Counter.options(worker=CALLEE).remote()
    return lambda: actorrpc.get(actor.add.remote(1))


def _actor_pipelined() -> Callable[[], object]:
    actor = Counter.options(worker=CALLEE).remote()
    return lambda: actorrpc.get([actor.add.remote(1) for _ in range(_BATCH)])


def _echo(value: Any) -> Callable[[], object]:
    return lambda: rpc.rpc_sync(CALLEE, echo, (value,))


def _put() -> Callable[[], object]:
    value = torch.zeros(1 << 24)
    return lambda: actorrpc.put(value)


#: name -> (makes a function that runs the operation, operations per run, runs per round)
OPERATIONS: dict[str, tuple[Callable[[], Callable[[], object]], int, int]] = {
    "sync": (_sync, 1, 2000),
    "pipelined": (_pipelined, _BATCH, 40),
    "actor": (_actor, 1, 1500),
    "actor pipelined": (_actor_pipelined, _BATCH, 30),
    "1 KiB": (lambda: _echo(torch.zeros(256)), 1, 1000),
    "1 MiB": (lambda: _echo(torch.zeros(1 << 18)), 1, 200),
    "64 MiB": (lambda: _echo(torch.zeros(1 << 24)), 1, 10),
    "put 64 MiB": (_put, 1, 10),
    "200 tensors": (lambda: _echo({f"layer.{n}": torch.zeros(8, 8) for n in range(200)}), 1, 150),
}


def pin(cpus: list[int]) -> float:
    """Move every thread of this process to these CPUs; return the processor time used so far, in seconds."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cpus)
    return time.process_time()


def _join(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(init_method=f"file://{rendezvous}")
    rpc.init_rpc(("caller", CALLEE)[rank], rank=rank, world_size=2, rpc_backend_options=options)


def serve_main(rendezvous: str) -> None:
    """Run the callee until the caller shuts the group down."""
    _join(1, rendezvous)
    rpc.shutdown()


def call_main() -> None:
    """Run the caller until its standard input ends."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"{folder}/rendezvous"
        command = [sys.executable, "-P", "-c", f"import ab_worker; ab_worker.serve_main({rendezvous!r})"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as callee:
            _join(0, rendezvous)
            runs: dict[str, Callable[[], object]] = {}
            for line in sys.stdin:
                sys.stdout.write(json.dumps(_measure(json.loads(line), runs)) + "\n")
                sys.stdout.flush()
            rpc.shutdown()
            callee.wait(30)


def _measure(request: dict[str, Any], runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    name, times, (here, there) = request["operation"], request["times"], request["cpus"]
    if name not in runs:
        runs[name] = OPERATIONS[name][0]()
    run = runs[name]
    pin([here])
    rpc.rpc_sync(CALLEE, pin, ([there],))
    for _ in range(max(1, times // 10)):
        run()
    cpu = rpc.rpc_sync(CALLEE, time.process_time) + time.process_time()
    start = time.perf_counter()
    for _ in range(times):
        run()
    wall = time.perf_counter() - start
    cpu = rpc.rpc_sync(CALLEE, time.process_time) + time.process_time() - cpu
    return {"wall": wall, "cpu": cpu}
