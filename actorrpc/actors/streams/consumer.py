"""ObjectRefGenerators: the consuming end of a stream.

:class:`_Consumer` does the work: it follows the call, pulls, and keeps what has come. Calls under way hold it, but not
the :class:`ObjectRefGenerator` that users hold: when that is dropped, the stream is closed. How streams work is written
in ``producer.py``.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar

from actorrpc import _time
from actorrpc._exception_text import is_of_handler
from actorrpc.actors.context import runtime
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.refs.wait import Arrivals, deadline_of, time_left
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
from actorrpc.actors.streams.stalls import PATIENCE_S, Stall, StreamReader
from actorrpc.agent.calls import CURRENT, Execution
from actorrpc.agent.peers import Peer
from actorrpc.errors import CancelledError, DeadlockError, RpcTimeoutError, SerializationError
from actorrpc.futures import INTERRUPTED, Future, Progress, generation, interruption_point, lost_by_fork
from actorrpc.rpc import rref as rrefs
from actorrpc.serialization import codec, exceptions

__all__ = ["Again", "ObjectRefGenerator", "Translate"]

T = TypeVar("T")

#: Says what an error that ended a pull from a worker means for the actor: an error, or a future that fails with one.
Translate = Callable[[BaseException, "Peer | None"], "BaseException | Future[Any]"]

#: Makes the call again that an error has ended, which has given so many items; None where it is not to be made again.
Again = Callable[[BaseException, int], "Future[Any] | None"]

_INFINITE = float("inf")


class _Over(Exception):
    """There are no more items."""


class _EndOfStream(Stall):
    """Stands for the end of a stream, which may be waited for while nobody takes its items."""

    __slots__ = ("consumer",)

    def __init__(self, consumer: _Consumer) -> None:
        self.consumer = consumer


class _Consumer(Stall, Progress):
    """What a generator of ObjectRefs knows of its stream. Thread-safe.

    ``_lock`` guards everything that changes. It is re-entrant, as the collector may run under it; nothing is called,
    completed or sent under it. What is under way (the call, a pull, the translation of an error) is taken up once, by a
    callback or by the thread that waits: one of them pops it from the list ``_claim``.
    """

    def __init__(
        self, call: Future[Any], label: str, translate: Translate | None, again: Again | None
    ) -> None:
        self._references = rrefs.runtime()
        self._agent = self._references.agent
        self._translate = translate
        self._again = again
        self.label = label
        self._lock = threading.RLock()
        self._call: Future[Any] | None = call
        self._claim: list[tuple[Future[Any], Callable[[Future[Any]], None]]] = []
        self._under_way = True  # until what it has brought is here
        self._ticket: StreamTicket | None = None
        self._peer: Peer | None = None
        self._items: deque[Any] = deque()
        self._charge = 0  # what they count, in bytes
        self.reader = StreamReader.here(None)
        self.reader.threads = frozenset(threading.enumerate())
        self.touched = _time.now()  # when somebody last asked for an item
        self._count = 0  # of items that were taken
        self._given = 0  # items that have come
        self._skipped = 0  # of those that come again, where the call is made again
        self._ended = False  # nothing comes any more
        self._error: BaseException | None = None  # what comes behind the items
        self.over = False  # and everything was taken
        self._closed = False
        self._whole = 0  # so many wait for all items: they come, however much of them lies here
        self.swept = 0  # the search that has had the garbage collected which may hold the stream
        self._stuck: tuple[int, StreamReader | None] = -1, None
        self._generation = generation()
        self._signal: Future[None] | None = None  # for a reader that waits until something changes
        self._arrival: Future[None] | None = None  # for wait(), which takes nothing
        self._finished: Future[None] | None = None
        # Pulls belong to the stream, not to the call in which somebody happens to take an item.
        self._apart = Execution(None, self._agent.self_peer, 0, _INFINITE, 0)
        self._follow(call, self._called)

    # -- what is under way ---------------------------------------------------------------------------------

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
        """Make progress on behalf of a thread that waits: as the source of the signal's future."""
        signal = self._signal
        while signal is not None and not signal.completed:
            claim = self._claim
            try:
                step = claim[0][0]
            except IndexError:
                return
            if signal.completed:  # and that was the step behind what it stands for
                return
            step.drive(deadline)
            if not step.completed:
                return
            self._take_up(claim)

    def flush(self) -> None:
        """Send what is still gathered."""
        self._agent.flush()

    @property
    def waits_for(self) -> Future[Any] | tuple[Peer, int] | None:
        """What the next item is waited for from: a call under way, or a stream and its worker."""
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
        """Whether to pull now, under the lock: not more than half of what may be produced ahead lies here."""
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
            ticket, peer, taken = self._ticket, self._peer, self._count
            if self._whole:
                taken += len(self._items)
            claim: list[tuple[Future[Any], Callable[[Future[Any]], None]]] = [(step, self._pulled)]
            self._claim = claim
            self._under_way = True
        assert ticket is not None
        assert peer is not None
        step.add_done_callback(lambda _: self._take_up(claim))
        token = CURRENT.set(self._apart)
        try:
            self._agent.call(peer, pull, (ticket.stream, taken), {}, 0, future=step)
            self._agent.flush()
        except Exception as error:
            step.try_fail(error)
            if is_of_handler(error):
                raise
        finally:
            CURRENT.reset(token)

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
            known = min(self._skipped, len(items))
            self._skipped -= known
            self._given += len(items) - known
            fresh = items[known:]
            self._items.extend(fresh)
            self._charge += sum(map(charge_of, fresh))
            if error is None:
                self._under_way = False
                if end is not None:
                    self._ended = True
                    self._translate = self._again = None  # they may keep the actor alive
        if error is not None:
            self._failed(error)
        else:
            self._wake()  # before the next step: a reader that waits for these items must not come to wait for more
            self._pull()

    def _failed(self, error: BaseException) -> None:
        """End with an error, once it is known what that means; or begin anew."""
        again = self._again
        if again is not None:
            token = CURRENT.set(self._apart)
            try:
                call = again(error, self._given)
            except Exception as wrong:
                call, error = None, wrong
            finally:
                CURRENT.reset(token)
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
        """Follow a call that gives the same items from the first on: those that are here are not given twice."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._call, self._ticket, self._under_way = call, None, True
                self._skipped = self._given
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
            signal, self._signal = self._signal, None
            finished = self._finished if self._ended else None
            arrival = None
            if self._there():
                arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.try_complete(None)
        if signal is not None:
            signal.try_complete(None)
        if finished is not None:
            self._complete(finished)

    # -- taking --------------------------------------------------------------------------------------------

    def take(self) -> tuple[Any, BaseException | None, Future[None] | None]:
        """Return an item as it came, or an error that stands for one, or else a future to wait for before trying again.

        Raises:
            _Over: there are no more.
        """
        self.reader = reader = StreamReader.here(self.reader)
        reader.threads = None
        self.touched = _time.now()
        with self._lock:
            if not self._items:
                if self._ended or self._closed:
                    error, self._error = self._error, None
                    self.over = True
                    if error is None:
                        raise _Over
                    self._count += 1
                    return None, error, None
                signal = self._signal
                if signal is None:
                    label = f"item {self._count} of {self.label}"
                    if self._generation != generation():  # this process is a fork, to which no item comes
                        raise lost_by_fork(label)
                    signal = self._signal = Future()
                    signal.label = label
                    signal.source = self
                return None, None, signal
            packed = self._items.popleft()
            self._charge -= charge_of(packed)
            self._count += 1
            wants = self._wants()
        if wants:
            self._pull()
        return packed, None, None

    def _there(self) -> bool:
        """Whether take() gives an item, an error or the end, under the lock."""
        return bool(self._items) or self._ended or self._closed

    def arrival(self) -> Future[None]:
        """Return a future that completes when take() need not wait: an item is here, an error, or the end."""
        self.reader = reader = StreamReader.here(self.reader)
        reader.threads = None
        self.touched = _time.now()
        with self._lock:
            there = self._there()
            arrival = self._arrival
            if arrival is None:
                arrival = Future()
                arrival.label = f"item {self._count} of {self.label}"
                arrival.awaits = (self,)
                if not there:
                    self._arrival = arrival
        if there:
            arrival.try_complete(None)
        return arrival

    @contextmanager
    def whole(self) -> Iterator[Future[None]]:
        """Have all items come, and be kept here; gives :meth:`finished`. Nothing is taken."""
        self.reader = reader = StreamReader.here(self.reader)
        reader.threads = None
        self.touched = _time.now()
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
        """Want no more items. Idempotent; may send."""
        with self._lock:
            if self._closed:
                return
            self._closed = self.over = True
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
                call.cancel()  # where it has begun, its worker closes the stream
        self._wake()

    def _tell_closed(self, ticket: StreamTicket) -> None:
        peer = self._peer
        if peer is None or self._agent.closed_down:
            return
        told: Future[None] = Future()
        told.add_done_callback(_look_away)
        token = CURRENT.set(self._apart)
        try:
            self._agent.call(peer, close_stream, (ticket.stream,), {}, 0, future=told)
            self._agent.flush()
        except Exception as error:  # the producer's worker has ended, or this one
            told.try_fail(error)
            if is_of_handler(error):
                raise
        finally:
            CURRENT.reset(token)

    def finished(self) -> Future[None]:
        """Return a future that completes when the generator is known to be over; it fails as the stream does."""
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
            streams.poke()
        return finished

    @property
    def awaits_end(self) -> bool:
        """Whether somebody may wait for the end of the stream."""
        return self._finished is not None and not self._ended

    def look(self) -> None:
        """End the wait for the stream's end if the thread that waits should take the items that are in the way of it."""
        reader = self.reader
        waits = any(isinstance(each, _EndOfStream) and each.consumer is self for each in reader.waits_for())
        patient = reader.alone or _time.now() - self.touched >= PATIENCE_S
        finished: Future[None] | None = None
        with self._lock:
            full = not self._under_way and not self._ended and not self._wants()
            stuck = (self._count if waits and patient and full else -1), reader
            if stuck[0] >= 0 and stuck == self._stuck:  # as it was at the look before
                finished, self._finished = self._finished, None
            self._stuck = stuck
        if finished is not None:
            finished.try_fail(
                DeadlockError(
                    f"the end of {self.label} can never come: {reader.name} waits for it, and is to take the items that "
                    f"fill its buffer ({len(self._items)} of them are here). Take them first, or give a larger "
                    "max_buffered_items=",
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
            finished.acknowledge()  # the consumer that takes the items sees it


def _look_away(done: Future[Any]) -> None:
    done.acknowledge()


class ObjectRefGenerator(Arrivals[T], Generic[T]):
    """What a call of a generator method returns: an iterator over ObjectRefs of what it yields, as it comes.

    ``for ref in generator`` and ``async for ref in generator`` give ObjectRefs whose values are here already;
    ``generator.values()`` gives the values themselves, ``get(generator)`` a list of all of them. If the generator raises, the
    ObjectRef in that place raises it, and the stream is over. At most 64 MiB, and ``max_buffered_items`` items if that is given,
    are produced and not taken: then the generator pauses, and holds its actor. Thread-safe: several threads may take items, each
    item goes to one of them.

    The generator on the actor is closed (GeneratorExit at its yield) when this object is closed or dropped.

    Args:
        future: the call; completes with a StreamTicket.
        label: how messages call the stream; default: as the call.
        translate: says what the end of the producer's worker means; default: it is raised as it is.
        again: makes the call again when it has failed; default: nobody does.
    """

    __slots__ = ("__weakref__", "_consumer")

    def __init__(
        self,
        future: Future[Any],
        *,
        label: str | None = None,
        translate: Translate | None = None,
        again: Again | None = None,
    ) -> None:
        self._consumer = _Consumer(future, str(future.label) if label is None else label, translate, again)

    def __del__(self) -> None:
        try:
            consumer = self._consumer
            if not consumer.over:
                agent = consumer._agent
                agent.clock.call_soon(partial(agent.submit, consumer.close))
        except AttributeError:  # construction failed, or the interpreter is shutting down
            pass

    # -- items ---------------------------------------------------------------------------------------------

    def next(self, *, timeout: float | None = None) -> ObjectRef[T]:
        """Return the next ObjectRef, complete; waits for it.

        Args:
            timeout: seconds; None: as long as the actor lives.

        Raises:
            StopIteration: there are no more.
            RpcTimeoutError: it was not there in time; try again.
        """
        consumer = self._consumer
        try:
            value, error = _take(consumer, timeout)
        except _Over:
            raise StopIteration from None
        return _ref(consumer, value, error)

    def __iter__(self) -> Iterator[ObjectRef[T]]:
        return self

    def __next__(self) -> ObjectRef[T]:
        return self.next()

    def __aiter__(self) -> AsyncIterator[ObjectRef[T]]:
        return self

    async def __anext__(self) -> ObjectRef[T]:
        consumer = self._consumer
        try:
            value, error = await _take_async(consumer)
        except _Over:
            raise StopAsyncIteration from None
        return _ref(consumer, value, error)

    def values(self) -> _Values[T]:
        """Return an iterator (sync and async) over the values; it raises what the generator raised."""
        return _Values(self)

    # -- the end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the generator on the actor: it gets GeneratorExit at its yield. Items not taken are lost. Idempotent."""
        self._consumer.close()

    def cancel(self) -> bool:
        """Close the stream; False if it was over."""
        if self._consumer.over:
            return False
        self._consumer.close()
        return True

    def completed(self) -> ObjectRef[None]:
        """Return an ObjectRef that is complete when the generator is over and its last item is on this side.

        It raises what the generator raised, and CancelledError where the stream was closed before its end.
        """
        return ObjectRef(self._consumer.finished(), label=f"the end of {self._consumer.label}")

    def next_ready(self, timeout: float | None = 0) -> bool:
        """Say whether :meth:`next` returns, or raises StopIteration, at once.

        Args:
            timeout: wait so many seconds until it does; None: as long as the actor lives.
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
        consumer = self._consumer
        values: list[T] = []
        while True:
            try:
                value, error = _take(consumer, 0)
            except _Over:
                return values
            values.append(_open(value, error))

    def is_finished(self) -> bool:
        """Say whether there are no more items to take."""
        consumer = self._consumer
        with consumer._lock:
            return consumer.over or (consumer._ended and not consumer._items and consumer._error is None)

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
        raise SerializationError(f"{self!r} cannot be sent or pickled: take its items here, and send those")


class _Values(Generic[T]):
    """The values of a stream."""

    __slots__ = ("_generator",)

    def __init__(self, generator: ObjectRefGenerator[T]) -> None:
        self._generator = generator

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            value, error = _take(self._generator._consumer, None)
        except _Over:
            raise StopIteration from None
        return _open(value, error)  # type: ignore[no-any-return]

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        try:
            value, error = await _take_async(self._generator._consumer)
        except _Over:
            raise StopAsyncIteration from None
        return _open(value, error)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the stream."""
        self._generator.close()

    def __repr__(self) -> str:
        return f"<values of {self._generator!r}>"


def _open(packed: Any, error: BaseException | None) -> Any:
    """Return the value of an item, or raise what stands for it."""
    if error is not None:
        raise error
    return packed.open_once() if type(packed) is Snapshot else packed


def _ref(consumer: _Consumer, packed: Any, error: BaseException | None) -> ObjectRef[Any]:
    label = f"item {consumer.count - 1} of {consumer.label}"
    if error is None and type(packed) is Snapshot and packed.stored is None:
        try:
            packed = packed.open_once()  # its memory came with it, and is nobody else's
        except Exception as caught:
            error = caught
    if error is not None:
        return ObjectRef.failed(error, label=label)
    return ObjectRef.of(packed, label=label)


def _late(consumer: _Consumer, timeout: float | None) -> RpcTimeoutError:
    bound = "the time of the call that waits for it" if timeout is None else f"{timeout} s"
    return RpcTimeoutError(
        f"item {consumer.count} of {consumer.label} was not there within {bound}; the stream goes on"
    )


def _take(consumer: _Consumer, timeout: float | None) -> tuple[Any, BaseException | None]:
    until = deadline_of(timeout)
    while True:
        if INTERRUPTED:
            interruption_point()
        value, error, signal = consumer.take()
        if signal is None:
            return value, error
        try:
            signal.wait(time_left(until))
        except RpcTimeoutError:
            if not signal.completed:
                raise _late(consumer, timeout) from None


async def _take_async(consumer: _Consumer) -> tuple[Any, BaseException | None]:
    until = deadline_of(None)
    while True:
        if INTERRUPTED:
            interruption_point()
        value, error, signal = consumer.take()
        if signal is None:
            return value, error
        try:
            async with asyncio.timeout(time_left(until)):
                await signal
        except TimeoutError:
            if not signal.completed:
                raise _late(consumer, None) from None
