"""A script whose code only its driver has: prints, as JSON, the result of each function in a worker."""

from __future__ import annotations

import functools
import json
import sys
import threading
import types
import typing
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config

import actorrpc

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


# -- module-like objects of torch ----------------------------------------------------------------------------

BACKENDS, MKLDNN, OPS, ATEN = torch.backends, torch.backends.mkldnn, torch.ops, torch.ops.aten
CLASSES, DYNAMO = torch.classes, torch._dynamo.config
ADD, ADD_TENSOR = torch.ops.aten.add, torch.ops.aten.add.Tensor


@case
def modules_of_torch() -> Any:
    same = BACKENDS is torch.backends and MKLDNN is torch.backends.mkldnn and CLASSES is torch.classes
    same = same and OPS is torch.ops and ATEN is torch.ops.aten and DYNAMO is torch._dynamo.config
    return same and ADD is torch.ops.aten.add and ADD_TENSOR is torch.ops.aten.add.Tensor


class Settings(types.ModuleType):
    """A module that no import finds."""


SETTINGS = Settings("unknown_settings")


@case
def unknown_module() -> Any:
    return SETTINGS


# -- typing --------------------------------------------------------------------------------------------------------

P = typing.ParamSpec("P")
Ts = typing.TypeVarTuple("Ts")
UserId = typing.NewType("UserId", int)


def typed(user: UserId, *args: Any) -> UserId:
    return user


typed.__annotations__ = {
    "user": UserId,
    "args": P.args,
    "return": Callable[P, UserId],
    "rest": tuple[*Ts],
}


@case
def type_parameters() -> Any:
    hints = typed.__annotations__
    return [hints["user"] is UserId, hints["args"].__origin__ is P, UserId(3), P.__name__, Ts.__name__]


# -- functools -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=7)
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@case
def cache() -> Any:
    before = fibonacci.cache_info().currsize
    return [fibonacci(40), before, fibonacci.cache_parameters(), fibonacci.__name__]


@functools.singledispatch
def depth(_of: object) -> int:
    return 0


@depth.register
def _(of: list) -> int:  # type: ignore[type-arg]
    return 1 + max(map(depth, of), default=0)


@case
def dispatch() -> Any:
    return [depth([[], [[]]]), depth(3), depth.__name__]


class Lazy:
    made = 0

    @functools.cached_property
    def once(self) -> int:
        self.made += 1
        return self.made

    @functools.lru_cache  # noqa: B019
    def cached(self) -> int:
        return 5

    @functools.singledispatchmethod
    def kind(self, _of: object) -> str:
        return "object"

    @kind.register
    def _(self, _of: int) -> str:
        return "int"


@case
def members() -> Any:
    lazy = Lazy()
    return [lazy.once, lazy.once, lazy.cached(), lazy.kind(1), lazy.kind("")]


# -- torch's decorators --------------------------------------------------------------------------------------------


@torch.compile(backend="eager", fullgraph=True)
def compiled(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Compiled(torch.nn.Module):
    @torch.compile(backend="eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 2


@torch.compiler.disable
def plain(x: torch.Tensor) -> torch.Tensor:
    return x + 3


@case
def compilation() -> Any:
    one = torch.ones(1)
    there = [compiled(one).item(), Compiled()(one).item(), plain(one).item()]
    return [*there, hasattr(compiled, "get_compiler_config")]


@torch.library.custom_op("tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x * x * x


@cube.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def slope(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return 3 * ctx.saved_tensors[0] ** 2 * gradient


cube.register_autograd(slope, setup_context=keep)
CUBE = torch.ops.tests.cube.default


@case
def custom_operator() -> Any:
    x = torch.full((1,), 2.0, requires_grad=True)
    y = cube(x)
    y.backward()
    assert x.grad is not None
    return [y.item(), x.grad.item(), CUBE(torch.full((1,), 3.0)).item()]


# -- bodies of classes ---------------------------------------------------------------------------------------------

WIDTH = 3
own = threading.Lock()


@case
def body_of_a_class() -> Any:
    class Local:
        own = 1
        width = WIDTH
        both = own + width

        def filled(self, value: int = WIDTH) -> int:
            return value

    return [Local.width, Local.both, Local().filled()]


# -- objects that cannot be sent -------------------------------------------------------------------------------------------

LOCK = threading.Lock()


@case
def a_lock() -> Any:
    return LOCK


class Named:
    def __reduce__(self) -> str:
        return "NAMED"


NAMED = Named()


@case
def a_name() -> Any:
    return NAMED


# -- classes that change -------------------------------------------------------------------------------------------

SCALE = 1


def scaled(x: int) -> int:
    return x * SCALE


class Base:
    def of_base(self) -> int:
        return 1


@actorrpc.remote
class Model(Base):
    rate = 1

    def seen(self) -> Any:
        return [self.rate, scaled(1), self.of_base()]

    def is_one(self, other: Any) -> bool:
        return isinstance(other, Base)


def changes() -> Any:
    """Change a class between the creations of actors, the first time before the first actor's process has started."""
    global SCALE
    first = Model.remote()
    Model.rate = SCALE = 2
    second = Model.remote()
    assert actorrpc.get(second.seen.remote()) == [2, 2, 1]
    Base.of_base = lambda _self: 3  # type: ignore[method-assign]
    third = Model.remote()
    actors = (first, second, third)
    return [
        actorrpc.get([each.seen.remote() for each in actors]),
        actorrpc.get([each.is_one.remote(Base()) for each in actors]),
    ]


class Argument(Base):
    def seen(self) -> Any:
        return ["old", self.of_base()]


@actorrpc.remote
class Reader:
    def read(self, argument: Argument) -> Any:
        return argument.seen()

    def back(self, argument: Argument) -> Argument:
        return argument


def argument_changes() -> Any:
    """Change the class of an argument, and then its base class; send an argument to another process after each change."""
    first, second, third = [Reader.remote() for _ in range(3)]
    found = [actorrpc.get(first.read.remote(Argument()))]
    Argument.seen = lambda self: ["new", self.of_base()]  # type: ignore[method-assign]
    assert isinstance(actorrpc.get(first.back.remote(Argument())), Argument)
    found.append(actorrpc.get(second.read.remote(Argument())))
    Base.of_base = lambda _self: 4  # type: ignore[method-assign]
    found.append(actorrpc.get(third.read.remote(Argument())))
    return found


def main() -> None:
    found: dict[str, Any] = {}
    with actorrpc.init(num_cpus=8):
        for name, function in CASES.items():
            try:
                found[name] = actorrpc.get(actorrpc.remote(function).remote(), timeout=60)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        found["changes"] = changes()
        found["argument_changes"] = argument_changes()
        found["arguments"] = actorrpc.get(actorrpc.remote(lambda: sys.argv).remote(), timeout=60)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
