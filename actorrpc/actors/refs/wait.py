"""Waiting for results: one, several, the first ones, one after the other.

Whatever waits for several results here waits for one future of its own, which a :class:`_Collector` completes. So a thread of an
actor that waits can run calls that descend from its own, whatever it waits for.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import islice
from typing import Any, Final, Generic, TypeVar, overload

import torch

from actorrpc import _time
from actorrpc._exception_text import is_of_handler, say
from actorrpc.actors.refs.object_ref import SOLE, ObjectRef
from actorrpc.actors.refs.progress_bar import progress_bar
from actorrpc.actors.refs.results import ATOMS, StoredResult
from actorrpc.agent.calls import CURRENT, Call
from actorrpc.errors import RemoteError, RpcTimeoutError
from actorrpc.futures import INTERRUPTED, Future, generation, interruption_point
from actorrpc.rpc.rref import RRef
from actorrpc.validation import wait_limit

__all__ = [
    "Arrivals",
    "Completed",
    "GetTimeoutError",
    "all_of",
    "as_completed",
    "cover",
    "deadline_of",
    "get",
    "progress",
    "time_left",
    "wait",
]

T = TypeVar("T")

GetTimeoutError = RpcTimeoutError
"""Ray's name for what :func:`get` raises when a result is not there in time."""

_ANY_FUTURE: Final[type] = torch._C.Future
_WAITABLE: Final = (ObjectRef, RRef, _ANY_FUTURE)
_REFS: Final = frozenset({ObjectRef})
_INFINITE: Final = float("inf")


# -- what can be waited for --------------------------------------------------------------------------------


class Arrivals(Generic[T]):
    """What gives results one by one, a stream.

    :func:`wait` waits for the next one, and takes nothing; :func:`as_completed` takes each as it comes; :func:`get` takes all
    that are left, at their end.
    """

    __slots__ = ()

    def _arrival(self) -> Future[None]:
        """Return a future that completes when there is something to take, or the end to see."""
        raise TypeError(f"{self!r} gives nothing")

    def next(self, *, timeout: float | None = None) -> ObjectRef[T]:
        """Take the next one."""
        raise TypeError(f"{self!r} gives nothing")

    def _whole(self) -> AbstractContextManager[Future[None]]:
        """Have all come, to be taken when the future is complete."""
        raise TypeError(f"{self!r} gives nothing")

    def cancel(self) -> bool:
        """Close the stream; False if it was over."""
        raise TypeError(f"{self!r} gives nothing")

    def _rest(self) -> list[T]:
        """Take the values of all that are here."""
        raise TypeError(f"{self!r} gives nothing")


def _start(item: Any, what: str, final: bool) -> Future[Any]:
    """Return the future to wait for; of a value that is known to be elsewhere, start to fetch it if ``final``.

    Raises:
        TypeError: there is nothing to wait for.
        NotInitializedError: it is pending in the process of which this one is a fork.
    """
    if type(item) is ObjectRef:
        future = item._ask()
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
    if isinstance(item, _ANY_FUTURE):
        return _adopted(item)
    raise _nothing_to_wait_for(item, what)


def _nothing_to_wait_for(item: object, what: str) -> TypeError:
    if isinstance(item, Arrivals):
        return TypeError(
            f"{what} takes ObjectRefs, not {_short(item)}: iterating over it gives them, or next(), and .values() the values"
        )
    return TypeError(
        f"{what} takes ObjectRefs (what .remote() returns), Futures and RRefs, not {type(item).__name__} {_short(item)}"
    )


def _short(item: object) -> str:
    text = say(item, repr)
    return text if len(text) <= 60 else text[:57] + "..."


def _adopted(other: Any) -> Future[Any]:
    """Return a future of ours that follows one of torch's."""
    future: Future[Any] = Future()
    future.label = "a torch.futures.Future"

    def done(completed: Any) -> None:
        try:
            value = completed.value()
        except BaseException as error:
            future.set_exception(error)
            if is_of_handler(error):
                raise
        else:
            future.set_result(value)

    other.add_done_callback(done)
    return future


def deadline_of(timeout: float | None) -> float:
    """Return when a wait must end, on the monotonic clock: at its time-out, or when the call must be over that it is in.

    Raises:
        WrongTypeError, ConfigError: ``timeout`` is no number of seconds, or negative.
    """
    until = _INFINITE if timeout is None else _time.now() + wait_limit(timeout)
    execution = CURRENT.get()
    return until if execution is None else min(until, execution.deadline)


