"""Adds the events of other workers to the results of torch's profilers.

While the drop-in is installed, each profile has a collector (see :mod:`actorrpc.rpc.profiling`): the operators that other workers
ran for calls in the profile are among its events, as ``rpc_async#fn(src -> dst)#remote_op: aten::add`` with ``is_remote`` and the
worker's rank as ``node_id``, and in exported traces. torch does this in C++, and only for the old profiler.

A profile belongs to one thread; only calls of that thread add events.

As in torch, a profile contains the backward pass as ``torch::distributed::autograd::backward``, on the calling thread, and its
work for each message: ``...SendRpcBackward`` processes the gradients that were received for a message which this worker had sent,
and ``...RecvRpcBackward`` sends the gradients of a message back to its sender, on any thread. Only this worker's part of the
pass is included.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final

from torch._C._autograd import DeviceType
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import FunctionEvent

from actorrpc.autograd.api import participant
from actorrpc.autograd.local_pass import LocalPass
from actorrpc.autograd.messages import Gradient
from actorrpc.autograd.participant import Participant
from actorrpc.rpc.profiling import (
    Collector,
    ProfilerSettings,
    Row,
    collect,
    collected,
    collector,
    modern,
    profiled,
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
    if not (modern._is_profiler_enabled or profiled()):
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
        device_type=DeviceType.CPU,
        is_legacy=True,
        flops=row.flops or None,
    )


def patches() -> list[tuple[Any, str, Any]]:
    """Return the replacements of attributes of torch's profilers: (object, attribute, value)."""
    return [
        (_legacy.profile, "_start_trace", _starting(_legacy.profile._start_trace)),
        (_legacy, "_disable_profiler_legacy", _disabling(_legacy._disable_profiler_legacy)),
        (_legacy, "_parse_legacy_records", _parsing_legacy(_legacy._parse_legacy_records)),
        (modern.profile, "_start_trace", _starting(modern.profile._start_trace)),
        (modern.profile, "__exit__", _exiting(modern.profile.__exit__)),
        (modern.profile, "_parse_kineto_results", _parsing(modern.profile._parse_kineto_results)),
        (modern.profile, "export_chrome_trace", _exporting(modern.profile.export_chrome_trace)),
    ]


def _starting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def start_trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        unobserve()
        result = original(self, *args, **kwargs)
        setattr(self, _COLLECTOR, _begin(self))
        return result

    return start_trace


# -- the old profiler ---------------------------------------------------------------------------------------


def _disabling(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def disable_profiler_legacy(*args: Any, **kwargs: Any) -> Any:
        found = collected()  # called before the profile ends, so that open ranges end within the profile
        return _Records(original(*args, **kwargs), found)

    return disable_profiler_legacy


def _parsing_legacy(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def parse_legacy_records(records: Any, *args: Any, **kwargs: Any) -> Any:
        events = original(records, *args, **kwargs)
        if not isinstance(records, _Records) or records.collector is None:
            return events
        return _events(records.collector, 0, events)

    return parse_legacy_records


# -- the modern profiler ------------------------------------------------------------------------------------


def _exiting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def exit(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self, _COLLECTOR, None)
        if found is not None and found is collector():
            collected()
        return original(self, *args, **kwargs)

    return exit


def _parsing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def parse_kineto_results(self: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        events = original(self, result, *args, **kwargs)
        found = getattr(self, _COLLECTOR, None)
        if found is None or not found.rows:
            return events
        return _events(found, found.began - result.trace_start_ns(), events)

    return parse_kineto_results


def _exporting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def export_chrome_trace(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        result = original(self, path, *args, **kwargs)
        found = getattr(self, _COLLECTOR, None)
        if found is not None and found.rows:
            try:
                _add_to_trace(Path(path), found)
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.warning("the events of other workers are not in the trace %s: %s", path, error)
        return result

    return export_chrome_trace


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
        events.append({"ph": "M", "name": "process_name", "pid": _process(node), "tid": 0, "args": name})
    for row in found.rows:
        events.append(
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": row.name,
                "pid": _process(row.node),
                "tid": row.thread,
                "ts": (row.start + offset) / 1e3,
                "dur": (row.end - row.start) / 1e3,
                "args": {"node_id": row.node, "Input Dims": row.shapes},
            }
        )
    path.write_text(json.dumps(trace), encoding="utf-8")


def _process(node: int) -> str:
    return f"rank {node}"
