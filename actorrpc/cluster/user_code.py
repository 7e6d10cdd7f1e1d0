"""Sends the program's own modules by value to workers that cannot import them.

Functions and classes are sent by name if both sides can import them, otherwise by value. Modules in the directory of the script
(which is only on the path of this process) cannot be imported on other hosts. Therefore a driver that other processes can join
sends these modules by value: the modules that are imported when it starts, and all later ones until it ends. Thread-safe.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

from actorrpc.serialization.by_value import modules

__all__ = ["directory", "fingerprint", "unwatch", "use", "watch"]

_OURS: Final = "actorrpc"


def directory() -> str | None:
    """Return the directory of the program's script; None for an interactive session."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    return os.path.dirname(os.path.realpath(path)) if isinstance(path, str) else None


def _mark(path: str) -> tuple[str, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return path, found.st_size, found.st_mtime_ns


def fingerprint() -> tuple[str, int, int] | None:
    """Return a fingerprint of the script's file: its path, size and time of change."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return _mark(os.path.realpath(path)) if isinstance(path, str) else None


def use(mark: Sequence[Any] | None, directory: str | None) -> None:
    """Add the driver's script directory to ``sys.path``, unless this host's script differs from the fingerprint ``mark``."""
    if directory is None or directory in sys.path:
        return
    if mark is None or _mark(str(mark[0])) == tuple(mark):
        sys.path.append(directory)


class _OurName(str):
    """The name of a module that this package has registered with cloudpickle, to be sent by value.

    Names that the program has registered are of type ``str``.
    """

    __slots__ = ()


def _register(name: str) -> None:
    """Register a module, imported or not, to be sent by value. ``cloudpickle``'s own function only accepts imported modules."""
    # If the program has registered the name, the set keeps the program's ``str``, which unwatch() does not remove.
    modules.add(_OurName(name))


class _ModuleWatch(MetaPathFinder):
    """An import hook that finds no module. It registers each module in the script's directory before its import.

    Cloudpickle then sends the functions and classes of the module by value.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = directory()
        if place is None or not any(os.path.realpath(each).startswith(place) for each in path or [place]):
            return None
        if path is None and not any(
            os.path.exists(os.path.join(place, fullname + end)) for end in ("", ".py")
        ):
            return None  # nearly all imports return here, after the two short disk accesses of this check
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin and _is_the_programs(fullname, spec.origin, place):
            _register(fullname)
            if self not in sys.meta_path:  # another thread has called unwatch() meanwhile
                _forget()
        return None


_watch: Final = _ModuleWatch()


def watch() -> None:
    """Send the modules in the script's directory by value: imported modules, and modules that are imported later. Idempotent."""
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)
    place = directory()
    for name, module in sys.modules.copy().items():
        path = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if place is not None and isinstance(path, str) and _is_the_programs(name, path, place):
            _register(str(module.__name__))  # cloudpickle looks up this name


def unwatch() -> None:
    """Register no further imports, and send the registered modules by name again. Idempotent.

    Modules that the program has registered itself stay registered, except modules that this package had registered before the
    program did.
    """
    with contextlib.suppress(ValueError):
        sys.meta_path.remove(_watch)
    _forget()


def _forget() -> None:
    for name in modules.copy():
        if isinstance(name, _OurName):
            modules.discard(name)


def _is_the_programs(name: str, path: str, place: str) -> bool:
    """Whether a module is in the directory of the script, and not in an installation below it, nor in this package."""
    if name.partition(".")[0] in ("__main__", _OURS):
        return False
    real = os.path.realpath(path)
    if not real.startswith(place + os.sep):
        return False
    if real.startswith(os.path.dirname(os.path.realpath(os.__file__)) + os.sep):
        return False
    return not {"site-packages", "dist-packages", "lib-dynload"} & set(real.split(os.sep))
