"""Functions that wait for results: ``get`` for all, ``wait`` for the first few, ``as_completed`` for one after the other.

A function that waits for several results waits for a single future, which a :class:`_Collector` completes. While a thread of an
actor waits, it can run the calls that descend from the call that it executes.
"""

from __future__ import annotations

import asyncio
import heapq
import importlib
import sys
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import islice
from typing import Any, Final, Generic, TypeVar, overload

from actorrpc import _time
from actorrpc._exceptions import say
from actorrpc._torch import NativeFuture
from actorrpc.actors.refs.deadlines import INFINITE, deadline_of, late, time_is_over, time_left, wait_for
from actorrpc.actors.refs.object_ref import SOLE, ObjectRef
from actorrpc.actors.refs.snapshot import ATOMS, StoredResult
from actorrpc.agent.calls import CURRENT, Call
from actorrpc.errors import CancelledError, ConfigError, RemoteError, RpcTimeoutError
from actorrpc.futures import INTERRUPTED, Future, Progress, generation, interruption_point
from actorrpc.rpc.rref import RRef

__all__ = [
    "Arrivals",
    "Completed",
    "GetTimeoutError",
    "as_completed",
    "cover",
    "future_of",
    "gather",
    "get",
    "progress",
    "wait",
]

T = TypeVar("T")

GetTimeoutError = RpcTimeoutError
"""Ray's name for the error that :func:`get` raises when a result is not available in time."""


# -- waiting for one result --------------------------------------------------------------------------------


class Arrivals(Generic[T]):
    """A stream of results. :func:`wait` waits for its next result; :func:`as_completed` and :func:`get` take all results."""

    __slots__ = ()

    @abstractmethod
    def _arrival(self) -> Future[None]:
        """Return a future that completes when :meth:`next` can return without waiting."""

    @abstractmethod
    def next(self, *, timeout: float | None = None) -> ObjectRef[T]:
        """Remove and return the next result. Raises StopIteration at the end, RpcTimeoutError after ``timeout`` seconds."""

    @abstractmethod
    def _whole(self) -> AbstractContextManager[Future[None]]:
        """Request all results. The future that the context manager returns completes when all results have arrived."""

    @abstractmethod
    def cancel(self) -> bool:
        """Close the stream; False if it has ended."""

    @abstractmethod
    def _rest(self) -> list[T]:
        """Remove and return the values of all results that have arrived."""


def _start(item: Any, what: str, final: bool) -> Future[Any]:
    """Return the future of ``item``. If ``final`` is set, and the value is known to be on another worker, start to fetch it.

    Raises:
        TypeError: the function that ``what`` names cannot wait for ``item``.
        NotInitializedError: the future is pending, and was made before this process was forked.
    """
    if type(item) is ObjectRef:
        future = item._request()
        if not future.completed:
            future.check_process()
        elif final and type(future.value_or_none) is StoredResult:
            return item._settled()
        return future
    if isinstance(item, Future):
        item.check_process()
        return item
    if isinstance(item, RRef):
        return item._to_future()
    if isinstance(item, NativeFuture):
        return _adopted(item)
    if isinstance(item, Arrivals):
        raise TypeError(
            f"{what} takes ObjectRefs, not {_short(item)}: iterate over it or call next() for them, or .values() for the values"
        )
    raise TypeError(
        f"{what} takes ObjectRefs (the results of .remote()), Futures and RRefs, not {type(item).__name__} {_short(item)}"
    )


def _short(item: object) -> str:
    text = say(item, repr)
    return text if len(text) <= 60 else text[:57] + "..."


def future_of(item: Any, what: str) -> Future[Any]:
    """Return a future of an item's value. The value of an ObjectRef is made for this reader alone; a Future is returned itself.

    A value on another worker is fetched. Raises as :func:`get`.

    Args:
        what: the name of the function whose argument ``item`` is, for messages.
    """
    return item._final() if isinstance(item, ObjectRef) else _start(item, what, True)


