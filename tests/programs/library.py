"""The module that the source of a program imports: actors and tasks that log their calls, and functions that record outcomes.

The *journal* is a file. Every process of a session appends a line when a call starts and when it ends. The file outlives the
processes, so it also contains the calls of an actor that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import os
import signal
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

import actorrpc
from actorrpc import autograd, rpc
from tests.forks import exit_at_once

JOURNAL = "ACTORRPC_PROGRAMS_JOURNAL"
COLLECT = "ACTORRPC_PROGRAMS_COLLECT"

if COLLECT in os.environ:  # the collector runs at nearly every allocation, in every process of the session
    gc.set_threshold(int(os.environ[COLLECT]), 2, 2)


# -- the journal ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the journal: the call ``call`` starts or ends in the process ``pid``."""

    call: str
    what: str
    pid: int


class _Journal(io.FileIO):
    def __del__(self) -> None:
        """Close the file without a ResourceWarning, if a cancellation interrupts the caller before the ``with`` block."""
        self.close()


def _append(call: str, what: str) -> None:
    if JOURNAL not in os.environ:  # a printed program, which a user runs without a session
        return
    # Opened for each line: a descriptor that stays open would count as left behind by the program.
    with _Journal(os.environ[JOURNAL], "ab") as journal:
        journal.write(f"{call} {what} {os.getpid()}\n".encode())


@contextlib.contextmanager
def _noted(call: str) -> Iterator[None]:
    try:
        _append(call, "start")
        yield
    finally:
        _append(call, "end")


def read_journal(offset: int = 0) -> tuple[list[Event], int]:
    """Return the events of the journal from an offset on, and the offset after the last event."""
    with open(os.environ[JOURNAL], "rb") as file:
        file.seek(offset)
        text = file.read()
    events = []
    for line in text.decode().splitlines():
        call, what, pid = line.split()
        events.append(Event(call, what, int(pid)))
    return events, offset + len(text)


# -- actors and tasks --------------------------------------------------------------------------------------------


class Trouble(Exception):
    """An exception with attributes: the call that raised it, and values."""

    def __init__(self, call: str, values: Any) -> None:
        super().__init__(call)
        self.values = values


def _raise(call: str, kind: str, values: tuple[Any, ...]) -> None:
    if kind == "Trouble":
        raise Trouble(call, list(values))
    raise {"ValueError": ValueError, "KeyError": KeyError}[kind](call)


def _open(value: Any) -> Any:
    """Replace each reference within a value by the value that it refers to."""
    if isinstance(value, actorrpc.ObjectRef):
        return _open(actorrpc.get(value))
    if isinstance(value, rpc.RRef):
        return _open(value.to_here())
    if isinstance(value, list | tuple):
        return type(value)(map(_open, value))
    if isinstance(value, dict):
        return {key: _open(item) for key, item in value.items()}
    return value


async def _open_async(value: Any) -> Any:
    if isinstance(value, actorrpc.ObjectRef):
        return await _open_async(await value)
    if isinstance(value, rpc.RRef):
        return await _open_async(await asyncio.to_thread(value.to_here))
    if isinstance(value, list | tuple):
        return type(value)([await _open_async(item) for item in value])
    if isinstance(value, dict):
        return {key: await _open_async(item) for key, item in value.items()}
    return value


def spoil(value: Any) -> None:
    """Change all lists, dicts, tensors and arrays within a value in place."""
    if isinstance(value, list):
        for item in value:
            spoil(item)
        value.append("spoilt")
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value["spoilt"] = True
    elif isinstance(value, tuple):
        for item in value:
            spoil(item)
    elif isinstance(value, torch.Tensor) and not value.requires_grad:
        value.zero_()
    elif isinstance(value, numpy.ndarray) and value.flags.writeable:
        value[...] = 0


