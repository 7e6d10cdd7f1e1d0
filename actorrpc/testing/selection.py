"""Which workers and functions the arguments of faults and kill points mean."""

from __future__ import annotations

import math
import numbers
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from actorrpc.core.identity import WorkerInfo
from actorrpc.errors import ConfigError, WrongTypeError
from actorrpc.testing.message_types import names_of

if TYPE_CHECKING:
    from actorrpc.testing.message_types import Message

__all__ = ["functions_named", "is_meant", "number", "workers_named"]


def number(name: str, value: Any, most: float = math.inf) -> float:
    """Return a number from 0 to ``most`` as a float.

    Raises:
        ConfigError: it is none, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise WrongTypeError(f"{name} must be a number, not {value!r}")
    found = float(value)
    if math.isnan(found) or math.isinf(found) or not 0.0 <= found <= most:
        limit = "" if math.isinf(most) else f" and at most {most:g}"
        raise ConfigError(f"{name} must be at least 0{limit}, not {value!r}")
    return found


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple, set, frozenset)) else [given]


def workers_named(given: Any) -> list[str]:
    """Return the names, patterns and ranks by which workers were named.

    Raises:
        WrongTypeError: something else was given.
    """
    found = []
    for each in _several(given):
        name = each.name if isinstance(each, WorkerInfo) else each
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise WrongTypeError(f"a worker is named by a str, an int rank or a WorkerInfo, not by {each!r}")
        found.append(str(name))
    return found


def is_meant(message: Message, workers: list[str]) -> bool:
    """Say whether a message's peer is among the workers that :func:`workers_named` returned."""
    peer = message.peer
    return any(worker == str(peer.rank) or fnmatchcase(peer.name, worker) for worker in workers)


def functions_named(given: Any) -> list[str]:
    """Return the names and patterns by which functions were named.

    Raises:
        WrongTypeError: something else was given.
    """
    found = []
    for each in _several(given):
        names = names_of(each)
        if not names:
            raise WrongTypeError(f"a function is named by itself or by a str, not by {each!r}")
        # Of an actor's method only the name is known where it is called.
        found += [each] if isinstance(each, str) else [names[-1], f":{names[0]}"]
    return found
