"""``remote``: torch's function and Ray's decorator under one name. The first argument decides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from actorrpc.actors.actor_class import ActorClass
from actorrpc.actors.object_ref import ObjectRef
from actorrpc.actors.options import ActorOptions, TaskOptions
from actorrpc.actors.ref_generator import ObjectRefGenerator
from actorrpc.actors.tasks import RemoteFunction
from actorrpc.core.identity import WorkerInfo
from actorrpc.rpc import api
from actorrpc.rpc.options import UNSET_RPC_TIMEOUT
from actorrpc.rpc.rref import RRef

__all__ = ["remote"]

P = ParamSpec("P")
C = TypeVar("C")
T = TypeVar("T")
C_co = TypeVar("C_co", covariant=True)

_TORCH: tuple[str, ...] = ("to", "func", "args", "kwargs", "timeout")


class _Class(Protocol[P, C_co]):
    """A class, as type checkers see one that is passed as an argument: it is called, and has bases."""

    __bases__: tuple[type, ...]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C_co: ...


# The first overload that fits is meant: a class is also a function that returns its instances.


class _Remote(Protocol):
    """What ``@remote(...)`` returns."""

    @overload
    def __call__(self, cls: _Class[P, C], /) -> ActorClass[P, C]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> RemoteFunction[P, ObjectRef[T]]: ...
    @overload
    def __call__(self, function: Callable[P, Iterator[T]], /) -> RemoteFunction[P, ObjectRefGenerator[T]]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, AsyncIterator[T]], /
    ) -> RemoteFunction[P, ObjectRefGenerator[T]]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> RemoteFunction[P, ObjectRef[T]]: ...


@overload
def remote(cls: _Class[P, C], /) -> ActorClass[P, C]: ...  # type: ignore[overload-overlap]
@overload
def remote(function: Callable[P, Coroutine[Any, Any, T]], /) -> RemoteFunction[P, ObjectRef[T]]: ...
@overload
def remote(function: Callable[P, Iterator[T]], /) -> RemoteFunction[P, ObjectRefGenerator[T]]: ...  # type: ignore[overload-overlap]
@overload
def remote(function: Callable[P, AsyncIterator[T]], /) -> RemoteFunction[P, ObjectRefGenerator[T]]: ...  # type: ignore[overload-overlap]
@overload
def remote(function: Callable[P, T], /) -> RemoteFunction[P, ObjectRef[T]]: ...
@overload
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[T]: ...
@overload
def remote(**options: Any) -> _Remote: ...
def remote(*given: Any, **options: Any) -> Any:
    """Make a class a class of actors, make a function a task, or call a function on a worker.

    ``@remote`` over a class, or ``remote(Cls)``, gives an :class:`~actorrpc.actors.actor_class.ActorClass`:
    ``Cls.remote(...)`` makes an actor. Over a function it gives a :class:`~actorrpc.actors.tasks.RemoteFunction`:
    ``f.remote(...)`` runs it elsewhere. ``@remote(num_cpus=2, ...)`` also says how: see
    :class:`~actorrpc.actors.options.ActorOptions` and :class:`~actorrpc.actors.options.TaskOptions`.

    ``remote(to, func, args=(), kwargs=None, timeout=...)`` with a worker's name, rank or WorkerInfo first is
    ``torch.distributed.rpc.remote``: it calls the function there and returns an RRef to its result at once.

    Raises:
        ConfigError: an option is unknown, or its value is wrong; the message lists the right ones.
        TypeError: the first argument is neither a class, a function nor a worker.
    """
    if not given:
        if "to" in options:
            return api.remote(**options)
        if not options:
            raise TypeError("remote() needs a class or a function, options, or a worker and a function")
        if "func" in options:
            raise TypeError("remote() is given a function, but no worker to call it on: give to=")
        _check_either(options)
        return lambda made: _decorate(made, options)
    first = given[0]
    if isinstance(first, (type, ActorClass, RemoteFunction)):
        return _decorate(_only(given, options), {})
    if isinstance(first, (str, int, WorkerInfo)) or not callable(first):
        if len(given) == 1 and "func" not in options:
            _not_remote(first, options)
        return api.remote(*given, **options)
    return _decorate(_only(given, options), {})


def _only(given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if len(given) > 1 or options:
        name = getattr(given[0], "__name__", "Cls")
        shown = ", ".join(f"{key}=..." for key in options) or "..."
        raise TypeError(
            f"remote({name}) takes nothing else: options go into remote({shown})({name}), or {name}.options({shown})"
        )
    return given[0]


def _not_remote(first: Any, options: dict[str, Any]) -> None:
    if isinstance(first, (str, int, WorkerInfo)) or (options and set(options) <= {*_TORCH}):
        raise TypeError(
            f"remote() makes actors of classes and tasks of functions, and {first!r} is neither. As torch's remote() it calls a "
            f"function on a worker, whose name or rank {first!r} would be: then say which one, remote({first!r}, func)"
        )
    raise TypeError(f"@remote is for classes and functions, not for {first!r}")


def _check_either(options: dict[str, Any]) -> None:
    """Refuse at once what neither a class nor a function can have."""
    try:
        ActorOptions().merged(**options)
    except ValueError as error:
        try:
            TaskOptions().merged(**options)
        except ValueError:
            raise error from None


def _decorate(made: Any, options: dict[str, Any]) -> Any:
    if isinstance(made, (ActorClass, RemoteFunction)):
        return made.options(**options)
    if isinstance(made, type):
        return ActorClass(made, ActorOptions().merged(**options))
    if isinstance(made, (staticmethod, classmethod)) or not callable(made):
        raise TypeError(f"@remote is for classes and functions, not for {made!r}")
    return RemoteFunction(made, TaskOptions().merged(**options))
