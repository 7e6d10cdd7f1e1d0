"""Caches of values computed from classes: an entry is valid until an attribute of the class or a base is assigned or deleted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from operator import is_
from typing import Any, Final, Generic, TypeVar

__all__ = ["ClassCache", "empty_before_collection"]

T = TypeVar("T")


class ClassCache(Generic[T]):
    """Values that were computed from classes, each with the attributes that its class had before the computation.

    An entry refers to its class and to the attributes. Without these references, a new object could have the address of a freed
    attribute, and the comparison by identity would miss the change. A class is part of reference cycles, so only Python's
    collector frees classes. Each full collection empties all caches before it starts, so the caches keep no class alive.

    Thread-safe without a lock: each operation on the table is one step under the interpreter's lock.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[tuple[type, ...], list[Any], T]] = {}  # by id(class)
        _tables.append(self._entries)

    def get(self, cls: type) -> T | None:
        """Return the value of a class; None if the cache has no entry for it, or if the class has changed."""
        entry = self._entries.get(id(cls))
        if entry is None:
            return None
        bases, before, value = entry
        now = _attributes(cls, bases)
        return value if len(now) == len(before) and all(map(is_, now, before)) else None

    def make(self, cls: type, bases: tuple[type, ...], make: Callable[[type], T]) -> T:
        """Return ``make(cls)``, and keep it until the MRO, or an attribute of one of ``bases`` (classes in the MRO), changes."""
        before = _attributes(cls, bases)
        value = make(cls)
        self._entries[id(cls)] = bases, before, value
        return value

    def clear(self) -> None:
        """Forget all values."""
        self._entries.clear()


def _attributes(cls: type, bases: tuple[type, ...]) -> list[Any]:
    """Return the classes in the MRO of ``cls``, and the names and values of the attributes of ``bases``.

    Callers compare the results by identity, which runs no user code.
    """
    found: list[Any] = [*cls.__mro__]
    for each in bases:
        own = vars(each).copy()
        found += own
        found += own.values()
    return found


_tables: Final[list[dict[int, Any]]] = []


def empty_before_collection(phase: str, info: dict[str, int]) -> None:
    """Empty all caches before a full collection. Python's collector calls this function."""
    if phase == "start" and info["generation"] == 2:
        for table in _tables:
            table.clear()


gc.callbacks.append(empty_before_collection)
