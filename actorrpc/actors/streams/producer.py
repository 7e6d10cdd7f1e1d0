"""Streams: what generator methods yield, on its way to their callers.

The consumer pulls. A stream's :class:`Producer` lets its generator run ahead of the items that the consumer has taken, by
at most ``WINDOW_BYTES``, and by ``limit`` items where there is a limit. Then the generator pauses, and holds its actor as
any method that waits does: others that ran meanwhile would see the actor in the middle of the method. A pull says how many
items were taken, and its answer brings what has been produced since. One pull is under way while the consumer works on
what it has. An item is packed when it is yielded: changing the object afterwards changes nothing. Pulls are plain calls,
served by pool threads, never behind the actor's work.

An item counts, from when it is packed until the producer hears that it was taken, with its size and what an object takes
besides, on whichever side it lies: both sides together keep at most one window of a stream, and one item more.

An :class:`ObjectRefGenerator` that is closed or dropped tells the producer, whose generator is then closed where it
stands (GeneratorExit at its yield). The end of a consumer's worker has the same effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any, Final, Protocol

from actorrpc import _time
from actorrpc._exception_text import cut_frames, is_a, let_frames_go, report
from actorrpc.actors.context import runtime
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.streams.stalls import Stall
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import CURRENT
from actorrpc.agent.executor import Deferred, pack_error
from actorrpc.agent.peers import Peer
from actorrpc.errors import CancelledError, RpcError, SerializationError, ShutdownError
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerKey

__all__ = [
    "DONE",
    "WINDOW_BYTES",
    "Batch",
    "Producer",
    "StreamTicket",
    "Streams",
    "aproduce",
    "charge_of",
    "close_stream",
    "produce",
    "pull",
]

_log = logging.getLogger("actorrpc.actors")

WINDOW_BYTES: Final = 64 << 20
"""So much is produced ahead of the consumer at most, and then an item more."""

_BATCH_BYTES: Final = 1 << 20  # one answer brings at least one item, and no more of them than this
_INLINE_BYTES: Final = 64 << 10  # what the producing thread sends itself
_PLAIN: Final = frozenset({int, float, bool, type(None), complex})
_PLAIN_BYTES: Final = 4096
_LEAST_BYTES: Final = 128  # what an item counts at least: an object, and its places in the queues
_SNAPSHOT_BYTES: Final = 400  # the size of a snapshot without its contents

DONE: Final = b""
"""The end of a stream whose generator has returned; other ends are packed errors."""

#: What a pull brings: items, and the end of the stream if they are the last.
Batch = tuple[list[Any], bytes | None]


class StreamTicket:
    """What a streaming call returns: where its items can be pulled.

    Attributes:
        worker: where.
        stream: names the stream there.
        limit: so many items are produced ahead at most; 0: only their bytes are bounded.
    """

    __slots__ = ("limit", "stream", "worker")

    def __init__(self, worker: WorkerKey, stream: int, limit: int) -> None:
        self.worker = worker
        self.stream = stream
        self.limit = limit

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamTicket, (self.worker, self.stream, self.limit)


def charge_of(packed: Any) -> int:
    """Return how many bytes an item counts, as it is packed; both sides find the same."""
    if type(packed) is Snapshot:
        return packed.nbytes + _SNAPSHOT_BYTES
    return max(_LEAST_BYTES, sys.getsizeof(packed))


class _Caller(Protocol):
    """The call that a generator runs in, as its actor's mailbox has it."""

    @property
    def queue(self) -> Any: ...

    @property
    def hosted(self) -> Any: ...


