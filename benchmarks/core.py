"""Compare actorrpc with torch's RPC and the raw limits, in turns in one run.

``python -m benchmarks.core [--quick] [--only NAME ...] [--rounds N] [--out DIR]`` prints tables and
writes ``core.json`` and ``core.png``. A quick or partial run writes ``core-quick`` or ``core-partial``.
"""

from __future__ import annotations

import sys

from benchmarks.chart import draw
from benchmarks.run import Suite, run
from benchmarks.sections import SECTIONS
from benchmarks.targets import TARGETS

__all__ = ["CORE", "main"]

CORE = Suite(
    name="core",
    about=(__doc__ or "").splitlines()[0],
    sections=SECTIONS,
    targets=TARGETS,
    draw=draw,
    quick="fewer rounds and sizes: under 90 seconds",
    rounds=(7, 3),
)


def main(arguments: list[str] | None = None) -> int:
    """Run it."""
    return run(CORE, arguments)


if __name__ == "__main__":
    sys.exit(main())
