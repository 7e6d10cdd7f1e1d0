"""Outcomes: what ``remote(...)`` gives for a call, by how many values it is to return."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from actorrpc.actors.methods import MethodInfo
from actorrpc.actors.object_ref import ObjectRef
from actorrpc.actors.options import CallOptions
from actorrpc.actors.ref_generator import Again, ObjectRefGenerator
from actorrpc.futures import Future

if TYPE_CHECKING:
    from actorrpc.core.peer import Peer

__all__ = ["Explains", "Whole", "shaped"]


class Explains(Protocol):
    """Says what the end of a stream's worker means: a route."""

    def explain(
        self, method: MethodInfo, options: CallOptions, error: BaseException, peer: Peer | None
    ) -> BaseException | Future[Any]:
        """See :meth:`Route.explain`."""


def shaped(
    future: Future[Any],
    info: MethodInfo,
    options: CallOptions,
    label: object = None,
    route: Explains | None = None,
    again: Again | None = None,
) -> Any:
    """Return what ``remote`` gives for a call: an ObjectRef, several, none, or a stream.

    Args:
        again: makes a call again that gives a stream.
    """
    count = options.num_returns
    if count == "streaming" or info.streams:
        translate = None if route is None else partial(route.explain, info, options)
        return ObjectRefGenerator(future, translate=translate, again=again)
    if count == 1:
        return ObjectRef(future, label=label)
    return [ObjectRef(each, label=label) for each in _split(future, count)] if count else None


class Whole:
    """The source of futures that another future completes: progress on any of them is progress on that call."""

    __slots__ = ("behind",)

    def __init__(self, future: Future[Any]) -> None:
        self.behind = future  # the search for deadlocks looks here

    def drive(self, deadline: float | None) -> None:
        """Make progress on the call."""
        source = self.behind._source
        if source is not None:
            source.drive(deadline)

    def flush(self) -> None:
        """Send the call."""
        source = self.behind._source
        if source is not None:
            source.flush()

    def cancel(self) -> bool:
        """Give the call up, and with it all that waits for it."""
        return self.behind.cancel()


def _split(future: Future[Any], count: int) -> list[Future[Any]]:
    """Return one future for each value that the call returns."""
    parts: list[Future[Any]] = [Future() for _ in range(count)]
    source = Whole(future)
    for at, part in enumerate(parts):
        part.label = f"value {at} of {future.label}"
        part._source = source

    def done(whole: Future[Any]) -> None:
        error: BaseException | None = None
        values: list[Any] = [None] * count
        try:
            result = whole.value()
            if isinstance(result, (tuple, list)) and len(result) == count:
                values = list(result)
            else:
                shown = len(result) if isinstance(result, (tuple, list)) else f"one {type(result).__name__}"
                error = ValueError(
                    f"{whole.label} was to return {count} values (num_returns), but returned {shown}"
                )
        except BaseException as raised:
            error = raised
        report = None
        for part, value in zip(parts, values, strict=True):
            if part._claim():
                part._report = report  # one failure: looking at any part will do
                part._finish(None if error is not None else value, error)
                report = part._report

    future.add_done_callback(done)
    return parts
