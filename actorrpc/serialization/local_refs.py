"""References (RRefs, ObjectRefs, handles of actors) in objects that are encoded and decoded in one process, as ``put`` does.

References cannot be copied. When an object is encoded with a :class:`LocalReferences` as the context, the reducer of a reference
stores the reference in the LocalReferences, and each decoding gets the same reference from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from actorrpc.errors import ProtocolError
from actorrpc.serialization import codec
from actorrpc.serialization.by_value import DefinedClass

__all__ = ["LocalReferences", "stored"]


class LocalReferences:
    """The context of an encoding whose references are kept outside of the pickle: see :func:`codec.current_encoding`.

    Reducers of references check ``isinstance(codec.current_encoding(), LocalReferences)`` and return the result of :meth:`hold`.
    One thread changes the LocalReferences while it encodes; after that, threads only read it.

    Attributes:
        objects: the references, in the order in which they were encoded.
    """

    __slots__ = ("objects",)

    def __init__(self, objects: Sequence[Any] = ()) -> None:
        self.objects: list[Any] = list(objects)

    def hold(self, obj: Any) -> tuple[Callable[[int], Any], tuple[int]]:
        """Store a reference, and return its reduction: a call of :func:`stored` with its index."""
        self.objects.append(obj)
        return stored, (len(self.objects) - 1,)


def stored(index: int) -> Any:
    """Return the reference with this index (wire format).

    Raises:
        ProtocolError: the object that is being decoded has no such reference.
    """
    holder = codec.current_decoding()
    if not isinstance(holder, LocalReferences) or not 0 <= index < len(holder.objects):
        raise ProtocolError("a reference is missing from the copy of an object")
    found = holder.objects[index]
    return found.cls if type(found) is DefinedClass else found
