"""Functions and actors that tests of the cluster run in workers; each worker imports this module, so it must be light."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from typing import Any

import torch

import actorrpc
from actorrpc import rpc
from actorrpc.actors.spec.actor_spec import ProcessSpec
from actorrpc.cluster.driver import serve
from tests.forks import exit_at_once

_kept: list[Any] = []


@actorrpc.remote
class Place:
    """An actor that says where it lives."""

    def where(self) -> str:
        return rpc.get_worker_info().name

    def make(self, options: dict[str, Any]) -> str:
        """Create another actor, and return where it lives."""
        return str(actorrpc.get(Place.options(**options).remote().where.remote()))


@actorrpc.remote
class Counter:
    """An actor with a checkpoint, which can move."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def add(self) -> int:
        self.count += 1
        return self.count

    def where(self) -> str:
        return rpc.get_worker_info().name

    def checkpoint(self) -> int:
        return self.count

    def restore(self, count: int) -> None:
        self.count = count


@actorrpc.remote(max_concurrency=2)
class Fixed:
    """An actor without a checkpoint, with a call that waits until another call opens the gate."""

    def __init__(self, on_stop: actorrpc.ActorHandle | None = None) -> None:
        self.gate = threading.Event()
        self._on_stop = on_stop

    def where(self) -> str:
        return rpc.get_worker_info().name

    def wait(self) -> str:
        self.gate.wait()
        return "finished"

    def open(self) -> None:
        self.gate.set()

    def on_stop(self) -> None:
        """Count the end of this actor."""
        if self._on_stop is not None:
            actorrpc.get(self._on_stop.add.remote())


def facts() -> dict[str, Any]:
    """Return facts about this process."""
    return {
        "pid": os.getpid(),
        "directory": os.getcwd(),
        "threads": torch.get_num_threads(),
        "environment": dict(os.environ),
        "random": (random.random(), torch.rand(1).item(), _numpy()),
        "names": sorted(thread.name for thread in threading.enumerate()),
        "main": vars(sys.modules["__main__"]).get("__file__"),
        "path": list(sys.path),
        "stdin": os.read(0, 1),
        "group": os.getpgid(0),
        "sigint": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
        "worker": rpc.get_worker_info().name,
        "frozen": gc.get_freeze_count() > 1000,
    }


def _numpy() -> float:
    import numpy

    return float(numpy.random.random())


def say(*lines: str, to: str = "stdout", end: str = "\n") -> None:
    """Print lines to standard output or error."""
    print(*lines, sep="\n", end=end, file=getattr(sys, to))
    getattr(sys, to).flush()


def leave_with(code: int) -> None:
    """End this process with an exit code, at once."""
    print("about to exit", file=sys.stderr, flush=True)
    exit_at_once(code)


def crash() -> None:
    """Crash in C."""
    ctypes.string_at(0)


def allocate(size: int) -> None:
    """Allocate and release a tensor."""
    torch.ones(size, dtype=torch.uint8)


def sleeper() -> int:
    """Start a process that sleeps, and return its id."""
    process = subprocess.Popen(["sleep", "1000"])
    _kept.append(process)
    return process.pid


def call(to: str, *chain: str) -> list[int]:
    """Return the process ids along a chain of workers."""
    found = rpc.rpc_sync(to, os.getpid) if not chain else rpc.rpc_sync(to, call, chain)
    return [os.getpid(), *(found if isinstance(found, list) else [found])]


def names() -> list[str]:
    """Return the names of all workers."""
    return [info.name for info in rpc.get_worker_infos()]


def spawn_another(label: str) -> str:
    """Start a process from a worker, and return its name."""
    driver = rpc.get_worker_info(0)
    info = rpc.rpc_sync(driver, serve, ("spawn", ProcessSpec(label=label), rpc.get_worker_info().name))
    return info.name


def try_init() -> str:
    """Return the error of an init() in a worker."""
    from actorrpc.cluster import init

    try:
        init()
    except RuntimeError as error:
        return str(error)
    return "no error"


def wait_for_ever() -> None:
    """Block until the process ends."""
    threading.Event().wait()
