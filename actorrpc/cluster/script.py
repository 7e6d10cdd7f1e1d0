"""The program's own code, as workers get it that cannot import it.

Functions and classes travel by name where both sides can import them, else by value. What stands beside the script (its
directory is on the path of this process alone) can only be imported where that directory is: with a driver that others
can join these modules travel by value, if they are imported when it starts, or when an actor is made. Thread-safe.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final

import cloudpickle

__all__ = ["by_value", "directory", "fingerprint", "has_code"]

_OURS: Final = "actorrpc"


def directory() -> str | None:
    """Return the directory that the program's script is in; None for an interactive session."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    return os.path.dirname(os.path.realpath(path)) if isinstance(path, str) else None


def fingerprint() -> tuple[str, int, int] | None:
    """Return what tells the script's file from others: its path, size and time of change."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not isinstance(path, str):
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return os.path.realpath(path), found.st_size, found.st_mtime_ns


def has_code(mark: tuple[str, int, int] | list[object] | None) -> bool:
    """Say whether the script of which this is the fingerprint is here, too."""
    if mark is None:
        return True
    path, size, when = mark
    try:
        found = os.stat(str(path))
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (size, when)


_seen: set[str] = set()  # names of modules that were looked at; single, atomic steps


def by_value() -> None:
    """Have the modules beside the script travel by value, those that are imported by now. Costs little when repeated."""
    if len(_seen) == len(sys.modules):
        return
    place = directory()
    for name, module in list(sys.modules.items()):
        if name in _seen:
            continue
        _seen.add(name)
        path = getattr(module, "__file__", None)
        top = name.partition(".")[0]
        if place is None or not isinstance(path, str) or top in ("__main__", _OURS):
            continue
        if (os.path.dirname(os.path.realpath(path)) + os.sep).startswith(place + os.sep) and _is_the_programs(
            path
        ):
            with contextlib.suppress(ValueError):
                cloudpickle.register_pickle_by_value(module)


def _is_the_programs(path: str) -> bool:
    """Whether a file is no part of an installation that happens to lie below the script's directory."""
    real = os.path.realpath(path)
    parts = real.split(os.sep)
    if real.startswith(os.path.dirname(os.path.realpath(os.__file__)) + os.sep):
        return False
    return "site-packages" not in parts and "dist-packages" not in parts and "lib-dynload" not in parts
