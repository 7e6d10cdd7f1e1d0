"""Modules that no other process can import, and objects whose pickles refer to them."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import cloudpickle

__all__ = ["Calls", "Plain", "defined", "in_main", "made", "registered"]

_SOURCE = """
import collections, dataclasses, enum, typing

T = typing.TypeVar("T")
Pair = collections.namedtuple("Pair", "left right")
Pair.__module__ = __name__

def inner(x):
    return [x, 1]

def outer(x=0, *rest):
    return (inner(x), rest)

def bound(self, *rest):
    return ("bound", type(self).__name__, rest)

class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"

@dataclasses.dataclass
class Point:
    x: object = 0
    y: object = None

class Box(typing.Generic[T]):
    def __init__(self, content=None):
        self.content = content

    def open(self, *rest):
        return (self.content, rest)

    @classmethod
    def make(cls, *rest):
        return (cls.__name__, rest)

    @staticmethod
    def still(*rest):
        return ("still", rest)

class Rich(Box):
    def open(self, *rest):
        return ("rich", super().open(*rest))
"""


class Plain:
    """A class that every process can import."""

    def __init__(self, content: Any = None) -> None:
        self.content = content

    def show(self, *rest: Any) -> Any:
        return ("plain", self.content, rest)


class Calls:
    """Is pickled as a call of a function, which occurs only in the result of ``__reduce__``."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments
        self._result: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced

    def result(self) -> Any:
        """Return the object as which it is unpickled, always the same one."""
        if not self._result:
            function, arguments = self._reduced
            self._result.append(function(*arguments))
        return self._result[0]


def defined(module: ModuleType) -> None:
    """Fill a module with functions and classes."""
    exec(textwrap.dedent(_SOURCE), module.__dict__)


@contextlib.contextmanager
def made(*names: str) -> Iterator[list[ModuleType]]:
    """Create modules of these names with equal content, and remove them at the end."""
    modules = [ModuleType(name) for name in names]
    try:
        for module in modules:
            sys.modules[module.__name__] = module
            defined(module)
        yield modules
    finally:
        for name in names:
            sys.modules.pop(name, None)


@contextlib.contextmanager
def registered(*modules: ModuleType) -> Iterator[None]:
    """Register modules to be pickled by value until the end."""
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


@contextlib.contextmanager
def in_main(names: dict[str, Any]) -> Iterator[None]:
    """Add objects to the main module of this process until the end."""
    namespace = vars(sys.modules["__main__"])
    namespace.update(names)
    try:
        yield
    finally:
        for name in names:
            del namespace[name]
