"""Compare actorrpc's distributed autograd and optimizer with torch's, in turns in one run.

``python -m benchmarks.autograd [--quick] [--only NAME ...] [--rounds N] [--out DIR]`` prints tables and writes
``autograd.json`` and ``autograd.png``. A quick or partial run writes ``autograd-quick`` or ``autograd-partial``.

``python -m benchmarks.autograd --breakdown`` says what a step consists of instead (``autograd_breakdown.py``).
"""

from __future__ import annotations

import sys

from benchmarks.autograd_breakdown import break_down
from benchmarks.autograd_chart import draw_autograd
from benchmarks.autograd_sections import AUTOGRAD_SECTIONS, GradientBench
from benchmarks.autograd_targets import AUTOGRAD_TARGETS
from benchmarks.run import Suite, run

__all__ = ["AUTOGRAD", "main"]

AUTOGRAD = Suite(
    name="autograd",
    about=(__doc__ or "").splitlines()[0],
    sections=AUTOGRAD_SECTIONS,
    targets=AUTOGRAD_TARGETS,
    draw=draw_autograd,
    quick="fewer rounds and steps, no TCP: under 2 minutes",
    bench=GradientBench,
)


def main(arguments: list[str] | None = None) -> int:
    """Run it."""
    if (sys.argv[1:] if arguments is None else arguments) == ["--breakdown"]:
        break_down()
        return 0
    return run(AUTOGRAD, arguments)


if __name__ == "__main__":
    sys.exit(main())
