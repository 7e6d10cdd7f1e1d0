"""Spans of OpenTelemetry for calls, where a worker is told to make them (``ACTORRPC_OTEL=1``, ``init(otel=True)``).

A call that is made within a span which is sampled is a span of kind CLIENT, and its execution one of kind SERVER below it, on
whichever worker: 25 bytes in the header of the call say to which trace it belongs. Names and attributes are those of
OpenTelemetry's conventions for RPC, https://opentelemetry.io/docs/specs/semconv/rpc/rpc-spans/. No trace begins here: where no
span is current, or it is not sampled, nothing of OpenTelemetry is called, nothing travels, and the worker that executes does not
look for anything.

It stands in the place of the agent's ``call`` and ``ask``; an agent that is not told to has its own, and no look at anything.
A call that waits until its actor lives is sent in a copy of its caller's context, and so within the caller's span; one that is
sent again is a span each time. Calls that this package makes for itself are none. Only the API of OpenTelemetry is used: without
an SDK in the process, spans of other processes are handed on.
"""

from __future__ import annotations

import importlib
import inspect
import struct
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from actorrpc import _time
from actorrpc._exception_text import format_error, say, type_name
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import Call, Execution
from actorrpc.agent.context import Worker
from actorrpc.agent.executor import ASYNC_MARK, Later
from actorrpc.agent.hooks import RIDERS, Interceptor
from actorrpc.errors import ConfigError
from actorrpc.flight_recorder import method_of, name_of
from actorrpc.futures import Future
from actorrpc.rpc import api
from actorrpc.wire.headers import Header

if TYPE_CHECKING:
    from actorrpc.agent.mail import MailHeader
    from actorrpc.agent.peers import Peer

__all__ = ["start"]

_IDS: Final = struct.Struct(
    ">QQQB"
)  # a trace's id in two halves, a span's, and flags: as the header of W3C has them
_HALF: Final = (1 << 64) - 1
_SAMPLED: Final = 1
_OURS: Final = "actorrpc."
_OF_RREFS: Final = "actorrpc.rpc.rref"
_STACK: Final = 20_000  # characters of a stack that a span takes


def _of_call(function: Any, args: tuple[Any, ...]) -> str:
    """Return how a call of a function is named; empty where it is one of this package's own."""
    module = function.__module__ if type(function) is FunctionType else None
    if type(module) is not str or not module.startswith(_OURS):
        return method_of("", name_of(function))
    if module == _OF_RREFS:
        match function.__name__:
            case "_create":  # of rpc.remote()
                return method_of("", name_of(args[2]))
            case "_invoke":  # a method of what an RRef refers to
                return str(args[1])
    return ""


def _text(error: BaseException) -> str:
    try:
        return format_error(error, say(error), "", lambda _: None)[-_STACK:]
    except BaseException:  # memory has run out
        return ""


