"""Groups: actors of one class in a mesh, called together.

    group = spawn({"hosts": 2, "gpus": 4}, Trainer, config)
    values = get(group.step.call(batch))            # a ValueMesh: one result for each member
    group.slice(hosts=0).load.broadcast(path)       # fire and forget
    score = get(group.evaluate.choose(batch))       # one member, the least busy

A call goes straight to each member, so that what one caller asks of the group is done by each member in that
caller's order. A large argument for more than 8 members is passed on from worker to worker (``fanout.py``).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

from actorrpc.actors.actor_class import ActorClass, offer_class
from actorrpc.actors.group_calls import (
    Crew,
    Gathering,
    GroupMethod,
    GroupStream,
    handles_of,
    route_of,
    title_of,
)
from actorrpc.actors.mesh import Mesh, Point, ValueMesh
from actorrpc.actors.object_ref import ObjectRef
from actorrpc.actors.options import CallOptions
from actorrpc.core.calls import CURRENT
from actorrpc.errors import ActorError, ConfigError, WrongTypeError
from actorrpc.futures import Future, collect_all

if TYPE_CHECKING:
    from actorrpc.actors.handle import ActorHandle
    from actorrpc.actors.methods import ClassInfo

__all__ = ["ActorGroup", "GroupMethod", "GroupStream", "current_rank", "group", "spawn"]

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")
PerRank: TypeAlias = Callable[[Point], tuple[tuple[Any, ...], Mapping[str, Any]]]
Options: TypeAlias = Mapping[str, Any] | Callable[[Point], Mapping[str, Any]]
_Slice: TypeAlias = slice  # in the classes, `slice` is the method

_ASK_S: Final = 10.0  # how long a supervisor may take to answer


# -- making groups ------------------------------------------------------------------------------------------


def spawn(
    shape: Mapping[str, int] | int,
    cls: type[C] | ActorClass[..., C],
    *args: Any,
    per_rank: PerRank | None = None,
    options: Options | None = None,
    **kwargs: Any,
) -> ActorGroup[C]:
    """Make a group of actors of one class, one for each place of a mesh; returns at once.

    Inside a member :func:`current_rank` says where it is, in the constructor, too.

    Args:
        shape: the dimensions of the mesh and their extents, or just a number of actors.
        cls: the class, decorated with ``@remote`` or not.
        args, kwargs: the constructor's arguments, the same for all.
        per_rank: a function of the member's point; returns ``(args, kwargs)`` which follow those for all.
        options: of the actors, as for ``Cls.options(...)``; or a function of the member's point that returns them,
            ``lambda point: {"worker": f"worker{point.rank}"}``.

    Raises:
        TypeError: the constructor does not take these arguments.
        ConfigError: the shape or an option is wrong.
    """
    mesh = Mesh(shape)
    actor_class: ActorClass[..., C] = cls if isinstance(cls, ActorClass) else ActorClass(cls)
    if options is not None and not callable(options):
        if not isinstance(options, Mapping):
            raise WrongTypeError(
                f"options must be a dict of options, or a function of a point, not {options!r}"
            )
        if mesh.size > 1 and options.get("name") is not None:
            raise ConfigError(
                f"{mesh.size} actors cannot have the one name {options['name']!r}: give a function, "
                'options=lambda point: {"name": f"trainer{point.rank}"}'
            )

    def make(point: Point) -> ActorHandle[C]:
        own_args, own_kwargs = args, kwargs
        if per_rank is not None:
            more_args, more_kwargs = _checked_arguments(per_rank(point))
            own_args, own_kwargs = (*args, *more_args), {**kwargs, **more_kwargs}
        given = options(point) if callable(options) else options
        made = actor_class.options(**given) if given else actor_class
        placed = replace(made._actorrpc_options, place=point)
        return made._with(placed, made._actorrpc_alias).remote(*own_args, **own_kwargs)

    handles: list[ActorHandle[C]] = []
    for point in mesh:
        try:
            handles.append(make(point))
        except Exception as error:
            error.add_note(f"while {point} of a group of {mesh.size} was made")
            raise
    info = route_of(handles[0]).info
    return ActorGroup(Crew(mesh, handles, info, make), mesh)


def _checked_arguments(found: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if (
        isinstance(found, tuple)
        and len(found) == 2
        and isinstance(found[0], (tuple, list))
        and isinstance(found[1], Mapping)
    ):
        return found
    raise WrongTypeError(
        f"per_rank must return (args, kwargs), a tuple and a dict, not {found!r}: write ((value,), {{}})"
    )


def group(
    cls: type[C] | ActorClass[..., C],
    extents: Mapping[str, int] | int,
    /,
    *args: Any,
    per_rank: PerRank | None = None,
    options: Options | None = None,
    **kwargs: Any,
) -> ActorGroup[C]:
    """Make a group: ``Cls.group(n, ...)``. The same as :func:`spawn`, with the class first."""
    return spawn(extents, cls, *args, per_rank=per_rank, options=options, **kwargs)


offer_class("group", group)


def current_rank() -> Point:
    """Return the place of the actor whose code runs here in its group, as it was made.

    It is a mapping of the dimensions to coordinates, with ``.rank``, ``.size`` and ``.extents``. Works in the
    constructor, in methods and in functions called by :func:`actorrpc.call`; it does not in threads of one's own.

    Raises:
        ActorError: no actor runs here, or it was made by itself.
    """
    execution = CURRENT.get()
    actor = execution.actor if execution is not None else None
    spec = actor.spec if actor is not None else None
    place = spec.options.place if spec is not None else None
    if place is None:
        what = (
            "the actor was not made by spawn() or Cls.group()" if spec is not None else "no actor runs here"
        )
        raise ActorError(f"current_rank() is for members of a group, and {what}")
    return cast(Point, place)


# -- the group ------------------------------------------------------------------------------------------------


class ActorGroup(Generic[C]):
    """Actors of one class in a mesh, or a slice of such a group. Thread-safe.

    ``group.method`` is a :class:`GroupMethod`: ``group.method.call(...)``, ``.call_one``, ``.choose``, ``.broadcast``
    and ``.stream``. ``group.call("method", ...)`` and so on are the same; there the method may also be given as
    ``Cls.method``, with which type checkers know arguments and results.

    Where the class has a method of a name that is used here, the class wins; ``ActorGroup.slice(group, hosts=0)`` still
    works. The members live as long as there is a group, a slice or a handle that refers to them. A group can be sent
    in arguments and results.
    """

    __slots__ = ("_crew", "_given", "_mesh", "_return_exceptions")

    def __init__(
        self,
        crew: Crew[C],
        mesh: Mesh,
        given: Mapping[str, Any] | None = None,
        return_exceptions: bool = False,
    ) -> None:
        self._crew = crew
        self._mesh = mesh
        self._given = dict(given or {})
        self._return_exceptions = return_exceptions

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> GroupMethod[..., Any]: ...

    else:

        def __getattribute__(self, name):
            if name[:1] != "_" and name in object.__getattribute__(self, "_crew").info.methods:
                return GroupMethod(self, name)
            return object.__getattribute__(self, name)

        def __getattr__(self, name):
            if name in ActorGroup.__slots__ or (name[:2] == "__" and name[-2:] == "__"):
                raise AttributeError(
                    name
                )  # of a group that is only half made; or what Python looks for anywhere
            return _method(self, name)

    # -- what it is --------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """The mesh of this group, or slice."""
        return self._mesh

    @property
    def extents(self) -> Mapping[str, int]:
        """How many members there are in each dimension."""
        return self._mesh.extents

    @property
    def size(self) -> int:
        """The number of members."""
        return self._mesh.size

    @property
    def handles(self) -> ValueMesh[ActorHandle[C]]:
        """The handles of the members, as they are now."""
        return ValueMesh(self._mesh, handles_of(self))

    def __len__(self) -> int:
        return self._mesh.size

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[ActorHandle[C]]:
        """Iterate over the handles of the members, in order of rank."""
        return iter(handles_of(self))

    def slice(self, **where: int | _Slice) -> ActorGroup[C]:
        """Return a part of the group, by the names of dimensions: ``group.slice(hosts=0, gpus=slice(0, 2))``.

        Arguments and errors are those of :meth:`Mesh.slice`. Its members are those of the group.
        """
        return ActorGroup(self._crew, self._mesh.slice(**where), self._given, self._return_exceptions)

    def __call__(self, **where: int | _Slice) -> ActorGroup[C]:
        """The same as :meth:`slice`: ``group(hosts=0)``."""
        return ActorGroup.slice(self, **where)

    def flatten(self, label: str = "rank") -> ActorGroup[C]:
        """Return the same members in one dimension."""
        return ActorGroup(self._crew, self._mesh.flatten(label), self._given, self._return_exceptions)

    def options(self, *, return_exceptions: bool | None = None, **options: Any) -> ActorGroup[C]:
        """Return the same group with other options of its calls. Arguments as for :meth:`GroupMethod.options`."""
        given = CallOptions.check({**self._given, **options})
        keep = self._return_exceptions if return_exceptions is None else bool(return_exceptions)
        return ActorGroup(self._crew, self._mesh, given, keep)

    def restart(self, rank: int | None = None, **coords: int) -> ActorHandle[C]:
        """Make a member anew: its actor is killed, and another one takes its place, here and in all slices.

        It is made as the first one was, with the same arguments. Calls that were under way to the old one fail with
        ActorDiedError. Handles of the old one, and groups that have been sent to other workers, still mean that.

        Args:
            rank: which one; or its coordinates.

        Returns:
            The new member's handle.

        Raises:
            ConfigError: this group came from another worker: ask whoever spawned it.
            IndexError: there is no such member.
        """
        crew = self._crew
        if crew.make is None:
            raise ConfigError(
                f"{self!r} came from another worker: members are restarted by whoever spawned the group"
            )
        if rank is None:
            rank = self._mesh.rank_of(**coords)
        elif coords:
            raise ConfigError("give a rank or coordinates, not both")
        at = self._mesh.origin_ranks[self._mesh.coords_of(rank).rank]
        _kill([crew.handles[at]])
        made = crew.make(crew.mesh.coords_of(at))
        crew.handles[at] = made
        return made

    def kill(self) -> None:
        """Kill all members of this group, or slice, at once. What they were doing fails with ActorDiedError.

        Raises:
            RpcTimeoutError: a worker that looks after members does not answer within 10 s.
        """
        _kill(handles_of(self))

    def ready(self) -> ObjectRef[None]:
        """Return an ObjectRef that is complete when all members have been constructed.

        It fails as soon as one cannot be, with an ActorDiedError that says why and whose note says which one.
        """
        futures = [route_of(handle).located() for handle in handles_of(self)]
        gathering = Gathering(self, f"ready({title_of(self)})", False)
        gathering.start(futures)
        nothing: Future[None] = gathering.future.then(_look)
        return ObjectRef(nothing, label=gathering.label)

    # -- calling -------------------------------------------------------------------------------------

    def endpoint(self, name: str) -> GroupMethod[..., Any]:
        """Return a method of the group by name.

        Raises:
            AttributeError: the class has none of that name.
        """
        return _method(self, name)

    @overload
    def call(
        self, method: Callable[Concatenate[C, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> ObjectRef[ValueMesh[R]]: ...
    @overload
    def call(self, method: str, *args: Any, **kwargs: Any) -> ObjectRef[ValueMesh[Any]]: ...
    def call(self, method: Any, *args: Any, **kwargs: Any) -> ObjectRef[ValueMesh[Any]]:
        """Call a method of all members: see :meth:`GroupMethod.call`."""
        return _method(self, method).call(*args, **kwargs)

    @overload
    def call_one(
        self, method: Callable[Concatenate[C, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> ObjectRef[R]: ...
    @overload
    def call_one(self, method: str, *args: Any, **kwargs: Any) -> ObjectRef[Any]: ...
    def call_one(self, method: Any, *args: Any, **kwargs: Any) -> ObjectRef[Any]:
        """Call a method of the only member: see :meth:`GroupMethod.call_one`."""
        return _method(self, method).call_one(*args, **kwargs)

    @overload
    def choose(
        self, method: Callable[Concatenate[C, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> ObjectRef[R]: ...
    @overload
    def choose(self, method: str, *args: Any, **kwargs: Any) -> ObjectRef[Any]: ...
    def choose(self, method: Any, *args: Any, **kwargs: Any) -> ObjectRef[Any]:
        """Call a method of one member, the least busy: see :meth:`GroupMethod.choose`."""
        return _method(self, method).choose(*args, **kwargs)

    def broadcast(self, method: Any, *args: Any, **kwargs: Any) -> None:
        """Call a method of all members and forget it: see :meth:`GroupMethod.broadcast`."""
        _method(self, method).broadcast(*args, **kwargs)

    @overload
    def stream(
        self, method: Callable[Concatenate[C, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> GroupStream[R]: ...
    @overload
    def stream(self, method: str, *args: Any, **kwargs: Any) -> GroupStream[Any]: ...
    def stream(self, method: Any, *args: Any, **kwargs: Any) -> GroupStream[Any]:
        """Call a method of all members and take the results as they come: see :meth:`GroupMethod.stream`."""
        return _method(self, method).stream(*args, **kwargs)

    # -- Python --------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<ActorGroup of {title_of(self)}>"

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._crew.info.methods})

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (
            dict(self._mesh.extents),
            handles_of(self),
            self._crew.info,
            self._given,
            self._return_exceptions,
        )


def _rebuild(
    extents: dict[str, int],
    handles: list[ActorHandle[Any]],
    info: ClassInfo,
    given: dict[str, Any],
    return_exceptions: bool,
) -> ActorGroup[Any]:
    mesh = Mesh._made(extents, tuple(range(len(handles))))
    return ActorGroup(Crew(mesh, handles, info, None), mesh, given, return_exceptions)


def _method(group: ActorGroup[Any], method: Any) -> GroupMethod[..., Any]:
    name = method if isinstance(method, str) else getattr(method, "__name__", None)
    if not isinstance(name, str):
        raise WrongTypeError(f"a method must be given by name, or as Cls.method, not as {method!r}")
    methods = group._crew.info.methods
    if name not in methods:
        close = difflib.get_close_matches(name, methods, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"it has: {', '.join(methods)}"
        raise AttributeError(f"{group._crew.info.name} has no method {name!r}; {hint}")
    return GroupMethod(group, name)


def _look(done: Future[Any]) -> None:
    done.value()


def _kill(handles: list[ActorHandle[Any]]) -> None:
    """Have actors killed, and wait until those who look after them have seen to it."""
    asked = [route_of(handle).kill(True) for handle in handles]
    collect_all(asked).wait(_ASK_S)
    for future in asked:
        future.acknowledge()  # whoever looked after it is gone, and so is the actor
