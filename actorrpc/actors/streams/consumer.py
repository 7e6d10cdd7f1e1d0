"""ObjectRefGenerators: the consuming end of a stream.

A :class:`_Consumer` waits for the result of the call, pulls items, and keeps them until the user takes them. Pending calls refer
to the consumer, but not to the user's :class:`ObjectRefGenerator`, so that the generator can be freed, which closes the stream.
``producer.py`` describes how streams work.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar

from actorrpc._exceptions import is_of_handler
from actorrpc.actors.context import runtime
from actorrpc.actors.refs.deadlines import deadline_of, time_left
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.refs.wait import Arrivals
from actorrpc.actors.streams.producer import (
    DONE,
    WINDOW_BYTES,
    Batch,
    Streams,
    StreamTicket,
    charge_of,
    close_stream,
    pull,
)
from actorrpc.actors.streams.stalls import Stall, StreamReader
from actorrpc.agent.calls import Execution, run_within
from actorrpc.agent.peers import Peer
from actorrpc.errors import CancelledError, DeadlockError, RpcTimeoutError, SerializationError
from actorrpc.futures import INTERRUPTED, Future, Progress, generation, interruption_point, lost_by_fork
from actorrpc.rpc import rref as rrefs
from actorrpc.serialization import codec, exceptions

__all__ = ["Again", "ObjectRefGenerator", "Translate"]

T = TypeVar("T")
R = TypeVar("R")

#: Returns the error to raise, or a future that fails with this error, for an error that ended a pull from the given worker (None:
#: the worker was not found).
Translate = Callable[[BaseException, "Peer | None"], "BaseException | Future[Any]"]

#: Repeats the call of a stream that failed with an error before its first item; returns None if the call is not repeated.
Again = Callable[[BaseException], "Future[Any] | None"]

_INFINITE = float("inf")


class _Over(Exception):
    """There are no more items."""


class _EndOfStream(Stall):
    """The target of a wait for the end of a stream, which may come although the waiting thread takes no items: see ``look()``."""

    __slots__ = ("consumer",)

    def __init__(self, consumer: _Consumer) -> None:
        self.consumer = consumer


class _Consumer(Stall, Progress):
    """The state of one stream on the side of its reader. Thread-safe.

    ``_lock`` guards all state that changes. It is re-entrant, because the garbage collector may run under it. While it is held,
    no foreign code is called, and no future is completed. The current step (the call, a pull, the translation of an error) is
    processed once, by a callback or by a waiting thread: whichever pops the step from the list ``_claim``.
    """

    def __init__(
        self, call: Future[Any], label: str, translate: Translate | None, again: Again | None
    ) -> None:
        self._references = rrefs.runtime()
        self._agent = self._references.agent
        self._translate = translate
        self._again = again  # None after the first item
        self.label = label
        self._lock = threading.RLock()
        self._call: Future[Any] | None = call
        self._claim: list[tuple[Future[Any], Callable[[Future[Any]], None]]] = []
        self._under_way = True  # a step has begun, and its result is not stored yet
        self._ticket: StreamTicket | None = None
        self._peer: Peer | None = None
        self._items: deque[Any] = deque()
        self._charge = 0  # the size of the items, in bytes
        self.reader = StreamReader()
        self._count = 0  # items that were taken
        self._ended = False  # no more items will arrive
        self._error: BaseException | None = None  # raised after the items
        self._closed = False
        # Number of waits for all items; unless it is 0, items are pulled even if more of them are here than fit in the window.
        self._whole = 0
        self._stuck = -1  # see look()
        self._generation = generation()
        self._arrival: Future[None] | None = None  # completes when pop_item() no longer returns None
        self._finished: Future[None] | None = None
        # The execution in which pulls are made: they must not be nested calls of the call that takes an item.
        self._apart = Execution(None, self._agent.self_peer, 0, _INFINITE, 0)
        self._follow(call, self._called)

    # -- the current step --------------------------------------------------------------------------------

    def _follow(self, step: Future[Any], then: Callable[[Future[Any]], None]) -> None:
        claim = [(step, then)]
        self._claim = claim
        step.add_done_callback(lambda _: self._take_up(claim))

    def _take_up(self, claim: list[tuple[Future[Any], Callable[[Future[Any]], None]]]) -> None:
        try:
            step, then = claim.pop()
        except IndexError:
            return
        step.acknowledge()
        then(step)
        self._wake()

    def drive(self, deadline: float | None) -> None:
        """Process steps in this thread, which waits for an item, until the item has arrived or the deadline has passed."""
        signal = self._arrival
        while signal is not None and not signal.completed:
            claim = self._claim
            try:
                step = claim[0][0]
            except IndexError:
                return
            if (
                signal.completed
            ):  # since the loop's condition was tested; the step in `claim` may be for a later item
                return
            step.drive(deadline)
            if not step.completed:
                return
            self._take_up(claim)

    def flush(self) -> None:
        """Send the gathered messages."""
        self._agent.flush()

    @property
    def waits_for(self) -> Future[Any] | tuple[Peer, int] | None:
        """The source of the next item: the call, until its result is here; then the producer's worker and the stream's number."""
        ticket, peer = self._ticket, self._peer
        return self._call if ticket is None or peer is None else (peer, ticket.stream)

    def _called(self, call: Future[Any]) -> None:
        self._call = None
        ticket = call.value_or_none
        if call.error is not None:
            self._fail(call.error)
        elif not isinstance(ticket, StreamTicket):
            self._fail(TypeError(f"{self.label} did not return a generator but a {type(ticket).__name__}"))
        else:
            try:
                self._peer = self._references.peer_of(ticket.worker)
            except Exception as error:
                self._failed(error)
                return
            with self._lock:
                self._ticket = ticket
                streams: Streams = runtime().streams
                streams.consumers[ticket.worker, ticket.stream] = self
                self._under_way = False
                closed = self._closed
            if closed:
                self._tell_closed(ticket)
            else:
                self._pull()

    def _wants(self) -> bool:
        """Whether to pull now. The lock is held.

        That is so if the stream is open, no pull is under way, and either a thread waits for all items, or the items that have
        arrived fill at most half of the window.
        """
        ticket = self._ticket
        return (
            ticket is not None
            and not self._under_way
            and not self._ended
            and not self._closed
            and (
                self._whole > 0
                or (
                    self._charge <= WINDOW_BYTES // 2
                    and (not ticket.limit or len(self._items) <= ticket.limit // 2)
                )
            )
        )

    def _pull(self) -> None:
        step: Future[Batch] = Future()
        step.label = f"the next items of {self.label}"
        step.awaits = (self,)
        with self._lock:
            if not self._wants():
                return
            ticket, taken = self._ticket, self._count
            if self._whole:
                taken += len(self._items)
            self._under_way = True
        assert ticket is not None
        self._follow(step, self._pulled)
        self._call_producer(step, pull, ticket.stream, taken)

    def _call_producer(self, future: Future[Any], function: Callable[..., Any], *args: Any) -> None:
        assert self._peer is not None
        try:
            run_within(self._apart, self._agent.call, self._peer, function, args, {}, 0, future)
            self._agent.flush()
        except Exception as error:  # the producer's worker has ended, or this worker shuts down
            future.try_fail(error)
            if is_of_handler(error):
                raise

    def _pulled(self, step: Future[Batch]) -> None:
        batch = step.value_or_none
        if batch is None:
            assert step.error is not None
            self._failed(step.error)
            return
        items, end = batch
        error: BaseException | None = None
        if end is not None and end != DONE:
            error = exceptions.load(end, loads=codec.loads)
        with self._lock:
            if self._closed:
                return
            self._items.extend(items)
            self._charge += sum(map(charge_of, items))
            if items:
                self._again = None
            if error is None:
                self._under_way = False
                if end is not None:
                    self._ended = True
                    self._translate = self._again = None  # these functions may keep the actor alive
        if error is not None:
            self._failed(error)
        else:
            # Wake the reader before the next pull, so that it does not wait for more items than these.
            self._wake()
            self._pull()

    def _failed(self, error: BaseException) -> None:
        """Handle a failed call or pull: repeat the call, or end the stream with the error that ``_translate`` returns."""
        again = self._again
        if again is not None:
            try:
                call = run_within(self._apart, again, error)
            except Exception as wrong:
                call, error = None, wrong
            if call is not None:
                self._begin_anew(call)
                return
        translate = self._translate
        if translate is not None:
            try:
                meaning = translate(error, self._peer)
            except Exception as wrong:
                meaning = wrong
            if isinstance(meaning, Future):
                self._follow(meaning, lambda done: self._fail(done.error or error))
                return
            error = meaning
        self._fail(error)

    def _begin_anew(self, call: Future[Any]) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._call, self._ticket, self._under_way = call, None, True
        if closed:
            call.cancel()
        else:
            self._follow(call, self._called)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if not self._ended:
                self._ended = True
                self._error = error
            self._translate = self._again = None

    def _wake(self) -> None:
        with self._lock:
            finished = self._finished if self._ended else None
            arrival = None
            if self._there:
                arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.try_complete(None)
        if finished is not None:
            self._complete(finished)

    # -- taking --------------------------------------------------------------------------------------------

    @property
    def _there(self) -> bool:
        """Whether there is an item, an error or the end to return. The lock is held."""
        return bool(self._items) or self._ended

    @property
    def over(self) -> bool:
        """Whether there are no more items to take."""
        with self._lock:
            return self._ended and not self._items and self._error is None

    def pop_item(self) -> tuple[Any, BaseException | None] | None:
        """Return the next item, packed as received, or the stream's error; None: nothing has arrived, wait for :meth:`arrival`.

        Raises:
            _Over: there are no more items.
        """
        self.reader.note()
        with self._lock:
            if not self._there:
                return None
            if not self._items:
                error, self._error = self._error, None
                if error is None:
                    raise _Over
                self._count += 1
                return None, error
            packed = self._items.popleft()
            self._charge -= charge_of(packed)
            self._count += 1
            wants = self._wants()
        if wants:
            self._pull()
        return packed, None

    def arrival(self) -> Future[None]:
        """Return a future that completes when there is an item, an error or the end for :meth:`pop_item`."""
        self.reader.note()
        with self._lock:
            there = self._there
            arrival = self._arrival
            if arrival is None:
                label = f"item {self._count} of {self.label}"
                # This process is a fork, so no item will arrive.
                if not there and self._generation != generation():
                    raise lost_by_fork(label)
                arrival = Future()
                arrival.label = label
                arrival.source = self
                arrival.awaits = (self,)
                if not there:
                    self._arrival = arrival
        if there:
            arrival.try_complete(None)
        return arrival

    @contextmanager
    def whole(self) -> Iterator[Future[None]]:
        """Pull all items while the context lasts, and keep them here; yields the future of :meth:`finished`."""
        self.reader.note()
        with self._lock:
            self._whole += 1
        try:
            self._pull()
            yield self.finished()
        finally:
            with self._lock:
                self._whole -= 1

    @property
    def count(self) -> int:
        """How many items were taken."""
        return self._count

    # -- the end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the stream. Idempotent; may send a message."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            dropped = list(self._items)
            self._items.clear()
            self._charge = 0
            ticket, call = self._ticket, self._call
            ended = self._ended
            if not ended:
                self._ended = True
            self._error = None
            self._translate = self._again = None
        del dropped
        if not ended:
            if ticket is not None:
                self._tell_closed(ticket)
            elif call is not None:
                call.cancel()  # if the call has begun, the producer's worker closes the stream
        self._wake()

    def _tell_closed(self, ticket: StreamTicket) -> None:
        if self._peer is not None and not self._agent.closed_down:
            closed: Future[None] = Future()
            closed.add_done_callback(Future.acknowledge)
            self._call_producer(closed, close_stream, ticket.stream)

    def finished(self) -> Future[None]:
        """Return a future that completes when the generator's end was received; it fails if the stream failed or was closed."""
        with self._lock:
            finished = self._finished
            if finished is None:
                finished = self._finished = Future()
                finished.label = f"the end of {self.label}"
                finished.awaits = (_EndOfStream(self),)
            ended = self._ended
        if ended:
            self._complete(finished)
        else:
            streams: Streams = runtime().streams
            streams.wake()
        return finished

    @property
    def awaits_end(self) -> bool:
        """Whether :meth:`finished` was called, and the stream has not ended."""
        return self._finished is not None and not self._ended

    def look(self) -> None:
        """Fail the future of :meth:`finished` if the reader waits for it, and would have to take items before the end can come.

        The search for deadlocks calls this once a second. The future fails if two calls in a row find the same state.
        """
        reader = self.reader
        waits = any(isinstance(each, _EndOfStream) and each.consumer is self for each in reader.waits_for())
        finished: Future[None] | None = None
        with self._lock:
            full = not self._under_way and not self._ended and not self._wants()
            stuck = self._count if waits and reader.certain and full else -1
            if stuck >= 0 and stuck == self._stuck:
                finished, self._finished = self._finished, None
            self._stuck = stuck
        if finished is not None:
            finished.try_fail(
                DeadlockError(
                    f"the end of {self.label} can never come: {reader.name} waits for it, and has to take the items that "
                    f"fill its buffer ({len(self._items)} of them are here). Take them first, or give a larger "
                    "max_buffered_items= (at most 64 MiB are buffered in any case)",
                    worker=self._agent.name,
                    maybe_executed=True,
                ),
            )

    def _complete(self, finished: Future[None]) -> None:
        if finished.claim():
            error = self._error
            if self._closed:
                error = CancelledError(f"{self.label} was closed before its end", maybe_executed=True)
            finished.conclude(None, error)
            finished.acknowledge()  # do not log: the reader of the items gets it


