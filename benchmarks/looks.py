"""The time that it takes to read the state of a group of many processes: all alive, and with one stopped and one in C code.

``python -m benchmarks.looks [--workers N]`` starts a cluster of N processes, has ``actorrpc status``, ``actorrpc stack`` (each
with the start of its process) and ``actorrpc.state()`` look at it five times each, and writes medians, in seconds, to
``results/looks.json``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import actorrpc

__all__ = ["main"]

_RESULTS = Path(__file__).parent / "results" / "looks.json"
_ROUNDS = 5


@actorrpc.remote(num_cpus=0)
class Member:
    def pid(self) -> int:
        return os.getpid()

    def in_c(self, path: str) -> None:
        ctypes.PyDLL(None).open(path.encode(), os.O_RDONLY)  # the lock of the interpreter is kept meanwhile


def _command(name: str) -> Callable[[], object]:
    words = [sys.executable, "-m", "actorrpc", name, "--pid", str(os.getpid())]
    return lambda: subprocess.run(words, stdout=subprocess.DEVNULL, check=False)


def _median(look: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        look()
        times.append(time.perf_counter() - begun)
    return round(statistics.median(times), 3)


def _looks() -> dict[str, float]:
    return {
        "status": _median(_command("status")),
        "stack": _median(_command("stack")),
        "state()": _median(actorrpc.state),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.looks", description=__doc__)
    parser.add_argument("--workers", type=int, default=64, metavar="N")
    found = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory() as folder,
        # A long heartbeat, so that the stopped process is not declared dead during the measurement.
        actorrpc.init(num_cpus=1, log_to_driver=False, heartbeat=120.0),
    ):
        gate = os.path.join(folder, "gate")
        os.mkfifo(gate)
        members = [Member.remote() for _ in range(found.workers - 1)]
        pids = actorrpc.get([each.pid.remote() for each in members])
        report = {"workers": found.workers, "all well": _looks()}
        call = members[0].in_c.remote(gate)
        os.kill(pids[1], signal.SIGSTOP)
        while sum(each.state != "alive" for each in actorrpc.state().workers) != 2:
            time.sleep(0.1)
        report["one stopped, one in C"] = _looks()
        os.kill(pids[1], signal.SIGCONT)
        os.close(os.open(gate, os.O_WRONLY))
        actorrpc.get(call)
    _RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
