"""A process that runs tests one after the other. It has imported all modules, but started no threads.

It reads lines ``test <tab> seconds`` and answers each with a line of JSON. Ranks are forked from it. With ``--spawn``, they
are new processes, in which the environment variable activates the drop-in, as for an unchanged program.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.conformance import runner, suite
from tests.forks import exit_at_once

_GRACE_S = 5.0  # from the first failure of a rank to the end of the others


def _start(test: str, rank: int, meeting: str, log: str, limit_s: float, spawn: bool) -> int:
    if spawn:
        command = [sys.executable, "-m", "tests.conformance.rank", test, str(rank), meeting, str(limit_s)]
        with open(log, "w") as out:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        child.returncode = 0  # waited for below
        return child.pid
    pid = os.fork()
    if pid:
        return pid
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        suite.run_rank(test, rank, meeting, limit_s)
    finally:
        exit_at_once(1)


def _exit_codes(pids: list[int], limit_s: float) -> dict[int, int]:
    """Wait for the ranks. Ranks that still run at the time limit, or some time after another rank has failed, are killed."""
    until = time.monotonic() + limit_s
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid] not in runner.FINE:
                        until = min(until, time.monotonic() + _GRACE_S)
        time.sleep(0.005)
        if time.monotonic() > until:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
            until = float("inf")
    return codes


def run(test: str, limit_s: float, spawn: bool) -> dict[str, object]:
    """Run one test; return its outcome, the exit code of every rank, and the output of failed ranks."""
    if not suite.has(test):
        return {"test": test, "outcome": "absent", "seconds": 0.0, "ranks": [], "group": False, "said": ""}
    started = time.monotonic()
    meeting = suite.fresh_file()
    pids: list[int] = []
    # Not a TemporaryDirectory, which every rank would remove at its exit.
    logs = tempfile.mkdtemp(prefix="arpc-conf-")
    try:
        files = [Path(logs, str(rank)) for rank in range(suite.world_size(test))]
        for rank, log in enumerate(files):
            pids.append(_start(test, rank, meeting, str(log), limit_s, spawn))
        codes = _exit_codes(pids, limit_s)
        seconds = time.monotonic() - started
        ranks = [codes[pid] for pid in pids]
        outcome = runner.outcome_of(ranks, late=seconds >= limit_s)
        said = ""
        if outcome in ("failed", "hung"):
            for rank, log in enumerate(files):
                if ranks[rank] not in runner.FINE:
                    said += f"--- rank {rank}, exit code {ranks[rank]}\n{log.read_text(errors='replace')[-20000:]}\n"
    finally:
        shutil.rmtree(logs)
        for left in glob.glob(f"{glob.escape(meeting)}*"):
            os.unlink(left)
    return {
        "test": test,
        "outcome": outcome,
        "seconds": round(seconds, 2),
        "ranks": ranks,
        "group": 0 in ranks,
        "said": said,
    }


def main() -> None:
    """Serve requests until the end of standard input."""
    spawn = "--spawn" in sys.argv
    assert threading.active_count() == 1, threading.enumerate()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write(json.dumps(suite.names()) + "\n")
    for line in sys.stdin:
        test, limit = line.rstrip("\n").split("\t")
        answers.write(json.dumps(run(test, float(limit), spawn)) + "\n")


if __name__ == "__main__":
    main()
