"""The state of a group as data for the views of the page: plain values, bounded in size. No I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from actorrpc.cli.logs import Line
from actorrpc.cli.text import folded, say_call
from actorrpc.cli.views import Picture, objects_of, shares
from actorrpc.flight_recorder import CALLED, EXECUTED
from actorrpc.observe.call_sums import BUCKETS, OWN_CALLS
from actorrpc.observe.model import ObservedActor, ObservedWorker
from actorrpc.observe.trace import Record, Recording

__all__ = [
    "SLICES",
    "SORTS",
    "actors",
    "calls",
    "logs",
    "memory",
    "nothing",
    "now",
    "records_each",
    "stacks",
    "timeline",
]

_WORKERS: Final = 256
_FINDINGS: Final = 50
_CLASSES: Final = 64
_CONTEXTS: Final = 50
_HOPS: Final = 200
_FOLDS: Final = 200
_SHOWN: Final = 12  # greatest number of threads and calls that are named for one stack
_FRAMES: Final = 60
_TEXT: Final = 2000
_OBJECTS: Final = 100  # greatest number of objects that are shown, and of rows of references
_METHODS: Final = 400

#: The columns by which actors may be sorted: largest values first, ``title`` from A to Z.
SORTS: Final = ("waiting", "oldest", "rate", "p50", "p99", "done", "title")
_FIGURES: Final[Mapping[str, Callable[[ObservedActor], float]]] = {
    "waiting": lambda each: each.waiting,
    "oldest": lambda each: each.oldest,
    "p50": lambda each: each.p50,
    "p99": lambda each: each.p99,
    "done": lambda each: each.calls_done,
}


def _figure(value: float) -> float | None:
    """Return a number for JSON; None if a worker has sent an infinite number or a NaN, which JSON does not have."""
    return round(value, 6) if math.isfinite(value) else None


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT else text[:_TEXT] + " ..."


def _fields(value: object, *names: str) -> dict[str, Any]:
    """Return attributes of an object by name, with texts of bounded length, and None for numbers that JSON does not have."""
    found = {name: getattr(value, name) for name in names}
    kinds: dict[type, Callable[[Any], Any]] = {str: _cut, float: _figure}
    return {name: kinds[type(each)](each) if type(each) in kinds else each for name, each in found.items()}


# -- now ---------------------------------------------------------------------------------------------------------


def nothing(number: int, problem: str) -> dict[str, Any]:
    """Return the data of the page's view *Now* for a group of which no worker has answered."""
    return {"number": number, "problem": _cut(problem), "workers": [], "findings": [], "classes": []}