def time_left(until: float) -> float | None:
    """Return the seconds until then; None for ever."""
    return None if until == _INFINITE else max(0.0, until - _time.now())


# -- several results -----------------------------------------------------------------------------------------


class _Collector:
    """Collects the results that have ended, for ``get``, ``wait``, ``as_completed`` and ``all_of``.

    One thread at a time adds results and takes them out. :meth:`close` it, or results that are still to come keep it.

    Args:
        fetch: a large result that is elsewhere counts when it has been fetched.
        fails: a failed result ends the wait for all.

    Attributes:
        watches: the results that were added, by number.
        ready: the watches whose results have ended, in the order in which they ended.
        failed: one of them has, where ``fails`` is set.
        signal, wanted: the future to complete when so many are ready.
    """

    __slots__ = ("failed", "fails", "fetch", "ready", "signal", "wanted", "watches")

    def __init__(self, fetch: bool, fails: bool = False) -> None:
        self.fetch, self.fails = fetch, fails
        self.watches: dict[int, _Watch] = {}
        self.ready: deque[_Watch] = deque()
        self.failed = False
        self.signal: Future[None] | None = None
        self.wanted = 0

    def add(self, number: int, item: Any, future: Future[Any]) -> None:
        """Add a result, and wait for its future; the caller flushes the gathered messages."""
        watch = self.watches[number] = _Watch(self, item, number)
        watch.arm(future)

    def awaited(self, count: int, label: str, needs_all: bool) -> Future[None] | None:
        """Return a future that completes when ``count`` results are ready, or one has failed; None if that is already true.

        Args:
            needs_all: the waiting thread needs all results that were added.
        """
        if self.failed or len(self.ready) >= count:
            return None
        signal: Future[None] = Future()
        signal.label = label
        if needs_all:
            signal.awaits = list(self.watches.values())  # the search for deadlocks looks here
        self.wanted, self.signal = count, signal
        # Looked at again after the line above: seen here, or by the thread that ends a result.
        return None if self.failed or len(self.ready) >= count else signal

    @property
    def futures(self) -> list[Future[Any]]:
        """The futures that are waited for, by number; the future of a fetch replaces the future of its call."""
        return [each.future for each in self.watches.values()]

    def close(self) -> None:
        """Be told nothing any more."""
        for watch in self.watches.values():
            watch.future.remove_waiter(watch)
        self.watches.clear()  # they refer to the collector, as what the signal awaits does
        self.ready.clear()
        self.signal = None


class _Watch:
    """Waits for one result of a collector."""

    __slots__ = ("_collector", "future", "item", "number")

    def __init__(self, collector: _Collector, item: Any, number: int) -> None:
        self._collector = collector
        self.item = item
        self.number = number

    def arm(self, future: Future[Any]) -> None:
        """Wait for a future."""
        self.future = future
        future.add_waiter(self)

    def ended(self, future: Future[Any]) -> None:
        """Tell the collector. Runs on the thread that ends the result, and must not block: a pool thread fetches values."""
        collector = self._collector
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
        """Go on with the value itself, which is elsewhere."""
        if self.number in self._collector.watches:  # otherwise it is closed
            self.arm(self.item._settled())
            _flush([self.future])


