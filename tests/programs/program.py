"""The statements that a program is made of, and their Python source.

A program makes its actors, and then runs its drivers at the same time: functions, or coroutines on event loops of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = [
    "TASKS",
    "Argument",
    "Cancel",
    "Container",
    "Driver",
    "Drop",
    "End",
    "Glance",
    "Gradients",
    "Handle",
    "Invocation",
    "Literal",
    "Make",
    "Pause",
    "Program",
    "Put",
    "Reference",
    "See",
    "SeeAll",
    "SeeStream",
    "Start",
    "Statement",
    "Stop",
]

TASKS = "tasks"

# -- arguments ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Literal:
    """A value, as an expression."""

    source: str


@dataclass(frozen=True, slots=True)
class Reference:
    """What a statement has given: an ObjectRef, or an RRef. ``part`` is an index of a call with ``num_returns``."""

    name: str
    part: int | None = None

    @property
    def source(self) -> str:
        return f"r{self.name}" if self.part is None else f"r{self.name}[{self.part}]"


@dataclass(frozen=True, slots=True)
class Handle:
    """An actor."""

    actor: str

    @property
    def source(self) -> str:
        return self.actor


@dataclass(frozen=True, slots=True)
class Container:
    """A list, tuple or dict of arguments."""

    kind: str
    items: tuple[Argument, ...]

    @property
    def source(self) -> str:
        items = [item.source for item in self.items]
        if self.kind == "dict":
            return "{" + ", ".join(f'"{number}": {item}' for number, item in enumerate(items)) + "}"
        inner = ", ".join(items)
        return f"[{inner}]" if self.kind == "list" else f"({inner},)" if items else "()"


Argument = Literal | Reference | Handle | Container


@dataclass(frozen=True, slots=True)
class Invocation:
    """A call.

    Attributes:
        name: the name of the call; calls of different programs have different names.
        target: an actor, ``tasks``, or a worker's name.
        args: the arguments behind the name of the call.
        nested: the call that an ``ask`` or ``pass_on`` makes.
        options: what ``options()`` is given.
        via: "remote", "rref" (the RRef of an actor), "rpc_async", or "rpc_remote".
    """

    name: str
    target: str
    method: str
    args: tuple[Argument, ...] = ()
    nested: Invocation | None = None
    options: tuple[tuple[str, object], ...] = ()
    via: str = "remote"

    def tree(self) -> Iterator[Invocation]:
        """Yield this call and all that are nested in it."""
        yield self
        if self.nested is not None:
            yield from self.nested.tree()

    def option(self, name: str, default: object = None) -> object:
        """Return the value of an option."""
        return dict(self.options).get(name, default)

    def arguments(self) -> Iterator[Argument]:
        """Yield the arguments of this call, and those of the calls nested in it."""
        for call in self.tree():
            yield from call.args

    def _passed(self) -> str:
        passed = [f'"{self.name}"', *(arg.source for arg in self.args)]
        if self.nested is not None:
            passed += [self.nested.target, f'"{self.nested.method}"', self.nested._passed()]
        return ", ".join(passed)

    @property
    def source(self) -> str:
        passed = self._passed()
        if self.via == "rref":
            return f"attempt(lambda: {self.target}.rref.rpc_async().{self.method}({passed}))"
        if self.via in ("rpc_async", "rpc_remote"):
            function = self.via.removeprefix("rpc_") if self.via == "rpc_remote" else self.via
            return f'rpc.{function}("{self.target}", here.{self.method}, args=({passed},))'
        options = ", ".join(f"{key}={value!r}" for key, value in self.options)
        return f"{self.target}.{self.method}{f'.options({options})' if options else ''}.remote({passed})"


def references(argument: Argument) -> Iterator[Reference]:
    """Yield the references of an argument."""
    if isinstance(argument, Reference):
        yield argument
    elif isinstance(argument, Container):
        for item in argument.items:
            yield from references(item)


# -- statements --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Make:
    """An actor is made."""

    actor: str
    kind: str
    options: tuple[tuple[str, str], ...] = ()

    def source(self, is_async: bool) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.options)
        return f"{self.actor} = {self.kind}{f'.options({options})' if options else ''}.remote()"


@dataclass(frozen=True, slots=True)
class Start:
    """A call is made, and its reference kept."""

    call: Invocation

    def source(self, is_async: bool) -> str:
        return f"r{self.call.name} = {self.call.source}"


@dataclass(frozen=True, slots=True)
class Put:
    """A value is put into the object store."""

    name: str
    value: Literal

    def source(self, is_async: bool) -> str:
        return f"r{self.name} = actorrpc.put({self.value.source})"


@dataclass(frozen=True, slots=True)
class See:
    """The outcome of a call is observed."""

    name: str

    def source(self, is_async: bool) -> str:
        return f'{_function("see", is_async)}("{self.name}", r{self.name})'


@dataclass(frozen=True, slots=True)
class SeeAll:
    """The outcomes of several calls are observed as they come."""

    names: tuple[str, ...]

    def source(self, is_async: bool) -> str:
        return f"{_function('see_all', is_async)}({', '.join(f'_{name}=r{name}' for name in self.names)})"


@dataclass(frozen=True, slots=True)
class Glance:
    """The outcome of a call is observed if it comes soon."""

    name: str
    seconds: float

    def source(self, is_async: bool) -> str:
        return f'{_function("glance", is_async)}("{self.name}", r{self.name}, {self.seconds})'


@dataclass(frozen=True, slots=True)
class SeeStream:
    """A stream is read, to its end or ``most`` items far."""

    name: str
    most: int | None = None

    def source(self, is_async: bool) -> str:
        most = "" if self.most is None else f", most={self.most}"
        return f'{_function("see_stream", is_async)}("{self.name}", r{self.name}{most})'


@dataclass(frozen=True, slots=True)
class Cancel:
    """A call is cancelled: now, or by another thread in some seconds."""

    name: str
    seconds: float | None = None
    force: bool = False

    def source(self, is_async: bool) -> str:
        if self.seconds is not None:
            return f"later({self.seconds}, actorrpc.cancel, r{self.name})"
        return f"actorrpc.cancel(r{self.name}{', force=True' if self.force else ''})"


@dataclass(frozen=True, slots=True)
class End:
    """An actor is ended: by ``actorrpc.kill``, or by a signal to its process; now, or by another thread in some seconds."""

    actor: str
    how: str = "actorrpc.kill"
    seconds: float | None = None

    def source(self, is_async: bool) -> str:
        if self.seconds is not None:
            return f"later({self.seconds}, {self.how}, {self.actor})"
        return f"{self.how}({self.actor})"


@dataclass(frozen=True, slots=True)
class Stop:
    """The process of an actor is stopped for some seconds, by another thread."""

    actor: str
    seconds: float

    def source(self, is_async: bool) -> str:
        return f"later(0.0, interrupt, {self.actor}, {self.seconds})"


@dataclass(frozen=True, slots=True)
class Pause:
    """The driver waits."""

    seconds: float

    def source(self, is_async: bool) -> str:
        return f"{'await asyncio' if is_async else 'time'}.sleep({self.seconds})"


@dataclass(frozen=True, slots=True)
class Drop:
    """The reference of a call is dropped."""

    name: str

    def source(self, is_async: bool) -> str:
        return f"del r{self.name}"


@dataclass(frozen=True, slots=True)
class Gradients:
    """A gradient through actors is compared with the local one."""

    name: str
    path: tuple[str, ...]
    by_reference: bool

    def source(self, is_async: bool) -> str:
        return f'gradients("{self.name}", [{", ".join(self.path)}], by_reference={self.by_reference})'


Statement = Start | Put | See | SeeAll | Glance | SeeStream | Cancel | End | Stop | Pause | Drop | Gradients


def _function(name: str, is_async: bool) -> str:
    return f"await {name}_async" if is_async else name


# -- programs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Driver:
    """A thread of the program, or with ``is_async`` a coroutine on an event loop in a thread."""

    name: str
    is_async: bool
    statements: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A program; ``source`` is what runs."""

    seed: int
    actors: tuple[Make, ...]
    drivers: tuple[Driver, ...]

    def calls(self) -> Iterator[Invocation]:
        """Yield all calls that drivers make."""
        for driver in self.drivers:
            for statement in driver.statements:
                if isinstance(statement, Start):
                    yield statement.call

    @property
    def source(self) -> str:
        lines = [each.source(False) for each in self.actors]
        for driver in self.drivers:
            lines += ["", f"{'async ' if driver.is_async else ''}def {driver.name}():"]
            lines += [f"    {each.source(driver.is_async)}" for each in driver.statements] or ["    pass"]
        lines += ["", f"run({', '.join(driver.name for driver in self.drivers)})"]
        return "\n".join(lines) + "\n"
