"""What looking inside costs: calls with the flight recorder and without, in turns.

``python -m benchmarks.observe [--rounds N]`` starts two pairs of workers, one of them with ``ACTORRPC_RECORDER=0``, has them make
the same calls in turns, and writes medians and ratios to ``results/observe.json``. On an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import operator
import os
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from actorrpc import rpc
from actorrpc.agent.calls import Call, Execution
from actorrpc.flight_recorder import FlightRecorder

__all__ = ["main"]

_RESULTS = Path(__file__).parent / "results" / "observe.json"
_CALLS = {"pipelined": 4000, "sync": 2000}


def _worker(rank: int, store: str, recorder: str, pipe: Connection | None) -> None:
    os.environ["ACTORRPC_RECORDER"] = recorder
    os.sched_setaffinity(0, {0})  # where the two sides of a pair run decides more than anything else
    rpc.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{store}"),
    )
    while pipe is not None and (what := pipe.recv()) is not None:
        pipe.send(_measured(rpc, what))
    rpc.shutdown()


def _measured(rpc: Any, what: str) -> float:
    """Make the calls; return microseconds for each."""
    count = _CALLS[what]
    begun = time.perf_counter()
    if what == "sync":
        for _ in range(count):
            rpc.rpc_sync("w1", operator.add, (1, 1))
    else:
        for future in [rpc.rpc_async("w1", operator.add, (1, 1)) for _ in range(count)]:
            future.wait()
    return 1e6 * (time.perf_counter() - begun) / count


def _of_a_record() -> dict[str, float]:
    """Return what it takes to write one record of each kind, in microseconds."""
    peer: Any = SimpleNamespace(name="w1")
    agent: Any = SimpleNamespace(flights=None)
    recorder = FlightRecorder()
    call = Call(agent, peer, 1, "add", 1.0, 0.0, 1, None, 1.0)
    call.frame = bytes(60)
    reply: Any = (3, 0, 1, 0.0, 1, b"", bytes(10))
    execution = Execution(peer, 1, 1.0, 1, 1.0, 1.0)
    execution.what = operator.add

    def took(run: Callable[[], Any]) -> float:
        return 10 * min(timeit.repeat(run, number=100_000, repeat=7))

    empty = took(lambda: None)
    return {
        "called": took(lambda: recorder.called(call, reply)) - empty,
        "executed": took(lambda: recorder.executed(execution, False)) - empty,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args(arguments).rounds
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        pipes: dict[str, Connection] = {}
        workers = []
        for recorder in ("1", "0"):
            ours, theirs = context.Pipe()
            pipes[recorder] = ours
            for rank in range(2):
                given = (rank, f"{scratch}/{recorder}", recorder, None if rank else theirs)
                workers.append(context.Process(target=_worker, args=given))
                workers[-1].start()
        found: dict[str, dict[str, list[float]]] = {what: {"1": [], "0": []} for what in _CALLS}
        for turn in range(rounds + 1):
            for what, times in found.items():
                for recorder in ("1", "0") if turn % 2 else ("0", "1"):
                    pipes[recorder].send(what)
                    took = pipes[recorder].recv()
                    if turn:  # the first one warms up
                        times[recorder].append(took)
        for pipe in pipes.values():
            pipe.send(None)
        for worker in workers:
            worker.join()
    results: dict[str, Any] = {"record_us": _of_a_record()}
    for what, times in found.items():
        ratios = sorted(on / off for on, off in zip(times["1"], times["0"], strict=True))
        results[what] = {
            "on_us": statistics.median(times["1"]),
            "off_us": statistics.median(times["0"]),
            "ratio": statistics.median(ratios),
            "lowest": ratios[0],
            "highest": ratios[-1],
        }
    _RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
