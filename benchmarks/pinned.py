"""Run the example ``reinforce.py`` unchanged, with each of its processes on the CPUs it is given.

``python -m benchmarks.pinned AGENT_CPUS OBSERVER_CPUS [flags of the example]``; the example's folder must
be on ``PYTHONPATH``, so that all its processes know its classes under the same name.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

__all__ = ["main", "pinned_worker"]

CPUS = "BENCHMARK_CPUS"


def pinned_worker(rank: int, args: Any) -> None:
    """Pin this process by its rank, then run a worker of the example."""
    agent, observers = os.environ[CPUS].split(";")
    os.sched_setaffinity(0, {int(cpu) for cpu in (observers if rank else agent).split(",")})
    example = importlib.import_module("reinforce")
    example.run_worker(rank, args)


def main(arguments: list[str]) -> int:
    """Start the example with workers that pin themselves; return its exit status."""
    agent, observers, *flags = arguments
    os.environ[CPUS] = f"{agent};{observers}"
    example: Any = importlib.import_module("reinforce")

    # Children import the example again, so they would otherwise run its original worker function.
    example.run_worker = pinned_worker
    status: int = example.main(flags)
    return status


if __name__ == "__main__":
    from benchmarks.pinned import main as imported_main  # so that children find the worker by this name

    sys.exit(imported_main(sys.argv[1:]))
