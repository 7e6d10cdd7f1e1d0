"""Calls in torch's profiles: a range for each call of a profiled thread, and the operators that the call ran on other workers.

While a profiler of torch is on (``torch.profiler``, ``torch.autograd.profiler``, or the old one), a call has a range
``rpc_sync#fn(src -> dst)``, ``rpc_async#...`` or ``rpc_remote#...``, which begins when the call is made, and ends when the value
or error has arrived, on any thread. The execution has a range ``...#execution`` in the profile of the process that executes it,
if that process profiles all its threads. If the calling thread has a :class:`Collector` (:func:`collect`), the called
worker profiles the execution, and sends the operators back with the answer, unless the call fails.

Two :class:`~actorrpc.agent.hooks.CallHooks` do this: :class:`_Ranges` for calls that are made while a profiler is on, and
:class:`_Host` for executions whose call has the header field ``profile``. The tables that threads share (``_open``, ``_asked``)
are changed in atomic steps, and no lock is held while a range ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from types import FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch.autograd import profiler_legacy as legacy
from torch.autograd.profiler_util import MEMORY_EVENT_NAME, FunctionEvent

from actorrpc import _torch
from actorrpc._exceptions import is_of_handler
from actorrpc.agent.calls import Call, Execution
from actorrpc.agent.hooks import CallHooks, add_hooks, is_profiled
from actorrpc.flight_recorder import OWN
from actorrpc.rpc import rref
from actorrpc.transport.signals import uninterruptible

__all__ = [
    "Collector",
    "Observation",
    "ProfiledSpan",
    "ProfilerSettings",
    "Row",
    "collect",
    "collected",
    "collector",
    "modern",
    "name_of",
    "profiled",
    "unobserve",
]

_Reader = Callable[[list[FunctionEvent]], Any]

modern: Final = _torch.profiler
profiled: Final = _torch.thread_is_profiled

_log: Final = logging.getLogger("actorrpc")
_REMOTE: Final = "#remote_op: "
_STACKS: Final = (_torch.ActiveProfilerType.NVTX, _torch.ActiveProfilerType.ITT)
_numbers: Final = itertools.count(1)


class Row(NamedTuple):
    """One event of a profile, as it is sent.

    Attributes:
        node: the rank of the worker on which the event happened; -1: the worker that sent the row.
        start, end: in nanoseconds from the start of the execution or profile that contains the row.
    """

    name: str
    node: int
    start: int
    end: int
    thread: int = 0
    forward_thread: int = 0
    is_async: bool = False
    is_remote: bool = True
    shapes: Any = ()
    stack: Any = ()
    scope: int = 0
    sequence: int = -1
    cpu_memory: int = 0
    device_memory: int = 0
    flops: int = 0


class ProfilerSettings(NamedTuple):
    """What a profile records in addition to times. The header of a profiled call contains these settings."""

    shapes: bool = False
    memory: bool = False
    stack: bool = False
    flops: bool = False
    modules: bool = False


@dataclass(slots=True, eq=False)
class Collector:
    """The events that one profile of one thread gets from other workers.

    Attributes:
        settings: what the workers that execute the thread's calls record.
        native: whether torch's own profiler records the ranges of the calls; otherwise the ranges are added to ``rows``.
        began: when the profile began, in nanoseconds since the epoch.
        rows: the rows that have arrived from other workers; times count from ``began``.
        calls: if ``native``, name, start and end of each ended call. The times count from ``began``, and are within the range
            that torch has recorded for the call.
    """

    settings: ProfilerSettings
    native: bool = True
    began: int = field(default_factory=time.time_ns)
    rows: list[Row] = field(default_factory=list)
    calls: list[tuple[str, int, int]] = field(default_factory=list)
    _before: Collector | None = None  # the thread's collector before this one was set

    def settle(self) -> None:
        """End the ranges that are still open; rows that arrive later are dropped."""
        for span in list(_open):
            if span.collector is self:
                span.close()


class _Here(threading.local):
    """The state of this thread."""

    collector: Collector | None = None
    readers: list[_Reader] | None = None  # of the Observation of this thread; None: no Observation


_here = _Here()
_open: Final[dict[ProfiledSpan, None]] = {}  # ranges that have not ended
_asked: Final[dict[int, ProfiledSpan]] = {}  # by number: ranges of calls whose answer may bring rows


def collect(found: Collector) -> None:
    """Collect in ``found`` what other workers record for the calls that this thread makes from now on."""
    found._before, _here.collector = _here.collector, found


def collector() -> Collector | None:
    """Return the collector of this thread's calls, if there is one."""
    return _here.collector