def _flush(futures: Iterable[Future[Any]]) -> None:
    """Send what is still gathered for any of these, and have the pool read all their replies: somebody is going to wait."""
    conns = set()
    for future in futures:
        source = future.source
        if type(source) is Call:
            if source.conn in conns:
                continue
            conns.add(source.conn)
        future.flush()


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
    refs: Arrivals[T],
    *,
    timeout: float | None = None,
    copy: bool | None = None,
    cancel_on_interrupt: bool | None = None,
) -> list[T]: ...
@overload
def get(
    refs: Sequence[ObjectRef[T] | Future[T] | RRef[T]],
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
    """Wait for results and return them. Large ones are fetched from where they are, several at a time.

    Args:
        refs: an ObjectRef, an ObjectRefGenerator, or a list or tuple of them (and of lists of them); Futures and RRefs will do,
            too.
        timeout: seconds for all of it; None: until the calls are over.
        copy: of large results, which the processes of a host share, None makes tensors and arrays whose pages become their own
            as they are written to, which is quick to get, and slow to overwrite as a whole; True makes a copy; False makes
            arrays and memoryviews that can only be read (no tensors: torch has none of that kind).
        cancel_on_interrupt: cancel the calls and streams of ``refs`` where Ctrl-C ends the wait, and no later call can, as in
            ``get(handle.method.remote())``. None: in a notebook or another session of IPython only.

    Returns:
        The result, or a list of results in the order of ``refs``. Each ``get`` gives values of its own: what is done to them,
        nobody else sees.
        The result of an ObjectRefGenerator is a list of all values that have not been taken from it. If it raises, or time is
        up, they stay in it, to be taken one by one.

    Raises:
        RpcTimeoutError: not everything was there in time (also known as GetTimeoutError). The calls go on.
        TypeError: there is nothing to wait for in ``refs``.
        Exception: what a call raised; of several, the first that fails, at once. What the others raise is not logged as
            something that nobody looked at.
    """
    try:
        if type(refs) is ObjectRef:
            execution = CURRENT.get()
            until = _INFINITE
            if timeout is None and (execution is None or execution.deadline == _INFINITE):
                value = (refs._future or refs._ask()).wait()  # the path of most calls
            else:
                until = deadline_of(timeout)
                value = _wait_for(refs._ask(), until, timeout)
            if type(value) in ATOMS:
                return value
            if type(value) is StoredResult:
                value = _wait_for(refs._settled(), until, timeout)
            sole = sys.getrefcount(refs) == SOLE
            return refs._value(value, copy, sole)
        until = deadline_of(timeout)
        if not isinstance(refs, (list, tuple)):
            if isinstance(refs, Arrivals):
                return _get_all([refs], until, timeout, copy, cancel_on_interrupt)[0]
            return _wait_for(_start(refs, "get()", True), until, timeout)
        flat: list[Any] = []
        sole = type(refs) is list and sys.getrefcount(refs) == SOLE
        for item in refs:
            if isinstance(item, (list, tuple)):
                flat.extend(item)
            else:
                flat.append(item)
        shape = [len(item) if isinstance(item, (list, tuple)) else -1 for item in refs]
        if sole:  # nobody else has the list, so that its references can be known to be nobody else's
            item = None
            del refs[:]  # type: ignore[union-attr]
        values = iter(_get_all(flat, until, timeout, copy, cancel_on_interrupt))
        return [next(values) if size < 0 else list(islice(values, size)) for size in shape]
    except KeyboardInterrupt as error:
        if type(refs) is ObjectRef:
            _interrupted(error, [refs], cancel_on_interrupt)
        raise
    finally:
        # An error's traceback has this frame, and the references the error: no cycle, or what its frames have waits for the
        # collector.
        refs = flat = item = None  # type: ignore[assignment]


def _interrupted(error: BaseException, items: Iterable[Any], wanted: bool | None) -> None:
    """Cancel what was waited for, if Ctrl-C has ended the wait and that is wanted; ``wanted``: see :func:`get`."""
    if not isinstance(error, KeyboardInterrupt) or isinstance(error, RemoteError):
        return
    if wanted is None:
        shell: Any = sys.modules.get("IPython")
        wanted = shell is not None and shell.get_ipython() is not None
    if wanted:
        for each in items:
            if isinstance(each, (ObjectRef, Arrivals)):
                each.cancel()


def _opened(item: Any, future: Future[Any], copy: bool | None = None) -> Any:
    """Return the value of what was waited for; of an ObjectRef, one that nobody else has."""
    value = future.wait()
    if type(item) is not ObjectRef:
        return value
    sole = sys.getrefcount(item) == SOLE + 1  # the caller has it in a variable, too
    return item._value(value, copy, sole)


def _wait_for(future: Future[Any], until: float, timeout: float | None) -> Any:
    try:
        if until == _INFINITE:
            return future.wait()
        if not future.completed:
            try:
                return future.wait(max(0.0, until - _time.now()))
            except RpcTimeoutError:
                if not future.completed:
                    if timeout is None and deadline_of(None) > _time.now():  # it was put off, for a debugger
                        return _wait_for(future, deadline_of(None), None)
                    if _time_is_over():
                        future.cover()
                    raise _late(f"{future.label}", timeout) from None
        return future.wait()
    finally:
        del future  # an error's traceback has this frame: see get()


def _time_is_over() -> bool:
    """Whether the call that waits must be over: what it waits for ends with it, and it hears of that no more."""
    execution = CURRENT.get()
    return execution is not None and execution.deadline <= _time.now()


def _late(what: str, timeout: float | None) -> RpcTimeoutError:
    bound = "the time of the call that waits for it" if timeout is None else f"{say(timeout)} s"
    return RpcTimeoutError(
        f"{what} was not complete within {bound}; it goes on: get() it again, or cancel() it"
    )


def _get_all(
    items: list[Any], until: float, timeout: float | None, copy: bool | None, cancel: bool | None
) -> list[Any]:
    if not _REFS.issuperset(map(type, items)) and any(isinstance(item, Arrivals) for item in items):
        with ExitStack() as stack:
            ends = [stack.enter_context(e._whole()) if isinstance(e, Arrivals) else e for e in items]
            try:
                values = _get_each(ends, until, timeout, copy, cancel)
            except KeyboardInterrupt as error:
                _interrupted(error, items, cancel)
                raise
        return [
            e._rest() if isinstance(e, Arrivals) else value for e, value in zip(items, values, strict=True)
        ]
    return _get_each(items, until, timeout, copy, cancel)


def _get_each(
    items: list[Any], until: float, timeout: float | None, copy: bool | None, cancel: bool | None
) -> list[Any]:
    futures: list[Future[Any]] = []
    forks = generation()
    for item in items:
        future = item._future if type(item) is ObjectRef else None
        if future is None or forks:
            future = _start(item, "get()", True)
        elif type(future.value_or_none) is StoredResult:  # as _start() does
            future = item._settled()
        futures.append(future)
    item = future = None
    try:
        _wait_for_all(items, futures, until, timeout)
        values = []
        for at, future in enumerate(futures):
            item, items[at] = items[at], None
            value = future.value_or_none
            if type(value) in ATOMS:  # as most are
                values.append(value)
                continue
            if type(value) is StoredResult and type(item) is ObjectRef:  # it has come since it was looked for
                future = futures[at] = item._settled()
                _wait_for(future, until, timeout)
            values.append(_opened(item, future, copy))
        return values
    except BaseException as error:
        _interrupted(error, items, cancel)
        if _time_is_over() or any(each.error is not None for each in _behind(items, futures)):
            cover(items, futures)
        items.clear()  # they are the caller's own list: see get()
        futures.clear()
        raise


def _behind(items: Sequence[Any], futures: Sequence[Future[Any]]) -> list[Future[Any]]:
    """Return the futures whose failures end a wait for several results: those of calls and those of fetches."""
    return [*futures, *(each for item in items if type(item) is ObjectRef for each in item._futures())]


def cover(items: Sequence[Any], futures: Sequence[Future[Any]] = ()) -> None:
    """Have the failures not be reported of ObjectRefs among the items, and of these futures."""
    for each in _behind(items, futures):
        each.cover()


def _wait_for_all(items: list[Any], futures: list[Future[Any]], until: float, timeout: float | None) -> None:
    """Wait for all; raise what the first one failed with."""
    collector = None
    try:
        pending = [future for future in futures if not future.completed]
        if len(pending) < len(futures):
            _raise_first(futures)
        if len(pending) == 1:
            _wait_for(pending[0], until, timeout)  # its own wait reads the reply, without another thread
        elif pending:
            collector = _Collector(fetch=True, fails=True)
            for at, future in enumerate(futures):
                if not future.completed or type(future.value_or_none) is StoredResult:
                    collector.add(at, items[at], future)
            _flush(pending)
            signal = collector.awaited(len(collector.watches), f"get() of {len(items)} results", True)
            if signal is not None:
                _wait_for(signal, until, timeout)
            if collector.failed:
                _raise_first(collector.futures)
    finally:
        if collector is not None:
            collector.close()
        # An error's traceback has this frame: see get().
        collector = pending = future = signal = None  # type: ignore[assignment]


def _raise_first(futures: Iterable[Future[Any]]) -> None:
    for future in futures:
        if future.error is not None:
            try:
                future.wait()
            finally:
                del future, futures  # an error's traceback has this frame: see get()


def all_of(refs: Sequence[Any]) -> Future[list[Any]]:
    """Return a Future of the values of several ObjectRefs, in order; it fails as soon as one of them does.

    Nothing waits: the fetches of those that are elsewhere run side by side. Must not be called under a lock.
    """
    values: Future[list[Any]] = Future()
    values.label = f"{len(refs)} results"
    collector = _Collector(fetch=True, fails=True)
    for at, ref in enumerate(refs):
        collector.add(at, ref, _start(ref, "all_of()", True))
    _flush(collector.futures)

    def ended(_: object) -> None:
        futures = collector.futures
        collector.close()
        for future in futures:
            if future.error is not None:
                cover(refs, futures)
                values.set_exception(future.error)
                return
        try:
            found = [_opened(ref, future) for ref, future in zip(refs, futures, strict=True)]
        except BaseException as error:
            values.set_exception(error)
            if is_of_handler(error):
                raise
        else:
            values.set_result(found)

    signal = collector.awaited(len(refs), values.label, True)
    if signal is None:
        ended(None)
    else:
        signal.add_done_callback(ended)
    return values


# -- wait ----------------------------------------------------------------------------------------------------


def wait(
    refs: Sequence[Any], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[Any], list[Any]]:
    """Wait until some of several results are there, failed ones included.

    Args:
        refs: a list of different ObjectRefs (Futures and RRefs will do, too), and of ObjectRefGenerators: one of those
            counts when its ``next()`` returns, or raises StopIteration, at once.
        num_returns: so many are waited for.
        timeout: seconds; None waits without a bound, 0 only looks.
        fetch_local: a large result that is elsewhere counts when it has been fetched; False: as soon as it exists.

    Returns:
        The first ``num_returns`` that are ready, or fewer where time was up, and all others; both in the order of ``refs``.
        A loop is quick where it gives this second list to the next call, as it is or with other ObjectRefs appended.

    Raises:
        TypeError: ``refs`` is not a list, or there is nothing to wait for in it.
        ValueError: an ObjectRef is in it twice, or ``num_returns`` or ``timeout`` makes no sense.
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
    except IndexError:  # there is none, or another thread has it
        registered = _Registered(fetch_local)
    if not registered.begins(refs, fetch_local):
        shared, registered = [], _Registered(fetch_local)
    try:
        registered.extend(refs)
        registered.wait(num_returns, until)
        ready = registered.take(num_returns)
    finally:
        if registered.lasts:
            shared.append(registered)
    if not registered.items:
        return ready, []
    if _time_is_over():
        registered.cover()
    rest = _Unready(registered.items.values())
    rest.registered = shared
    return ready, rest


class _Unready(list[Any]):
    """The second list that :func:`wait` returns. If it is passed to the next call, that call need not register its items again.

    Attributes:
        registered: a list with the :class:`_Registered` of the items. It is empty while a call of :func:`wait` uses the
            :class:`_Registered`, and if the :class:`_Registered` cannot be used by another call (``lasts`` is False).
    """

    __slots__ = ("registered",)
    registered: list[_Registered]

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return list, (list(self),)


class _Collecting:
    """Has a collector, which ends with it."""

    _collector: Any = None  # where a signal handler has cut the constructor short

    def __del__(self) -> None:
        if self._collector is not None:
            self._collector.close()


class _Registered(_Collecting):
    """The results that :func:`wait` has still to return, from call to call. One thread uses it at a time.

    Attributes:
        items: the results, in order, by numbers that grow from one to the next.
        lasts: it is good for another call. A stream gives a new future after each item.
    """

    def __init__(self, fetch: bool) -> None:
        self.items: dict[int, Any] = {}
        self.lasts = True
        self._collector = _Collector(fetch)
        self._next = 0
        self._ended: list[int] = []  # the numbers of those that have, a heap
        self._different: set[Any] | None = None  # the items, where some were added later
        self._born = generation()

    def begins(self, refs: Sequence[Any], fetch: bool) -> bool:
        """Say whether ``refs`` begins with the items that are registered, and others can be added to them."""
        known = list(self.items.values())
        same = refs == known if len(refs) == len(known) else refs[: len(known)] == known
        return same and fetch is self._collector.fetch and self._born == generation()

    def extend(self, refs: Sequence[Any]) -> None:
        """Register the results at the end of ``refs`` that are not registered yet.

        Raises:
            TypeError, ValueError: as :func:`wait`.
        """
        new = refs[len(self.items) :]
        if not new:
            return
        if not _REFS.issuperset(map(type, new)):
            for item in new:
                if not isinstance(item, (*_WAITABLE, Arrivals)):
                    raise _nothing_to_wait_for(item, "wait()")
                self.lasts = self.lasts and not isinstance(item, Arrivals)
        lasts = self.lasts
        self.lasts = False  # an error from here on leaves only some of the new items registered
        self._differ(new)
        fetch, ended = self._collector.fetch, self._ended
        numbers = range(self._next, self._next + len(new))
        pending = []
        for number, item in zip(numbers, new, strict=True):
            if isinstance(item, Arrivals):
                future: Future[Any] = item._arrival()
            else:
                future = _start(item, "wait()", fetch)
            if future.completed and not (fetch and type(future.value_or_none) is StoredResult):
                ended.append(number)
            else:
                pending.append(future)
                self._collector.add(number, item, future)
        heapq.heapify(ended)
        self.items.update(zip(numbers, new, strict=True))
        self._next = numbers.stop
        self.lasts = lasts
        _flush(pending)

    def _differ(self, new: Sequence[Any]) -> None:
        """Check that the new items differ from each other, and from those that are registered."""
        if self.items and self._different is None:
            self._different = set(self.items.values())
        # One that has no identity yet is equal to itself only.
        identities = [item._id or id(item) if type(item) is ObjectRef else item for item in new]
        different = self._different
        if different is None and len(set(identities)) == len(new):
            return
        different = set() if different is None else different
        for item in new:
            if item in different:
                raise ValueError(f"wait() takes each ObjectRef once, and {item!r} is there twice")
            different.add(item)

    def wait(self, count: int, until: float) -> None:
        """Wait until so many results have ended, or the time is up."""
        ended, collector = self._ended, self._collector
        while True:
            while collector.ready:
                heapq.heappush(ended, collector.ready.popleft().number)
            if len(ended) >= count or until <= _time.now():
                return
            of = len(self.items)
            signal = collector.awaited(count - len(ended), f"wait() for {count} of {of}", count == of)
            if signal is not None:
                try:
                    signal.wait(time_left(until))
                except RpcTimeoutError:  # what has come by then is looked at above
                    pass
                finally:
                    collector.signal = None  # it names the watches, which refer to the collector

    def cover(self) -> None:
        """Suppress the reports of failures of these results: the waiting thread has timed out."""
        items = list(self.items.values())
        cover(items, [*self._collector.futures, *(each for each in items if isinstance(each, Future))])

    def take(self, count: int) -> list[Any]:
        """Take out the first ``count`` of the results that have ended, in order."""
        taken = [heapq.heappop(self._ended) for _ in range(min(count, len(self._ended)))]
        found = [self.items.pop(number) for number in taken]
        for number in taken:
            self._collector.watches.pop(number, None)
        if self._different is not None:
            self._different.difference_update(found)
        return found


# -- as_completed --------------------------------------------------------------------------------------------


class Completed(_Collecting, Generic[T]):
    """What :func:`as_completed` returns: an iterator for ``for`` and for ``async for``; use it in one place only."""

    def __init__(
        self,
        refs: Iterable[Any],
        timeout: float | None,
        *,
        bar: bool = False,
        description: str | None = None,
        fetch: bool = True,
    ) -> None:
        self._collector = _Collector(fetch)
        self._until = deadline_of(timeout)
        self._timeout = timeout
        self._awaits_all = False
        items: list[Any] = list(refs)
        futures = [
            item._arrival() if isinstance(item, Arrivals) else _start(item, "as_completed()", fetch)
            for item in items
        ]
        # What watches a stream does not hold it: one that is dropped with this iterator is closed.
        self._streams = [item for item in items if isinstance(item, Arrivals)]
        self._left = len(items)  # results, and streams that are not over
        self._bar: Any = None
        if bar:
            self._bar = progress_bar(None if self._streams else len(items), description)
            if not items:
                self._bar.close()
        for number, (item, future) in enumerate(zip(items, futures, strict=True)):
            watched = weakref.ref(item) if isinstance(item, Arrivals) else item
            self._collector.add(number, watched, future)
        _flush(futures)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while True:
            found, signal = self._take(StopIteration)
            if signal is None:
                return found  # type: ignore[no-any-return]
            try:
                signal.wait(time_left(self._until))
            except RpcTimeoutError:
                if not signal.completed:
                    raise self._late() from None

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while True:
            found, signal = self._take(StopAsyncIteration)
            if signal is None:
                return found  # type: ignore[no-any-return]
            try:
                async with asyncio.timeout(time_left(self._until)):
                    await signal
            except TimeoutError:
                if not signal.completed:
                    raise self._late() from None

    def _take(self, stop: type[Exception]) -> tuple[Any, Future[None] | None]:
        if INTERRUPTED:
            interruption_point()
        collector = self._collector
        while self._left:
            signal = collector.awaited(1, "the next of several results", self._awaits_all)
            if signal is not None:
                return None, signal
            watch = collector.ready.popleft()
            if type(watch.item) is weakref.ref:
                found = self._item_of(watch)
            else:
                self._left -= 1
                found = watch.item
            if self._bar is not None:
                if found is not None:
                    self._bar.update()
                if not self._left:
                    self._bar.close()
            if found is not None:
                return found, None
        raise stop

    def _item_of(self, watch: _Watch) -> ObjectRef[Any] | None:
        """Take the next item of a stream, and watch for the one behind it; None where it is over."""
        stream = watch.item()
        found = None
        try:
            found = stream.next(timeout=0)
        except StopIteration:
            self._left -= 1
            return None
        except RpcTimeoutError:  # another reader of the stream has taken it
            pass
        watch.arm(stream._arrival())
        return found

    def all(self) -> None:
        """Wait for all of them; the first that fails ends it, with what it raises."""
        self._awaits_all = True
        try:
            for item in self:
                get(item)
        except BaseException:
            if _time_is_over() or any(each.error is not None for each in self._collector.futures):
                self._cover()
            raise
        finally:
            if self._bar is not None:
                self._bar.close()

    def _late(self) -> RpcTimeoutError:
        if _time_is_over():
            self._cover()
        return _late(f"one of {self._left} results", self._timeout)

    def _cover(self) -> None:
        cover([each.item for each in self._collector.watches.values()], self._collector.futures)


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
    """Return an iterator over ObjectRefs (or Futures, or RRefs) in the order in which their results come.

    Failed ones come as well: ``get`` raises what they failed with. Works with ``for`` and ``async for``. In the place of an
    ObjectRefGenerator come the ObjectRefs of its items, each taken from it when the loop gets it.

    Args:
        timeout: seconds for the whole iteration; None: no bound.
        progress: show a bar, as :func:`progress` does, that counts what the loop has taken.
        fetch_local: a large result that is elsewhere comes when it has been fetched; False: as soon as it exists.

    Raises:
        TypeError: there is nothing to wait for in ``refs``.
        ConfigError: a bar is wanted, and tqdm is not installed.
        RpcTimeoutError: while iterating: not all came in time.
    """
    return Completed(refs, timeout, bar=progress, fetch=fetch_local)


def progress(
    refs: Sequence[ObjectRef[T] | Future[T] | RRef[T]],
    *,
    description: str | None = None,
    timeout: float | None = None,
) -> list[T]:
    """Wait for results as :func:`get` does, and show meanwhile how many of them are there.

    The bar is one of tqdm's (``pip install 'actorrpc[progress]'``): on stderr, or in a notebook; tqdm's variables count, like
    ``TQDM_DISABLE=1``.

    Args:
        refs: a list of ObjectRefs; Futures and RRefs will do, too.
        description: what stands in front of the bar.
        timeout: seconds for all of it; None: until the calls are over.

    Returns:
        The results, in the order of ``refs``.

    Raises:
        ConfigError: tqdm is not installed.
        RpcTimeoutError: not everything was there in time. The calls go on.
        TypeError: there is nothing to wait for in ``refs``.
        Exception: what a call raised; of several, the first that fails, at once.
    """
    # What is no ObjectRef asks anew each time, and what has come is taken up once more at the end.
    items: list[Any] = [
        each if type(each) is ObjectRef else _start(each, "progress()", True) for each in refs
    ]
    Completed(items, timeout, bar=True, description=description).all()
    return [get(each) for each in items]
