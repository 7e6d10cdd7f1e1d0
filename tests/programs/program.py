"""The statements of programs, and their Python source.

A program creates its actors, and then runs its drivers concurrently. A driver is a function in a thread, or a coroutine on an
event loop in a thread.
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
    """The source of an expression whose value is an argument."""

    source: str


@dataclass(frozen=True, slots=True)
class Reference:
    """The ObjectRef or RRef that the statement ``name`` returned; for a call with ``num_returns``, its reference ``part``."""

    name: str
    part: int | None = None

    @property
    def source(self) -> str:
        return f"r{self.name}" if self.part is None else f"r{self.name}[{self.part}]"


@dataclass(frozen=True, slots=True)
class Handle:
    """The handle of an actor, as an argument."""

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
        args: the arguments that follow the name of the call.
        nested: the call that an ``ask`` or ``pass_on`` makes.
        options: the arguments of ``options()``.
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
        """Yield this call and all calls nested in it, outermost first."""
        yield self
        if self.nested is not None:
            yield from self.nested.tree()

    def option(self, name: str, default: object = None) -> object:
        """Return the value of an option."""
        return dict(self.options).get(name, default)

    def arguments(self) -> Iterator[Argument]:
        """Yield the arguments of this call and of all calls nested in it."""
        for call in self.tree():
            yield from call.args

    def passed(self) -> str:
        passed = [f'"{self.name}"', *(arg.source for arg in self.args)]
        if self.nested is not None:
            passed += [self.nested.target, f'"{self.nested.method}"', self.nested.passed()]
        return ", ".join(passed)

    @property
    def source(self) -> str:
        passed = self.passed()
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
    """Create an actor."""

    actor: str
    kind: str
    options: tuple[tuple[str, str], ...] = ()

    def source(self, is_async: bool) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.options)
        return f"{self.actor} = {self.kind}{f'.options({options})' if options else ''}.remote()"


@dataclass(frozen=True, slots=True)
class Start:
    """Make a call, and keep its reference."""

    call: Invocation

    def source(self, is_async: bool) -> str:
        return f"r{self.call.name} = {self.call.source}"


@dataclass(frozen=True, slots=True)
class Put:
    """Put a value into the object store."""

    name: str
    value: Literal

    def source(self, is_async: bool) -> str:
        return f"r{self.name} = actorrpc.put({self.value.source})"


@dataclass(frozen=True, slots=True)
class See:
    """Wait for the outcome of a call, and record it."""

    name: str

    def source(self, is_async: bool) -> str:
        return f'{_function("see", is_async)}("{self.name}", r{self.name})'


@dataclass(frozen=True, slots=True)
class SeeAll:
    """Record the outcomes of several calls in the order of their completion."""

    names: tuple[str, ...]

    def source(self, is_async: bool) -> str:
        return f"{_function('see_all', is_async)}({', '.join(f'_{name}=r{name}' for name in self.names)})"


@dataclass(frozen=True, slots=True)
class Glance:
    """Record the outcome of a call if it completes within ``seconds``."""

    name: str
    seconds: float

    def source(self, is_async: bool) -> str:
        return f'{_function("glance", is_async)}("{self.name}", r{self.name}, {self.seconds})'


@dataclass(frozen=True, slots=True)
class SeeStream:
    """Read a stream to its end, or at most ``most`` items, and record them."""

    name: str
    most: int | None = None

    def source(self, is_async: bool) -> str:
        most = "" if self.most is None else f", most={self.most}"
        return f'{_function("see_stream", is_async)}("{self.name}", r{self.name}{most})'


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a call: now, or in another thread after ``seconds``."""

    name: str
    seconds: float | None = None
    force: bool = False

    def source(self, is_async: bool) -> str:
        if self.seconds is not None:
            return f"later({self.seconds}, actorrpc.cancel, r{self.name})"
        return f"actorrpc.cancel(r{self.name}{', force=True' if self.force else ''})"


@dataclass(frozen=True, slots=True)
class End:
    """End an actor by ``actorrpc.kill``, or by a signal to its process: now, or in another thread after ``seconds``."""

    actor: str
    how: str = "actorrpc.kill"
    seconds: float | None = None

    def source(self, is_async: bool) -> str:
        if self.seconds is not None:
            return f"later({self.seconds}, {self.how}, {self.actor})"
        return f"{self.how}({self.actor})"


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the process of an actor by SIGSTOP for ``seconds``, in another thread."""

    actor: str
    seconds: float

    def source(self, is_async: bool) -> str:
        return f"later(0.0, interrupt, {self.actor}, {self.seconds})"


@dataclass(frozen=True, slots=True)
class Pause:
    """Let the driver sleep."""

    seconds: float

    def source(self, is_async: bool) -> str:
        return f"{'await asyncio' if is_async else 'time'}.sleep({self.seconds})"


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete the driver's reference to a call."""

    name: str

    def source(self, is_async: bool) -> str:
        return f"del r{self.name}"


@dataclass(frozen=True, slots=True)
class Gradients:
    """Compute a gradient through actors, and compare it with the gradient computed in the driver's process."""

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
    """A function that runs in a thread; with ``is_async``, a coroutine that runs on an event loop in a thread."""

    name: str
    is_async: bool
    statements: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A program. Sessions execute its ``source``."""

    seed: int
    actors: tuple[Make, ...]
    drivers: tuple[Driver, ...]

    def calls(self) -> Iterator[Invocation]:
        """Yield the calls that drivers make, without the calls nested in them."""
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