def collected() -> Collector | None:
    """Remove the collector of this thread's calls, end its open ranges, and return it; None if there is none."""
    found = _here.collector
    if found is not None:
        _here.collector, found._before = found._before, None
        found.settle()
    return found


# -- ranges of calls ----------------------------------------------------------------------------------------


class ProfiledSpan:
    """The range of one call in the profile of the thread that makes it. Thread-safe.

    Args:
        key: the name of the range.
        node: the rank of the called worker; -1 if that worker returns no rows.

    Attributes:
        thread: the number of the thread that makes the call.
        rows: the rows that the called worker has recorded; times count from the start of the execution.
    """

    __slots__ = ("_end", "began", "collector", "key", "node", "number", "rows", "thread")

    def __init__(self, key: str, node: int = -1) -> None:
        self.key = key
        self.node = node
        self.collector = _here.collector
        self.rows: list[Row] = []
        self.number = 0
        self.thread = threading.get_ident()
        if self.collector is not None:
            self.number = next(_numbers)
            _asked[self.number] = self
        # close() removes the entry of this list: the thread that gets the entry ends the range.
        self._end = [_begin(key) if self.collector is None or self.collector.native else None]
        # Read after the range has begun, as close() reads its time before the range ends: both times are within the range.
        self.began = time.time_ns()
        _open[self] = None

    @uninterruptible
    def close(self) -> None:
        """End the range. Idempotent."""
        try:
            end = self._end.pop()
        except IndexError:
            return
        ended = time.time_ns()
        try:
            if end is not None:
                end.set_result(None)
            if self.collector is not None:
                _asked.pop(self.number, None)
                self._hand_over(self.collector, ended)
        finally:
            _open.pop(self, None)

    def _hand_over(self, collector: Collector, ended: int) -> None:
        start, end = self.began - collector.began, ended - collector.began
        if collector.native:
            collector.calls.append((self.key, start, end))
        else:
            collector.rows.append(Row(self.key, -1, start, end, self.thread, is_async=True))
        if self.rows:
            # Clocks of different hosts cannot be compared, so the execution is shown in the middle of its call.
            took = max(row.end for row in self.rows)
            offset = start + max(0, end - start - took) // 2
            collector.rows += [
                row._replace(
                    name=self.key + _REMOTE + row.name,
                    node=self.node if row.node < 0 else row.node,
                    start=row.start + offset,
                    end=row.end + offset,
                )
                for row in self.rows
            ]


def _begin(name: str) -> Any:
    """Begin a range of torch's in the profile of this thread, and return a future; setting its result ends the range.

    None if the profiler keeps ranges on a stack of the thread (NVTX, ITT), where another thread cannot end them, or if torch
    lacks the functions.
    """
    if _torch.begin_range is None or _torch.end_range_with is None or _torch.profiler_type() in _STACKS:
        return None
    _watch_ends()
    end: Any = _torch.NativeFuture([])
    with _torch.NoFunctionMethods():
        _torch.end_range_with(_torch.begin_range(name, None), end)
    return end


def _watch_ends() -> None:
    """Replace the functions of torch that end a profile by functions that end the open ranges first.

    A process has one modern profiler at a time, for one thread or for all. The profiler frees its events when it ends, and torch
    does not guard against a range that ends later. (Calls that another thread begins at that moment are not guarded here either.)
    The old profiler is started for each thread separately, and does not show a range that ends after the profile.
    """
    for module, name in _torch.PROFILE_ENDS:
        original = getattr(module, name)
        if not hasattr(original, "ends_ranges"):
            setattr(module, name, _ending(original, of_all=module is modern))