class _Methods:
    """The methods of the actors. The first argument of each method is the name of the call."""

    def value(self, call: str, *values: Any) -> Any:
        """Return the arguments."""
        with _noted(call):
            return list(values)

    def change(self, call: str, *values: Any) -> Any:
        """Change the arguments in place; return their number."""
        with _noted(call):
            spoil(list(values))
            return len(values)

    def read(self, call: str, *values: Any) -> Any:
        """Return the arguments, with values in place of references."""
        with _noted(call):
            return _open(list(values))

    def fail(self, call: str, kind: str, *values: Any) -> None:
        """Raise an exception of the class ``kind``."""
        with _noted(call):
            _raise(call, kind, values)

    def ask(self, call: str, target: Any, method: str, *args: Any) -> Any:
        """Make a call, and return its result."""
        with _noted(call):
            return [actorrpc.get(getattr(target, method).remote(*args))]

    def pass_on(self, call: str, target: Any, method: str, *args: Any) -> Any:
        """Make a call, and return the reference to its result."""
        with _noted(call):
            return [getattr(target, method).remote(*args)]

    def parts(self, call: str, *values: Any) -> Any:
        """Return one value for each argument; called with ``num_returns``."""
        with _noted(call):
            return values

    def stream(self, call: str, fails: bool, *values: Any) -> Iterator[Any]:
        """Yield the arguments; then raise a ValueError if ``fails``."""
        with _noted(call):
            yield from values
            if fails:
                raise ValueError(call)

    def work(self, call: str) -> None:
        """Run for 30 s, or until the call is cancelled."""
        with _noted(call):
            until = time.monotonic() + 30.0
            while time.monotonic() < until:
                time.sleep(0.001)

    def crash(self, call: str, code: int) -> None:
        """End the process: by SIGKILL if ``code`` is negative, else with this exit code."""
        with _noted(call):
            if code < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            exit_at_once(code)

    def curve(self, call: str, x: torch.Tensor) -> torch.Tensor:
        """Return a differentiable function of ``x``."""
        with _noted(call):
            return _curve(x)


class _Coroutines:
    """The same methods, as coroutines."""

    async def value(self, call: str, *values: Any) -> Any:
        with _noted(call):
            await asyncio.sleep(0)
            return list(values)

    async def change(self, call: str, *values: Any) -> Any:
        with _noted(call):
            spoil(list(values))
            return len(values)

    async def read(self, call: str, *values: Any) -> Any:
        with _noted(call):
            return await _open_async(list(values))

    async def fail(self, call: str, kind: str, *values: Any) -> None:
        with _noted(call):
            await asyncio.sleep(0)
            _raise(call, kind, values)

    async def ask(self, call: str, target: Any, method: str, *args: Any) -> Any:
        with _noted(call):
            return [await getattr(target, method).remote(*args)]

    async def pass_on(self, call: str, target: Any, method: str, *args: Any) -> Any:
        with _noted(call):
            return [getattr(target, method).remote(*args)]

    async def parts(self, call: str, *values: Any) -> Any:
        with _noted(call):
            return values

    async def stream(self, call: str, fails: bool, *values: Any) -> AsyncIterator[Any]:
        with _noted(call):
            for value in values:
                yield value
                await asyncio.sleep(0)
            if fails:
                raise ValueError(call)

    async def work(self, call: str) -> None:
        with _noted(call):
            await asyncio.sleep(30.0)

    async def curve(self, call: str, x: torch.Tensor) -> torch.Tensor:
        with _noted(call):
            return _curve(x)


@actorrpc.remote
class Serial(_Methods):
    """Runs one call at a time."""


@actorrpc.remote(max_concurrency=3)
class Threaded(_Methods):
    """Runs three calls at a time."""


@actorrpc.remote(concurrency_groups={"one": 1, "two": 2})
class Grouped(_Methods):
    """Runs one call without a group at a time; concurrently, one call of group "one" and two of group "two"."""


@actorrpc.remote(max_restarts=-1, restart_backoff_s=0.01)
class Restartable(_Methods):
    """Is restarted when its process ends."""


@actorrpc.remote
class Coroutines(_Coroutines):
    """Runs its calls on an event loop."""


