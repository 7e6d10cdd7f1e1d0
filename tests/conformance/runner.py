"""Runs tests of the table on several servers at a time, and compares the outcomes."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.conformance.table import Expectation

__all__ = ["FINE", "LIMIT_S", "NO_GROUP", "SKIPS", "Server", "outcome_of", "run", "verdict"]

LIMIT_S = 60.0
NO_GROUP = 98  # exit code of a rank that passed without joining a group of actorrpc
SKIPS = range(72, 90)  # exit codes with which torch's tests report that this machine lacks a resource
# Tests of DDP hang at the end of a process group in about one of 50 runs, also on torch's own agent. They are run again.
_MAY_HANG = "ddp"
FINE = (0, NO_GROUP, *SKIPS)
_ROOT = Path(__file__).parents[2]
Result = dict[str, Any]


class Server:
    """A process that runs one test at a time."""

    def __init__(self, *, spawn: bool = False) -> None:
        command = [sys.executable, "-m", "tests.conformance.server", *(["--spawn"] if spawn else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environment.pop("ACTORRPC_DROP_IN", None)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            env=environment,
            text=True,
        )
        #: The tests that the installed torch has.
        self.names: list[str] = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server has ended with exit code {self._process.wait()}")
        return json.loads(line)

    def run(self, test: str, limit_s: float) -> Result:
        """Run a test and return its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{test}\t{limit_s}\n")
        self._process.stdin.flush()
        result: Result = self._answer()
        return result

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait()


def run(
    chosen: Sequence[Expectation], *, jobs: int, limit_s: float = LIMIT_S, spawn: bool = False
) -> Iterator[tuple[Expectation, Result]]:
    """Run tests, ``jobs`` at a time; yield each test with its result as it ends."""
    left: queue.SimpleQueue[Expectation | None] = queue.SimpleQueue()
    for each in [*chosen, *[None] * jobs]:
        left.put(each)
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        try:
            server = Server(spawn=spawn)
            try:
                while (each := left.get()) is not None:
                    result = server.run(each.test, limit_s)
                    if result["outcome"] == "hung" and each.category == _MAY_HANG:
                        result = server.run(each.test, limit_s)
                    done.put((each, result))
            finally:
                server.close()
        except Exception as error:
            done.put(error)

    threads = [threading.Thread(target=work) for _ in range(min(jobs, len(chosen)))]
    for thread in threads:
        thread.start()
    for _ in chosen:
        found = done.get()
        if isinstance(found, Exception):
            raise found
        yield found
    for thread in threads:
        thread.join()


def outcome_of(ranks: Sequence[int], *, late: bool = False) -> str:
    """Return the outcome of a test from the exit codes of all its ranks."""
    if set(ranks) <= {0, NO_GROUP}:
        return "passed"
    if set(ranks) <= set(SKIPS):
        return "skipped"
    return "hung" if late else "failed"


def verdict(expected: Expectation, result: Result) -> str:
    """Return a text that says how a result differs from the table, or an empty text."""
    outcome = result["outcome"]
    if expected.outcome == "fails":
        return "" if outcome in ("failed", "hung") else f"expected to fail, but {outcome}: update the table"
    if outcome != expected.outcome:
        return f"expected: {expected.outcome}; exit codes {result['ranks']}"
    if outcome == "passed" and result["group"] is not expected.group:
        return (
            "no rank was in a group of actorrpc"
            if expected.group
            else "a rank was in a group: update the table"
        )
    return ""