def _ending(original: Callable[..., Any], *, of_all: bool) -> Callable[..., Any]:
    @wraps(original)
    def disable(*args: Any) -> Any:
        here = threading.get_ident()
        concerned = [span for span in list(_open) if of_all or span.thread == here]
        for span in concerned:
            span.close()
        while any(span in _open for span in concerned):
            time.sleep(0)  # another thread is ending one of these ranges
        return original(*args)

    disable.ends_ranges = True  # type: ignore[attr-defined]
    return disable


def name_of(function: Any) -> str:
    """Return the name that a function has in profiles; for a function of torch, the name of the operator.

    ``function`` may be a str: the name of a method whose object is on another worker.
    """
    if isinstance(function, str):
        return function
    if isinstance(function, torch.jit.ScriptFunction):
        return str(function.qualified_name)
    found = _torch.find_builtin(function) or getattr(function, "__qualname__", None)
    return found or type(function).__qualname__


# Calls of functions of these modules have ranges, as calls of users' functions have; other functions of this package have none.
_SHOWN: Final = ("actorrpc.compat.", "actorrpc.nn", "actorrpc.optim.")


def _called(call: Call, function: Any, args: tuple[Any, ...]) -> tuple[str, Any] | None:
    """Return how a call was made and which function it calls; None for a call that this package makes for itself."""
    if function is rref._create:
        return "remote", args[3][2] if args[2] is rref._invoke_kept else args[2]
    mode = "sync" if call.future is None else "async"
    if function is rref._invoke:
        return mode, args[1]
    module = function.__module__ if type(function) is FunctionType else None
    if type(module) is str and module.startswith(OWN) and not module.startswith(_SHOWN):
        return None
    return mode, function


class _Ranges(CallHooks):
    """Opens a range for each profiled call, and tells the called worker what to record."""

    profiled_only = True

    def on_call(self, call: Call, function: Any, args: tuple[Any, ...]) -> None:
        made = _called(call, function, args)
        if made is None:
            return
        key = f"rpc_{made[0]}#{name_of(made[1])}({call.agent.name} -> {call.peer.name})"
        span = call.notes[self] = ProfiledSpan(key, call.peer.record.rank)
        settings = () if span.collector is None else map(bool, span.collector.settings)
        call.fields["profile"] = [span.number, key, *settings]

    def on_answer(self, call: Call, error: BaseException | None) -> None:
        span = call.notes.get(self)
        if span is not None:
            span.close()


# -- where a profiled call is executed ----------------------------------------------------------------------


class _Answer:
    """The value and the rows of a profiled call. Unpickling returns the value, and adds the rows to the range of the call.

    The rows are not in the answer's header, which is too small for the rows of a long profile.
    """

    __slots__ = ("number", "rows", "value")

    def __init__(self, value: Any, number: int, rows: list[Row]) -> None:
        self.value = value
        self.number = number
        self.rows = rows

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.value, self.number, [tuple(row) for row in self.rows])


def _opened(value: Any, number: int, rows: list[Any]) -> Any:
    span = _asked.pop(number, None)
    if span is not None:
        span.rows = [Row(*row) for row in rows]
    return value


class _Host(CallHooks):
    """Records the executions of the calls that profiled threads of other workers make."""

    field = "profile"

    def on_start(
        self, execution: Execution, function: Any, args: tuple[Any, ...]
    ) -> AbstractContextManager[Any] | None:
        number, key, *settings = execution.fields["profile"]
        if settings:
            return _Recording(execution, number, ProfilerSettings(*settings))
        return modern.record_function(f"{key}#execution") if is_profiled() else None


class _Recording:
    """A context manager that records the operators of an execution, and adds them to the answer."""

    def __init__(self, execution: Execution, number: int, settings: ProfilerSettings) -> None:
        self._number = number
        self._found = Collector(settings, native=False)
        self._observing = Observation(settings, lambda events: self._found.rows.extend(map(_row, events)))
        execution.convert = self._answer

    def __enter__(self) -> None:
        collect(self._found)
        self._observing.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._observing.__exit__()
        _here.collector, self._found._before = self._found._before, None
        if kind is not None:
            self._found.settle()

    def _answer(self, value: Any) -> _Answer:
        self._found.settle()
        return _Answer(value, self._number, self._found.rows)


