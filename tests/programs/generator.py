"""Make a program from a seed.

Three rules ensure that a program does not block forever by itself:

* The actors are numbered. A nested call goes to an actor with a higher number than the actors of all its callers, or to a task.
  It may also go back to an actor whose method waits for it, because an actor runs the calls that descend from its own call. A
  method that only passes a reference on (``pass_on``) does not wait.
* The driver reads a stream with ``backpressure`` in the next statement, because the paused generator occupies its actor.
* A method that waits for the references among its arguments (``read``) gets only references whose outcomes the driver has
  observed before. So does a stream with ``backpressure``, because its reader waits for the references in the items.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.programs import program as syntax

__all__ = ["Features", "generate"]

_SMALL = (
    *("None", "True", "7", "-1.5", "'text'", "b'bytes'", "[]", "{}", "(1, 2)", "[1, [2, [3]]]", "{'a': [1]}"),
    *("torch.arange(3)", "torch.ones(2, 3, dtype=torch.float16)", "torch.tensor(5)", "numpy.arange(4.0)"),
    *(
        "torch.arange(12.0).reshape(3, 4)[:, 1]",
        "numpy.arange(20)[::3]",
        "torch.zeros(0)",
        "[torch.ones(2)] * 2",
    ),
)
_LARGE = (
    *(
        "torch.arange(2_000)",
        "torch.arange(70_000.0)",
        "b'x' * 300_000",
        "numpy.arange(40_000)",
        "'y' * 70_000",
    ),
    *(
        "list(range(3_000))",
        "[torch.arange(5_000.0), torch.arange(5_000.0)]",
        "{'a': torch.ones(40_000), 'b': 1}",
    ),
    *(
        "list(torch.arange(40_000.0).reshape(4, 10_000)[::2])",
        "torch.arange(90_000.0).reshape(300, 300)[:, :20]",
    ),
)
_LARGE_SIZE = 400_000  # bytes, at most
_MOST = 3_000_000  # bytes of an argument
_MOMENTS = (0.0, 0.0002, 0.001, 0.003, 0.01, 0.02)  # seconds


@dataclass(frozen=True, slots=True)
class Features:
    """What programs of a session can do.

    Attributes:
        own_processes: actors may have processes of their own, which may crash.
        remote_workers: names of workers that functions can be called on.
    """

    own_processes: bool = True
    remote_workers: tuple[str, ...] = ()


@dataclass(slots=True)
class _Known:
    """What the generator knows of a reference.

    Attributes:
        call: the call that returned it; None for the reference of a ``Put``.
        size: upper bound of the bytes of its value.
        parts: the number of references, for a call with ``num_returns``; else 0.
        observed: a statement has observed the outcome.
    """

    name: str
    call: syntax.Invocation | None
    size: int
    parts: int = 0
    is_stream: bool = False
    observed: bool = False

    @property
    def is_awaitable(self) -> bool:
        return self.call is None or (self.call.via == "remote" and not self.parts and not self.is_stream)


def generate(seed: int, features: Features) -> syntax.Program:
    """Return the program of a seed; the same seed and features give the same program."""
    dice = random.Random(f"{seed}/{features}")
    actors = tuple(_make(dice, number, features) for number in range(dice.choice((1, 2, 2, 3, 4))))
    count = dice.choice((1, 1, 1, 2, 2, 3))
    writer = _Numbers(seed)
    drivers = []
    for number in range(count):
        author = _Author(dice, features, actors, is_async=dice.random() < 0.25, numbers=writer)
        drivers.append(author.driver(f"driver_{number}", dice.randint(3, 14)))
    return syntax.Program(seed, actors, tuple(drivers))


def _make(dice: random.Random, number: int, features: Features) -> syntax.Make:
    kinds = ["Serial"] * 4 + ["Coroutines"] * 3 + ["Threaded"] * 2 + ["Grouped"]
    if features.own_processes:
        kinds += ["Restartable"] * 2
    kind = dice.choice(kinds)
    options: list[tuple[str, str]] = []
    own = features.own_processes and (kind == "Restartable" or dice.random() < 0.15)
    if not own:
        options.append(("worker", f"workers[{dice.randrange(2)}]"))
    return syntax.Make(f"actor_{number}", kind, tuple(options))


class _Numbers:
    """Makes the names of calls from the program's seed and a number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        # A known fault: if kill() ends an actor that shares its process, nested calls that its methods wait for run on. A nested
        # call of `work` would then occupy its actor. So a program contains either such kills, or nested calls of `work`.
        self.kills_placed = seed % 2 == 0
        self._last = 0

    def next(self) -> str:
        self._last += 1
        return f"{self._seed}_{self._last}"