class Producer(Stall):
    """The producing end of one stream. Thread-safe; one thread or coroutine puts items in.

    ``_lock`` guards all that changes here. It is re-entrant, as the collector may run under it; no user code runs under it,
    and futures are completed after it was released.

    Attributes:
        entry: the call in whose mailbox the generator runs; None where it runs in none.
        pause: names the pause that the generator makes now, because its window is full; 0 where it makes none.
    """

    def __init__(
        self,
        streams: Streams,
        agent: Agent,
        stream: int,
        limit: int,
        peer: Peer | None,
        owner: object,
        entry: _Caller | None,
    ) -> None:
        self.stream = stream
        self.entry: Any = entry  # hosts, which are above streams, know more of it
        self.pause = 0
        self.suspected: dict[int, float] = {}  # when each search for deadlocks first led back to the pause
        self.limit = limit
        self.peer = peer
        self.owner = owner
        self.on_close: Callable[[], object] | None = None
        self._streams = streams
        self._agent = agent
        self._lock = threading.RLock()
        self._items: deque[tuple[Any, int]] = deque()  # with what they count
        self._charges: deque[int] = deque()  # of all that were produced and not taken, wherever they are
        self._charge = 0  # their sum
        self._taken = 0  # by the consumer, of all that were produced
        self._end: bytes | None = None
        self._stopped = False  # no more items are produced
        self._closed = False  # the items that were produced are discarded, too
        self._error: ShutdownError | None = None
        self._room: Future[None] | None = None  # the producing side waits for it
        self._asked: Future[Batch] | None = None  # the pull that waits for items
        self._call: int | None = None
        self._begun = _time.now()

    def ticket(self) -> StreamTicket:
        """Return what the consumer needs to pull."""
        return StreamTicket(self._streams.me, self.stream, self.limit)

    def serves(self, call: int) -> None:
        """Have the stream closed when the call that it answers is cancelled: the ticket may never have come to anybody.

        Args:
            call: the number that the call has at ``peer``; it has been answered.
        """
        peer = self.peer
        assert peer is not None
        self._call = call
        peer.running[call] = self
        # Looked at after the entry in ``running``: a cancellation is seen in one place or the other.
        if call in peer.cancelled:
            peer.cancelled.pop(call, None)
            self.close()
        if self._closed:
            self._streams.forget(self)

    @property
    def closed(self) -> bool:
        """Whether no more items are wanted."""
        return self._stopped

    @property
    def since(self) -> float | None:
        """When it began; None if its last item was produced, or no more items are wanted."""
        return None if self._closed or self._end is not None else self._begun

    # -- the producing side -----------------------------------------------------------------------------

    def room(self) -> Future[None] | None:
        """Return a future to wait for before another item is produced; None if there is room, or the reader wants no item."""
        with self._lock:
            if self._stopped or self._has_room:
                return None
            room = self._room
            if room is None or room.completed:
                room = self._room = Future()
                room.label = "the consumer of a stream"
                room.awaits = (self,)
                self.pause = self._streams.new_number()
        self._streams.wake()
        return room

    @property
    def _has_room(self) -> bool:
        """Whether another item may be produced. Under the lock."""
        return self._charge < WINDOW_BYTES and (not self.limit or len(self._charges) < self.limit)

    @property
    def ahead(self) -> tuple[int, int]:
        """How many items were produced and not taken, and what they count in bytes."""
        with self._lock:
            return len(self._charges), self._charge

    def note_pause(self, begun: float) -> None:
        """Record a pause of this thread, which has just ended, in the flight recorder."""
        flight_recorder = self._agent.flight_recorder
        if flight_recorder is not None:
            flight_recorder.noted(begun, "pause", f"of stream {self.stream:x}")

    def _note(self, what: str) -> None:
        """Record the end of the stream in the flight recorder."""
        flight_recorder = self._agent.flight_recorder
        if flight_recorder is not None:
            flight_recorder.noted(self._begun, "stream", what)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """For the pause of a coroutine: where the actor's limit is the default one, others may begin meanwhile."""
        entry = self.entry
        queue, hosted = (None, None) if entry is None else (entry.queue, entry.hosted)
        if queue is None or hosted is None or not queue.yielding:
            yield
            return
        hosted.carry_out(hosted.mailbox.rest(queue))
        try:
            yield
        finally:
            hosted.mailbox.resume(queue)

    def put(self, item: Any) -> None:
        """Take an item as it is now. Where the stream is closed, nothing happens.

        Raises:
            SerializationError: it cannot be sent.
        """
        kind = type(item)
        if kind in _PLAIN or ((kind is str or kind is bytes) and len(item) <= _PLAIN_BYTES):
            packed = item
        else:
            try:
                packed = Snapshot.of(item)
            except SerializationError as error:
                with self._lock:
                    number = self._taken + len(self._charges)
                error.args = (f"item {number} of the stream cannot be sent: {error}",)
                raise
        charge = charge_of(packed)
        with self._lock:
            if self._stopped or self._end is not None:
                return
            self._charges.append(charge)
            self._charge += charge
            self._items.append((packed, charge))
        self._answer()

    def end(self) -> None:
        """Say that there are no more items."""
        self._finish(DONE)

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, which the consumer gets behind the items that are there."""
        packed = pack_error(self._agent, error, self.peer is None or self.peer.same_main)
        let_frames_go(error)  # they may hold other streams, which hold their actors
        self._finish(packed)

    def abort(self, error: BaseException) -> None:
        """End the stream from outside: as :meth:`fail`, and the generator is closed at its yield."""
        self.fail(error)
        self._stop()

    def _finish(self, end: bytes) -> None:
        with self._lock:
            if self._closed or self._end is not None:
                return
            self._end = end
            items = self._taken + len(self._charges)
        self._note(f"{self.stream:x} of {items} items")
        self._answer()

    def _stop(self) -> None:
        """Have no more produced."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            room = self._leave_pause()
            on_close, self.on_close = self.on_close, None
        if room is not None:
            room.try_complete(None)
        if on_close is not None:
            on_close()

    def _leave_pause(self) -> Future[None] | None:
        """Return what the generator waits for, to be completed without the lock. Under it."""
        room, self._room = self._room, None
        self.pause = 0
        self.suspected.clear()
        return room

    def close(self, error: ShutdownError | None = None) -> None:
        """Want no more: items are dropped, and the generator is closed at its yield. Idempotent.

        Args:
            error: why, where it is not the consumer's wish.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            is_early = self._end is None
            items = self._taken + len(self._charges)
            self._error = error
            dropped = list(self._items)
            self._items.clear()
            self._charges.clear()
            self._charge = 0
            asked, self._asked = self._asked, None
        del dropped
        if is_early:
            self._note(f"{self.stream:x} closed after {items} items")
        self._streams.forget(self)
        self._stop()
        if asked is not None:
            asked.try_fail(error or _gone(self.stream))

    def cancel(self, stop: bool = False, late: bool = False) -> None:
        """Close the stream because its call was cancelled, has timed out, or its consumer has died."""
        self.close()

    def check(self) -> None:
        """Raise ShutdownError if that is why the stream was closed."""
        if self._error is not None:
            raise self._error

    # -- the pulling side -------------------------------------------------------------------------------

    def pull(self, taken: int) -> Future[Batch] | Batch:
        """Return the next items, or a future for them where there are none yet.

        Args:
            taken: how many items the consumer has taken in all.
        """
        waits: Future[Batch] | None = None
        with self._lock:
            if self._closed:
                raise self._error or _gone(self.stream)
            for _ in range(min(taken - self._taken, len(self._charges))):
                self._charge -= self._charges.popleft()
                self._taken += 1
            room = self._leave_pause() if self._has_room else None
            batch, _ = self._batch()
            if batch is None:
                waits = self._asked = Future()
                waits.label = "the next item of a stream"
        if room is not None:
            room.try_complete(None)
        if batch is None:
            assert waits is not None
            return waits
        self._sent(batch)
        return batch

    def _batch(self) -> tuple[Batch | None, int]:
        """Take out what one answer brings. Under the lock."""
        items = self._items
        if not items and self._end is None:
            return None, 0
        found: list[Any] = []
        size = 0
        while items and (not found or size + items[0][1] <= _BATCH_BYTES):
            packed, nbytes = items.popleft()
            found.append(packed)
            size += nbytes
        return (found, None if items else self._end), size

    def _answer(self) -> None:
        """Give what there is to the pull that waits for it."""
        with self._lock:
            asked = self._asked
            if asked is None:
                return
            batch, size = self._batch()
            if batch is None:
                return
            self._asked = None
        # The answer leaves on this thread where it is small: large ones may wait for the socket.
        asked.try_complete(batch, self._agent.submit if size > _INLINE_BYTES else None)
        self._sent(batch)

    def _sent(self, batch: Batch) -> None:
        if batch[1] is not None:
            with self._lock:
                self._closed = True
                self._charges.clear()
                self._charge = 0
            self._streams.forget(self)
            self._stop()


class Streams:
    """The streams that are produced in this process. Thread-safe: the table changes by single atomic steps."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.me = WorkerKey(agent.record.rank, agent.record.incarnation)
        self._numbers = itertools.count(int.from_bytes(os.urandom(6), "big") << 16)
        self._producers: dict[int, Producer] = {}
        #: what reads streams in this process, by where they are produced
        self.consumers: weakref.WeakValueDictionary[tuple[WorkerKey, int], Any] = (
            weakref.WeakValueDictionary()
        )
        #: has the search for deadlocks look: a generator or a reader may wait
        self.wake: Callable[[], None] = _nobody
        self._over = False
        agent.on_peer_end.append(self._peer_ended)

    def __len__(self) -> int:
        return len(self._producers)

    def open(
        self,
        limit: int,
        peer: Peer | None = None,
        *,
        owner: object = None,
        entry: _Caller | None = None,
    ) -> Producer:
        """Begin a stream.

        Args:
            limit: how many items may be produced and not yet taken; 0: as many as the window has room for.
            peer: whose it is: the stream ends with it. By default the caller of the call that is being executed.
            owner: whatever may :meth:`abort` it.
            entry: the call that the generator runs in.
        """
        if peer is None:
            execution = CURRENT.get()
            peer = None if execution is None else execution.peer
        producer = Producer(self, self._agent, self.new_number(), limit, peer, owner, entry)
        self._producers[producer.stream] = producer
        if self._over:
            producer.close(_shut_down())
        elif peer is not None and peer.state != "alive":
            producer.close()
        return producer

    def get(self, stream: int) -> Producer:
        """Return a stream's producer.

        Raises:
            RpcError: it has ended, or was closed.
        """
        producer = self._producers.get(stream)
        if producer is None:
            raise _shut_down() if self._over else _gone(stream)
        return producer

    def find(self, stream: int) -> Producer | None:
        """Return a stream's producer, or None."""
        return self._producers.get(stream)

    def pausing(self) -> list[Producer]:
        """Return those whose generators pause, in mailboxes."""
        return [each for each in list(self._producers.values()) if each.pause and each.entry is not None]

    def all(self) -> list[Producer]:
        """Return the producing ends of all streams of this process."""
        return list(self._producers.values())

    def new_number(self) -> int:
        """Return a number that names one thing in this group."""
        return next(self._numbers)

    def forget(self, producer: Producer) -> None:
        """Remove a stream that has ended."""
        self._producers.pop(producer.stream, None)
        call, peer = producer._call, producer.peer
        if call is not None and peer is not None and peer.running.get(call) is producer:
            del peer.running[call]

    def abort(self, owner: object, error: BaseException) -> None:
        """End all streams of an owner: their consumers get the error after the items that were produced."""
        for producer in list(self._producers.values()):
            if producer.owner is owner:
                producer.abort(error)

    def close(self) -> None:
        """End all streams: threads that produce or pull get ShutdownError. Later ones are closed from the start."""
        self._over = True
        for producer in list(self._producers.values()):
            producer.close(_shut_down())
        try:
            self._agent.on_peer_end.remove(self._peer_ended)
        except ValueError:
            pass

    def _peer_ended(self, peer: Peer) -> None:
        for producer in list(self._producers.values()):
            if producer.peer is peer:
                producer.close()