def _start_any(item: Any, what: str, final: bool) -> Future[Any]:
    """Like :func:`_start`; for a stream, return the future of its next result."""
    return item._arrival() if isinstance(item, Arrivals) else _start(item, what, final)


def _adopted(other: Any) -> Future[Any]:
    """Return an actorrpc.Future that completes with the outcome of ``other``, a ``torch.futures.Future``."""
    future: Future[Any] = Future()
    future.label = "a torch.futures.Future"
    other.add_done_callback(lambda done: future.complete_with(done.value))
    return future


def cover(items: Iterable[Any], futures: Iterable[Future[Any]] = ()) -> None:
    """Do not log failures of the ObjectRefs among ``items``, and of ``futures``."""
    for each in _behind(items, futures):
        each.cover()


def _behind(items: Iterable[Any], futures: Iterable[Future[Any]]) -> list[Future[Any]]:
    """Return ``futures``, and the futures of the calls and fetches of the ObjectRefs among ``items``."""
    return [*futures, *(each for item in items if type(item) is ObjectRef for each in item._futures())]


def _flush(futures: Iterable[Future[Any]]) -> None:
    """Send the delayed messages, and let pool threads read the replies, because this thread will wait for another future."""
    conns = set()
    for future in futures:
        source = future.source
        while isinstance(source, Future):
            source = source.source
        if type(source) is Call:
            if source.conn in conns:
                continue
            conns.add(source.conn)
        future.flush()


# -- several results -----------------------------------------------------------------------------------------


class _Collector:
    """Collects complete results, for ``get``, ``wait`` and ``as_completed``.

    One thread at a time adds results and removes them. When the collector is freed, its watches are removed from the futures.

    Args:
        fetch: a large result on another worker counts only when it was fetched.
        fails: the first failed result ends the wait for all results.

    Attributes:
        watches: the results that were added, by number.
        ready: the watches whose results have ended, in the order in which they ended.
        failed: a result has failed, and ``fails`` is set.
        signal, wanted: the future to complete when ``wanted`` results are ready.
    """

    def __init__(self, fetch: bool, fails: bool = False) -> None:
        self.fetch, self.fails = fetch, fails
        self.watches: dict[int, _Watch] = {}
        self.ready: deque[_Watch] = deque()
        self.failed = False
        self.signal: Future[None] | None = None
        self.wanted = 0

    def __del__(self) -> None:
        # The attribute is missing if a signal handler has interrupted the constructor.
        for watch in vars(self).get("watches", {}).values():
            if not watch.future.completed:
                watch.future.remove_waiter(watch.ended)

    def awaited(self, count: int, label: str, needs_all: bool) -> Future[None] | None:
        """Return a future that completes when ``count`` results are ready, or :attr:`failed` is set; None if that is so already.

        Args:
            needs_all: the waiting thread needs all results that were added.
        """
        if self.failed or len(self.ready) >= count:
            return None
        signal: Future[None] = Future()
        signal.label = label
        if needs_all:
            signal.awaits = list(self.watches.values())  # for the search for deadlocks
        self.wanted, self.signal = count, signal
        # If a result ends now, either the next line counts it, or the thread that ends it reads `signal` and completes it.
        return None if self.failed or len(self.ready) >= count else signal

    def wait_until(self, until: float, count: int, label: str, needs_all: bool) -> bool:
        """Wait until ``count`` results are ready, or :attr:`failed` is set; return False at the deadline ``until``."""
        signal = self.awaited(count, label, needs_all)
        if signal is None:
            return True
        try:
            signal.wait(time_left(until))
        except RpcTimeoutError:
            return signal.completed
        finally:
            self.signal = None  # do not keep the results alive: the signal refers to the watches
        return True

    @property
    def futures(self) -> list[Future[Any]]:
        """The awaited futures, in the order of numbers. The future of a fetch replaces the future of a call."""
        return [each.future for each in self.watches.values()]


