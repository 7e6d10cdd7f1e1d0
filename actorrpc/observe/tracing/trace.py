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
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from actorrpc.errors import RpcError
from actorrpc.flight_recorder import CALLED, EXECUTED, NOTED, OWN, UNDER_WAY, method_of
from actorrpc.observe.assemble import Silent
from actorrpc.observe.tracing.torch_profiles import TorchProfile, joined

__all__ = ["Recording", "TraceSummary", "check_path", "compare_clocks", "events_of", "write"]

_CLOCK: Final = {"records": 1 << 62}  # asks for no record, but for the time: no record has so high a number
_WAIT_S: Final = 20e-6  # a shorter time in a mailbox is not shown
_COUNT_S: Final = 100e-6  # the shortest time between two values of a counter
_THIN_S: Final = 1e-6  # the length of the slices at which the arrows of overlapping calls begin and end
_CLOCK_TRIES: Final = 7  # questions for comparing clocks, of which the fastest answer is used
_LINE: Final = 2000  # events that are converted to JSON together


@dataclass(slots=True, kw_only=True)
class Recording:
    """The records of one worker's flight recorder.

    Attributes:
        worker, pid: identify the worker.
        records: records as :mod:`actorrpc.flight_recorder` describes them; those of unfinished calls are the last.
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
    records: list[list[Any]] = field(default_factory=list)
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
        made.records = [each for each in rows if _is_record(each)]
        made.dropped = made.records[-1][0] + 1 - len(made.records) if made.records else 0
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
        over = set(map(_key, self.records))
        new = [each for each in rows if _is_record(each) and each[0] == UNDER_WAY and _key(each) not in over]
        self.records += new
        self.unseen = max(0, number - len(rows)) if type(number) is int else 0

    def since(self, begun: float) -> None:
        """Remove records and events that ended before a time on the collector's clock."""
        if not self.records or self._ended(self.records[0]) + self.offset < begun:
            self.dropped = 0  # the overwritten records ended before that time as well
        self.records = [each for each in self.records if self._ended(each) + self.offset >= begun]
        self.profiles = [each.since(begun - self.offset) for each in self.profiles]

    def moments(self) -> Iterator[float]:
        """Yield the begins and ends of all records and profiles, on the worker's clock."""
        for row in self.records:
            yield row[2]
            yield self._ended(row)
        for profile in self.profiles:
            yield from profile.moments()

    @staticmethod
    def _ended(record: list[Any]) -> float:
        return float(record[4] if record[1] == EXECUTED else record[3])


def compare_clocks(
    ask: Callable[[list[str], dict[str, int]], dict[str, Any]], now: Callable[[], float]
) -> tuple[float, float | None]:
    """Return the offset to add to a worker's times to get times of the local clock, and its maximal error, both in seconds.

    The error is None if no question was answered. The offset is then 0, which means nothing.

    Args:
        ask: sends the worker a question for these parts, from these begins on, and returns its answer. If it raises OSError or
            RpcError, the comparison ends.
        now: reads the local clock.
    """
    best: tuple[float, float | None] = (0.0, None)
    for _ in range(_CLOCK_TRIES):
        begun = now()
        try:
            recorder = ask(["records"], _CLOCK).get("recorder")
        except (OSError, RpcError):
            break
        ended = now()
        there = recorder.get("now") if isinstance(recorder, dict) else None
        if type(there) is float and (best[1] is None or (ended - begun) / 2 < best[1]):
            best = ((begun + ended) / 2 - there, (ended - begun) / 2)
    return best


_SHAPES: Final[dict[int, tuple[type | tuple[type, ...], ...]]] = {
    CALLED: (int, int, float, float, int, str, int, str, int, bool, bool, int, int),
    EXECUTED: (int, int, float, float, float, int, str, int, str, int, bool, str),
    NOTED: (int, int, float, float, str, str, int),
}


def _key(row: list[Any]) -> tuple[Any, ...]:
    """Return a key that identifies a call, an execution or a note on its worker; it is the same before and after its end."""
    return row[1], row[2], row[5] if row[1] == EXECUTED else row[4]


