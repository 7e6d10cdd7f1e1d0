"""The possible values of a result's future, and how several readers get values of their own from one future.

The value is an object of a class in :data:`ATOMS`, a Snapshot, a :class:`StoredResult`, or an object that came with the reply.
Readers may share the first three. An object that came with the reply is given to the first reader only: before that, a Snapshot
replaces the object in the future, and all other readers get values that are made from the Snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Final, Protocol

from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.errors import RpcError
from actorrpc.futures import Future
from actorrpc.rpc.rref import RRef

__all__ = ["ATOMS", "ResultPolicy", "StoredResult", "of_promise", "readable", "replace"]

ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis)})
"""Classes of immutable objects, which all readers may share."""


class ResultPolicy(Protocol):
    """Decides whether further large results of a method are sent with the reply, or kept on the worker that made them."""

    def fetched(self) -> None:
        """Record that the caller reads a result of the method, instead of only passing its ObjectRef on."""

    def handed_on(self) -> None:
        """Record that the caller has passed an ObjectRef of a result on to another worker."""


class StoredResult:
    """Stands for a result that stayed on the worker that made it.

    Attributes:
        rref: refers to the result, or to a Snapshot of the result. Never changed.
        policy: is notified when the caller fetches the result or passes it on.
    """

    __slots__ = ("policy", "rref")

    def __init__(self, rref: RRef[Any]) -> None:
        self.rref = rref
        self.policy: ResultPolicy | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredResult, (self.rref,)

    def __repr__(self) -> str:
        return f"StoredResult({self.rref!r})"


_SHARED: Final = ATOMS | {Snapshot, StoredResult}

# Guards the values of completed futures while Snapshots replace them. Re-entrant, because the garbage collector may run
# finalisers that use ObjectRefs.
_lock = threading.RLock()


def replace(value: Any, futures: Iterable[Future[Any]]) -> tuple[Any, bool]:
    """Replace an object that came with a reply by a Snapshot.

    Args:
        futures: the completed futures that may have the object as their value.

    Returns:
        1. The value that the futures have now: the Snapshot; or the object itself, which all readers then share, if it cannot be
        copied or has a gradient history. 2. True if this call has replaced the object, so that only its caller has the object.
    """
    try:
        snapshot = Snapshot.of(value, recorded=False)
    except RpcError:
        snapshot = None
    with _lock:
        having = [each for each in futures if each.value_or_none is value]
        if not having:
            # Another thread has replaced the object by a Snapshot and given it to a reader, which may have changed it while this
            # thread copied it.
            return next(
                (each.value_or_none for each in futures if type(each.value_or_none) is Snapshot), value
            ), False
        if snapshot is None:
            return value, False
        for each in having:
            each.replace_value(snapshot)
    return snapshot, True


def readable(value: Any, futures: Iterable[Future[Any]]) -> Any:
    """Return an object that all readers may share: ``value``, the value of completed futures, or a Snapshot of it."""
    return value if type(value) in _SHARED else replace(value, futures)[0]


def of_promise(found: Any) -> Any:
    """Return the object to send to readers of the RRef whose value is ``found``. The value of a promise is a completed future."""
    # Use type(): isinstance() would read the object's __class__, which may run user code.
    return readable(found.value_or_none, (found,)) if issubclass(type(found), Future) else found