class _Watch:
    """Waits for one result of a collector. The code that makes a watch must call :func:`_flush` afterwards."""

    __slots__ = ("_collector", "future", "item", "number")

    def __init__(self, collector: _Collector, number: int, item: Any, future: Future[Any]) -> None:
        self._collector = weakref.ref(collector)
        self.item = item
        self.number = number
        self.future = future
        collector.watches[number] = self
        future.add_waiter(self.ended)

    def arm(self, future: Future[Any]) -> None:
        """Wait for ``future``, which replaces the former future of this watch."""
        self.future = future
        future.add_waiter(self.ended)

    def ended(self, future: Future[Any]) -> None:
        """Notify the collector. Runs in the thread that completes the future, so a pool thread fetches the value if necessary."""
        collector = self._collector()
        if collector is None:
            return
        value = future.value_or_none
        if type(value) is StoredResult and collector.fetch and type(self.item) is ObjectRef:
            value.rref._references.agent.submit(self._fetch)
            return
        if value is None and collector.fails and future.error is not None:
            collector.failed = True
        collector.ready.append(self)
        signal = collector.signal
        if signal is not None and (len(collector.ready) >= collector.wanted or collector.failed):
            signal.try_complete(None)

    def _fetch(self) -> None:
        """Start to fetch the value, which is on another worker, and watch the fetch."""
        collector = self._collector()  # keeps the collector alive until arm() has returned
        if collector is not None:
            self.arm(self.item._settled())
            _flush([self.future])


class _Gathering(Progress):
    """The source of a future of several values: see :func:`gather`."""

    __slots__ = ("_failed", "_futures", "_make", "_remaining", "future")

    def __init__(
        self, futures: list[Future[Any]], label: str, make: Any, failed: Callable[[int, BaseException], bool]
    ) -> None:
        self._futures, self._make, self._failed = futures, make, failed
        self._remaining = [None] * len(futures)
        self.future: Future[Any] = Future()
        self.future.label = label
        self.future.awaits = futures
        self.future.source = self
        for at, future in enumerate(futures):
            future.add_done_callback(partial(self._ended, at))
        if not futures:
            self._succeed()

    def _ended(self, at: int, done: Future[Any]) -> None:
        error = done.error
        if error is not None:
            done.acknowledge()
            if self._failed(at, error):
                self.future.try_fail(error)
                return
        self._remaining.pop()
        if not self._remaining:
            self._succeed()

    def _succeed(self) -> None:
        values = (future.value_or_none if future.error is None else future.error for future in self._futures)
        self.future.try_complete(self._make(values))

    def drive(self, _deadline: float | None) -> None:
        """Send the delayed messages. This thread does not read replies: while it reads a reply, another call could fail."""
        self.flush()

    def flush(self) -> None:
        _flush(self._futures)

    def cancel(self) -> bool:
        error = CancelledError(f"{self.future.label} was cancelled", maybe_executed=None)
        if not self.future.try_fail(error):
            return False
        for future in self._futures:
            future.cancel()
        return True


def gather(
    parts: Iterable[ObjectRef[Any] | Future[Any]],
    label: str,
    make: Callable[[Iterable[Any]], T] = list,  # type: ignore[assignment]
    failed: Callable[[int, BaseException], bool] = lambda at, error: True,
) -> Future[T]:
    """Return a future of the values of several results. No thread waits; fetches run concurrently; the caller flushes the future.

    Cancelling the future cancels all parts. Must not be called under a lock.

    Args:
        make: makes the future's value from the values of the parts, in order.
        failed: called with the number and the error of each part that fails. If it returns True, the future fails with this
            error at once; otherwise ``make`` gets the error in place of the part's value.
    """
    return _Gathering([future_of(each, label) for each in parts], label, make, failed).future


# -- get -----------------------------------------------------------------------------------------------------


