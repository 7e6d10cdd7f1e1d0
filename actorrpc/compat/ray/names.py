"""Modules with names of Ray, and errors for names of Ray that :mod:`actorrpc.compat.ray` does not have."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Final, NoReturn

from actorrpc.compat import imports

__all__ = ["HINTS", "missing", "module", "no_module"]

#: beginning of a name of Ray -> hint in the error: what to use instead
HINTS: Final = {
    "ray.air": "Ray's libraries are not part of actorrpc",
    "ray.autoscaler": "actorrpc.scale() starts and drains workers",
    "ray.cluster_utils": "clusters of several nodes in one machine are not simulated; actorrpc.testing has InProcessCluster",
    "ray.dag": "there are no compiled graphs: pass ObjectRefs to other calls",
    "ray.data": "Ray's libraries are not part of actorrpc; torch's DataLoader reads in parallel",
    "ray.internal": "it is private",
    "ray.java_actor_class": "there are Python actors only",
    "ray.java_function": "there are Python functions only",
    "ray.job_submission": "there are no jobs: run the script itself",
    "ray.rllib": "Ray's libraries are not part of actorrpc",
    "ray.serve": "Ray's libraries are not part of actorrpc",
    "ray.train": "Ray's libraries are not part of actorrpc; use actorrpc.spawn() and collective groups",
    "ray.tune": "Ray's libraries are not part of actorrpc; an ActorPool runs trials",
    "ray.util.collective": "actorrpc.collective_group() makes groups of torch.distributed",
    "ray.util.multiprocessing": "use an ActorPool or tasks instead of its Pool",
    "ray.workflow": "Ray's libraries are not part of actorrpc",
}


def module(name: str, meaning: str, *contents: Any) -> ModuleType:
    """Make a module of functions and classes that other modules define, importable by its name in this package.

    Args:
        name: the module's name on Ray.
    """
    named = {each.__name__: each for each in contents}
    return imports.module(f"actorrpc.compat.{name}", f"``{name}``: {meaning}", named)


def _hint(name: str) -> str:
    found = [hint for beginning, hint in HINTS.items() if f"{name}.".startswith(f"{beginning}.")]
    return f" ({found[0]})" if found else ""


def _told(module: str, name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3)
    meant = f"; did you mean {' or '.join(close)}?" if close else "."
    full = f"{module}.{name}"
    return f"actorrpc.compat.ray has no {full}{_hint(full)}{meant} {module} has here: {', '.join(names)}"


def missing(module: str, known: Iterable[str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module. It raises an AttributeError that says what to use instead of a missing name.

    Args:
        module: the module's name on Ray.
        known: the names that the module has here.
    """
    names = list(known)

    def getattribute(name: str) -> NoReturn:
        if name.startswith("__") and name.endswith(
            "__"
        ):  # Python and its tools look these names up on any module
            raise AttributeError(name)
        raise AttributeError(_told(module, name, names))

    return getattribute


def no_module(name: str, known: Iterable[str]) -> ModuleNotFoundError:
    """Return the error of an import of a module of Ray that :mod:`actorrpc.compat.ray` does not have."""
    return ModuleNotFoundError(
        f"actorrpc.compat.ray has no module {name}{_hint(name)}; there are: {', '.join(sorted(known))}",
        name=name,
    )
