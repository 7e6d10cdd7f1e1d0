"""Streams: how the items of generator methods get to their callers.

The consumer pulls items from the producer. A generator runs ahead of its consumer until ``WINDOW_BYTES`` of items, or ``limit``
items if there is a limit, were produced and not taken. Then it pauses. Like any waiting method, it keeps a serial actor from
running other calls, which would find the actor in the middle of a method. A pull says how many items were taken in total, and
its answer contains the items that were produced since the last pull. The next pull is sent while the consumer uses the items
that have arrived. An item is packed when it is yielded: later changes of the object have no effect. Pulls are plain calls, which
pool threads execute, so they never wait for the actor.

An item counts against the window, with its size and the overhead of an object, from when it is packed until a pull tells the
producer that the item was taken. So both workers together keep at most one window of items, and one more item, per stream, unless
the reader waits for all items.

When an :class:`ObjectRefGenerator` is closed or freed, its worker tells the producer, and the generator is closed (its yield
raises GeneratorExit). The end of the consumer's worker has the same effect.
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
from dataclasses import dataclass
from typing import Any, Final

from actorrpc import _time
from actorrpc._exceptions import cut_frames, is_a, let_frames_go, report
from actorrpc.actors.context import runtime
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.streams.stalls import Stall
from actorrpc.agent.agent import Agent
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
"""A generator pauses while the items that were produced and not taken have at least this size."""

_BATCH_BYTES: Final = 1 << 20  # greatest size of an answer that contains several items
_INLINE_BYTES: Final = 64 << 10  # greatest size of an answer that the producing thread sends itself
_PLAIN: Final = frozenset({int, float, bool, type(None), complex})
_PLAIN_BYTES: Final = 4096
_LEAST_BYTES: Final = 128  # the size with which smaller items are counted
_SNAPSHOT_BYTES: Final = 400  # the size of a snapshot without its contents

DONE: Final = b""
"""The end of a stream whose generator has returned. If the generator has raised, the end is a packed error."""

#: The answer of a pull: items, and the end of the stream if they are the last.
Batch = tuple[list[Any], bytes | None]


@dataclass(slots=True, eq=False)
class StreamTicket:
    """The result of a streaming call: where its items can be pulled.

    Attributes:
        worker: the producer's worker.
        stream: the number of the stream on that worker.
        limit: how many items may be produced ahead; 0: only their size is limited.
    """

    worker: WorkerKey
    stream: int
    limit: int

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamTicket, (self.worker, self.stream, self.limit)


def charge_of(packed: Any) -> int:
    """Return the size in bytes with which a packed item counts against the window; the same number on both sides."""
    if type(packed) is Snapshot:
        return packed.nbytes + _SNAPSHOT_BYTES
    return max(_LEAST_BYTES, sys.getsizeof(packed))


class Producer(Stall):
    """The producing end of one stream. Thread-safe; one thread or coroutine calls :meth:`put`.

    ``_lock`` guards all state that changes. It is re-entrant, because the garbage collector may run under it. No user code runs
    under it, and futures are completed after it was released.

    Attributes:
        entry: the call (an Envelope) of an actor that runs the generator; None if no actor runs it.
        pause: a number for the present pause of the generator, whose window is full; 0 if the generator does not pause.
    """

    def __init__(
        self,
        streams: Streams,
        agent: Agent,
        stream: int,
        limit: int,
        peer: Peer | None,
        owner: object,
        entry: Any,
    ) -> None:
        self.stream = stream
        self.entry = entry  # Any, because the call's type is in a higher package
        self.pause = 0
        self.suspected: dict[int, float] = {}  # pause -> when a search for deadlocks first led back to it
        self.limit = limit
        self.peer = peer
        self.owner = owner
        self.on_close: Callable[[], object] | None = None
        self._streams = streams
        self._agent = agent
        self._lock = threading.RLock()
        self._items: deque[tuple[Any, int]] = deque()  # items and their sizes
        # Sizes of all items that were produced and not taken, on both sides.
        self._charges: deque[int] = deque()
        self._charge = 0  # their sum
        self._taken = 0  # number of items that the consumer has taken
        self._end: bytes | None = None
        self._stopped = False  # no more items are accepted
        self._closed = False  # no more items are sent, and items that were not sent are discarded
        self._error: ShutdownError | None = None
        self._room: Future[None] | None = None  # the generator waits for this future
        self._asked: Future[Batch] | None = None  # the pull that waits for items
        self._call: int | None = None
        self._begun = _time.now()

    def ticket(self) -> StreamTicket:
        """Return the data that the consumer needs to pull."""
        return StreamTicket(self._streams.me, self.stream, self.limit)

    def serves(self, call: int) -> None:
        """Close the stream if its call is cancelled from now on: the caller may not have received the ticket.

        Args:
            call: the number of the call at ``peer``, which was answered with the ticket.
        """
        peer = self.peer
        assert peer is not None
        self._call = call
        peer.running[call] = self
        # This thread reads `cancelled` after it has set `running`: either it finds the cancellation, or the thread that receives
        # the cancellation finds the stream in `running`.
        if call in peer.cancelled:
            peer.cancelled.pop(call, None)
            self.close()
        if self._closed:
            self._streams.forget(self)

    @property
    def closed(self) -> bool:
        """Whether the stream accepts no more items: it was closed or aborted, or its end was sent."""
        return self._stopped

    @property
    def since(self) -> float | None:
        """When the stream began; None if its generator has ended, or the stream was closed."""
        return None if self._closed or self._end is not None else self._begun

    # -- the producing side -----------------------------------------------------------------------------

    def room(self) -> Future[None] | None:
        """Return the future for which the generator has to wait; None if another item fits, or the stream was closed."""
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
        """Whether another item may be produced. The lock is held."""
        return self._charge < WINDOW_BYTES and (not self.limit or len(self._charges) < self.limit)

    @property
    def ahead(self) -> tuple[int, int]:
        """How many items were produced and not taken, and their size in bytes."""
        with self._lock:
            return len(self._charges), self._charge

    def note_pause(self, begun: float) -> None:
        """Record in the flight recorder a pause that began at ``begun`` and has just ended."""
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
        """A context for the pause of an async generator. In a queue that does not count waiting calls, another call may run."""
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
        """Pack an item and add it to the stream. Does nothing if the stream is closed.

        Raises:
            SerializationError: the item cannot be sent.
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

    def finish(self) -> None:
        """Record that there are no more items."""
        self._finish(DONE)

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, which the consumer gets after all items that were produced."""
        packed = pack_error(self._agent, error, self.peer is None or self.peer.same_main)
        let_frames_go(error)  # the frames of the error may keep streams alive, which block their actors
        self._finish(packed)

    def abort(self, error: BaseException) -> None:
        """Like :meth:`fail`, from another thread than the generator's: close the generator at its yield, too."""
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
        """Accept no more items, and end a pause of the generator."""
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
        """End the pause. Returns the generator's future, which the caller completes after releasing the lock, held here."""
        room, self._room = self._room, None
        self.pause = 0
        self.suspected.clear()
        return room

    def close(self, error: ShutdownError | None = None) -> None:
        """Close the stream: discard its items, and close the generator at its yield. Idempotent.

        Args:
            error: raised to the generator's thread and to a waiting pull, if this worker shuts down.
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
        """Close the stream, because its call was cancelled or has timed out, or because the consumer's worker has ended.

        ``stop`` and ``late`` are parameters of ``Execution.cancel``; a stream ignores them.
        """
        self.close()

    def check(self) -> None:
        """Raise the ShutdownError with which the stream was closed, if any."""
        if self._error is not None:
            raise self._error

    # -- the pulling side -------------------------------------------------------------------------------

    def pull(self, taken: int) -> Future[Batch] | Batch:
        """Return the next items; if there are none yet, a future whose value will be the next items.

        Args:
            taken: how many items the consumer has taken in total.
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
        """Remove and return the content of one answer (None if there is none yet), and its size. The lock is held."""
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
        """Answer the waiting pull, if there is one, with the present items or the end."""
        with self._lock:
            asked = self._asked
            if asked is None:
                return
            batch, size = self._batch()
            if batch is None:
                return
            self._asked = None
        # A small answer is sent by this thread. Sending a large one may wait for the socket.
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
    """The streams that are produced or read in this process. Thread-safe: the tables change by atomic steps."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.me = WorkerKey(agent.record.rank, agent.record.incarnation)
        self._numbers = itertools.count(int.from_bytes(os.urandom(6), "big") << 16)
        self._producers: dict[int, Producer] = {}
        #: The readers of streams in this process, by the worker and number of the stream.
        self.consumers: weakref.WeakValueDictionary[tuple[WorkerKey, int], Any] = (
            weakref.WeakValueDictionary()
        )
        #: Makes the deadlock detector search soon, because a generator or a reader may have begun to wait.
        self.wake: Callable[[], None] = lambda: None
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
        entry: Any = None,
    ) -> Producer:
        """Begin a stream.

        Args:
            limit: how many items may be produced and not yet taken; 0: only their size is limited.
            peer: the consumer's worker; the stream is closed when it ends.
            owner: the argument with which :meth:`abort` ends the stream.
            entry: the actor's call in which the generator runs; None: no actor runs it.
        """
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
            RpcError: the stream has ended, or was closed.
        """
        producer = self._producers.get(stream)
        if producer is None:
            raise _shut_down() if self._over else _gone(stream)
        return producer

    def find(self, stream: int) -> Producer | None:
        """Return a stream's producer, or None."""
        return self._producers.get(stream)

    def pausing(self) -> list[Producer]:
        """Return the producers whose generators pause and are run by actors."""
        return [each for each in list(self._producers.values()) if each.pause and each.entry is not None]

    def all(self) -> list[Producer]:
        """Return the producing ends of all streams of this process."""
        return list(self._producers.values())

    def new_number(self) -> int:
        """Return a number that is unique in this group."""
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
        """Close all streams: threads that produce or pull get ShutdownError. Streams that are opened later are closed at once."""
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


