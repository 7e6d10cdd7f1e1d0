"""The parts of a hop and of a training step: Python functions by purpose, system calls, and wake-ups, by phase.

Counted as in ``counts.py``, for both workers together. A phase is the difference of two operations: one that ends after the
phase, and one that ends before it. A wake-up is a thread that sleeps and continues; wake-ups are counted without the profiler.
"""

from __future__ import annotations

import json
import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

import actorrpc.autograd as dist_autograd
from actorrpc import rpc
from benchmarks import autograd_models as models
from benchmarks.counts import PEER, Count, Operation, count_all

__all__ = ["break_down", "part_of"]

_RESULTS: Final = Path(__file__).resolve().parent / "results" / "autograd-breakdown.json"
_TIMES: Final = 200  # for wake-ups

# Beginnings of the places of functions -> their purpose; the first match counts. Functions outside of the package are user code.
_PARTS: Final = (
    (("autograd/recorder.", "autograd/contexts.", "autograd/graph.receive", "autograd/graph.edge_of"), "recording"),
    (("autograd/graph.RecvFunction.forward", "autograd/graph._walk", "autograd/graph._reach"), "recording"),
    (("autograd/graph.", "autograd/local_pass."), "engine"),
    (("autograd/transport.", "serialization/", "wire/"), "encode"),
    (("autograd/",), "pass"),
    (("optim/",), "optimizer"),
    (("agent/timers.", "agent/scheduler.", "agent/threads.", "_time."), "wake-up"),
    (("transport/",), "system"),
    (("agent/", "rpc/", "futures.", "flight_recorder."), "calls"),
)  # fmt: skip
PARTS: Final = ("user code", *dict.fromkeys(part for _, part in _PARTS))


def part_of(function: str) -> str:
    """Return the purpose of a function, by its name in ``counts.py``."""
    for prefixes, part in _PARTS:
        if function.startswith(prefixes):
            return part
    return "encode" if function.startswith("<string>.") else "user code"  # named tuples: messages, frames


def _hop(until: str) -> Callable[[], Callable[[], object]]:
    def made() -> Callable[[], object]:
        tensor = torch.zeros(100, requires_grad=True)

        def run() -> None:
            with dist_autograd.context() as context:
                loss = rpc.rpc_sync(PEER, models.echo, (tensor,)).sum()
                if until != "forward":
                    dist_autograd.backward(context, [loss])

        return run

    return made


def _rnn(until: str) -> Callable[[], Callable[[], object]]:
    return lambda: models.rnn_step(PEER, words=7, width=3, layers=4, length=3, batch=5, until=until)


# The phases of each step, in order; the last is the whole step.
STEPS: Final[dict[str, dict[str, Operation]]] = {
    "hop": {until: Operation(_hop(until)) for until in ("forward", "backward")},
    "RNN step": {until: Operation(_rnn(until), 20) for until in ("forward", "backward", "step")},
}


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def _wake_ups(run: Callable[[], object]) -> float:
    before = _switches() + rpc.rpc_sync(PEER, _switches)
    for _ in range(_TIMES):
        run()
    return (_switches() + rpc.rpc_sync(PEER, _switches) - before) / _TIMES


def _parts(counted: Count) -> Counter[str]:
    found: Counter[str] = Counter()
    for side in ("caller", "callee"):
        for function, times in counted.names[side].items():
            found[part_of(function)] += times  # type: ignore[assignment]
            found["all"] += times  # type: ignore[assignment]
    found["kernel"] = counted.get("system calls", 0.0)  # type: ignore[assignment]
    found["switches"] = counted["switches"]  # type: ignore[assignment]
    return found


def break_down() -> None:
    """Count, print, and write the results."""
    operations = {f"{name}: {until}": each for name, steps in STEPS.items() for until, each in steps.items()}
    counted = count_all(operations, also={"switches": _wake_ups})
    columns = (*PARTS, "all", "kernel", "switches")
    print("Python functions of both workers; kernel: system calls; switches: threads that slept and go on")
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, steps in STEPS.items():
        print(f"{name:<10}" + "".join(f"{column:>10}" for column in columns))
        before: Counter[str] = Counter()
        phases: dict[str, Counter[str]] = {}
        for until in steps:
            total = _parts(counted[f"{name}: {until}"])
            phases[until] = Counter({column: total[column] - before[column] for column in columns})
            before = total
        phases["whole"] = before
        for phase, found in phases.items():
            print(f"{phase:>10}" + "".join(f"{found[column]:10.1f}" for column in columns))
        results[name] = {
            phase: {column: round(found[column], 1) for column in columns} for phase, found in phases.items()
        }
    _RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