class _Items(Generic[R]):
    """Iterates over a stream. Thread-safe: each item is returned to one of the threads that iterate."""

    __slots__ = ("_consumer",)

    def __init__(self, consumer: _Consumer) -> None:
        self._consumer = consumer

    @staticmethod
    @abstractmethod
    def _made(consumer: _Consumer, packed: Any, error: BaseException | None) -> R:
        """Return the object that the iterator returns for an item, or for an error; or raise the error."""

    def _next(self, timeout: float | None) -> R:
        consumer, until = self._consumer, deadline_of(timeout)
        while True:
            if INTERRUPTED:
                interruption_point()
            try:
                item = consumer.pop_item()
            except _Over:
                raise StopIteration from None
            if item is not None:
                return self._made(consumer, *item)
            arrival = consumer.arrival()
            try:
                arrival.wait(time_left(until))
            except RpcTimeoutError:
                if not arrival.completed:
                    raise _late(consumer, timeout) from None

    async def __anext__(self) -> R:
        consumer, until = self._consumer, deadline_of(None)
        while True:
            if INTERRUPTED:
                interruption_point()
            try:
                item = consumer.pop_item()
            except _Over:
                raise StopAsyncIteration from None
            if item is not None:
                return self._made(consumer, *item)
            arrival = consumer.arrival()
            try:
                async with asyncio.timeout(time_left(until)):
                    await arrival
            except TimeoutError:
                if not arrival.completed:
                    raise _late(consumer, None) from None

    def __next__(self) -> R:
        return self._next(None)

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    def close(self) -> None:
        """Close the generator on the actor: its yield raises GeneratorExit. Discard the items not taken. Idempotent."""
        self._consumer.close()


