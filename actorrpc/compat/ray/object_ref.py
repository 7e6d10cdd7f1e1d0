"""``ray.ObjectRef``, the functions ``get``, ``put``, ``wait`` and ``cancel``, and streams.

Ray's ObjectRef holds an actorrpc.ObjectRef, and is sent with it. ``get``, ``await`` and ``ref.future()`` raise Ray's errors.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

from actorrpc import actors
from actorrpc._exceptions import say
from actorrpc.actors.streams.spread import for_each_item
from actorrpc.compat.ray.exceptions import in_rays_words, rays_words
from actorrpc.errors import RpcError, WrongTypeError
from actorrpc.futures import Future

__all__ = [
    "DynamicObjectRefGenerator",
    "ObjectRef",
    "ObjectRefGenerator",
    "cancel",
    "gathered",
    "get",
    "put",
    "unwrap",
    "unwrapped",
    "wait",
    "wrapped",
]

T = TypeVar("T")
_ID_BYTES: Final = 28  # the length of an id in Ray


class ObjectRef(Generic[T]):
    """A reference to the result of a call; ``ray.get(ref)`` or ``await ref`` gives the result. Thread-safe.

    Args:
        ref: the actorrpc.ObjectRef.
    """

    __slots__ = ("__weakref__", "_ours")

    def __init__(self, ref: actors.ObjectRef[T]) -> None:
        if not isinstance(ref, actors.ObjectRef):
            raise TypeError(
                f"ObjectRefs are returned by .remote() and ray.put(); an ObjectRef cannot be made of {say(ref, repr)}"
            )
        self._ours = ref

    def __await__(self) -> Generator[Any, None, T]:
        with rays_words:
            return (yield from self._ours.__await__())

    def future(self) -> concurrent.futures.Future[T]:
        """Return a future of the result. Cancelling the future does not cancel the call."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def done(ours: Any) -> None:
            error = ours.exception()
            if not future.set_running_or_notify_cancel():
                return
            if error is None:
                future.set_result(ours.result())
            else:
                future.set_exception(in_rays_words(error) if isinstance(error, RpcError) else error)

        self._ours.future().add_done_callback(done)
        return future

    def as_future(self) -> Any:
        """Return an asyncio future of the result, for the running event loop."""
        return asyncio.wrap_future(self.future())

    def _on_completed(self, callback: Callable[[Any], Any]) -> None:
        """Call ``callback`` with the result, or with the error of the call."""

        def done(future: concurrent.futures.Future[T]) -> None:
            error = future.exception()
            callback(future.result() if error is None else error)

        self.future().add_done_callback(done)

    def hex(self) -> str:
        """Return the reference's id as text."""
        return self.binary().hex()

    def binary(self) -> bytes:
        """Return the reference's id."""
        return bytes.fromhex(self._ours.hex()).ljust(_ID_BYTES, b"\0")

    def is_nil(self) -> bool:
        """Return False: every reference refers to a result."""
        return False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObjectRef):
            return NotImplemented
        return self._ours == other._ours

    def __hash__(self) -> int:
        return hash(self._ours)

    def __repr__(self) -> str:
        return f"ObjectRef({self.hex()})"

    def __copy__(self) -> ObjectRef[T]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ObjectRef[T]:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self._ours,)


def _arrived(ref: actors.ObjectRef[Any]) -> ObjectRef[Any]:
    """Rebuild a reference (named in pickles)."""
    return ObjectRef(ref)


# -- streams -------------------------------------------------------------------------------------------------


class ObjectRefGenerator(Generic[T]):
    """The result of a call of a generator: an iterator over ObjectRefs of its items.

    If the generator raises an exception, the last ObjectRef raises it. Works with ``for`` and ``async for``; thread-safe.

    Args:
        stream: the actorrpc.ObjectRefGenerator.
    """

    def __init__(self, stream: actors.ObjectRefGenerator[T]) -> None:
        self._ours = stream

    def __iter__(self) -> Iterator[ObjectRef[T]]:
        return self

    def __next__(self) -> ObjectRef[T]:
        return self._next(None)

    def _next(self, timeout: float | None) -> ObjectRef[T]:
        with rays_words:
            return ObjectRef(self._ours.next(timeout=timeout))

    def _next_sync(self, timeout_s: float | None = None) -> ObjectRef[T]:
        return self._next(None if timeout_s is None or timeout_s < 0 else timeout_s)

    def __aiter__(self) -> AsyncIterator[ObjectRef[T]]:
        return self

    async def __anext__(self) -> ObjectRef[T]:
        with rays_words:
            return ObjectRef(await self._ours.__anext__())

    def completed(self) -> ObjectRef[None]:
        """Return an ObjectRef that is complete at the end of the generator."""
        return ObjectRef(self._ours.completed())

    def next_ready(self, timeout: float | None = 0) -> bool:
        """Say whether the next item, or the end, has arrived; wait for it up to ``timeout`` seconds, or (None) without limit."""
        return self._ours.next_ready(timeout)

    def is_finished(self) -> bool:
        """Return whether all items have been taken, and the generator has ended."""
        return self._ours.is_finished()

    def close(self) -> None:
        """Close the generator; items that were not taken are lost."""
        self._ours.close()

    def __repr__(self) -> str:
        return repr(self._ours)


class DynamicObjectRefGenerator(Generic[T]):
    """The result of a call with ``num_returns="dynamic"``: ObjectRefs of all items of the generator.

    Args:
        refs: the ObjectRefs, in the order of the items.
    """

    def __init__(self, refs: Sequence[ObjectRef[T]]) -> None:
        self._refs = list(refs)
        self._at = 0

    def __iter__(self) -> Iterator[ObjectRef[T]]:
        return iter(self._refs)

    def __next__(self) -> ObjectRef[T]:
        if self._at == len(self._refs):
            raise StopIteration
        self._at += 1
        return self._refs[self._at - 1]

    def __len__(self) -> int:
        return len(self._refs)


