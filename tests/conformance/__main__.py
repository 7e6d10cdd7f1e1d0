"""The command: runs tests, and compares the outcomes with the table."""

from __future__ import annotations

import argparse
import collections
import os
import sys
import time

import torch

from tests.conformance import runner, table


def main() -> int:
    """Run the selected tests; return 0 if all outcomes are as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--category", action="append", help="only this category (may be given several times)")
    parser.add_argument("--test", action="append", help="only tests with this in their names")
    parser.add_argument("--jobs", type=int, default=2, help="how many tests run at a time (default 2)")
    parser.add_argument("--fast", action="store_true", help="only the part that runs on every change")
    parser.add_argument("--all", action="store_true", help="also tests that are expected to fail")
    parser.add_argument("--spawn", action="store_true", help="ranks in fresh processes instead of forks")
    parser.add_argument("--limit", type=float, default=runner.LIMIT_S, help="seconds that a test may take")
    parser.add_argument("--verbose", action="store_true", help="show the output of failing ranks")
    given = parser.parse_args()
    chosen = [
        each
        for each in table.read(torch.cuda.device_count())
        if (not given.category or each.category in given.category)
        and (not given.test or any(part in each.test for part in given.test))
        and (not given.fast or each.fast)
        and (given.all or given.test or each.outcome == "passed")
    ]
    started = time.monotonic()
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    wrong = 0
    for each, result in runner.run(chosen, jobs=given.jobs, limit_s=given.limit, spawn=given.spawn):
        outcome, verdict = result["outcome"], runner.verdict(each, result)
        counts[each.category][outcome] += 1
        if verdict:
            wrong += 1
        if verdict or outcome != "passed" or given.test:
            print(f"{outcome:8} {result['seconds']:6.2f} s  {each.test}  {verdict}", flush=True)
            if given.verbose:
                print(result["said"], flush=True)
    for category, found in sorted(counts.items()):
        print(f"{category:16}", ", ".join(f"{number} {name}" for name, number in sorted(found.items())))
    print(f"{len(chosen)} tests, {wrong} not as the table says, {time.monotonic() - started:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