class ObjectRefGenerator(_Items[ObjectRef[T]], Arrivals[T]):
    """The result of a call of a generator method: an iterator over ObjectRefs of the items that the generator yields.

    ``for ref in generator`` and ``async for ref in generator`` return each ObjectRef when its value has arrived.
    ``generator.values()`` iterates over the values, and ``get(generator)`` returns a list of all values. If the generator raises,
    the last ObjectRef raises the error. While 64 MiB of items (or ``max_buffered_items`` items) are produced and not taken, the
    generator pauses; it still counts as a running call, except in an async actor with the default ``max_concurrency``.
    Thread-safe: if several threads take items, each item is returned to one thread.

    The generator on the actor is closed (its yield raises GeneratorExit) when this object is closed or freed.

    Args:
        future: the call; completes with a StreamTicket.
        label: the name of the stream in messages; by default the label of the call.
        translate: returns the error to raise for an error that ended the stream; by default the same error.
        again: repeats the call if the stream has failed before its first item arrived; by default the call is not repeated.
    """

    __slots__ = ("__weakref__",)

    def __init__(
        self,
        future: Future[Any],
        *,
        label: str | None = None,
        translate: Translate | None = None,
        again: Again | None = None,
    ) -> None:
        super().__init__(_Consumer(future, str(future.label) if label is None else label, translate, again))

    def __del__(self) -> None:
        try:
            consumer = self._consumer
            if not consumer.over:
                agent = consumer._agent
                agent.clock.call_soon(partial(agent.submit, consumer.close))
        except AttributeError:  # construction failed, or the interpreter is shutting down
            pass

    # -- items ---------------------------------------------------------------------------------------------

    @staticmethod
    def _made(consumer: _Consumer, packed: Any, error: BaseException | None) -> ObjectRef[Any]:
        label = f"item {consumer.count - 1} of {consumer.label}"
        if error is None and type(packed) is Snapshot and packed.stored is None:
            try:
                packed = packed.open_once()  # no other object uses the snapshot's memory
            except Exception as caught:
                error = caught
        if error is not None:
            return ObjectRef.failed(error, label=label)
        return ObjectRef.of(packed, label=label)

    def next(self, *, timeout: float | None = None) -> ObjectRef[T]:
        """Wait for the next item, and return its ObjectRef, which is complete.

        Args:
            timeout: seconds; None: as long as the actor lives, within the deadline of the call that this thread executes.

        Raises:
            StopIteration: there are no more items.
            RpcTimeoutError: no item arrived in time; the stream continues, and the method can be called again.
        """
        return self._next(timeout)

    def values(self) -> _Values[T]:
        """Return an iterator (sync and async) over the values, which raises the generator's error after them."""
        return _Values(self)

    # -- the end -------------------------------------------------------------------------------------------

    def cancel(self) -> bool:
        """Close the stream; return False if it had ended, and all of its items were taken."""
        if self._consumer.over:
            return False
        self._consumer.close()
        return True

    def completed(self) -> ObjectRef[None]:
        """Return an ObjectRef that completes when the generator has ended and its last item was received.

        It raises the generator's error; CancelledError if the stream was closed before this call; DeadlockError if it can never
        end.
        """
        return ObjectRef(self._consumer.finished(), label=f"the end of {self._consumer.label}")

    def next_ready(self, timeout: float | None = 0) -> bool:
        """Say whether :meth:`next` would return, or raise StopIteration, at once.

        Args:
            timeout: how many seconds to wait until it would; None: as long as the actor lives.
        """
        until = deadline_of(timeout)
        arrival = self._arrival()
        if not arrival.completed and timeout != 0:
            self._consumer.flush()
            try:
                arrival.wait(time_left(until))
            except RpcTimeoutError:
                pass
        return arrival.completed

    def _arrival(self) -> Future[None]:
        return self._consumer.arrival()

    def _whole(self) -> AbstractContextManager[Future[None]]:
        return self._consumer.whole()

    def _rest(self) -> list[T]:
        return list(self.values())

    def is_finished(self) -> bool:
        """Say whether there are no more items to take."""
        return self._consumer.over

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        consumer = self._consumer
        state = "over" if consumer.over else f"{consumer.count} items taken"
        return f"<ObjectRefGenerator of {consumer.label}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise SerializationError(f"{self!r} cannot be sent or pickled: take the items here, and send them")


class _Values(_Items[T]):
    """The values of a stream."""

    __slots__ = ("_generator",)

    def __init__(self, generator: ObjectRefGenerator[T]) -> None:
        super().__init__(generator._consumer)
        self._generator = generator  # kept alive, because freeing the generator closes the stream

    @staticmethod
    def _made(consumer: _Consumer, packed: Any, error: BaseException | None) -> T:
        if error is not None:
            raise error
        return packed.open_once() if type(packed) is Snapshot else packed  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<values of {self._generator!r}>"


def _late(consumer: _Consumer, timeout: float | None) -> RpcTimeoutError:
    bound = "the time of the call that waits for it" if timeout is None else f"{timeout} s"
    return RpcTimeoutError(
        f"item {consumer.count} of {consumer.label} was not there within {bound}; the stream continues"
    )
