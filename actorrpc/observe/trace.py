"""Writes a trace of a whole group, from the records of its flight recorders, for Perfetto and chrome://tracing.

:func:`write` gets the recordings that :mod:`~actorrpc.observe.outside` or :mod:`~actorrpc.observe.api` has collected. Executions,
and calls for which a thread waits, are slices of their threads. Calls and executions that overlap on a thread (calls with
futures, coroutines), and times in mailboxes, which belong to no thread, are tracks of their own. Threads that run only the
package's own calls come last. One arrow goes from a call to its execution, and another from the end of the execution to the
answer. A call that has not finished ends at the time of the query, and has ``(unfinished)`` in its name.

The format: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (JSON object).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from actorrpc.errors import RpcError
from actorrpc.flight_recorder import CALLED, EXECUTED, NOTED, OWN, UNDER_WAY, method_of
from actorrpc.observe.assemble import Silent
from actorrpc.observe.torch_profiles import TorchProfile, joined

__all__ = ["Recording", "TraceSummary", "check_path", "compare_clocks", "events_of", "write"]

_CLOCK: Final = {"records": 1 << 62}  # requests no record (none has so high a number), only the time
_WAIT_S: Final = 20e-6  # shorter times in mailboxes are not shown
_COUNT_S: Final = 100e-6  # the shortest time between two values of a counter
_THIN_S: Final = 1e-6  # the length of the slices at which the arrows of overlapping calls begin and end
_CLOCK_TRIES: Final = 7  # questions for comparing clocks; the fastest answer is used
_LINE: Final = 2000  # events that are converted to JSON together


_SHAPES: Final[dict[int, tuple[type | tuple[type, ...], ...]]] = {
    CALLED: (int, int, float, float, int, str, int, str, int, bool, bool, int, int),
    EXECUTED: (int, int, float, float, float, int, str, int, str, int, bool, str),
    NOTED: (int, int, float, float, str, str, int),
}


@dataclass(slots=True, kw_only=True)
class Record:
    """A record of a flight recorder (:mod:`actorrpc.flight_recorder`): a call, an execution or a note.

    Attributes:
        kind: ``CALLED``, ``EXECUTED`` or ``NOTED``.
        came: for an execution, when the request was received; else ``begun``.
        name: the method; for a note, its kind and its text.
        id: identifies a call among the calls of its caller; for a note, its kind.
        peer: the worker that is called, or that calls.
        is_under_way: whether the call or execution has not ended; ``ended`` is then the time of the query.
        waits: whether a thread waits for the call.
    """

    number: int
    kind: int
    came: float
    begun: float
    ended: float
    name: str
    thread: int
    id: int | str
    peer: str = ""
    chain: int = 0
    failed: bool = False
    actor: str = ""
    waits: bool = False
    sent: int = 0
    received: int = 0

    @classmethod
    def of(cls, row: object) -> Record | None:
        """Return a record that a worker has sent; None if it is not valid."""
        if not isinstance(row, list) or len(row) < 2 or type(row[1]) is not int:
            return None
        shape = _SHAPES.get(row[1])
        if shape is None or len(row) != len(shape) or not all(map(isinstance, row, shape)):
            return None
        if not all(math.isfinite(each) for each in row if type(each) is float):
            return None
        number, kind, came = row[:3]
        found: dict[str, Any] = {"number": number, "kind": kind, "came": came, "begun": came}
        names: tuple[str, ...]
        if kind == EXECUTED:
            names = ("begun", "ended", "id", "peer", "chain", "name", "thread", "failed", "actor")
        elif kind == CALLED:
            names = ("ended", "id", "peer", "chain", "name", "thread", "failed", "waits", "sent", "received")
        else:
            names = ("ended", "id", "name", "thread")
        found |= zip(names, row[3:], strict=True)
        if kind == NOTED:
            found["name"] = f"{found['id']} {found['name']}"
        return cls(**found)

    @property
    def is_under_way(self) -> bool:
        return self.number == UNDER_WAY

    @property
    def is_queued(self) -> bool:
        """Whether the record is of an execution that is still in a mailbox."""
        return self.kind == EXECUTED and self.is_under_way and self.begun == self.ended

    @property
    def is_internal(self) -> bool:
        """Whether the record is of a call that the package makes for itself."""
        return self.kind != NOTED and not self.actor and self.name.startswith(OWN)

    @property
    def key(self) -> tuple[Any, ...]:
        """Identifies the record on its worker. The records of a call before and after its end have the same key."""
        return self.kind, self.came, self.id


@dataclass(slots=True, kw_only=True)
class Recording:
    """The records of one worker's flight recorder.

    Attributes:
        worker, pid: identify the worker.
        records: the records of unfinished calls are the last.
        unseen: the number of unfinished calls that the worker has not sent.
        dropped: the number of older records, which were overwritten.
        threads: the names of threads by identifier.
        profiles: the torch profiles that the worker keeps.
        offset: seconds to add to the worker's times to get times of the collector's clock.
        error: how far ``offset`` may be off, in seconds; None: the worker's clock could not be compared.
        why: the reason, if there are no records.
    """

    worker: str
    pid: int
    records: list[Record] = field(default_factory=list)
    unseen: int = 0
    dropped: int = 0
    threads: dict[int, str] = field(default_factory=dict)
    profiles: list[TorchProfile] = field(default_factory=list)
    offset: float = 0.0
    error: float | None = 0.0
    why: str = ""

    @classmethod
    def of(cls, worker: str, pid: int, found: dict[str, Any] | Silent) -> Recording:
        """Build a recording from a worker's answer; parts of the answer that are not valid are ignored.

        The collector has added ``clock`` to the answer, the result of :func:`compare_clocks`.
        """
        made = cls(worker=worker, pid=pid)
        if isinstance(found, Silent):
            made.why = found.reason or found.state
            return made
        made.offset, made.error = found.get("clock", (0.0, 0.0))
        recorder, rows = found.get("recorder"), found.get("records")
        if not isinstance(recorder, dict) or not isinstance(rows, list):
            made.why = str(found.get("error") or "it has no flight recorder: it runs another version")
            return made
        if not recorder.get("on"):
            made.why = "its flight recorder is turned off (ACTORRPC_RECORDER)"
        made.records = [each for each in map(Record.of, rows) if each is not None]
        made.dropped = made.records[-1].number + 1 - len(made.records) if made.records else 0
        made._add_under_way(found.get("under_way"), found.get("under_way_all"))
        kept = found.get("profiles")
        read = map(TorchProfile.read, joined(kept) if isinstance(kept, list) else ())
        made.profiles = [each for each in read if each is not None]
        threads = recorder.get("threads")
        if isinstance(threads, dict):
            made.threads = {ident: str(name) for ident, name in threads.items() if type(ident) is int}
        return made

    def _add_under_way(self, rows: object, number: object) -> None:
        if not isinstance(rows, list):
            return
        # A call that ended while the worker gathered its answer is in both lists.
        over = {each.key for each in self.records}
        new = [each for each in map(Record.of, rows) if each is not None and each.is_under_way]
        self.records += [each for each in new if each.key not in over]
        self.unseen = max(0, number - len(rows)) if type(number) is int else 0

    def since(self, begun: float) -> None:
        """Remove records and events that ended before a time on the collector's clock."""
        if not self.records or self.records[0].ended + self.offset < begun:
            self.dropped = 0  # the overwritten records ended before that time as well
        self.records = [each for each in self.records if each.ended + self.offset >= begun]
        self.profiles = [each.since(begun - self.offset) for each in self.profiles]

    def moments(self) -> Iterator[float]:
        """Yield the begins and ends of all records and profiles, on the worker's clock."""
        for record in self.records:
            yield record.came
            yield record.ended
        for profile in self.profiles:
            yield from profile.moments()


