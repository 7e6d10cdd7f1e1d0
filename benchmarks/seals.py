"""The cost of frame integrity (seals): small calls and large tensors over TCP, with ``ACTORRPC_INTEGRITY=1`` and without.

    python -m benchmarks.seals                # 9 rounds; prints one line of JSON
    python -m benchmarks.seals --rounds 3

Two pairs of processes, one of each kind, take turns; ratios are computed within a turn, and the median, the lowest and the
highest are reported. A call sends a number and returns it. A tensor of 64 MiB is an argument; the answer is one number.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from actorrpc import rpc

__all__ = ["compare", "main", "rounds_of"]

MIB = 1 << 20
_SIZE = 64 * MIB
_CALLS = 2_000
_TENSORS = 6


def echo(value: Any) -> Any:
    """Return the argument."""
    return value


def last(tensor: torch.Tensor) -> float:
    """Return the last element."""
    return tensor[-1].item()


def serve(place: str, rank: int, environment: Mapping[str, str], pipe: Connection | None) -> None:
    """Run one worker of a pair; the worker with the pipe measures a round for each order in it."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(
        init_method=f"file://{place}", transport="tcp", key="the key of this measurement"
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if pipe is not None:
        tensor = torch.zeros(_SIZE // 4)
        while pipe.recv():
            pipe.send(_round(tensor))
    rpc.shutdown()


def _round(tensor: torch.Tensor) -> tuple[float, float]:
    for number in range(_CALLS // 10):
        rpc.rpc_sync("worker1", echo, (number,))
    calls = []
    for number in range(_CALLS):
        begin = time.perf_counter()
        rpc.rpc_sync("worker1", echo, (number,))
        calls.append(time.perf_counter() - begin)
    tensors = []
    for number in range(_TENSORS):
        tensor[-1] = number
        begin = time.perf_counter()
        assert rpc.rpc_sync("worker1", last, (tensor,)) == number
        tensors.append(time.perf_counter() - begin)
    return statistics.median(calls) * 1e6, _SIZE / statistics.median(tensors) / 1e9


def _spread(values: Sequence[float]) -> list[float]:
    return [round(each, 3) for each in (statistics.median(values), min(values), max(values))]


def compare(environments: Mapping[str, Mapping[str, str]], place: str, rounds: int) -> dict[str, Any]:
    """Compare two kinds of connections, given by the environment variables of their workers, in turns.

    Args:
        place: a directory where the workers of each kind meet.
    """
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for kind, environment in environments.items():
        ours, theirs = context.Pipe()
        pipes.append(ours)
        for rank, pipe in ((0, theirs), (1, None)):
            process = context.Process(
                target=serve, args=(os.path.join(place, f"meet-{kind}"), rank, environment, pipe)
            )
            process.start()
            processes.append(process)
    found: list[list[tuple[float, float]]] = []
    for turn in range(rounds + 1):  # the first is not counted: connections and memory are made in it
        row = []
        for pipe in pipes:
            pipe.send(True)
            row.append(pipe.recv())
        if turn:
            found.append(row)
    for pipe in pipes:
        pipe.send(False)
    for process in processes:
        process.join()
    plain, other = environments
    report: dict[str, Any] = {"cpus": os.cpu_count(), "python": platform.python_version(), "rounds": rounds}
    for which, name in enumerate(("call, us", "64 MiB, GB/s")):
        before, after = ([row[kind][which] for row in found] for kind in (0, 1))
        report[name] = {
            plain: _spread(before),
            other: _spread(after),
            f"{other} / {plain}": _spread([b / a for a, b in zip(before, after, strict=True)]),
        }
    return report


def rounds_of(arguments: Sequence[str] | None, what: str | None) -> int:
    """Read the command line of a benchmark like this one."""
    parser = argparse.ArgumentParser(description=str(what).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds: int = parser.parse_args(arguments).rounds
    return rounds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    rounds = rounds_of(arguments, __doc__)
    kinds = {"plain": {"ACTORRPC_INTEGRITY": "0"}, "sealed": {"ACTORRPC_INTEGRITY": "1"}}
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(compare(kinds, place, rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
