"""``@method``, and the types of methods for type checkers. At run time, methods stay plain functions.

Checkers see a :class:`Method`, a descriptor. On an instance it returns a :class:`BoundMethod`, which can be called, as inside of
the class, and has ``remote``, as on a handle. The types use ``Callable`` in covariant variables, not ``ParamSpec``, so that an
override may take more arguments than the method that it overrides.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.spec.class_info import mark_method
from actorrpc.actors.streams.consumer import ObjectRefGenerator

__all__ = ["BoundMethod", "Method", "RemoteCall", "method"]

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
Out = TypeVar("Out")
Raw_co = TypeVar("Raw_co", covariant=True)  # type of the method on the class, with the argument self
Local_co = TypeVar("Local_co", covariant=True)  # type of the method on an instance, called locally
# The type of `method.remote` on a handle, which returns an ObjectRef or a stream.
Remote_co = TypeVar("Remote_co", covariant=True)


class RemoteCall(Generic[Remote_co]):
    """The type of ``handle.method.remote``: up to four positional arguments may also be ObjectRefs. Only for types."""

    __slots__ = ()

    # The first overload is for calls without ObjectRefs. ObjectRefs cannot be added to the types of a ParamSpec, so each of the
    # other overloads is for a fixed number of arguments.
    @overload
    def __call__(self: RemoteCall[Callable[P, Out]], /, *args: P.args, **kwargs: P.kwargs) -> Out: ...
    @overload
    def __call__(self: RemoteCall[Callable[[A], Out]], a: A | ObjectRef[A], /) -> Out: ...
    @overload
    def __call__(
        self: RemoteCall[Callable[[A, B], Out]], a: A | ObjectRef[A], b: B | ObjectRef[B], /
    ) -> Out: ...
    @overload
    def __call__(
        self: RemoteCall[Callable[[A, B, C], Out]],
        a: A | ObjectRef[A],
        b: B | ObjectRef[B],
        c: C | ObjectRef[C],
        /,
    ) -> Out: ...
    @overload
    def __call__(
        self: RemoteCall[Callable[[A, B, C, D], Out]],
        a: A | ObjectRef[A],
        b: B | ObjectRef[B],
        c: C | ObjectRef[C],
        d: D | ObjectRef[D],
        /,
    ) -> Out: ...
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        raise AssertionError


class BoundMethod(Generic[Local_co, Remote_co]):
    """The type of ``self.method`` inside of the class, which can be called, and of ``handle.method``, which has ``remote``.

    Checkers cannot tell a handle from an instance: they accept ``handle.method(...)``, which raises at run time. Only for types.
    """

    __slots__ = ()

    @property
    def __call__(self) -> Local_co:
        """The plain method, for calls inside of the class."""
        raise AssertionError

    @property
    def remote(self) -> RemoteCall[Remote_co]:
        """The remote call, for calls on a handle."""
        raise AssertionError

    @overload
    def options(self, *, num_returns: int | str, **options: Any) -> BoundMethod[Local_co, Any]: ...
    @overload
    def options(self, **options: Any) -> BoundMethod[Local_co, Remote_co]: ...
    def options(self, **options: Any) -> Any:
        """Return the method of a handle with other options of its calls."""
        raise AssertionError


class Method(Generic[Raw_co, Local_co, Remote_co]):
    """The type of a method below ``@method``, for type checkers. At run time the method is a plain function."""

    __slots__ = ()

    @overload
    def __get__(self, instance: None, owner: type[Any], /) -> Raw_co: ...
    @overload
    def __get__(
        self, instance: object, owner: type[Any] | None = None, /
    ) -> BoundMethod[Local_co, Remote_co]: ...
    def __get__(self, instance: object, owner: type[Any] | None = None, /) -> Any:
        """Return the function, or the method of an instance."""
        raise AssertionError


# The order of overloads matters: a coroutine function also fits the last overload, as a function that returns a Coroutine.


class _Mark(Protocol):
    """The type of ``@method(...)``."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
    ) -> Method[
        Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
        Callable[P, Coroutine[Any, Any, R]],
        Callable[P, ObjectRef[R]],
    ]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Any, P], Iterator[R]], /
    ) -> Method[
        Callable[Concatenate[Any, P], Iterator[R]],
        Callable[P, Iterator[R]],
        Callable[P, ObjectRefGenerator[R]],
    ]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Any, P], AsyncIterator[R]], /
    ) -> Method[
        Callable[Concatenate[Any, P], AsyncIterator[R]],
        Callable[P, AsyncIterator[R]],
        Callable[P, ObjectRefGenerator[R]],
    ]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], R], /
    ) -> Method[Callable[Concatenate[Any, P], R], Callable[P, R], Callable[P, ObjectRef[R]]]: ...


class _MarkOfAny(Protocol):
    """The return type of ``@method(num_returns=...)``: the number of ObjectRefs that a call returns has no static type."""

    def __call__(
        self, function: Callable[Concatenate[Any, P], R], /
    ) -> Method[Callable[Concatenate[Any, P], R], Callable[P, R], Callable[P, Any]]: ...


@overload
def method(
    function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
) -> Method[
    Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
    Callable[P, Coroutine[Any, Any, R]],
    Callable[P, ObjectRef[R]],
]: ...
@overload
def method(  # type: ignore[overload-overlap]
    function: Callable[Concatenate[Any, P], Iterator[R]], /
) -> Method[
    Callable[Concatenate[Any, P], Iterator[R]],
    Callable[P, Iterator[R]],
    Callable[P, ObjectRefGenerator[R]],
]: ...
@overload
def method(  # type: ignore[overload-overlap]
    function: Callable[Concatenate[Any, P], AsyncIterator[R]], /
) -> Method[
    Callable[Concatenate[Any, P], AsyncIterator[R]],
    Callable[P, AsyncIterator[R]],
    Callable[P, ObjectRefGenerator[R]],
]: ...
@overload
def method(
    function: Callable[Concatenate[Any, P], R], /
) -> Method[Callable[Concatenate[Any, P], R], Callable[P, R], Callable[P, ObjectRef[R]]]: ...
@overload
def method(function: F, /) -> F: ...
@overload
def method(*, num_returns: int | str, **options: Any) -> _MarkOfAny: ...
@overload
def method(**options: Any) -> _Mark: ...
def method(function: Any = None, /, **options: Any) -> Any:
    """Set the default options of calls of a method of an actor. The method itself stays a plain function.

    ``@method`` alone tells type checkers the types of ``handle.name.remote(...)`` if the class is an :class:`~actorrpc.Actor`; at
    run time it changes nothing: all methods of a class are methods of its actors.

    ``@method(num_returns=2)`` takes the options of ``handle.method.options(...)``: see
    :class:`~actorrpc.actors.spec.options.CallOptions`. In addition, ``@method(thread=True)`` runs a plain method of an actor that
    also has ``async def`` methods on a thread of its own, and not on the actor's event loop, which it would block.

    Raises:
        ConfigError: an option is unknown, or its value is wrong.
        TypeError: ``@method`` is above an object that is not a function.
    """
    return mark_method(function, **options)