@overload
def get(
    refs: ObjectRef[T] | Future[T] | RRef[T],
    *,
    timeout: float | None = None,
    copy: bool | None = None,
    cancel_on_interrupt: bool | None = None,
) -> T: ...
@overload
def get(
    refs: Arrivals[T] | Sequence[ObjectRef[T] | Future[T] | RRef[T]],
    *,
    timeout: float | None = None,
    copy: bool | None = None,
    cancel_on_interrupt: bool | None = None,
) -> list[T]: ...
@overload
def get(
    refs: Any,
    *,
    timeout: float | None = None,
    copy: bool | None = None,
    cancel_on_interrupt: bool | None = None,
) -> Any: ...
def get(
    refs: Any,
    *,
    timeout: float | None = None,
    copy: bool | None = None,
    cancel_on_interrupt: bool | None = None,
) -> Any:
    """Wait for results and return them. Large results are fetched from their workers, several at a time.

    Args:
        refs: an ObjectRef, an ObjectRefGenerator, or a list or tuple of them (and of lists of them); also Futures and RRefs.
        timeout: seconds for all results; None: until the calls end.
        copy: for large results, which the processes of a host share. None: tensors and arrays whose pages are copied when they
            are written to: quick to get, slow to overwrite completely. True: a copy. False: read-only arrays and memoryviews
            (not tensors: torch has no read-only tensors).
        cancel_on_interrupt: if Ctrl-C ends the wait, cancel the calls and streams of ``refs``. (After an interrupted
            ``get(handle.method.remote())``, you have no reference to cancel.) None: only in a notebook or a session of IPython.

    Returns:
        The result, or a list of results in the order of ``refs``. Each ``get`` of an ObjectRef makes a value of its own: changes
        are not visible to other readers. Only a small value that has a gradient history or cannot be copied is shared, and a
        tensor of :func:`share`, which follows the writes of its owner.
        The result of an ObjectRefGenerator is a list of all values that were not taken from it before. If the generator raises,
        or the time is up, the values stay in the ObjectRefGenerator and can be taken one by one.

    Raises:
        RpcTimeoutError: a result was not available in time (also known as GetTimeoutError). The calls continue.
        TypeError: ``refs`` contains an object that cannot be waited for.
        Exception: the error of a call; with several calls, the first error, at once. The failures of other calls are not logged.
    """
    try:
        if type(refs) is not ObjectRef:
            sole = type(refs) is list and sys.getrefcount(refs) == SOLE
            return _get_several(refs, deadline_of(timeout), timeout, copy, cancel_on_interrupt, sole)
        until = INFINITE
        execution = CURRENT.get()
        if timeout is None and (execution is None or execution.deadline == INFINITE):
            value = (refs._future or refs._request()).wait()  # the path of most calls
        else:
            until = deadline_of(timeout)
            value = wait_for(refs._request(), until, timeout)
        if type(value) in ATOMS:
            return value
        if type(value) is StoredResult:
            value = wait_for(refs._settled(), until, timeout)
        sole = sys.getrefcount(refs) == SOLE
        return refs._value(value, copy, sole)
    except KeyboardInterrupt as error:
        if type(refs) is ObjectRef:
            _interrupted(error, [refs], cancel_on_interrupt)
        raise
    finally:
        # The traceback of an error refers to this frame, and an ObjectRef refers to its error. Without this line they form a
        # cycle, which only the garbage collector frees.
        refs = None


def _interrupted(error: BaseException, items: Iterable[Any], wanted: bool | None) -> None:
    """If ``error`` is from Ctrl-C, cancel the items as requested by ``wanted``, the ``cancel_on_interrupt`` of :func:`get`."""
    if not isinstance(error, KeyboardInterrupt) or isinstance(error, RemoteError):
        return
    if wanted is None:
        shell: Any = sys.modules.get("IPython")
        wanted = shell is not None and shell.get_ipython() is not None
    if wanted:
        for each in items:
            if isinstance(each, (ObjectRef, Arrivals)):
                each.cancel()


