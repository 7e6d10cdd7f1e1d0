"""The output of the commands about a group, as lines of text and as JSON values; its activity between two reads of its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from actorrpc.cli.text import (
    amount,
    count,
    figure,
    folded,
    known,
    lapse,
    latencies,
    left_out,
    runs,
    say_call,
    span,
    stack_lines,
    table,
)
from actorrpc.observe.findings import calls_to, in_order, is_wanted, of_actors, of_workers, remedy_of
from actorrpc.observe.model import (
    Finding,
    GroupState,
    ObservedActor,
    ObservedSegment,
    ObservedWorker,
    plain,
)
from actorrpc.observe.outside import FoundGroup, GroupLook
from actorrpc.observe.trace import TraceSummary

__all__ = [
    "ACTOR_COLUMNS",
    "WORKER_COLUMNS",
    "Column",
    "Picture",
    "activities",
    "objects_of",
    "rates",
    "separated",
    "shares",
    "trace_lines",
]

_STATES: Final = ("PENDING_CREATION", "ALIVE", "RESTARTING", "ENDING", "DEAD", "UNKNOWN")
_OF_SILENT: Final = (
    "name",
    "rank",
    "pid",
    "host",
    "what",
    "state",
    "reason",
    "dumped",
    "calls_to",
    "oldest_call",
    "oldest",
)
_LEAST: Final = 4  # least number of first or last characters of an id that select an actor
_ROWS: Final = 64  # greatest number of workers, and of classes of actors, that status shows
_OWNERS: Final = 16  # greatest number of rows, and of names, that show who holds memory or handles
_SAID: Final = 1 << 20  # bytes; smaller amounts of held memory are not shown


def trace_lines(summary: TraceSummary) -> list[str]:
    """Return the lines that describe a trace file."""
    what = f"{count(summary.calls, 'call')}, {count(summary.executions, 'execution')}"
    whose = f"{count(summary.workers, 'worker')}, {span(summary.seconds)} from the first to the last"
    lines = [f"{summary.path}: {what} of {whose}; https://ui.perfetto.dev and chrome://tracing open it"]
    if summary.unfinished:
        more = f", and {summary.unseen} more that the file leaves out" if summary.unseen else ""
        lines.append(f"{summary.unfinished} unfinished, shown as ending with the file{more}")
    if summary.profiles:
        lines.append(f"{count(summary.profiles, 'profile')} of torch.profiler merged")
    if summary.dropped:
        lines.append(f"{count(summary.dropped, 'older record')} had been overwritten: see --seconds")
    if summary.clock_error:
        lines.append(f"the clocks of the hosts are compared to within {1e6 * summary.clock_error:.0f} us")
    if summary.uncompared:
        lines.append(
            f"the clocks of {', '.join(summary.uncompared)} could not be compared: their events may be at wrong times"
        )
    return lines + [f"{worker} is missing: {why}" for worker, why in summary.missing.items()]


def separated(parts: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of several texts with an empty line between them."""
    lines: list[str] = []
    for part in parts:
        lines += ["", *part] if lines else part
    return lines


