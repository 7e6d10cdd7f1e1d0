"""Compare actorrpc's actors with Ray's and Monarch's, in turns in one run.

``python -m benchmarks.actors [--quick] [--only NAME ...] [--rounds N] [--out DIR]`` prints tables and writes
``actors.json`` and ``actors.png``. A quick or partial run writes ``actors-quick`` or ``actors-partial``. Ray and Monarch
are found in this interpreter, or in the interpreters that BENCHMARK_RAY_PYTHON and BENCHMARK_MONARCH_PYTHON name.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.actors_chart import draw_actors
from benchmarks.actors_sections import ACTOR_SECTIONS, PEERS
from benchmarks.actors_sessions import interpreter
from benchmarks.actors_targets import ACTOR_TARGETS
from benchmarks.run import Suite, run

__all__ = ["ACTORS", "main"]

_DISTRIBUTIONS = {"ray": "ray", "monarch": "torchmonarch"}


def versions() -> dict[str, str]:
    """Return the versions of the other libraries."""
    found = {}
    for peer in PEERS:
        python = interpreter(peer)
        if peer in _DISTRIBUTIONS and python is not None:
            ask = f"import importlib.metadata as m; print(m.version({_DISTRIBUTIONS[peer]!r}))"
            done = subprocess.run(
                [python, "-c", ask], check=False, capture_output=True, text=True, timeout=60
            )
            found[peer] = done.stdout.strip() or "unknown"
    return found


ACTORS = Suite(
    name="actors",
    about=(__doc__ or "").splitlines()[0],
    sections=ACTOR_SECTIONS,
    targets=ACTOR_TARGETS,
    draw=draw_actors,
    quick="fewer rounds and sizes: under 3 minutes",
    versions=versions,
)


def main(arguments: list[str] | None = None) -> int:
    """Run it."""
    return run(ACTORS, arguments)


if __name__ == "__main__":
    sys.exit(main())
