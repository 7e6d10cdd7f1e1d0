"""Runs a suite of benchmarks: reads its flags, runs its sections in turn, and writes its report.

A quick or partial run writes files of another name, so that it never replaces the figures of a whole one.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench
from benchmarks.report import text, write_json
from benchmarks.rigs import Stable
from benchmarks.series import Results
from benchmarks.targets import Target

__all__ = ["Suite", "describe", "parse", "run"]

_RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True)
class Suite:
    """The benchmarks of ``python -m benchmarks.<name>``.

    Attributes:
        about: a description in one line.
        sections: the functions of the sections, by name, in order.
        targets: the targets.
        draw: writes the picture; raises ImportError if matplotlib is missing.
        quick: the help text of ``--quick``.
        rounds: how many turns each peer takes, and how many with ``--quick``.
        bench: the class of the object that the sections use.
        versions: returns further versions for the report.
    """

    name: str
    about: str
    sections: Mapping[str, Callable[[Any], None]]
    targets: Iterable[Target]
    draw: Callable[[Path, Results, str], None]
    quick: str
    rounds: tuple[int, int] = (5, 2)
    bench: type[Bench] = Bench
    versions: Callable[[], dict[str, str]] = dict


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Return the description of the machine and the run for the report."""
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


def _stolen() -> float:
    """Return the seconds of processor time that the host took from this machine so far."""
    with open("/proc/stat", encoding="ascii") as file:
        return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")


def parse(suite: Suite, arguments: list[str] | None) -> argparse.Namespace:
    """Read the flags."""
    many, few = suite.rounds
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{suite.name}", description=suite.about)
    parser.add_argument("--quick", action="store_true", help=suite.quick)
    names = ", ".join(suite.sections)
    parser.add_argument(
        "--only", nargs="+", choices=sorted(suite.sections), metavar="NAME", help=f"of {names}"
    )
    parser.add_argument("--rounds", type=int, help=f"turns each peer takes (default {many}, quick {few})")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="where to write (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.rounds is None:
        options.rounds = few if options.quick else many
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def run(suite: Suite, arguments: list[str] | None = None) -> int:
    """Run the sections, then report; an interrupted run reports what it has."""
    options = parse(suite, arguments)
    meta = describe(options) | suite.versions()
    began, stolen_before = time.monotonic(), _stolen()
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as scratch:
        stable = Stable(Path(scratch))
        bench = suite.bench(stable, rounds=options.rounds, quick=options.quick)
        try:
            for name, section in suite.sections.items():
                if options.only and name not in options.only:
                    continue
                bench.say(f"{time.monotonic() - began:5.0f} s  {name}")
                section(bench)
        except KeyboardInterrupt:
            bench.note("interrupted: what follows is missing")
        finally:
            stable.close()
    meta["seconds"] = round(time.monotonic() - began)
    meta["stolen by the host, s"] = round(_stolen() - stolen_before, 2)
    print(text(bench.results, meta, suite.targets))
    part = "-partial" if options.only else "-quick" if options.quick else ""
    target = options.out / f"{suite.name}{part}"
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(target.with_suffix(".json"), bench.results, meta, suite.targets)
    try:
        caption = f"{meta['machine']}; {meta['versions']}; {meta['date']}; medians of {options.rounds} rounds"
        suite.draw(target.with_suffix(".png"), bench.results, caption)
    except ImportError:
        bench.say("no picture: matplotlib is not installed")
    bench.say(f"written: {target}.json and .png")
    return 0
