"""Random distributed programs, and their gradients by local autograd.

A :class:`Program` is plain data, so it can be sent: leaves on workers, steps on one worker or between two workers, and roots on
worker 0. Values have numbers as names, and each worker has its own table of values. The executor of a program chooses how
to run steps between workers:

* :class:`Send`: a message with tensors leaves ``worker`` and is opened on ``to`` (a call's arguments, or its result);
* :class:`Keep` and :class:`Open`: a message is kept by ``worker``, and opened by any worker, any number of times.

Steps are executed in order; :func:`perform` runs steps of one worker. :func:`expected` executes a program in one local graph,
and :func:`compare` compares its gradients with those of a distributed execution.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Compute",
    "InPlace",
    "Keep",
    "Leaf",
    "Open",
    "Program",
    "Send",
    "compare",
    "expected",
    "generate",
    "make_leaf",
    "make_root",
    "perform",
]

Values = dict[int, Tensor]


# -- programs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf on a worker. ``hooks``: "clamp" and "scale" are tensor hooks, "after" runs after accumulation."""

    worker: int
    name: int
    shape: tuple[int, ...]
    dtype: str
    hooks: tuple[str, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Compute:
    worker: int
    outs: tuple[int, ...]
    op: str
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InPlace:
    """Changes a value that has just arrived and has not been used."""

    worker: int
    op: str
    value: int
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Send:
    worker: int
    to: int
    values: tuple[int, ...]
    outs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Keep:
    worker: int
    message: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Open:
    worker: int
    message: int
    outs: tuple[int, ...]


Step = Compute | InPlace | Send | Keep | Open


@dataclass(frozen=True, slots=True)
class Program:
    seed: int
    workers: int
    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    roots: tuple[tuple[int, ...], ...]  # each root is the sum of some values of worker 0


# -- execution ------------------------------------------------------------------------------------------------------


class Twice(torch.autograd.Function):
    """A sum whose backward returns the same tensor object for both operands."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, gradient


class Picky(torch.autograd.Function):
    """A function of two inputs, of which only the first gets a gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * 1.5, None


def _real(x: Tensor) -> bool:
    return not x.is_complex()


_ANY: dict[str, tuple[int, Callable[..., bool], Callable[..., Any]]] = {
    # name: number of inputs, condition on the inputs, function (returns a tuple if it has several results)
    "tanh": (1, _real, torch.tanh),
    "sin": (1, _real, torch.sin),
    "scale": (1, lambda _: True, lambda x: x * 0.7),
    "view": (1, lambda x: x.is_contiguous(), lambda x: x.view(-1).view(x.shape)),
    "transpose": (1, lambda x: x.dim() == 2, lambda x: x.t()),
    "expand": (
        1,
        lambda x: x.dim() == 2 and x.shape[0] > 0,
        lambda x: (x.sum(0, keepdim=True) * 0.3).expand_as(x),
    ),
    "first": (1, lambda x: x.dim() == 2 and x.shape[0] > 1, lambda x: x[:1]),
    "none": (1, lambda x: x.dim() == 2, lambda x: x[:0]),
    "split": (1, lambda x: x.dim() == 2 and x.shape[1] == 3, lambda x: torch.split(x, [1, 2], dim=1)),
    "square": (1, lambda x: _real(x) and x.dim() == 2, lambda x: torch.tanh(x @ x.t() @ x)),
    "single": (1, lambda x: x.dtype == torch.float64, lambda x: x.to(torch.float32)),
    "double": (1, lambda x: x.dtype == torch.float32, lambda x: x.to(torch.float64)),
    "complex": (1, lambda x: x.dtype == torch.float64, lambda x: torch.complex(x, x * 0.5)),
    "real": (1, lambda x: x.is_complex(), lambda x: x.real),
    "norm": (1, lambda x: x.is_complex(), lambda x: torch.tanh((x * x.conj()).real)),
    "detach": (1, lambda _: True, lambda x: x.detach()),
    "add": (2, lambda x, y: x.shape == y.shape, lambda x, y: x + y),
    "twice": (2, lambda x, y: x.shape == y.shape and x.dtype == y.dtype, Twice.apply),
    "picky": (2, lambda x, y: True, Picky.apply),
    "join": (2, lambda x, y: _real(x), lambda x, y: torch.tanh(x + 0.2 * (y * y.conj()).real.sum())),
    "mul": (2, lambda x, y: x.shape == y.shape and _real(x) and _real(y), lambda x, y: x * torch.tanh(y)),
    "mix": (2, lambda x, y: True, lambda x, y: x + 0.1 * y.sum()),
    "cat": (
        2,
        lambda x, y: x.dim() == 2 == y.dim() and x.shape[1] == y.shape[1] and x.shape[0] + y.shape[0] < 6,
        lambda x, y: torch.cat((x, y)),
    ),
    "embed": (
        1,
        lambda x: x.is_leaf and x.shape[0] == 5,
        lambda x: torch.nn.functional.embedding(torch.tensor([0, 2, 2]), x, sparse=True),
    ),
}

_IN_PLACE: dict[str, tuple[int, Callable[..., bool], Callable[..., Any]]] = {
    "mul_": (1, lambda x: True, lambda x: x.mul_(0.5)),
    "tanh_": (1, _real, torch.tanh_),
    "row": (1, lambda x: x.dim() == 2 and x.shape[0] > 0, lambda x: x[0].mul_(2.0)),
    "add_": (2, lambda x, y: x.shape == y.shape and x.dtype == y.dtype, lambda x, y: x.add_(y)),
}


def _scale(gradient: Tensor | None) -> Tensor | None:
    # torch also calls hooks without a gradient, with None.
    return None if gradient is None else gradient * 2


def _clamp(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clamp(-0.3, 0.3)


def _after(leaf: Tensor) -> None:
    if leaf.grad is not None:
        leaf.grad.mul_(0.5)


def make_leaf(leaf: Leaf) -> Tensor:
    """Make a leaf, with its hooks."""
    generator = torch.Generator().manual_seed(leaf.seed)
    made = torch.rand(leaf.shape, generator=generator, dtype=torch.float64) - 0.5
    made = made.to(getattr(torch, leaf.dtype)).requires_grad_()
    for hook in leaf.hooks:
        if hook == "clamp":
            made.register_hook(_clamp)
        elif hook == "scale":
            made.register_hook(_scale)
        else:
            made.register_post_accumulate_grad_hook(_after)
    return made


def perform(step: Compute | InPlace, values: Values) -> None:
    """Run a step of one worker, on that worker's values."""
    inputs = [values[name] for name in step.inputs]
    if isinstance(step, Compute):
        found = _ANY[step.op][2](*inputs)
        for name, each in zip(step.outs, found if isinstance(found, tuple) else (found,), strict=True):
            values[name] = each
    else:
        _IN_PLACE[step.op][2](values[step.value], *inputs)


def make_root(names: Sequence[int], values: Mapping[int, Tensor]) -> Tensor:
    """Make a root from values of worker 0."""
    total = torch.zeros((), dtype=torch.float64)
    for index, name in enumerate(names):
        each = values[name].sum() * (1.0 + index)
        total = total + (each.real if each.is_complex() else each)
    return total


def copies(tensors: Sequence[Tensor], *, connected: bool) -> list[Tensor]:
    """Return the tensors that arrive when tensors are sent in one message; a duplicate tensor arrives as one object."""
    arrived: dict[int, Tensor] = {}
    for each in tensors:
        if id(each) not in arrived:
            copy = each.clone(memory_format=torch.contiguous_format)
            arrived[id(each)] = copy if connected else copy.detach()
    return [arrived[id(each)] for each in tensors]


class _Local:
    """Executes a program in one process and one graph."""

    def __init__(self, workers: int) -> None:
        self.values: list[Values] = [{} for _ in range(workers)]
        self.kept: dict[int, list[Tensor]] = {}

    def do(self, step: Step) -> None:
        if isinstance(step, (Compute, InPlace)):
            perform(step, self.values[step.worker])
        elif isinstance(step, Send):
            self._arrive(step.to, step.outs, [self.values[step.worker][name] for name in step.values])
        elif isinstance(step, Keep):
            # Copies, so that kept tensors do not change with their sources.
            self.kept[step.message] = copies(
                [self.values[step.worker][name] for name in step.values], connected=True
            )
        else:
            self._arrive(step.worker, step.outs, self.kept[step.message])

    def _arrive(self, worker: int, names: Sequence[int], tensors: Sequence[Tensor]) -> None:
        for name, each in zip(names, copies(tensors, connected=True), strict=True):
            self.values[worker][name] = each


def expected(program: Program) -> dict[int, Tensor]:
    """Return the gradients that local autograd computes, by name of the leaf; leaves without gradient are left out."""
    local = _Local(program.workers)
    leaves = {}
    for leaf in program.leaves:
        leaves[leaf.name] = local.values[leaf.worker][leaf.name] = make_leaf(leaf)
    for step in program.steps:
        local.do(step)
    torch.autograd.backward([make_root(names, local.values[0]) for names in program.roots])
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def compare(program: Program, found: Mapping[int, Tensor], want: Mapping[int, Tensor]) -> None:
    """Check gradients by name against those of :func:`expected`.

    A gradient may be missing if local autograd finds zeros: local autograd replaces a None gradient by zeros for custom
    Functions, but a distributed pass sends nothing for a message whose gradient is None.

    Raises:
        AssertionError: they differ.
    """
    want = {name: each for name, each in want.items() if name in found or bool(each.to_dense().any())}
    assert found.keys() == want.keys(), f"gradients of {sorted(found)}, not of {sorted(want)}"
    single = any(isinstance(step, Compute) and step.op == "single" for step in program.steps)
    single = single or any(leaf.dtype == "float32" for leaf in program.leaves)
    for name, right in want.items():
        left = found[name]
        assert left.is_sparse == right.is_sparse, f"leaf {name}: {left.layout}, not {right.layout}"
        if left.is_sparse:
            left, right = left.to_dense(), right.to_dense()
        tolerance = 2e-4 if single else 1e-9
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


# -- generation -------------------------------------------------------------------------------------------------


class _Generator:
    def __init__(self, seed: int, workers: int | None, steps: int | None) -> None:
        self.rng = rng = random.Random(seed)
        self.seed = seed
        self.workers = workers or rng.randint(2, 5)
        self.length = steps or rng.randint(5, 30)
        self.local = _Local(self.workers)
        self.names: list[list[int]] = [[] for _ in range(self.workers)]
        self.leaves: list[Leaf] = []
        self.steps: list[Step] = []
        self.fresh: dict[
            int, int
        ] = {}  # values that have just arrived, and may be changed in place: name -> worker
        self.messages: dict[int, int] = {}  # kept messages: message -> number of tensors
        self.count = 0
        self.at = 0  # worker of the last arrival

    def where(self) -> int:
        """Choose a worker, preferably that of the last arrival, to get long chains."""
        return self.at if self.rng.random() < 0.65 else self.rng.randrange(self.workers)

    def name(self) -> int:
        self.count += 1
        return self.count

    def make(self) -> Program:
        rng = self.rng
        for worker in range(self.workers):
            for _ in range(rng.choice((1, 1, 2, 3))):
                self.leaf(worker)
        while len(self.steps) < self.length:
            rng.choices(
                (self.compute, self.send, self.in_place, self.keep, self.open),
                (12, 7, 2, 1, 2 if self.messages else 0),
            )[0]()
        roots = tuple(self.root() for _ in range(rng.choice((1, 1, 1, 2))))
        return Program(self.seed, self.workers, tuple(self.leaves), tuple(self.steps), roots)

    def leaf(self, worker: int) -> None:
        rng = self.rng
        embedding = rng.random() < 0.15
        shape = (5, 3) if embedding else rng.choice(((2, 3), (2, 3), (3, 2), (1, 3)))
        dtype = "float64" if embedding else rng.choice(("float64",) * 6 + ("float32", "complex128"))
        hooks: tuple[str, ...] = tuple(
            kind
            for kind, chance in (("clamp", 0.3), ("scale", 0.15), ("after", 0.15))
            if rng.random() < chance and not (kind == "clamp" and dtype == "complex128")
        )
        if embedding:
            # The effect of a clamp depends on the layout.
            hooks = tuple(kind for kind in hooks if kind != "clamp")
        leaf = Leaf(worker, self.name(), shape, dtype, hooks, rng.randrange(1 << 30))
        self.leaves.append(leaf)
        self.local.values[worker][leaf.name] = make_leaf(leaf)
        self.names[worker].append(leaf.name)

    def pick(self, worker: int) -> int:
        """Choose a value, preferably a recent one."""
        names = self.names[worker]
        if self.rng.random() < 0.3:
            return self.rng.choice(names)
        return names[-1 - min(int(self.rng.expovariate(0.7)), len(names) - 1)]

    def value(self, worker: int, name: int) -> Tensor:
        return self.local.values[worker][name]

    def add(self, step: Step) -> None:
        self.local.do(step)
        self.steps.append(step)
        if isinstance(step, Compute):
            used: Sequence[int] = step.inputs
        elif isinstance(step, (Send, Keep)):
            used = step.values
        elif isinstance(step, InPlace):
            used = (step.value, *step.inputs)
        else:
            used = ()
        for name in used:
            self.fresh.pop(name, None)

    def compute(self) -> None:
        worker = self.where()
        ops = list(_ANY)
        for _ in range(20):
            op = self.rng.choices(ops, [4 if _ANY[each][0] == 2 and each != "picky" else 1 for each in ops])[
                0
            ]
            count, possible, _ = _ANY[op]
            inputs = (self.pick(worker),)
            if count == 2:  # use leaves repeatedly
                leaves = [leaf.name for leaf in self.leaves if leaf.worker == worker]
                inputs += (self.rng.choice(leaves) if self.rng.random() < 0.5 else self.pick(worker),)
                if self.rng.random() < 0.5:
                    inputs = inputs[::-1]
            if op in ("detach", "none") and self.rng.random() < 0.8:
                continue
            if possible(*(self.value(worker, name) for name in inputs)):
                outs = tuple(self.name() for _ in range(2 if op == "split" else 1))
                self.add(Compute(worker, outs, op, inputs))
                self.names[worker] += outs
                return

    def choose(self, worker: int) -> tuple[int, ...]:
        return tuple(self.pick(worker) for _ in range(self.rng.choice((1, 1, 1, 2, 2, 3, 4))))

    def arrived(self, worker: int, outs: tuple[int, ...]) -> None:
        self.names[worker] += outs
        self.at = worker
        if len(outs) == 1:  # tensors of one message may share memory
            self.fresh[outs[0]] = worker

    def send(self, worker: int | None = None, to: int | None = None) -> None:
        worker = self.where() if worker is None else worker
        if to is None:
            to = worker if self.rng.random() < 0.1 else self.rng.randrange(self.workers)
        values = self.choose(worker)
        outs = tuple(self.name() for _ in values)
        self.add(Send(worker, to, values, outs))
        self.arrived(to, outs)

    def in_place(self) -> None:
        if not self.fresh:
            return
        name = self.rng.choice(list(self.fresh))
        worker = self.fresh[name]
        op = self.rng.choice(list(_IN_PLACE))
        count, possible, _ = _IN_PLACE[op]
        inputs = tuple(self.pick(worker) for _ in range(count - 1))
        if name not in inputs and possible(
            self.value(worker, name), *(self.value(worker, each) for each in inputs)
        ):
            self.add(InPlace(worker, op, name, inputs))

    def keep(self) -> None:
        worker = self.where()
        values = self.choose(worker)
        message = self.name()
        self.add(Keep(worker, message, values))
        self.messages[message] = len(values)

    def open(self) -> None:
        message = self.rng.choice(list(self.messages))
        worker = self.rng.randrange(self.workers)
        outs = tuple(self.name() for _ in range(self.messages[message]))
        self.add(Open(worker, message, outs))
        self.arrived(worker, outs)

    def root(self) -> tuple[int, ...]:
        for worker in range(1, self.workers):
            if self.rng.random() < 0.8:
                self.send(worker, 0)
        names = {self.pick(0) for _ in range(self.rng.choice((2, 3, 4, 6)))}
        if not make_root(sorted(names), self.local.values[0]).requires_grad:
            names.add(next(leaf.name for leaf in self.leaves if leaf.worker == 0))
        return tuple(sorted(names))


def generate(seed: int, *, workers: int | None = None, steps: int | None = None) -> Program:
    """Return the random program of a seed; by default with 2 to 5 workers and 5 to 30 steps."""
    with torch.random.fork_rng():
        return _Generator(seed, workers, steps).make()