add_hooks(_Ranges())
add_hooks(_Host())


# -- profiles of executions --------------------------------------------------------------------------------


def _is_in_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no event loop runs on this thread
        return False


class Observation:
    """A context manager that profiles this thread in its block, and calls ``reader`` with the events, even if the block raises.

    If this thread is being observed already, the reader gets all events of that observation at its end. If the program profiles
    this thread itself, the reader gets nothing, because torch has one profile per thread. The reader also gets nothing in a task
    of an event loop, because other tasks run on the thread meanwhile.
    """

    def __init__(self, settings: ProfilerSettings, reader: _Reader) -> None:
        self._settings = settings
        self._reader = reader
        self._readers: list[_Reader] | None = None  # set while this object observes the thread

    def __enter__(self) -> None:
        if _here.readers is not None:
            _here.readers.append(self._reader)
            return
        if profiled() or _is_in_task():
            return
        profile = legacy.profile(
            record_shapes=self._settings.shapes,
            profile_memory=self._settings.memory,
            with_stack=self._settings.stack,
            with_flops=self._settings.flops,
            with_modules=self._settings.modules,
        )
        try:
            _torch.enable_legacy(profile.config())
        except Exception as error:
            if is_of_handler(error):
                raise
            _log.warning(
                "a call is not in the profile of its caller: torch's profiler does not start: %s", error
            )
            return
        self._readers = _here.readers = [self._reader]

    def __exit__(self, *_: object) -> None:
        readers, self._readers = self._readers, None
        if readers is not None and _here.readers is readers:
            unobserve()


def unobserve() -> None:
    """End the observation of this thread, if there is one: the program is about to profile the thread itself."""
    readers, _here.readers = _here.readers, None
    if readers is None:
        return
    # The call has ended: an error of its profile must not change its result.
    try:
        events = _torch.parse_legacy(_paired(_torch.disable_legacy()))
        for read in readers:
            read([event for event in events if event.name != MEMORY_EVENT_NAME])
    except Exception as error:
        if is_of_handler(error):
            raise
        _log.warning(
            "what a call has done is not in the profile of its caller: %s: %s", type(error).__name__, error
        )


def _paired(threads: list[list[Any]]) -> list[list[Any]]:
    """Return the records of each thread, with the end of each range moved to the thread on which the range began.

    Ends of ranges that began before the profile are removed. Ranges of gloo's operations end on another thread. torch's reader
    raises if the list of one thread does not contain both ends of a range.
    """
    began = {
        (record.handle(), record.node_id()): at
        for at, records in enumerate(threads)
        for record in records
        if record.kind() == "push"
    }
    kept: list[list[Any]] = [[] for _ in threads]
    moved = set()
    for at, records in enumerate(threads):
        for record in records:
            place: int | None = at
            if record.kind() == "pop":
                place = began.get((record.handle(), record.node_id()))
            if place is not None:
                kept[place].append(record)
            if place is not None and place != at:
                moved.add(place)
    for place in moved:
        kept[place].sort(key=kept[place][0].cpu_elapsed_us)
    return kept


def _row(event: FunctionEvent) -> Row:
    return Row(
        event.name,
        -1,
        round(event.time_range.start * 1e3),
        round(event.time_range.end * 1e3),
        event.thread,
        event.fwd_thread or 0,
        event.is_async,
        shapes=event.input_shapes,
        stack=event.stack,
        scope=event.scope,
        sequence=event.sequence_nr,
        cpu_memory=event.cpu_memory_usage,
        device_memory=event.device_memory_usage,
        flops=event.flops or 0,
    )


def _after_fork() -> None:
    """In a forked child: forget the ranges that the parent's threads have begun."""
    _open.clear()
    _asked.clear()
    _here.collector = _here.readers = None


os.register_at_fork(after_in_child=_after_fork)