def compare_clocks(
    query: Callable[[list[str], dict[str, int]], dict[str, Any]], now: Callable[[], float]
) -> tuple[float, float | None]:
    """Return the offset to add to a worker's times to get times of the local clock, and its maximal error, both in seconds.

    The error is None if no question was answered. The offset is then a meaningless 0.

    Args:
        query: sends the worker a question for these parts, from these begins on, and returns its answer. If it raises OSError or
            RpcError, the comparison ends.
        now: reads the local clock.
    """
    best: tuple[float, float | None] = (0.0, None)
    for _ in range(_CLOCK_TRIES):
        begun = now()
        try:
            recorder = query(["records"], _CLOCK).get("recorder")
        except (OSError, RpcError):
            break
        ended = now()
        there = recorder.get("now") if isinstance(recorder, dict) else None
        if type(there) is float and (best[1] is None or (ended - begun) / 2 < best[1]):
            best = ((begun + ended) / 2 - there, (ended - begun) / 2)
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """A summary of a written trace.

    Attributes:
        path: the file.
        workers: the number of workers that answered. ``missing``: the names of workers that did not answer, and the reasons.
        calls, executions: their numbers in the file. ``unfinished``: the number of unfinished calls, executions and streams.
        unseen: the number of further unfinished calls, executions and streams. The file has the oldest 2 000 of each worker.
        arrows: the number of calls whose execution is in the file as well.
        profiles: the number of torch profiles that were merged.
        dropped: the number of records that were overwritten before they were collected.
        seconds: the time from the first event to the last.
        clock_error: the largest error of a worker's clock comparison, in seconds.
        uncompared: workers whose clocks could not be compared; their events may be shown at wrong times relative to other
            workers.
    """

    path: str
    workers: int = 0
    calls: int = 0
    executions: int = 0
    unfinished: int = 0
    unseen: int = 0
    arrows: int = 0
    profiles: int = 0
    dropped: int = 0
    seconds: float = 0.0
    clock_error: float = 0.0
    uncompared: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)


