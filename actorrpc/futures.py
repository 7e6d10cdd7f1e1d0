"""Futures: the value of a call that may still run.

:class:`Future` is a ``torch.futures.Future`` (so ``torch.futures.collect_all`` and similar functions accept it) that
keeps its own state in Python: Ctrl-C interrupts its waits, waits take a time-out, coroutines can await it, its callbacks get
Futures of this class, and a failure that was never retrieved is logged. "torch's half" of a future is the C++ object of its
base class.

A future (except ConcurrentFuture) has no lock. Completion is claimed by deleting a slot, which is one atomic step in CPython;
callbacks and waiters are in lists, whose ``append`` and ``pop`` are atomic, too. So completing a
future is safe in a ``__del__``, in a signal handler and under any lock, apart from the callbacks it runs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from threading import get_ident
from typing import Any, Final, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import torch

from actorrpc import _time
from actorrpc._exceptions import CAUSE, MEMBERS, MESSAGE, is_a, is_of_handler, report, say, type_name
from actorrpc._torch import NativeFuture, set_unwrap
from actorrpc.errors import CancelledError, NotInitializedError, RpcTimeoutError
from actorrpc.validation import wait_limit

__all__ = [
    "INTERRUPTED",
    "QUEUED",
    "WAITING",
    "ConcurrentFuture",
    "Future",
    "InnerFuture",
    "NestedRunner",
    "Progress",
    "collect_all",
    "forked",
    "generation",
    "interruption_point",
    "lost_by_fork",
    "mute",
    "run_queued_callbacks",
    "set_foreign_threads",
    "wait_all",
]

T = TypeVar("T")
S = TypeVar("S")

_log = logging.getLogger("actorrpc.futures")
_NEVER = float("inf")
_Lock: Final = type(threading.Lock())
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: clear on classes that were made in C
_ONCE: Final = "Future can only be marked completed once: it already has a result or an error"
_NO_DEVICES: Final[list[torch.device]] = []  # of most futures; never changed
_base_init = NativeFuture.__init__
_base_set_result = NativeFuture.set_result
_base_wait = NativeFuture.wait


class NestedRunner(Protocol):
    """Lets a thread of an actor, while the call that it executes waits, execute calls that descend from that call.

    The waiting thread calls all methods. Any thread may call the function ``wake``.
    """

    @property
    def work(self) -> Any:
        """True if a call may run now."""

    def begin_wait(self, wake: Callable[[], None], what: object) -> None:
        """Record that the thread is about to wait for ``what``. ``wake()`` wakes it, so that it checks ``work``."""

    def end_wait(self) -> None:
        """Record that the thread has stopped waiting."""

    def begin_await(self) -> None:
        """Record that a coroutine on the thread is about to wait. Other coroutines may run meanwhile."""

    def end_await(self) -> None:
        """Record that the coroutine continues."""

    def serve(self) -> None:
        """Run the calls that may run now, on this thread."""


class Progress:
    """The operation that completes a pending future: a call, a call that waits to be sent, another future.

    Any thread may call the methods. The methods of this class do nothing; subclasses override them.
    """

    __slots__ = ()

    def drive(self, deadline: float | None) -> None:
        """Work towards completion on the calling thread, which waits for the future, at most until the deadline."""

    def flush(self) -> None:
        """Send delayed messages now: a thread is about to wait without calling :meth:`drive`."""

    def listen(self) -> None:
        """Let the pool read the reply, because the thread that polls the future does not read it."""

    def cancel(self) -> bool:
        """Cancel the operation; False if the future is complete."""
        return False


class _Waiting(threading.local):
    """State of the current thread for the functions that wait on it.

    Attributes:
        depth: how many callbacks of futures this thread is running, nested in each other.
        runner: the thread's runner, if the thread belongs to an actor.
        casts: one-way requests that this thread has read and executes itself; None: the pool executes what it reads.
    """

    depth = 0
    runner: NestedRunner | None = None
    casts: deque[Any] | None = None


WAITING = _Waiting()


def set_foreign_threads(runner: NestedRunner | None) -> None:
    """Set the runner of all threads that have no runner of their own."""
    _Waiting.runner = runner


INTERRUPTED: Final[set[Any]] = set()
"""The runners whose running methods must be interrupted. Almost always empty, so a check costs nearly nothing."""


def interruption_point() -> None:
    """Raise the interruption of the method that this thread runs, if there is one.

    The package's functions that users may call in a loop call this function when they begin and while they wait. Other code of
    the package is not interrupted (see ``actors/host/threads.py``).
    """
    runner = WAITING.runner
    if runner in INTERRUPTED:
        runner.raise_interruption()  # type: ignore[union-attr]


class _Unretrieved:
    """The failure of a future. When this object is freed and the error was never retrieved (``seen``), it logs the failure."""

    __slots__ = ("__weakref__", "error", "label", "seen")

    def __init__(self, error: BaseException, label: object) -> None:
        self.error = error
        self.label = label
        # The program cancelled the call, or leaves the group: the failure is expected.
        self.seen = type(error) is CancelledError or _muted

    def __del__(self) -> None:
        if not self.seen and not sys.is_finalizing():
            # While the interpreter ends, _report() cannot start a thread.
            _report(f"{self.label} failed and its error was never retrieved: {say(self.error, repr)}")


_reports: Final[list[str]] = []
_muted = False


def _report(line: str) -> None:
    """Log a line on another thread: a finaliser calls this, possibly on a thread that holds the locks of logging."""
    _reports.append(line)
    if len(_reports) == 1:
        try:
            threading.Thread(target=_log_reports, name="actorrpc-report", daemon=True).start()
        except RuntimeError:  # no thread can be started, because the interpreter is shutting down
            _reports.clear()


def _log_reports() -> None:
    while _reports:
        _log.error("%s", _reports[0])
        del _reports[0]


def mute(muted: bool) -> None:
    """Switch the logging of unretrieved failures off (True) or on. A process that leaves its group switches it off."""
    global _muted
    _muted = muted


# How many ancestors of this process were in a group when they forked.
_generation = 0


def forked() -> None:
    """Record that this process is a fork of a process in a group: futures that are pending now never complete in it."""
    global _generation
    _generation += 1
    # The parent's other threads do not exist here, and a new thread may get the identifier of such a thread.
    for thread in QUEUED.keys() - {get_ident()}:
        del QUEUED[thread]


def generation() -> int:
    """Return a number that changes in a fork of a process that is in a group."""
    return _generation


def lost_by_fork(label: object) -> NotInitializedError:
    """Return the error of a wait, in a forked process, for an outcome that only the parent process gets."""
    return NotInitializedError(
        f"{label} was not over when this process was forked (os.fork(), or multiprocessing's start method "
        "'fork'): the outcome arrives only in the parent process. Wait for it before the "
        "fork. To make calls in the new process, start it with the method 'spawn', or call actorrpc.init() (or "
        "init_rpc()) in it"
    )


def _twin(error: BaseException, twins: dict[int, BaseException] | None = None) -> BaseException:
    """Return a copy of an error without its traceback. Errors that it refers to are replaced by their twins.

    torch's half of a future keeps the twin. If that half kept the error, whose traceback refers to frames that waited, and so to
    the future, the future would never be freed: the garbage collector cannot follow references from torch's half.

    Args:
        twins: the twins that were already made, by the ``id`` of their errors.
    """
    made = {} if twins is None else twins

    def of(value: Any) -> Any:
        if not is_a(value, BaseException):
            return value
        found = made.get(id(value))
        return _twin(value, made) if found is None else found

    cls = type(error)
    try:
        # The class in C that defines the layout of the object. It need not be the first in the method resolution order.
        native: Any = cls
        while native.__flags__ & _HEAP_TYPE:
            native = native.__base__
        args = error.args
        if is_a(error, BaseExceptionGroup):
            args = MESSAGE.__get__(error), list(map(of, MEMBERS.__get__(error)))
        twin: BaseException = native.__new__(cls, *args)
        native.__init__(twin, *args)
        made[id(error)] = twin
        for name, value in error.__dict__.items():
            twin.__dict__[name] = of(value)
        cause = CAUSE.__get__(error)
        if cause is not None:
            twin.__cause__ = of(cause)
    except BaseException:
        twin = RuntimeError(type_name(cls))  # do not call repr(), which the class may define
    return twin


def _unwrapping(report: _Unretrieved) -> Callable[[BaseException], NoReturn]:
    """Return the function that torch calls, with the twin of the error, to get the value of a failed future.

    torch's functions for several futures get the error in no other way. torch's half keeps the function, so the function must not
    refer to the report, which refers to the error.
    """
    found = weakref.ref(report)

    def unwrap(twin: BaseException) -> NoReturn:
        looked_at = found()
        if looked_at is not None:
            looked_at.seen = True
        raise _twin(twin)  # a new one, because raising adds a traceback

    return unwrap


# -- callbacks ------------------------------------------------------------------------------------

_MAX_DEPTH: Final = 50

QUEUED: Final[dict[int, list[Future[Any]]]] = {}
"""Completed futures whose callbacks a thread still has to run, by the thread's identifier. Almost always empty.

