"""Adds the events of other workers to the results of torch's profilers.

While the drop-in is installed, each profile has a collector (see :mod:`actorrpc.rpc.profiling`): the operators that other workers
ran for calls in the profile are among its events, as ``rpc_async#fn(src -> dst)#remote_op: aten::add`` with ``is_remote`` and the
worker's rank as ``node_id``, and in exported traces. torch does this in C++, and only for the old profiler.

A profile belongs to one thread; only calls of that thread add events.

As in torch, a profile contains the backward pass as ``torch::distributed::autograd::backward``, on the calling thread, and its
work for each message: ``...SendRpcBackward`` processes the gradients that were received for a message which this worker had sent,
and ``...RecvRpcBackward`` sends the gradients of a message back to its sender, on any thread. Only this worker's part of the
pass is included.

``_server_process_global_profile`` profiles the calls that this process executes for other workers.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final

from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList, FunctionEvent

from actorrpc._torch import build_tree
from actorrpc.agent.calls import Execution
from actorrpc.agent.hooks import CallHooks, add_hooks, is_profiled, remove_hooks
from actorrpc.autograd.api import participant
from actorrpc.autograd.local_pass import LocalPass
from actorrpc.autograd.messages import Gradient
from actorrpc.autograd.participant import Participant
from actorrpc.rpc.profiling import (
    Collector,
    Observation,
    ProfilerSettings,
    Row,
    collect,
    collected,
    collector,
    modern,
    unobserve,
)
from actorrpc.wire.identity import WorkerKey

__all__ = ["patches", "profiled_pass"]

_NAME: Final = "torch::distributed::autograd::"
_lock = threading.Lock()  # guards _wanted; a leaf
_wanted: Final[dict[int, list[Collector]]] = {}  # context id -> collectors that record its backward passes


@contextlib.contextmanager
def profiled_pass(context_id: int) -> Iterator[None]:
    """If this thread has a profile, record in it the backward pass that runs in the ``with`` block."""
    if not is_profiled():
        yield
        return
    found = collector()
    worker = participant()
    try:
        if found is not None:
            _watch(worker, context_id, found)
        with modern.record_function(f"{_NAME}backward"):
            yield
    finally:
        if found is not None:
            _forget(worker, context_id, found)


def _watch(worker: Participant, context_id: int, found: Collector) -> None:
    with _lock:
        _wanted.setdefault(context_id, []).append(found)
        worker.watch = partial(_work, worker.me.rank)


def _forget(worker: Participant, context_id: int, found: Collector) -> None:
    with _lock:
        _wanted[context_id].remove(found)
        if not _wanted[context_id]:
            del _wanted[context_id]
        if not _wanted:
            worker.watch = None


def _work(node: int, part: LocalPass, index: int) -> Iterator[tuple[WorkerKey, Gradient]]:
    """Run one stratum of a pass on this worker, whose rank is ``node``, and record the work for each message."""
    began = time.time_ns()
    complete = part.work(index)
    for _ in part.messages(index):
        _note(node, part, "SendRpcBackward", began)
    for each in complete:
        began = time.time_ns()
        yield each  # the caller sends the gradient meanwhile, so the recorded time includes sending
        _note(node, part, "RecvRpcBackward", began)


def _note(node: int, part: LocalPass, name: str, began: int) -> None:
    ended = time.time_ns()
    for found in list(_wanted.get(part.context.id, ())):
        start, end = began - found.began, ended - found.began
        thread = threading.get_ident()
        found.rows.append(Row(_NAME + name, node, start, end, thread, is_remote=False))


_log = logging.getLogger("actorrpc")
_legacy: Final[Any] = profiler_legacy
_COLLECTOR: Final = "_actorrpc_collector"  # the attribute of a modern profile


class _Records(list[Any]):
    """The records that torch's old profiler returns at the end of a profile, and the profile's collector."""

    def __init__(self, records: list[Any], found: Collector | None) -> None:
        super().__init__(records)
        self.collector = found


def _begin(profile: Any) -> Collector:
    """Make the collector of a profile that has just begun. It records the calls of this thread."""
    found = Collector(
        ProfilerSettings(
            profile.record_shapes,
            profile.profile_memory,
            profile.with_stack,
            profile.with_flops,
            profile.with_modules,
        )
    )
    collect(found)
    return found


def _events(found: Collector, offset: int, seen: list[FunctionEvent]) -> list[FunctionEvent]:
    """Return the collected events and torch's own events, ``seen``, in the order of time.

    Args:
        offset: the approximate time of the collector's start, in nanoseconds after the start of the profile.
    """
    times = [
        (event.name, math.ceil(event.time_range.start * 1e3), math.floor(event.time_range.end * 1e3))
        for event in seen
    ]
    offset = _fitted(found, offset, times)
    more = [_event(row, -number, offset) for number, row in enumerate(found.rows, start=1)]
    return sorted([*seen, *more], key=lambda event: (event.time_range.start, -event.time_range.end))


def _fitted(found: Collector, offset: int, seen: list[tuple[str, int, int]]) -> int:
    """Return the offset nearest to ``offset`` with which each call lies in the range that torch has recorded for the call.

    On a busy machine, time may pass between reading the collector's and torch's clock. With the given offset, the work of a call
    could then seem to begin before the call.

    Args:
        seen: the name, start and end of torch's ranges, in nanoseconds of torch's clock.
    """
    ranges: dict[str, list[tuple[int, int]]] = {}
    calls: dict[str, list[tuple[int, int]]] = {}
    for into, what in ((ranges, seen), (calls, found.calls)):
        for name, start, end in what:
            into.setdefault(name, []).append((start, end))
    least, most = [], []
    for name, own in calls.items():
        known = ranges.get(name, ())
        if len(known) != len(own):
            continue  # torch has also recorded calls of other threads with this name
        for (opened, closed), (began, ended) in zip(sorted(known), sorted(own), strict=True):
            least.append(opened - began)
            most.append(closed - ended)
    return max([*least, min([*most, offset])]) if least else offset


def _event(row: Row, id: int, offset: int) -> FunctionEvent:
    return FunctionEvent(
        id=id,
        node_id=row.node,
        name=row.name,
        trace_name=row.name,
        thread=row.thread,
        start_us=(row.start + offset) / 1e3,
        end_us=(row.end + offset) / 1e3,
        fwd_thread=row.forward_thread,
        input_shapes=row.shapes,
        stack=row.stack,
        scope=row.scope,
        use_device=None,
        cpu_memory_usage=row.cpu_memory,
        device_memory_usage=row.device_memory,
        is_async=row.is_async,
        is_remote=row.is_remote,
        sequence_nr=row.sequence,
        is_legacy=True,
        flops=row.flops or None,
    )


def patches() -> list[tuple[Any, str, Any]]:
    """Return the replacements of attributes of torch's profilers: (object, attribute, value)."""
    return [
        _around(_legacy.profile, "_start_trace", _start_trace),
        _around(_legacy, "_disable_profiler_legacy", _disable_profiler_legacy),
        _around(_legacy, "_parse_legacy_records", _parse_legacy_records),
        _around(modern.profile, "_start_trace", _start_trace),
        _around(modern.profile, "__exit__", _exit),
        _around(modern.profile, "_parse_kineto_results", _parse_kineto_results),
        _around(modern.profile, "export_chrome_trace", _export_chrome_trace),
    ]


