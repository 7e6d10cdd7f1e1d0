"""``ray.actor``: actor classes, handles and methods, with Ray's references, options and errors.

The classes are subclasses of actorrpc's. A pickle that a program makes of a handle by itself does not keep the actor alive.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, ParamSpec, TypeVar

from actorrpc import actors
from actorrpc._exceptions import say
from actorrpc.actors.client.handle import _RemoteCall
from actorrpc.actors.spec.options import ActorOptions
from actorrpc.compat.ray.exceptions import rays_words, rays_words_of_actor
from actorrpc.compat.ray.object_ref import ObjectRef, gathered, unwrapped, wrapped
from actorrpc.compat.ray.options import Extras, for_actors, for_calls, group_of, placed
from actorrpc.compat.ray.placement import join
from actorrpc.compat.ray.runtime_env import WithPaths
from actorrpc.errors import WrongTypeError
from actorrpc.futures import Future
from actorrpc.serialization import codec

__all__ = [
    "ActorClass",
    "ActorHandle",
    "ActorID",
    "ActorMethod",
    "actor_class",
    "exit_actor",
    "get_actor",
    "kill",
    "method",
]

P = ParamSpec("P")
C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)
Out = TypeVar("Out")
F = TypeVar("F", bound=Callable[..., Any])
H = TypeVar("H", bound=actors.ActorHandle[Any])


@dataclasses.dataclass(frozen=True)
class ActorID:
    """The id of an actor."""

    number: int

    def hex(self) -> str:
        """Return the id as text."""
        return f"{self.number:016x}"

    def binary(self) -> bytes:
        """Return the id as bytes."""
        return bytes.fromhex(self.hex())

    def is_nil(self) -> bool:
        """Say whether this is the empty id, which no actor has."""
        return False


# -- methods ---------------------------------------------------------------------------------------------------


class _RemoteCallOfRay(_RemoteCall):
    """``handle.method.remote``, which returns Ray's references and raises Ray's errors."""

    __slots__ = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = unwrapped(args, kwargs)
        with rays_words:
            return wrapped(super().__call__(*args, **kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (ActorMethod(self._descriptor, self._route, self._info, self._options), "remote")


class ActorMethod(actors.ActorMethod[P, Out], Generic[P, Out]):
    """A method of an actor, on a handle: ``handle.method.remote(...)`` calls it."""

    __slots__ = ()

    def __init__(self, descriptor: Any, route: Any, info: Any, options: Any) -> None:
        super().__init__(descriptor, route, info, options)
        if not TYPE_CHECKING:
            self.remote = _RemoteCallOfRay(descriptor, route, info, options)

    def options(self, **options: Any) -> Any:
        """Return the method with other options of its calls.

        Raises:
            ConfigError: an option is unknown, or its value is wrong (a ValueError).
        """
        if options.get("num_returns") == "dynamic":
            return _Dynamic(self.options(**{**options, "num_returns": "streaming"}))
        return _as_rays_method(super().options(**for_calls(options)))

    def _remote(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Call the method with arguments in a list and a dict."""
        return self.options(**options).remote(*(args or ()), **(kwargs or {}))

    def __reduce__(self) -> tuple[Any, ...]:
        _, (handle, info, options) = super().__reduce__()
        return _rebuild_method, (_as_rays(handle), info, options)


def _as_rays_method(made: actors.ActorMethod[..., Any]) -> ActorMethod[..., Any]:
    return ActorMethod(made._descriptor, made._route, made._info, made._options)


def _rebuild_method(handle: ActorHandle[Any], info: Any, options: Any) -> ActorMethod[..., Any]:
    """Rebuild a method (named in pickles)."""
    state = handle.__dict__
    return ActorMethod(state["_actorrpc_descriptor"], state["_actorrpc_route"], info, options)


class _Dynamic:
    """A method with ``num_returns="dynamic"``: a call returns an ObjectRef of references to all items that the method yields."""

    __slots__ = ("_method",)

    def __init__(self, method: ActorMethod[..., Any]) -> None:
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> ObjectRef[Any]:
        return gathered(self._method.remote(*args, **kwargs))

    def options(self, **options: Any) -> Any:
        return self._method.options(**options)


