"""Sums over the calls of one worker, by method: how many, how many failed, how long, in which buckets.

Nothing is counted on the path of a call. The flight recorder has the calls anyway; :class:`CallSums` goes over what is new in it
when it is asked, and from the first time on every quarter of a second, until nobody has asked for ``_KEEP_S``. What the ring has
lost in between is counted as dropped.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Final

from actorrpc import _time
from actorrpc.agent.timers import Clock, Tick
from actorrpc.flight_recorder import CALLED, EXECUTED, KEPT, FlightRecorder

__all__ = ["BUCKETS", "OTHER", "CallSums", "method_of"]

#: upper bounds, in seconds; the last bucket has no bound
BUCKETS: Final = tuple(mantissa * 10.0**power for power in range(-5, 2) for mantissa in (1.0, 2.5, 5.0))
OTHER: Final = "_OTHER"
_METHODS: Final = 200  # are told apart; what comes after is one
_LOOK_S: Final = 0.25
_KEEP_S: Final = 120.0


def method_of(actor: str, method: str) -> str:
    """Return how metrics name a method: ``Class/method``; of a function its name alone. Actors have no part in it."""
    if actor:
        return f"{actor.partition('#')[0].partition('(')[0]}/{method}"
    kind, dot, name = method.rpartition(".")
    return f"{kind}/{name}" if dot and not kind.endswith("<locals>") else method


class CallSums:
    """The sums of one worker. Thread-safe: ``_lock`` guards them; it is a leaf."""

    def __init__(
        self, flights: FlightRecorder, clock: Clock, submit: Callable[[Callable[[], None]], object]
    ) -> None:
        self._flights = flights
        self._submit = submit
        self._lock = threading.Lock()
        self._next = flights.total
        self._rows: dict[tuple[str, str, bool], list[Any]] = {}
        self._methods: dict[tuple[str, str], str] = {}
        self._dropped = self._sent = self._received = 0
        self._asked = 0.0
        self._tick = Tick(clock, _LOOK_S, self._look)

    def read(self) -> dict[str, Any]:
        """Return the sums as plain values."""
        self._asked = _time.now()
        self._fold()
        self._tick.poke()
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
            records = self._flights.since(self._next, KEPT)
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
            if len(self._methods) >= 100 * _METHODS:  # as many as there are actors
                self._methods.clear()
            name = method_of(actor, method)
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
