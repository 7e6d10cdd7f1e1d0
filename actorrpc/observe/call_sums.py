"""Sums over calls, by method: number, failures, total duration and a histogram of durations; for one worker and for a group.

The sums are computed from the flight recorder, which has a record of each finished call. :class:`CallSums` adds the new records
to the sums when the sums are read (the first time, all existing records), and then every quarter of a second until ``_KEEP_S``
seconds after the last read. Records that were overwritten before they were added are counted as dropped.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from actorrpc import _time
from actorrpc.agent.timers import Clock, Tick
from actorrpc.flight_recorder import CALLED, EXECUTED, KEPT, OWN, FlightRecorder, method_of

__all__ = ["BUCKETS", "OTHER", "OWN_CALLS", "CallSums", "CallTotals", "method_of"]

#: upper bounds of the histogram's buckets, in seconds; one more bucket without an upper bound follows
BUCKETS: Final = tuple(mantissa * 10.0**power for power in range(-5, 2) for mantissa in (1.0, 2.5, 5.0))
OTHER: Final = "_OTHER"
OWN_CALLS: Final = OWN.rstrip(".")  # stands for all calls that the package itself makes
_METHODS: Final = 200  # the most methods with sums of their own; further methods are summed up as OTHER
_LOOK_S: Final = 0.25
_KEEP_S: Final = 120.0


class CallSums:
    """The numbers, failures and durations of one worker's calls, summed up by method. Thread-safe.

    ``_lock`` guards the sums, and no other lock is taken under it.
    """

    def __init__(
        self, flight_recorder: FlightRecorder, clock: Clock, submit: Callable[[Callable[[], None]], object]
    ) -> None:
        self._flight_recorder = flight_recorder
        self._submit = submit
        self._lock = threading.Lock()
        self._next = 0
        self._rows: dict[tuple[str, str, bool], list[Any]] = {}
        self._methods: dict[tuple[str, str], str] = {}
        self._dropped = self._sent = self._received = 0
        self._asked = 0.0
        self._tick = Tick(clock, _LOOK_S, self._look)

    def read(self) -> dict[str, Any]:
        """Add the new records, and return the sums as plain values."""
        self._asked = _time.now()
        self._fold()
        self._tick.wake()
        with self._lock:
            return {
                "calls": [
                    [side, method, failed, row[0], row[1], list(row[2])]
                    for (side, method, failed), row in self._rows.items()
                ],
                "dropped": self._dropped,
                "sent": self._sent,
                "received": self._received,
            }

    def _look(self) -> bool:
        if _time.now() - self._asked > _KEEP_S:
            return False
        self._submit(self._fold)
        return True

    def _fold(self) -> None:
        with self._lock:
            records = self._flight_recorder.since(self._next, KEPT)
            if not records:
                return
            self._dropped += max(0, records[0][0] - self._next)
            self._next = records[-1][0] + 1
            for record in records:
                if record[1] == CALLED:
                    _, _, begun, ended, _, _, _, method, _, failed, _, sent, received = record
                    self._sent += sent
                    self._received += received
                    self._add("client", "", method, failed, ended - begun)
                elif record[1] == EXECUTED:
                    _, _, _, begun, ended, _, _, _, method, _, failed, actor = record
                    self._add("server", actor, method, failed, ended - begun)

    def _add(self, side: str, actor: str, method: str, failed: bool, seconds: float) -> None:
        name = self._methods.get((actor, method))
        if name is None:
            if len(self._methods) >= 100 * _METHODS:  # bounds the dict, to which each actor adds keys
                self._methods.clear()
            name = method_of(actor, method) if actor or not method.startswith(OWN) else OWN_CALLS
            known = {each for _, each, _ in self._rows}
            if name not in known and len(known) >= _METHODS:
                name = OTHER
            self._methods[actor, method] = name
        row = self._rows.get((side, name, failed))
        if row is None:
            row = self._rows[side, name, failed] = [0, 0.0, [0] * (len(BUCKETS) + 1)]
        row[0] += 1
        row[1] += seconds
        row[2][bisect_left(BUCKETS, seconds)] += 1


# -- sums of a group --------------------------------------------------------------------------------------------

_RUNS: Final = 4096  # the most workers with separate sums; beyond, the two oldest sums are added together

_SHAPE: Final[tuple[Any, ...]] = (str, str, bool, int, (int, float), list)
_Row = tuple[int, float, list[int]]


class CallTotals:
    """The sums over the calls of all workers that have ever answered. Not thread-safe.

    The sums of a worker are kept after it has left, because Prometheus treats a counter that decreases as reset to 0.
    """

    def __init__(self) -> None:
        self._runs: dict[str, dict[str, Any]] = {}

    def update(self, run: str, found: Mapping[str, Any]) -> None:
        """Store the sums in a worker's answer, in place of its earlier sums; ``run``: the worker's incarnation."""
        sums = found.get("metrics")
        if isinstance(sums, dict):
            self._runs.pop(run, None)
            self._runs[run] = sums
            if len(self._runs) > _RUNS:
                oldest, other = list(self._runs)[:2]
                self._runs[other] = _added(self._runs.pop(oldest), self._runs[other])

    def rows(self) -> dict[tuple[str, str, bool], _Row]:
        """Return ``(calls, seconds, calls in each bucket)`` by side, method and whether the calls failed."""
        found: dict[tuple[str, str, bool], _Row] = {}
        for sums in self._runs.values():
            for side, method, failed, count, seconds, buckets in _rows(sums):
                known = {each for _, each, _ in found}
                name = method if method in known or len(known) < _METHODS else OTHER
                had = found.get((side, name, failed), (0, 0.0, [0] * len(buckets)))
                both = [one + other for one, other in zip(had[2], buckets, strict=True)]
                found[side, name, failed] = (had[0] + count, had[1] + seconds, both)
        return found

    def total(self, name: str) -> int:
        """Return the total of ``sent``, ``received`` or ``dropped`` over all workers."""
        values = [sums.get(name) for sums in self._runs.values()]
        return sum(each for each in values if type(each) is int)


def _rows(sums: dict[str, Any]) -> Iterator[tuple[str, str, bool, int, float, list[int]]]:
    """Yield the well-formed rows of sums that another process has sent."""
    rows = sums.get("calls")
    for row in rows if isinstance(rows, list) else []:
        if (
            isinstance(row, list)
            and len(row) == 6
            and all(isinstance(each, kind) for each, kind in zip(row, _SHAPE, strict=True))
            and len(row[5]) == len(BUCKETS) + 1
            and all(type(each) is int for each in row[5])
        ):
            side, method, failed, count, seconds, buckets = row
            yield side, method[:200], failed, count, float(seconds), buckets


def _added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = CallTotals()
    both._runs = {"one": one, "other": other}
    names = ("sent", "received", "dropped")
    rows = [[*key, *row] for key, row in both.rows().items()]
    return {"calls": rows, **{name: both.total(name) for name in names}}
