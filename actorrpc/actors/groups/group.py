"""Groups: actors of one class in a mesh, called together.

    group = spawn({"hosts": 2, "gpus": 4}, Trainer, config)
    values = get(group.step.call(batch))            # a ValueMesh: one result for each member
    group.slice(hosts=0).load.broadcast(path)       # fire and forget
    score = get(group.evaluate.choose(batch))       # one member, the least busy

A call is sent directly to each member, so that each member gets the calls of one caller in order. A large argument for more
than 8 members is passed on from host to host (``broadcast.py``).
"""

from __future__ import annotations

import difflib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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

from actorrpc._exceptions import add_note, is_of_handler, notes_of
from actorrpc.actors.client.actor_class import ActorClass, offer_class, with_internal_options
from actorrpc.actors.client.handle import gives_one, route_of
from actorrpc.actors.groups.broadcast import share
from actorrpc.actors.groups.mesh import Mesh, Point, ValueMesh
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.wait import Completed, as_completed, gather
from actorrpc.actors.spec.options import CallOptions
from actorrpc.agent.calls import CURRENT
from actorrpc.errors import ActorError, ConfigError, WrongTypeError
from actorrpc.futures import Future, collect_all

if TYPE_CHECKING:
    from actorrpc.actors.client.handle import ActorHandle, ActorMethod
    from actorrpc.actors.spec.class_info import ClassInfo

__all__ = [
    "ActorGroup",
    "GroupMethod",
    "GroupStream",
    "current_rank",
    "group",
    "handles_of",
    "spawn",
]

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("actorrpc.actors")


class _Members(Generic[C]):
    """The members of a group and of all of its slices. A member is replaced in one atomic step."""

    __slots__ = ("handles", "info", "make", "mesh", "turns")

    def __init__(
        self,
        mesh: Mesh,
        handles: list[ActorHandle[C]],
        info: ClassInfo,
        make: Callable[[Point], ActorHandle[C]] | None,
    ) -> None:
        self.mesh = mesh
        self.handles = handles
        self.info = info
        self.make = make  # makes a member; None if another worker made the group
        self.turns = itertools.count()


