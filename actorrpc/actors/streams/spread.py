"""A generator with ``num_returns=n``: n ObjectRefs, each of one item, in place of a stream."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from actorrpc._exception_text import say
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.streams.consumer import ObjectRefGenerator
from actorrpc.errors import ActorError, CancelledError, PeerDiedError, ShutdownError
from actorrpc.futures import Future, InnerFuture, Progress

__all__ = ["spread", "take_each"]

T = TypeVar("T")

_log = logging.getLogger("actorrpc.actors")
# The errors of a stream whose worker or actor has ended. The caller has its values already, so these are not logged.
_ENDED: Final = (ActorError, CancelledError, PeerDiedError, ShutdownError)


def take_each(
    stream: ObjectRefGenerator[Any], item: Callable[[ObjectRef[Any]], bool], end: Callable[[], None]
) -> None:
    """Take the items of a stream as they come, on the threads that bring them; returns at once.

    Args:
        item: is given each; False: no more are wanted, and the stream is closed.
        end: called when there are no more.
    """
    while True:
        arrival = stream._arrival()
        if not arrival.completed:
            arrival.add_done_callback(lambda _: take_each(stream, item, end))
            return
        try:
            ref = stream.next(timeout=0)
        except StopIteration:
            end()
            return
        if not item(ref):
            stream.close()
            return


class _Parts(Progress):
    """The futures of a stream's first items, and their source."""

    __slots__ = ("_count", "_left", "_stream", "futures")

    def __init__(self, stream: ObjectRefGenerator[Any], count: int) -> None:
        self._stream = stream
        self._count = count
        consumer = stream._consumer
        self.futures: list[Future[Any]] = [InnerFuture() for _ in range(count)]
        for at, future in enumerate(self.futures):
            future.label = f"value {at} of {consumer.label}"
            future.awaits = (consumer,)
            future.source = self
        self._left = deque(self.futures)

    def item(self, ref: ObjectRef[Any]) -> bool:
        """Give an item to the next future; say whether the stream is still wanted."""
        came = ref._ask()
        try:
            future = self._left.popleft()
        except IndexError:  # one more than was asked for: nobody wants it, nor what is behind it
            error = came.error
            if error is not None and not isinstance(error, _ENDED):
                _log.error(
                    "%s has given %d values (num_returns), and then raised %s",
                    *self._said,
                    say(error, repr),
                )
            return False
        if came.error is not None:
            self._fail(came.error, future)
        else:
            future.try_complete(came.value_or_none)
        return True  # also behind the last one: the generator is to come to its end

    @property
    def _said(self) -> tuple[str, int]:
        return self._stream._consumer.label, self._count

    def end(self) -> None:
        """Fail what the stream has not given."""
        label, count = self._said
        left = len(self._left)
        if left:
            self._fail(
                ValueError(f"{label} was to give {count} values (num_returns), and gave {count - left}")
            )

    def _fail(self, error: BaseException, *more: Future[Any]) -> None:
        failed = deque(more)
        while self._left:
            try:
                failed.append(self._left.popleft())
            except IndexError:  # it was cancelled in this moment
                break
        for future in failed:
            future.follow(failed[0], error)  # one failure: looking at any of them will do

    # -- as the source of the futures ----------------------------------------------------------------------

    def flush(self) -> None:
        """Send what is still gathered."""
        self._stream._consumer.flush()

    def cancel(self) -> bool:
        """Give the call up, and with it all values that are not there."""
        if not self._left:
            return False
        self._fail(CancelledError(f"{self._said[0]} was cancelled"))
        self._stream.close()
        return True


def spread(stream: ObjectRefGenerator[T], count: int) -> list[ObjectRef[T]]:
    """Return ObjectRefs of a stream's first items, at once; each is complete when its item is there.

    What the generator raises, all raise that it has not given; so with the ValueError of one that ends too early. One that gives
    more is closed at the first of those.
    """
    parts = _Parts(stream, count)
    take_each(stream, parts.item, parts.end)
    return [ObjectRef(future) for future in parts.futures]