@dataclass(frozen=True, slots=True)
class Picture:
    """The state of a group at the time of one look: one read of the workers' state.

    Attributes:
        callers: id of a running execution -> its actor and method, as text.
        about_actors: the findings about actors.
    """

    group: FoundGroup
    state: GroupState
    callers: Mapping[str, str]
    about_actors: tuple[Finding, ...] = ()

    @classmethod
    def of(cls, look: GroupLook) -> Picture:
        """Return the picture of a look."""
        state = look.state
        callers = {
            call.execution: f"{actor.title}.{call.method}()"
            for actor in state.actors
            for call in actor.running
            if call.execution
        }
        about_workers = set(of_workers(state))
        about_actors = tuple(each for each in state.findings if each not in about_workers)
        return cls(look.group, state, callers, about_actors)

    def with_workers(self, look: GroupLook) -> Picture | None:
        """Return this picture with the workers of a later look that has not read actors.

        None if a worker has joined, left or is not alive: then the state of the actors may be out of date.
        """
        seen = look.state
        names = [(each.name, each.pid) for each in self.state.workers]
        if [(each.name, each.pid) for each in seen.workers] != names:
            return None
        if any(each.state != "alive" for each in (*seen.workers, *self.state.workers)):
            return None
        found = in_order([*of_workers(seen), *self.about_actors])
        return replace(self, state=replace(seen, actors=self.state.actors, findings=tuple(found)))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings about the group, faults first."""
        return self.state.findings

    @property
    def is_wrong(self) -> bool:
        """Whether one of the findings is a fault."""
        return any(each.wrong for each in self.findings)

    @property
    def _head(self) -> dict[str, Any]:
        return {"what": self.group.what, "program": self.group.program, "pids": self.group.pids}

    def as_dict(self) -> dict[str, Any]:
        """Return the whole picture as JSON values, without stacks."""
        return {**self._head, **self.state.as_dict()}

    # -- status --------------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The group, and its numbers of workers and actors."""
        parts = [count(len(self.state.workers), "worker")]
        alive = sum(each.state not in ("DEAD", "UNKNOWN") for each in self.state.actors)
        parts.append(count(alive, "actor"))
        program = f" ({self.group.program})" if self.group.program else ""
        pid = f", pid {self.group.pids[0]}" if self.group.pids else ""
        return f"{self.group.what}{program}{pid}: {', '.join(parts)}; asked in {span(self.state.took)}"

    def status_lines(self) -> list[str]:
        """Return the output of ``status``."""
        lines = [self.title, "", *self._worker_lines()]
        if self.state.actors:
            lines += ["", *self._class_lines()]
        lines += [*self._holder_lines(), *self._object_lines()]
        if not self.is_wrong:
            lines += ["", "Nothing is wrong."]
        return lines + self.finding_lines()

    def finding_lines(self) -> list[str]:
        """Return the faults and then the notes, with an empty line before each kind; an empty list if there are none."""
        lines: list[str] = []
        for wrong, head in ((True, "Wrong:"), (False, "To know:")):
            found = [each for each in self.findings if each.wrong is wrong]
            if found:
                lines += ["", head]
            for each in found:
                lines += _said(each)
        return lines

    def _worker_lines(self) -> list[str]:
        actors = Counter(each.worker for each in self.state.actors if each.worker)
        rows = [
            (
                worker.rank if worker.rank >= 0 else "",
                worker.name,
                worker.state,
                worker.pid or "",
                worker.host,
                span(worker.age) if worker.age else "",
                span(worker.cpu) if worker.age else "",
                amount(worker.memory) if worker.memory else "",
                worker.descriptors or "",
                worker.thread_count or "",
                actors.get(worker.name, 0),
                *_traffic(worker),
            )
            for worker in self.state.workers
        ]
        if len(rows) > _ROWS:  # workers that are not alive come first, so that they are always shown
            rows.sort(key=lambda row: row[2] == "alive")
        head = ("rank", "worker", "state", "pid", "host", "age", "cpu", "memory", "fds", "threads", "actors")
        return table((*head, "sent", "received"), rows, _ROWS, " workers, all alive")

    def _class_lines(self) -> list[str]:
        classes: dict[str, list[ObservedActor]] = {}
        for actor in self.state.actors:
            classes.setdefault(actor.class_name, []).append(actor)
        used = [state for state in _STATES if any(each.state == state for each in self.state.actors)]
        rows = []
        for name, actors in sorted(classes.items(), key=lambda each: (-len(each[1]), each[0])):
            states = Counter(each.state for each in actors)
            oldest = max(each.oldest for each in actors)
            rows.append(
                (
                    name,
                    *(states.get(state, 0) for state in used),
                    known(sum(each.waiting for each in actors), actors),
                    known(sum(len(each.running) for each in actors), actors),
                    span(oldest) if oldest else "-",
                )
            )
        head = (
            "class",
            *(each.lower().replace("pending_creation", "pending") for each in used),
            "waiting",
            "running",
            "oldest",
        )
        return table(head, rows, _ROWS, " classes")

    def _holder_lines(self) -> list[str]:
        """Return the table of workers that hold 1 MiB or more of another worker's memory: values by reference, shared memory."""
        held: dict[tuple[str, str], list[int]] = {}
        for worker in self.state.workers:
            for each in worker.holders:
                row = held.setdefault((worker.name, each.holder), [0, 0, 0])
                row[0] += each.references
                row[1] += each.bytes
            for connection in worker.connections:
                if connection.lent:
                    held.setdefault((worker.name, connection.worker), [0, 0, 0])[2] += connection.lent
        rows = [
            (owner, holder, references, amount(size) if size else "-", amount(lent) if lent else "-")
            for (owner, holder), (references, size, lent) in sorted(
                held.items(), key=lambda each: -each[1][1] - each[1][2]
            )
            if size + lent >= _SAID
        ]
        if not rows:
            return []
        return ["", *table(("memory of", "is held by", "references", "values", "shared"), rows, _OWNERS)]

    def _object_lines(self) -> list[str]:
        """Return the table of large objects in shared memory, and of the workers that hold each object."""
        largest = [each for each in objects_of(self.state.workers) if each[0].bytes >= _SAID]
        if not largest:
            return []
        rows = []
        for each, names in largest:
            more = f" and {len(names) - 2} more" if len(names) > 3 else ""
            held = f"{', '.join(names[:2])}{more}" if more else ", ".join(names)
            rows.append((amount(each.bytes), each.label, each.site or "-", held))
        return ["", *table(("objects", "the latest in it", "made at", "held by"), rows, _OWNERS)]

    # -- stacks --------------------------------------------------------------------------------------------------

    def only(self, whom: str) -> Picture | None:
        """Return the picture of the workers or actors that ``whom`` selects; None if there are none."""
        workers = self.workers_named(whom)
        if workers:
            names = {each.name for each in workers}
            return self._cut(workers, [each for each in self.state.actors if each.worker in names])
        actors = self.actors_named(whom)
        return self.about(actors) if actors else None

    def about(self, actors: Sequence[ObservedActor]) -> Picture:
        """Return the picture of some actors: their workers, with only these actors' threads and held calls.

        For a worker whose stacks were dumped by a signal, all threads are kept.
        """
        wanted = {(each.worker, call.thread) for each in actors for call in each.running}
        names, ids = {each.worker for each in actors}, {each.actor_id for each in actors}
        cut = []
        for worker in self.state.workers:
            if worker.name in names:
                held = tuple(each for each in worker.held if each.actor_id in ids)
                wanted |= {(worker.name, each.thread) for each in held if each.is_held}
                threads = [
                    thread
                    for thread in worker.threads
                    if worker.dumped
                    or (worker.name, thread.ident) in wanted
                    or any(actor.title in thread.name for actor in actors)
                ]
                # Copy only these attributes, so that findings about the worker's other attributes are left out.
                told = {name: getattr(worker, name) for name in _OF_SILENT}
                cut.append(ObservedWorker(**told, held=held, threads=tuple(threads)))
        return self._cut(cut, actors)

    def _cut(self, workers: Sequence[ObservedWorker], actors: Sequence[ObservedActor]) -> Picture:
        """Return the picture of these workers and actors alone, with the findings about them."""
        state = replace(self.state, workers=tuple(workers), actors=tuple(actors))
        about_actors = of_actors(state)
        ended = [
            Finding(kind="actor", wrong=False, what=each.death_cause)
            for each in actors
            if not workers and each.state == "DEAD" and is_wanted(each)
        ]
        found = in_order([*of_workers(state), *about_actors, *ended])
        state = replace(state, findings=tuple(found))
        return replace(self, state=state, about_actors=tuple(about_actors))

    def workers_named(self, text: str) -> tuple[ObservedWorker, ...]:
        """Return the workers that a name, a rank or a process id selects."""
        return tuple(
            each for each in self.state.workers if text in (each.name, str(each.rank), str(each.pid))
        )

    def stacks_dict(self) -> dict[str, Any]:
        """Return the output of ``stack --json``."""
        kept = ("name", "rank", "pid", "state", "reason", "dumped", "threads")
        workers = [plain(each) for each in self.state.workers]
        running = [
            {"actor": each.title, "actor_id": each.actor_id, "worker": each.worker, **plain(call)}
            for each in self.state.actors
            for call in each.running
        ]
        return {
            **self._head,
            "workers": [{name: each[name] for name in kept} for each in workers],
            "running": running,
            "findings": [plain(each) for each in self.findings],
        }

    def stack_lines(self, with_idle: bool, whole: bool = False) -> list[str]:
        """Return the output of ``stack``.

        Args:
            with_idle: include threads of the library that wait for work.
            whole: include the library's frames below the user's code.
        """
        workers = self.state.workers
        folds = folded(workers, self.state.actors)
        threads = sum(len(each.threads) for each in workers)
        head = f"{count(threads, 'thread')} of {count(len(workers), 'worker')}"
        if not workers:  # all selected actors run on no worker
            head = f"no thread: {', '.join(f'{each.title} is {each.state}' for each in self.state.actors[:_OWNERS])}"
        lines = [f"{self.group.what}: {head}"]
        for worker in workers:
            if worker.state != "alive":
                dump = "; its stacks were dumped by a signal" if worker.dumped else ""
                lines.append(
                    f"worker {worker.name} (pid {worker.pid}) is {worker.state}: {worker.reason}{dump}"
                )
        shown = [each for each in folds if with_idle or each.calls or each.held or not each.is_ours]
        for fold in shown:
            lines += ["", *stack_lines(fold, len(workers), threads, self.callers, whole)]
        awaiting = [(each, call) for each in self.state.actors for call in each.running if not call.thread]
        if awaiting:
            lines += ["", f"{count(len(awaiting), 'coroutine')} on no thread:"]
            lines += [f"  {say_call(actor.title, call, self.callers)}" for actor, call in awaiting[:50]]
        idle = sum(len(each.where) for each in folds if each not in shown)
        if idle:
            lines += [
                "",
                f"{count(idle, 'thread')} of the library that wait for work: actorrpc stack --all shows them",
            ]
        return lines

    # -- one actor -----------------------------------------------------------------------------------------------

    def actors_named(self, text: str) -> list[ObservedActor]:
        """Return the actors that a name, a title, the beginning or end of an id (at least 4 characters), or a class selects.

        Of the actors of a class, the actors that were ended on purpose are left out, unless all were.
        """
        actors = self.state.actors
        exact = [each for each in actors if text in (each.name, each.title, each.actor_id)]
        if exact:
            return exact
        part = text.lower()
        if len(part) >= _LEAST:
            found = [
                each for each in actors if each.actor_id.startswith(part) or each.actor_id.endswith(part)
            ]
            if found:
                return found
        alike = [each for each in actors if each.class_name == text]
        return [each for each in alike if each.state != "DEAD" or not is_wanted(each)] or alike

    def actor_dict(self, actor: ObservedActor) -> dict[str, Any]:
        """Return the output of ``describe --json`` for an actor."""
        found = [plain(each) for each in self.about([actor]).findings]
        return {**plain(actor), "waiting_for_it": self._who_waits(actor), "findings": found}

    def _who_waits(self, actor: ObservedActor) -> list[str]:
        """Return descriptions of the calls that wait for a call of an actor."""
        wanted = f"the call of {actor.class_name}."
        # A waiting call names only the class and worker of the other actor. Use the chains of the calls that this actor runs.
        alike = sum(
            each.class_name == actor.class_name and each.worker == actor.worker for each in self.state.actors
        )
        behind = {call.chain[-1] for call in actor.running if call.chain}
        found = []
        for each in self.state.actors:
            for call in each.running:
                named = any(
                    text.startswith(wanted) and text.endswith(f" on {actor.worker!r}")
                    for text in call.waits_for
                )
                if call.execution in behind or (named and alike == 1):
                    found.append(f"{each.title}.{call.method}() on {each.worker!r}")
        return found

    def actor_lines(self, actor: ObservedActor) -> list[str]:
        """Return the output of ``describe`` for an actor."""
        worker = self.state.worker(actor.worker)
        silent = worker if worker is not None and worker.state != "alive" else None
        how = f" is {silent.state}: {silent.reason}" if silent is not None else ""
        rows = [
            ("id", actor.actor_id),
            ("class", actor.class_name),
            ("name", f"{actor.name} (namespace {actor.namespace!r})" if actor.name else "-"),
            ("state", actor.state + (", detached" if actor.detached else "")),
            ("worker", f"{actor.worker} (pid {actor.pid}){how}" if actor.worker else "-"),
            *([("remedy", remedy_of(silent))] if silent is not None and remedy_of(silent) else []),
            ("looked after by", actor.supervisor or "-"),
            ("restarts", str(actor.restarts)),
        ]
        if actor.handles:
            held = sorted(actor.handles.items(), key=lambda each: (-each[1], each[0]))
            more = f" and {len(held) - _OWNERS} more workers" if len(held) > _OWNERS else ""
            text = ", ".join(f"{number} on {worker}" for worker, number in held[:_OWNERS])
            rows.append(("handles", text + more))
        if actor.death_cause:
            rows.append(("died" if actor.state == "DEAD" else "died last", actor.death_cause))
        if actor.answered:
            rows += [("age", span(actor.age)), ("calls done", str(actor.calls_done))]
            if actor.latest:
                times = f"{lapse(actor.p50)} (p50), {lapse(actor.p99)} (p99), {actor.failed} failed"
                rows.append(("answered", f"the latest {count(actor.latest, 'call')} in {times}"))
        elif actor.worker:
            worker = self.state.worker(actor.worker)
            told = "" if worker is None else calls_to(worker)
            rows.append(("mailbox", f"its worker has not answered{told}"))
        width = max(len(name) for name, _ in rows)
        lines = [actor.title, *(f"  {name.ljust(width)}  {text}" for name, text in rows)]
        for box in actor.mailbox:
            if box.is_async and not (box.waiting or box.running):
                continue
            kind = " of coroutines" if box.is_async else ""
            name = f"mailbox{kind}" + (f" of group {box.group!r}" if box.group else "")
            text = f"{box.waiting} waiting, {box.running} of {box.limit} running"
            if box.waiting:
                text += f"; the first, {box.next}(), for {span(box.oldest)}"
            lines.append(f"  {name}: {text}")
        lines += [f"  runs {say_call(actor.title, call, self.callers)}" for call in actor.running]
        about = self.about([actor])
        stops = [each for one in about.state.workers for each in one.held if each.is_held]
        lines += [
            f"  held by {each.why} at {each.file}:{each.line}, in {each.function}(), for {span(each.since)}; to debug it: "
            f"actorrpc debug {each.session}"
            for each in stops
        ]
        lines += [f"  awaited by {each}" for each in self._who_waits(actor)]
        if actor.running or stops:
            threads = sum(len(each.threads) for each in about.state.workers)
            for fold in folded(about.state.workers, (actor,)):
                lines += ["", *stack_lines(fold, len(about.state.workers), threads, self.callers)]
        return lines

    # -- top -----------------------------------------------------------------------------------------------------

    def top_lines(self, most: int, before: Sequence[Picture]) -> list[str]:
        """Return the output of ``top``; ``before``: the previous pictures."""
        workers, actors = activities([each.state for each in before], [self.state])
        lines = [self.title, "", *_table(WORKER_COLUMNS, workers, _ROWS, " workers")]
        actors.sort(
            key=lambda row: (
                -row.actor.waiting,
                -row.actor.oldest,
                -len(row.actor.running),
                row.actor.actor_id,
            )
        )
        if actors:
            columns = [each for each in ACTOR_COLUMNS if not each.is_live]
            lines += ["", *_table(columns, actors, most, " actors")]
        for each in self.findings:
            if each.wrong:
                lines += ["", *_said(each)]
        return lines