def _get_several(
    refs: Any, until: float, timeout: float | None, copy: bool | None, cancel: bool | None, sole: bool
) -> Any:
    """Implement :func:`get` for every argument except a single ObjectRef.

    Args:
        sole: no other code refers to the list ``refs``. The list is then emptied, so that no other code can refer to its items.
    """
    try:
        if isinstance(refs, Arrivals):
            return _get_all([refs], until, timeout, copy, cancel)[0]
        if not isinstance(refs, (list, tuple)):
            return wait_for(_start(refs, "get()", True), until, timeout)
        flat, shape = list(refs), None
        if any(issubclass(kind, (list, tuple)) for kind in set(map(type, flat))):
            shape = [len(item) if isinstance(item, (list, tuple)) else -1 for item in flat]
            flat = [each for item in flat for each in (item if isinstance(item, (list, tuple)) else (item,))]
        if sole:
            del refs[:]  # type: ignore[union-attr]
        values = _get_all(flat, until, timeout, copy, cancel)
        if shape is None:
            return values
        rest = iter(values)
        return [next(rest) if size < 0 else list(islice(rest, size)) for size in shape]
    finally:
        refs = flat = None  # type: ignore[assignment]  # see get()


def _get_all(
    items: list[Any], until: float, timeout: float | None, copy: bool | None, cancel: bool | None
) -> list[Any]:
    """Wait for all items and return their values; ``items`` is emptied."""
    futures: list[Future[Any]] = []
    try:
        with ExitStack() as streams:
            forks = generation()
            for item in items:
                future = item._future if type(item) is ObjectRef else None
                if isinstance(item, Arrivals):
                    future = streams.enter_context(item._whole())
                elif future is None or forks or type(future.value_or_none) is StoredResult:
                    future = _start(item, "get()", True)
                futures.append(future)
            _wait_for_all(items, futures, until, timeout)
        values = []
        for at, future in enumerate(futures):
            item, items[at] = items[at], None
            value = future.value_or_none
            if type(item) is not ObjectRef:
                value = item._rest() if isinstance(item, Arrivals) else future.wait()
            elif type(value) not in ATOMS:
                if type(value) is StoredResult:  # when _start() examined the future, the call had not ended
                    future = item._settled()
                value = wait_for(future, until, timeout)
                sole = sys.getrefcount(item) == SOLE
                value = item._value(value, copy, sole)
            values.append(value)
        return values
    except BaseException as error:
        _interrupted(error, items, cancel)
        if time_is_over() or any(each.error is not None for each in _behind(items, futures)):
            cover(items, futures)
        raise
    finally:
        items.clear()  # see get()
        futures.clear()
        item = future = None


def _wait_for_all(items: list[Any], futures: list[Future[Any]], until: float, timeout: float | None) -> None:
    """Wait for all futures; raise the error of the first call that fails, as soon as it fails."""
    collector = signal = None
    try:
        pending = [future for future in futures if not future.completed]
        if len(pending) < len(futures):
            _raise_first(futures)
        if len(pending) == 1:
            # In wait_for(), this thread reads the reply itself, without a pool thread.
            wait_for(pending[0], until, timeout)
        elif pending:
            collector = _Collector(fetch=True, fails=True)
            for at, future in enumerate(futures):
                if not future.completed or type(future.value_or_none) is StoredResult:
                    _Watch(collector, at, items[at], future)
            _flush(pending)
            signal = collector.awaited(len(collector.watches), f"get() of {len(items)} results", True)
            if signal is not None:
                wait_for(signal, until, timeout)
            if collector.failed:
                _raise_first(collector.futures)
    finally:
        collector = pending = future = signal = None  # type: ignore[assignment]  # see get()


def _raise_first(futures: Iterable[Future[Any]]) -> None:
    for future in futures:
        if future.error is not None:
            try:
                future.wait()
            finally:
                del future, futures  # see get()


# -- wait ----------------------------------------------------------------------------------------------------