here = _Methods()  # programs pass its methods to `rpc_async` and `rpc.remote` as functions


def _value(call: str, *values: Any) -> Any:
    return here.value(call, *values)


def _change(call: str, *values: Any) -> Any:
    return here.change(call, *values)


def _read(call: str, *values: Any) -> Any:
    return here.read(call, *values)


def _fail(call: str, kind: str, *values: Any) -> None:
    here.fail(call, kind, *values)


def _ask(call: str, target: Any, method: str, *args: Any) -> Any:
    return here.ask(call, target, method, *args)


def _pass_on(call: str, target: Any, method: str, *args: Any) -> Any:
    return here.pass_on(call, target, method, *args)


def _parts(call: str, *values: Any) -> Any:
    return here.parts(call, *values)


def _stream(call: str, fails: bool, *values: Any) -> Iterator[Any]:
    yield from here.stream(call, fails, *values)


def _work(call: str) -> None:
    here.work(call)


def _crash(call: str, code: int) -> None:
    here.crash(call, code)


class _Tasks:
    """The same methods as tasks. A program passes the instance ``tasks`` as the target of nested calls."""

    value = actorrpc.remote(_value)
    change = actorrpc.remote(_change)
    read = actorrpc.remote(_read)
    fail = actorrpc.remote(_fail)
    ask = actorrpc.remote(_ask)
    pass_on = actorrpc.remote(_pass_on)
    parts = actorrpc.remote(_parts)
    stream = actorrpc.remote(_stream)
    work = actorrpc.remote(_work)
    crash = actorrpc.remote(_crash)


tasks = _Tasks()


# -- recording outcomes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Value:
    """The outcome of a call that returned. In ``value``, each reference is replaced by its outcome."""

    value: Any


@dataclass(frozen=True, slots=True)
class Error:
    """The outcome of a call that raised. The exception itself is not kept: its traceback would keep the program's frames alive.

    Attributes:
        classes: the names of its class and of the bases of its class.
        first: the first of its arguments.
        values: its attribute ``values``, if it has one.
        text: its class and message.
    """

    classes: tuple[str, ...]
    first: Any
    values: Any
    text: str
    maybe_executed: bool | None


@dataclass(frozen=True, slots=True)
class Items:
    """The outcome of a stream: its items, and the error that ended it, if any.

    Attributes:
        closed: the driver closed the stream before its end.
    """

    items: list[Any]
    end: Error | None
    closed: bool


@dataclass(frozen=True, slots=True)
class Handle:
    """Stands for an actor handle within a value."""

    actor_id: int


Outcome = Value | Error | Items


@dataclass
class Observations:
    """The record of one program. Its drivers append from several threads; appending to a list needs no lock.

    Attributes:
        bound: how many seconds a call may take.
        outcomes: (name of the call, outcome) for each observation; a call may be observed several times.
        late: the calls that took longer than the bound.
        failures: tracebacks of exceptions that drivers or helpers raised; no statement of a program may raise any.
        helpers: the threads that :func:`later` started.
    """

    bound: float = 30.0
    outcomes: list[tuple[str, Outcome]] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    helpers: list[threading.Thread] = field(default_factory=list)


_current = Observations()


def begin(bound: float) -> Observations:
    """Begin the record of the next program, and return it."""
    global _current
    _current = Observations(bound)
    return _current


def _error(call: str, error: BaseException, began: float) -> Error:
    if time.monotonic() - began >= _current.bound:
        _current.late.append(call)
    classes = tuple(base.__name__ for base in type(error).__mro__)
    values = _seen(getattr(error, "values", None))
    first = error.args[0] if error.args else None
    return Error(classes, first, values, f"{classes[0]}: {error}", getattr(error, "maybe_executed", None))


_NESTED = "a reference in a result"


