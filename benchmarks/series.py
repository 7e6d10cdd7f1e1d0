"""Series of measured values, their medians and spreads, and ratios taken round by round.

Pure: no I/O, no clock. A value that could not be measured is ``None`` and keeps its place, so that
the n-th values of two series always come from the same round.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Key", "Results", "Summary", "percentile", "ratio", "summarise"]


def percentile(sorted_values: Sequence[int], share: float) -> float:
    """Return the value below which ``share`` of the sorted values lie."""
    return float(sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))])


class Key(NamedTuple):
    """What was measured; together with a peer's name it names one series."""

    section: str
    case: str
    transport: str
    placement: str
    metric: str


class Summary(NamedTuple):
    """The median of a series and the ends of its spread."""

    median: float
    low: float
    high: float
    rounds: int


def summarise(values: Iterable[float | None]) -> Summary | None:
    """Return median and spread of the measured values; ``None`` if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Summary(statistics.median(known), min(known), max(known), len(known))


def ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float | None]:
    """Return ours / theirs for each round that has both."""
    return [
        None if mine is None or other is None or other == 0 else mine / other
        for mine, other in zip(ours, theirs, strict=False)
    ]


@dataclass(slots=True)
class Results:
    """Every series of one run: key -> peer -> one value per round."""

    series: dict[Key, dict[str, list[float | None]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, key: Key, peer: str, value: float | None) -> None:
        """Append the value of the next round."""
        self.series.setdefault(key, {}).setdefault(peer, []).append(value)

    def values(self, key: Key, peer: str) -> list[float | None]:
        """Return a series; empty where it was not measured."""
        return self.series.get(key, {}).get(peer, [])

    def sections(self) -> Iterator[str]:
        """Yield the sections in the order in which they were measured."""
        yield from dict.fromkeys(key.section for key in self.series)