def wait(
    refs: Sequence[Any], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[Any], list[Any]]:
    """Wait until some of several results are available. A failed result counts as available.

    Args:
        refs: a list of different ObjectRefs (also Futures and RRefs), and of ObjectRefGenerators; a generator counts when its
            ``next()`` would return, or raise StopIteration, at once.
        num_returns: how many results to wait for.
        timeout: seconds; None: without limit; 0: do not wait.
        fetch_local: True: a large result on another worker counts when it was fetched; False: as soon as it exists.

    Returns:
        Two lists in the order of ``refs``: the first ``num_returns`` items that are ready, or fewer at the time-out; and all
        other items. A loop is fast if it passes the second list to the next ``wait``, as it is or with ObjectRefs appended.

    Raises:
        TypeError: ``refs`` is not a list, or contains an object that cannot be waited for.
        ValueError: an ObjectRef occurs twice, or ``num_returns`` or ``timeout`` is out of range.
    """
    if INTERRUPTED:
        interruption_point()
    if not isinstance(refs, (list, tuple)):
        raise TypeError(f"wait() takes a list of ObjectRefs, not {type(refs).__name__} {_short(refs)}")
    if isinstance(num_returns, bool) or not isinstance(num_returns, int):
        raise TypeError(f"num_returns must be an int, not {say(num_returns, repr)}")
    until = deadline_of(timeout)
    if not refs:
        return [], []
    if not 1 <= num_returns <= len(refs):
        raise ValueError(
            f"num_returns must be from 1 to the number of ObjectRefs, {len(refs)}, not {say(num_returns)}"
        )
    shared: list[_Registered] = refs.registered if type(refs) is _Unready else []
    try:
        registered = shared.pop()
    except IndexError:  # the list has no registration, or another thread uses it
        registered = _Registered(fetch_local)
    if not registered.begins(refs, fetch_local):
        shared, registered = [], _Registered(fetch_local)
    try:
        registered.extend(refs)
        registered.wait(num_returns, until)
        ready = registered.pop_ready(num_returns)
    finally:
        if registered.lasts:
            shared.append(registered)
    if registered.items and time_is_over():
        registered.cover()
    rest = _Unready(registered.items.values())
    rest.registered = shared
    return ready, rest


class _Unready(list[Any]):
    """The second list that :func:`wait` returns. The next call of :func:`wait` need not register the items of this list again.

    Attributes:
        registered: a list with the :class:`_Registered` of the items. It is empty while a call of :func:`wait` uses the
            :class:`_Registered`, and if the :class:`_Registered` cannot be used by another call (``lasts`` is False).
    """

    __slots__ = ("registered",)
    registered: list[_Registered]

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return list, (list(self),)


class _Registered(_Collector):
    """The results that :func:`wait` has not returned as ready yet. An :class:`_Unready` passes this object to the next call.

    Attributes:
        items: number -> result, in the order of ``refs``.
        lasts: whether the next call can use this object. False with streams: a stream has a new future after each item.
    """

    def __init__(self, fetch: bool) -> None:
        super().__init__(fetch)
        self.items: dict[int, Any] = {}
        self.lasts = True
        self._next = 0
        self._ended: list[int] = []  # the numbers of the results that have ended, a heap
        self._different: set[Any] | None = None  # the set of all items; None until a later wait() adds items
        self._born = generation()

    def begins(self, refs: Sequence[Any], fetch: bool) -> bool:
        """Return whether ``refs`` begins with the registered items, so that only the other items must be registered."""
        known = list(self.items.values())
        same = refs == known if len(refs) == len(known) else refs[: len(known)] == known
        return same and fetch is self.fetch and self._born == generation()

    def extend(self, refs: Sequence[Any]) -> None:
        """Register the results at the end of ``refs`` that are not registered yet.

        Raises:
            TypeError, ValueError: as :func:`wait`.
        """
        new = refs[len(self.items) :]
        if not new:
            return
        lasts = self.lasts and not any(isinstance(item, Arrivals) for item in new)
        self.lasts = False  # after an error below, only some of the new items are registered
        self._differ(new)
        fetch, ended = self.fetch, self._ended
        numbers = range(self._next, self._next + len(new))
        pending = []
        for number, item in zip(numbers, new, strict=True):
            future = _start_any(item, "wait()", fetch)
            if future.completed and not (fetch and type(future.value_or_none) is StoredResult):
                ended.append(number)
            else:
                pending.append(future)
                _Watch(self, number, item, future)
        heapq.heapify(ended)
        self.items.update(zip(numbers, new, strict=True))
        self._next = numbers.stop
        self.lasts = lasts
        _flush(pending)

    def _differ(self, new: Sequence[Any]) -> None:
        """Raise ValueError if a new item is equal to another new item or a registered item."""
        if self.items and self._different is None:
            self._different = set(self.items.values())
        # An ObjectRef without an identity is only equal to itself.
        identities = [item._id or id(item) if type(item) is ObjectRef else item for item in new]
        different = self._different
        if different is None and len(set(identities)) == len(new):
            return
        different = set() if different is None else different
        for item in new:
            if item in different:
                raise ValueError(f"wait() takes each ObjectRef once, and {item!r} occurs twice")
            different.add(item)

    def wait(self, count: int, until: float) -> None:
        """Wait until ``count`` results have ended, or until the deadline."""
        ended = self._ended
        while True:
            while self.ready:
                heapq.heappush(ended, self.ready.popleft().number)
            if len(ended) >= count or until <= _time.now():
                return
            of = len(self.items)
            self.wait_until(until, count - len(ended), f"wait() for {count} of {of}", count == of)

    def cover(self) -> None:
        """Do not log failures of these results: the call that this thread executes has reached its deadline in ``wait()``."""
        items = list(self.items.values())
        cover(items, [*self.futures, *(each for each in items if isinstance(each, Future))])

    def pop_ready(self, count: int) -> list[Any]:
        """Remove and return the first ``count`` results that have ended, in the order of ``refs``."""
        taken = [heapq.heappop(self._ended) for _ in range(min(count, len(self._ended)))]
        found = [self.items.pop(number) for number in taken]
        for number in taken:
            self.watches.pop(number, None)
        if self._different is not None:
            self._different.difference_update(found)
        return found


