"""Calls to groups: a method of all members of a group, and what becomes of their results.

``groups.py`` has the groups themselves; this is what is behind ``group.method``.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

from actorrpc.actors.fanout import share
from actorrpc.actors.mesh import Mesh, Point, ValueMesh
from actorrpc.actors.object_ref import ObjectRef
from actorrpc.actors.options import CallOptions
from actorrpc.actors.runtime import runtime
from actorrpc.actors.waits import Completed, as_completed
from actorrpc.core.exception_parts import add_note
from actorrpc.core.exception_text import notes_of
from actorrpc.errors import CancelledError, ConfigError, WrongTypeError
from actorrpc.futures import Future

if TYPE_CHECKING:
    from actorrpc.actors.groups import ActorGroup
    from actorrpc.actors.handle import ActorHandle, ActorMethod
    from actorrpc.actors.methods import ClassInfo
    from actorrpc.actors.route import Route

__all__ = ["Crew", "Gathering", "GroupMethod", "GroupStream", "handles_of", "route_of", "title_of"]

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("actorrpc.actors")


def route_of(handle: ActorHandle[Any]) -> Route:
    """Return the route of a handle."""
    return cast("Route", handle.__dict__["_actorrpc_route"])


class Crew(Generic[C]):
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
        self.make = make  # None in a group that came from another worker
        self.turns = itertools.count()


def handles_of(group: ActorGroup[C]) -> list[ActorHandle[C]]:
    """Return the handles of the members of a group, or slice, in order of rank."""
    handles = group._crew.handles
    return [handles[at] for at in group._mesh.origin_ranks]


def title_of(group: ActorGroup[Any]) -> str:
    """Say, for messages, how many members there are, of which class and in which dimensions."""
    extents = ", ".join(f"{label}={extent}" for label, extent in group._mesh.extents.items())
    return f"{group._mesh.size} {group._crew.info.name}" + (f" ({extents})" if extents else "")


class GroupMethod(Generic[P, R]):
    """A method of all members of a group. Thread-safe and cheap."""

    __slots__ = ("_given", "_group", "_name", "_return_exceptions")

    def __init__(
        self,
        group: ActorGroup[Any],
        name: str,
        given: Mapping[str, Any] | None = None,
        return_exceptions: bool | None = None,
    ) -> None:
        self._group = group
        self._name = name
        self._given = group._given if given is None else given
        self._return_exceptions = group._return_exceptions if return_exceptions is None else return_exceptions

    def options(self, *, return_exceptions: bool | None = None, **options: Any) -> GroupMethod[P, R]:
        """Return the method with other options of its calls.

        Args:
            return_exceptions: :meth:`call` waits for all members and never fails: what a member failed with stands in
                its place among the results.
            options: as for ``handle.method.options(...)``: ``timeout``, ``priority`` and so on.

        Raises:
            ConfigError: an option is unknown or wrong.
        """
        given = CallOptions.check({**self._given, **options})
        keep = self._return_exceptions if return_exceptions is None else bool(return_exceptions)
        return GroupMethod(self._group, self._name, given, keep)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[ValueMesh[R]]:
        """Call the method of all members.

        Returns:
            An ObjectRef of a :class:`ValueMesh` with their results. It fails with the first failure of a member, at
            once; a note on the error, and its attribute ``rank``, say which member that was. Cancelling it
            cancels all.

        Raises:
            TypeError: the method does not take these arguments. Nothing was sent.
            SerializationError: an argument cannot be sent. Nothing was sent.
            WrongTypeError: the method gives streams, or several ObjectRefs: call the members one by one.
        """
        gathering = Gathering(self._group, self._label(), self._return_exceptions)
        gathering.start(self._send("call", args, kwargs))
        return ObjectRef(gathering.future, label=gathering.label)

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]:
        """Call the method of the only member of this group, or slice.

        Returns:
            The ObjectRef of the member's result.

        Raises:
            ConfigError: there are several members, or none.
        """
        handles = handles_of(self._group)
        if len(handles) != 1:
            raise ConfigError(
                f"call_one() is for a group of one member, and this one has {len(handles)}: slice it, as in "
                "group.slice(rank=0), or use choose() or call()"
            )
        return cast("ObjectRef[R]", self._of(handles[0]).remote(*args, **kwargs))

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]:
        """Call the method of one member: the one with the fewest calls of this process under way, in turn.

        Members that are known to be dead are left out, unless all are.

        Returns:
            The ObjectRef of the member's result.

        Raises:
            ConfigError: there is no member.
        """
        handles = handles_of(self._group)
        if not handles:
            raise ConfigError(f"there is no member to choose in {self._group!r}")
        turn = next(self._group._crew.turns)
        in_turn = [handles[(turn + at) % len(handles)] for at in range(len(handles))]
        chosen = min(in_turn, key=_busyness)
        return cast("ObjectRef[R]", self._of(chosen).remote(*args, **kwargs))

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call the method of all members and wait for nothing. Failures are logged. Errors as for :meth:`call`."""
        label = self._label()
        group = self._group
        for at, ref in enumerate(self._send("broadcast", args, kwargs)):
            # Not ref._final(): nobody wants the values, so large ones are not fetched.
            ref._ask().add_done_callback(partial(_log_failure, label, group, at))

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> GroupStream[R]:
        """Call the method of all members and return an iterator over ``(point, ref)`` in the order of their results.

        Failed calls come as well: ``get(ref)`` raises what they failed with. Errors as for :meth:`call`.
        """
        return GroupStream(self._group._mesh, self._send("stream", args, kwargs))

    def _label(self) -> str:
        return f"{self._group._crew.info.name}.{self._name} of {title_of(self._group)}"

    def _of(self, handle: ActorHandle[Any]) -> ActorMethod[..., Any]:
        method: ActorMethod[..., Any] = getattr(handle, self._name)
        return method.options(**self._given) if self._given else method

    def _send(self, how: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ObjectRef[R]]:
        """Make the calls. Nothing has been sent where it raises; what fails later is in the ObjectRefs."""
        methods = [self._of(handle) for handle in handles_of(self._group)]
        if not methods:
            return []
        first = methods[0]
        if not first._simple:
            raise WrongTypeError(
                f"{how}() is for methods with one result, and {self._label()} gives a stream, or num_returns: call the "
                "members one by one, as in [handle.method.remote(...) for handle in group]"
            )
        first._info.check(args, kwargs)
        shared = (
            share(
                args,
                kwargs,
                [route_of(handle).located() for handle in handles_of(self._group)],
                runtime().agent.name,
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
                if not refs:
                    raise
                refs.append(ObjectRef.failed(error, label=self._label()))
        return refs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: say how the group is to be called.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"a method of a group cannot be called directly: instead of group.{self._name}(...) write "
            f"group.{self._name}.call(...), .call_one, .choose, .broadcast or .stream"
        )

    def __repr__(self) -> str:
        return f"<{self._name} of {self._group!r}>"


def _busyness(handle: ActorHandle[Any]) -> tuple[bool, int]:
    route = route_of(handle)
    return route._line.death is not None, route.pending


def _log_failure(label: str, group: ActorGroup[Any], at: int, done: Future[Any]) -> None:
    done.acknowledge()
    if done._error is not None:
        _log.error("broadcast of %s failed for %s: %r", label, _who(group, at), done._error)


def _who(group: ActorGroup[Any], at: int) -> str:
    """Say which member of a group it is, and where in the whole group if that is a slice."""
    point = group._mesh.coords_of(at)
    whole = group._crew.mesh
    if whole == group._mesh:
        return str(point)
    return f"{point} of the slice, {whole.coords_of(group._mesh.origin_ranks[at])} of the whole group"


class Gathering:
    """Collects the outcomes of calls to all members into one. The source of its future, as a call is of its own."""

    __slots__ = ("_futures", "_group", "_left", "_return_exceptions", "future", "label")

    def __init__(self, group: ActorGroup[Any], label: str, return_exceptions: bool) -> None:
        self._group = group
        self._return_exceptions = return_exceptions
        self._futures: list[Future[Any]] = []
        self._left: list[None] = []
        self.label = label
        self.future: Future[ValueMesh[Any]] = Future()
        self.future.label = f"the call of {label}"

    def start(self, parts: Sequence[ObjectRef[Any] | Future[Any]]) -> None:
        """Begin to collect."""
        self._futures = [part._final() if isinstance(part, ObjectRef) else part for part in parts]
        self._left = [None] * len(self._futures)
        self.future._source = self
        for at, future in enumerate(self._futures):
            future.add_done_callback(partial(self._ended, at))
        if not self._futures:
            self._succeed()

    def _ended(self, at: int, done: Future[Any]) -> None:
        error = done._error
        if error is not None:
            done.acknowledge()
            _annotate(error, self._group, at)
            if not self._return_exceptions:
                if self.future._claim():
                    self.future._finish(None, error)
                return
        try:
            self._left.pop()
        except IndexError:
            return
        if not self._left:
            self._succeed()

    def _succeed(self) -> None:
        if self.future._claim():
            values = (future._value if future._error is None else future._error for future in self._futures)
            self.future._finish(ValueMesh(self._group._mesh, values), None)

    def drive(self, _deadline: float | None) -> None:
        """Send what is gathered. Whoever waits sleeps then: reading the reply of one could miss another's failure."""
        self.flush()

    def flush(self) -> None:
        """Send what is still gathered for any member."""
        for future in self._futures:
            source = future._source
            if source is not None:
                source.flush()
                return  # there is one agent, and it sends everything

    def cancel(self) -> bool:
        """Give all calls up that are under way."""
        if not self.future._claim():
            return False
        self.future._finish(None, CancelledError(f"{self.future.label} was cancelled", maybe_executed=None))
        for future in self._futures:
            future.cancel()
        return True


def _annotate(error: BaseException, group: ActorGroup[Any], at: int) -> None:
    """Note on an error which member it comes from."""
    note = f"raised by {_who(group, at)}, of {title_of(group)}"
    if note not in notes_of(error):
        add_note(error, note)
    try:
        error.rank = at  # type: ignore[attr-defined]
    except Exception:  # its class has slots, or lets nothing be set
        pass


class GroupStream(Generic[R]):
    """The results of :meth:`GroupMethod.stream` as they come: ``(point, ref)``, for ``for`` and for ``async for``."""

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
