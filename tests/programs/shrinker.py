"""Shrink a program that fails: remove all drivers and statements without which it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from tests.programs import program as syntax

__all__ = ["is_valid", "shrunk"]

_NONE: Final = syntax.Literal("None")


def shrunk(program: syntax.Program, fails: Callable[[syntax.Program], bool]) -> syntax.Program:
    """Return a program that also fails, and of which no simpler candidate fails; the program itself if there is none."""
    progress = True
    while progress:
        progress = False
        for candidate in _smaller(program):
            if candidate != program and is_valid(candidate) and fails(candidate):
                program, progress = candidate, True
                break  # start again with the candidates of the smaller program
    return program


def _smaller(program: syntax.Program) -> Iterator[syntax.Program]:
    """Yield simpler programs, those with the most removed first."""
    if len(program.drivers) > 1:
        for number in range(len(program.drivers)):
            yield _tidied(replace(program, drivers=_without(program.drivers, number)))
    for number, driver in enumerate(program.drivers):
        size = len(driver.statements) // 2
        while size:
            for first in range(0, len(driver.statements), size):
                kept = driver.statements[:first] + driver.statements[first + size :]
                yield _with_driver(program, number, replace(driver, statements=kept))
            size //= 2


def _without(items: tuple[syntax.Driver, ...], number: int) -> tuple[syntax.Driver, ...]:
    return items[:number] + items[number + 1 :]


def _with_driver(program: syntax.Program, number: int, driver: syntax.Driver) -> syntax.Program:
    drivers = (*program.drivers[:number], driver, *program.drivers[number + 1 :])
    return _tidied(replace(program, drivers=drivers))


# -- validity ------------------------------------------------------------------------------------------------------


def _tidied(program: syntax.Program) -> syntax.Program:
    """Remove statements that refer to removed calls, and actors that no statement uses."""
    drivers = tuple(_tidied_driver(driver) for driver in program.drivers)
    used = {name for driver in drivers for statement in driver.statements for name in _actors(statement)}
    actors = tuple(make for make in program.actors if make.actor in used) or program.actors[:1]
    return replace(program, actors=actors, drivers=drivers)


def _tidied_driver(driver: syntax.Driver) -> syntax.Driver:
    made: set[str] = set()
    kept: list[syntax.Statement] = []
    for statement in driver.statements:
        if isinstance(statement, syntax.Start):
            kept.append(syntax.Start(_with_known(statement.call, made)))
            made.add(statement.call.name)
        elif isinstance(statement, syntax.Put):
            kept.append(statement)
            made.add(statement.name)
        elif isinstance(statement, syntax.SeeAll):
            names = tuple(name for name in statement.names if name in made)
            if names:
                kept.append(syntax.SeeAll(names))
        elif isinstance(statement, syntax.Gradients) or getattr(statement, "name", None) in {None, *made}:
            kept.append(statement)
    return replace(driver, statements=tuple(kept))


def _with_known(call: syntax.Invocation, made: set[str]) -> syntax.Invocation:
    nested = _with_known(call.nested, made) if call.nested is not None else None
    return replace(call, args=tuple(_known(arg, made) for arg in call.args), nested=nested)


def _known(argument: syntax.Argument, made: set[str]) -> syntax.Argument:
    if isinstance(argument, syntax.Reference) and argument.name not in made:
        return _NONE
    if isinstance(argument, syntax.Container):
        return replace(argument, items=tuple(_known(item, made) for item in argument.items))
    return argument


def _actors(statement: syntax.Statement) -> Iterator[str]:
    if isinstance(statement, syntax.Start):
        for call in statement.call.tree():
            yield call.target
            for argument in call.args:
                yield from _handles(argument)
    elif isinstance(statement, syntax.End | syntax.Stop):
        yield statement.actor
    elif isinstance(statement, syntax.Gradients):
        yield from statement.path


def _handles(argument: syntax.Argument) -> Iterator[str]:
    if isinstance(argument, syntax.Handle):
        yield argument.actor
    elif isinstance(argument, syntax.Container):
        for item in argument.items:
            yield from _handles(item)


def is_valid(program: syntax.Program) -> bool:
    """Return whether a program keeps the generator's rules, so that it does not block forever by itself."""
    return all(_is_valid_driver(driver, program) for driver in program.drivers)


def _is_valid_driver(driver: syntax.Driver, program: syntax.Program) -> bool:
    kinds = {make.actor: make.kind for make in program.actors}
    observed: set[str] = set()
    # Calls that run until they are cancelled or read, by name, and the actors that each call occupies.
    endless: dict[str, set[str]] = {}
    for statement in driver.statements:
        if isinstance(statement, syntax.SeeStream):
            endless.pop(statement.name, None)
        if isinstance(statement, syntax.See | syntax.SeeStream | syntax.SeeAll | syntax.Gradients):
            if endless:
                return False
            observed.update(statement.names if isinstance(statement, syntax.SeeAll) else (statement.name,))
        elif isinstance(statement, syntax.Put):
            observed.add(statement.name)
        elif isinstance(statement, syntax.Cancel):
            endless.pop(statement.name, None)
        elif isinstance(statement, syntax.End):
            endless = {name: held for name, held in endless.items() if statement.actor not in held}
        elif isinstance(statement, syntax.Start):
            calls = list(statement.call.tree())
            is_work = calls[-1].method == "work" and not _ends_in_time(statement.call, kinds)
            if is_work or calls[0].option("backpressure") is not None:
                endless[statement.call.name] = {call.target for call in calls}
            for call in calls:
                waits_for_references = call.method == "read" or call.option("backpressure") is not None
                for argument in call.args if waits_for_references else ():
                    waits = {reference.name for reference in syntax.references(argument)}
                    if not waits <= observed:
                        return False
                if (
                    call.method == "crash"
                    and call.target != syntax.TASKS
                    and kinds[call.target] == "Coroutines"
                ):
                    return False
    return not endless


def _ends_in_time(call: syntax.Invocation, kinds: dict[str, str]) -> bool:
    if call.nested is not None or call.option("timeout") is None:
        return False
    return call.option("interrupt") is not None or kinds.get(call.target) == "Coroutines"