def check_path(path: str) -> None:
    """Check that a file can be written or replaced at a path, so that a wrong path fails before workers are queried.

    Raises:
        OSError: the file cannot be written.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        number = errno.EISDIR
    elif not os.path.isdir(folder):
        number = errno.ENOENT
    elif not os.access(folder, os.W_OK | os.X_OK):
        number = errno.EACCES
    else:
        return
    raise OSError(number, os.strerror(number), path)


def write(path: str, recordings: Iterable[Recording]) -> TraceSummary:
    """Write the trace of a group. An existing file is replaced when the new one is complete.

    Raises:
        OSError: the file cannot be written.
    """
    counts: dict[str, Any] = {}
    path = os.fspath(path)
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            comma = ""
            events = events_of(recordings, counts)
            while batch := list(itertools.islice(events, _LINE)):
                file.write(comma + json.dumps(batch, separators=(",", ":"))[1:-1])
                comma = ",\n"
            summary = TraceSummary(path=path, **counts)
            file.write(f'\n],"otherData":{json.dumps(asdict(summary))}}}\n')
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return summary


def events_of(
    recordings: Iterable[Recording], counts: dict[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace.

    Args:
        counts: is filled with the fields of :class:`TraceSummary`, except the path.
    """
    found = list(recordings)
    there = [each for each in found if not each.why]
    moments = [moment + each.offset for each in there for moment in each.moments()]
    begun = min(moments, default=0.0)
    executions: dict[tuple[str, str, int | str], tuple[_Process, Record]] = {}
    numbers = itertools.count(1)
    pids = _pids(found)
    numbered = [(each, pid) for each, pid in zip(found, pids, strict=True) if not each.why]
    totals = dict.fromkeys(("calls", "executions", "arrows"), 0)
    for each, pid in zip(found, pids, strict=True):
        if each.why:
            yield from _Process(each, pid, begun).absence(max(moments, default=0.0))
    for each, pid in numbered:
        process = _Process(each, pid, begun)
        yield from process.names()
        for record in each.records:
            if record.kind == EXECUTED:
                totals["executions"] += 1
                if not record.is_queued:
                    executions[record.peer, each.worker, record.id] = process, record
        yield from process.executions()
        yield from process.counters()
    for each, pid in numbered:
        process = _Process(each, pid, begun)
        for record in each.records:
            if record.kind == CALLED:
                totals["calls"] += 1
                other = executions.get((each.worker, record.peer, record.id))
                totals["arrows"] += other is not None
                yield from process.call(record, other, numbers)
            elif record.kind == NOTED:
                yield from process.note(record)
    numbers_of_torch: dict[str, int] = {}
    for each, pid in numbered:
        for number, profile in enumerate(each.profiles):
            key = f"{pid}-{number}"
            yield from profile.shown(each.worker, each.pid, pid, numbers_of_torch, begun - each.offset, key)
    if counts is not None:
        counts |= totals | _counts_of(found) | {"seconds": max(moments, default=0.0) - begun}


