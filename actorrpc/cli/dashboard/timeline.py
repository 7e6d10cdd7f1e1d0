"""The data of the timeline view: the records of all workers, arranged in lanes, bounded in number. No I/O.

The calls that a worker makes are one track; its 12 busiest actors have a track each, and its other activities further tracks. The
package's own calls are the last tracks. A track has several lanes if its records overlap. A slice is a row of numbers, and texts
are indices into a table, because there are many slices and few different texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from actorrpc.flight_recorder import CALLED, EXECUTED
from actorrpc.observe.tracing.trace import Record, Recording

__all__ = ["SLICES", "share", "timeline"]

#: Greatest number of slices in one response; a slice takes some 40 bytes.
SLICES: Final = 12_000

_LEAST: Final = 100  # least number of records per worker, however many workers there are
_ACTORS: Final = 12  # greatest number of actors of a worker that have a track each
_LANES: Final = 10  # greatest number of lanes of a track; further overlapping records are drawn over others
_TEXT: Final = 200
_CALLS: Final = "calls made"
_NOTES: Final = "restarts, backward passes"
_FUNCTIONS: Final = "functions"
_OWN_CALLS: Final = "internal calls made"
_OWN_FUNCTIONS: Final = "internal functions"


def share(workers: int, most: int = SLICES) -> int:
    """Return how many records each of ``workers`` workers should send."""
    return max(_LEAST, most // max(1, workers))


@dataclass(slots=True)
class _Slice:
    """A record, with times on one clock.

    Attributes:
        process: the index of the record's worker in the list of workers that have answered.
        came: when the request of an execution was received; else ``begun``.
        execution: identifies an execution: the calling worker, the executing worker, and the call's number.
    """

    process: int
    record: Record
    came: float
    begun: float
    ended: float
    execution: tuple[str, str, int | str]
    lane: int = 0

    @classmethod
    def of(cls, process: int, recording: Recording, record: Record) -> _Slice:
        offset, whose = recording.offset, recording.worker
        ends = (record.peer, whose) if record.kind == EXECUTED else (whose, record.peer)
        came, begun, ended = record.came + offset, record.begun + offset, record.ended + offset
        return cls(process, record, came, begun, ended, (*ends, record.id))

    @property
    def room(self) -> tuple[float, float]:
        """The time span for which this record occupies its lane: without the wait in the mailbox."""
        return self.begun, self.ended

    def track(self, known: set[str], actors: int) -> tuple[int, int, str]:
        """Return the sort key of this record's track; ``known``: the actors that have tracks of their own."""
        record = self.record
        if record.kind == CALLED:
            return (self.process, 4, _OWN_CALLS) if record.is_internal else (self.process, 0, _CALLS)
        if record.kind != EXECUTED:
            return self.process, 3, _NOTES
        if record.is_internal:
            return self.process, 5, _OWN_FUNCTIONS
        if record.actor in known:
            return self.process, 1, record.actor or _FUNCTIONS
        return self.process, 2, f"{actors - _ACTORS} other actors"


def timeline(recordings: Iterable[Recording], seconds: float, most: int = SLICES) -> dict[str, Any]:
    """Return the lanes and slices of the view.

    Args:
        seconds: records that ended more than this time before the end of the last record are left out.
        most: the greatest number of slices; the oldest are left out.

    Returns:
        ``lanes``: a list of ``[process, title, number in its track]``. ``slices``: a list of ``[lane, kind, begun, ended, text,
        failed, waited, other, unfinished]``, ordered by ``begun``. Times are microseconds since the start of the view. ``waited``
        is the time in the mailbox. ``other`` is the index of the execution that belongs to a call, or -1. An ``unfinished`` slice
        ends when its worker sent the records; it begins before 0 if it is older than the time span.
    """
    found = list(recordings)
    there = [each for each in found if not each.why]
    last = max((record.ended + each.offset for each in there for record in each.records), default=0.0)
    for each in there:
        each.since(last - seconds)
    slices = [_Slice.of(number, each, record) for number, each in enumerate(there) for record in each.records]
    slices.sort(key=lambda each: each.ended)
    left_out = max(0, len(slices) - most)
    slices = slices[left_out:]
    lanes = _placed(slices, len(there))
    slices.sort(key=lambda each: each.room)
    zero = min((each.came for each in slices if not each.record.is_under_way), default=last)
    under_way = min((each.came for each in slices if each.record.is_under_way), default=last)
    zero = min(zero, max(under_way, last - seconds))
    texts: dict[str, int] = {}  # text -> its index
    executions = {each.execution: place for place, each in enumerate(slices) if each.record.kind == EXECUTED}
    rows = [
        [
            each.lane,
            each.record.kind,
            _us(each.begun - zero),
            _us(max(each.begun, each.ended) - zero),
            texts.setdefault(each.record.name[:_TEXT], len(texts)),
            int(each.record.failed),
            _us(max(0.0, each.begun - each.came)),
            executions.get(each.execution, -1) if each.record.kind == CALLED else -1,
            int(each.record.is_under_way),
        ]
        for each in slices
    ]
    unclear = [f"{each.worker}: its clock could not be compared" for each in there if each.error is None]
    missing = [*(f"{each.worker}: {each.why}" for each in found if each.why), *unclear]
    return {
        "problem": "",
        "processes": [
            {"name": each.worker[:_TEXT], "pid": each.pid, "more": each.dropped > 0} for each in there
        ],
        "missing": [each[:_TEXT] for each in missing[:_LEAST]],
        "lanes": lanes,
        "texts": list(texts),
        "slices": rows,
        "arrows": sum(row[7] >= 0 for row in rows),
        "left_out": left_out,
        "seconds": seconds,
        "clock_error": max((each.error for each in there if each.error is not None), default=0.0),
    }


def _us(seconds: float) -> int:
    return round(1e6 * seconds)


def _placed(slices: list[_Slice], processes: int) -> list[list[Any]]:
    """Put each slice into a lane; return the lanes."""
    counts: list[Counter[str]] = [Counter() for _ in range(processes)]
    for each in slices:
        if each.record.kind == EXECUTED:
            counts[each.process][each.record.actor] += 1
    known = [{actor for actor, _ in count.most_common(_ACTORS)} for count in counts]
    tracks: dict[tuple[int, int, str], list[_Slice]] = {}
    for each in slices:
        key = each.track(known[each.process], len(counts[each.process]))
        tracks.setdefault(key, []).append(each)
    lanes: list[list[Any]] = []
    for (process, _, title), members in sorted(tracks.items(), key=lambda each: each[0]):
        base = len(lanes)
        ends: list[float] = []
        for each in sorted(members, key=lambda each: each.room):
            lane = next((lane for lane, end in enumerate(ends) if end <= each.begun), len(ends))
            if lane == _LANES:
                lane = ends.index(min(ends))
            if lane == len(ends):
                ends.append(each.ended)
                lanes.append([process, title[:_TEXT], lane])
            else:
                ends[lane] = max(ends[lane], each.ended)
            each.lane = base + lane
    return lanes
