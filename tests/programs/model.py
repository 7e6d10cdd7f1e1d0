"""Compute which outcomes a program allows, call by call, and compare them with the recorded outcomes.

The methods of ``library`` return values that depend on their arguments alone. So each call has one value, or raises one
exception, whatever runs concurrently. A cancellation, a time-out or the end of an actor may affect calls whose outcome was not
observed before; the model adds the errors that it may cause to these calls. An error of an argument is also an allowed error of
the call. The journal shows how often and in which order calls ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy
import torch

from tests.programs import library
from tests.programs import program as syntax

__all__ = ["Allowed", "Model", "complaints"]

_NO_VALUE: Final = object()
CANCELLED: Final = "CancelledError"
LATE: Final = "RpcTimeoutError"
DEAD: Final = frozenset({"ActorDiedError", "ActorUnavailableError", "PeerDiedError"})


@dataclass(frozen=True, slots=True)
class Allowed:
    """The outcomes that a call may have.

    Attributes:
        value: its value, or ``_NO_VALUE`` if it cannot return.
        errors: names of classes of errors, or ``(class, call)`` for an exception that the method of a call raises.
        raised: the attribute ``values`` of these exceptions, by the name of the call that raises.
        is_stream: the value is the list of its items.
    """

    value: Any
    errors: frozenset[Any] = frozenset()
    raised: Mapping[str, Any] = field(default_factory=dict)
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class _Later:
    """Stands for a reference within a value, and has the outcomes that the reference may have."""

    allowed: Allowed


@dataclass(frozen=True, slots=True)
class _Actor:
    name: str


class Model:
    """The outcomes that a program allows.

    Attributes:
        allowed: the allowed outcomes, by the name of the call.
        calls: all calls, including nested calls, by name.
        at_most: how often each call may run, by the name of the call.
    """

    def __init__(self, program: syntax.Program) -> None:
        self.program = program
        self.calls = {call.name: call for root in program.calls() for call in root.tree()}
        self._roots = {call.name: root.name for root in program.calls() for call in root.tree()}
        self.allowed: dict[str, Allowed] = {}
        self._disturbances: dict[str, set[str]] = defaultdict(set)
        for driver in program.drivers:
            self._disturb(driver)
        for driver in program.drivers:
            for statement in driver.statements:
                if isinstance(statement, syntax.Start):
                    self._evaluate(statement.call)
                elif isinstance(statement, syntax.Put):
                    self.allowed[statement.name] = Allowed(value_of(statement.value))
                elif isinstance(statement, syntax.Gradients):
                    ended = {name for actor in statement.path for name in self._ends(actor)}
                    self.allowed[statement.name] = Allowed(True, frozenset(ended))
        crashes = any(
            call.target == syntax.TASKS and call.method == "crash" for call in self.calls.values()
        ) or any(
            isinstance(each, syntax.Cancel) and each.force
            for driver in program.drivers
            for each in driver.statements
        )
        self.at_most: dict[str, int] = {}
        for root in program.calls():
            times = 1
            for call in root.tree():  # a call that is retried makes its nested calls again
                times *= 1 + _retries(call, crashes and call.target == syntax.TASKS)
                self.at_most[call.name] = times

    # -- errors that disturbances may cause ----------------------------------------------------------------------

    def _disturb(self, driver: syntax.Driver) -> None:
        observed: set[str] = set()
        for statement in driver.statements:
            if isinstance(statement, syntax.See | syntax.SeeStream):
                observed.add(statement.name)
            elif isinstance(statement, syntax.SeeAll):
                observed.update(statement.names)
            elif isinstance(statement, syntax.Cancel) and statement.name not in observed:
                self._reach(statement.name, {CANCELLED})
                if statement.force:  # ends the process of a worker, which may have run other tasks
                    self._reach(statement.name, DEAD)
                    self._end(syntax.TASKS, observed)
            elif isinstance(statement, syntax.End):
                self._end(statement.actor, observed)
            elif isinstance(statement, syntax.Start):
                for call in statement.call.tree():
                    if call.option("timeout") is not None:
                        self._reach(call.name, {LATE, CANCELLED})
                    if call.method == "crash" and call.target != syntax.TASKS:
                        self._end(call.target, observed)
                    elif call.method == "crash":  # tasks share processes, and are retried three times
                        self._end(syntax.TASKS, observed)

    def _end(self, target: str, observed: set[str]) -> None:
        for call in self.calls.values():
            if call.target != target:
                continue
            is_open = self._roots[call.name] not in observed
            if is_open:
                self._reach(call.name, {*DEAD})
            # The process that made the nested call has its outcome. Readers of a passed reference fetch it there, also later.
            if call.nested is not None and (is_open or call.method == "pass_on"):
                self._reach(call.nested.name, {CANCELLED, *DEAD})

    def _ends(self, actor: str) -> Iterator[str]:
        for driver in self.program.drivers:
            for each in driver.statements:
                if isinstance(each, syntax.End) and each.actor == actor:
                    yield from DEAD
                elif isinstance(each, syntax.Start):
                    if any(call.target == actor and call.method == "crash" for call in each.call.tree()):
                        yield from DEAD

    def _reach(self, name: str, errors: Iterable[str]) -> None:
        if name in self.calls:
            for call in self.calls[name].tree():
                self._disturbances[call.name].update(errors)

    # -- values --------------------------------------------------------------------------------------------------

    def _evaluate(self, call: syntax.Invocation) -> Allowed:
        nested = self._evaluate(call.nested) if call.nested is not None else None
        # The arguments of nested calls are passed as arguments of this call. The worker fetches all of them before the call runs.
        args = [self._argument(arg, call.via == "remote") for each in call.tree() for arg in each.args]
        # The references that the worker replaces by their values.
        found = [arg for arg in args if isinstance(arg, Allowed)]
        errors = self._disturbances[call.name].union(*(arg.errors for arg in found))
        raised = {name: values for arg in found for name, values in arg.raised.items()}
        made = Allowed(_NO_VALUE)
        if not any(arg.value is _NO_VALUE for arg in found):
            values = [arg.value if isinstance(arg, Allowed) else arg for arg in args[: len(call.args)]]
            made = self._call(call, values, nested)
        errors |= made.errors
        raised |= made.raised
        allowed = Allowed(made.value, frozenset(errors), raised, made.is_stream)
        self.allowed[call.name] = allowed
        return allowed

    def _call(self, call: syntax.Invocation, values: list[Any], nested: Allowed | None) -> Allowed:
        match call.method:
            case "value":
                return Allowed(values)
            case "parts":
                return Allowed(values if call.option("num_returns") else tuple(values))
            case "change":
                return Allowed(len(values))
            case "read":
                found: list[Allowed] = []
                value = _opened(values, found)
                missing = any(each.value is _NO_VALUE for each in found)
                return Allowed(_NO_VALUE if missing else value, *_errors(found))
            case "fail":
                kind, *rest = values
                # An attribute with references or handles is not sent with an exception; a note of the exception names it.
                kept = rest if kind == "Trouble" and not _refers(rest) else None
                return Allowed(_NO_VALUE, frozenset({(kind, call.name)}), {call.name: kept})
            case "ask":
                assert nested is not None
                value = _NO_VALUE if nested.value is _NO_VALUE else [nested.value]
                return Allowed(value, nested.errors, nested.raised)
            case "pass_on":
                assert nested is not None
                return Allowed([_Later(nested)])
            case "stream":
                fails, *items = values
                errors = frozenset({("ValueError", call.name)}) if fails else frozenset()
                return Allowed(items, errors, {call.name: None}, is_stream=True)
            case "crash":
                return Allowed(_NO_VALUE, DEAD)
        assert call.method == "work"
        return Allowed(_NO_VALUE)

    def _argument(self, argument: syntax.Argument, replaced: bool) -> Any:
        if isinstance(argument, syntax.Literal):
            return value_of(argument)
        if isinstance(argument, syntax.Handle):
            return _Actor(argument.actor)
        if isinstance(argument, syntax.Container):
            items = [self._argument(item, False) for item in argument.items]
            if argument.kind == "dict":
                return {str(number): item for number, item in enumerate(items)}
            return items if argument.kind == "list" else tuple(items)
        allowed = self._part(argument)
        call = self.calls.get(argument.name)
        is_rref = call is not None and call.via == "rpc_remote"
        return allowed if replaced and not is_rref else _Later(allowed)

    def _part(self, reference: syntax.Reference) -> Allowed:
        whole = self.allowed[reference.name]
        if reference.part is None or whole.value is _NO_VALUE:
            return whole
        return Allowed(whole.value[reference.part], whole.errors, whole.raised)


def value_of(literal: syntax.Literal) -> Any:
    """Evaluate a literal."""
    return eval(literal.source, {"torch": torch, "numpy": numpy})


def _retries(call: syntax.Invocation, is_task_beside_a_crash: bool) -> int:
    retries = call.option("max_task_retries" if call.target != syntax.TASKS else "max_retries")
    if isinstance(retries, int):
        return retries
    return 3 if is_task_beside_a_crash else 0


def _errors(found: Iterable[Allowed]) -> tuple[frozenset[Any], dict[str, Any]]:
    errors: set[Any] = set()
    raised: dict[str, Any] = {}
    for each in found:
        errors |= each.errors
        raised |= each.raised
    return frozenset(errors), raised


def _opened(value: Any, found: list[Allowed]) -> Any:
    if isinstance(value, _Later):
        found.append(value.allowed)
        return _opened(value.allowed.value, found)
    if isinstance(value, list | tuple):
        return type(value)([_opened(item, found) for item in value])
    if isinstance(value, dict):
        return {key: _opened(item, found) for key, item in value.items()}
    return value


def _refers(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_refers, value))
    if isinstance(value, dict):
        return any(map(_refers, value.values()))
    return isinstance(value, _Later | _Actor)


# -- the comparison ------------------------------------------------------------------------------------------------


def complaints(
    model: Model,
    outcomes: list[tuple[str, library.Outcome]],
    events: list[library.Event],
    actor_ids: Mapping[str, int],
) -> list[str]:
    """Return a text for each recorded outcome or event that the model does not allow."""
    found = []
    for name, outcome in outcomes:
        wrong = _wrong(outcome, model.allowed[name], actor_ids)
        if wrong:
            found.append(f"{name}: {wrong}")
    return [*found, *_executions(model, outcomes, events), *_orders(model, events)]


def _wrong(outcome: library.Outcome, allowed: Allowed, actor_ids: Mapping[str, int]) -> str:
    if isinstance(outcome, library.Items):
        return _wrong_items(outcome, allowed, actor_ids)
    if isinstance(outcome, library.Value):
        if allowed.value is _NO_VALUE:
            return f"returned {_short(outcome.value)}, and may only raise {_words(allowed.errors)}"
        return _differs(outcome.value, allowed.value, actor_ids)
    return _wrong_error(outcome, allowed, actor_ids)


def _wrong_error(error: library.Error, allowed: Allowed, actor_ids: Mapping[str, int]) -> str:
    for kind in allowed.errors:
        if isinstance(kind, str):
            if kind in error.classes:
                return ""
        elif kind[0] in error.classes and error.first == kind[1]:
            return _differs(error.values, allowed.raised.get(kind[1]), actor_ids)
    value = "" if allowed.value is _NO_VALUE else "return" if not allowed.errors else "return or "
    raises = f"raise {_words(allowed.errors)}" if allowed.errors else ""
    return f"raised {error.text[:600]!r}, and may only {value}{raises}"


def _wrong_items(items: library.Items, allowed: Allowed, actor_ids: Mapping[str, int]) -> str:
    if items.end is not None:
        wrong = _wrong_error(items.end, allowed, actor_ids)
        if wrong:
            return f"its stream {wrong}"
    if allowed.value is _NO_VALUE:
        if items.items:
            return "gave items, and may only raise"
        is_ended = items.closed or items.end is not None or CANCELLED in allowed.errors
        return "" if is_ended else f"ended, and had to raise {_words(allowed.errors)}"
    for number, item in enumerate(items.items):
        if number >= len(allowed.value):
            return f"gave more than {len(allowed.value)} items"
        wrong = _differs(item, allowed.value[number], actor_ids)
        if wrong:
            return f"item {number}: {wrong}"
    disturbed = any(isinstance(kind, str) for kind in allowed.errors)
    ended_itself = items.end is not None and not any(
        isinstance(kind, str) and kind in items.end.classes for kind in allowed.errors
    )
    finished = items.end is None and not items.closed and CANCELLED not in allowed.errors
    if (ended_itself or finished) and len(items.items) < len(allowed.value):
        return f"ended after {len(items.items)} of {len(allowed.value)} items"
    if finished and allowed.errors and not disturbed:
        return f"ended, and had to raise {_words(allowed.errors)}"
    return ""


def _differs(found: Any, expected: Any, actor_ids: Mapping[str, int]) -> str:
    """Return how a value differs from the expected value; empty if it does not."""
    if isinstance(expected, _Later):
        if not isinstance(found, library.Value | library.Error):
            return f"{_short(found)} where there was a reference"
        return _wrong(found, expected.allowed, actor_ids)
    if isinstance(expected, _Actor):
        same = (
            isinstance(found, library.Handle)
            and actor_ids.get(expected.name, found.actor_id) == found.actor_id
        )
        return "" if same else f"{_short(found)} in place of the handle of {expected.name}"
    if type(found) is not type(expected):
        return f"{_short(found)} in place of {_short(expected)}"
    if isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return f"{len(found)} items in place of {len(expected)}: {_short(found)}, not {_short(expected)}"
        pairs = zip(found, expected, strict=True)
        return next(filter(None, (_differs(one, other, actor_ids) for one, other in pairs)), "")
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return f"keys {list(found)} in place of {list(expected)}"
        return next(filter(None, (_differs(found[key], expected[key], actor_ids) for key in expected)), "")
    if isinstance(expected, torch.Tensor):
        same = found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, numpy.ndarray):
        same = found.dtype == expected.dtype and numpy.array_equal(found, expected)
    else:
        same = found == expected
    return "" if same else f"{_short(found)} in place of {_short(expected)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 160 else f"{text[:100]} ... {text[-40:]}"


def _words(errors: Iterable[Any]) -> str:
    return ", ".join(sorted(each if isinstance(each, str) else f"{each[0]} of {each[1]}" for each in errors))


def _executions(
    model: Model, outcomes: list[tuple[str, library.Outcome]], events: list[library.Event]
) -> Iterator[str]:
    starts: dict[str, int] = defaultdict(int)
    for event in events:
        starts[event.call] += event.what == "start"
    for name, count in starts.items():
        most = model.at_most.get(name, 1)
        if count > most:
            yield f"{name}: ran {count} times, and may run {most} times"
    for name, outcome in outcomes:
        if name not in model.calls:
            continue
        error = outcome.end if isinstance(outcome, library.Items) else outcome
        if isinstance(error, library.Error) and error.maybe_executed is False and starts[name]:
            yield f"{name}: ran, and its error has maybe_executed=False: {error.text[:600]}"
        if isinstance(outcome, library.Value) and not starts[name]:
            yield f"{name}: returned, and has not run"


def _orders(model: Model, events: list[library.Event]) -> Iterator[str]:
    """Check the actors that run one call at a time: they run each driver's calls in order, and no two calls at once."""
    for make in model.program.actors:
        if make.kind not in ("Serial", "Restartable"):
            continue
        for driver in model.program.drivers:
            order = [
                each.call.name
                for each in driver.statements
                if isinstance(each, syntax.Start)
                and each.call.target == make.actor
                and model.at_most[each.call.name] == 1
            ]
            started = [event.call for event in events if event.what == "start" and event.call in order]
            if started != sorted(started, key=order.index):
                yield f"{make.actor} ran calls of {driver.name} in the order {started}, made as {order}"
        ended = {event.call for event in events if event.what == "end"}
        running: list[library.Event] = []
        for event in events:
            call = model.calls.get(event.call)
            if call is None or call.target != make.actor:
                continue
            running = [each for each in running if each.pid == event.pid]
            if event.what == "end":
                running = [each for each in running if each.call != event.call]
            else:
                for each in running:
                    if call not in model.calls[each.call].tree():
                        yield f"{make.actor} ran {event.call} while it ran {each.call}"
                # A cancellation may interrupt a call before it writes its end to the journal. Do not count it as running then.
                if event.call in ended or CANCELLED not in model.allowed[event.call].errors:
                    running.append(event)
