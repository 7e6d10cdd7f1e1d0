"""Helpers that run a script as the driver of a cluster, or workers in the cluster of this process."""

from __future__ import annotations

import contextlib
import os
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

__all__ = ["cluster", "engine", "script", "until", "workers"]

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
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), **options.pop("env", {})}
    process = subprocess.Popen(
        [sys.executable, str(path), *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
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
