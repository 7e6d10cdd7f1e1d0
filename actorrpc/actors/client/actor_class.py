"""Actor classes: the result of ``@remote`` above a class. ``Cls.remote(...)`` makes an actor."""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, ParamSpec, TypeVar, Union

from actorrpc._exceptions import say
from actorrpc.actors.client.handle import ActorHandle
from actorrpc.actors.client.route import Routes
from actorrpc.actors.context import runtime
from actorrpc.actors.spec.actor_spec import ActorDescriptor
from actorrpc.actors.spec.class_info import BASE, ClassInfo
from actorrpc.actors.spec.options import ActorOptions
from actorrpc.errors import ConfigError, SerializationError
from actorrpc.serialization import codec
from actorrpc.serialization.by_value import MAIN, goes_by_value, in_main, runs_one_script
from actorrpc.serialization.local_refs import LocalReferences

__all__ = [
    "OPTIONS",
    "ActorClass",
    "Itself",
    "is_importable",
    "offer_class",
    "options_of",
    "with_internal_options",
]

P = ParamSpec("P")
C = TypeVar("C")
#: The attribute with the options that a subclass of :class:`actorrpc.Actor` was given as keywords.
OPTIONS: Final = "__actorrpc_options__"

# name -> function: the methods that higher packages add to all actor classes.
_offered: dict[str, Any] = {}


def offer_class(name: str, function: Any) -> None:
    """Make ``function(actor_class, ...)`` a method of all actor classes."""
    _offered[name] = function


def is_importable(obj: Any) -> bool:
    """Return whether other processes can import an object by its module and qualified name.

    Objects of the main module, which may be another script there, and of modules that are sent by value cannot be imported.
    """
    module, name = obj.__module__, getattr(obj, "__qualname__", None)  # a partial() has no __qualname__
    if module in MAIN or name is None or goes_by_value(obj):
        return False
    found: Any = sys.modules.get(module)
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        return False
    return found is obj


def _own(actor_class: Any) -> dict[str, Any]:
    """Return the dict of the ActorClass object itself; ``actor_class.__dict__`` is the dict of the user's class."""
    found: dict[str, Any] = object.__getattribute__(actor_class, "__dict__")
    return found


def options_of(actor: type) -> ActorOptions:
    """Return the options that were given as keywords of a class or of one of its bases."""
    found = getattr(actor, OPTIONS, None)
    if not isinstance(found, ActorOptions):
        return ActorOptions()
    if OPTIONS not in vars(actor) and found.name is not None:
        return replace(found, name=None, get_if_exists=False)  # subclasses do not inherit a unique name
    return found


def with_internal_options(actor_class: ActorClass[P, C], **options: Any) -> ActorClass[P, C]:
    """Return the same class with options of its actors that are not available to users."""
    own = _own(actor_class)
    return actor_class._with(replace(own["_actorrpc_options"], **options), own["_actorrpc_alias"])


class _Making(type):
    """The metaclass of ActorClass: makes an ActorClass without calling its ``__init__``, which is that of the user's class."""

    def __call__(cls, actor: type, options: ActorOptions | None = None) -> Any:
        if not isinstance(actor, type):
            raise TypeError(f"an ActorClass is made of a class, not of {say(actor, repr)}")
        made: Any = object.__new__(cls)  # type: ignore[arg-type]
        own = _own(made)
        own.update(
            __actor_class__=actor,
            _actorrpc_options=options if options is not None else options_of(actor),
            _actorrpc_first=None if any(BASE in vars(base) for base in actor.__mro__) else made,
            _actorrpc_alias=None,
            _actorrpc_info=None,
        )
        for name in functools.WRAPPER_ASSIGNMENTS:
            if name not in ("__annotations__", "__type_params__"):
                own[name] = getattr(actor, name, None)
        return made


class Itself:
    """Stands for a user's class or function in a pickle. Unpickling it gives the class or function.

    Args:
        obj: the class or the function.
        first: the actor class or task to which ``@remote`` may have bound the name of ``obj``; None if there is none.
        attribute: the attribute of ``first`` that is ``obj``.
    """

    __slots__ = ("_attribute", "_first", "_obj")

    def __init__(self, obj: Any, first: Any, attribute: str) -> None:
        self._obj, self._first, self._attribute = obj, first, attribute

    def __reduce__(self) -> tuple[Any, ...]:
        if self._first is not None and is_importable(self._first):
            return getattr, (self._first, self._attribute)
        return _itself(self._obj)


