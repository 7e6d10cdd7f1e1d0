"""Holders: what a copy of an object keeps as it is, because it cannot be copied.

A reference (an RRef, an ObjectRef, the handle of an actor) in an object that is encoded for a :class:`LocalReferences`
does not become bytes: its reducer gives it to the holder, and every decoding takes the same reference from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from actorrpc.errors import ProtocolError
from actorrpc.serialization import codec
from actorrpc.serialization.by_value import DefinedClass

__all__ = ["LocalReferences", "take"]


class LocalReferences:
    """The context of an encoding that stays in this process: see :func:`codec.current_encoding`.

    Reducers of references ask ``isinstance(codec.current_encoding(), LocalReferences)`` and return what :meth:`hold` gives.
    Used by one thread while encoding; after that only read.

    Attributes:
        objects: what is held, in the order in which it was met.
    """

    __slots__ = ("objects",)

    def __init__(self, objects: Sequence[Any] = ()) -> None:
        self.objects: list[Any] = list(objects)

    def hold(self, obj: Any) -> tuple[Callable[[int], Any], tuple[int]]:
        """Keep an object, and return how to pickle its place."""
        self.objects.append(obj)
        return take, (len(self.objects) - 1,)


def take(index: int) -> Any:
    """Return what is held at a place (named in pickles).

    Raises:
        ProtocolError: nothing is being decoded that holds anything, or it does not hold as much.
    """
    holder = codec.current_decoding()
    if not isinstance(holder, LocalReferences) or not 0 <= index < len(holder.objects):
        raise ProtocolError("a reference is missing from the copy of an object")
    found = holder.objects[index]
    return found.cls if type(found) is DefinedClass else found
