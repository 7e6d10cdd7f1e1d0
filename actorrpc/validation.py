"""Checks of the values that users give for options: which values each kind of option accepts, and the errors for others.

A check takes the option's name and the value, and returns the value in the form in which it is stored. A dataclass of options
declares with :func:`option` how each of its fields is checked; other functions call the checks themselves. The errors
name the option, the value, and the valid values.

Most checks take ``none`` (None is accepted, too), and ``right``, the text of the error that says which values are valid.
"""

from __future__ import annotations

import functools
import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, Final, TypeAlias

from actorrpc._exceptions import say
from actorrpc.errors import ConfigError, WrongTypeError

__all__ = [
    "MOST",
    "Check",
    "amounts",
    "check_fields",
    "checks_of",
    "choice",
    "flag",
    "integer",
    "is_host",
    "mapping",
    "number",
    "option",
    "read",
    "text",
    "variables",
    "wait_limit",
    "words",
    "wrong",
]

Check: TypeAlias = Callable[[str, Any], Any]

MOST: Final = sys.float_info.max
"""The largest finite number. A wait with a larger time-out has no limit."""


def option(default: Any, check: Check, **more: Any) -> Any:
    """Declare a field of a dataclass of options: its default, its check, and further metadata."""
    given = {"default_factory": dict} if default is dict else {"default": default}
    return field(**given, metadata={"check": check, **more})


def checks_of(cls: type[Any]) -> dict[str, Check]:
    """Return the checks of the fields that :func:`option` declares, by name."""
    return {each.name: each.metadata["check"] for each in fields(cls) if each.metadata}


def check_fields(options: Any) -> None:
    """Check the declared fields of a frozen dataclass, and store the results. Its ``__post_init__`` calls this function."""
    for name, check in checks_of(type(options)).items():
        object.__setattr__(options, name, check(name, getattr(options, name)))


def read(declared: str, said: str) -> Any:
    """Parse an environment variable for a field of the declared type; list items are separated by commas.

    Raises:
        ValueError: the text is not such a value.
    """
    return _READ.get(declared.partition(" ")[0], _read_list)(said)


def _read_flag(said: str) -> bool:
    for words, meant in ((("1", "true", "yes", "on"), True), (("0", "false", "no", "off"), False)):
        if said.lower() in words:
            return meant
    raise ValueError("it must be on or off, 1 or 0, yes or no, true or false")


def _read_list(said: str) -> list[str]:
    return said.split(",")


_READ: Final[dict[str, Callable[[str], Any]]] = {"bool": _read_flag, "int": int, "float": float, "str": str}


def wrong(name: str, value: object, right: str, error: type[ConfigError] = ConfigError) -> ConfigError:
    """Return the error for a value that cannot be used; ``right`` says which values are valid."""
    return error(f"{name} must be {right}, not {say(value, repr)}")


def flag(name: str, value: Any, *, none: bool = False) -> Any:
    """Check a bool; numbers and strings are refused."""
    if isinstance(value, bool) or (none and value is None):
        return value
    raise wrong(name, value, f"True or False, of type bool{', or None' * none}", WrongTypeError)


def text(
    name: str,
    value: Any,
    *,
    none: bool = False,
    empty: bool = True,
    right: str = "",
    error: type[ConfigError] = ConfigError,
) -> Any:
    """Check a str, and return it as a plain str; ``error`` is raised for an empty str if not ``empty``."""
    if isinstance(value, str) and (value or empty):
        return str.__str__(value)
    if none and value is None:
        return None
    right = right or f"a {'' if empty else 'non-empty '}str{' or None' * none}"
    raise wrong(name, value, right, error if isinstance(value, str) else WrongTypeError)


def is_host(text: str) -> bool:
    """Say whether a text can be the name or the address of a host; for other texts, functions of sockets raise UnicodeError."""
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False


def choice(name: str, value: Any, *, of: Sequence[str], none: bool = False) -> Any:
    """Check that the value is one of several words."""
    right = f"one of {', '.join(map(repr, of))}{', or None' * none}"
    word = text(name, value, none=none, right=right)
    if word in (*of, None):
        return word
    raise wrong(name, value, right)