# -- as_completed --------------------------------------------------------------------------------------------


_NEXT: Final = "the next of several results"


class Completed(_Collector, Generic[T]):
    """The iterator, for ``for`` and for ``async for``, that :func:`as_completed` returns. Not thread-safe."""

    def __init__(
        self,
        refs: Iterable[Any],
        timeout: float | None,
        *,
        bar: bool = False,
        description: str | None = None,
        fetch: bool = True,
        needs_all: bool = False,
    ) -> None:
        super().__init__(fetch)
        self._until = deadline_of(timeout)
        self._timeout = timeout
        self._needs_all = needs_all
        items: list[Any] = list(refs)
        futures = [_start_any(item, "as_completed()", fetch) for item in items]
        self._remaining = len(items)  # the number of results and streams that the loop has not finished
        self.bar: Any = None
        if bar:
            streams = any(isinstance(item, Arrivals) for item in items)
            self.bar = _progress_bar(None if streams else len(items), description)
            if not items:
                self.bar.close()
        for number, (item, future) in enumerate(zip(items, futures, strict=True)):
            _Watch(self, number, item, future)
        _flush(futures)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while (found := self._next_ready(StopIteration)) is None:
            if not self.wait_until(self._until, 1, _NEXT, self._needs_all):
                raise self._late()
        return found

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while (found := self._next_ready(StopAsyncIteration)) is None:
            signal = self.awaited(1, _NEXT, self._needs_all)
            try:
                async with asyncio.timeout(time_left(self._until)):
                    if signal is not None:
                        await signal
            except TimeoutError:
                if signal is not None and not signal.completed:
                    raise self._late() from None
        return found

    def _next_ready(self, stop: type[Exception]) -> T | None:
        """Return the next result that has ended; None if the loop must wait for it; raise ``stop`` after the last result."""
        if INTERRUPTED:
            interruption_point()
        while self._remaining:
            if not self.ready:
                return None
            watch = self.ready.popleft()
            found: Any
            if isinstance(watch.item, Arrivals):
                found = self._item_of(watch)
            else:
                self._remaining -= 1
                found = watch.item
            if self.bar is not None:
                if found is not None:
                    self.bar.update()
                if not self._remaining:
                    self.bar.close()
            if found is not None:
                return found  # type: ignore[no-any-return]
        raise stop

    def _item_of(self, watch: _Watch) -> ObjectRef[Any] | None:
        """Take the next item of a stream, if it has arrived, and watch for the item after it. Does not block."""
        stream = watch.item
        found = None
        try:
            found = stream.next(timeout=0)
        except StopIteration:
            self._remaining -= 1
            return None
        except RpcTimeoutError:  # another reader of the stream has taken the item
            pass
        watch.arm(stream._arrival())
        return found

    def _late(self) -> RpcTimeoutError:
        if time_is_over():
            self.cover()
        return late(f"one of {self._remaining} results", self._timeout)

    def cover(self) -> None:
        """Do not log failures of the results for which this iterator still waits."""
        cover([each.item for each in self.watches.values()], self.futures)


