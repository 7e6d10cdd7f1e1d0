"""Spans of OpenTelemetry for calls, for workers with ``ACTORRPC_OTEL=1`` or ``init(otel=True)``.

A call that is made within a sampled span has a span of kind CLIENT, and its execution, on any worker, has a child span of kind
SERVER: 25 bytes in the header of the call name the trace. Names and attributes follow OpenTelemetry's conventions for RPC,
https://opentelemetry.io/docs/specs/semconv/rpc/rpc-spans/. This module never begins a trace: if there is no current span, or
the current span is not sampled, no span is begun, no trace is sent, and the worker that executes the call makes no span either.

Hooks (:class:`~actorrpc.agent.hooks.CallHooks`) of the agent make the spans. A call that waits until its actor is alive is sent
in a copy of its caller's context, and therefore within the caller's span. A call that is sent several times has a span for each
sending. Calls that this package makes for itself have no spans. Only the API of OpenTelemetry is used: a process without an SDK
forwards the traces of other processes.
"""

from __future__ import annotations

import importlib
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from types import FunctionType
from typing import Any, Final

from actorrpc import _time
from actorrpc._exceptions import format_error, say, type_name
from actorrpc.agent.calls import Call, Execution
from actorrpc.agent.context import Worker
from actorrpc.agent.hooks import CallHooks
from actorrpc.errors import ConfigError
from actorrpc.flight_recorder import method_of, name_of
from actorrpc.rpc import api

__all__ = ["start"]

# The two halves of the trace's id, the span's id, and flags: the fields of the header that W3C's Trace Context defines.
_IDS: Final = struct.Struct(">QQQB")
_HALF: Final = (1 << 64) - 1
_SAMPLED: Final = 1
_OURS: Final = "actorrpc."
_OF_RREFS: Final = "actorrpc.rpc.rref"
_STACK: Final = 20_000  # the most characters of a stack in a span


def _of_call(function: Any, args: tuple[Any, ...]) -> str:
    """Return the name of the user's function or method that a call runs; empty if the call runs only code of this package."""
    module = function.__module__ if type(function) is FunctionType else None
    if type(module) is not str or not module.startswith(_OURS):
        return method_of("", name_of(function))
    if module == _OF_RREFS:
        match function.__name__:
            case "_create":  # of rpc.remote()
                return method_of("", name_of(args[2]))
            case "_invoke":  # a method of the value of an RRef
                return str(args[1])
    return ""


def _text(error: BaseException) -> str:
    try:
        return format_error(error, say(error), "", lambda _: None)[-_STACK:]
    except BaseException:  # memory has run out
        return ""


class _OtelApi:
    """The API of OpenTelemetry, which is loaded only if spans are wanted."""

    def __init__(self) -> None:
        try:
            self.trace: Any = importlib.import_module("opentelemetry.trace")
            self.context: Any = importlib.import_module("opentelemetry.context")
        except ImportError:
            raise ConfigError(
                "ACTORRPC_OTEL=1 (otel=True) needs opentelemetry-api: pip install 'actorrpc[otel]'"
            ) from None
        # This tracer uses the program's provider, even if the program sets the provider later.
        self.tracer: Any = self.trace.get_tracer("actorrpc")
        self.current: Callable[[], Any] = self._reader()

    def _reader(self) -> Callable[[], Any]:
        """Return a function that returns the current span, or None.

        The function reads the context variable of the API, which takes a fifth of the time of a call of the API. If a version
        of the API has another variable, or the program keeps the context elsewhere, the function calls the API.
        """
        try:
            variable = self.context._RUNTIME_CONTEXT._current_context
            key = importlib.import_module("opentelemetry.trace.propagation")._SPAN_KEY
            if isinstance(variable, ContextVar) and isinstance(variable.get(), dict):
                get = variable.get
                return lambda: get().get(key)
        except (AttributeError, ImportError, LookupError):
            pass
        return self.trace.get_current_span  # type: ignore[no-any-return]

    def end_span(self, span: Any, error: BaseException | None, ended: int) -> None:
        """End a span; ``ended`` is nanoseconds since the epoch."""
        if error is not None:
            kind = type_name(type(error))
            span.set_attribute("error.type", kind)
            span.add_event(
                "exception",
                {
                    "exception.type": kind,
                    "exception.message": say(error),
                    "exception.stacktrace": _text(error),
                },
                timestamp=ended,
            )
            span.set_status(self.trace.StatusCode.ERROR, say(error))
        span.end(ended)


