"""Workers that join a cluster from several hosts: processes of their own, and forks of one process per host (``--count``).

    python -m benchmarks.joins                    # 64 workers on four hosts; two minutes; writes results/joins.json
    python -m benchmarks.joins --workers 8 --hosts 2 --rounds 1 --output FILE

As root, with the command ``ip``, each host is a network namespace; otherwise, all processes use the loopback interface. The time
runs from the start of the first process until the driver, which was idle before, has registered all workers. Hosts share the
processors of one machine; on real hosts, the imports run at the same time. Memory is the private memory of all processes of the
workers while they idle.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

RESULTS = Path(__file__).resolve().parent / "results"
_ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 300.0
_DRIVER = """
import sys, time
import actorrpc
host, count = sys.argv[1], int(sys.argv[2])
with actorrpc.init(listen=f"tcp://{host}:0") as context:
    print(context.address, flush=True)
    while len(actorrpc.workers()) <= count:
        time.sleep(0.02)
    print(time.monotonic(), flush=True)
    sys.stdin.readline()
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def _hosts(count: int) -> Iterator[list[tuple[str, list[str]]]]:
    """Make hosts, and one more for the driver; yield the address of each, and the words before a command that runs on it."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield [("127.0.0.1", [])] * (count + 1)
        return
    token = f"joins{os.getpid()}"
    spaces = [f"{token}-{number}" for number in range(count + 1)]
    try:
        for name in (token, *spaces):
            _ip("netns", "add", name)
        _ip("-n", token, "link", "add", "bridge", "type", "bridge")
        _ip("-n", token, "link", "set", "bridge", "up")
        for number, name in enumerate(spaces, 1):
            ours, port = ("-n", name), f"port{number}"
            _ip(*ours, "link", "add", "eth", "type", "veth", "peer", "name", port, "netns", token)
            _ip("-n", token, "link", "set", port, "master", "bridge", "up")
            _ip(*ours, "address", "add", f"10.78.0.{number}/24", "dev", "eth")
            _ip(*ours, "link", "set", "eth", "up")
            _ip(*ours, "link", "set", "lo", "up")
        yield [(f"10.78.0.{number}", ["ip", "netns", "exec", name]) for number, name in enumerate(spaces, 1)]
    finally:
        for name in (*spaces, token):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _usage(parents: Sequence[subprocess.Popen[str]]) -> tuple[float, float]:
    """Return the processor time in seconds, and the private memory in MB, of processes and their children."""
    found = [each for p in parents for each in (psutil.Process(p.pid), *psutil.Process(p.pid).children(True))]
    cpu = sum(sum(each.cpu_times()[:2]) for each in found)
    return cpu, sum(each.memory_full_info().uss for each in found) / 1e6


def _wait_until_idle(process: subprocess.Popen[str]) -> None:
    """Wait until a process and its children have used hardly any processor time for two seconds."""
    until = time.monotonic() + _LIMIT_S
    used, idle = _usage([process])[0], 0
    while idle < 8 and time.monotonic() < until:
        time.sleep(0.25)
        before, used = used, _usage([process])[0]
        idle = idle + 1 if used - before < 0.025 else 0


def measure(hosts: int, workers: int, count: bool) -> dict[str, float]:
    """Let workers join; return how long it took, and what each worker used.

    Args:
        count: fork the workers of a host from one process; otherwise, start a process for each.
    """
    each = workers // hosts
    words = [["--count", str(each)]] if count else [[]] * each
    with _hosts(hosts) as made, tempfile.TemporaryDirectory() as directory:
        environment = {
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "ACTORRPC_KEY": secrets.token_hex(16),
            "ACTORRPC_RUNTIME_DIR": directory,
            "ACTORRPC_TRANSPORT": "tcp",
        }
        where, on = made[0]
        driver = subprocess.Popen(
            [*on, sys.executable, "-c", _DRIVER, where, str(workers)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert driver.stdout is not None
        address = driver.stdout.readline().strip()
        _wait_until_idle(driver)
        begun = time.monotonic()
        parents = [
            subprocess.Popen(
                [*on, sys.executable, "-m", "actorrpc.worker", "--join", address, "--timeout", "300", *more],
                env=environment,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for _, on in made[1:]
            for more in words
        ]
        try:
            ended = float(driver.stdout.readline())
            cpu, memory = _usage(parents)
        finally:
            driver.communicate("end\n", timeout=_LIMIT_S)
            for parent in parents:
                parent.wait(_LIMIT_S)
    return {
        "joined_s": ended - begun,
        "cpu_s_per_worker": cpu / workers,
        "private_mb_per_worker": memory / workers,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both ways in turns, print the medians, and write them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joins", description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forks-only", action="store_true", help="leave out processes of their own")
    parser.add_argument("--output", type=Path, default=RESULTS / "joins.json")
    found = parser.parse_args(arguments)
    rows: dict[str, list[dict[str, float]]] = {"count": [], "processes": []}
    for _ in range(found.rounds):
        for way in ("count",) if found.forks_only else ("count", "processes"):
            rows[way].append(measure(found.hosts, found.workers, way == "count"))
            print(way, {name: round(value, 3) for name, value in rows[way][-1].items()}, flush=True)
    report: dict[str, Any] = {
        "about": __doc__,
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "workers": found.workers,
        "hosts": found.hosts,
        "namespaces": os.geteuid() == 0 and shutil.which("ip") is not None,
        "median": {
            way: {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
            for way, rounds in rows.items()
            if rounds
        },
        "rounds": rows,
    }
    found.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report["median"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