def _counts_of(recordings: list[Recording]) -> dict[str, Any]:
    """Return the fields of a :class:`TraceSummary` that depend on the recordings only."""
    there = [each for each in recordings if not each.why]
    return {
        "profiles": sum(not profile.is_empty() for each in there for profile in each.profiles),
        "workers": len(there),
        "missing": {each.worker: each.why for each in recordings if each.why},
        "unfinished": sum(record.is_under_way for each in there for record in each.records),
        "unseen": sum(each.unseen for each in there),
        "dropped": sum(each.dropped for each in there),
        "clock_error": max((each.error for each in there if each.error is not None), default=0.0),
        "uncompared": tuple(each.worker for each in there if each.error is None),
    }


def _pids(recordings: list[Recording]) -> list[int]:
    """Return a unique number for each process: its process id, or another number if a process on another host has the same id."""
    used: set[int] = set()
    found = []
    for each in recordings:
        pid = each.pid
        while pid in used or pid <= 0:
            pid = max(pid, 0) + 10_000_000
        used.add(pid)
        found.append(pid)
    return found


def _marked(record: Record) -> tuple[str, dict[str, Any]]:
    """Return additions to name and arguments of an event, which mark it as unfinished; empty if the record has ended."""
    return (" (unfinished)", {"unfinished": True}) if record.is_under_way else ("", {})


