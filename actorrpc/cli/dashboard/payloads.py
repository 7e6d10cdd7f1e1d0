"""The state of a group as data for the views of the page: plain values, bounded in size. No I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from actorrpc.cli.activity import shares
from actorrpc.cli.logs import Line
from actorrpc.cli.text import folded, say_call
from actorrpc.cli.views import Picture, objects_of
from actorrpc.observe.call_sums import BUCKETS, OWN_CALLS
from actorrpc.observe.model import ObservedActor, ObservedWorker

__all__ = ["SORTS", "actors", "calls", "logs", "memory", "nothing", "now", "stacks"]

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