def _progress_bar(total: int | None, description: str | None) -> Any:
    """Return a new progress bar of tqdm. ``total``: the number of items; None: unknown."""
    try:
        tqdm = importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise ConfigError(f"progress bars are tqdm's ({error}): pip install 'actorrpc[progress]'") from None
    return tqdm(total=total, desc=description)


@overload
def as_completed(
    refs: Iterable[ObjectRef[T] | Arrivals[T]],
    timeout: float | None = None,
    *,
    progress: bool = False,
    fetch_local: bool = True,
) -> Completed[ObjectRef[T]]: ...
@overload
def as_completed(
    refs: Iterable[T], timeout: float | None = None, *, progress: bool = False, fetch_local: bool = True
) -> Completed[T]: ...
def as_completed(
    refs: Iterable[Any], timeout: float | None = None, *, progress: bool = False, fetch_local: bool = True
) -> Completed[Any]:
    """Return an iterator over ObjectRefs (or Futures, or RRefs) in the order in which their results become available.

    ObjectRefs of failed calls are included; ``get`` raises their error. Works with ``for`` and ``async for``. In place of an
    ObjectRefGenerator, the loop gets the ObjectRefs of its items, each of which is taken from the generator at this moment.

    Args:
        timeout: seconds for the whole iteration; None: no limit.
        progress: show a progress bar, like :func:`progress`, that counts the items that the loop has got.
        fetch_local: True: a large result on another worker counts when it was fetched; False: as soon as it exists.

    Raises:
        TypeError: ``refs`` contains an object that cannot be waited for.
        ConfigError: ``progress`` is set, and tqdm is not installed.
        RpcTimeoutError: while iterating: a result was not available in time.
    """
    return Completed(refs, timeout, bar=progress, fetch=fetch_local)


def progress(
    refs: Sequence[ObjectRef[T] | Future[T] | RRef[T]],
    *,
    description: str | None = None,
    timeout: float | None = None,
) -> list[T]:
    """Wait for results as :func:`get` does, and show how many of them are available.

    tqdm (``pip install 'actorrpc[progress]'``) shows the progress bar, on stderr or in a notebook; environment variables of tqdm
    apply, like ``TQDM_DISABLE=1``.

    Args:
        refs: a list of ObjectRefs; also Futures and RRefs.
        description: the text in front of the bar.
        timeout: seconds for all results; None: until the calls end.

    Returns:
        The results, in the order of ``refs``.

    Raises:
        ConfigError: tqdm is not installed.
        RpcTimeoutError: a result was not available in time. The calls continue.
        TypeError: ``refs`` contains an object that cannot be waited for.
        Exception: the error of a call; with several calls, the first error, at once.
    """
    # Keep the futures of items that are not ObjectRefs, because get() would fetch the value of such an item again.
    items: list[Any] = [
        each if type(each) is ObjectRef else _start(each, "progress()", True) for each in refs
    ]
    done: Completed[Any] = Completed(items, timeout, bar=True, description=description, needs_all=True)
    try:
        for each in done:
            get(each)
    except BaseException:
        if time_is_over() or any(each.error is not None for each in done.futures):
            done.cover()
        raise
    finally:
        done.bar.close()
    return [get(each) for each in items]
