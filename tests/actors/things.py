"""Actor classes and tasks for tests of the public interface; other processes can import them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

import actorrpc

__all__ = [
    "Aio",
    "Box",
    "Chatty",
    "Counter",
    "DoubleCounter",
    "Net",
    "Own",
    "Pair",
    "Picky",
    "Recorder",
    "add",
    "count_to",
    "fib",
    "later",
    "process",
    "slowly",
    "tick",
]

T = TypeVar("T")


@actorrpc.remote
class Counter:
    """Counts."""

    STEP = 1
    gate = threading.Event()

    def __init__(self, start: int = 0, *, step: int = STEP) -> None:
        self.n = start
        self.step = step

    def add(self, times: int = 1) -> int:
        self.n += times * self.step
        return self.n

    def boom(self) -> None:
        raise KeyError("there")

    def wait(self) -> bool:
        return Counter.gate.wait(20)

    @property
    def half(self) -> float:
        return self.n / 2

    @actorrpc.method(num_returns=2)
    def two(self) -> tuple[int, torch.Tensor]:
        return 1, torch.ones(100_000)

    @actorrpc.method(num_returns=3)
    def wrong(self) -> int:
        return 1

    def stream(self, n: int) -> Iterator[int]:
        yield from range(n)

    @staticmethod
    def static(a: int) -> int:
        return 2 * a

    @classmethod
    def made(cls, n: int) -> str:
        return f"{cls.__name__}{cls(n).n}"  # inside the method, cls is the plain class

    def is_one(self) -> tuple[bool, bool]:
        return isinstance(self, Counter), isinstance(self, DoubleCounter)

    def context(self) -> Any:
        return actorrpc.get_runtime_context()

    def own_handle(self) -> Any:
        return actorrpc.current_actor()

    def echo(self, value: Any) -> Any:
        return value

    def kinds(self, *args: Any, **kwargs: Any) -> Any:
        return [type(each).__name__ for each in args], {k: type(v).__name__ for k, v in kwargs.items()}

    def call(self, other: Any) -> int:
        return int(other.rpc_sync().add(10))

    def __call__(self, x: int) -> int:
        return x + 1

    def __len__(self) -> int:
        return 5


@actorrpc.remote
class Recorder:
    """Returns its thread and records the order of its calls."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.attribute_that_is_called = threading.get_ident

    def thread(self) -> int:
        return threading.get_ident()

    def record(self, number: int) -> None:
        self.numbers.append(number)

    def recorded(self) -> list[int]:
        return self.numbers


@actorrpc.remote(max_concurrency=1)
class DoubleCounter(Counter):
    def __init__(self, start: int) -> None:
        super().__init__(start, step=2)

    def twice(self) -> int:
        self.add()
        return self.add()


@actorrpc.remote
class Own:
    """Defines methods with the names of the functions of handles."""

    def ready(self) -> str:
        return "ready"

    def is_alive(self) -> str:
        return "is_alive"

    def options(self) -> str:
        return "options"

    def remote(self) -> str:
        return "remote"

    def rpc_sync(self) -> str:
        return "rpc_sync"

    def kill(self) -> str:
        return "kill"

    def actor_id(self) -> str:
        return "actor_id"

    def rref(self) -> str:
        return "rref"


@actorrpc.remote
class Aio:
    async def add(self, a: int, b: int = 1) -> int:
        await asyncio.sleep(0)
        return a + b

    async def own_handle(self) -> Any:
        return actorrpc.current_actor()

    async def stream(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i


@actorrpc.remote
class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    def get(self) -> T:
        return self.value


@actorrpc.remote
@dataclass
class Pair:
    a: int
    b: int = 2

    def sum(self) -> int:
        return self.a + self.b


@actorrpc.remote
class Net(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out


@actorrpc.remote
class Picky:
    def __init__(self, fail: bool = True) -> None:
        if fail:
            raise ValueError("not today")

    def m(self) -> int:
        return 1


@actorrpc.remote(concurrency_groups={"io": 2}, timeout=30)
class Chatty:
    @actorrpc.method(concurrency_group="io")
    def io(self) -> int:
        return 1

    def other(self) -> int:
        return 2


@actorrpc.remote
def add(a: int, b: int = 2) -> int:
    """Add."""
    return a + b


@actorrpc.remote
def count_to(n: int) -> Iterator[int]:
    yield from range(n)


@actorrpc.remote
async def later(x: int) -> int:
    await asyncio.sleep(0)
    return x


@actorrpc.remote
async def tick(n: int) -> AsyncIterator[int]:
    for i in range(n):
        await asyncio.sleep(0)
        yield i


@actorrpc.remote
def fib(n: int) -> int:
    if n < 2:
        return n
    return sum(actorrpc.get([fib.remote(n - 1), fib.remote(n - 2)]))


@actorrpc.remote
def process() -> int:
    return os.getpid()


@actorrpc.remote
def slowly() -> None:
    for _ in range(600):  # in short steps: a thread that waits in C code cannot be interrupted
        time.sleep(0.1)
