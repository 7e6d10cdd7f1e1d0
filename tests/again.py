"""Run the tests repeatedly, in portions, and record the outcome of each portion.

    python -m tests.again                 # the default layer once, in a new random order
    python -m tests.again --runs 10       # ten times
    python -m tests.again --beside 4      # while four processes use the processors
    python -m tests.again --slow          # the slow layer, folder by folder; continues where an earlier call ended
    python -m tests.again --table         # only show the recorded portions

Each portion (a whole run of the default layer, or one folder of the slow layer) adds a line to ``tests/runs.jsonl``: the
commit, the seed of the order, the number of passed tests, the names of failed tests, the elapsed time and the processor time
of all child processes. ``--for SECONDS`` starts no portion after that time. The status is 1 if a test of this call failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_RECORD_FILE = Path(__file__).with_name("runs.jsonl")
_COUNTS = re.compile(r"(\d+) (passed|failed|error|errors|skipped|xfailed|xpassed|deselected)")
_RED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_NO_TESTS_SELECTED = 5  # pytest's status where no test was selected


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.again", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1, help="number of runs of the whole layer")
    parser.add_argument("--slow", action="store_true", help="run the slow layer instead of the default one")
    parser.add_argument(
        "--beside", type=int, default=0, metavar="N", help="run N processes in busy loops meanwhile"
    )
    parser.add_argument(
        "--for", type=float, default=float("inf"), dest="seconds", help="start no portion after SECONDS"
    )
    parser.add_argument("--seed", type=int, help="seed of the order, instead of a random one")
    parser.add_argument("--table", action="store_true", help="only print the recorded portions")
    parser.add_argument("only", nargs="*", help="run only these files or folders")
    asked = parser.parse_args()
    red = False
    if not asked.table:
        until = time.monotonic() + asked.seconds
        with _spinning(asked.beside):
            for portion in _portions(asked):
                if time.monotonic() >= until:
                    break
                row = _run(portion, asked)
                red = red or bool(row["red"])
                with _RECORD_FILE.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(_line(row), flush=True)
    print(_table())
    return int(red)


def _portions(asked: argparse.Namespace) -> Iterator[list[str]]:
    for number in range(1, asked.runs + 1):
        if asked.only or not asked.slow:
            yield asked.only
            continue
        commit = _commit()
        for portion in _folders():
            done = [
                row
                for row in _rows()
                if row["layer"] == "slow" and row["commit"] == commit and row["what"] == " ".join(portion)
            ]
            if len(done) < number or "+" in commit:
                yield portion


def _folders() -> list[list[str]]:
    """Return the outermost folders with tests; all top-level test files are one portion."""
    top = _ROOT / "tests"
    # Folders ``programs`` below other test folders have programs that tests run; ``tests/programs`` has tests.
    found = top.rglob("test_*.py")
    folders = {path.parent for path in found if "programs" not in path.relative_to(top).parts[1:]}
    named = sorted(str(folder.relative_to(_ROOT)) for folder in folders - {top})
    # A folder inside another test folder runs with that folder.
    outer = [name for name in named if not any(name.startswith(other + "/") for other in named)]
    return [
        *([name] for name in outer),
        sorted(str(path.relative_to(_ROOT)) for path in top.glob("test_*.py")),
    ]


def _run(what: list[str], asked: argparse.Namespace) -> dict[str, Any]:
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(1 << 31)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "3",
        "--dist",
        "loadfile",
        "-q",
        f"--randomly-seed={seed}",
    ]
    command += ["-m", "slow and not gpu"] if asked.slow else []
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [*command, *what], cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        check=False, text=True, errors="replace",
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    counts: dict[str, int] = {}
    for number, kind in _COUNTS.findall(done.stdout.rstrip().rpartition("\n")[2]):
        counts[kind.rstrip("s") if kind == "errors" else kind] = int(number)
    red = sorted(set(_RED.findall(done.stdout)))
    if done.returncode not in (0, _NO_TESTS_SELECTED) and not red:
        red = [f"status {done.returncode}"]
    if red:
        log = Path(os.environ.get("TMPDIR", "/tmp")) / f"actorrpc-run-{seed}.log"
        log.write_text(done.stdout)
        print(f"{len(red)} red; what pytest printed: {log}", flush=True)
    return {
        "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "commit": _commit(),
        "layer": "slow" if asked.slow else "default",
        "what": " ".join(what),
        "beside": asked.beside,
        "seed": seed,
        "passed": counts.get("passed", 0),
        "skipped": counts.get("skipped", 0),
        "red": red,
        "seconds": round(time.monotonic() - began),
        "processor_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
    }


@contextlib.contextmanager
def _spinning(number: int) -> Iterator[None]:
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def _commit() -> str:
    """Return the checked-out commit, with a ``+`` if tracked files other than runs.jsonl differ from it."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/runs.jsonl")
    return commit + ("+" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _rows() -> list[dict[str, Any]]:
    if not _RECORD_FILE.exists():
        return []
    return [json.loads(line) for line in _RECORD_FILE.read_text().splitlines()]


def _line(row: dict[str, Any]) -> str:
    what = f"{row['layer']} {row['what']}".rstrip() + (f" beside {row['beside']}" if row["beside"] else "")
    red = f" RED: {', '.join(row['red'])}" if row["red"] else ""
    return (
        f"{row['when']} {row['commit']:9} {what:32} {row['passed']:5} passed {row['seconds']:5} s"
        f" {row['processor_seconds']:5} s of processors  seed {row['seed']}{red}"
    )


def _table() -> str:
    rows = _rows()
    red = sum(bool(row["red"]) for row in rows)
    return "\n".join([*map(_line, rows), f"{len(rows)} portions, {red} of them red"])


if __name__ == "__main__":
    sys.exit(main())