class _Author:
    """Writes the statements of one driver."""

    def __init__(
        self,
        dice: random.Random,
        features: Features,
        actors: tuple[syntax.Make, ...],
        *,
        is_async: bool,
        numbers: _Numbers,
    ) -> None:
        self._dice = dice
        self._features = features
        self._actors = actors
        self._is_async = is_async
        self._numbers = numbers
        self._known: list[_Known] = []
        self._statements: list[syntax.Statement] = []

    def driver(self, name: str, count: int) -> syntax.Driver:
        ways: list[tuple[float, Callable[[], None]]] = [
            (10, self._start),
            (2, self._stream),
            (1, self._put),
            (3, self._see),
            (1, self._see_all),
            (1, self._glance),
            (2, self._cancel),
            (2, self._work),
            (1, self._pause),
            (0.5, self._drop),
            (0.3, self._stop),
            (0.3, self._end),
            (0.4, self._gradients),
            (0.8, self._crash),
            (1 if self._features.remote_workers else 0.3, self._rpc),
        ]
        weights = [weight for weight, _ in ways]
        for _ in range(count):
            self._dice.choices(ways, weights)[0][1]()
        for known in list(self._known):
            if not known.observed:
                self._observe(known)
        return syntax.Driver(name, self._is_async, tuple(self._statements))

    # -- statements ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        call, size = self._call()
        self._add(call, size)

    def _add(self, call: syntax.Invocation, size: int, *, is_stream: bool = False) -> _Known:
        returns = call.option("num_returns")
        parts = returns if isinstance(returns, int) else 0
        known = _Known(call.name, call, size, parts, is_stream)
        self._known.append(known)
        self._statements.append(syntax.Start(call))
        return known

    def _stream(self) -> None:
        args, size = self._arguments(self._dice.randint(0, 6), waits=False)
        options: list[tuple[str, object]] = []
        if self._dice.random() < 0.3:
            backpressure = self._dice.randint(1, 3)
            unobserved = {known.name for known in self._known if not known.observed}
            if unobserved.isdisjoint(each.name for argument in args for each in syntax.references(argument)):
                options.append(("backpressure", backpressure))
        fails = syntax.Literal(str(self._dice.random() < 0.2))
        call = syntax.Invocation(
            self._numbers.next(), self._target(), "stream", (fails, *args), options=tuple(options)
        )
        known = self._add(call, size, is_stream=True)
        if options:  # the paused generator occupies its actor until the stream is read
            self._observe(known)

    def _put(self) -> None:
        literal, size = self._literal()
        known = _Known(self._numbers.next(), None, size, observed=True)
        self._known.append(known)
        self._statements.append(syntax.Put(known.name, literal))

    def _see(self) -> None:
        known = self._one_of(lambda each: True)
        if known is not None:
            self._observe(known)

    def _observe(self, known: _Known) -> None:
        known.observed = True
        if known.is_stream:
            most = self._dice.randint(0, 4) if self._dice.random() < 0.3 else None
            self._known.remove(known)
            self._statements.append(syntax.SeeStream(known.name, most if most or not self._is_async else 1))
        else:
            self._statements.append(syntax.See(known.name))

    def _see_all(self) -> None:
        several = [each for each in self._known if each.is_awaitable]
        if several:
            for each in several:
                each.observed = True
            self._statements.append(syntax.SeeAll(tuple(each.name for each in several)))

    def _glance(self) -> None:
        known = self._one_of(lambda each: each.is_awaitable)
        if known is not None:
            self._statements.append(syntax.Glance(known.name, self._dice.choice(_MOMENTS)))

    def _cancel(self) -> None:
        known = self._one_of(
            lambda each: each.call is not None and each.call.via != "rpc_remote" and not each.parts
        )
        if known is not None:
            self._statements.append(syntax.Cancel(known.name, self._moment()))

    def _work(self) -> None:
        """Add a call that runs for 30 s (``work``), with a timeout or a later cancellation that ends it."""
        target = self._target()
        is_coroutine = self._kind(target) == "Coroutines"
        call = syntax.Invocation(self._numbers.next(), target, "work")
        if self._dice.random() < 0.3:
            timeout: tuple[tuple[str, object], ...] = (("timeout", self._dice.choice((0.001, 0.02, 0.05))),)
            self._add(replace(call, options=timeout if is_coroutine else (*timeout, ("interrupt", True))), 0)
            return
        if self._dice.random() < 0.4 and not self._numbers.kills_placed:
            inner = self._nested_target([target], [target])
            call = replace(call, method="ask", nested=syntax.Invocation(self._numbers.next(), inner, "work"))
        known = self._add(call, 0)
        for _ in range(self._dice.choice((0, 0, 1, 2))):
            self._start()
        if self._dice.random() < 0.5:
            self._pause()
        force = target == syntax.TASKS and self._features.own_processes and self._dice.random() < 0.1
        self._statements.append(syntax.Cancel(known.name, None if force else self._moment(), force))

    def _pause(self) -> None:
        self._statements.append(syntax.Pause(self._dice.choice(_MOMENTS)))

    def _moment(self) -> float | None:
        return self._dice.choice(_MOMENTS) if self._dice.random() < 0.4 else None

    def _drop(self) -> None:
        known = self._one_of(lambda each: True)
        if known is not None:
            self._known.remove(known)
            self._statements.append(syntax.Drop(known.name))

    def _stop(self) -> None:
        self._statements.append(
            syntax.Stop(self._dice.choice(self._actors).actor, self._dice.choice((0.01, 0.1)))
        )

    def _end(self) -> None:
        make = self._dice.choice(self._actors)
        own = not make.options
        if not own and not self._numbers.kills_placed:
            return
        how = self._dice.choice(("actorrpc.kill", "end_process")) if own else "actorrpc.kill"
        self._statements.append(syntax.End(make.actor, how, self._moment()))

    def _gradients(self) -> None:
        if not self._is_async:
            path = tuple(self._dice.choice(self._actors).actor for _ in range(self._dice.randint(1, 3)))
            self._statements.append(syntax.Gradients(self._numbers.next(), path, self._dice.random() < 0.5))

    def _crash(self) -> None:
        """Add a call that ends the process of an actor. Does nothing if no actor has a process of its own."""
        own = [make.actor for make in self._actors if not make.options and make.kind != "Coroutines"]
        if not own:
            return
        target = self._dice.choice(own)
        options: tuple[tuple[str, object], ...] = ()
        if self._dice.random() < 0.2:
            options = (("max_task_retries", 1),)
        code = syntax.Literal(self._dice.choice(("-9", "3")))
        self._add(syntax.Invocation(self._numbers.next(), target, "crash", (code,), options=options), 0)

    def _rpc(self) -> None:
        """Add a call through an actor's RRef; in a group, mostly a call of a function on a remote worker instead."""
        name, method = self._numbers.next(), self._dice.choice(("value", "change", "fail"))
        remote = self._features.remote_workers
        if not remote or self._dice.random() < 0.2:
            args, size = self._arguments(self._dice.randint(0, 2), waits=False, plain=True)
            call = syntax.Invocation(name, self._dice.choice(self._actors).actor, method, args, via="rref")
        else:
            if self._dice.random() < 0.3:
                method = "read"
            args, size = self._arguments(self._dice.randint(0, 2), waits=method == "read")
            via = self._dice.choice(("rpc_async", "rpc_remote"))
            call = syntax.Invocation(name, self._dice.choice(remote), method, args, via=via)
        if method == "fail":
            call = replace(call, args=(syntax.Literal("'ValueError'"), *args))
        self._add(call, size)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _call(self) -> tuple[syntax.Invocation, int]:
        call, size = self._invocation(self._target(), [], [])
        options = list(call.options)
        kind = self._kind(call.target)
        if self._dice.random() < 0.08 and call.method != "parts":
            options.append(("timeout", self._dice.choice((0.001, 0.005, 0.02))))
        if kind == "Grouped" and self._dice.random() < 0.6:
            options.append(("concurrency_group", self._dice.choice(("one", "two"))))
        if kind == "Restartable" and self._dice.random() < 0.3:
            options.append(("max_task_retries", 2))
        return replace(call, options=tuple(options)), size

    def _invocation(
        self, target: str, callers: list[str], waiting: list[str]
    ) -> tuple[syntax.Invocation, int]:
        """Return a call and the size of its value.

        Args:
            callers: the targets of the calls in which it is nested, outermost first.
            waiting: the callers whose methods wait for the call.
        """
        methods = ["value"] * 5 + ["change", "read", "read", "fail", "parts"]
        if len(callers) < 3:
            methods += ["ask"] * 3 + ["pass_on"] * 2
        method = self._dice.choice(methods)
        name = self._numbers.next()
        if method in ("ask", "pass_on"):
            callers = [*callers, target]
            waiting = [*waiting, target] if method == "ask" else []
            nested, size = self._invocation(self._nested_target(callers, waiting), callers, waiting)
            return syntax.Invocation(name, target, method, nested=nested), size
        args, size = self._arguments(self._dice.randint(0, 3), waits=method == "read")
        if method == "fail":
            args = (syntax.Literal(repr(self._dice.choice(("ValueError", "KeyError", "Trouble")))), *args)
        options: tuple[tuple[str, object], ...] = ()
        if method == "parts" and not callers and len(args) > 1:
            options = (("num_returns", len(args)),)
        return syntax.Invocation(name, target, method, args, options=options), size

    def _target(self) -> str:
        return syntax.TASKS if self._dice.random() < 0.15 else self._dice.choice(self._actors).actor

    def _nested_target(self, callers: list[str], waiting: list[str]) -> str:
        names = [make.actor for make in self._actors]
        places = [names.index(each) for each in callers if each != syntax.TASKS]
        behind = names[max(places, default=-1) + 1 :]
        back = [each for each in callers if each != syntax.TASKS]
        target = self._dice.choice([*behind, *behind, *back, syntax.TASKS])
        return target if target in behind or target in waiting else syntax.TASKS

    def _kind(self, target: str) -> str:
        return next((make.kind for make in self._actors if make.actor == target), syntax.TASKS)

    # -- arguments -----------------------------------------------------------------------------------------------

    def _arguments(
        self, count: int, *, waits: bool, plain: bool = False
    ) -> tuple[tuple[syntax.Argument, ...], int]:
        """Return arguments, and their size. ``waits``: the method waits for the references among them."""
        found: list[syntax.Argument] = []
        total = 0
        for _ in range(count):
            argument, size = self._literal() if plain else self._argument(waits, 0)
            if total + size < _MOST:
                found.append(argument)
                total += size
        return tuple(found), total

    def _argument(self, waits: bool, depth: int) -> tuple[syntax.Argument, int]:
        chance = self._dice.random()
        if chance < 0.35:
            known = self._one_of(lambda each: not each.is_stream and (each.observed or not waits))
            if known is not None and (known.call is None or known.call.via not in ("rref", "rpc_async")):
                part = self._dice.randrange(known.parts) if known.parts else None
                return syntax.Reference(known.name, part), known.size
        if chance < 0.6 and depth < 2:
            kind = self._dice.choice(("list", "list", "dict", "tuple"))
            items = [self._argument(waits, depth + 1) for _ in range(self._dice.randint(0, 3))]
            return syntax.Container(kind, tuple(item for item, _ in items)), sum(size for _, size in items)
        if chance < 0.65:
            return syntax.Handle(self._dice.choice(self._actors).actor), 100
        return self._literal()

    def _literal(self) -> tuple[syntax.Literal, int]:
        if self._dice.random() < 0.25:
            return syntax.Literal(self._dice.choice(_LARGE)), _LARGE_SIZE
        return syntax.Literal(self._dice.choice(_SMALL)), 100

    def _one_of(self, fits: Callable[[_Known], bool]) -> _Known | None:
        fitting = [each for each in self._known if fits(each)]
        return self._dice.choice(fitting) if fitting else None
