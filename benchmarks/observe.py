"""What looking inside costs: calls with the flight recorder and without, and with spans that are not sampled, in turns.

``python -m benchmarks.observe [--rounds N]`` starts three pairs of workers, one of them with ``ACTORRPC_RECORDER=0`` and one with
``ACTORRPC_OTEL=1``, has them make the same calls in turns, and writes medians and ratios to ``results/observe.json``: ``ratio``
is that of the recorder, and ``otel_unsampled`` that of spans which are switched on and not sampled, each to the same without. On
an otherwise idle machine.
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
from actorrpc.rpc import spans

__all__ = ["main"]

_RESULTS = Path(__file__).parent / "results" / "observe.json"
_PAIRS = {"on": {}, "off": {"ACTORRPC_RECORDER": "0"}, "otel": {"ACTORRPC_OTEL": "1"}}
_CALLS = {"pipelined": 4000, "sync": 2000}


def _worker(rank: int, store: str, pair: str, pipe: Connection | None) -> None:
    os.environ.update(_PAIRS[pair])
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


def _of_no_span() -> float:
    """Return what it takes to see that a call is no span, in microseconds."""

    def send(
        peer: Any,
        function: Any,
        args: Any,
        kwargs: Any,
        timeout: float,
        *,
        future: Any = None,
        keep: Any = None,
        label: Any = None,
        mail: Any = None,
        header: Any = None,
    ) -> None:
        pass

    agent: Any = SimpleNamespace(call=send, ask=None)
    client: Any = spans._SpanClient(agent, spans._OtelApi())
    future = object()

    def took(call: Callable[..., Any]) -> float:
        return 10 * min(
            timeit.repeat(lambda: call(None, None, (), {}, 0.0, future=future), number=100_000, repeat=7)
        )

    return took(client.call) - took(send)


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


def _compared(times: list[float], without: list[float]) -> dict[str, float]:
    ratios = sorted(one / other for one, other in zip(times, without, strict=True))
    return {"ratio": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1]}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="print only")
    given = parser.parse_args(arguments)
    rounds = given.rounds
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        pipes: dict[str, Connection] = {}
        workers = []
        for pair in _PAIRS:
            ours, theirs = context.Pipe()
            pipes[pair] = ours
            for rank in range(2):
                about = (rank, f"{scratch}/{pair}", pair, None if rank else theirs)
                workers.append(context.Process(target=_worker, args=about))
                workers[-1].start()
        found: dict[str, dict[str, list[float]]] = {what: {pair: [] for pair in _PAIRS} for what in _CALLS}
        for turn in range(rounds + 1):
            for what, times in found.items():
                for pair in list(_PAIRS) if turn % 2 else reversed(_PAIRS):
                    pipes[pair].send(what)
                    took = pipes[pair].recv()
                    if turn:  # the first one warms up
                        times[pair].append(took)
        for pipe in pipes.values():
            pipe.send(None)
        for worker in workers:
            worker.join()
    results: dict[str, Any] = {"record_us": _of_a_record(), "no_span_us": _of_no_span()}
    for what, times in found.items():
        results[what] = {
            "on_us": statistics.median(times["on"]),
            "off_us": statistics.median(times["off"]),
            **_compared(times["on"], times["off"]),
            "otel_unsampled": _compared(times["otel"], times["on"]),
        }
    if not given.dry:
        _RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
