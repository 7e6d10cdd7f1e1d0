"""The cost of observation: calls with and without the flight recorder, and with unsampled spans, in turns.

``python -m benchmarks.observe [--rounds N]`` starts two workers on one CPU, which switch the recorder and OpenTelemetry on and
off between portions of the same calls, because two pairs of processes would differ by some percent in any case. The time of a
portion is the processor time of both workers, which other processes do not lengthen. ``ratio`` is the median, over pairs of
portions, of the time with the recorder to the time without, with the interval in which it lies with 95 % probability.
``otel_unsampled`` is the same ratio of the recorder and unsampled spans to the recorder alone. Results are written to
``results/observe.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import operator
import os
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from actorrpc import rpc
from actorrpc.agent.calls import Call, Execution
from actorrpc.agent.context import current_worker
from actorrpc.agent.hooks import HookSet
from actorrpc.flight_recorder import FlightRecorder
from actorrpc.rpc import spans
from actorrpc.wire.frames import REPLY, Frame

__all__ = ["main"]

_RESULTS = Path(__file__).parent / "results" / "observe.json"
_WAYS = ("on", "off", "otel")
_CALLS = {"pipelined": 1000, "sync": 500}

_hooks: dict[str, HookSet] = {}


def _switch(way: str) -> float:
    """Switch recorder and spans of this worker on or off; return the processor seconds that it has used."""
    worker = current_worker()
    assert worker is not None
    agent = worker.agent
    if not _hooks:
        _hooks.update(otel=agent.hooks, on=HookSet(agent.flight_recorder), off=HookSet())
    agent.hooks = _hooks[way]
    return time.process_time()


def _worker(rank: int, store: str, pipe: Connection | None) -> None:
    os.environ["ACTORRPC_OTEL"] = "1"
    os.sched_setaffinity(0, {0})  # where the two sides run decides more than anything else
    rpc.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{store}"),
    )
    while pipe is not None and (asked := pipe.recv()) is not None:
        pipe.send(_measured(*asked))
    rpc.shutdown()


def _measured(what: str, way: str) -> float:
    """Make the calls; return the processor time of both sides per call, in microseconds."""
    count = _CALLS[what]
    begun = rpc.rpc_sync("w1", _switch, (way,)) + _switch(way)
    if what == "sync":
        for _ in range(count):
            rpc.rpc_sync("w1", operator.add, (1, 1))
    else:
        for future in [rpc.rpc_async("w1", operator.add, (1, 1)) for _ in range(count)]:
            future.wait()
    return 1e6 * (rpc.rpc_sync("w1", _switch, (way,)) + _switch(way) - begun) / count


def _of_no_span() -> float:
    """Return the time that an unsampled call spends on the check for a span, in microseconds."""
    client = spans._SpanClient(spans._OtelApi())
    call: Any = None
    return 10 * min(timeit.repeat(lambda: client.on_call(call, None, ()), number=100_000, repeat=7))


def _of_a_record() -> dict[str, float]:
    """Return the time to write one record of each kind, in microseconds."""
    peer: Any = SimpleNamespace(name="w1")
    agent: Any = SimpleNamespace(hooks=HookSet())
    recorder = FlightRecorder()
    call = Call(agent, peer, "add", 1.0, 0.0, 1, None, 1.0)
    call.frame = bytes(60)
    call.outcome = Frame(REPLY, 0, 1, 0.0, 1, b"", bytes(10))
    execution = Execution(None, peer, 1, 1.0, 1, 1.0)
    execution.what = operator.add

    def took(run: Callable[[], Any]) -> float:
        return 10 * min(timeit.repeat(run, number=100_000, repeat=7))

    empty = took(lambda: None)
    return {
        "called": took(lambda: recorder.on_answer(call, None)) - empty,
        "executed": took(lambda: recorder.on_end(execution, None)) - empty,
    }


def _compared(times: Sequence[float], without: Sequence[float]) -> dict[str, float]:
    """Return the median ratio of pairs, and the interval around it that the binomial distribution gives (95 %)."""
    ratios = sorted(one / other for one, other in zip(times, without, strict=True))
    aside = round(0.98 * math.sqrt(len(ratios)))
    middle = len(ratios) // 2
    return {
        "ratio": statistics.median(ratios),
        "from": ratios[max(0, middle - aside)],
        "to": ratios[min(len(ratios) - 1, middle + aside)],
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--dry", action="store_true", help="print only")
    given = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        pipe, theirs = context.Pipe()
        workers = [
            context.Process(target=_worker, args=(rank, f"{scratch}/store", None if rank else theirs))
            for rank in range(2)
        ]
        for worker in workers:
            worker.start()
        found: dict[str, dict[str, list[float]]] = {what: {way: [] for way in _WAYS} for what in _CALLS}
        for turn in range(given.rounds + 1):
            for what, times in found.items():
                for way in _WAYS if turn % 2 else reversed(_WAYS):
                    pipe.send((what, way))
                    took = pipe.recv()
                    if turn:  # the first one warms up
                        times[way].append(took)
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
    from benchmarks.observe import main as imported_main  # so that workers find their functions by this name

    imported_main()