def _shut_down() -> ShutdownError:
    return ShutdownError("the worker that produces this stream was shut down", maybe_executed=True)


def _gone(stream: int) -> RpcError:
    return RpcError(
        f"stream {stream:x} does not exist any longer: its actor has ended, or the stream was closed"
    )


# -- called by consumers on the producer's worker ------------------------------------------------------------


def pull(stream: int, taken: int) -> Any:
    """Answer with the next items of a stream, as soon as there is an item or the end. Called by RPC."""
    streams: Streams = runtime().streams
    found = streams.get(stream).pull(taken)
    return Deferred(found) if isinstance(found, Future) else found


def close_stream(stream: int) -> None:
    """Close a stream for its consumer; does nothing if it has ended. Called by RPC."""
    streams: Streams = runtime().streams
    producer = streams.find(stream)
    if producer is not None:
        producer.close()


# -- running generators --------------------------------------------------------------------------------------


#: Returns the error to send to the consumer for an error that a generator has raised.
Explain = Callable[[BaseException], BaseException]


def produce(generator: Generator[Any, Any, Any], producer: Producer, explain: Explain) -> None:
    """Run a generator in this thread until it ends or its stream is closed; its exception is sent to the consumer.

    While the thread of a reentrant actor waits for room, it runs the calls that descend from this call.

    Raises:
        ShutdownError: this worker shuts down.
        BaseException: the generator raised an exception that is not an Exception (KeyboardInterrupt, SystemExit). It was also
            sent to the consumer.
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
                producer.finish()
                return
            producer.put(item)
    except BaseException as error:
        cut_frames(error, __file__)
        producer.fail(explain(error))
        if not is_a(error, Exception):
            raise
    finally:
        try:
            generator.close()
        except Exception as error:
            _report_close("a generator", producer, error)
    producer.check()


async def aproduce(generator: AsyncGenerator[Any, Any], producer: Producer, explain: Explain) -> None:
    """Like :func:`produce`, for an async generator. Blocks no thread.

    If the generator awaits something when its stream is closed, this await raises CancelledError in the generator.
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
                producer.finish()
                return
            producer.put(item)
    except BaseException as error:
        if stop.caused_by_stop(error):
            return
        cut_frames(error, __file__)
        if is_a(error, asyncio.CancelledError):  # the task was cancelled, because the call was
            producer.fail(explain(CancelledError("the generator was cancelled", maybe_executed=True)))
        else:
            producer.fail(explain(error))
        if not is_a(error, Exception):
            raise
    finally:
        try:
            await generator.aclose()
        except Exception as error:
            _report_close("an async generator", producer, error)
    producer.check()