class _Special:
    """A special method of every handle, such as ``__ray_call__``."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = unwrapped(args, kwargs)
        return wrapped(self._call(*args, **kwargs))

    def options(self, **_options: Any) -> _Special:
        return self


def _itself(_instance: Any) -> bool:
    """Return True: ``handle.__ray_ready__.remote()`` runs this function in the actor (named in pickles)."""
    return True


def _leave(_instance: Any) -> NoReturn:
    """End the actor; ``handle.__ray_terminate__.remote()`` runs this function in the actor (named in pickles)."""
    actors.exit_actor()


def _ended(handle: ActorHandle[Any]) -> actors.ObjectRef[Any]:
    ref = actors.call(handle, _leave)
    ref._request().add_done_callback(Future.acknowledge)  # do not log that the call fails, as intended
    return ref


#: special method -> the function that its ``remote`` calls, with the handle as the first argument
_SPECIAL: Final[Mapping[str, Callable[..., Any]]] = {
    "__ray_call__": actors.call,
    "__ray_ready__": lambda handle: actors.call(handle, _itself),
    "__ray_terminate__": _ended,
}


# -- handles -----------------------------------------------------------------------------------------------------


class _CallingOfRay:
    """``handle.__call__``. A descriptor, because Python looks up ``__call__`` on the type of the handle."""

    __slots__ = ()

    def __get__(self, handle: Any, owner: Any = None) -> Any:
        if handle is None:
            return self
        ours = actors.ActorHandle.__dict__["__call__"].__get__(handle, owner)
        return _as_rays_method(ours) if isinstance(ours, actors.ActorMethod) else ours


class ActorHandle(actors.ActorHandle[C_co], Generic[C_co]):
    """A reference to an actor: ``handle.method.remote(...)`` calls a method of it. See :class:`actorrpc.ActorHandle`."""

    if not TYPE_CHECKING:
        __call__ = _CallingOfRay()

        def __getattr__(self, name):
            if name in _SPECIAL and "_actorrpc_descriptor" in self.__dict__:
                return _Special(functools.partial(_SPECIAL[name], self))
            found = super().__getattr__(name)
            if isinstance(found, actors.ActorMethod):
                found = self.__dict__[name] = _as_rays_method(found)
            return found

    @property
    def _actor_id(self) -> ActorID:
        return ActorID(self.__dict__["_actorrpc_descriptor"].actor_id)

    _ray_actor_id = _actor_id

    def __repr__(self) -> str:
        descriptor = self.__dict__["_actorrpc_descriptor"]
        return f"Actor({descriptor.info.name}, {self._actor_id.hex()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_rays, (_copied(actors.ActorHandle, self),)


def _copied(kind: type[H], handle: actors.ActorHandle[Any], *, weak: bool = False) -> H:
    """Return a handle of the class ``kind`` to the same actor; a weak handle does not keep the actor alive."""
    state = handle.__dict__
    descriptor = state["_actorrpc_descriptor"]
    if weak:
        descriptor = dataclasses.replace(descriptor, anchor=None)
    return kind(descriptor, state["_actorrpc_route"], state["_actorrpc_given"])


def _as_rays(handle: actors.ActorHandle[Any]) -> ActorHandle[Any]:
    """Return a handle with Ray's methods and errors to the same actor (named in pickles)."""
    return _copied(ActorHandle, handle)


def _reduce(handle: ActorHandle[Any]) -> tuple[Any, ...]:
    # While an exception is pickled, there is no encoding context. A handle in an exception is sent as a weak handle.
    return _as_rays, (_copied(actors.ActorHandle, handle, weak=codec.current_encoding() is None),)


codec.register(ActorHandle, _reduce)


# -- classes -----------------------------------------------------------------------------------------------------


class ActorClass(actors.ActorClass[P, C], Generic[P, C]):
    """A class of actors: ``Cls.remote(...)`` makes an actor and returns its handle. See :class:`actorrpc.ActorClass`."""

    _ray: Extras

    if not TYPE_CHECKING:

        def remote(self, *args, **kwargs):
            """Make an actor of the class; returns at once. Starts the embedded cluster if this process is in no group.

            An exception of the constructor is the cause of the ActorDiedError with which each call fails.

            Raises:
                TypeError: the constructor does not take these arguments, or they cannot be sent.
                ActorAlreadyExistsError: there is an actor of that name (a ValueError).
                ActorUnschedulableError: no worker has the resources that the options request. If only the driver can detect
                    this, each call fails with the error instead.
            """
            args, kwargs = unwrapped(args, kwargs)
            extras = _extras(self)
            with rays_words_of_actor:
                given = self._actorrpc_options
                changes, paths = placed(extras, given.env)
                made = self
                if changes:
                    bundle = changes.pop("bundle", None)
                    made = self._with(
                        dataclasses.replace(given.merged(**changes), bundle=bundle), self._actorrpc_alias
                    )
                if paths:
                    made = made._searching(paths)
                handle = _as_rays(actors.ActorClass.remote(made, *args, **kwargs))
                group = group_of(extras)
                if group is not None:
                    join(group, _copied(ActorHandle, handle, weak=True))
                return handle

    def options(self, **options: Any) -> ActorClass[P, C]:
        """Return the same class with other options of its actors.

        Raises:
            ConfigError: an option is not supported here, or its value is wrong; the message says what to do (a ValueError).
        """
        ours, extras = for_actors(options, _extras(self))
        made = self._with(self._actorrpc_options.merged(**ours), self._actorrpc_alias)
        _own(made)["_ray"] = extras
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: actors are made with ``remote``.

        Raises:
            TypeError: always.
        """
        name = self.__actor_class__.__name__
        raise TypeError(
            f"actors cannot be instantiated directly: instead of {name}(...) write {name}.remote(...)"
        )

    def _remote(self, args: Any = None, kwargs: Any = None, **options: Any) -> ActorHandle[C]:
        """Make an actor, with arguments in a list and a dict."""
        made: Any = self.options(**options) if options else self
        found: ActorHandle[C] = made.remote(*(args or ()), **(kwargs or {}))
        return found

    def _with(self, options: ActorOptions, alias: Any) -> ActorClass[P, C]:
        made: ActorClass[P, C] = ActorClass(self.__actor_class__, options)
        _own(made).update(_actorrpc_first=self._actorrpc_first, _actorrpc_alias=alias, _ray=_extras(self))
        return made

    def _searching(self, paths: tuple[str, ...]) -> ActorClass[P, C]:
        """Return the same class, whose actors' processes add ``paths`` to the import path before they unpickle the class."""
        made = self._with(self._actorrpc_options, self._actorrpc_alias)
        _own(made)["_ray_paths"] = paths
        return made

    def _to_send(self) -> object:
        paths = _own(self).get("_ray_paths")
        return super()._to_send() if paths is None else WithPaths(paths, _ClassOf(self))

    def __reduce__(self) -> Any:
        reduced = super().__reduce__()
        if isinstance(reduced, str):
            return reduced
        _, rest = reduced
        return _rebuild_class, (*rest, _extras(self))


