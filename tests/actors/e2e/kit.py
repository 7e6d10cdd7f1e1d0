"""The clusters and groups in which the end-to-end tests run, and the actors and gates that they share.

The tests are plain functions of a driver, which is this process. They run twice: on the embedded cluster, and as worker 0 of
an ``init_rpc`` group whose two other workers only serve.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

import actorrpc
from actorrpc import rpc
from actorrpc.testing import processes
from tests.ranks import run_group, start_server

__all__ = ["Gate", "Log", "alive", "group", "open_gate", "pass_gate", "row_of", "running", "until"]


def until(condition: Callable[[], Any]) -> None:
    """Poll until a condition holds; the test's time limit is the only bound."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)


def row_of(actor: Any) -> actorrpc.actors.api.ActorInfo:
    """Return the row of ``list_actors`` for an actor."""
    return next(row for row in actorrpc.list_actors() if row.actor_id == actor.actor_id)


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- gates in the file system: a thread that waits at a gate is in C code, where it cannot be interrupted ----


def pass_gate(path: str) -> str:
    """Wait until the gate is opened; return the word that open_gate() wrote."""
    with open(path) as file:
        return file.read()


def open_gate(path: Path, word: str = "go") -> None:
    """Wait until a thread waits at the gate, and let it pass.

    A cancelled reader may leave between open and read; the word is then lost.
    """
    with contextlib.suppress(BrokenPipeError), open(path, "w") as file:
        file.write(word)


# -- actors of general use -------------------------------------------------------------------------------------


@actorrpc.remote
class Log:
    """Keeps the lines that it is given."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def add(self, line: Any) -> int:
        self.lines.append(line)
        return len(self.lines)

    def all(self) -> list[Any]:
        return list(self.lines)


@actorrpc.remote
class Gate:
    """Holds callers of wait() until open() is called."""

    def __init__(self) -> None:
        import asyncio

        self.event = asyncio.Event()
        self.waiting = 0

    async def wait(self, _argument: Any = None) -> str:
        self.waiting += 1
        try:
            await self.event.wait()
        finally:
            self.waiting -= 1
        return "open"

    async def open(self) -> None:
        self.event.set()

    async def count(self) -> int:
        return self.waiting


# -- clusters and groups -------------------------------------------------------------------------------------------


def _serve(rank: int, world_size: int, store: str) -> None:
    """Join the group and serve until all workers have shut down."""
    rpc.init_rpc(
        f"worker{rank + 1}",
        rank=rank + 1,
        world_size=world_size + 1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}/store"),
    )
    rpc.shutdown()


@contextlib.contextmanager
def group(size: int = 3, may_die: tuple[int, ...] = ()) -> Iterator[None]:
    """Make this process worker 0 of an ``init_rpc`` group; the others are processes that serve."""
    start_server()
    store = tempfile.mkdtemp(prefix="store-", dir=processes.scratch())
    failed: list[BaseException] = []

    def others() -> None:
        try:
            # The time limit is for all tests of a module, which have limits of their own.
            run_group(
                _serve, size - 1, store, timeout=900, may_die=[rank - 1 for rank in may_die], leak_wait=10
            )
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=others, name="others")
    thread.start()
    try:
        rpc.init_rpc(
            "worker0",
            rank=0,
            world_size=size,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}/store"),
        )
        try:
            yield
            gc.collect()
        finally:
            rpc.shutdown(graceful=not may_die)
    finally:
        thread.join()
        shutil.rmtree(store, ignore_errors=True)
    if failed:
        raise failed[0]


@actorrpc.remote
def _nothing(number: int) -> int:
    return os.getpid()


@contextlib.contextmanager
def running(where: str) -> Iterator[None]:
    """Run the body on an embedded cluster or in a group, after the processes for tasks have started."""
    if where == "embedded":
        with actorrpc.init():
            assert len(set(actorrpc.get([_nothing.remote(n) for n in range(8)]))) >= 1
            yield
            gc.collect()
    else:
        with group():
            actorrpc.get([_nothing.remote(n) for n in range(8)])
            yield
