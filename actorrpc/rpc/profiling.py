"""Calls in the profiles of torch: a range for each call that a profiled thread makes, and what ran for it elsewhere.

While a profiler of torch is on (``torch.profiler``, ``torch.autograd.profiler``, or the old one), a call shows as
``rpc_sync#fn(src -> dst)``, ``rpc_async#...`` or ``rpc_remote#...``: from its start to the moment in which its outcome is
here, on whichever thread that is. Its execution shows as ``...#execution`` in the profile of the process that executes it,
if that one profiles all its threads. Where somebody collects (:class:`Collector`: the floors above), that process is asked
to profile the execution, and the operators come back with the answer. A call that fails brings none.

Nothing here runs in a call while no profiler is on. Ranges may end on any thread; the tables that threads share (``_open``,
``_asked``) are changed in atomic steps, and no lock is held while a range ends.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch._C._profiler import ActiveProfilerType
from torch.autograd import profiler_legacy as legacy
from torch.autograd.profiler_util import MEMORY_EVENT_NAME, FunctionEvent

from actorrpc._exception_text import is_of_handler
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import Execution
from actorrpc.agent.executor import ASYNC_MARK, Later
from actorrpc.agent.hooks import RIDERS, Interceptor
from actorrpc.agent.peers import Peer
from actorrpc.futures import Future
from actorrpc.transport.signals import uninterruptible
from actorrpc.wire.headers import Header

__all__ = [
    "Collector",
    "Profiled",
    "ProfiledFuture",
    "ProfiledSpan",
    "ProfilerSettings",
    "Row",
    "calling",
    "collect",
    "collected",
    "collector",
    "intercept",
    "modern",
    "name_of",
    "observe",
    "profiled",
    "unobserve",
]

T = TypeVar("T")
_Reader = Callable[[list[FunctionEvent]], Any]

_autograd: Final[Any] = torch.autograd
#: torch's module of the modern profiler, whose ``_is_profiler_enabled`` says whether one is on in any thread.
modern: Final[Any] = torch.autograd.profiler
#: Says whether a profiler is on in this thread.
profiled: Final[Callable[[], bool]] = _autograd._profiler_enabled

_log: Final = logging.getLogger("actorrpc")
_REMOTE: Final = "#remote_op: "
_enter: Final[Any] = torch.ops.profiler._record_function_enter_new
_end_with: Final[Any] = torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction
_find_builtin: Final[Callable[[Any], str | None]] = torch.jit._builtins._find_builtin
_profiler_type: Final[Callable[[], Any]] = torch._C._autograd._profiler_type
_STACKS: Final = (ActiveProfilerType.NVTX, ActiveProfilerType.ITT)
_numbers: Final = itertools.count(1)


class Row(NamedTuple):
    """One event of a profile, as it travels.

    Attributes:
        node: the rank of the worker that it happened on; -1 for the one that the row comes from.
        start, end: in nanoseconds from the start of what the row is a part of.
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
    """What a profile records besides times; travels with calls."""

    shapes: bool = False
    memory: bool = False
    stack: bool = False
    flops: bool = False
    modules: bool = False


@dataclass(slots=True, eq=False)
class Collector:
    """What one profile of one thread gets from elsewhere.

    Attributes:
        settings: what the workers that execute its calls are to record.
        native: whether torch's own profiler records the ranges of its calls; otherwise they become rows, too.
        began: when it began, in nanoseconds since the epoch.
        rows: what has come; times count from ``began``.
        calls: name, start and end of each call that is over and has a range of torch's; times count from ``began``, and
            are within that range.
    """

    settings: ProfilerSettings
    native: bool = True
    began: int = field(default_factory=time.time_ns)
    rows: list[Row] = field(default_factory=list)
    calls: list[tuple[str, int, int]] = field(default_factory=list)
    _before: Collector | None = None  # what the thread's calls collected before

    def settle(self) -> None:
        """End the ranges that are still open: what comes later comes too late."""
        for span in list(_open):
            if span.collector is self:
                span.close()


class _Here(threading.local):
    """What goes on in this thread."""

    collector: Collector | None = None
    calling: ProfiledSpan | None = None  # the range of the call that is being made
    readers: list[_Reader] | None = None  # of the execution that is observed


_here = _Here()
_open: Final[dict[ProfiledSpan, None]] = {}  # ranges that are not over
_asked: Final[dict[int, ProfiledSpan]] = {}  # whose rows are awaited, by number


def collect(found: Collector) -> None:
    """Have the calls that this thread makes from now on collect what others record for them."""
    found._before, _here.collector = _here.collector, found


def collector() -> Collector | None:
    """Return where this thread's calls collect, if they do."""
    return _here.collector


