"""Exposed and hidden functions, allowed and other classes of a data-only service."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

from actorrpc.rpc import allow, exposed

__all__ = ["Colour", "Pair", "Point", "add", "hidden", "same"]


@exposed
def add(one: Any, other: Any) -> Any:
    """Add two values."""
    return one + other


@exposed(name="same/1")
def same(value: Any) -> Any:
    """Return the value."""
    return value


@exposed
def fail(text: str) -> None:
    """Raise an error."""
    raise ValueError(text)


@exposed
def grow(size: int) -> str:
    """Return a text of this length."""
    return "x" * size


@exposed
def give() -> Any:
    """Return a value that cannot be sent."""
    return lambda: 1


def hidden() -> str:
    """A function that is not exposed."""
    return "hidden"


@allow
@dataclass(frozen=True, slots=True)
class Point:
    """An allowed dataclass of two numbers."""

    x: int
    y: int


@allow
@dataclass
class Bag:
    """An allowed mutable dataclass."""

    items: list[Any]


@allow
class Pair(NamedTuple):
    """An allowed named tuple."""

    one: Any
    other: Any


@allow
class Colour(enum.Enum):
    """An allowed enum."""

    RED = 1
    BLUE = 2


@allow
class Shade(enum.Enum):
    """An allowed enum that is pickled as by early releases of Python 3.11."""

    LIGHT = "light"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return a call of getattr for the member."""
        return getattr, (type(self), self.name)


@dataclass
class Secret:
    """A class that is not allowed."""

    value: int


class Complaint(Exception):
    """An exception class that is not allowed."""


@exposed
def complain() -> None:
    """Raise an exception of a class that is not allowed."""
    raise Complaint("why")