def _seen(value: Any) -> Any:
    """Copy a value. In the copy, references are replaced by their outcomes, and handles by :class:`Handle`."""
    if isinstance(value, actorrpc.ObjectRef | rpc.RRef):
        return _outcome(_NESTED, value)
    if isinstance(value, actorrpc.ActorHandle):
        return Handle(value.actor_id)
    if isinstance(value, list | tuple):
        return type(value)(map(_seen, value))
    if isinstance(value, dict):
        return {key: _seen(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, numpy.ndarray):
        return value.copy()
    return value


def _outcome(call: str, ref: Any) -> Value | Error:
    """Wait for the outcome of a call. Then change the value in place, which must not affect later readers of the reference."""
    began = time.monotonic()
    try:
        if isinstance(ref, rpc.RRef):
            value = ref.to_here(timeout=_current.bound)
        elif isinstance(ref, actorrpc.Future):
            value = ref.wait(_current.bound)
        else:
            value = actorrpc.get(ref, timeout=_current.bound)
        return _value_of(value, ref)
    except Exception as error:
        if call == _NESTED:
            # A known fault. The traceback refers to the frames of all callers, and these to the outer reference. If the outer
            # reference was sent while it was pending, the table of RRefs holds its value, which contains this reference and this
            # error. So the table keeps the outer reference alive, and the collector cannot free this cycle.
            error.__traceback__ = None
        return _error(call, error, began)


def _value_of(value: Any, ref: Any = None) -> Value:
    seen = Value(_seen(value))
    if not isinstance(ref, actorrpc.Future):  # all readers of a future get the same object
        spoil(value)
    return seen


def see(call: str, ref: Any) -> None:
    """Record the outcome of a call."""
    _current.outcomes.append((call, _outcome(call, ref)))


def glance(call: str, ref: Any, seconds: float) -> None:
    """Record the outcome of a call if it completes within ``seconds``."""
    began = time.monotonic()
    try:
        outcome: Outcome = _value_of(actorrpc.get(ref, timeout=seconds))
    except actorrpc.GetTimeoutError:
        return
    except Exception as error:
        outcome = _error(call, error, began)
    _current.outcomes.append((call, outcome))


def see_all(**refs: Any) -> None:
    """Record the outcomes of several calls in the order of their completion."""
    # The names of calls begin with digits. As keywords they have the prefix "_".
    names = {ref: name.removeprefix("_") for name, ref in refs.items()}
    pending = list(names)
    until = time.monotonic() + _current.bound
    while pending:
        ready, pending = actorrpc.wait(pending, timeout=until - time.monotonic())
        if not ready:
            _current.late.extend(names[ref] for ref in pending)
            return
        for ref in ready:
            see(names[ref], ref)


async def see_async(call: str, ref: Any) -> None:
    """Record the outcome of a call, without blocking the event loop."""
    _current.outcomes.append((call, await _outcome_async(call, ref)))


async def _outcome_async(call: str, ref: Any) -> Outcome:
    if isinstance(ref, rpc.RRef):  # an RRef cannot be awaited: block the loop
        return _outcome(call, ref)
    began = time.monotonic()
    try:
        awaited = asyncio.gather(*ref) if isinstance(ref, list) else ref
        return _value_of(await asyncio.wait_for(awaited, _current.bound), ref)
    except Exception as error:
        return _error(call, error, began)
    except asyncio.CancelledError as error:  # of asyncio; actorrpc.CancelledError is an Exception
        return _error(call, error, began)


async def glance_async(call: str, ref: Any, seconds: float) -> None:
    """Record the outcome of a call if it completes within ``seconds``."""
    glance = asyncio.ensure_future(_outcome_async(call, ref))
    await asyncio.wait([glance], timeout=seconds)
    if glance.done():  # otherwise asyncio.run() cancels it when the driver returns
        _current.outcomes.append((call, glance.result()))


async def see_all_async(**refs: Any) -> None:
    """Record the outcomes of several calls."""
    await asyncio.gather(*(see_async(name.removeprefix("_"), ref) for name, ref in refs.items()))


def see_stream(call: str, stream: Any, most: int | None = None) -> None:
    """Record the items of a stream; close it after ``most`` items."""
    items: list[Any] = []
    end, closed = None, False
    began = time.monotonic()
    try:
        while not closed:
            if len(items) == most:
                stream.close()
                closed = True
            else:
                items.append(_value_of(actorrpc.get(next(stream), timeout=_current.bound)).value)
    except StopIteration:
        pass
    except Exception as error:
        end = _error(call, error, began)
    _current.outcomes.append((call, Items(items, end, closed)))


async def see_stream_async(call: str, stream: Any, most: int | None = None) -> None:
    """Record the items of a stream, without blocking the event loop."""
    items: list[Any] = []
    end, closed = None, False
    began = time.monotonic()
    try:
        async for ref in stream:
            items.append(_value_of(await ref).value)
            if len(items) == most:
                stream.close()
                closed = True
                break
    except Exception as error:
        end = _error(call, error, began)
    _current.outcomes.append((call, Items(items, end, closed)))


def attempt(call: Callable[[], actorrpc.Future[Any]]) -> actorrpc.Future[Any]:
    """Make a call and return its future. If making the call raises, return a future that has failed with the error."""
    try:
        return call()
    except actorrpc.RpcError as error:
        future: actorrpc.Future[Any] = actorrpc.Future()
        future.set_exception(error)
        return future


def later(seconds: float, function: Callable[..., Any], *args: Any) -> None:
    """Call a function in another thread after some seconds."""

    def wait_and_call() -> None:
        time.sleep(seconds)
        _guarded(function, *args)

    helper = threading.Thread(target=wait_and_call, name="later")
    _current.helpers.append(helper)
    helper.start()


def interrupt(actor: Any, seconds: float) -> None:
    """Stop the process of an actor with SIGSTOP, and continue it after some seconds."""
    pids = [row.pid for row in actorrpc.list_actors() if row.actor_id == actor.actor_id and row.pid]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                time.sleep(seconds)
            finally:
                os.kill(pid, signal.SIGCONT)


def end_process(actor: Any) -> None:
    """End the process of an actor with SIGKILL."""
    for row in actorrpc.list_actors():
        if row.actor_id == actor.actor_id and row.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(row.pid, signal.SIGKILL)


def _curve(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2.0 + x * x


def gradients(call: str, path: list[Any], by_reference: bool) -> None:
    """Send a tensor through actors; record whether its gradient equals the gradient of the same computation in this process."""
    start = torch.linspace(-1.0, 1.0, 50, dtype=torch.float64)
    local = start.clone().requires_grad_()
    expected = local
    for _ in path:
        expected = _curve(expected)
    (gradient,) = torch.autograd.grad(expected.sum(), local)
    began = time.monotonic()
    try:
        with autograd.context() as context:
            x = start.clone().requires_grad_()
            y: Any = x
            for number, actor in enumerate(path):
                y = actor.curve.remote(f"{call}.{number}", y)
                if not by_reference:
                    y = actorrpc.get(y, timeout=_current.bound)
            y = actorrpc.get(y, timeout=_current.bound) if by_reference else y
            autograd.backward(context, [y.sum()], timeout=_current.bound)
            found = autograd.get_gradients(context)[x]
        outcome: Outcome = Value(bool(torch.allclose(found, gradient, rtol=1e-12, atol=0.0)))
    except Exception as error:
        outcome = _error(call, error, began)
    _current.outcomes.append((call, outcome))


def _guarded(function: Callable[..., Any], *args: Any) -> None:
    try:
        result = function(*args)
        if asyncio.iscoroutine(result):
            asyncio.run(result)
    except BaseException:
        _current.failures.append(traceback.format_exc())


def run(*drivers: Callable[[], Any]) -> None:
    """Run the drivers of a program concurrently, the first in this thread. Return when all drivers and helpers have ended."""
    threads = [threading.Thread(target=_guarded, args=(each,), name=each.__name__) for each in drivers[1:]]
    for thread in threads:
        thread.start()
    _guarded(drivers[0])
    for thread in threads:
        thread.join()
    while _current.helpers:
        _current.helpers.pop().join()