def collected() -> Collector | None:
    """Return where this thread's calls have collected, if they have. They no longer do; ranges that are open end."""
    found = _here.collector
    if found is not None:
        _here.collector, found._before = found._before, None
        found.settle()
    return found


# -- ranges of calls ----------------------------------------------------------------------------------------


class ProfiledSpan:
    """The range of one call in the profile of the thread that makes it. Thread-safe.

    Args:
        key: its name.
        node: the rank of the worker that is called; -1 where nothing comes back from it.

    Attributes:
        thread: the number of the thread that makes the call.
        rows: what that worker has recorded; times count from the start of the execution.
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
        # The thread that takes it out of the list ends the range.
        self._end = [_begin(key) if self.collector is None or self.collector.native else None]
        self.began = time.time_ns()  # in the range, as is what it ends with: an order that no delay changes
        _open[self] = None

    @uninterruptible
    def close(self) -> None:
        """End the range; only the first call does."""
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
            # Clocks of different hosts cannot be compared: the execution is put into the middle of its call.
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
    """Begin a range of torch's; setting the result of what is returned ends it, for the profile of this thread.

    None where ranges are on a stack of the thread (NVTX, ITT): they cannot end elsewhere, or in another order.
    """
    if _profiler_type() in _STACKS:
        return None
    _watch_ends()
    end: Any = torch._C.Future([])
    with torch._C.DisableTorchFunctionSubclass():
        _end_with(_enter(name, None), end)
    return end


def _watch_ends() -> None:
    """See that ranges which are still open end before the profile does that they are in.

    The modern profiler frees its events when it ends, and torch does not guard against a range that ends after that; there
    is one at a time, for one thread or all. (Of all: not guarded is a call that another thread begins in the very moment of
    the end.) The old one, of which each thread has its own, would not show the range.
    """
    for module, name in ((modern, "_disable_profiler"), (legacy, "_disable_profiler_legacy")):
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
            time.sleep(0)  # another thread is ending it in this moment
        return original(*args)

    disable.ends_ranges = True  # type: ignore[attr-defined]
    return disable


def name_of(function: Any) -> str:
    """Return the name that a function has in profiles: that of the operator where it is one of torch's.

    A method of a value that only another worker knows is given by its name.
    """
    if isinstance(function, str):
        return function
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    return _find_builtin(function) or getattr(function, "__qualname__", None) or type(function).__qualname__


@uninterruptible
class calling:
    """``with calling("async", fn, agent, to) as span:`` opens the range of the call that is made in the block.

    An error in the block ends the range, and so does the block's end where the mode is ``sync``; otherwise the one that sees to
    the outcome does.

    Args:
        mode: ``sync``, ``async`` or ``remote``.
        function: what is called; see :func:`name_of`.
        to: the worker's peer, name, rank or WorkerInfo.

    Raises:
        UnknownWorkerError: there is no such worker.
    """

    __slots__ = ("_agent", "_before", "_key", "_mode", "_node", "_span")

    def __init__(self, mode: str, function: Any, agent: Agent, to: Any) -> None:
        peer = to if isinstance(to, Peer) else agent.peer(to)
        self._agent = agent
        self._mode = mode
        self._key = f"rpc_{mode}#{name_of(function)}({agent.name} -> {peer.name})"
        self._node = peer.record.rank

    def __enter__(self) -> ProfiledSpan:
        self._span = ProfiledSpan(self._key, self._node)
        self._before, _here.calling = _here.calling, self._span
        _ride(self._agent, 1)
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ride(self._agent, -1)
        _here.calling = self._before
        if kind is not None or self._mode == "sync":
            self._span.close()


class Profiled:
    """Has futures of a class end the range ``span`` when they complete, before the thread that waits for them goes on."""

    __slots__ = ()
    span: ProfiledSpan | None

    def conclude(
        self, value: Any, error: BaseException | None, submit: Callable[..., Any] | None = None
    ) -> None:
        if self.span is not None:
            self.span.close()
        super().conclude(value, error, submit)  # type: ignore[misc]


class ProfiledFuture(Profiled, Future[T]):
    """The future of a call that is profiled."""

    __slots__ = ("span",)

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__(devices=devices)
        self.span = None


# -- with the call, and back with the answer ----------------------------------------------------------------


class _Rider(Interceptor):
    """Tells the worker that is called what the call is called and what is to be recorded.

    What comes back does not come in the answer's header: rows may be more than one takes.
    """

    def request_header(self, header: Header, peer: Peer) -> None:
        span, _here.calling = _here.calling, None  # calls that making it takes are none of the program's
        if span is not None:
            settings = () if span.collector is None else map(bool, span.collector.settings)
            header["profile"] = [span.number, span.key, *settings]


_rider: Final = _Rider()
# Guards _riding and changes of agents' lists of interceptors; nothing is called under it.
_lock = threading.Lock()
_riding = 0


def _ride(agent: Agent, more: int) -> None:
    """Have calls be seen while any thread makes one that is profiled."""
    global _riding
    with _lock:
        _riding += more
        _intercept(agent, _rider, _riding > 0)


def intercept(agent: Agent, interceptor: Interceptor, on: bool) -> None:
    """Have an interceptor take part in an agent's calls, or no more. For the floors above. Thread-safe."""
    with _lock:
        _intercept(agent, interceptor, on)


