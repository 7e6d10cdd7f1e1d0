"""Processor time and wake-ups of other processes, read from ``/proc`` without disturbing them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ["Sample", "difference", "sample"]

# thread id -> (nanoseconds on a processor, how often it was put on one)
Sample = dict[int, tuple[int, int]]


def sample(pids: Iterable[int]) -> Sample:
    """Return what every thread of these processes has used so far."""
    found: Sample = {}
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                running, _, slices = (task / "schedstat").read_text(encoding="ascii").split()
            except OSError:  # the thread ended while we looked
                continue
            found[int(task.name)] = (int(running), int(slices))
    return found


def difference(before: Sample, after: Sample, seconds: float) -> dict[str, float]:
    """Return microseconds of processor time and wake-ups per second between two samples.

    A thread that ended in between counts as one wake-up: it cannot have ended without.
    """
    nanoseconds = wakes = 0
    for thread, (running, slices) in after.items():
        early = before.get(thread, (0, 0))
        nanoseconds += running - early[0]
        wakes += slices - early[1]
    wakes += sum(thread not in after for thread in before)
    return {"cpu_idle": nanoseconds / 1e3 / seconds, "wakes": wakes / seconds}
