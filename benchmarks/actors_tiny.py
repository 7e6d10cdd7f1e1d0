"""The small actors of the benchmarks: plain classes, made into actors by each peer in its way.

This module does not import torch, so that peers whose processes start empty need not import it for these actors.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.actors_peers import peer_named

__all__ = ["Caller", "Kept", "Tiny", "cpu_seconds", "pin_process"]


def pin_process(cpus: Sequence[int]) -> None:
    """Pin all threads of this process, and the threads that they start, to these CPUs."""
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cpus)
        except ProcessLookupError:  # it ended meanwhile
            continue


def cpu_seconds() -> float:
    """Return the processor time this process has used, all threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Tiny:
    """An actor with next to no state."""

    def ping(self) -> int:
        """Answer a call without arguments."""
        return 1

    def pid(self) -> int:
        """Return the id of the process."""
        return os.getpid()

    def pin(self, cpus: list[int]) -> None:
        """Pin the process to these CPUs."""
        pin_process(cpus)

    def used(self) -> float:
        """Return the processor time that the process has used."""
        return cpu_seconds()


class Kept(Tiny):
    """An actor whose state outlives its process."""

    def __init__(self) -> None:
        self.answered = 0

    def ping(self) -> int:
        """Answer a call without arguments."""
        self.answered += 1
        return 1

    def checkpoint(self) -> int:
        """Return the state."""
        return self.answered

    def restore(self, answered: int) -> None:
        """Restore the state after a restart."""
        self.answered = answered


class Caller(Tiny):
    """An actor that calls another one as fast as it can."""

    def __init__(self, peer: str) -> None:
        self.peer = peer_named(peer)

    def drive(self, callee: Any, start_at: float, seconds: float, window: int) -> list[float]:
        """Call for some seconds, in windows or one by one; return how many calls and how long it took."""
        ping, get = self.peer.method(callee, "ping"), self.peer.get
        get(ping())
        time.sleep(max(0.0, start_at - time.monotonic()))
        calls, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            if window:
                self.peer.get_all([ping() for _ in range(window)])
                calls += window
            else:
                get(ping())
                calls += 1
        return [calls, elapsed]
