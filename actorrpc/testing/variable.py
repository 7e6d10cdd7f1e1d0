"""``ACTORRPC_FAULT``: faults of a worker that is started, written as text."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from actorrpc.errors import ConfigError
from actorrpc.testing.faults import Fault
from actorrpc.testing.kill_points import KillPoint

__all__ = ["VARIABLE", "faults_of", "from_environment"]

VARIABLE: Final = "ACTORRPC_FAULT"


def _flag(text: str) -> bool:
    if text in ("1", "0"):
        return text == "1"
    raise ValueError(text)


def _list(text: str) -> list[str]:
    return text.split(",")


_FIELDS: Final[Mapping[str, Callable[[str], Any]]] = {
    "seconds": float,
    "times": int,
    "total": int,
    "to": _list,
    "function": _list,
    "probability": float,
    "seed": int,
    "at_once": _flag,
    "on": str,
}


_KILL_FIELDS: Final[Mapping[str, Callable[[str], Any]]] = {
    "action": str,
    "nth": int,
    "code": int,
    "seconds": float,
    "to": _list,
    "function": _list,
    "on": str,
}


def faults_of(text: str) -> list[Fault | KillPoint]:
    """Return the faults and kill points that a text describes, not started.

    ``drop call,remote times=2 to=worker1; delay answer seconds=0.5 function=step``: faults with ``;`` between them; of each
    the action, the types and the arguments of :func:`~actorrpc.testing.drop` or :func:`~actorrpc.testing.delay`; lists with
    commas. ``kill call.sent nth=3 action=stop on=worker1``: the arguments of :func:`~actorrpc.testing.kill_at`.

    Raises:
        ConfigError: it cannot be read; names the part.
    """
    return [_fault(part.split(), part.strip()) for part in text.split(";") if part.strip()]


def _fault(words: list[str], part: str) -> Fault | KillPoint:
    try:
        action, types, *fields = words
    except ValueError:
        raise ConfigError(
            f"{part!r} is no fault: say drop or delay, then types of messages, or kill, then a point"
        ) from None
    if action not in ("drop", "delay", "kill"):
        raise ConfigError(f"{part!r} is no fault: it begins with drop, delay or kill, not with {action!r}")
    known = _KILL_FIELDS if action == "kill" else _FIELDS
    given: dict[str, Any] = {}
    for field in fields:
        name, sign, value = field.partition("=")
        convert = known.get(name)
        if convert is None or not sign or (name == "at_once" and action == "delay"):
            raise ConfigError(f"{field!r} in {part!r} means nothing; there are: {', '.join(known)}")
        try:
            given[name] = convert(value)
        except ValueError:
            raise ConfigError(f"{field!r} in {part!r} has a value that cannot be used") from None
    if action == "kill":
        return KillPoint(types, **given)
    if ("seconds" in given) != (action == "delay"):
        raise ConfigError(f"{part!r} is no fault: a delay has seconds=, and a drop has none")
    return Fault("drop" if action == "drop" else "delay", types.split(","), **given)


def from_environment() -> list[Fault | KillPoint]:
    """Return the faults and kill points that ``ACTORRPC_FAULT`` describes.

    Raises:
        ConfigError: it cannot be read.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        return faults_of(text)
    except ConfigError as error:
        raise ConfigError(f"{VARIABLE}={text!r} cannot be used: {error}") from error