class _OtelApi:
    """The API of OpenTelemetry, which is loaded where it is asked for."""

    def __init__(self) -> None:
        try:
            self.trace: Any = importlib.import_module("opentelemetry.trace")
            self.context: Any = importlib.import_module("opentelemetry.context")
        except ImportError:
            raise ConfigError(
                "ACTORRPC_OTEL=1 (otel=True) wants opentelemetry-api: pip install 'actorrpc[otel]'"
            ) from None
        # Follows the provider of the program, also where that is set later.
        self.tracer: Any = self.trace.get_tracer("actorrpc")
        self.current: Callable[[], Any] = self._reader()

    def _reader(self) -> Callable[[], Any]:
        """Return what gives the current span, or None.

        It is looked up in the context variable of the API itself, as that takes a fifth of the time of asking for it; where a
        version of the API has another one, or the program's context is not kept in a variable, it is asked for.
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

    @contextmanager
    def within(self, context: Any) -> Iterator[None]:
        """Have a context be the current one for a block."""
        token = self.context.attach(context)
        try:
            yield
        finally:
            self.context.detach(token)

    def end(self, span: Any, error: BaseException | None, ended: int) -> None:
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


class _SpanClient:
    """Makes spans of the calls of one agent: its methods stand in the place of the agent's. Thread-safe."""

    def __init__(self, agent: Agent, otel: _OtelApi) -> None:
        self._otel = otel
        self._current = otel.current
        self._call = agent.call
        self._ask = agent.ask

    def _sampled(self, span: Any) -> bool:
        return bool(span.get_span_context().trace_flags & _SAMPLED)

    def _begin(self, name: str, peer: Peer) -> tuple[Any, Header | None]:
        """Begin the span of a call; return it with what is to travel along."""
        span = self._otel.tracer.start_span(
            name,
            kind=self._otel.trace.SpanKind.CLIENT,
            attributes={
                "rpc.system.name": "actorrpc",
                "rpc.method": name,
                "actorrpc.worker": peer.name,
            },
        )
        context = span.get_span_context()
        if not context.is_valid or not context.trace_flags & _SAMPLED:
            return span, None
        high, low = context.trace_id >> 64, context.trace_id & _HALF
        return span, {"trace": _IDS.pack(high, low, context.span_id, context.trace_flags)}

    def call(
        self,
        peer: Peer,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        future: Future[Any] | None = None,
        keep: Any = None,
        label: str | None = None,
        mail: MailHeader | None = None,
        header: Header | None = None,
        awaits: Sequence[Future[Any]] = (),
        place: Call | None = None,
    ) -> Call:
        """Do what :meth:`Agent.call` does. The span of a call that reserves its place begins when its message is sent."""
        current = self._current()
        name = ""
        if current is not None and future is not None and not awaits and self._sampled(current):
            if mail is None:
                name = _of_call(function, args)
            elif "creates" not in mail.header:
                name = method_of("", label or mail.header.get("method", ""))
        span = None
        if name and future is not None:
            span, header = self._begin(name, peer)
            self._watch(future, span)
        try:
            return self._call(
                peer, function, args, kwargs, timeout, future, keep, label, mail, header, awaits, place
            )
        except BaseException as error:
            if span is not None and vars(future).pop("conclude", None) is not None:
                self._otel.end(span, error, time.time_ns())
            raise

    def _watch(self, future: Future[Any], span: Any) -> None:
        """Have a span end when the call of a future does, which may go on with another one then."""

        def finish(value: Any, error: BaseException | None, submit: Callable[..., Any] | None = None) -> None:
            if vars(future).pop("conclude", None) is not None:
                end = partial(self._otel.end, span, error, time.time_ns())
                # What exports spans may take its time: not on the thread that reads a connection.
                end() if submit is None else submit(end)
            future.conclude(value, error, submit)

        vars(future)["conclude"] = finish

    def ask(
        self,
        peer: Peer,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        keep: Any = None,
        label: str | None = None,
    ) -> Any:
        """Do what :meth:`Agent.ask` does."""
        current = self._current()
        name = "" if current is None or not self._sampled(current) else _of_call(function, args)
        if not name:
            return self._ask(peer, function, args, kwargs, timeout, keep, label)
        span, header = self._begin(name, peer)
        try:
            value = self._ask(peer, function, args, kwargs, timeout, keep, label, header)
        except BaseException as error:
            self._otel.end(span, error, time.time_ns())
            raise
        self._otel.end(span, None, time.time_ns())
        return value


