"""``Actor``: a base class that makes a class an actor class, as ``@remote`` does, and that every type checker understands.

Some type checkers ignore what a class decorator returns. All type checkers support base classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from actorrpc.actors.client.actor_class import OPTIONS, ActorClass, options_of

__all__ = ["Actor", "ActorMaker"]

P = ParamSpec("P")
C = TypeVar("C")


class Actor:
    """The base of actor classes: ``class Counter(actorrpc.Actor)`` does what ``@actorrpc.remote class Counter`` does, with types.

    ``Counter.remote(...)`` makes an actor, ``Counter.options(num_cpus=2).remote(...)`` makes an actor with this option. Options
    for all actors of a class are keywords: ``class Counter(actorrpc.Actor, num_cpus=2)``. Subclasses inherit these options,
    except ``name`` and ``get_if_exists``, and may add options. ``Counter(...)`` makes a plain object in this process.

    Methods below ``@actorrpc.method`` are typed on handles, which checkers take for instances: ``counter.add.remote(2)`` is an
    ``ObjectRef[int]`` if ``add`` returns an int. At run time the class is used as with ``@remote``. docs/how-to/types.md lists
    what checkers cannot check.

    Raises:
        ConfigError: a keyword of the class is not an option of an actor, or its value is wrong.
        TypeError: the class has an attribute of its own called ``remote`` or ``options``.
    """

    __slots__ = ()
    __actorrpc_base__ = True  # class_info.py recognizes this base class by the attribute

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__()
        for name in ("remote", "options"):
            if inspect.getattr_static(cls, name) is not vars(Actor)[name]:
                raise TypeError(
                    f"{cls.__qualname__} has a {name!r} of its own, which hides {name!r} of actorrpc.Actor: give "
                    "it another name, because actors are made with that method"
                )
        if keywords:
            setattr(cls, OPTIONS, options_of(cls).merged(**keywords))

    if TYPE_CHECKING:
        # Callable[P, C] is the type of a class with constructor parameters P and instances C. For checkers, a handle is a C.
        @classmethod
        def remote(cls: Callable[P, C], *args: P.args, **kwargs: P.kwargs) -> C:
            """Make an actor."""

        @classmethod
        def options(cls: Callable[P, C], **options: Any) -> ActorMaker[P, C]:
            """Return the class with other options of its actors."""

        @classmethod
        def group(cls, extents: Any, /, *args: Any, **options: Any) -> Any:
            """Make a group of actors."""

    else:

        @classmethod
        def remote(cls, *args, **kwargs):
            """Make an actor of the class and return its handle: see :meth:`ActorClass.remote`."""
            return ActorClass(cls).remote(*args, **kwargs)

        @classmethod
        def options(cls, **options):
            """Return the class with other options of its actors: see :class:`~actorrpc.actors.spec.options.ActorOptions`.

            Raises:
                ConfigError: an option is unknown, or its value is wrong; the message lists the right ones.
            """
            return ActorClass(cls).options(**options)

        @classmethod
        def group(cls, extents, /, *args, **options):
            """Make a group of actors: see :func:`actorrpc.spawn`."""
            return ActorClass(cls).group(extents, *args, **options)


class ActorMaker(Generic[P, C]):
    """The type of ``Counter.options(...)`` if ``Counter`` is an :class:`Actor`. At run time it is an ActorClass."""

    if TYPE_CHECKING:

        def remote(self, *args: P.args, **kwargs: P.kwargs) -> C:
            """Make an actor."""
            raise AssertionError

        def options(self, **options: Any) -> ActorMaker[P, C]:
            """Return the class with other options of its actors."""
            raise AssertionError

        def group(self, extents: Any, /, *args: Any, **options: Any) -> Any:
            """Make a group of actors."""
