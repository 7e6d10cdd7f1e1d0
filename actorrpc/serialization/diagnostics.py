"""Find the part of a message that cannot be sent, and the reason, for error messages.

Runs in the thread that encodes the message, and calls the reducers of users' classes, as pickle does.
"""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch

from actorrpc._exceptions import is_of_handler
from actorrpc.errors import SerializationError
from actorrpc.serialization.by_value import captured

__all__ = ["describe", "path_to"]

_newobj: Final = object().__reduce_ex__(5)[0]  # copyreg's function that makes objects by __new__
_PACKAGE: Final = __name__.partition(".")[0] + "."
_MAX_PROBES: Final = 500
_MAX_DEPTH: Final = 20
_REMEDY: Final = (
    ". Functions and classes that are local or of the main script are sent with all objects to which they refer; functions "
    "and classes of an imported module are sent by name. Move the code that needs this object into a module that both "
    "processes import, or make the object where it is used"
)
_LEAVES: Final = frozenset(
    {type(None), bool, int, str, bytes, complex, type(Ellipsis), range, float, bytearray}
)


def path_to(obj: object, passes: Callable[[Any], bool]) -> tuple[str, str]:
    """Return the path to the smallest part of ``obj`` for which ``passes`` returns False, and a remedy.

    The search is bounded, so the path may end before that part. The remedy is empty unless a function or a class refers
    to the part. Parts are searched in pickle's order.
    """
    steps: list[tuple[str, str]] = []
    seen = {id(obj)}
    kept = []  # keeps temporary parts alive, so that no other object gets the id of a part
    probes = 0
    here: Any = obj
    remedy = ""
    parts = _parts_of_call(obj)
    while len(steps) < _MAX_DEPTH:
        for kind, name, part in parts:
            if type(part) in _LEAVES or id(part) in seen:
                continue
            probes += 1
            if probes > _MAX_PROBES:
                return _written(steps), remedy
            seen.add(id(part))
            kept.append(part)
            if not passes(part):
                steps.append((kind, name))
                if isinstance(here, (types.FunctionType, type)):
                    remedy = _REMEDY
                here = part
                break
        else:
            return _written(steps), remedy
        parts = _parts(here)
    return _written(steps), remedy


def _written(steps: Iterable[tuple[str, str]]) -> str:
    words: list[list[str]] = []
    for kind, name in steps:
        if not kind:
            continue
        if kind == "attribute" and words and words[-1][0] == kind:
            words[-1][1] += f".{name}"
        else:
            words.append([kind, name])
    return " -> ".join(
        (kind + name).strip() if kind.endswith(" ") else f"{kind} '{name}'" for kind, name in words
    )


# Kind, name and part. If the kind ends with a space, the name is shown without quotes; if it is empty, the step is not shown.
_Parts = Iterator[tuple[str, str, Any]]


def _parts_of_call(obj: Any) -> _Parts:
    """Yield the parts of ``(function, args, kwargs)``, or ``(args, kwargs)``, with the names that the caller uses for them."""
    if type(obj) is tuple and len(obj) in (2, 3) and type(obj[-2]) is tuple and type(obj[-1]) is dict:
        for function in obj[:-2]:
            yield "function", getattr(function, "__qualname__", None) or type(function).__qualname__, function
        for at, value in enumerate(obj[-2]):
            yield "argument ", str(at), value
        for key, value in obj[-1].items():
            yield "argument", str(key), value
    else:
        yield from _parts(obj)


def _parts(obj: Any) -> _Parts:
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield "the key ", repr(key)[:80], key
            yield "key ", repr(key)[:80], value
    elif isinstance(obj, (list, tuple)):
        for at, value in enumerate(obj):
            yield "index ", str(at), value
    elif isinstance(obj, (set, frozenset)):
        for value in obj:
            yield "member ", repr(value)[:80], value
    elif isinstance(obj, types.FunctionType):
        for name, value in captured(obj):
            yield name + " ", "", value
    elif isinstance(obj, types.MethodType):
        yield "method ", obj.__func__.__qualname__, obj.__func__
        yield "its object ", type(obj.__self__).__qualname__, obj.__self__
    if isinstance(obj, (type, torch.Tensor)):  # a tensor's storage is no object of the user's
        for name, value in vars(obj).items():
            yield "attribute", name, value
    elif not isinstance(obj, (types.FunctionType, types.MethodType)):
        yield from _parts_of_state(obj)


def _parts_of_state(obj: Any) -> _Parts:
    try:
        reduced = obj.__reduce_ex__(5)
    except Exception as error:  # the object itself cannot be reduced, so no part of it is to blame
        if is_of_handler(error):
            raise
        return
    if not isinstance(reduced, tuple):
        return
    if reduced[0] is not _newobj:
        # An object of this package that wraps a user's object is no step of the path, because users do not know the wrapper.
        ours = type(obj).__module__.startswith(_PACKAGE)
        for value in reduced[1]:
            yield ("", "", value) if ours else ("part ", f"of {type(obj).__qualname__}", value)
    else:
        for at, value in enumerate(reduced[1]):
            yield (
                ("class ", getattr(value, "__qualname__", ""), value)
                if at == 0
                else ("part ", str(at), value)
            )
    state = reduced[2] if len(reduced) > 2 else None
    for each in state if isinstance(state, tuple) else (state,):
        if isinstance(each, dict):
            for name, value in each.items():
                yield "attribute", str(name), value
        else:
            yield "state ", f"of {type(obj).__qualname__}", each


def describe(error: BaseException) -> str:
    """Say why an object cannot be pickled, without quoting the whole object as pickle does."""
    text = str(error)
    if isinstance(error, SerializationError):
        return text
    if isinstance(error, RecursionError):
        return "nested too deeply to be sent"
    if isinstance(error, (pickle.PicklingError, TypeError, AttributeError)) and "pickle" in text:
        return text
    return f"cannot be sent: {type(error).__name__}: {text}"
