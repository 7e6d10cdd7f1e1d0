"""Measure actorrpc's distributed autograd and optimizer beside torch's, in turns in one run.

``python -m benchmarks.autograd [--quick] [--only NAME ...] [--rounds N] [--out DIR]`` prints tables and writes
``autograd.json`` and ``autograd.png``. A quick or partial run writes ``autograd-quick`` or ``autograd-partial``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.autograd_chart import draw_autograd
from benchmarks.autograd_sections import AUTOGRAD_SECTIONS, GradientBench
from benchmarks.autograd_targets import AUTOGRAD_TARGETS
from benchmarks.core import RESULTS, describe, stolen
from benchmarks.report import text, write_json
from benchmarks.rigs import Stable

__all__ = ["main"]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.autograd", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds and steps, no TCP: under 2 minutes"
    )
    names = ", ".join(AUTOGRAD_SECTIONS)
    parser.add_argument(
        "--only", nargs="+", choices=sorted(AUTOGRAD_SECTIONS), metavar="NAME", help=f"of {names}"
    )
    parser.add_argument("--rounds", type=int, help="turns each peer takes (default 5, quick 2)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.rounds is None:
        options.rounds = 2 if options.quick else 5
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the sections, then report; an interrupted run reports what it has."""
    options = parse(arguments)
    meta = describe(options)
    began, stolen_before = time.monotonic(), stolen()
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        stable = Stable(Path(scratch))
        bench = GradientBench(stable, rounds=options.rounds, quick=options.quick)
        try:
            for name, section in AUTOGRAD_SECTIONS.items():
                if options.only and name not in options.only:
                    continue
                bench.say(f"{time.monotonic() - began:5.0f} s  {name}")
                section(bench)
        except KeyboardInterrupt:
            bench.note("interrupted: what follows is missing")
        finally:
            stable.close()
    meta["seconds"] = round(time.monotonic() - began)
    meta["stolen by the host, s"] = round(stolen() - stolen_before, 2)
    print(text(bench.results, meta, AUTOGRAD_TARGETS))
    name = "autograd-partial" if options.only else "autograd-quick" if options.quick else "autograd"
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / f"{name}.json", bench.results, meta, AUTOGRAD_TARGETS)
    try:
        caption = f"{meta['machine']}; {meta['versions']}; {meta['date']}; medians of {options.rounds} rounds"
        draw_autograd(options.out / f"{name}.png", bench.results, caption)
    except ImportError:
        bench.say("no picture: matplotlib is not installed")
    bench.say(f"written: {options.out}/{name}.json and .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
