"""Measure actorrpc beside torch's RPC and the raw limits, all in turns in one run.

``python -m benchmarks.core [--quick] [--only NAME ...] [--rounds N] [--out DIR]`` prints tables and
writes ``core.json`` and ``core.png``. A quick or partial run writes ``core-quick`` or ``core-partial``, so
that it never replaces the figures of a whole one.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench
from benchmarks.chart import draw
from benchmarks.report import text, write_json
from benchmarks.rigs import Stable
from benchmarks.sections import SECTIONS

__all__ = ["main"]

RESULTS = Path(__file__).resolve().parent / "results"


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a reader must know of the machine and the run."""
    model = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{len(os.sched_getaffinity(0))} CPUs, {model}, Linux {platform.release()}",
        "versions": f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}",
        "load before": "{:.2f} {:.2f} {:.2f}".format(*os.getloadavg()),
        "rounds": options.rounds,
        "quick": options.quick,
    }


def stolen() -> float:
    """Return the seconds of processor time that the host took from this machine so far."""
    with open("/proc/stat", encoding="ascii") as file:
        return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.core", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes: under 90 seconds")
    parser.add_argument(
        "--only", nargs="+", choices=sorted(SECTIONS), metavar="NAME", help=f"of {', '.join(SECTIONS)}"
    )
    parser.add_argument("--rounds", type=int, help="turns each peer takes (default 7, quick 3)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.rounds is None:
        options.rounds = 3 if options.quick else 7
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
        bench = Bench(stable, rounds=options.rounds, quick=options.quick)
        try:
            for name, section in SECTIONS.items():
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
    print(text(bench.results, meta))
    name = "core-partial" if options.only else "core-quick" if options.quick else "core"
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / f"{name}.json", bench.results, meta)
    try:
        caption = f"{meta['machine']}; {meta['versions']}; {meta['date']}; medians of {options.rounds} rounds"
        draw(options.out / f"{name}.png", bench.results, caption)
    except ImportError:
        bench.say("no picture: matplotlib is not installed")
    bench.say(f"written: {options.out}/{name}.json and .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
