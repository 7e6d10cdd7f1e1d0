"""What the view of the timeline is sent: the records of all workers, laid out in lanes, bounded. No I/O.

A worker's calls are one track, each of its actors is another one, and so is what else took a time; the package's own calls are
the last tracks. What overlaps in a track is in
several lanes of it. A slice is a row of figures, texts are named by their places in a table: there are many slices and few texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from actorrpc.flight_recorder import CALLED, EXECUTED, OWN, UNDER_WAY
from actorrpc.observe.tracing.trace import Recording

__all__ = ["SLICES", "share", "timeline"]

#: records of all workers in one answer: some 40 bytes each
SLICES: Final = 12_000

_LEAST: Final = 100  # records of a worker, however many workers there are
_ACTORS: Final = 12  # of a worker, that have tracks of their own
_LANES: Final = 10  # of a track; what overlaps more is drawn over each other
_TEXT: Final = 200
_CALLS: Final = "calls made"
_NOTES: Final = "restarts, backward passes"
_FUNCTIONS: Final = "functions"
_OWN_CALLS: Final = "internal calls made"
_OWN_FUNCTIONS: Final = "internal functions"


def share(workers: int, most: int = SLICES) -> int:
    """Return how many records each of so many workers is asked for."""
    return max(_LEAST, most // max(1, workers))


class _Texts:
    """Texts, each once."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        return self._places.setdefault(text[:_TEXT], len(self._places))

    def all(self) -> list[str]:
        return list(self._places)


def timeline(recordings: Iterable[Recording], seconds: float, most: int = SLICES) -> dict[str, Any]:
    """Return what is drawn.

    Args:
        seconds: what was over so long before the last moment is left out.
        most: slices; the oldest are left out.

    Returns:
        ``lanes``: ``[process, title, number in its track]`` of each; ``slices``: ``[lane, kind, begun, ended, text, failed,
        waited, other, unfinished]`` of each, by their beginning: times are microseconds since the first one, ``waited`` those in
        the mailbox before; ``other`` is the place of the execution of a call, or -1. What is ``unfinished`` ends where its worker
        was asked, and begins before 0 where it is older than the time that is shown.
    """
    found = list(recordings)
    there = [each for each in found if not each.why]
    last = max((_ended(row) + each.offset for each in there for row in each.records), default=0.0)
    for each in there:
        each.since(last - seconds)
    rows = sorted(
        ((each, row) for each in there for row in each.records),
        key=lambda one: _ended(one[1]) + one[0].offset,
    )
    left_out = max(0, len(rows) - most)
    rows = rows[left_out:]
    zero = min((row[2] + each.offset for each, row in rows if row[0] != UNDER_WAY), default=last)
    under_way = min((row[2] + each.offset for each, row in rows if row[0] == UNDER_WAY), default=last)
    zero = min(zero, max(under_way, last - seconds))
    lanes, placed = _placed(there, rows)
    texts = _Texts()
    order = sorted(range(len(rows)), key=lambda place: _span(*rows[place]))
    new_place = {old: new for new, old in enumerate(order)}
    executions = {
        (row[6], each.worker, row[5]): new_place[place]
        for place, (each, row) in enumerate(rows)
        if row[1] == EXECUTED
    }
    slices: list[list[Any]] = []
    arrows = 0
    for place in order:
        each, row = rows[place]
        other, waited, failed = -1, 0.0, False
        begun = row[2]
        if row[1] == CALLED:
            text, failed = row[7], row[9]
            other = executions.get((each.worker, row[5], row[4]), -1)
            arrows += other >= 0
        elif row[1] == EXECUTED:
            begun, waited = row[3], max(0.0, row[3] - row[2])
            text, failed = row[8], row[10]
        else:
            text = f"{row[4]} {row[5]}"
        start = each.offset - zero
        slices.append(
            [
                placed[place],
                row[1],
                round(1e6 * (begun + start)),
                round(1e6 * (max(begun, _ended(row)) + start)),
                texts.place(text),
                int(failed),
                round(1e6 * waited),
                other,
                int(row[0] == UNDER_WAY),
            ]
        )
    return {
        "problem": "",
        "processes": [
            {
                "name": each.worker[:_TEXT],
                "pid": each.pid,
                "more": each.dropped > 0,
            }
            for each in there
        ],
        "missing": [
            *(f"{each.worker}: {each.why}"[:_TEXT] for each in found if each.why),
            *(
                f"{each.worker}: its clock could not be compared"[:_TEXT]
                for each in there
                if each.error is None
            ),
        ][:_LEAST],
        "lanes": lanes,
        "texts": texts.all(),
        "slices": slices,
        "arrows": arrows,
        "left_out": left_out,
        "seconds": seconds,
        "clock_error": max((each.error for each in there if each.error is not None), default=0.0),
    }


def _ended(row: list[Any]) -> float:
    return float(row[4] if row[1] == EXECUTED else row[3])


def _placed(
    there: list[Recording], rows: list[tuple[Recording, list[Any]]]
) -> tuple[list[list[Any]], list[int]]:
    """Return the lanes, and in which of them each row is."""
    number = {id(each): place for place, each in enumerate(there)}
    counts: list[Counter[str]] = [Counter() for _ in there]
    for each, row in rows:
        if row[1] == EXECUTED:
            counts[number[id(each)]][row[11]] += 1
    known = [{actor for actor, _ in count.most_common(_ACTORS)} for count in counts]
    tracks: dict[tuple[int, int, str], list[int]] = {}
    for place, (each, row) in enumerate(rows):
        process = number[id(each)]
        if row[1] == CALLED:
            key = (process, 4, _OWN_CALLS) if row[7].startswith(OWN) else (process, 0, _CALLS)
        elif row[1] != EXECUTED:
            key = (process, 3, _NOTES)
        elif not row[11] and row[8].startswith(OWN):
            key = (process, 5, _OWN_FUNCTIONS)
        elif row[11] in known[process]:
            key = (process, 1, row[11] or _FUNCTIONS)
        else:
            key = (process, 2, f"{len(counts[process]) - _ACTORS} other actors")
        tracks.setdefault(key, []).append(place)
    lanes: list[list[Any]] = []
    placed = [0] * len(rows)
    for (process, _, title), members in sorted(tracks.items()):
        base = len(lanes)
        ends: list[float] = []
        members.sort(key=lambda place: _span(*rows[place]))
        for place in members:
            begun, ended = _span(*rows[place])
            lane = next((lane for lane, end in enumerate(ends) if end <= begun), len(ends))
            if lane == _LANES:
                lane = ends.index(min(ends))
            if lane == len(ends):
                ends.append(ended)
                lanes.append([process, title[:_TEXT], lane])
            else:
                ends[lane] = max(ends[lane], ended)
            placed[place] = base + lane
    return lanes, placed


def _span(of: Recording, row: list[Any]) -> tuple[float, float]:
    """Return from when to when a row takes room in its track: without what was waited in the mailbox."""
    return (row[3] if row[1] == EXECUTED else row[2]) + of.offset, _ended(row) + of.offset
