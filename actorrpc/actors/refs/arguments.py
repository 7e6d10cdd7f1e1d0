"""ObjectRefs among the arguments of a call. Top-level arguments that are ObjectRefs are replaced before the method runs.

The caller sends the small results that it has, and waits for the results of its own calls (see ``client/pending_call.py``). The
worker of the actor fetches all other results from the workers that have them. ObjectRefs inside of containers are not replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.snapshot import Snapshot, StoredResult
from actorrpc.actors.refs.wait import cover, gather
from actorrpc.futures import Future

__all__ = ["awaited", "has_refs", "pack_arguments", "resolve"]


def has_refs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether one of the arguments is an ObjectRef."""
    return ObjectRef in map(type, args) or ObjectRef in map(type, kwargs.values())


def pack_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the arguments, with values in place of the ObjectRefs whose values this process has outside of shared memory.

    Returns:
        The arguments, and whether they still contain ObjectRefs, for which the actor's worker calls :func:`resolve`.

    Raises:
        BaseException: the error of one of the ObjectRefs. The call is not sent, and fails with this error. As with ``get``,
            the failures of other ObjectRefs are not logged.
    """
    left = False

    def packed(each: Any) -> Any:
        nonlocal left
        if type(each) is not ObjectRef:
            return each
        future = each._future
        if future is not None and future.completed:
            value = future.wait()
            template = getattr(future, "template", None)
            if type(value) is Snapshot:
                if value.stored is None:
                    return value.open()
            elif type(value) is not StoredResult:
                # The value came with a reply, and is now sent on: large results of the next calls should stay on their worker.
                if template is not None:
                    template.handed_on()
                return each._value(value)
        left = True
        return each

    try:
        return (
            tuple([packed(each) for each in args]),
            {name: packed(each) for name, each in kwargs.items()},
            left,
        )
    except BaseException:
        cover([*args, *kwargs.values()])
        raise


def awaited(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Future[Any]]:
    """Return the pending futures of ObjectRefs among the arguments; an ObjectRef of another worker may have no future yet."""
    futures = [each._future for each in (*args, *kwargs.values()) if type(each) is ObjectRef]
    return [each for each in futures if each is not None and not each.done()]


def resolve(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Future[tuple[tuple[Any, ...], dict[str, Any]]] | None:
    """Start to fetch the results of all ObjectRefs among the arguments; no thread waits.

    Returns:
        A Future of the arguments with values in place of ObjectRefs, which fails as soon as one ObjectRef fails; None if no
        argument is an ObjectRef.
    """
    if not has_refs(args, kwargs):
        return None

    def complete(fetched: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = iter(fetched)
        return (
            tuple([next(values) if type(each) is ObjectRef else each for each in args]),
            {name: next(values) if type(each) is ObjectRef else each for name, each in kwargs.items()},
        )

    refs = [each for each in (*args, *kwargs.values()) if type(each) is ObjectRef]
    resolved = gather(refs, "the ObjectRefs among the arguments", complete)
    resolved.flush()
    return resolved