def integer(
    name: str,
    value: Any,
    *,
    least: int | None = None,
    most: int | None = None,
    none: bool = False,
    right: str = "",
    error: type[ConfigError] = ConfigError,
) -> Any:
    """Check a whole number: True and False are refused, although Python treats them as numbers.

    Args:
        error: the class of the error if the number is out of bounds.
    """
    if type(value) is not int:
        if none and value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise wrong(name, value, right or _right("an int", least, most, none=none), WrongTypeError)
        value = int(value)
    if (least is None or value >= least) and (most is None or value <= most):
        return value
    raise wrong(name, value, right or _right("an int", least, most, none=none), error)


def number(
    name: str,
    value: Any,
    *,
    unit: str = "",
    least: float = 0.0,
    most: float = MOST,
    above: bool = False,
    none: bool = False,
    right: str = "",
    error: type[ConfigError] = ConfigError,
    kind: Any = numbers.Real,
) -> Any:
    """Check a number, finite unless ``most`` is infinite; a whole number stays an int.

    Args:
        above: whether the number must be more than ``least``.
        error: the class of the error if the number is out of bounds.
        kind: the types that are accepted; truth values never are.
    """
    if type(value) is not float and type(value) is not int:
        if none and value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, kind):
            what = right or _right(f"a number{unit and f' of {unit}'}", least, most, above=above, none=none)
            raise wrong(name, value, what, WrongTypeError)
        found = _plain(value)
    else:
        found = value
    if least <= found <= most and not (above and found == least):
        return found
    what = right or _right(f"a number{unit and f' of {unit}'}", least, most, above=above, none=none)
    raise wrong(name, value, what, error)


def _plain(value: Any) -> int | float:
    """Return a whole number as an int, another number as a float, which is infinite if the number is too large for a float."""
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def wait_limit(value: Any, name: str = "timeout", *, least: float = 0.0) -> float:
    """Check how many seconds a wait may take; None, and a number above :data:`MOST`, become infinite."""
    found = number(name, value, unit="seconds", least=least, most=math.inf, none=True)
    if found is None or found > MOST:
        return math.inf
    return float(max(found, -MOST))


def _right(
    what: str, least: float | None, most: float | None, *, above: bool = False, none: bool = False
) -> str:
    """Return the text that says which numbers can be used."""
    bounds = [] if least is None else [f"{'above' if above else 'of at least'} {least:.12g}"]
    if most is not None and most < MOST:
        bounds.append(f"of at most {most:.12g}")
    return f"{what} {' and '.join(bounds)}".rstrip() + ", finite" * (most == MOST) + ", or None" * none


def mapping(name: str, value: Any, each: Check, *, right: str, none: bool = False) -> Any:
    """Check a dict with names as keys; ``each`` checks the values."""
    if none and value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        raise wrong(name, value, right, WrongTypeError)
    return {key: each(f"{name}[{key!r}]", item) for key, item in value.items()}


def words(name: str, value: Any, *, none: bool = False) -> Any:
    """Check a dict from names to words."""
    return mapping(name, value, text, right="a dict of words by name, like {'zone': 'a'}", none=none)


def amounts(name: str, value: Any, *, none: bool = False, error: type[ConfigError] = ConfigError) -> Any:
    """Check a dict from names to amounts of resources. CPU and GPU are refused, because they have other options."""
    right = "a dict of numbers of at least 0 by name, like {'disk': 2}"
    found = mapping(name, value, functools.partial(number, error=error), right=right, none=none)
    for key in ("CPU", "GPU"):
        if found and key in found:
            raise ConfigError(f"{name}: give {key} with num_{key.lower()}s")
    return found


def variables(name: str, value: Any) -> dict[str, str]:
    """Check a dict of environment variables; numbers become text."""
    right = 'a dict of environment variables, like {"OMP_NUM_THREADS": "1"}'
    found: dict[str, str] = mapping(name, value, _variable, right=right)
    for key in found:
        if "=" in key or "\0" in key:
            raise wrong(name, value, right)
    return found


def _variable(name: str, value: Any) -> str:
    # Users often give numbers; other types are mistakes.
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise wrong(name, value, "a str or a number", WrongTypeError)
    try:
        found = str(value)
    except ValueError:  # Python refuses to convert an int with so many digits
        raise wrong(name, value, "a number with fewer digits") from None
    if "\0" in found:
        raise wrong(name, value, "without zero bytes")
    return found