A callback may complete another future, whose callbacks complete the next one. The first fifty run nested in each
other, as torch's do. Further futures are queued here, and the thread runs their callbacks when the innermost callback returns
or waits. The depth of the stack is therefore limited for chains of any length.
"""


def run_queued_callbacks() -> None:
    """Run the callbacks that this thread has queued. Called before this thread waits, because the wait may need their effects."""
    queued = QUEUED.pop(get_ident(), None)
    if queued is not None:
        _run_callbacks_of(queued)


def _run_callbacks_of(completed: list[Future[Any]]) -> None:
    """Run the callbacks of completed futures in order. After each callback, run the callbacks of futures that it completed.

    An exception of a signal handler in a callback is raised after all callbacks, because threads may wait for their effects.
    """
    completed.reverse()
    raised: BaseException | None = None
    WAITING.depth += 1
    try:
        while completed:
            future = completed[-1]
            try:
                callback = future.callbacks.pop(0)
            except IndexError:
                del completed[-1]
                continue
            try:
                callback(future)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) or is_of_handler(error):
                    raised = raised or error
                else:
                    report(_log, error, "a done callback of %s raised", future.label)
            if QUEUED:
                completed.extend(reversed(QUEUED.pop(get_ident(), ())))
        if raised is not None:
            raise raised
    finally:
        WAITING.depth -= 1
        raised = None  # the error's traceback refers to this frame


class _Following(NamedTuple):
    """The label of a future that :meth:`Future.then` returns. In a chain, ``start`` is the label of the first future."""

    callback: str
    start: object

    def __str__(self) -> str:
        return f"then({self.callback}) of {self.start}"


class Future(torch.futures.Future[T], Progress, Generic[T]):
    """The result of an operation that may still run.

    Attributes:
        label: the name of the operation in messages.
        awaits: futures (or objects with an attribute ``future``) that all must complete before this future can.
        source: the operation that a waiting thread advances; None once the future is complete. Its producer sets it.
        callbacks: the functions to call when the future is complete; :meth:`add_done_callback` adds to it.
        completed: whether the future is complete. Unlike :meth:`done`, reading it makes no progress. Only the future sets it.
        error: the error of the future; None while it is pending, and if it has a value. Reading it does not acknowledge the
            failure. Only the future sets it.
        value_or_none: the value of the future; None while it is pending, and if it has failed. Only the future sets it.
        covered: whether :meth:`cover` was called.
        torch_has_outcome: set by a class: whether torch's half of its futures gets the value or the error, too.

    Thread-safe. The class has all methods of ``torch.futures.Future``, with the differences that
    :meth:`wait` takes a ``timeout``, every wait can be interrupted by Ctrl-C, :meth:`then` returns a future
    of this class, and coroutines of any event loop can await it (``await fut``).
    """

    __slots__ = (
        "_devices",
        "_parked",
        "_report",
        "_unclaimed",
        "callbacks",
        "completed",
        "error",
        "label",
        "source",
        "value_or_none",
    )

    awaits: Sequence[Any] = ()
    # The class of the futures that then() returns; None: the same class.
    _then_class: type[Future[Any]] | None = None
    torch_has_outcome = True
    covered = False
    _born = 0  # generation() of the process that made the future

    def __init__(self, *, devices: Sequence[Any] | None = None) -> None:
        self._devices = [torch.device(each) for each in devices] if devices else _NO_DEVICES
        _base_init(self, self._devices)
        if _generation:
            self._born = _generation
        self._unclaimed = None
        self.completed = False
        self.value_or_none: Any = None
        self.error: BaseException | None = None
        # Futures that failed with the same error share a report, so retrieving the error from one counts for all: see follow().
        self._report: _Unretrieved | None = None
        self.callbacks: list[Callable[[Future[T]], Any]] = []
        self._parked: list[Any] = []  # waiters (see add_waiter), and locks of sleeping threads (see park)
        self.source: Progress | None = None
        self.label: object = "a future"

    # -- completing ------------------------------------------------------------------------

    def claim(self) -> bool:
        """Claim the right to complete this future; exactly one caller gets True.

        That caller then calls :meth:`conclude`, or gives the right back with :meth:`disclaim`.
        """
        try:
            del self._unclaimed
        except AttributeError:
            return False
        return True

    def disclaim(self) -> None:
        """Give back the right to complete this future, which stays pending."""
        self._unclaimed = None

    def conclude(
        self, value: Any, error: BaseException | None, submit: Callable[..., Any] | None = None
    ) -> None:
        """Publish the outcome of a future that the caller has claimed, and wake waiting threads. Subclasses may extend this.

        Args:
            value: the value, if ``error`` is None.
            error: the error, which every wait then raises.
            submit: schedules the callbacks on another thread; by default they run on this thread.
        """
        if error is None:
            self.value_or_none = value
            self.completed = True
            _base_set_result(self, value if self.torch_has_outcome else None)
        else:
            self.error = error
            report = self._report
            if report is None:
                report = self._report = _Unretrieved(error, self.label)
            # Read after _report was set: either this thread sees that cover() was called, or cover() sees the report.
            if self.covered:
                report.seen = True
            self.completed = True
            if self.torch_has_outcome:
                set_unwrap(self, _unwrapping(report))
                _base_set_result(self, _twin(error))
            else:
                _base_set_result(self, None)
        self.source = None
        if self._parked:
            self._wake()
        if self.callbacks:
            if submit is None:
                self._run_callbacks()
            else:
                submit(self._run_callbacks)

    def try_complete(self, value: T, submit: Callable[..., Any] | None = None) -> bool:
        """Complete the future with a value; False if it is complete already. ``submit``: see :meth:`conclude`."""
        if not self.claim():
            return False
        self.conclude(value, None, submit)
        return True

    def try_fail(self, error: BaseException, submit: Callable[..., Any] | None = None) -> bool:
        """Complete the future with an error; False if it is complete already. ``submit``: see :meth:`conclude`."""
        if not self.claim():
            return False
        self.conclude(None, error, submit)
        return True

    def complete_with(self, function: Callable[..., T], *args: Any) -> None:
        """Complete the future with the value that ``function(*args)`` returns, or with the error that it raises."""
        try:
            value = function(*args)
        except BaseException as error:
            self.try_fail(error)
            if is_of_handler(error):
                self.acknowledge()  # the error is raised in this thread
                raise
        else:
            self.try_complete(value)
        finally:
            del self, function, args  # see _outcome()

    def follow(
        self,
        other: Future[Any],
        error: BaseException | None = None,
        submit: Callable[..., Any] | None = None,
    ) -> bool:
        """Complete the future with the outcome of ``other``, which is complete; False if this future is complete already.

        Retrieving the error from either future counts for both; if it is never retrieved, one report names ``other``. If this
        future is complete already, the error of ``other`` counts as retrieved.

        Args:
            error: the error of this future, instead of the outcome of ``other``.
            submit: see :meth:`conclude`.
        """
        if not self.claim():
            other.acknowledge()
            return False
        self._report = other._report
        if error is not None:
            self.conclude(None, error, submit)
        else:
            self.conclude(other.value_or_none, other.error, submit)
        return True

    def replace_value(self, value: T) -> None:
        """Replace the value of a completed future: later waits return the new value."""
        self.value_or_none = value

    def _wake(self) -> None:
        while self._parked:
            try:
                waiter = self._parked.pop()
            except IndexError:
                break
            if type(waiter) is not _Lock:
                waiter(self)
                continue
            try:
                waiter.release()
            except RuntimeError:  # wake() has just released it
                pass

    def _run_callbacks(self) -> None:
        if WAITING.depth < _MAX_DEPTH:
            _run_callbacks_of([self])
        else:
            QUEUED.setdefault(get_ident(), []).append(self)

    def set_result(self, result: T) -> None:
        """Complete the future with a value.

        Raises:
            RuntimeError: the future is complete already.
        """
        if not self.try_complete(result):
            raise RuntimeError(_ONCE)

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]
        """Complete the future with an error, which every wait then raises.

        Raises:
            TypeError: ``result`` is not an exception.
            RuntimeError: the future is complete already.
        """
        if not isinstance(result, BaseException):
            raise TypeError(f"{result!r} is of type {type(result).__name__}, not an Exception.")
        if not self.try_fail(result):
            raise RuntimeError(_ONCE)

    def cancel(self) -> bool:
        """Cancel the call: the future fails with :class:`CancelledError`, and the called worker is notified.

        Returns ``False`` if the future is complete already. A function that has started is not interrupted; calls that
        it waits for are cancelled in turn.
        """
        source = self.source
        if source is not None:
            return source.cancel()
        return self.try_fail(CancelledError(f"{self.label} was cancelled"))

    # -- progress: a future may be the source of another one ---------------------------------------

    def drive(self, deadline: float | None) -> None:
        """See :class:`Progress`. Unlike :meth:`wait`, it may return before the future is complete."""
        source = self.source
        if source is not None:
            source.drive(deadline)

    def flush(self) -> None:
        """See :class:`Progress`."""
        source = self.source
        if source is not None:
            source.flush()

    def listen(self) -> None:
        """See :class:`Progress`."""
        source = self.source
        if source is not None:
            source.listen()

    # -- reading -----------------------------------------------------------------------------

    def check_process(self) -> None:
        """Check that the future can complete in this process.

        Raises:
            NotInitializedError: the future is pending, and was made before this process was forked.
        """
        if self._born != _generation and not self.completed:
            raise lost_by_fork(self.label)

    def done(self) -> bool:
        """Say whether the future is complete, with a value or an error."""
        if not self.completed:
            if QUEUED:
                run_queued_callbacks()
            self.listen()  # a program that polls done() does not read the reply itself
        return self.completed

    def cancelled(self) -> bool:
        """Say whether the future was cancelled."""
        return self.completed and isinstance(self.error, CancelledError)

    def _outcome(self) -> T:
        if self.error is not None:
            self.acknowledge()
            try:
                raise self.error
            finally:
                # The error's traceback refers to this frame. A variable of this frame that led to the error would make a cycle:
                # everything in the frames of the traceback would live until the next garbage collection.
                del self
        if self._devices:
            # torch's Future, the base class, recorded the work on the CUDA streams of the thread that completed the future. This
            # call makes the current streams of this thread wait for that work.
            _base_wait(self)
        return self.value_or_none  # type: ignore[no-any-return]

    def acknowledge(self) -> None:
        """Record that the failure of the future, if it has failed, was retrieved, so that it is not logged as never retrieved."""
        if self._report is not None:
            self._report.seen = True

    def cover(self) -> None:
        """Acknowledge the failure of the future, even if the future fails later."""
        self.covered = True
        self.acknowledge()

    def value(self) -> T:
        """Return the value of a completed future, or raise its error.

        Raises:
            RuntimeError: the future is not complete yet.
        """
        if QUEUED:
            run_queued_callbacks()
        if not self.completed:
            raise RuntimeError(f"{self.label} is not complete yet: call wait()")
        try:
            return self._outcome()
        finally:
            del self  # see _outcome()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, then return the error; ``None`` if the future has a value. Raises RpcTimeoutError after ``timeout`` seconds."""
        try:
            self.wait(timeout)
        except BaseException as error:
            if not self.completed or (error is not self.error and is_of_handler(error)):
                raise
        try:
            return self.error
        finally:
            del self  # see _outcome()

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the value.

        Args:
            timeout: seconds to wait; ``None``: no limit, except the time-out of the call itself.

        Raises:
            RpcTimeoutError: the future is not complete within ``timeout``; the call continues.
            NotInitializedError: the future was pending when this process was forked.
            Exception: the error of the future.
        """
        if INTERRUPTED:
            interruption_point()
        if not self.completed:
            if self._born != _generation:
                self.check_process()
            if QUEUED:
                run_queued_callbacks()
            limit = math.inf if timeout is None else wait_limit(timeout, least=-math.inf)
            deadline = None if limit == math.inf else _time.now() + max(limit, 0.0)
            source = self.source
            if source is not None:
                source.drive(deadline)
                # The source refers to the call's arguments, which a traceback with this frame would keep alive.
                source = None
            if not self.completed and not self.park(deadline):
                raise RpcTimeoutError(
                    f"{self.label} was not complete within {say(timeout)} s; it is still running: wait() again or cancel() it",
                    maybe_executed=None,
                )
            if INTERRUPTED:  # a cancellation of this thread's call has also cancelled the awaited call
                interruption_point()
        if self.error is None and not self._devices:
            return self.value_or_none  # type: ignore[no-any-return]  # it is complete
        try:
            return self._outcome()
        finally:
            del self  # see _outcome()

    result = wait  # the name in concurrent.futures

    def park(self, deadline: float | None) -> bool:
        """Sleep until completion or the deadline, without calling :meth:`drive`; say whether the future is complete.

        On the main thread, signals interrupt the sleep.
        """
        lock = threading.Lock()
        lock.acquire()
        self._parked.append(lock)
        runner = WAITING.runner
        if runner is not None:

            def wake() -> None:
                try:
                    lock.release()
                except RuntimeError:
                    pass

            runner.begin_wait(wake, self)
        try:
            # The lock was appended before this check, so a thread that completes the future later finds and releases it.
            while not self.completed:
                if INTERRUPTED:
                    interruption_point()
                if runner is not None and runner.work:
                    runner.serve()
                    if QUEUED:
                        run_queued_callbacks()
                    continue
                if deadline is not None and deadline <= _time.now():
                    break
                if _time.doze(lock, _NEVER if deadline is None else deadline) and runner is None:
                    break
        finally:
            if runner is not None:
                runner.end_wait()
            try:
                self._parked.remove(lock)
            except ValueError:
                pass
        return self.completed

    def add_waiter(self, waiter: Callable[[Any], None]) -> None:
        """Call ``waiter(self)`` once, on the thread that completes the future; at once if it is complete.

        The waiter must be short and must not block.
        """
        if not self.completed:
            self._parked.append(waiter)
            # 1. This thread saw a pending future. 2. Another thread completed it and woke the waiters. 3. This thread appended
            # the waiter too late. Therefore this thread checks again; only one of the two threads removes the waiter.
            if not self.completed or not self.remove_waiter(waiter):
                return
        waiter(self)

    def remove_waiter(self, waiter: Callable[[Any], None]) -> bool:
        """Undo :meth:`add_waiter`; False if the waiter was called, or is being called."""
        try:
            self._parked.remove(waiter)
        except ValueError:
            return False
        return True

    # -- callbacks ---------------------------------------------------------------------------

    def add_done_callback(self, callback: Callable[[Future[T]], Any]) -> None:
        """Call ``callback(self)`` when the future is complete: at once, on this thread, if it is complete already.

        Callbacks of a call run on a pool thread of this process, never on a thread that waits for the call.
        They may make calls and wait for them. Exceptions that the callbacks raise are logged.

        Raises:
            NotInitializedError: the future was pending when this process was forked.
        """
        if not callable(callback):
            raise TypeError(f"callback must be callable, not {type(callback).__name__}")
        if self._born != _generation:
            self.check_process()
        self.callbacks.append(callback)
        if self.completed:
            self._run_callbacks()
            return
        self.listen()

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """Return a future for the result of ``callback(self)``, which is called when this future is complete.

        The callback gets this future, complete, and uses ``value()`` or ``wait()``. An exception that it
        raises becomes the error of the returned future.
        """
        if not callable(callback):
            raise TypeError(f"callback must be callable, not {type(callback).__name__}")
        cls: Any = self._then_class or type(self)
        following: Future[S] = cls(devices=self._devices)
        before = self.label
        following.label = _Following(
            str(getattr(callback, "__qualname__", callback)),
            before.start if type(before) is _Following else before,
        )

        def run(done: Future[T]) -> None:
            done.acknowledge()  # the callback gets the error
            passed = done.error
            trace = None if passed is None else passed.__traceback__
            try:
                value = callback(done)
            except BaseException as error:
                if error is passed:
                    # Otherwise the traceback would grow with each callback of a chain, and keep the callbacks' frames alive.
                    error.__traceback__ = trace
                following.try_fail(error)
                if is_of_handler(error):
                    following.acknowledge()  # this thread gets the error
                    raise
            else:
                following.try_complete(value)

        self.add_done_callback(run)
        return following

    # -- asyncio -----------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, T]:
        if INTERRUPTED:
            interruption_point()
        if QUEUED:
            run_queued_callbacks()
        if self.completed:
            try:
                return self._outcome()
            finally:
                del self  # see _outcome()
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def on_done(_: Future[T]) -> None:
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:  # the loop was closed, and its coroutines do not run again
                pass

        self.flush()
        self.add_done_callback(on_done)
        runner = WAITING.runner
        waiter.stands_for = self  # type: ignore[attr-defined]  # read by the search for deadlocks
        if runner is not None:
            runner.begin_await()
        try:
            yield from waiter
        except asyncio.CancelledError:
            # The future may have failed before the coroutine was cancelled, for example if the coroutine and the call that it
            # awaits have the same deadline. The coroutine then never retrieves the error.
            self.acknowledge()
            raise
        finally:
            if runner is not None:
                runner.end_await()
            del waiter.stands_for  # type: ignore[attr-defined]
        try:
            return self._outcome()
        finally:
            del self  # see _outcome()

    def __repr__(self) -> str:
        if not self.completed:
            state = "pending"
        elif self.error is not None:
            state = f"failed: {self.error!r}"
        else:
            state = "complete"
        return f"<actorrpc.Future of {self.label}: {state}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Future cannot be sent or pickled: wait for it, or return it from an async_execution function"
        )


class InnerFuture(Future[T]):
    """The future behind an ObjectRef: torch's functions never get it, so torch's half has neither value nor error.

    The garbage collector cannot follow references from torch's half. If that half had a value that refers to the future, such as
    a list to which the user appended the ObjectRef, neither would ever be freed.
    """

    __slots__ = ()

    _then_class = Future
    torch_has_outcome = False


class ConcurrentFuture(Future[T], concurrent.futures.Future):  # type: ignore[type-arg, misc]
    """A Future that is a ``concurrent.futures.Future``, too: for that module's functions, and ``asyncio.wrap_future``.

    These functions use private attributes of a future: the lock ``_condition`` guards ``_state`` and ``_waiters``. They hold the
    lock only briefly, and call no other code meanwhile. Everything else is as in :class:`Future`.
    """

    __slots__ = ("_condition", "_state", "_waiters")

    def __init__(self, *, devices: Sequence[Any] | None = None) -> None:
        super().__init__(devices=devices)
        self._condition = threading.Condition()
        self._state = "RUNNING"
        self._waiters: list[Any] = []
        self.add_waiter(ConcurrentFuture._publish)

    def _publish(self) -> None:
        """Set the state for the functions of ``concurrent.futures``, and wake the threads that wait in these functions."""
        cancelled = self.cancelled()
        with self._condition:
            self._state = "CANCELLED_AND_NOTIFIED" if cancelled else "FINISHED"
            for waiter in self._waiters:
                if cancelled:
                    waiter.add_cancelled(self)
                elif self.error is not None:
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
            self._condition.notify_all()

    def running(self) -> bool:
        """Say whether the future is not complete yet. Unlike in ``concurrent.futures``, it can still be cancelled."""
        return not self.completed

    def _get_snapshot(self) -> tuple[bool, bool, T | None, BaseException | None]:
        """Return whether the future is done, whether it was cancelled, its value, and its error.

        ``asyncio.wrap_future`` of some releases of Python 3.14 calls this. The method of the base class reads attributes that a
        Future does not have.
        """
        if not self.completed or self.cancelled():
            return self.completed, self.completed, None, None
        error = self.exception()
        return True, False, self.wait() if error is None else None, error


def collect_all(futures: Iterable[torch.futures.Future[Any]]) -> Future[list[Any]]:
    """Return a future that completes, with the list of the given futures, when all of them are complete.

    As ``torch.futures.collect_all``, but it can be awaited, and Ctrl-C interrupts its waits. It fails only if it is
    cancelled: check each of the given futures.
    """
    given = list(futures)
    everything: Future[list[Any]] = Future()
    everything.label = f"collect_all of {len(given)} futures"
    everything.awaits = given
    if not given:
        everything.set_result([])
        return everything
    left = [None] * len(given)

    def one(_: Any) -> None:
        left.pop()
        if not left:
            everything.try_complete(given)

    for future in given:
        if isinstance(future, Future):
            future.flush()
        future.add_done_callback(one)
    return everything


def wait_all(futures: Iterable[torch.futures.Future[Any]], timeout: float | None = None) -> list[Any]:
    """Wait for all futures and return their values, in order.

    Raises:
        RpcTimeoutError: not all futures are complete within ``timeout`` seconds.
        Exception: the error of the first future in the list that failed. The errors of other futures are not logged.
    """
    given = list(futures)
    collect_all(given).wait(timeout)
    for future in given:
        if isinstance(future, Future):
            future.acknowledge()
    return [future.wait() for future in given]