def _nobody() -> None:
    """Stand in for the search for deadlocks where there are no actors."""


def _shut_down() -> ShutdownError:
    return ShutdownError("the worker that produces this stream was shut down", maybe_executed=True)


def _gone(stream: int) -> RpcError:
    return RpcError(f"stream {stream:x} is not there any more: its actor has ended, or the stream was closed")


# -- what consumers call on the producer's worker ------------------------------------------------------------


def pull(stream: int, taken: int) -> Any:
    """Return the next items of a stream, when there are some (called by RPC)."""
    streams: Streams = runtime().streams
    found = streams.get(stream).pull(taken)
    return Deferred(found) if isinstance(found, Future) else found


def close_stream(stream: int) -> None:
    """Close a stream whose consumer wants no more items; does nothing if it has ended. Called by RPC."""
    streams: Streams = runtime().streams
    producer = streams.find(stream)
    if producer is not None:
        producer.close()


# -- running generators --------------------------------------------------------------------------------------


#: Says what the consumer gets for what a generator raised.
Explain = Callable[[BaseException], BaseException]


def _as_it_is(error: BaseException) -> BaseException:
    return error


def produce(generator: Generator[Any, Any, Any], producer: Producer, explain: Explain = _as_it_is) -> None:
    """Run a generator on this thread until it ends or its stream is closed; its exception goes to the consumer.

    The thread waits through futures, so that calls which descend from this one can run meanwhile.

    Raises:
        ShutdownError: this worker shuts down.
        BaseException: the generator raised an exception that is no Exception (KeyboardInterrupt, SystemExit), which was sent to
            the consumer, too.
    """
    try:
        while True:
            room = producer.room()
            if room is not None:
                begun = _time.now()
                room.wait()
                producer.note_pause(begun)
                continue
            if producer.closed:
                break
            try:
                item = next(generator)
            except StopIteration:
                producer.end()
                return
            producer.put(item)
    except BaseException as error:
        cut_frames(error, __file__)
        producer.fail(explain(error))
        if not is_a(error, Exception):
            raise
    finally:
        _close(generator, producer)
    producer.check()


