"""Measure actorrpc's actors beside Ray's and Monarch's, all in turns in one run.

``python -m benchmarks.actors [--quick] [--only NAME ...] [--rounds N] [--out DIR]`` prints tables and writes
``actors.json`` and ``actors.png``. A quick or partial run writes ``actors-quick`` or ``actors-partial``. Ray and Monarch
are found in this interpreter, or in the one that BENCHMARK_RAY_PYTHON and BENCHMARK_MONARCH_PYTHON name.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.actors_chart import draw_actors
from benchmarks.actors_sections import ACTOR_SECTIONS, PEERS
from benchmarks.actors_sessions import interpreter
from benchmarks.actors_targets import ACTOR_TARGETS
from benchmarks.bench import Bench
from benchmarks.core import RESULTS, describe, stolen
from benchmarks.report import text, write_json
from benchmarks.rigs import Stable

__all__ = ["main"]

_DISTRIBUTIONS = {"ray": "ray", "monarch": "torchmonarch"}


def versions() -> dict[str, str]:
    """Return the versions of those that are compared with."""
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


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.actors", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes: under 3 minutes")
    names = ", ".join(ACTOR_SECTIONS)
    parser.add_argument(
        "--only", nargs="+", choices=sorted(ACTOR_SECTIONS), metavar="NAME", help=f"of {names}"
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
    meta = describe(options) | versions()
    began, stolen_before = time.monotonic(), stolen()
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as scratch:
        stable = Stable(Path(scratch))
        bench = Bench(stable, rounds=options.rounds, quick=options.quick)
        try:
            for name, section in ACTOR_SECTIONS.items():
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
    print(text(bench.results, meta, ACTOR_TARGETS))
    name = "actors-partial" if options.only else "actors-quick" if options.quick else "actors"
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / f"{name}.json", bench.results, meta, ACTOR_TARGETS)
    try:
        caption = f"{meta['machine']}; {meta['versions']}; {meta['date']}; medians of {options.rounds} rounds"
        draw_actors(options.out / f"{name}.png", bench.results, caption)
    except ImportError:
        bench.say("no picture: matplotlib is not installed")
    bench.say(f"written: {options.out}/{name}.json and .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