def _itself(obj: Any) -> tuple[Any, ...]:
    """Reduce a class or a function. A snapshot keeps an object of the main module itself, and not only its name.

    Before the snapshot is sent, the program may bind the name to another class, or change the class. Therefore the snapshot
    keeps the object and, in a program without a main script, the present definition of a class. Whether the object is sent by
    name or by value is decided when the snapshot is sent.
    """
    context = codec.current_encoding()
    if isinstance(context, LocalReferences):
        if isinstance(obj, type) and obj.__module__ in MAIN and not runs_one_script():
            return context.hold(codec.defined(obj))
        if in_main(obj):
            return context.hold(obj)
    return _same, (obj,)


def _same(obj: Any) -> Any:
    return obj


class ActorClass(Generic[P, C], metaclass=_Making):
    """A class of actors. ``Cls.remote(...)`` makes an actor and returns its handle.

    The user's class is ``Cls.__actor_class__``. Its attributes, static methods and class methods can be used through the actor
    class, an actor class can be the base of a class, and ``isinstance(x, Cls)`` checks for the user's class. Thread-safe.

    An actor gets the class as it is when the actor is created. Later changes of the class only affect actors made after them.

    Args:
        actor: the user's class.
        options: the options of its actors.
    """

    # These are only annotations, because class attributes would hide attributes of the user's class: see _own() for the values.
    __actor_class__: type[C]
    _actorrpc_options: ActorOptions
    #: The actor class to which ``@remote`` may have bound the user's class's name; None for a subclass of ``actorrpc.Actor``.
    _actorrpc_first: ActorClass[..., Any] | None
    _actorrpc_alias: Any
    _actorrpc_info: ClassInfo | None  # None until the class and the options were checked

    if TYPE_CHECKING:

        def __init__(self, actor: type[C], options: ActorOptions | None = None) -> None: ...

        def remote(self, *args: P.args, **kwargs: P.kwargs) -> ActorHandle[C]:
            """Make an actor."""
            raise AssertionError

        def group(self, extents: Any, /, **options: Any) -> Any:
            """Make a group of actors: see :mod:`actorrpc.actors.groups.group`."""

    else:

        def remote(self, *args, **kwargs):
            """Make an actor of the class; returns at once. Starts the embedded cluster if this process is in no group.

            The options say where the actor is made, and how it is supervised. If the constructor raises an exception, every call
            fails with an ActorDiedError that has this exception as its cause.

            Returns:
                The actor's handle.

            Raises:
                TypeError: the constructor does not take these arguments. Nothing was sent.
                ConfigError: the options contradict each other.
                PlacementError: this process knows that no worker has the resources in the options.
                NameTakenError: an actor has the name in the options.
                SerializationError: the class, or an argument, cannot be sent.
                UnknownWorkerError: the group has no worker with the name in the options.
            """
            own = _own(self)  # faster than self._actorrpc_options, which calls __getattribute__()
            info = ClassInfo.of(own["__actor_class__"])
            info.constructor.check(args, kwargs)
            if own["_actorrpc_info"] is not info:
                self._check(own["__actor_class__"], info, own["_actorrpc_options"])
                own["_actorrpc_info"] = info
            in_force = runtime(start=True)
            try:
                descriptor: ActorDescriptor = in_force.supervisor.create(
                    self._to_send(), info, own["_actorrpc_options"], args, kwargs
                )
            except SerializationError as error:
                info.constructor.signature.name_argument(error)
                raise
            routes: Routes = in_force.routes
            return ActorHandle(descriptor, routes.of(descriptor))

    def options(self, **options: Any) -> ActorClass[P, C]:
        """Return the same class with other options of its actors: see :class:`~actorrpc.actors.spec.options.ActorOptions`.

        Raises:
            ConfigError: an option is unknown, or its value is wrong; the message lists the right ones.
        """
        return self._with(self._actorrpc_options.merged(**options), self._actorrpc_alias)

    def _with(self, options: ActorOptions, alias: Any) -> ActorClass[P, C]:
        made: ActorClass[P, C] = ActorClass(self.__actor_class__, options)
        _own(made).update(_actorrpc_first=self._actorrpc_first, _actorrpc_alias=alias)
        return made

    @staticmethod
    def _check(actor: type, info: ClassInfo, options: ActorOptions) -> None:
        if inspect.isabstract(actor):
            missing = ", ".join(sorted(actor.__abstractmethods__))  # type: ignore[attr-defined]
            raise TypeError(f"Can't instantiate abstract class {info.name} with abstract methods {missing}")
        options.check_together()
        if info.has_checkpoint and not all(
            info.methods[each].kind == "sync" for each in ("checkpoint", "restore")
        ):
            raise TypeError(
                f"{info.name} keeps its state over restarts: its checkpoint() and restore(state) must be plain methods, not async"
            )
        groups = options.concurrency_groups or {}
        for method in info.methods.values():
            group = method.given.get("concurrency_group")
            if group is not None and group not in groups:
                raise ConfigError(
                    f"{info.name}.{method.name} is in the concurrency group {group!r}, which the actor does not have: add it to "
                    f"concurrency_groups=, which has: {', '.join(map(repr, groups)) or 'none'}"
                )

    def _to_send(self) -> object:
        """Return an object whose pickle is loaded as the user's class."""
        return Itself(self.__actor_class__, self._actorrpc_first, "__actor_class__")

    # -- behaviour of a class -----------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: actors are made with ``remote``.

        Raises:
            TypeError: always.
        """
        name = self.__actor_class__.__name__
        raise TypeError(
            f"actors cannot be made by calling their class: instead of {name}(...) write {name}.remote(...); a plain object of "
            f"the class is made by {name}.__actor_class__(...)"
        )

    def __getattribute__(self, name: str) -> Any:
        # `A.__init__(self, ...)` in a subclass of the actor class A must call the __init__ of the user's class.
        if name in _OF_THE_CLASS:
            return getattr(object.__getattribute__(self, "__actor_class__"), name)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        if name in _offered:
            return functools.partial(_offered[name], self)
        actor = _own(self).get("__actor_class__")
        if actor is None:
            raise AttributeError(name)
        return getattr(actor, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__actor_class__, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__actor_class__, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self.__actor_class__), *_offered, "remote", "options", "__actor_class__"})

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        alias = self._actorrpc_alias
        if alias is None:
            return (self.__actor_class__,)
        entries: tuple[type, ...] = alias.__mro_entries__(bases)
        return entries

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self.__actor_class__)

    def __subclasscheck__(self, other: type) -> bool:
        return issubclass(getattr(other, "__actor_class__", other), self.__actor_class__)

    if not TYPE_CHECKING:  # type checkers would treat these as operators on values

        def __getitem__(self, parameters):
            return self._with(self._actorrpc_options, self.__actor_class__[parameters])

        def __or__(self, other):
            return Union[self.__actor_class__, getattr(other, "__actor_class__", other)]  # noqa: UP007

        __ror__ = __or__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ActorClass):
            return NotImplemented
        return (
            self.__actor_class__ is other.__actor_class__
            and self._actorrpc_options == other._actorrpc_options
            and self._actorrpc_alias == other._actorrpc_alias
        )

    def __hash__(self) -> int:
        return hash(self.__actor_class__)

    def __repr__(self) -> str:
        shown = self._actorrpc_alias if self._actorrpc_alias is not None else self.__actor_class__
        return f"<actor class {getattr(shown, '__qualname__', shown)}>"

    def __reduce__(self) -> Any:
        if is_importable(self):
            return self.__qualname__
        return _rebuild, (ActorClass._to_send(self), self._actorrpc_options, self._actorrpc_alias)


# Attributes that Python, or a library such as dataclasses, must read from the user's class although an ActorClass has them.
_OF_THE_CLASS: Final = frozenset(
    {
        "__annotations__",
        "__class_getitem__",
        "__dict__",
        "__init__",
        "__init_subclass__",
        "__new__",
        "__orig_bases__",
        "__parameters__",
        "__subclasshook__",
    }
)


def _rebuild(actor: type, options: ActorOptions, alias: Any) -> ActorClass[..., Any]:
    made: ActorClass[..., Any] = ActorClass(actor, options)
    _own(made)["_actorrpc_alias"] = alias
    return made