def _is_record(row: object) -> bool:
    if not isinstance(row, list) or len(row) < 2 or type(row[1]) is not int:
        return False
    shape = _SHAPES.get(row[1])
    if shape is None or len(row) != len(shape) or not all(map(isinstance, row, shape)):
        return False
    return all(math.isfinite(each) for each in row if type(each) is float)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """A summary of a written trace.

    Attributes:
        path: the file.
        workers: the number of workers that answered; ``missing``: the names of the others, with the reasons.
        calls, executions: their numbers in the file; ``unfinished``: the number of unfinished calls, executions and streams.
        unseen: the number of unfinished ones that are not in the file, which has the oldest 2 000 of each worker.
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
    handle, temporary = tempfile.mkstemp(
        prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(os.path.abspath(path))
    )
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            comma = ""
            events = events_of(recordings, counts)
            while batch := list(itertools.islice(events, _LINE)):
                file.write(comma + json.dumps(batch, separators=(",", ":"))[1:-1])
                comma = ",\n"
            summary = TraceSummary(path=path, **counts)
            file.write(f'\n],"otherData":{json.dumps(asdict(summary))}}}\n')
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return summary


def _umask() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o077


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
    executions: dict[tuple[str, str, int], tuple[int, int, float, float | None]] = {}
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
        for row in each.records:
            if row[1] == EXECUTED:
                totals["executions"] += 1
                if _waits(row):
                    continue
                executions[row[6], each.worker, row[5]] = (
                    pid,
                    process.thread(row[9]),
                    process.at(row[3]),
                    None if row[0] == UNDER_WAY else process.at(row[4]),
                )
        yield from process.executions()
        yield from process.counters()
    for each, pid in numbered:
        process = _Process(each, pid, begun)
        for row in each.records:
            if row[1] == CALLED:
                totals["calls"] += 1
                other = executions.get((each.worker, row[5], row[4]))
                totals["arrows"] += other is not None
                yield from process.call(row, other, numbers)
            elif row[1] == NOTED:
                yield from process.note(row)
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
        "unfinished": sum(row[0] == UNDER_WAY for each in there for row in each.records),
        "unseen": sum(each.unseen for each in there),
        "dropped": sum(each.dropped for each in there),
        "clock_error": max((each.error for each in there if each.error is not None), default=0.0),
        "uncompared": tuple(each.worker for each in there if each.error is None),
    }


def _pids(recordings: list[Recording]) -> list[int]:
    """Return a unique number for each process: its process id, or another number if that is used (on another host)."""
    used: set[int] = set()
    found = []
    for each in recordings:
        pid = each.pid
        while pid in used or pid <= 0:
            pid = max(pid, 0) + 10_000_000
        used.add(pid)
        found.append(pid)
    return found


def _waits(row: list[Any]) -> bool:
    """Return whether the call of an execution record is still queued."""
    return bool(row[0] == UNDER_WAY and row[3] == row[4])


def _is_internal(row: list[Any]) -> bool:
    """Return whether a record belongs to a call that the package makes for itself."""
    if row[1] == EXECUTED:
        return not row[11] and row[8].startswith(OWN)
    return bool(row[1] == CALLED and row[7].startswith(OWN))


def _marked(number: int) -> tuple[str, dict[str, Any]]:
    """Return the additions to the name and to the arguments of an event, which mark an unfinished record."""
    return (" (unfinished)", {"unfinished": True}) if number == UNDER_WAY else ("", {})


class _Process:
    """Creates the events of one worker."""

    def __init__(self, recording: Recording, pid: int, begun: float) -> None:
        self._recording = recording
        self._pid = pid
        self._zero = begun - recording.offset
        internal: dict[int, bool] = {}  # whether a thread has run nothing but the package's own calls
        for row in recording.records:
            ident = row[9] if row[1] == EXECUTED else row[8] if row[1] == CALLED else row[6]
            internal[ident] = internal.get(ident, True) and _is_internal(row)
        idents = sorted(internal, key=lambda ident: (internal[ident], ident))
        self._threads = {ident: number for number, ident in enumerate(idents, 1)}

    def at(self, moment: float) -> float:
        """Convert a time on the worker's clock to a time in the file: microseconds since the first event."""
        return round(1e6 * (moment - self._zero), 3)

    def thread(self, ident: int) -> int:
        """Return the number of a thread in the file."""
        return self._threads[ident]

    def _event(self, kind: str, name: str, moment: float, tid: int, **more: Any) -> dict[str, Any]:
        return {"ph": kind, "name": name, "ts": self.at(moment), "pid": self._pid, "tid": tid, **more}

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
        return {
            "ph": "M",
            "name": "process_name",
            "pid": self._pid,
            "tid": 0,
            "ts": 0,
            "args": {"name": text},
        }

    def names(self) -> Iterator[dict[str, Any]]:
        """Yield the names of the process and of its threads."""
        here = self._recording
        yield self._name()
        for ident, number in self._threads.items():
            name = here.threads.get(ident, "a thread that has ended") if ident else "on no thread"
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": self._pid,
                "tid": number,
                "ts": 0,
                "args": {"name": name},
            }
            yield {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": self._pid,
                "tid": number,
                "ts": 0,
                "args": {"sort_index": number},
            }
        over = [row[2] for row in here.records if row[0] != UNDER_WAY]
        if here.dropped and over:
            text = f"{here.dropped} records before this were overwritten"
            yield self._event("i", text, min(over), 0, s="p")

    def executions(self) -> Iterator[dict[str, Any]]:
        """Yield the executions of this worker, and their times in mailboxes."""
        rows = sorted(
            (row for row in self._recording.records if row[1] == EXECUTED), key=lambda row: (row[3], -row[4])
        )
        open_until: dict[int, list[float]] = {}
        for row in rows:
            number, _, arrived, begun, ended, id, caller, chain, method, ident, failed, actor = row
            tid = self.thread(ident)
            name = f"{actor}.{method}" if actor else method
            mark, unfinished = _marked(number)
            if begun - arrived > _WAIT_S:
                waits, key = f"{name} waits{mark if _waits(row) else ''}", f"m{self._pid}-{caller}-{id}"
                more = {"caller": caller, **(unfinished if _waits(row) else {})}
                yield from self._track(waits, "mailbox", key, arrived, begun, tid, **more)
            if _waits(row):
                continue
            name += mark
            args = {
                "caller": caller,
                "failed": failed,
                "execution": f"{chain:016x}",
                "method": method_of(actor, method),
                **unfinished,
            }
            stack = open_until.setdefault(ident, [])
            while stack and stack[-1] <= begun:
                stack.pop()
            if (
                stack and ended > stack[-1]
            ):  # it overlaps another slice: a coroutine, or a call that another thread has answered
                yield from self._track(
                    name, "execution", f"x{self._pid}-{caller}-{id}", begun, ended, tid, **args
                )
                for moment in (begun, ended):  # arrows need slices to begin and end at
                    yield self._slice(name, moment, moment + _THIN_S, tid, cat="execution", args=args)
            else:
                stack.append(ended)
                yield self._slice(name, begun, ended, tid, cat="execution", args=args)

    def counters(self) -> Iterator[dict[str, Any]]:
        """Yield the numbers of queued and of running calls over time."""
        steps: list[tuple[float, int, int]] = []
        for row in self._recording.records:
            if row[1] == EXECUTED:
                changes = ((row[2], 1, 0), (row[3], -1, 1), (row[4], 0, -1))
                steps += changes[: 1 if _waits(row) else 2 if row[0] == UNDER_WAY else 3]
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
        self, row: list[Any], other: tuple[int, int, float, float | None] | None, numbers: Iterator[int]
    ) -> Iterator[dict[str, Any]]:
        """Yield a call that this worker made, and the arrows to its execution and back.

        Args:
            other: ``(pid, tid, begun, ended)`` of the execution, with the file's numbers and times; ``ended`` is None if it is
                unfinished. None if there is no record of the execution.
            numbers: provides ids for arrows.
        """
        number, _, made, answered, id, callee, _, method, ident, failed, waits, sent, received = row
        tid = self.thread(ident)
        mark, unfinished = _marked(number)
        args = {"worker": callee, "failed": failed, "bytes_out": sent, "bytes_in": received, **unfinished}
        name = f"call {method}{mark}"
        if waits:
            yield self._slice(name, made, answered, tid, cat="call", args=args)
        else:
            key = f"c{self._pid}-{callee}-{id}"
            cat = "internal call" if _is_internal(row) else "call"
            yield from self._track(name, cat, key, made, answered, tid, **args)
            yield self._slice(name, made, made + _THIN_S, tid, cat="call", args=args)
            if not unfinished:
                yield self._slice(f"answer {method}", answered, answered + _THIN_S, tid, cat="call")
        if other is None:
            return
        pid, there, begun, ended = other
        forth, back = next(numbers), next(numbers)
        more = {"cat": "call", "bp": "e"}
        yield self._event("s", "call", made, tid, id=forth, cat="call")
        yield {"ph": "f", "name": "call", "ts": begun, "pid": pid, "tid": there, "id": forth, **more}
        if ended is None or unfinished:
            return
        yield {
            "ph": "s",
            "name": "answer",
            "ts": ended,
            "pid": pid,
            "tid": there,
            "id": back,
            "cat": "call",
        }
        yield self._event(
            "f", "answer", max(made, answered - 1e-9) if waits else answered, tid, id=back, **more
        )

    def note(self, row: list[Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a ``NOTED`` record."""
        number, _, begun, ended, kind, what, ident = row
        tid = self.thread(ident)
        mark, unfinished = _marked(number)
        name = f"{kind} {what}{mark}"
        if kind == "stream":  # overlaps other events of its thread
            key = f"n{self._pid}-{what if unfinished else number}"
            yield from self._track(name, kind, key, begun, ended, tid, **unfinished)
        else:
            yield self._slice(name, begun, ended, tid, cat=kind, args=unfinished)
