"""Helpers for clusters that workers join with ``python -m actorrpc.worker``."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actorrpc.rpc import workers
from tests import output as printed
from tests.cluster.drive import python, until
from tests.ports import free_port

__all__ = [
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

KEY = "a key for these tests, long enough"
DRIVER = """
import actorrpc, sys
with actorrpc.init(listen=sys.argv[1]) as context:
    actorrpc.on_member_change(lambda worker, old, new, reason: print(worker.name, "is", new, flush=True))
    print(context.address, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def joiner(
    address: str, *arguments: str, prints: str = "$.", **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a worker that joins the cluster, and kill it at the end.

    It may print when it joins and leaves, and lines that match the regular expression ``prints``.
    """
    process = python("-m", "actorrpc.worker", "--join", address, *arguments, env=environment, cwd="/")
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
    given = {"ACTORRPC_KEY": KEY, **environment}
    command = ("-c", DRIVER, f"tcp://127.0.0.1:{port}")
    with python(*command, env=given, stdin=subprocess.PIPE, stderr=None) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def run_ranks(
    script: Path, count: int, rank: str = "RANK", size: str = "WORLD_SIZE"
) -> tuple[list[int], list[tuple[str, str]]]:
    """Run a script in several processes, as a launcher with these variables does; return exit codes and outputs."""
    shared = {size: str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        python(str(script), env={**shared, rank: str(number)}, cwd=script.parent) for number in range(count)
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