def _report_close(what: str, producer: Producer, error: Exception) -> None:
    text = "%s raised while it was being closed; a reader of stream %x does not get this error"
    report(_log, error, text, what, producer.stream)


class _Stop:
    """Cancels the task of an async generator that awaits something when its stream is closed.

    All methods but :meth:`_cancel_task` run in the loop's thread.
    """

    __slots__ = ("_awaits", "_cancelled", "_loop", "_task")

    def __init__(self, producer: Producer) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._awaits = False
        self._cancelled = False
        producer.on_close = self._cancel_task

    async def next(self, generator: AsyncGenerator[Any, Any]) -> Any:
        """Return the generator's next item."""
        self._awaits = True
        try:
            return await anext(generator)
        finally:
            self._awaits = False

    def caused_by_stop(self, error: BaseException) -> bool:
        """Say whether ``error`` is the cancellation by this object alone, and withdraw the cancellation from the task."""
        if not self._cancelled or not is_a(error, asyncio.CancelledError) or self._task is None:
            return False
        # If other code has cancelled the task as well, the count is not 0, and the task has to end.
        return self._task.uncancel() == 0

    def _cancel_task(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._stop)
        except RuntimeError:  # the loop is closed
            pass

    def _stop(self) -> None:
        if self._awaits and self._task is not None:
            self._cancelled = True
            self._task.cancel()
