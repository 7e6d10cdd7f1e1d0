"""What goes by value though it could be imported: the main module, those that are registered so, what is of them.

``cloudpickle.register_pickle_by_value(module)`` says that others do not have a module, nor what lies in it. Most
messages have nothing of such modules, and the fast pickler writes them: it shows each object here before it would
write a name, and stops at the first that has to go by value. So a message is read once, however long its bytes and
texts are, and the decision is cloudpickle's own: it is about the module in which an object is found.

Runs on whichever thread encodes, while others register modules: what is registered when an object is looked at
counts. Takes no lock, does no I/O.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeVar

from cloudpickle import cloudpickle as _cloudpickle

__all__ = ["GoesByValueError", "find_main", "goes_by_value", "is_by_value", "modules", "names_main", "stop"]

# cloudpickle's own, of names. What adds to it takes out what it has added.
modules: Final[set[str]] = _cloudpickle._PICKLE_BY_VALUE_MODULES
find_main: Final = re.compile(b"__(?:mp_)?main__").search
_LONG: Final = 64 << 10  # from here on the C pickler hands bytes and texts over as they are
_STARTS: Final = (0x80, 0x95)  # protocol, frame
_MAX_NAMES: Final = 4096
_NAMED: Final = (type, ModuleType)

_lineages: dict[str, tuple[str, ...]] = {}  # "a.b.c" -> "a", "a.b", "a.b.c"


class GoesByValueError(pickle.PicklingError):
    """Raised out of the fast pickler: it has come upon something that goes by value."""


def is_by_value(name: str) -> bool:
    """Say whether a module of this name goes by value: it is registered, or a package that it is in. Thread-safe."""
    lineage = _lineages.get(name)
    if lineage is None:
        parts = name.split(".")
        lineage = tuple([".".join(parts[: at + 1]) for at in range(len(parts))])
        if len(_lineages) >= _MAX_NAMES:
            _lineages.clear()
        _lineages[name] = lineage
    return not modules.isdisjoint(lineage)


def goes_by_value(obj: Any) -> bool:
    """Say whether a function, a class or a type variable is of such a module, or perhaps of none that is known.

    What counts is the name that the module has now, not the one under which the object looks for it. Where an object
    is not found under its name at all the fast pickler finds out by itself.
    """
    module = sys.modules.get(obj.__module__)
    return module is None or is_by_value(module.__name__)


def names_main(chunks: Iterable[Any]) -> bool:
    """Say whether a pickle, as the C pickler wrote it in pieces, may name the main module.

    Long bytes and texts are pieces of their own, and nothing to look through: other pieces of their size start with a
    frame, the first with the protocol before it.
    """
    return any(find_main(chunk) is not None for chunk in chunks if len(chunk) < _LONG or chunk[0] in _STARTS)


def stop(pickler: Any, obj: Any) -> Any:
    """Be the ``reducer_override`` of a pickler that writes by reference only.

    When nothing is registered any more it has the pickler ask no more, by its ``unwatch``.

    Raises:
        GoesByValueError: the object goes by value.
    """
    if not modules:
        pickler.unwatch()
        return NotImplemented
    kind = type(obj)
    # A method would go as its object and a name, under which its class need not have this very function.
    if kind is FunctionType or issubclass(kind, _NAMED) or kind is TypeVar:
        if goes_by_value(obj):
            raise GoesByValueError
    elif kind is MethodType and goes_by_value(obj.__func__):
        raise GoesByValueError
    return NotImplemented
