"""Functions that a worker is called with again and again, under numbers in place of their names.

The name of a function costs a small call a tenth of its time: the caller's pickler imports the module to see that the name means
the function, and the callee's imports it to find that. So a call of a function that has no number yet carries one beside the name
(it *introduces* the function); once such a call is answered, the worker knows the number, and further calls carry that alone. The
order in which calls arrive does not matter.

A number stands for a name, never for what the name meant: the callee looks it up in its module at each call, as it would without,
and the caller uses the number only while the name means the function in its own process. Only functions that would travel by name
have one, and nobody has one at workers that take data only.
"""

from __future__ import annotations

import itertools
import sys
from types import FunctionType
from typing import Any, Final

from actorrpc.errors import ProtocolError
from actorrpc.serialization import by_value, codec

__all__ = ["MOST", "NumberedFunctions"]

MOST: Final = 1024
"""Numbers that one worker gives at another one; functions beyond them go by name."""

_modules: Final = sys.modules


class NumberedFunctions:
    """The numbers between this worker and one other, in both directions. Thread-safe: each step is one of a dict's.

    Attributes:
        numbers: of the functions that this worker calls, those that the other one knows.
        names: of the functions that the other one calls: module and name.
    """

    __slots__ = ("_count", "_introduced", "names", "numbers")

    def __init__(self) -> None:
        self.numbers: dict[FunctionType, int] = {}
        self.names: dict[int, tuple[str, str]] = {}
        self._introduced: dict[FunctionType, int] = {}
        self._count = itertools.count()

    def introduce(self, function: FunctionType, same_main: bool | None) -> Any:
        """Return what a call carries of a function whose number is not known, or may not be used: number and name, or itself.

        Args:
            same_main: whether the other worker runs the same program; None where it takes data only.
        """
        if same_main is None or not _goes_by_name(function, same_main):
            self._introduced.pop(function, None)
            self.numbers.pop(function, None)
            return function
        number = self._introduced.get(function)
        if number is None:
            number = next(self._count)
            if number >= MOST:
                return function
            number = self._introduced.setdefault(function, number)
        return number, function.__module__, function.__name__

    def sent(self, function: Any) -> Any:
        """Return what stands for a function where it cannot be introduced: its number, or the function."""
        if type(function) is not FunctionType or by_value.modules or not _is_named(function):
            return function
        return self.numbers.get(function, function)

    def learn(self, introduced: tuple[Any, ...]) -> Any:
        """Take what a call carries of a function that it introduces; return the function.

        Raises:
            ProtocolError: that makes no sense.
            Exception: the name means nothing here.
        """
        if tuple(map(type, introduced)) != (int, str, str) or not 0 <= introduced[0] < MOST:
            raise ProtocolError("a call does not say which function it is of")
        number, module, name = introduced
        self.names[number] = by_value.MAIN[0] if module in by_value.MAIN else module, name
        return self.find(number, "")

    def find(self, number: int, who: str) -> Any:
        """Return the function of a number.

        Raises:
            ProtocolError: it has not been introduced.
            Exception: the name means nothing here; what a call by name would raise.
        """
        known = self.names.get(number)
        if known is None:
            raise ProtocolError(
                f"{who!r} calls a function by the number {number}, which it has not introduced"
            )
        module, name = known
        try:
            return getattr(_modules[module], name)
        except (KeyError, AttributeError):
            return codec.decode(f"c{module}\n{name}\n.".encode(), (), definitions=None)


def _is_named(function: FunctionType) -> bool:
    return getattr(_modules.get(function.__module__), function.__name__, None) is function


def _goes_by_name(function: FunctionType, same_main: bool) -> bool:
    if function.__name__ != function.__qualname__ or not _is_named(function):
        return False
    return function.__module__ not in by_value.MAIN or (same_main and not by_value.has_late())