# -- activity between two reads of the state, and the columns of top ---------------------------------------------


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


def activities(
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


# -- parts of the output -----------------------------------------------------------------------------------------


def objects_of(workers: Iterable[ObservedWorker]) -> list[tuple[ObservedSegment, list[str]]]:
    """Return the objects in shared memory, the largest first, each with the workers that hold it."""
    found: dict[str, ObservedSegment] = {}
    holders: dict[str, list[str]] = {}
    for worker in workers:
        for each in worker.objects:
            holders.setdefault(each.segment, []).append(worker.name)
            known = found.setdefault(each.segment, each)
            if each.bytes > known.bytes:  # the worker that wrote the object reports its full size
                found[each.segment] = each
    largest = sorted(found.values(), key=lambda each: -each.bytes)
    return [(each, holders[each.segment]) for each in largest]


def _table(columns: Sequence[Column], rows: Sequence[object], most: int, more: str) -> list[str]:
    cells = ([each.show(row) for each in columns] for row in rows[:most])
    return [*table([each.title for each in columns], cells), *left_out(len(rows) - most, more)]


def _traffic(worker: ObservedWorker) -> tuple[str, str]:
    """Return how many bytes a worker has sent and received, including shared memory and memory of GPUs."""
    sent = sum(each.sent + each.placed + each.device_placed for each in worker.connections)
    received = sum(each.received + each.taken + each.device_taken for each in worker.connections)
    return amount(sent) if sent else "", amount(received) if received else ""


def _said(finding: Finding) -> list[str]:
    lines = [f"* {finding.what}".replace("\n", "\n  ")]
    if finding.remedy:
        lines.append(f"  -> {finding.remedy}")
    return lines