def gathered(stream: ObjectRefGenerator[Any]) -> ObjectRef[DynamicObjectRefGenerator[Any]]:
    """Return an ObjectRef of the ObjectRefs of all items of a stream; it completes at the end of the stream."""
    future: Future[DynamicObjectRefGenerator[Any]] = Future()
    future.label = f"all of {stream!r}"
    refs: list[ObjectRef[Any]] = []

    def item(ref: actors.ObjectRef[Any]) -> bool:
        refs.append(ObjectRef(ref))
        return True

    for_each_item(stream._ours, item, lambda: future.set_result(DynamicObjectRefGenerator(refs)))
    return ObjectRef(actors.ObjectRef(future))


# -- between the two ----------------------------------------------------------------------------------------------


def wrapped(found: Any) -> Any:
    """Return a result of actorrpc's ``remote`` (an ObjectRef, a list of them, None or a stream) with Ray's classes."""
    if type(found) is actors.ObjectRef:
        return ObjectRef(found)
    if isinstance(found, list):
        return [ObjectRef(each) for each in found]
    return ObjectRefGenerator(found) if isinstance(found, actors.ObjectRefGenerator) else found


def unwrap(value: Any) -> Any:
    """Return the actorrpc.ObjectRef that Ray's ObjectRef holds; any other value as it is."""
    return value._ours if isinstance(value, ObjectRef) else value


def unwrapped(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with actorrpc's ObjectRefs in place of Ray's, so that actorrpc replaces them by their values."""
    for each in args:
        if isinstance(each, ObjectRef):
            args = tuple(map(unwrap, args))
            break
    return args, {name: unwrap(each) for name, each in kwargs.items()} if kwargs else kwargs


def _ours(item: Any, what: str) -> Any:
    found = item._ours if isinstance(item, ObjectRefGenerator) else unwrap(item)
    if isinstance(found, (actors.ObjectRef, actors.ObjectRefGenerator)):
        return found
    raise WrongTypeError(
        f"{what} takes ObjectRefs, as returned by .remote(), not a {type(item).__name__}: {say(item, repr)[:60]}"
    )


# -- functions ----------------------------------------------------------------------------------------


def get(object_refs: Any, *, timeout: float | None = None, **_ignored: Any) -> Any:
    """Wait for results and return them.

    Args:
        object_refs: an ObjectRef, or a list of them.
        timeout: seconds for all results; None: no limit.

    Raises:
        GetTimeoutError: not all results were ready in time. The calls are not cancelled.
        RayTaskError: a call raised an exception; if possible, the error is also an instance of the exception's class.
        RayError: a call failed for another reason. Errors for which Ray has no class, like SerializationError, stay actorrpc's.
        WrongTypeError: the argument is neither an ObjectRef nor a list of them (a ValueError and a TypeError).
    """
    with rays_words:
        if isinstance(object_refs, (list, tuple)):
            return actors.get([_ref(each) for each in object_refs], timeout=timeout)
        return actors.get(_ref(object_refs), timeout=timeout)


def _ref(item: Any) -> Any:
    if isinstance(item, (ObjectRefGenerator, actors.ObjectRefGenerator)):
        raise WrongTypeError("ray.get() takes ObjectRefs: iterating over an ObjectRefGenerator gives them")
    return _ours(item, "ray.get()")


def put(value: T, **_ignored: Any) -> ObjectRef[T]:
    """Return an ObjectRef for a value as it is now.

    Raises:
        TypeError: the value is an ObjectRef, or cannot be sent.
    """
    if isinstance(value, (ObjectRef, ObjectRefGenerator)):
        raise TypeError(f"ray.put() takes a value, and {value!r} is a reference already")
    return ObjectRef(actors.put(value))


def wait(
    ray_waitables: Any, *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[Any], list[Any]]:
    """Wait until some of several results are available; failed results count, too.

    Args:
        ray_waitables: a list of different ObjectRefs and ObjectRefGenerators.
        num_returns: how many results to wait for.
        timeout: seconds; None: no limit; 0: do not wait.
        fetch_local: True: a large result on another worker counts when it was fetched; False: as soon as it exists.

    Returns:
        The ready items, at most ``num_returns``, and the other items, both in the order of the list.

    Raises:
        TypeError: an item is not an ObjectRef.
        ValueError: an item is given twice, or ``num_returns`` or ``timeout`` is out of range.
    """
    if not isinstance(ray_waitables, (list, tuple)):
        raise TypeError(f"ray.wait() takes a list of ObjectRefs, not a {type(ray_waitables).__name__}")
    ours = [_ours(each, "ray.wait()") for each in ray_waitables]
    theirs = {id(one): other for one, other in zip(ours, ray_waitables, strict=True)}
    with rays_words:
        ready, rest = actors.wait(
            ours,
            num_returns=num_returns,
            timeout=None if timeout == math.inf else timeout,
            fetch_local=fetch_local,
        )
    return [theirs[id(each)] for each in ready], [theirs[id(each)] for each in rest]


def cancel(ray_waitable: Any, *, force: bool = False, recursive: bool = True) -> bool:
    """Cancel a call: it ends with TaskCancelledError. Return False if it had already ended.

    Args:
        force: for a task: end its process if the task cannot be interrupted.
        recursive: must be True: the calls that the call waits for are cancelled, too.

    Raises:
        ValueError: ``force`` for a call to an actor, or ``recursive=False``.
        TypeError: ``ray_waitable`` is neither an ObjectRef nor a stream.
    """
    return actors.cancel(_ours(ray_waitable, "ray.cancel()"), force=force, recursive=recursive)