class _SpanServer(Interceptor):
    """Makes spans of executions whose calls belong to a trace; what they run is within them."""

    def __init__(self, otel: _OtelApi) -> None:
        self._otel = otel

    def _begin(self, execution: Execution, function: Any, args: tuple[Any, ...]) -> Any:
        """Begin the span of an execution; None where what came along makes no sense, or it is one of this package's own."""
        trace, packed = self._otel.trace, (execution.header or {}).get("trace")
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
        waited = max(0.0, execution.begun - execution.arrived)
        now = time.time_ns()
        begun = now - round(1e9 * (_time.now() - execution.begun))
        if actor is not None:
            attributes["actorrpc.actor"] = actor.title
            attributes["actorrpc.mailbox.wait"] = waited
        span = self._otel.tracer.start_span(
            name,
            context=trace.set_span_in_context(trace.NonRecordingSpan(parent)),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
            start_time=begun - round(1e9 * waited),
        )
        if actor is not None:
            span.add_event("actorrpc.mailbox.left", timestamp=begun)
        return span

    def wrap(
        self,
        execution: Execution,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[[], Any],
    ) -> Callable[[], Any]:
        """Return what runs the call within its span."""

        def run() -> Any:
            span = self._begin(execution, function, args)
            if span is None:
                return call()
            within = self._otel.trace.set_span_in_context(span)
            try:
                with self._otel.within(within):
                    value = call()
            except BaseException as error:
                self._otel.end(span, error, time.time_ns())
                raise
            if inspect.iscoroutine(value):
                return self._awaited(value, span, within)
            if inspect.isgenerator(value):
                return self._stepped(value, span, within)
            if inspect.isasyncgen(value):
                return self._astepped(value, span, within)
            later = value.future if type(value) is Later else None
            if later is None and getattr(function, ASYNC_MARK, None) is not None:
                later = value
            if isinstance(later, Future):
                later.add_done_callback(lambda done: self._otel.end(span, done.error, time.time_ns()))
            else:
                self._otel.end(span, None, time.time_ns())
            return value

        return run

    async def _awaited(self, coroutine: Coroutine[Any, Any, Any], span: Any, within: Any) -> Any:
        """Run a coroutine within a span, which ends with it. Its task has a context of its own."""
        error: BaseException | None = None
        with self._otel.within(within):
            try:
                return await coroutine
            except BaseException as caught:
                error = caught
                raise
            finally:
                self._otel.end(span, error, time.time_ns())

    def _stepped(self, items: Generator[Any, Any, Any], span: Any, within: Any) -> Generator[Any, Any, None]:
        """Run a generator within a span: its steps are, and what its thread does between them is not."""
        error: BaseException | None = None
        try:
            while True:
                with self._otel.within(within):
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                yield item
        except BaseException as caught:
            error = None if isinstance(caught, GeneratorExit) else caught
            raise
        finally:
            try:
                items.close()
            finally:
                self._otel.end(span, error, time.time_ns())

    async def _astepped(
        self, items: AsyncGenerator[Any, Any], span: Any, within: Any
    ) -> AsyncGenerator[Any, None]:
        """Do as :meth:`_stepped` does, for one of an event loop."""
        error: BaseException | None = None
        try:
            while True:
                with self._otel.within(within):
                    try:
                        item = await anext(items)
                    except StopAsyncIteration:
                        return
                yield item
        except BaseException as caught:
            error = None if isinstance(caught, GeneratorExit) else caught
            raise
        finally:
            try:
                await items.aclose()
            finally:
                self._otel.end(span, error, time.time_ns())


_switched_on: Final[list[Agent]] = []


def start(worker: Worker) -> Callable[[bool], None]:
    """Have a worker make spans, if it is told to; returns what ends that. Before the floors above, which keep ``agent.call``.

    Raises:
        ConfigError: it is told to, and OpenTelemetry's API is not installed.
    """
    agent = worker.agent
    if not agent.settings.otel:
        return lambda _graceful: None
    otel = _OtelApi()
    client = _SpanClient(agent, otel)
    vars(agent).update(call=client.call, ask=client.ask)
    _switched_on.append(agent)
    RIDERS["trace"] = _SpanServer(otel)

    def end(_graceful: bool) -> None:
        vars(agent).pop("call", None)
        vars(agent).pop("ask", None)
        if agent in _switched_on:
            _switched_on.remove(agent)
        if not _switched_on:
            RIDERS.pop("trace", None)

    return end


api.on_start.insert(0, start)