def _around(place: Any, name: str, ours: Callable[..., Any]) -> tuple[Any, str, Any]:
    """Return the replacement of an attribute by a function that calls ``ours`` with torch's function and the arguments."""
    original = getattr(place, name)

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    return place, name, replacement


def _start_trace(original: Callable[..., Any], profile: Any, *args: Any, **kwargs: Any) -> Any:
    unobserve()
    result = original(profile, *args, **kwargs)
    setattr(profile, _COLLECTOR, _begin(profile))
    return result


# -- the old profiler ---------------------------------------------------------------------------------------


def _disable_profiler_legacy(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = collected()  # called before the profile ends, so that open ranges end within the profile
    return _Records(original(*args, **kwargs), found)


def _parse_legacy_records(original: Callable[..., Any], records: Any, *args: Any, **kwargs: Any) -> Any:
    events = original(records, *args, **kwargs)
    if not isinstance(records, _Records) or records.collector is None:
        return events
    return _events(records.collector, 0, events)


# -- the modern profiler ------------------------------------------------------------------------------------


def _exit(original: Callable[..., Any], profile: Any, *args: Any, **kwargs: Any) -> Any:
    found = getattr(profile, _COLLECTOR, None)
    if found is not None and found is collector():
        collected()
    return original(profile, *args, **kwargs)


def _parse_kineto_results(
    original: Callable[..., Any], profile: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    events = original(profile, result, *args, **kwargs)
    found = getattr(profile, _COLLECTOR, None)
    if found is None or not found.rows:
        return events
    return _events(found, found.began - result.trace_start_ns(), events)


def _export_chrome_trace(
    original: Callable[..., Any], profile: Any, path: str, *args: Any, **kwargs: Any
) -> Any:
    result = original(profile, path, *args, **kwargs)
    found = getattr(profile, _COLLECTOR, None)
    if found is not None and found.rows:
        try:
            _add_to_trace(Path(path), found)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("the events of other workers are not in the trace %s: %s", path, error)
    return result


def _add_to_trace(path: Path, found: Collector) -> None:
    trace = json.loads(path.read_text(encoding="utf-8"), strict=False)
    events = trace["traceEvents"]
    times = [
        (event["name"], math.ceil(event["ts"] * 1e3), math.floor((event["ts"] + event["dur"]) * 1e3))
        for event in events
        if event.get("ph") == "X"
    ]
    offset = _fitted(found, found.began - trace.get("baseTimeNanoseconds", 0), times)
    for node in sorted({row.node for row in found.rows}):
        name = {"name": f"worker of rank {node}"}
        events.append({"ph": "M", "name": "process_name", "pid": f"rank {node}", "tid": 0, "args": name})
    for row in found.rows:
        events.append(
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": row.name,
                "pid": f"rank {row.node}",
                "tid": row.thread,
                "ts": (row.start + offset) / 1e3,
                "dur": (row.end - row.start) / 1e3,
                "args": {"node_id": row.node, "Input Dims": row.shapes},
            }
        )
    path.write_text(json.dumps(trace), encoding="utf-8")


# -- the calls that this process executes -------------------------------------------------------------------

_entered_lock = threading.Lock()  # guards _entered; a thread that holds it may take the lock of agent.hooks
_entered: tuple[_server_process_global_profile, ...] = ()


class _server_process_global_profile(profiler_legacy.profile):
    """Within its ``with`` block, records the operators of the calls that this process executes, on all threads.

    It may be entered in one call from another worker and left in a later call. Several such profiles at a time record the same
    events. It has the arguments and methods of ``torch.autograd.profiler_legacy.profile``. If the called function enters another
    profile of torch, only that profile records the function's operators.

    Attributes:
        process_global_function_events: after the end, a list of the events of each call, in the order in which the calls ended.
        function_events: the events of all calls.
    """

    function_events: EventList | None

    def __enter__(self) -> Any:
        """Begin to record.

        Raises:
            RuntimeError: this profile has been entered before.
        """
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("autograd profiler traces are not reentrant")
        self.entered = True
        self.process_global_function_events: list[list[FunctionEvent]] = []
        _change(lambda entered: (*entered, self))
        return self

    def __exit__(self, *_: object) -> bool:
        """Stop recording, and make the events of all calls that have ended available."""
        if not self.enabled:
            return False
        _change(lambda entered: tuple(each for each in entered if each is not self))
        events = itertools.chain.from_iterable(self.process_global_function_events)
        self.function_events = EventList(
            events, profile_memory=self.profile_memory, with_flops=self.with_flops
        )
        build_tree(self.function_events)
        return False

    def _settings(self) -> ProfilerSettings:
        return ProfilerSettings(
            self.record_shapes, self.profile_memory, self.with_stack, self.with_flops, self.with_modules
        )


class _Observer(CallHooks):
    """Profiles each execution that begins while profiles are entered; then adds the events to the profiles still entered."""

    def on_start(
        self, execution: Execution, function: Any, args: tuple[Any, ...]
    ) -> contextlib.AbstractContextManager[Any] | None:
        entered = _entered
        if not entered:
            return None
        merged = ProfilerSettings(*map(any, zip(*(each._settings() for each in entered), strict=True)))
        return Observation(merged, partial(_hand_out, entered))


_observer = _Observer()


def _hand_out(to: tuple[_server_process_global_profile, ...], events: list[FunctionEvent]) -> None:
    for each in to:
        if each in _entered:
            each.process_global_function_events.append([_own(event) for event in events])


def _own(event: FunctionEvent) -> FunctionEvent:
    """Return a copy of an event for one profile, because each profile builds its own tree of events."""
    found = copy.copy(event)
    found.cpu_children = list(event.cpu_children)
    found.kernels = list(event.kernels)
    return found


def _change(how: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    global _entered
    with _entered_lock:
        before, _entered = _entered, how(_entered)
        if bool(before) != bool(_entered):
            (add_hooks if _entered else remove_hooks)(_observer)
