"""Numbers for functions that one worker calls repeatedly on another.

The name of a function takes a tenth of the time of a small call: pickle checks at the caller that the name means the function,
and imports it at the callee. Therefore the first call of a function carries a number in addition to the name (the call
*introduces* the function). Once such a call was answered, the callee knows the number, and later calls carry only the number. The
order in which calls arrive does not matter.

A number stands for a name. The callee looks the name up in its module at each call, as for a call by name, and the caller only
uses the number while the name means the function in its own process. Only functions that are sent by name get numbers. Workers
that take data only use no numbers.
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
"""The most functions of another worker to which one worker gives numbers; all further functions are sent by name."""

_modules: Final = sys.modules


class NumberedFunctions:
    """The numbers between this worker and one other, in both directions. Thread-safe: each step is one operation of a dict.

    Attributes:
        numbers: function that this worker calls -> its number, if the other worker knows the number.
        names: number that the other worker uses -> module and name of the function.
    """

    __slots__ = ("_count", "_introduced", "names", "numbers")

    def __init__(self) -> None:
        self.numbers: dict[FunctionType, int] = {}
        self.names: dict[int, tuple[str, str]] = {}
        self._introduced: dict[FunctionType, int] = {}
        self._count = itertools.count()

    def introduce(self, function: FunctionType, same_main: bool | None) -> Any:
        """Return the object to send for a function whose number the callee does not know: number and name, or the function.

        Args:
            same_main: whether the other worker runs the same program; None if it takes data only.
        """
        if same_main is None or not _has_import_path(function, same_main):
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
        """Return the object to send for a function in a message that cannot introduce it: the known number, or the function."""
        if type(function) is not FunctionType or by_value.modules or not _is_named(function):
            return function
        return self.numbers.get(function, function)

    def learn(self, introduced: tuple[Any, ...]) -> Any:
        """Store the number and name of a function that a call introduces; return the function.

        Raises:
            ProtocolError: ``introduced`` is not valid.
            Exception: this process has no function of this name.
        """
        if tuple(map(type, introduced)) != (int, str, str) or not 0 <= introduced[0] < MOST:
            raise ProtocolError("a call does not say which function it calls")
        number, module, name = introduced
        self.names[number] = by_value.MAIN[0] if module in by_value.MAIN else module, name
        return self.find(number, "")

    def find(self, number: int, who: str) -> Any:
        """Return the function with this number.

        Raises:
            ProtocolError: the peer ``who`` has not introduced this number.
            Exception: this process has no function of this name; the exception that a call by name would raise.
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


def _has_import_path(function: FunctionType, same_main: bool) -> bool:
    if function.__name__ != function.__qualname__ or not _is_named(function):
        return False
    return function.__module__ not in by_value.MAIN or (same_main and not by_value.has_late())
