"""The command line: see the package's docstring."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from actorrpc.testing import processes
from tests import ranks
from tests.programs.generator import generate
from tests.programs.runner import run_seeds
from tests.programs.session import MODES, PRELUDE, Options, features_of


def _seeds(text: str) -> Sequence[int]:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> int:
    """Run or print the programs of the given seeds; return 1 if a program has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description="Run random programs.")
    parser.add_argument("--seeds", type=_seeds, default=range(100), help="FIRST-LAST, or one")
    parser.add_argument("--mode", choices=MODES, default="embedded")
    parser.add_argument("--source", action="store_true", help="print the programs, and run nothing")
    parser.add_argument("--renew", type=int, default=50, help="how many programs a cluster runs")
    parser.add_argument("--bound", type=float, default=30.0, help="seconds that a call may take")
    parser.add_argument(
        "--for", type=float, default=float("inf"), dest="seconds", help="begin nothing after so long"
    )
    parser.add_argument("--failures", type=int, default=5, help="end after so many failures")
    parser.add_argument("--switch-interval", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument(
        "--collect", type=int, default=0, metavar="ALLOCATIONS", help="a busy garbage collector"
    )
    asked = parser.parse_args()
    if asked.source:
        for seed in asked.seeds:
            print(f"# seed {seed}\n{PRELUDE}{generate(seed, features_of(asked.mode)).source}")
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = Options(asked.mode, asked.bound, collect=asked.collect, switch_interval=asked.switch_interval)
    processes.begin_session()
    ranks.remember_environment()
    began = time.monotonic()
    try:
        result = run_seeds(
            asked.seeds,
            options,
            asked.renew,
            asked.failures,
            began + asked.seconds,
            report=print,
        )
    finally:
        ranks.stop_server()
        processes.end_session()
    took = time.monotonic() - began
    print(
        f"{result.count} programs in {took:.0f} s ({result.count / took:.1f}/s), {len(result.failures)} failed"
    )
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