@dataclass(frozen=True, slots=True)
class _View(Generic[C]):
    """A group, or a slice of a group: its members, their places, and the options of their calls.

    Methods of the members' class may hide attributes of :class:`ActorGroup`, but not attributes of this class.
    """

    members: _Members[C]
    mesh: Mesh
    given: Mapping[str, Any] = field(default_factory=dict)
    return_exceptions: bool = False

    @property
    def handles(self) -> list[ActorHandle[C]]:
        """The handles of the members, in order of rank."""
        handles = self.members.handles
        return [handles[at] for at in self.mesh.origin_ranks]

    @property
    def title(self) -> str:
        """The number, class and dimensions of the members, for messages."""
        extents = ", ".join(f"{label}={extent}" for label, extent in self.mesh.extents.items())
        return f"{self.mesh.size} {self.members.info.name}" + (f" ({extents})" if extents else "")

    def describe_member(self, at: int) -> str:
        """Name a member, for messages; in a slice, also by its place in the whole group."""
        point, whole = self.mesh.coords_of(at), self.members.mesh
        if whole == self.mesh:
            return str(point)
        return f"{point} of the slice, {whole.coords_of(self.mesh.origin_ranks[at])} of the whole group"

    def annotate(self, at: int, error: BaseException) -> bool:
        """Name a member in a note on the error of its call; return whether the call of the group fails with the error."""
        note = f"raised by {self.describe_member(at)}, of {self.title}"
        if note not in notes_of(error):
            add_note(error, note)
        try:
            error.rank = at  # type: ignore[attr-defined]
        except Exception:  # the error's class has slots, or forbids setting attributes
            pass
        return not self.return_exceptions

    def with_options(self, return_exceptions: bool | None, options: dict[str, Any]) -> _View[C]:
        """Return the same members with other options of their calls. Errors as for :meth:`GroupMethod.options`."""
        keep = self.return_exceptions if return_exceptions is None else bool(return_exceptions)
        return replace(self, given=CallOptions.check({**self.given, **options}), return_exceptions=keep)

    def method(self, method: Any) -> GroupMethod[..., Any]:
        """Return the method that is given by its name or as ``Cls.method``."""
        name = method if isinstance(method, str) else getattr(method, "__name__", None)
        if not isinstance(name, str):
            raise WrongTypeError(f"a method must be given by name, or as Cls.method, not as {method!r}")
        info = self.members.info
        if name not in info.methods:
            close = difflib.get_close_matches(name, info.methods, n=3)
            hint = (
                f"did you mean {' or '.join(map(repr, close))}?"
                if close
                else f"it has: {', '.join(info.methods)}"
            )
            raise AttributeError(f"{info.name} has no method {name!r}; {hint}")
        return GroupMethod(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (
            dict(self.mesh.extents),
            self.handles,
            self.members.info,
            self.given,
            self.return_exceptions,
        )


def _rebuild(
    extents: dict[str, int],
    handles: list[ActorHandle[Any]],
    info: ClassInfo,
    given: dict[str, Any],
    return_exceptions: bool,
) -> _View[Any]:
    mesh = Mesh.numbered(extents, tuple(range(len(handles))))
    return _View(_Members(mesh, handles, info, None), mesh, given, return_exceptions)


def handles_of(group: ActorGroup[C]) -> list[ActorHandle[C]]:
    """Return the handles of the members of a group, or slice, in order of rank."""
    return group._view.handles


class GroupMethod(Generic[P, R]):
    """A method of all members of a group. Thread-safe; cheap to make."""

    __slots__ = ("_name", "_view")

    def __init__(self, view: _View[Any], name: str) -> None:
        self._view = view
        self._name = name

    def options(self, *, return_exceptions: bool | None = None, **options: Any) -> GroupMethod[P, R]:
        """Return the method with other options of its calls.

        Args:
            return_exceptions: True: :meth:`call` waits for all members, and the error of a member that failed takes the
                member's place among the results. False: see :meth:`call`. None: as before.
            options: as for ``handle.method.options(...)``: ``timeout``, ``priority`` and so on.

        Raises:
            ConfigError: an option is unknown or wrong.
        """
        return GroupMethod(self._view.with_options(return_exceptions, options), self._name)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[ValueMesh[R]]:
        """Call the method of all members.

        Returns:
            An ObjectRef of a :class:`ValueMesh` with the results. It fails as soon as the call of a member fails; a note on the
            error, and the error's attribute ``rank``, name that member. Cancelling the ObjectRef cancels all calls.

        Raises:
            TypeError: the method does not take these arguments. Nothing was sent.
            SerializationError: an argument cannot be sent. Nothing was sent.
            WrongTypeError: the method returns a stream, or several ObjectRefs: call the members one by one.
        """
        view, label = self._view, self._label()
        refs = self._send("call", args, kwargs)
        future = gather(refs, f"the call of {label}", partial(ValueMesh[R], view.mesh), view.annotate)
        return ObjectRef(future, label=label)

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]:
        """Call the method of the only member of this group, or slice.

        Returns:
            The ObjectRef of the member's result.

        Raises:
            ConfigError: there are several members, or none.
        """
        handles = self._view.handles
        if len(handles) != 1:
            raise ConfigError(
                f"call_one() is for a group of one member, and this group has {len(handles)}: slice it, as in "
                "group.slice(rank=0), or use choose() or call()"
            )
        return cast("ObjectRef[R]", self._of(handles[0]).remote(*args, **kwargs))

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]:
        """Call the method of the member with the fewest unfinished calls of this process; members with equally many take turns.

        Members that are known to be dead are left out, unless all are dead.

        Returns:
            The ObjectRef of the member's result.

        Raises:
            ConfigError: there is no member.
        """
        handles = self._view.handles
        if not handles:
            raise ConfigError(f"there is no member to choose in {ActorGroup(self._view)!r}")
        turn = next(self._view.members.turns)
        in_turn = [handles[(turn + at) % len(handles)] for at in range(len(handles))]
        chosen = min(in_turn, key=_busyness)
        return cast("ObjectRef[R]", self._of(chosen).remote(*args, **kwargs))

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call the method of all members without waiting. Failures are logged. Errors as for :meth:`call`."""
        label, view = self._label(), self._view

        def ended(at: int, done: Future[Any]) -> None:
            done.acknowledge()
            if done.error is not None:
                _log.error("broadcast of %s failed for %s: %r", label, view.describe_member(at), done.error)

        for at, ref in enumerate(self._send("broadcast", args, kwargs)):
            # Not gather(): the values are not needed, so large values are not fetched.
            ref._request().add_done_callback(partial(ended, at))

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> GroupStream[R]:
        """Call the method of all members and return an iterator over ``(point, ref)`` in the order in which the calls end.

        Failed calls are included: ``get(ref)`` raises their error. Errors as for :meth:`call`.
        """
        return GroupStream(self._view.mesh, self._send("stream", args, kwargs))

    def _label(self) -> str:
        return f"{self._view.members.info.name}.{self._name} of {self._view.title}"

    def _of(self, handle: ActorHandle[Any]) -> ActorMethod[..., Any]:
        method: ActorMethod[..., Any] = getattr(handle, self._name)
        return method.options(**self._view.given) if self._view.given else method

    def _send(self, how: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ObjectRef[R]]:
        """Make the calls. An exception means that no call was sent; a later failure is in the ObjectRef of its call."""
        methods = [self._of(handle) for handle in self._view.handles]
        if not methods:
            return []
        first = methods[0]
        if not gives_one(first._info, first._options):
            raise WrongTypeError(
                f"{how}() is for methods with one result, and {self._label()} returns a stream, or several values: call the "
                "members one by one, as in [handle.method.remote(...) for handle in group]"
            )
        first._info.check(args, kwargs)
        shared = (
            share(
                args,
                kwargs,
                [route_of(handle).located() for handle in self._view.handles],
            )
            if args or kwargs
            else None
        )
        refs: list[ObjectRef[R]] = []
        for at, method in enumerate(methods):
            mine, named = (args, kwargs) if shared is None else shared[at]
            try:
                refs.append(method.remote(*mine, **named))
            except Exception as error:
                if not refs or is_of_handler(error):
                    raise
                refs.append(ObjectRef.failed(error, label=self._label()))
        return refs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise TypeError: a call has to say which members it is for.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"a method of a group cannot be called directly: instead of group.{self._name}(...) write "
            f"group.{self._name}.call(...), .call_one, .choose, .broadcast or .stream"
        )

    def __repr__(self) -> str:
        return f"<{self._name} of {ActorGroup(self._view)!r}>"


def _busyness(handle: ActorHandle[Any]) -> tuple[bool, int]:
    route = route_of(handle)
    return route.queue.fate.death is not None, route.pending


class GroupStream(Generic[R]):
    """The calls of :meth:`GroupMethod.stream` in the order in which they end, for ``for`` and for ``async for``."""

    def __init__(self, mesh: Mesh, refs: list[ObjectRef[R]]) -> None:
        self._points = {id(ref): point for ref, point in zip(refs, mesh, strict=True)}
        self._completed: Completed[ObjectRef[R]] = as_completed(refs)

    def __iter__(self) -> Iterator[tuple[Point, ObjectRef[R]]]:
        return self

    def __next__(self) -> tuple[Point, ObjectRef[R]]:
        ref = next(self._completed)
        return self._points[id(ref)], ref

    def __aiter__(self) -> AsyncIterator[tuple[Point, ObjectRef[R]]]:
        return self

    async def __anext__(self) -> tuple[Point, ObjectRef[R]]:
        ref = await anext(self._completed)
        return self._points[id(ref)], ref


PerRank: TypeAlias = Callable[[Point], tuple[tuple[Any, ...], Mapping[str, Any]]]
Options: TypeAlias = Mapping[str, Any] | Callable[[Point], Mapping[str, Any]]
_Slice: TypeAlias = slice  # in the body of ActorGroup, `slice` is a method

_ANSWER_S: Final = 10.0  # how long a supervisor may take to answer


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

    In the code of a member, the constructor included, :func:`current_rank` returns the member's place.

    Args:
        shape: the dimensions of the mesh and their extents, or just a number of actors.
        cls: the class, decorated with ``@remote`` or not.
        args, kwargs: the constructor's arguments, the same for all.
        per_rank: a function that takes the member's point and returns further ``(args, kwargs)`` for the constructor.
        options: options of the actors, as for ``Cls.options(...)``; or a function that takes the member's point and returns them:
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
        return with_internal_options(made, place=point).remote(*own_args, **own_kwargs)

    handles: list[ActorHandle[C]] = []
    for point in mesh:
        try:
            handles.append(make(point))
        except Exception as error:
            error.add_note(f"while {point} of a group of {mesh.size} was made")
            raise
    info = route_of(handles[0]).info
    return ActorGroup(_View(_Members(mesh, handles, info, make), mesh))


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
    """Return the place, in its group, of the actor that executes this code.

    The place is a mapping of the dimensions to coordinates, with ``.rank``, ``.size`` and ``.extents``. Works in the
    constructor, in methods and in functions called by :func:`actorrpc.call`, but not in other threads.

    Raises:
        ActorError: no actor runs here, or the actor was not made as a member of a group.
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
    and ``.stream``. ``group.call("method", ...)`` and so on do the same; their first argument may also be
    ``Cls.method``, by which type checkers find the types of arguments and results.

    A method of the members' class hides an attribute of this class with the same name; use ``ActorGroup.slice(group, hosts=0)``
    then. The members live as long as a group, a slice or a handle refers to them. A group can be sent in arguments and results.
    """

    __slots__ = ("_view",)

    def __init__(self, view: _View[C]) -> None:
        self._view = view

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> GroupMethod[..., Any]: ...

    else:

        def __getattribute__(self, name):
            if name[:1] != "_" and name in object.__getattribute__(self, "_view").members.info.methods:
                return GroupMethod(self._view, name)
            return object.__getattribute__(self, name)

        def __getattr__(self, name):
            if name in ActorGroup.__slots__ or (name[:2] == "__" and name[-2:] == "__"):
                # Unpickling has not set `_view` yet, or Python looks up a special method.
                raise AttributeError(name)
            return self._view.method(name)

    # -- properties --------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """The mesh of this group or slice."""
        return self._view.mesh

    @property
    def extents(self) -> Mapping[str, int]:
        """How many members there are in each dimension."""
        return self._view.mesh.extents

    @property
    def size(self) -> int:
        """The number of members."""
        return self._view.mesh.size

    @property
    def handles(self) -> ValueMesh[ActorHandle[C]]:
        """The handles of the members, as they are now."""
        return ValueMesh(self._view.mesh, self._view.handles)

    def __len__(self) -> int:
        return self._view.mesh.size

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[ActorHandle[C]]:
        """Iterate over the handles of the members, in order of rank."""
        return iter(self._view.handles)

    def slice(self, **where: int | _Slice) -> ActorGroup[C]:
        """Return a part of the group, by the names of dimensions: ``group.slice(hosts=0, gpus=slice(0, 2))``.

        Arguments and errors as for :meth:`Mesh.slice`. The slice has no actors of its own.
        """
        return ActorGroup(replace(self._view, mesh=self._view.mesh.slice(**where)))

    __call__ = slice  # group(hosts=0)

    def flatten(self, label: str = "rank") -> ActorGroup[C]:
        """Return the same members in one dimension."""
        return ActorGroup(replace(self._view, mesh=self._view.mesh.flatten(label)))

    def options(self, *, return_exceptions: bool | None = None, **options: Any) -> ActorGroup[C]:
        """Return the same group with other options of its calls. Arguments as for :meth:`GroupMethod.options`."""
        return ActorGroup(self._view.with_options(return_exceptions, options))

    def restart(self, rank: int | None = None, **coords: int) -> ActorHandle[C]:
        """Replace a member: kill its actor, and make another actor, in this group and in all slices.

        The new actor is made like the old actor; functions ``per_rank`` and ``options`` are called again. Calls of the old actor
        fail with ActorDiedError. Handles of the old actor, and groups that were sent to other workers, still refer to it.

        Args:
            rank: the rank of the member; or give its coordinates.

        Returns:
            The new member's handle.

        Raises:
            ConfigError: this group was received from another worker: restart members on the worker that spawned it.
            IndexError: there is no such member.
        """
        members, mesh = self._view.members, self._view.mesh
        if members.make is None:
            raise ConfigError(
                f"{self!r} came from another worker: members are restarted by the worker that spawned the group"
            )
        if rank is None:
            rank = mesh.rank_of(**coords)
        elif coords:
            raise ConfigError("give a rank or coordinates, not both")
        at = mesh.origin_ranks[mesh.coords_of(rank).rank]
        _kill([members.handles[at]])
        made = members.make(members.mesh.coords_of(at))
        members.handles[at] = made
        return made

    def kill(self) -> None:
        """Kill all members of this group or slice. Their calls fail with ActorDiedError.

        Raises:
            RpcTimeoutError: the worker of a supervisor does not answer within 10 s.
        """
        _kill(self._view.handles)

    def ready(self) -> ObjectRef[None]:
        """Return an ObjectRef that completes when all members were constructed.

        It fails as soon as a member cannot be made: the ActorDiedError says why, and a note on it names the member.
        """
        view = replace(self._view, return_exceptions=False)
        label = f"ready({view.title})"
        located = [route_of(handle).located() for handle in view.handles]
        future: Future[None] = gather(located, f"the call of {label}", lambda _: None, view.annotate)
        return ObjectRef(future, label=label)

    # -- calling -------------------------------------------------------------------------------------

    def endpoint(self, name: str) -> GroupMethod[..., Any]:
        """Return a method of the group by name.

        Raises:
            AttributeError: the class has no method of that name.
        """
        return self._view.method(name)

    @overload
    def call(
        self, method: Callable[Concatenate[C, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> ObjectRef[ValueMesh[R]]: ...
    @overload
    def call(self, method: str, *args: Any, **kwargs: Any) -> ObjectRef[ValueMesh[Any]]: ...
    def call(self, method: Any, *args: Any, **kwargs: Any) -> ObjectRef[ValueMesh[Any]]:
        """Call a method of all members: see :meth:`GroupMethod.call`."""
        return self._view.method(method).call(*args, **kwargs)

    @overload
    def call_one(
        self, method: Callable[Concatenate[C, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> ObjectRef[R]: ...
    @overload
    def call_one(self, method: str, *args: Any, **kwargs: Any) -> ObjectRef[Any]: ...
    def call_one(self, method: Any, *args: Any, **kwargs: Any) -> ObjectRef[Any]:
        """Call a method of the only member: see :meth:`GroupMethod.call_one`."""
        return self._view.method(method).call_one(*args, **kwargs)

    @overload
    def choose(
        self, method: Callable[Concatenate[C, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> ObjectRef[R]: ...
    @overload
    def choose(self, method: str, *args: Any, **kwargs: Any) -> ObjectRef[Any]: ...
    def choose(self, method: Any, *args: Any, **kwargs: Any) -> ObjectRef[Any]:
        """Call a method of one member, the least busy: see :meth:`GroupMethod.choose`."""
        return self._view.method(method).choose(*args, **kwargs)

    def broadcast(self, method: Any, *args: Any, **kwargs: Any) -> None:
        """Call a method of all members without waiting: see :meth:`GroupMethod.broadcast`."""
        self._view.method(method).broadcast(*args, **kwargs)

    @overload
    def stream(
        self, method: Callable[Concatenate[C, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> GroupStream[R]: ...
    @overload
    def stream(self, method: str, *args: Any, **kwargs: Any) -> GroupStream[Any]: ...
    def stream(self, method: Any, *args: Any, **kwargs: Any) -> GroupStream[Any]:
        """Call a method of all members, and iterate over the calls as they end: see :meth:`GroupMethod.stream`."""
        return self._view.method(method).stream(*args, **kwargs)

    # -- Python --------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<ActorGroup of {self._view.title}>"

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._view.members.info.methods})

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorGroup, (self._view,)


def _kill(handles: list[ActorHandle[Any]]) -> None:
    """Kill actors, and wait until their supervisors have confirmed it."""
    asked = [route_of(handle).kill(True) for handle in handles]
    collect_all(asked).wait(_ANSWER_S)
    for future in asked:
        future.acknowledge()  # an error means that the supervisor has ended, and the actor with it