def _close(generator: Generator[Any, Any, Any], producer: Producer) -> None:
    try:
        generator.close()
    except Exception as error:
        report(
            _log,
            error,
            "a generator raised while it was closed; nobody reads stream %x any more",
            producer.stream,
        )


async def aproduce(
    generator: AsyncGenerator[Any, Any], producer: Producer, explain: Explain = _as_it_is
) -> None:
    """Run an async generator until it ends or its stream is closed. As :func:`produce`, but no thread waits.

    A generator that awaits something when its stream is closed gets CancelledError there.
    """
    stop = _Stop(producer)
    try:
        while True:
            room = producer.room()
            if room is not None:
                with producer.resting():
                    await room
                continue
            if producer.closed:
                break
            try:
                item = await stop.next(generator)
            except StopAsyncIteration:
                producer.end()
                return
            producer.put(item)
    except BaseException as error:
        if stop.meant(error):
            return
        cut_frames(error, __file__)
        if is_a(error, asyncio.CancelledError):  # the task's; to the consumer, its call was cancelled
            producer.fail(explain(CancelledError("the generator was cancelled", maybe_executed=True)))
        else:
            producer.fail(explain(error))
        if not is_a(error, Exception):
            raise
    finally:
        try:
            await generator.aclose()
        except Exception as error:
            report(
                _log,
                error,
                "an async generator raised while it was closed; nobody reads stream %x any more",
                producer.stream,
            )
    producer.check()


class _Stop:
    """Cancels the task of an async generator where it awaits something and its stream is closed.

    Everything but :meth:`_ring` runs on the loop's thread.
    """

    __slots__ = ("_awaits", "_loop", "_rung", "_task")

    def __init__(self, producer: Producer) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._awaits = False
        self._rung = False
        producer.on_close = self._ring

    async def next(self, generator: AsyncGenerator[Any, Any]) -> Any:
        """Return the generator's next item."""
        self._awaits = True
        try:
            return await anext(generator)
        finally:
            self._awaits = False

    def meant(self, error: BaseException) -> bool:
        """Say whether this is why ``error``, a cancellation, was raised; it is then dealt with."""
        if not self._rung or not is_a(error, asyncio.CancelledError) or self._task is None:
            return False
        # Another one that has cancelled the task wants it to end, and counts as well.
        return self._task.uncancel() == 0

    def _ring(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._stop)
        except RuntimeError:  # the loop is closed
            pass

    def _stop(self) -> None:
        if self._awaits and self._task is not None:
            self._rung = True
            self._task.cancel()
