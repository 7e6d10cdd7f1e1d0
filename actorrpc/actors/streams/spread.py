"""Calls of generators with ``num_returns=n``: the caller gets n ObjectRefs, one for each item, instead of a stream."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from actorrpc._exceptions import say
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.streams.consumer import ObjectRefGenerator
from actorrpc.errors import ActorError, CancelledError, PeerDiedError, ShutdownError
from actorrpc.futures import Future, InnerFuture, Progress

__all__ = ["for_each_item", "spread"]

T = TypeVar("T")

_log = logging.getLogger("actorrpc.actors")
# Errors because a worker or an actor has ended, or of a cancellation. They are not logged after the last requested item.
_ENDED: Final = (ActorError, CancelledError, PeerDiedError, ShutdownError)


def for_each_item(
    stream: ObjectRefGenerator[Any], item: Callable[[ObjectRef[Any]], bool], end: Callable[[], None]
) -> None:
    """Call ``item`` for each item of a stream: now, in this thread, for items that are here; later in the receiving threads.

    Args:
        item: called with the ObjectRef of each item, and of the error if the stream fails. If it returns False, the stream is
            closed.
        end: called when the stream has ended, also after an error; not called if ``item`` has returned False.
    """
    while True:
        arrival = stream._arrival()
        if not arrival.completed:
            arrival.add_done_callback(lambda _: for_each_item(stream, item, end))
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
    """The futures of a stream's first items, and their source: the object that flushes and cancels the stream for them."""

    __slots__ = ("_count", "_remaining", "_stream", "futures")

    def __init__(self, stream: ObjectRefGenerator[Any], count: int) -> None:
        self._stream = stream
        self._count = count
        consumer = stream._consumer
        self.futures: list[Future[Any]] = [InnerFuture() for _ in range(count)]
        for at, future in enumerate(self.futures):
            future.label = f"value {at} of {consumer.label}"
            future.awaits = (consumer,)
            future.source = self
        self._remaining = deque(self.futures)

    def item(self, ref: ObjectRef[Any]) -> bool:
        """Complete the next future with an item; return False if the stream can be closed."""
        came = ref._request()
        try:
            future = self._remaining.popleft()
        except IndexError:  # all futures are complete: discard the item, and let the caller close the stream
            error = came.error
            if error is not None and not isinstance(error, _ENDED):
                _log.error(
                    "%s has yielded %d values (num_returns), and then raised %s",
                    *self._label_and_count,
                    say(error, repr),
                )
            return False
        if came.error is not None:
            self._fail(came.error, future)
        else:
            future.try_complete(came.value_or_none)
        return True  # True for the last future as well, so that the generator may run to its end

    @property
    def _label_and_count(self) -> tuple[str, int]:
        return self._stream._consumer.label, self._count

    def on_end(self) -> None:
        """Fail the futures for which the stream had no item."""
        label, count = self._label_and_count
        left = len(self._remaining)
        if left:
            self._fail(
                ValueError(f"{label} must yield {count} values (num_returns), but yielded {count - left}")
            )

    def _fail(self, error: BaseException, *more: Future[Any]) -> None:
        failed = deque(more)
        while self._remaining:
            try:
                failed.append(self._remaining.popleft())
            except IndexError:  # another thread has removed the last future meanwhile
                break
        for future in failed:
            future.follow(failed[0], error)  # retrieving the error from one future marks it as seen for all

    # -- the source of the futures ----------------------------------------------------------------------

    def flush(self) -> None:
        """Send the gathered messages."""
        self._stream._consumer.flush()

    def cancel(self) -> bool:
        """Close the stream, and fail the futures of all items that have not arrived; False if all have arrived."""
        if not self._remaining:
            return False
        self._fail(CancelledError(f"{self._label_and_count[0]} was cancelled"))
        self._stream.close()
        return True


def spread(stream: ObjectRefGenerator[T], count: int) -> list[ObjectRef[T]]:
    """Return ObjectRefs of the first ``count`` items of a stream, without waiting. An ObjectRef completes when its item arrives.

    If the generator raises an exception, the ObjectRefs without an item raise this exception. If the generator ends before
    ``count`` items, they raise a ValueError. If it yields more items, item ``count + 1`` is discarded and the stream closed.
    """
    parts = _Parts(stream, count)
    for_each_item(stream, parts.item, parts.on_end)
    return [ObjectRef(future) for future in parts.futures]
