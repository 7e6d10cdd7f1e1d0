"""Helpers for clusters that workers join with ``python -m actorrpc.worker``."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actorrpc.rpc import workers
from tests import output as printed
from tests.cluster.drive import until
from tests.ports import free_port

__all__ = [
    "CLEAN",
    "DRIVER",
    "KEY",
    "driver_process",
    "driver_to_end",
    "is_there",
    "joiner",
    "output",
    "run_ranks",
    "wait_for",
]

_ROOT = Path(__file__).resolve().parents[2]
KEY = "a key for these tests, long enough"
DRIVER = """
import actorrpc, sys
with actorrpc.init(listen=sys.argv[1]) as context:
    actorrpc.on_member_change(lambda worker, old, new, reason: print(worker.name, "is", new, flush=True))
    print(context.address, flush=True)
    sys.stdin.read()
"""
#: the environment without variables of launchers and of other tests
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("ACTORRPC_KEY", "TORCHELASTIC", "SLURM_", "OMPI_", "PMI_"))
    and name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
}


@contextlib.contextmanager
def joiner(
    address: str, *arguments: str, prints: str = "$.", **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a worker that joins the cluster, and kill it at the end.

    It may print when it joins and leaves, and lines that match the regular expression ``prints``.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "actorrpc.worker", "--join", address, *arguments],
        env={**CLEAN, "PYTHONPATH": str(_ROOT), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        _, err = process.communicate()
    printed.check(
        err,
        r"^worker '.*' has (joined|left|lost)|^worker '.*' waits for a driver: |another key",
        prints,
        what="a worker that joined",
    )


@contextlib.contextmanager
def driver_process(**environment: str) -> Iterator[str]:
    """Run a driver in another process; yield its address."""
    with driver_to_end(**environment) as (address, process):
        yield address
        process.communicate()
        assert process.returncode == 0


@contextlib.contextmanager
def driver_to_end(port: int = 0, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a driver in another process; yield its address and the process, and kill it at the end. It prints member changes."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, f"tcp://127.0.0.1:{port}"],
        env={**CLEAN, "PYTHONPATH": str(_ROOT), "ACTORRPC_KEY": KEY, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def run_ranks(
    script: Path, count: int, rank: str = "RANK", size: str = "WORLD_SIZE"
) -> tuple[list[int], list[tuple[str, str]]]:
    """Run a script in several processes, as a launcher with these variables does; return exit codes and outputs."""
    shared = {**CLEAN, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", size: str(count)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**shared, rank: str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=script.parent,
        )
        for number in range(count)
    ]
    said = [each.communicate() for each in ranks]
    return [each.returncode for each in ranks], said


def output(process: subprocess.Popen[Any]) -> tuple[int, str]:
    """Wait for the end of a process; return its exit code and its standard error."""
    _, err = process.communicate()
    return process.returncode, err


def is_there(name: str) -> bool:
    """Return whether a worker is in the cluster and alive."""
    return any(each.name == name and each.state == "alive" for each in workers())


def wait_for(*names: str) -> None:
    """Wait until workers have joined; bounded by the test's limit."""
    until(lambda: all(is_there(name) for name in names))