class _ClassOf:
    """Stands for an actor class in a pickle. Unpickling it gives the user's class."""

    __slots__ = ("_reduced",)

    def __init__(self, of: ActorClass[..., Any]) -> None:
        self._reduced = of

    def __reduce__(self) -> tuple[Any, ...]:
        return _class_of, (self._reduced,)


def _class_of(actor: Any) -> Any:
    """Return the user's class of an actor class (named in pickles)."""
    return actor.__actor_class__


def _own(actor: ActorClass[..., Any]) -> dict[str, Any]:
    """Return the dict of the ActorClass object itself; ``actor.__dict__`` is the dict of the user's class."""
    found: dict[str, Any] = object.__getattribute__(actor, "__dict__")
    return found


def _extras(actor: ActorClass[..., Any]) -> Extras:
    found: Extras = _own(actor).get("_ray", _NONE)
    return found


_NONE = Extras()


def _rebuild_class(actor: type, options: ActorOptions, alias: Any, extras: Extras) -> ActorClass[..., Any]:
    """Rebuild an actor class (named in pickles)."""
    made: ActorClass[..., Any] = ActorClass(actor, options)
    _own(made).update(_actorrpc_alias=alias, _ray=extras)
    return made


def actor_class(cls: type, options: Mapping[str, Any]) -> ActorClass[..., Any]:
    """Make an actor class of a class.

    Raises:
        ConfigError: as :meth:`ActorClass.options`.
    """
    end = getattr(cls, "__ray_shutdown__", None)
    if end is not None and not hasattr(cls, "on_stop"):
        cls.on_stop = end  # type: ignore[attr-defined]
    ours, extras = for_actors(options, _NONE)
    made: ActorClass[..., Any] = ActorClass(cls, ActorOptions().merged(**ours))
    _own(made)["_ray"] = extras
    return made


# -- functions ---------------------------------------------------------------------------------------------------


def method(function: Any = None, /, **options: Any) -> Any:
    """Set the default options of the calls of a method: ``@ray.method(num_returns=2)``.

    Raises:
        ConfigError: an option is unknown, or its value is wrong (a ValueError).
    """
    if function is None and not options:
        raise TypeError("@ray.method takes at least one option, like num_returns=2")
    return actors.method(**for_calls(options)) if function is None else actors.method(function)


def exit_actor() -> NoReturn:
    """End the actor that executes this code, for good: its calls fail with ActorDiedError.

    Raises:
        TypeError: no actor executes this code.
    """
    if actors.get_runtime_context().actor_id is None:
        raise WrongTypeError("exit_actor() was called outside of an actor")
    actors.exit_actor()


def get_actor(name: str, namespace: str | None = None) -> ActorHandle[Any]:
    """Return a weak handle to the actor of that name: the handle does not keep the actor alive.

    Raises:
        ValueError: there is no such actor.
    """
    if not isinstance(name, str) or not name:
        raise WrongTypeError(f"ray.get_actor() takes the name of an actor, not {say(name, repr)}")
    with rays_words:
        return _as_rays(actors.get_actor(name, namespace))


def kill(actor: Any, *, no_restart: bool = True) -> None:
    """End an actor at once, for good or (``no_restart=False``) as if it had died.

    Raises:
        WrongTypeError: ``actor`` is not the handle of an actor (a ValueError and a TypeError).
    """
    if not isinstance(actor, actors.ActorHandle):
        raise WrongTypeError(
            f"ray.kill() takes the handle of an actor, not a {type(actor).__name__}; a task is cancelled with ray.cancel()"
        )
    actors.kill(actor, no_restart=no_restart)
