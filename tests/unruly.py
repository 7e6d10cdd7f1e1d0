"""User-defined exceptions that forbid operations which ordinary exceptions allow."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["KINDS", "make"]


@dataclass(frozen=True)
class Frozen(Exception):
    code: int = 3


class Properties(Exception):
    @property
    def __traceback__(self) -> Any:
        raise ValueError("no traceback")

    @property
    def __cause__(self) -> Any:
        raise ValueError("no cause")

    @property
    def __context__(self) -> Any:
        raise ValueError("no context")


class Lies(Exception):
    __traceback__ = 5  # type: ignore[assignment]
    __cause__ = "a cause"  # type: ignore[assignment]
    __context__ = 7  # type: ignore[assignment]
    __notes__ = 9  # type: ignore[assignment]
    args = 4  # type: ignore[assignment]


class NoReading(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise ValueError(f"no {name}")


class ExitsWhenRead(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(3)


class NoWriting(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(f"no {name}")


class Slots(Exception):
    __slots__ = ("never_set",)


class Arity(Exception):
    def __init__(self, one: int, two: int, *, three: int) -> None:
        self.three = three


class ReduceRaises(Exception):
    def __reduce__(self) -> Any:
        raise ValueError("no reduction")


class ReduceExits(Exception):
    def __reduce__(self) -> Any:
        sys.exit(4)


class ReduceLies(Exception):
    def __reduce__(self) -> Any:
        return int, ("5",)


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class TextExits(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)

    __repr__ = __str__


class NoClass(Exception):
    @property
    def __class__(self) -> Any:
        raise ValueError("no class")


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        raise ValueError(f"no {name} of the class")

    def __subclasscheck__(cls, other: type) -> bool:
        raise ValueError("no subclasses")

    __hash__ = None  # type: ignore[assignment]


class OfMeta(Exception, metaclass=Meta):
    pass


@dataclass(frozen=True)
class FrozenBase(BaseException):
    code: int = 3


_CLASSES: dict[str, Any] = {
    "frozen": Frozen,
    "properties": Properties,
    "lies": Lies,
    "no-reading": NoReading,
    "exits-when-read": ExitsWhenRead,
    "no-writing": NoWriting,
    "slots": Slots,
    "reduce-raises": ReduceRaises,
    "reduce-exits": ReduceExits,
    "reduce-lies": ReduceLies,
    "no-text": NoText,
    "text-exits": TextExits,
    "no-class": NoClass,
    "of-meta": OfMeta,
    "frozen-base": FrozenBase,
}
KINDS = [*_CLASSES, "arity", "below", "beside", "cause of a group"]


def make(kind: str) -> BaseException:
    """Return an exception of this kind."""
    if kind == "arity":
        return Arity(1, 2, three=3)
    if kind in ("below", "beside"):
        outer = RuntimeError("outer")
        if kind == "below":
            outer.__cause__ = Frozen()
        else:
            outer.__context__ = NoReading()
        return outer
    if kind == "cause of a group":
        return ExceptionGroup("several", [Frozen(), NoReading(), NoClass()])
    return _CLASSES[kind]()  # type: ignore[no-any-return]
