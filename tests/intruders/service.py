"""What a data-only service offers in these tests, and what it does not."""

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
    """Return it."""
    return value


@exposed
def fail(text: str) -> None:
    """Raise an error."""
    raise ValueError(text)


@exposed
def grow(size: int) -> str:
    """Return a text that is as long."""
    return "x" * size


@exposed
def give() -> Any:
    """Return what cannot be sent."""
    return lambda: 1


def hidden() -> str:
    """Return something that nobody may have."""
    return "hidden"


@allow
@dataclass(frozen=True, slots=True)
class Point:
    """Data of two numbers."""

    x: int
    y: int


@allow
@dataclass
class Bag:
    """Data that can change."""

    items: list[Any]


@allow
class Pair(NamedTuple):
    """Data that is a tuple."""

    one: Any
    other: Any


@allow
class Colour(enum.Enum):
    """Data of few values."""

    RED = 1
    BLUE = 2


@allow
class Shade(enum.Enum):
    """Pickled as early releases of Python 3.11 do it with each enum."""

    LIGHT = "light"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the attribute of the class."""
        return getattr, (type(self), self.name)


@dataclass
class Secret:
    """Data that nobody has allowed."""

    value: int


class Complaint(Exception):
    """An error that nobody has allowed."""


@exposed
def complain() -> None:
    """Raise it."""
    raise Complaint("why")