class _Process:
    """Creates the events of one worker."""

    def __init__(self, recording: Recording, pid: int, begun: float) -> None:
        self._recording = recording
        self._pid = pid
        self._zero = begun - recording.offset
        internal: dict[int, bool] = {}  # by thread: whether the thread has run only the package's own calls
        for record in recording.records:
            internal[record.thread] = internal.get(record.thread, True) and record.is_internal
        idents = sorted(internal, key=lambda ident: (internal[ident], ident))
        self._threads = {ident: number for number, ident in enumerate(idents, 1)}

    def _event(self, kind: str, name: str, moment: float, tid: int, **more: Any) -> dict[str, Any]:
        at = round(1e6 * (moment - self._zero), 3)
        return {"ph": kind, "name": name, "ts": at, "pid": self._pid, "tid": tid, **more}

    def _metadata(self, name: str, tid: int, /, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self._pid, "tid": tid, "ts": 0, "args": args}

    def arrow_end(self, kind: str, name: str, record: Record, moment: float, number: int) -> dict[str, Any]:
        """Return one end of an arrow, on the thread of a record: its begin (``kind`` is ``s``) or its tip (``f``)."""
        more = {"bp": "e"} if kind == "f" else {}
        return self._event(kind, name, moment, self._threads[record.thread], id=number, cat="call", **more)

    def _slice(self, name: str, begun: float, ended: float, tid: int, **more: Any) -> dict[str, Any]:
        return self._event("X", name, begun, tid, dur=round(max(0.0, 1e6 * (ended - begun)), 3), **more)

    def _track(
        self, name: str, cat: str, key: str, begun: float, ended: float, tid: int, **args: Any
    ) -> Iterator[dict[str, Any]]:
        yield self._event("b", name, begun, tid, cat=cat, id=key, args=args)
        yield self._event("e", name, max(begun, ended), tid, cat=cat, id=key)

    def absence(self, moment: float) -> Iterator[dict[str, Any]]:
        """Yield an event that says why there are no records of this process."""
        yield self._name()
        yield self._event("i", f"missing: {self._recording.why}", moment, 0, s="p")

    def _name(self) -> dict[str, Any]:
        text = f"{self._recording.worker} (pid {self._recording.pid})"
        return self._metadata("process_name", 0, name=text)

    def names(self) -> Iterator[dict[str, Any]]:
        """Yield the names of the process and of its threads."""
        here = self._recording
        yield self._name()
        for ident, number in self._threads.items():
            name = here.threads.get(ident, "a thread that has ended") if ident else "on no thread"
            yield self._metadata("thread_name", number, name=name)
            yield self._metadata("thread_sort_index", number, sort_index=number)
        over = [each.came for each in here.records if not each.is_under_way]
        if here.dropped and over:
            text = f"{here.dropped} records before this were overwritten"
            yield self._event("i", text, min(over), 0, s="p")

    def executions(self) -> Iterator[dict[str, Any]]:
        """Yield the executions of this worker, and their times in mailboxes."""
        executions = [each for each in self._recording.records if each.kind == EXECUTED]
        open_until: dict[int, list[float]] = {}
        for each in sorted(executions, key=lambda each: (each.begun, -each.ended)):
            begun, ended, tid = each.begun, each.ended, self._threads[each.thread]
            name = f"{each.actor}.{each.name}" if each.actor else each.name
            key = f"{self._pid}-{each.peer}-{each.id}"
            mark, unfinished = _marked(each)
            if begun - each.came > _WAIT_S:
                waits = f"{name} waits{mark if each.is_queued else ''}"
                more = {"caller": each.peer, **(unfinished if each.is_queued else {})}
                yield from self._track(waits, "mailbox", f"m{key}", each.came, begun, tid, **more)
            if each.is_queued:
                continue
            name += mark
            args = {
                "caller": each.peer,
                "failed": each.failed,
                "execution": f"{each.chain:016x}",
                "method": method_of(each.actor, each.name),
                **unfinished,
            }
            stack = open_until.setdefault(each.thread, [])
            while stack and stack[-1] <= begun:
                stack.pop()
            if (
                stack and ended > stack[-1]
            ):  # it overlaps another slice: a coroutine, or a call that another thread has answered
                yield from self._track(name, "execution", f"x{key}", begun, ended, tid, **args)
                for moment in (begun, ended):  # an arrow must begin and end at a slice
                    yield self._slice(name, moment, moment + _THIN_S, tid, cat="execution", args=args)
            else:
                stack.append(ended)
                yield self._slice(name, begun, ended, tid, cat="execution", args=args)

    def counters(self) -> Iterator[dict[str, Any]]:
        """Yield counter events: the numbers of queued and of running calls over time."""
        steps: list[tuple[float, int, int]] = []
        for each in self._recording.records:
            if each.kind == EXECUTED:
                changes = ((each.came, 1, 0), (each.begun, -1, 1), (each.ended, 0, -1))
                steps += changes[: 1 if each.is_queued else 2 if each.is_under_way else 3]
        steps.sort()
        waiting = running = 0
        shown = float("-inf")
        for moment, more_waiting, more_running in steps:
            waiting, running = waiting + more_waiting, running + more_running
            if moment - shown >= _COUNT_S:
                shown = moment
                yield self._event("C", "calls", moment, 0, args={"waiting": waiting, "running": running})
        if steps:
            yield self._event("C", "calls", steps[-1][0], 0, args={"waiting": waiting, "running": running})

    def call(
        self, record: Record, other: tuple[_Process, Record] | None, numbers: Iterator[int]
    ) -> Iterator[dict[str, Any]]:
        """Yield a call that this worker made, and the arrows to its execution and back.

        Args:
            other: the execution and its process; None if there is no record of the execution.
            numbers: provides ids for arrows.
        """
        begun, ended, tid = record.begun, record.ended, self._threads[record.thread]
        mark, unfinished = _marked(record)
        args = {"worker": record.peer, "failed": record.failed, "bytes_out": record.sent}
        args |= {"bytes_in": record.received, **unfinished}
        name = f"call {record.name}{mark}"
        if record.waits:
            yield self._slice(name, begun, ended, tid, cat="call", args=args)
        else:
            key = f"c{self._pid}-{record.peer}-{record.id}"
            cat = "internal call" if record.is_internal else "call"
            yield from self._track(name, cat, key, begun, ended, tid, **args)
            yield self._slice(name, begun, begun + _THIN_S, tid, cat="call", args=args)
            if not unfinished:
                yield self._slice(f"answer {record.name}", ended, ended + _THIN_S, tid, cat="call")
        if other is None:
            return
        process, execution = other
        forth, back = next(numbers), next(numbers)
        yield self.arrow_end("s", "call", record, begun, forth)
        yield process.arrow_end("f", "call", execution, execution.begun, forth)
        if not (execution.is_under_way or unfinished):
            yield process.arrow_end("s", "answer", execution, execution.ended, back)
            # The end of a slice is not part of the slice, so the arrow ends a moment earlier.
            at = max(begun, ended - 1e-9) if record.waits else ended
            yield self.arrow_end("f", "answer", record, at, back)

    def note(self, record: Record) -> Iterator[dict[str, Any]]:
        """Yield the events of a ``NOTED`` record."""
        tid = self._threads[record.thread]
        mark, unfinished = _marked(record)
        name = f"{record.name}{mark}"
        if record.id == "stream":  # a stream overlaps other events of its thread
            key = f"n{self._pid}-{record.name if unfinished else record.number}"
            yield from self._track(name, "stream", key, record.begun, record.ended, tid, **unfinished)
        else:
            yield self._slice(name, record.begun, record.ended, tid, cat=str(record.id), args=unfinished)