def _intercept(agent: Agent, interceptor: Interceptor, on: bool) -> None:
    others = [each for each in agent.interceptors if each is not interceptor]
    agent.interceptors = [*others, interceptor] if on else others


class _Answer:
    """A value with rows. What the caller opens is the value; the rows are filed meanwhile."""

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


class _Host(_Rider):
    """Records what the call of a profiled thread does here."""

    def wrap(
        self,
        execution: Execution,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[[], Any],
    ) -> Callable[[], Any]:
        """Return what runs the call and records it."""
        assert execution.header is not None
        number, key, *settings = execution.header["profile"]
        if settings:
            later = getattr(function, ASYNC_MARK, None) is not None
            return lambda: _record(call, number, ProfilerSettings(*settings), later)
        return lambda: _mark(call, key)


RIDERS["profile"] = _Host()


def _mark(call: Callable[[], Any], key: str) -> Any:
    if not (modern._is_profiler_enabled or profiled()):
        return call()
    with modern.record_function(f"{key}#execution"):
        return call()


def _record(call: Callable[[], Any], number: int, settings: ProfilerSettings, later: bool) -> Any:
    """Run a call and put what it did into its answer. ``later``: what it returns is a future of the answer."""
    mine = Collector(settings, native=False)
    collect(mine)
    try:
        value = observe(call, settings, lambda events: mine.rows.extend(map(_row, events)))
    except BaseException:
        mine.settle()
        raise
    finally:
        _here.collector, mine._before = mine._before, None
    if type(value) is not Later and not later:
        mine.settle()
        return _Answer(value, number, mine.rows)
    future = value.future if type(value) is Later else value
    if not isinstance(future, torch._C.Future):
        return value  # the executor says what is wrong with it
    answer: Future[Any] = Future()

    def ready(done: Any) -> None:
        mine.settle()
        try:
            result = done.value()
        except BaseException as error:
            answer.set_exception(error)
            answer.acknowledge()  # by the executor
        else:
            answer.set_result(_Answer(result, number, mine.rows))

    future.add_done_callback(ready)
    return Later(answer)


# -- profiles of executions --------------------------------------------------------------------------------


def observe(call: Callable[[], T], settings: ProfilerSettings, reader: _Reader) -> T:
    """Run a call under a profiler and return what it returns; the reader gets the events, even if the call raises.

    Where this thread is being observed already, the reader gets all of that, when it is over. Where a profile of the
    program's own is on, it gets nothing: torch has one profile a thread.
    """
    if _here.readers is not None:
        _here.readers.append(reader)
        return call()
    if profiled():
        return call()
    profile = legacy.profile(
        record_shapes=settings.shapes,
        profile_memory=settings.memory,
        with_stack=settings.stack,
        with_flops=settings.flops,
        with_modules=settings.modules,
    )
    try:
        _autograd._enable_profiler_legacy(profile.config())
    except Exception as error:
        if is_of_handler(error):
            raise
        _log.warning("a call is not in the profile of its caller: torch's profiler does not start: %s", error)
        return call()
    readers = _here.readers = [reader]
    try:
        return call()
    finally:
        if _here.readers is readers:
            unobserve()


def unobserve() -> None:
    """Give this thread's profiler free, if it is being observed: a profile of the program's own is about to begin."""
    readers, _here.readers = _here.readers, None
    if readers is None:
        return
    # The call is over, and what it gives does not depend on what can be told of it.
    try:
        events = legacy._parse_legacy_records(_paired(_autograd._disable_profiler_legacy()))
        for read in readers:
            read([event for event in events if event.name != MEMORY_EVENT_NAME])
    except Exception as error:
        if is_of_handler(error):
            raise
        _log.warning(
            "what a call has done is not in the profile of its caller: %s: %s", type(error).__name__, error
        )


def _paired(threads: list[list[Any]]) -> list[list[Any]]:
    """Return the records of each thread with the ends of the ranges that have begun there, and no other ends.

    A range may end on another thread, as those of gloo's operations do, or have begun before the profile. torch's own
    reader looks for both ends of a range in the list of one thread, and gives up.
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
    """In a child: what the parent's threads have begun is none of its own."""
    global _lock, _riding
    _lock, _riding = threading.Lock(), 0
    _open.clear()
    _asked.clear()
    _here.collector = _here.calling = _here.readers = None


os.register_at_fork(after_in_child=_after_fork)
