"""Expected types of actors without a plugin. test_checkers.py runs mypy, pyright, pyrefly and ty on this file.

All four accept each line, except lines that end in ``# E``, which all refuse, or ``# E: mypy ty``, which only these refuse.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, assert_type

import torch

import actorrpc
from actorrpc import ActorHandle, ObjectRef, ObjectRefGenerator, RRef

T = TypeVar("T")


class Counter(actorrpc.Actor, num_cpus=1, max_restarts=2):
    """Options are class keywords."""

    kept: int

    def __init__(self, start: int, *, step: int = 1) -> None:
        self.kept = start * step

    @actorrpc.method
    def add(self, k: int) -> int:
        return k

    @actorrpc.method(timeout=3)
    def twice(self, k: int) -> int:
        assert_type(self.add(2), int)
        self.add("2")  # E
        return self.add(k)

    @actorrpc.method
    async def wait(self) -> bytes:
        return b""

    @actorrpc.method(max_task_retries=2)
    async def named(self, name: str) -> str:
        assert_type(await self.wait(), bytes)
        return name

    @actorrpc.method
    def stream(self, n: int = 3) -> Iterator[int]:
        yield n

    @actorrpc.method(backpressure=2)
    async def later(self) -> AsyncIterator[str]:
        yield ""

    @actorrpc.method(num_returns=2)
    def two(self) -> tuple[int, str]:
        return 1, ""

    def plain(self, k: int) -> int:
        return k

    @property
    def size(self) -> int:
        return 1


class More(Counter):
    @actorrpc.method
    def add(self, k: int, more: int = 0) -> int:
        assert_type(super().add(k), int)
        return super().add(k) + more

    @actorrpc.method
    def own(self, other: Counter) -> float:
        assert_type(other.add.remote(1), ObjectRef[int])
        return 1.0


class Wrong(Counter):
    @actorrpc.method
    def add(self, k: str) -> int:  # E
        return 1


@dataclass
class Point(actorrpc.Actor):
    x: int
    y: str = ""

    @actorrpc.method
    def get(self) -> int:
        return self.x


class Model(actorrpc.Actor, torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found

    @actorrpc.method
    def width(self) -> int:
        return 1


class Box(actorrpc.Actor, Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    @actorrpc.method
    def get(self) -> T:
        return self.value


def starting() -> None:
    with actorrpc.init(dashboard=True) as context:
        assert_type(context.address, str)
    actorrpc.init(dashboard="127.0.0.1:8265")
    actorrpc.init(dashboard=8265)  # E


def making() -> None:
    assert_type(Counter.remote(1), Counter)
    assert_type(Counter.remote(1, step=2), Counter)
    Counter.remote("x")  # E
    Counter.remote()  # E
    Counter.remote(1, stop=2)  # E
    assert_type(Counter.options(name="x").remote(1), Counter)
    assert_type(Counter.options(name="x").options(num_cpus=1).remote(1), Counter)
    Counter.options(name="x").remote("x")  # E
    assert_type(Counter(1), Counter)
    actorrpc.remote(num_cpus=1)(Counter).remote(1).add.remote(2)
    assert_type(More.remote(1), More)
    assert_type(Point.remote(1, y="a"), Point)
    Point.remote("x")  # E
    assert_type(Model.remote(3), Model)
    assert_type(Box[int].remote(3), Box[int])
    assert_type(Box[int].remote(3).get.remote(), ObjectRef[int])
    Box[int].remote("x")  # E


def calling(c: Counter, more: More, point: Point, model: Model) -> None:
    assert_type(c.add.remote(2), ObjectRef[int])
    assert_type(c.add.remote(k=2), ObjectRef[int])
    c.add.remote("x")  # E
    c.add.remote()  # E
    c.add.remote(1, 2)  # E
    c.add.remote(j=2)  # E
    c.ad.remote(2)  # E
    c.plain.remote(2)  # E
    assert_type(c.twice.remote(2), ObjectRef[int])
    c.twice.remote("x")  # E
    assert_type(c.wait.remote(), ObjectRef[bytes])
    assert_type(c.named.remote("x"), ObjectRef[str])
    assert_type(c.stream.remote(), ObjectRefGenerator[int])
    assert_type(c.later.remote(), ObjectRefGenerator[str])
    assert_type(c.two.remote(), Any)
    assert_type(c.add.options(timeout=1).remote(2), ObjectRef[int])
    c.add.options(timeout=1).remote("x")  # E
    assert_type(c.add.options(num_returns=2).remote(2), Any)
    assert_type(more.add.remote(1, 2), ObjectRef[int])
    assert_type(more.add.remote(1, more=2), ObjectRef[int])
    assert_type(more.own.remote(c), ObjectRef[float])
    more.own.remote(3)  # E
    assert_type(more.stream.remote(), ObjectRefGenerator[int])
    assert_type(point.get.remote(), ObjectRef[int])
    assert_type(model.width.remote(), ObjectRef[int])
    # Type checkers accept this on a handle, although the attribute belongs to the instance.
    assert_type(c.size, int)
    assert_type(c.add(2), int)


def references(c: Counter, more: More) -> None:
    assert_type(c.add.remote(c.add.remote(1)), ObjectRef[int])
    assert_type(more.add.remote(c.add.remote(1), 2), ObjectRef[int])
    assert_type(more.add.remote(2, c.add.remote(1)), ObjectRef[int])
    c.add.remote(c.wait.remote())  # E
    assert_type(actorrpc.get(c.add.remote(1)), int)
    assert_type(actorrpc.get([c.add.remote(1), c.add.remote(2)]), list[int])


async def waiting(c: Counter) -> None:
    assert_type(await c.add.remote(1), int)
    assert_type(await c.wait.remote(), bytes)
    async for ref in c.later.remote():
        assert_type(ref, ObjectRef[str])
    for each in c.stream.remote():
        assert_type(actorrpc.get(each), int)


def handles(c: Counter) -> None:
    assert_type(actorrpc.ready(c), ObjectRef[None])
    assert_type(actorrpc.is_alive(c), bool)
    assert_type(actorrpc.call(c, Counter.add, 1), ObjectRef[int])
    assert_type(actorrpc.call(c, Counter.plain, 1), ObjectRef[int])
    actorrpc.call(c, Counter.plain, "x")  # E
    actorrpc.kill(c)
    actorrpc.monitor(c)
    actorrpc.kill(3)  # E


# -- without the base class ------------------------------------------------------------------------------------------


class Plain:
    def __init__(self, start: int) -> None:
        self.start = start

    def add(self, k: int) -> int:
        return k

    @actorrpc.method(thread=True)
    def marked(self, k: int) -> int:
        return self.add(k)


@actorrpc.remote
class Decorated(Plain):
    pass


@actorrpc.remote
def task(a: int, b: str = "") -> float:
    return 1.0


@actorrpc.remote(max_retries=1)
def items(n: int) -> Iterator[str]:
    yield ""


@actorrpc.remote
async def soon(n: int) -> bytes:
    return b""


@actorrpc.remote
def count() -> int:
    return 1


@actorrpc.remote
def half(a: float, parts: int = 2) -> float:
    return a / parts


@actorrpc.remote
def five(a: int, b: int, c: int, d: int, e: int) -> int:
    return a + b + c + d + e


def decorated(plain: ActorHandle[Plain]) -> None:
    # For pyright, calling a class is ``type.__call__``, which takes and returns anything.
    assert_type(actorrpc.remote(Plain).remote(1), ActorHandle[Plain])  # E: pyright
    actorrpc.remote(Plain).remote("x")  # E: mypy pyrefly ty
    assert_type(actorrpc.remote(num_cpus=1)(Plain).remote(1), ActorHandle[Plain])  # E: pyright
    # mypy (without the plugin) and pyrefly ignore the type that a class decorator returns.
    Decorated.remote(1)  # E: mypy pyrefly
    plain.add.remote(1)
    plain.marked.remote(1)
    assert_type(plain.rpc_sync().add(1), int)
    plain.rpc_sync().add("x")  # E
    assert_type(plain.rpc_sync().marked(1), int)
    assert_type(actorrpc.call(plain, Plain.add, 1), ObjectRef[int])
    assert_type(actorrpc.call(plain, Plain.marked, 1), ObjectRef[int])
    assert_type(task.remote(1), ObjectRef[float])
    task.remote("x")  # E
    assert_type(task.remote(1, b="x"), ObjectRef[float])
    assert_type(task.options(timeout=1).remote(1), ObjectRef[float])
    # References as arguments of tasks.
    assert_type(half.remote(task.remote(1)), ObjectRef[float])
    assert_type(half.remote(task.remote(1), 2), ObjectRef[float])
    assert_type(half.options(timeout=1).remote(task.remote(1), count.remote()), ObjectRef[float])
    assert_type(items.remote(count.remote()), ObjectRefGenerator[str])
    half.remote(soon.remote(1))  # E
    half.remote(a=task.remote(1))  # E
    five.remote(count.remote(), 2, 3, 4, 5)  # E
    assert_type(items.remote(1), ObjectRefGenerator[str])
    assert_type(soon.remote(1), ObjectRef[bytes])
    assert_type(actorrpc.remote("worker", len, args=("x",)), RRef[int])
    actorrpc.remote(torch.nn.Linear).remote(8, 16)(torch.zeros(8))
