"""Compare the speed of two commits.

    python -m benchmarks.ab OLD NEW                          # all operations, about five minutes
    python -m benchmarks.ab HEAD~1 HEAD --only sync actor    # some of them
    python -m benchmarks.ab v0.2 . --out ab.json             # `.` is the working tree

Each process start runs three pairs of workers: OLD, OLD again, and NEW. Every round runs each operation in each pair, in an order
drawn anew, on one CPU (both workers on the same CPU) and on two. The figures are medians over all rounds of the ratio of NEW to
OLD within a round, with the interval in which the median lies with 95 % probability. `A/A` is the same ratio of OLD again to OLD:
a difference inside its interval is noise. Processor time is the sum over both workers; other programs disturb it less than wall
time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.ab_worker import OPERATIONS

__all__ = ["Comparison", "compare", "interval", "main", "ratios"]

_ROOT: Final = Path(__file__).resolve().parents[1]
_PLACEMENTS: Final = {"one CPU": (0, 0), "own CPUs": (0, 1)}
#: operation, placement, and `cpu` or `wall` -> pair -> microseconds per operation, a value per round
Comparison = dict[tuple[str, str, str], dict[str, list[float]]]


class _Pair:
    """A caller and a callee that run one checkout."""

    def __init__(self, checkout: Path) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(checkout), str(checkout / ".ab")))}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", "import ab_worker; ab_worker.call_main()"],
            env=environment,
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, operation: str, times: int, cpus: tuple[int, int]) -> dict[str, float]:
        """Run an operation; return the wall and the processor time in seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"operation": operation, "times": times, "cpus": cpus}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the caller ended with status {self._process.wait()}")
        found: dict[str, float] = json.loads(answer)
        return found

    def close(self) -> None:
        """End both workers."""
        self._process.communicate(timeout=60)


@contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    """Yield a folder with the package as it is in a commit, or in the working tree for ``.``."""
    with tempfile.TemporaryDirectory(prefix="ab-") as name:
        folder = Path(name)
        if commit == ".":
            shutil.copytree(_ROOT / "actorrpc", folder / "actorrpc")
        else:
            archive = subprocess.run(
                ["git", "archive", commit, "actorrpc"], cwd=_ROOT, stdout=subprocess.PIPE, check=True
            )
            subprocess.run(["tar", "-x", "-C", name], input=archive.stdout, check=True)
        (folder / ".ab").mkdir()
        shutil.copy(Path(__file__).with_name("ab_worker.py"), folder / ".ab")
        yield folder


def compare(
    old: str, new: str, operations: Sequence[str], *, starts: int, rounds: int, scale: float = 1.0
) -> Comparison:
    """Measure both commits in interleaved rounds.

    Args:
        starts: how often all processes are started anew.
        rounds: rounds per start.
        scale: factor on the number of runs per round.
    """
    found: Comparison = {}
    placements = {name: cpus for name, cpus in _PLACEMENTS.items() if max(cpus) < (os.cpu_count() or 1)}
    with ExitStack() as stack:
        before, after = (stack.enter_context(_checkout(commit)) for commit in (old, new))
        for _ in range(starts):
            pairs = {"old": _Pair(before), "old again": _Pair(before), "new": _Pair(after)}
            for _ in range(rounds):
                for operation in operations:
                    for placement, cpus in placements.items():
                        _, per_run, times = OPERATIONS[operation]
                        times = max(1, round(times * scale))
                        for name in random.sample(list(pairs), len(pairs)):
                            took = pairs[name].measure(operation, times, cpus)
                            for clock, seconds in took.items():
                                series = found.setdefault((operation, placement, clock), {})
                                series.setdefault(name, []).append(1e6 * seconds / (times * per_run))
            for pair in pairs.values():
                pair.close()
    return found


def ratios(series: Mapping[str, Sequence[float]], name: str) -> list[float]:
    """Return, for each round, the time of a pair as a multiple of OLD's."""
    return [mine / base for mine, base in zip(series[name], series["old"], strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the ends of the interval in which it lies with 95 % probability (from order statistics)."""
    ordered = sorted(values)
    half = 0.98 * len(ordered) ** 0.5  # 1.96 standard deviations of a binomial count with p = 1/2
    low = max(0, round(len(ordered) / 2 - half))
    high = min(len(ordered) - 1, round(len(ordered) / 2 + half))
    return statistics.median(ordered), ordered[low], ordered[high]


def _row(key: tuple[str, str, str], series: Mapping[str, Sequence[float]]) -> str:
    columns = []
    for name in ("new", "old again"):
        median, low, high = interval(ratios(series, name))
        columns.append(f"{median:5.3f} [{low:.3f}-{high:.3f}]")
    times = f"{statistics.median(series['old']):9.1f} {statistics.median(series['new']):9.1f}"
    return f"{key[0]:16} {key[1]:9} {key[2]:5} {times}   {columns[0]}   {columns[1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print a table, and write the figures where ``--out`` says."""
    parser = argparse.ArgumentParser(
        description="Compare the speed of two commits.", epilog="`.` is the working tree."
    )
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", help="a commit")
    parser.add_argument("--only", nargs="+", choices=list(OPERATIONS), default=list(OPERATIONS))
    parser.add_argument("--starts", type=int, default=3, help="process starts (3)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds per process start (10)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the runs per round (1)")
    parser.add_argument("--out", type=Path, help="write all values to this JSON file")
    options: Any = parser.parse_args(arguments)
    found = compare(
        options.old,
        options.new,
        options.only,
        starts=options.starts,
        rounds=options.rounds,
        scale=options.scale,
    )
    print(
        f"{'operation':16} {'placement':9} {'clock':5} {'old us':>9} {'new us':>9}   new / old             A/A"
    )
    for key, series in found.items():
        print(_row(key, series))
    if options.out is not None:
        rows = [{"series": key, "microseconds": series} for key, series in found.items()]
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
