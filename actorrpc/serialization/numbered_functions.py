"""Functions that a worker is called with again and again, under numbers in place of their names.

The name of a function costs a small call a tenth of its time: the caller's pickler imports the module to see that the name means
the function, and the callee's imports it to find that. So a call of a function that has no number yet carries one beside it (it
*introduces* the function); once such a call is answered, the worker knows the number, and further calls carry that alone. The
order in which calls arrive does not matter.

A number stands for a name, not for what it meant at first: the callee looks the name up in its module at each call, as it would
without. The caller uses the number only as long as the name means the function in its own process. Only functions that would
travel by name get a number, and nobody has one at workers that take data only.
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
"""Functions that have a number at one worker; further ones go by name."""

_modules: Final = sys.modules


class NumberedFunctions:
    """The numbers between this worker and one other, in both directions. Thread-safe: each step is one of a dict's.

    Attributes:
        numbers: of the functions that this worker calls, those that the other one knows.
        names: of the functions that the other one calls, where they are found: module and name; or the function, where it is not
            found there.
    """

    __slots__ = ("_count", "_introduced", "names", "numbers")

    def __init__(self) -> None:
        self.numbers: dict[FunctionType, int] = {}
        self.names: dict[int, Any] = {}
        self._introduced: dict[FunctionType, int] = {}
        self._count = itertools.count()

    def introduce(self, function: FunctionType, same_main: bool | None) -> Any:
        """Return what a call carries of a function that has no number: with one beside it, if it can have one.

        Args:
            same_main: whether the other worker runs the same program; None where it takes data only.
        """
        number = self._introduced.get(function)
        if number is None:
            if same_main is None or len(self._introduced) >= MOST or not _goes_by_name(function, same_main):
                return function
            number = self._introduced.setdefault(function, next(self._count))
        return number, function

    def sent(self, function: Any) -> Any:
        """Return what stands for a function where it cannot be introduced: its number, or the function."""
        if type(function) is not FunctionType or by_value.modules or not _is_named(function):
            return function
        return self.numbers.get(function, function)

    def learn(self, introduced: tuple[Any, ...]) -> Any:
        """Take what a call carries of a function that has been introduced; return the function.

        Raises:
            ProtocolError: that makes no sense.
        """
        if len(introduced) != 2 or type(introduced[0]) is not int or not 0 <= introduced[0] < 2 * MOST:
            raise ProtocolError("a call does not say which function it is of")
        number, function = introduced
        self.names[number] = function
        if type(function) is FunctionType:
            module, name = function.__module__, function.__name__
            if getattr(_modules.get(module), name, None) is function:
                self.names[number] = module, name
        return function

    def find(self, number: int, who: str) -> Any:
        """Return the function of a number.

        Raises:
            ProtocolError: it has not been introduced.
            Exception: the name is there no more; what a call by name would raise.
        """
        known = self.names.get(number)
        if known is None:
            raise ProtocolError(
                f"{who!r} calls a function by the number {number}, which it has not introduced"
            )
        if type(known) is not tuple:
            return known
        module, name = known
        try:
            return getattr(_modules[module], name)
        except (KeyError, AttributeError):
            return codec.decode(f"c{module}\n{name}\n.".encode(), (), definitions=None)


def _is_named(function: FunctionType) -> bool:
    return function.__globals__.get(function.__name__) is function


def _goes_by_name(function: FunctionType, same_main: bool) -> bool:
    if function.__name__ != function.__qualname__ or not _is_named(function):
        return False
    module = function.__module__
    if module in by_value.MAIN:
        return same_main and not by_value.has_late()
    return getattr(_modules.get(module), "__dict__", None) is function.__globals__
