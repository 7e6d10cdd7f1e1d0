"""Helpers that run Python processes, a script as the driver of a cluster, or workers in the cluster of this process."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from actorrpc.actors.spec.actor_spec import ProcessSpec
from actorrpc.cluster.driver import Cluster, current_cluster
from actorrpc.cluster.provisioners.local import LocalCluster
from tests import output

__all__ = ["cluster", "engine", "environment", "python", "script", "until", "workers"]

_ROOT = Path(__file__).resolve().parents[2]
_HEAD = """
import operator, os, signal, sys, threading, time
from actorrpc import rpc
from actorrpc.actors.spec.actor_spec import ProcessSpec
from actorrpc.cluster import init
from actorrpc.cluster.driver import current_cluster
from tests.cluster import remotes

def spawn(label="Counter", **spec):
    return current_cluster().spawn(ProcessSpec(label=label, **spec)).wait(60).name
"""


_OF_LAUNCHERS = re.compile(
    "ACTORRPC_KEY|TORCHELASTIC|SLURM_|OMPI_|PMI_|(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$"
)


def environment(**more: str) -> dict[str, str]:
    """Return an environment for processes that import this checkout: without keys, and without variables of launchers."""
    kept = {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.match(name)}
    return {**kept, "PYTHONPATH": str(_ROOT), **more}


def python(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """Start Python in this environment, with its output in pipes; ``options`` are those of Popen."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment(**(env or {})), text=True, **{**streams, **options}
    )


def cluster() -> Cluster:
    """Return the cluster that this process drives."""
    found = current_cluster()
    assert found is not None
    return found


def engine() -> LocalCluster:
    """Return the embedded engine of that cluster."""
    found = cluster().engine
    assert isinstance(found, LocalCluster)
    return found


@contextlib.contextmanager
def workers(count: int = 1, label: str = "Counter", **spec: Any) -> Iterator[list[str]]:
    """Run workers in this process's cluster; kill them at the end."""
    futures = [cluster().start(ProcessSpec(label=label, **spec)) for _ in range(count)]
    names = [future.wait(50).name for future in futures]
    try:
        yield names
    finally:
        reports = [cluster().report(name) for name in names]
        for name in names:
            cluster().kill(name)
        for report in reports:
            report.wait(20)


@contextlib.contextmanager
def script(
    directory: Path, source: str, *arguments: str, prints: Sequence[str] = (), **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run a script in a separate process, with its output in pipes; ``prints`` has patterns of its allowed standard error."""
    path = directory / "script.py"
    path.write_text(textwrap.dedent(_HEAD) + textwrap.dedent(source))
    process = python(str(path), *arguments, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        _, err = process.communicate()
    output.check(err, *prints, what="the script")


def until(condition: Callable[[], Any]) -> None:
    """Poll until the condition is true; bounded by the test's limit."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)