class _Within:
    """Makes a context of OpenTelemetry the current context in the ``with`` block. May be entered again after its exit."""

    def __init__(self, api: Any, context: Any) -> None:
        self._api = api
        self._context = context
        self._token: Any = None

    def __enter__(self) -> None:
        self._token = self._api.attach(self._context)

    def __exit__(self, *_: object) -> None:
        self._api.detach(self._token)


class _SpanClient(CallHooks):
    """Makes spans of the calls of one agent."""

    def __init__(self, otel: _OtelApi) -> None:
        self._otel = otel

    def on_call(self, call: Call, function: Any, args: tuple[Any, ...]) -> None:
        """Begin the span of a call if the caller is within a sampled span."""
        current = self._otel.current()
        if current is None or not current.get_span_context().trace_flags & _SAMPLED:
            return
        name = ""
        if call.mail is None:
            name = _of_call(function, args)
        elif "creates" not in call.mail.header:
            name = method_of("", call.label or call.mail.header.get("method", ""))
        if not name:
            return
        span = call.notes[self] = self._otel.tracer.start_span(
            name,
            kind=self._otel.trace.SpanKind.CLIENT,
            attributes={
                "rpc.system.name": "actorrpc",
                "rpc.method": name,
                "actorrpc.worker": call.peer.name,
            },
        )
        context = span.get_span_context()
        if context.is_valid and context.trace_flags & _SAMPLED:
            high, low = context.trace_id >> 64, context.trace_id & _HALF
            call.fields["trace"] = _IDS.pack(high, low, context.span_id, context.trace_flags)

    def on_answer(self, call: Call, error: BaseException | None) -> None:
        """End the span of a call."""
        span = call.notes.get(self)
        if span is None:
            return
        end = partial(self._otel.end_span, span, error, time.time_ns())
        if call.future is None:
            end()
        else:  # this thread may be reading a connection, and ending a span may export it, which takes time
            call.agent.pool.submit(end)


class _SpanServer(CallHooks):
    """Makes spans of executions whose calls belong to a trace; the executed code runs within the span."""

    field = "trace"

    def __init__(self, otel: _OtelApi) -> None:
        self._otel = otel

    def on_start(
        self, execution: Execution, function: Any, args: tuple[Any, ...]
    ) -> AbstractContextManager[Any] | None:
        """Begin the span of an execution, unless the field ``trace`` is invalid, or the function is one of this package."""
        trace, packed = self._otel.trace, execution.fields["trace"]
        if type(packed) is not bytes or len(packed) != _IDS.size:
            return None
        high, low, span_id, flags = _IDS.unpack(packed)
        parent = trace.SpanContext(high << 64 | low, span_id, True, trace.TraceFlags(flags))
        actor, what = execution.actor, execution.what
        name = method_of(actor.title, str(what)) if actor is not None else _of_call(function, args)
        if not parent.is_valid or not name:
            return None
        attributes: dict[str, Any] = {
            "rpc.system.name": "actorrpc",
            "rpc.method": name,
            "actorrpc.caller": execution.peer.name,
        }
        waited = max(0.0, execution.begun - execution.received_at)
        now = time.time_ns()
        begun = now - round(1e9 * (_time.now() - execution.begun))
        if actor is not None:
            attributes["actorrpc.actor"] = actor.title
            attributes["actorrpc.mailbox.wait"] = waited
        span = execution.notes[self] = self._otel.tracer.start_span(
            name,
            context=trace.set_span_in_context(trace.NonRecordingSpan(parent)),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
            start_time=begun - round(1e9 * waited),
        )
        if actor is not None:
            span.add_event("actorrpc.mailbox.left", timestamp=begun)
        return _Within(self._otel.context, trace.set_span_in_context(span))

    def on_end(self, execution: Execution, error: BaseException | None) -> None:
        """End the span of an execution."""
        span = execution.notes.get(self)
        if span is not None:
            self._otel.end_span(span, error, time.time_ns())


def start(worker: Worker) -> Callable[[bool], None]:
    """Add the hooks that make spans to a worker, if its settings enable spans; return a function that removes the hooks.

    Raises:
        ConfigError: the settings enable spans, but OpenTelemetry's API is not installed.
    """
    hooks = worker.agent.hooks
    if not worker.agent.settings.otel:
        return lambda _graceful: None
    otel = _OtelApi()
    ours = _SpanClient(otel), _SpanServer(otel)
    for each in ours:
        hooks.add(each)

    def shut_down(_graceful: bool) -> None:
        for each in ours:
            hooks.remove(each)

    return shut_down


api.on_start.insert(0, start)
