"""The activity of workers and actors between two reads of a group's state, and the tables of ``top``. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from actorrpc.cli.text import amount, figure, known, latencies, runs, span
from actorrpc.observe.model import GroupState, ObservedActor, ObservedWorker

__all__ = [
    "ACTOR_COLUMNS",
    "WORKER_COLUMNS",
    "ActorActivity",
    "Column",
    "WorkerActivity",
    "rates",
    "rows",
    "shares",
]


def rates(before: Iterable[GroupState], after: Iterable[GroupState]) -> dict[str, float]:
    """Return the calls per second of each actor, by its id; without actors that are new or were restarted since ``before``."""
    old = {each.actor_id: each for state in before for each in state.actors}
    found = {}
    for state in after:
        for actor in state.actors:
            then = old.get(actor.actor_id)
            if then is not None and actor.age > then.age and actor.calls_done >= then.calls_done:
                found[actor.actor_id] = (actor.calls_done - then.calls_done) / (actor.age - then.age)
    return found


def shares(before: Iterable[GroupState], after: Iterable[GroupState]) -> dict[tuple[str, int], float]:
    """Return each worker's use of the processor between two reads, in percent of one processor, by name and process id."""
    old = {(each.name, each.pid): each for state in before for each in state.workers}
    found = {}
    for state in after:
        for worker in state.workers:
            then = old.get((worker.name, worker.pid))
            if then is not None and worker.age > then.age:
                found[worker.name, worker.pid] = 100 * (worker.cpu - then.cpu) / (worker.age - then.age)
    return found


@dataclass(frozen=True, slots=True)
class WorkerActivity:
    """A worker and ``share``, its use of the processor in percent of one processor; None if unknown."""

    worker: ObservedWorker
    share: float | None


@dataclass(frozen=True, slots=True)
class ActorActivity:
    """An actor that is not dead; ``rate``: its calls per second; ``home``: its worker; None if unknown."""

    actor: ObservedActor
    rate: float | None
    home: WorkerActivity | None

    @property
    def share(self) -> float | None:
        return self.home.share if self.home is not None else None

    @property
    def memory(self) -> int:
        return self.home.worker.memory if self.home is not None else 0


def rows(
    before: Iterable[GroupState], after: Iterable[GroupState]
) -> tuple[list[WorkerActivity], list[ActorActivity]]:
    """Return the rows of the workers, and of the actors that are not dead."""
    before, after = list(before), list(after)
    rate, share = rates(before, after), shares(before, after)
    workers: list[WorkerActivity] = []
    actors: list[ActorActivity] = []
    for state in after:
        homes = {each.name: WorkerActivity(each, share.get((each.name, each.pid))) for each in state.workers}
        workers += homes.values()
        actors += [
            ActorActivity(each, rate.get(each.actor_id), homes.get(each.worker))
            for each in state.actors
            if each.state != "DEAD"
        ]
    return workers, actors


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its title, the text of its cells, and the sort key (largest numbers come first).

    Attributes:
        is_live: whether the column is only in the live tables of a terminal.
    """

    title: str
    show: Callable[[Any], str]
    key: Callable[[Any], Any]
    is_live: bool = False

    @property
    def by_name(self) -> bool:
        return self.title in ("actor", "worker", "state")


def _or_less(value: float | None) -> float:
    return -1.0 if value is None else value


def _size(nbytes: int) -> str:
    return amount(nbytes) if nbytes else ""


WORKER_COLUMNS: Final = (
    Column("worker", lambda row: row.worker.name, lambda row: (row.worker.rank, row.worker.name)),
    Column(
        "state", lambda row: row.worker.state, lambda row: (row.worker.state == "alive", row.worker.state)
    ),
    Column("cpu %", lambda row: figure(row.share), lambda row: _or_less(row.share)),
    Column("memory", lambda row: _size(row.worker.memory), lambda row: row.worker.memory),
    Column("fds", lambda row: str(row.worker.descriptors or ""), lambda row: row.worker.descriptors),
    Column("threads", lambda row: str(row.worker.thread_count or ""), lambda row: row.worker.thread_count),
    Column("calls out", lambda row: str(row.worker.outgoing_count), lambda row: row.worker.outgoing_count),
    Column(
        "queued",
        lambda row: str(row.worker.pool.get("queued", 0)),
        lambda row: row.worker.pool.get("queued", 0),
    ),
)
ACTOR_COLUMNS: Final = (
    Column("actor", lambda row: row.actor.title, lambda row: row.actor.title),
    Column("worker", lambda row: row.actor.worker, lambda row: row.actor.worker),
    Column("state", lambda row: row.actor.state.lower(), lambda row: row.actor.state),
    Column(
        "waiting",
        lambda row: known(row.actor.waiting, [row.actor]),
        lambda row: (row.actor.waiting, row.actor.oldest),
    ),
    Column(
        "oldest",
        lambda row: span(row.actor.oldest) if row.actor.waiting else "-",
        lambda row: row.actor.oldest,
    ),
    Column("calls/s", lambda row: figure(row.rate), lambda row: _or_less(row.rate)),
    Column("p50", lambda row: latencies(row.actor)[0], lambda row: row.actor.p50),
    Column("p99", lambda row: latencies(row.actor)[1], lambda row: row.actor.p99),
    Column("cpu %", lambda row: figure(row.share), lambda row: _or_less(row.share), is_live=True),
    Column("memory", lambda row: _size(row.memory), lambda row: row.memory, is_live=True),
    Column(
        "runs", lambda row: runs(row.actor, row.home and row.home.worker), lambda row: len(row.actor.running)
    ),
)