def now(
    number: int, picture: Picture, before: Picture | None, shown: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the data of the page's view *Now*: workers, classes of actors, training, and findings.

    Args:
        before: the previous picture.
        shown: the first view of the previous picture, if ``picture`` has the same actors: its classes and counts are used again.
    """
    state, group = picture.state, picture.group
    counts = (
        Counter(each.worker for each in state.actors if each.worker and each.state != "DEAD")
        if shown is None
        else {each["name"]: each["actors"] for each in shown["workers"]}
    )
    share = shares([before.state], [state]) if before is not None else {}
    # Workers that are not alive come first, so that they are always shown.
    workers = sorted(state.workers, key=lambda each: each.state == "alive")[:_WORKERS]
    workers.sort(key=lambda each: (each.rank, each.name))
    return {
        "number": number,
        "problem": "",
        "what": group.what,
        "program": _cut(group.program),
        "pid": group.pids[0] if group.pids else 0,
        "took": _figure(state.took),
        "worker_count": len(state.workers),
        "actor_count": sum(each.state != "DEAD" for each in state.actors)
        if shown is None
        else shown["actor_count"],
        "workers": [
            _worker(each, share.get((each.name, each.pid)), counts.get(each.name, 0)) for each in workers
        ],
        "classes": _classes(state.actors) if shown is None else shown["classes"],
        "training": _training(state.workers),
        "wrong_count": sum(each.wrong for each in picture.findings),
        "findings": [
            _fields(each, "kind", "wrong", "what", "remedy") for each in picture.findings[:_FINDINGS]
        ],
    }


def _worker(worker: ObservedWorker, share: float | None, actor_count: int) -> dict[str, Any]:
    return {
        **_fields(worker, "name", "rank", "state", "reason", "pid", "host", "age", "memory", "descriptors"),
        "cpu": None if share is None else _figure(share),
        "buffers": worker.memory_pool.get("used", 0) + worker.memory_pool.get("kept", 0),
        "lent": sum(each.lent for each in worker.connections),
        "objects": worker.object_memory.get("held", 0),
        "references": worker.references.get("owned", 0),
        "held": worker.references.get("held", 0),
        "threads": worker.thread_count,
        "outgoing": worker.outgoing_count,
        "actors": actor_count,
    }


def _training(workers: Sequence[ObservedWorker]) -> dict[str, Any]:
    """Return the contexts of distributed autograd, and their messages: sender, receiver and number."""
    names = {str(each.rank): each.name for each in workers}
    hops: Counter[tuple[str, str]] = Counter()
    contexts: dict[str, dict[str, Any]] = {}
    for worker in workers:
        for seen in worker.contexts:
            row = contexts.setdefault(
                seen.context,
                {
                    "context": seen.context,
                    "origin": names.get(str(seen.origin), str(seen.origin)),
                    **dict.fromkeys(("workers", "messages", "leaves", "passes"), 0),
                    "idle": seen.idle,
                },
            )
            row["workers"] += 1
            row["messages"] += seen.sent
            row["leaves"] += seen.leaves
            row["passes"] += seen.passes
            row["idle"] = min(row["idle"], seen.idle)
            for rank, messages in seen.received.items():
                hops[names.get(rank, rank), worker.name] += messages
    rows = sorted(contexts.values(), key=lambda row: (-row["passes"], row["idle"]))[:_CONTEXTS]
    for row in rows:
        row["idle"] = _figure(row["idle"])
    return {
        "workers": [
            [each.name, each.autograd.get("contexts", 0), each.autograd.get("passes", 0)]
            for each in workers
            if each.autograd.get("contexts")
        ][:_WORKERS],
        "contexts": rows,
        "hops": [[sender, receiver, number] for (sender, receiver), number in hops.most_common(_HOPS)],
    }


def _classes(actors: Sequence[ObservedActor]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for actor in actors:
        row = rows.setdefault(
            actor.class_name,
            {
                "name": actor.class_name,
                **dict.fromkeys(("alive", "dead", "other", "waiting", "running"), 0),
                "oldest": 0.0,
            },
        )
        row["alive" if actor.state == "ALIVE" else "dead" if actor.state == "DEAD" else "other"] += 1
        row["waiting"] += actor.waiting
        row["running"] += len(actor.running)
        row["oldest"] = max(row["oldest"], actor.oldest)
    found = sorted(rows.values(), key=lambda row: (-row["waiting"], -row["alive"], row["name"]))[:_CLASSES]
    for row in found:
        row["oldest"] = _figure(row["oldest"])
    return found


# -- actors ------------------------------------------------------------------------------------------------------


def actors(
    picture: Picture | None, speed: Mapping[str, float], text: str, sort: str, first: int, most: int
) -> dict[str, Any]:
    """Return ``most`` rows of the table of actors, from row ``first`` on, and the numbers of actors and of matches.

    Args:
        speed: calls per second, by the actor's id.
        text: only actors whose title, class, worker, state or id contains this text.
        sort: one of :data:`SORTS`.
    """
    if picture is None:
        return {"total": 0, "matches": 0, "first": 0, "rows": []}
    text = text.lower()
    found = [
        each
        for each in picture.state.actors
        if not text
        or text in f"{each.title}\n{each.class_name}\n{each.worker}\n{each.state}\n{each.actor_id}".lower()
    ]
    if sort == "title":
        found.sort(key=lambda each: (each.title, each.actor_id))
    else:

        def rate(each: ObservedActor) -> float:
            return speed.get(each.actor_id, 0.0)

        figure = _FIGURES.get(sort, rate)
        # Actors with equal figures: running ones first, then idle ones, dead ones last.
        found.sort(key=lambda each: (-figure(each), each.state == "DEAD", -len(each.running), each.actor_id))
    first = min(first, len(found))
    return {
        "total": len(picture.state.actors),
        "matches": len(found),
        "first": first,
        "rows": [_actor(each, speed, picture.callers) for each in found[first : first + most]],
    }


def _actor(actor: ObservedActor, speed: Mapping[str, float], callers: Mapping[str, str]) -> dict[str, Any]:
    rate = speed.get(actor.actor_id)
    return {
        "id": actor.actor_id,
        **_fields(actor, "title", "state", "worker", "waiting", "restarts"),
        "class": actor.class_name,
        "oldest": _figure(actor.oldest) if actor.waiting else None,
        "rate": None if rate is None else _figure(rate),
        "p50": _figure(actor.p50) if actor.latest else None,
        "p99": _figure(actor.p99) if actor.latest else None,
        "done": actor.calls_done,
        "again": actor.max_restarts != 0,
        "runs": [_cut(say_call(actor.title, call, callers)) for call in actor.running[:3]],
        "running": len(actor.running),
        "death": _cut(actor.death_cause),
    }


# -- stacks ------------------------------------------------------------------------------------------------------


def stacks(picture: Picture) -> dict[str, Any]:
    """Return the stacks of all threads, equal stacks once."""
    state = picture.state
    folds = folded(state.workers, state.actors)
    return {
        "problem": "",
        "threads": sum(len(each.threads) for each in state.workers),
        "workers": len(state.workers),
        "silent": [
            _cut(f"worker {each.name} (pid {each.pid}) is {each.state}: {each.reason}")
            for each in state.workers
            if each.state != "alive"
        ],
        "left_out": max(0, len(folds) - _FOLDS),
        "folds": [
            {
                "threads": len(fold.where),
                "workers": len({worker.name for worker, _ in fold.where}),
                "who": [
                    f"{thread.name or 'a thread'} of {worker.name}" for worker, thread in fold.where[:_SHOWN]
                ],
                "calls": [
                    _cut(say_call(actor.title, call, picture.callers))
                    for actor, call, _ in fold.calls[:_SHOWN]
                ],
                "idle": fold.is_ours and not fold.calls,
                "frames": [[each.function, each.file, each.line] for each in reversed(fold.told[-_FRAMES:])],
            }
            for fold in folds[:_FOLDS]
        ],
        "coroutines": [
            _cut(say_call(each.title, call, picture.callers))
            for each in state.actors
            for call in each.running
            if not call.thread
        ][:_FOLDS],
    }


# -- logs --------------------------------------------------------------------------------------------------------


def logs(lines: Iterable[Line], matches: int, total: int, problem: str) -> dict[str, Any]:
    """Return the data of printed lines."""
    return {
        "problem": _cut(problem),
        "matches": matches,
        "total": total,
        "lines": [
            {"time": _figure(each.when), "error": each.is_error, **_fields(each, "pid", "label", "text")}
            for each in lines
        ],
    }


# -- calls -------------------------------------------------------------------------------------------------------

_Sums = Mapping[tuple[str, str, bool], tuple[int, float, list[int]]]


def memory(picture: Picture) -> dict[str, Any]:
    """Return the large objects with the workers that hold them, and which worker refers to values of which other worker."""
    objects = objects_of(picture.state.workers)
    rows = [(worker.name, each) for worker in picture.state.workers for each in worker.holders]
    rows.sort(key=lambda each: (-each[1].bytes, -each[1].references))
    return {
        "problem": "",
        "object_count": len(objects),
        "objects": [
            {
                **_fields(each, "label", "site", "bytes"),
                "holders": holders[:_SHOWN],
                "holder_count": len(holders),
            }
            for each, holders in objects[:_OBJECTS]
        ],
        "holder_count": len(rows),
        "holders": [
            {"owner": owner, **_fields(each, "holder", "what", "references", "bytes")}
            for owner, each in rows[:_OBJECTS]
        ],
    }


def calls(sums: _Sums, before: _Sums, seconds: float) -> list[dict[str, Any]]:
    """Return a row per side and method: number, duration and failures. The package's own methods come last.

    Percentiles are of the calls in the ``seconds`` between ``before`` and ``sums``; if there were none, of all calls.
    """
    rows: list[dict[str, Any]] = []
    for side, method in sorted({(side, method) for side, method, _ in sums}):
        count = failed = recent = 0
        buckets = [0] * (len(BUCKETS) + 1)
        late = list(buckets)
        for is_failure in (False, True):
            number, _, counted = sums.get((side, method, is_failure), (0, 0.0, []))
            old, _, old_counted = before.get((side, method, is_failure), (0, 0.0, []))
            count += number
            failed += number if is_failure else 0
            recent += number - old
            for place, each in enumerate(counted):
                buckets[place] += each
                late[place] += each - (old_counted[place] if old_counted else 0)
        told = late if recent > 0 else buckets
        rows.append(
            {
                "side": side,
                "method": method,
                "rate": _figure(recent / seconds) if seconds > 0 else None,
                "p50": percentile(told, 0.5),
                "p99": percentile(told, 0.99),
                "count": count,
                "failed": failed,
            }
        )
    rows.sort(
        key=lambda row: (
            row["method"] == OWN_CALLS,
            -row["failed"],
            -(row["rate"] or 0.0),
            -row["count"],
            row["method"],
        )
    )
    return rows[:_METHODS]


def percentile(buckets: Sequence[int], share: float) -> float | None:
    """Estimate a percentile: interpolate in the bucket that contains it; return None if there are no calls."""
    wanted = share * sum(buckets)
    if wanted <= 0:
        return None
    below = 0
    for place, number in enumerate(buckets[: len(BUCKETS)]):
        if number and below + number >= wanted:
            lower = BUCKETS[place - 1] if place else 0.0
            return round(lower + (BUCKETS[place] - lower) * (wanted - below) / number, 7)
        below += number
    return BUCKETS[-1]  # the true value may be larger: the last bucket has no upper bound


# -- the timeline: the records of all workers, arranged in lanes --------------------------------------------------
#
# The calls that a worker makes are one track; its 12 busiest actors have a track each, and its other activities further tracks.
# The package's own calls are the last tracks. A track has several lanes if its records overlap. A slice is a row of numbers, and
# texts are indices into a table, because there are many slices and few different texts.

#: Greatest number of slices in one response; a slice takes some 40 bytes.
SLICES: Final = 12_000

_LEAST: Final = 100  # least number of records per worker, however many workers there are
_TRACKS: Final = 12  # greatest number of actors of a worker that have a track each
_LANES: Final = 10  # greatest number of lanes of a track; further overlapping records are drawn over others
_LABEL: Final = 200
_CALLS: Final = "calls made"
_NOTES: Final = "restarts, backward passes"
_FUNCTIONS: Final = "functions"
_OWN_CALLS: Final = "internal calls made"
_OWN_FUNCTIONS: Final = "internal functions"


def records_each(workers: int, most: int = SLICES) -> int:
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
        """The time span from the begin to the end, for which this record occupies a lane. The wait in the mailbox is before."""
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
        return self.process, 2, f"{actors - _TRACKS} other actors"


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
            texts.setdefault(each.record.name[:_LABEL], len(texts)),
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
            {"name": each.worker[:_LABEL], "pid": each.pid, "more": each.dropped > 0} for each in there
        ],
        "missing": [each[:_LABEL] for each in missing[:_LEAST]],
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
    known = [{actor for actor, _ in count.most_common(_TRACKS)} for count in counts]
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
                lanes.append([process, title[:_LABEL], lane])
            else:
                ends[lane] = max(ends[lane], each.ended)
            each.lane = base + lane
    return lanes
