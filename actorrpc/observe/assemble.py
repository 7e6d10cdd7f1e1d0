"""Builds a :class:`GroupState` from the answers of workers, and from ``/proc`` for workers that do not answer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from actorrpc.observe import processes
from actorrpc.observe.findings import findings
from actorrpc.observe.model import GroupState, ObservedActor, ObservedConnection, ObservedWorker, made_of
from actorrpc.wire.identity import WorkerRecord, addresses_of_hosts

__all__ = ["Silent", "assemble", "worker_of"]

_HOLDERS: Final = 1000  # the most rows that are listed for one worker


class Silent:
    """Stands for the answer of a worker that has not answered.

    Attributes:
        state, reason: as in :class:`~actorrpc.observe.ObservedWorker`.
        figures: the fields about the worker's process from ``/proc``; see :func:`actorrpc.observe.processes.figures`.
        threads: the stacks of the worker's threads, if a signal handler has dumped them.
    """

    __slots__ = ("figures", "reason", "state", "threads")

    def __init__(self, state: str, reason: str, figures: dict[str, Any] | None = None) -> None:
        self.state = state
        self.reason = reason
        self.figures = figures or {}
        self.threads: list[dict[str, Any]] = []

    def dump(self, pid: int, until: float) -> None:
        """Make the process dump its stacks by a signal; on failure, append the cause to ``reason``."""
        found = processes.dump_stacks(pid, until)
        if isinstance(found, str):
            self.reason = f"{self.reason}; {found}"
        else:
            self.threads = found


def worker_of(record: WorkerRecord, found: dict[str, Any] | Silent, address: str = "") -> ObservedWorker:
    """Return the state of one worker.

    Args:
        found: the worker's answer, or the reason why there is no answer.
        address: the address of the worker's host.
    """
    row: dict[str, Any]
    if isinstance(found, Silent):
        row = {
            **found.figures,
            "state": found.state,
            "reason": found.reason,
            "threads": found.threads,
            "dumped": bool(found.threads),
        }
    else:
        process = found.get("process")
        row = {
            **(process if isinstance(process, dict) else {}),
            "threads": found.get("threads", ()),
            "through": found.get("through", ""),
            "holders": _holders(found),
        }
        if "error" in found:
            row |= {"state": "alive", "reason": f"it could not report its state: {found['error']}"}
        elif "limited" in found:
            row["reason"] = str(found["limited"])
    own = {"name": record.name, "rank": record.rank, "pid": record.pid, "address": address}
    host = (
        record.hostname or row.get("host") or address
    )  # a record that was made from an address has no host name
    return made_of(ObservedWorker, {**row, **own, "host": host})


def _holders(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Add up the rows of the same holder and class (each page, and each actor, has separate rows); the largest sums first."""
    rows: dict[tuple[str, str], list[int]] = {}
    for each in _rows(found, "holders"):
        references, size = each.get("references"), each.get("bytes")
        if type(references) is int and type(size) is int:
            row = rows.setdefault((str(each.get("holder")), str(each.get("what"))), [0, 0])
            row[0] += references
            row[1] += size
    most = sorted(rows.items(), key=lambda each: (-each[1][1], -each[1][0], each[0]))[:_HOLDERS]
    return [
        {"holder": holder, "what": what, "references": references, "bytes": size}
        for (holder, what), (references, size) in most
    ]


def assemble(
    answers: Iterable[tuple[WorkerRecord, dict[str, Any] | Silent]], took: float = 0.0
) -> GroupState:
    """Return the state of the group, with findings."""
    answers = sorted(answers, key=lambda each: (each[0].rank, each[0].name))
    hosted: dict[str, dict[str, Any]] = {}
    known: dict[str, dict[str, Any]] = {}
    handles: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for record, found in answers:
        if isinstance(found, Silent):
            continue
        for row in _rows(found, "actors"):
            hosted[str(row.get("instance"))] = {
                **row,
                "worker": record.name,
                "pid": record.pid,
                "answered": True,
            }
        for row in _rows(found, "supervised"):
            known[str(row.get("actor_id"))] = row
        for row in _rows(found, "holders"):
            if row.get("actor_id") and type(row.get("references")) is int:
                handles[str(row["actor_id"])][str(row.get("holder"))] += row["references"]
    actors: dict[str, ObservedActor] = {}
    for actor_id, row in known.items():
        life = hosted.pop(str(row.get("instance")), {})
        told = {name: life[name] for name in ("worker", "pid") if name in life}
        title = life.get("title") or _title(row)
        held = dict(handles.get(actor_id, ()))
        actors[actor_id] = made_of(ObservedActor, {**life, **row, **told, "title": title, "handles": held})
    for life in hosted.values():  # actors whose supervisors have not answered
        row = {**life, "state": "ALIVE" if life.get("state") == "alive" else "UNKNOWN"}
        actors.setdefault(str(life.get("actor_id")), made_of(ObservedActor, row))
    addresses = addresses_of_hosts(record for record, _ in answers)
    workers = _with_calls(
        [worker_of(record, found, addresses.get(record.host, "")) for record, found in answers]
    )
    state = GroupState(workers=workers, actors=tuple(actors[each] for each in sorted(actors)), took=took)
    return replace(state, findings=tuple(findings(state)))


def _with_calls(workers: list[ObservedWorker]) -> tuple[ObservedWorker, ...]:
    """Fill in the fields about calls to each worker from the answers of its callers, since the worker itself may not answer."""
    calls: defaultdict[str, list[ObservedConnection]] = defaultdict(list)
    for worker in workers:
        for each in worker.connections:
            if each.calls_out:
                calls[each.worker].append(each)
    found = []
    for worker in workers:
        made = calls.get(worker.name)
        if made:
            first = max(made, key=lambda each: each.oldest)
            worker = replace(
                worker,
                calls_to=sum(each.calls_out for each in made),
                oldest_call=first.oldest_call,
                oldest=first.oldest,
            )
        found.append(worker)
    return tuple(found)


def _rows(found: dict[str, Any], part: str) -> list[dict[str, Any]]:
    rows = found.get(part)
    return [each for each in rows if isinstance(each, dict)] if isinstance(rows, list) else []


def _title(row: dict[str, Any]) -> str:
    """Return the title of an actor, as messages name it."""
    name, kind = row.get("name"), row.get("class_name")
    return f"{kind}({name!r})" if name else f"{kind}#{str(row.get('actor_id'))[-4:]}"
