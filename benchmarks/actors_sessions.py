"""The driver's side: one session process for each peer, on the interpreter that has the peer's package."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bench import Bench, Member
from benchmarks.rigs import Peer, Rig, RigError, Worker

__all__ = ["Session", "interpreter", "sessions"]

# The variable that names an interpreter with a peer's package, if this interpreter does not have it.
_ELSEWHERE = {"ray": "BENCHMARK_RAY_PYTHON", "monarch": "BENCHMARK_MONARCH_PYTHON"}
_MODULE = "benchmarks.actors_scenarios"


@functools.cache
def interpreter(peer: str) -> str | None:
    """Return an interpreter that has a peer's package and torch, or ``None``."""
    if peer == "actorrpc":
        return sys.executable
    python = os.environ.get(_ELSEWHERE[peer]) or sys.executable
    if not Path(python).exists():
        return None
    look = f"import importlib.util as u, sys; sys.exit(None in map(u.find_spec, ({peer!r}, 'torch')))"
    found = subprocess.run([python, "-c", look], check=False, capture_output=True, timeout=60)
    return python if found.returncode == 0 else None


class Session(Rig):
    """One running session, with the interface of a rig of one worker."""

    __slots__ = ("module", "name")

    def __init__(self, name: str, worker: Worker, module: str = _MODULE) -> None:
        super().__init__(Peer(backend=name), [worker])
        self.name, self.pairs, self.module = name, 1, module

    def begin(self) -> None:
        """Make it import the scenarios."""
        self._all("begin", {"environment": {}, "module": self.module}, 120.0)

    def close(self, *, kill: bool = False) -> None:
        """Shut the session down, and kill all remaining processes of its cluster."""
        everything: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            everything = psutil.Process(self.workers[0].pid).children(recursive=True)
        super().close(kill=kill)
        _, alive = psutil.wait_procs(everything, timeout=5.0)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=5.0)


def _open(bench: Bench, peer: str, found: dict[Member, Rig | None], module: str) -> dict[str, float]:
    """Start a peer's session and cluster; ``found`` has it as soon as there is something to close."""
    python = interpreter(peer)
    member = Member(peer)
    found[member] = None
    if python is None:
        bench.note(f"{peer} is not installed here, and {_ELSEWHERE[peer]} names no interpreter that has it")
        return {}
    scratch = bench.stable.scratch / peer[0]
    scratch.mkdir(exist_ok=True)
    try:
        worker = bench.stable.solo(bench.placements["both"].callers, module, python)
        session = found[member] = Session(peer, worker, module)
        session.begin()
        return session.caller("start", peer=peer, scratch=str(scratch))
    except RigError as error:
        failed = found[member]
        if failed is not None:
            failed.broken = True
        bench.note(f"{peer} did not start: {str(error).splitlines()[-1]}; {bench.stable.news()}")
        return {}


@contextmanager
def sessions(
    bench: Bench, peers: tuple[str, ...], module: str = _MODULE
) -> Iterator[tuple[dict[Member, Rig | None], Any]]:
    """Run one session for each peer, all alive at the same time; also yields what their starts took.

    Args:
        module: has the scenarios.
    """
    found: dict[Member, Rig | None] = {}
    took: dict[str, dict[str, float]] = {}
    try:
        for peer in peers:
            took[peer] = _open(bench, peer, found, module)
        yield found, took
    finally:
        for session in found.values():
            if session is not None:
                session.close()
