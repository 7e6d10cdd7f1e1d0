"""The waits of readers and generators of streams, for the search for deadlocks.

An actor's runner or event loop keeps a list of its waits. For other threads, :func:`waited_for_on` finds the call or future in
the stack. The task of a coroutine refers to the future that the coroutine awaits. No locks are taken: data that other threads
read changes by single atomic steps.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from types import CodeType, FrameType
from typing import Any, Final

from actorrpc import _stacks, _time
from actorrpc._python import AWAITED, GATHERED, running_loop
from actorrpc.agent.calls import CURRENT, Call
from actorrpc.agent.daemon_threads import Daemon
from actorrpc.futures import WAITING, Future

__all__ = [
    "PATIENCE_S",
    "Stall",
    "StreamReader",
    "awaited",
    "awaited_by",
    "loop_on",
    "waited_for_on",
]

PATIENCE_S: Final = 30.0
"""How many seconds a thread may take to begin reading a stream that was passed to it."""


class Stall:
    """The target of a wait that is not a call: a reader waits for a stream's next item, a generator for its reader."""

    __slots__ = ()


def awaited(what: object) -> list[Call | Stall]:
    """Return all calls and streams that have to continue before a wait for ``what`` ends; empty if they are not known."""
    if isinstance(what, Stall):
        return [what]
    if isinstance(what, Call):
        stalls = (
            [] if what.future is None else [each for each in what.future.awaits if isinstance(each, Stall)]
        )
        return [*stalls] or [what]
    if not isinstance(what, Future) or what.completed:
        return []
    parts = list(what.awaits)
    if parts:
        return [found for each in parts for found in awaited(getattr(each, "future", each))]
    source = what.source
    return awaited(getattr(source, "behind", source))


def awaited_by(task: asyncio.Task[Any]) -> list[Call | Stall]:
    """Return all calls and streams that a coroutine awaits; empty if they are not known."""
    found: list[Call | Stall] = []
    left: list[Any] = [getattr(task, AWAITED, None)]
    while left:
        waiter = left.pop()
        if waiter is None or waiter.done():
            continue
        if isinstance(waiter, asyncio.Task):
            left.append(getattr(waiter, AWAITED, None))
        else:
            left += getattr(waiter, GATHERED, ())  # for asyncio.gather()
            found += awaited(getattr(waiter, "stands_for", None))
    return found


# Methods that block a thread until their ``self``, a call or a future, is complete.
_WAITS: Final = {each.__code__ for each in (Call.drive, Future.wait, Future.park)}


def waited_for_on(frame: FrameType | None) -> Call | Future[Any] | None:
    """Return the call or future for which a thread waits, or None. The thread's stack is searched: no table contains it."""
    while frame is not None and frame.f_code not in _WAITS:
        frame = frame.f_back
    return None if frame is None else _stacks.local(frame, "self")


def loop_on(
    frame: FrameType | None, end: CodeType | None = None
) -> tuple[asyncio.AbstractEventLoop | None, Any]:
    """Return the innermost event loop that runs on a stack, if it is asyncio's, and the task until whose end it runs.

    Args:
        end: search from the innermost frame outwards, and stop at a frame of this code.
    """
    while frame is not None and frame.f_code is not end:
        caller = frame.f_back
        if frame.f_code is asyncio.BaseEventLoop.run_forever.__code__:
            until = asyncio.BaseEventLoop.run_until_complete.__code__
            task = _stacks.local(caller, "future") if caller is not None and caller.f_code is until else None
            return _stacks.local(frame, "self"), task
        frame = caller
    return None, None


#: User threads that have made or read streams.
_readers: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


def _others_may(known: frozenset[threading.Thread]) -> bool:
    """Whether a user thread may begin to read a stream that was made when only the threads ``known`` existed.

    Such a thread was started since then, or has made or read streams before and does not wait in actorrpc now.
    """
    for thread in threading.enumerate():
        if isinstance(thread, Daemon) or thread.name.startswith("actorrpc") or thread.ident is None:
            continue
        if thread in _readers:
            if waited_for_on(_stacks.top_frame(thread.ident)) is None:
                return True
        elif thread not in known:
            return True
    return False


class StreamReader:
    """The reader of a stream: the thread or coroutine that last requested an item; before the first request, the stream's maker.

    This object only has weak references to the thread and the coroutine.

    Attributes:
        name: the name of the reader in messages.
        swept: the number of the last search that has run the garbage collector, in case only garbage refers to the stream.
    """

    __slots__ = ("_execution", "_runner", "_task", "_thread", "_threads", "_touched", "name", "swept")

    def __init__(self) -> None:
        self.swept = 0
        self.note()
        # The threads that existed when the stream was made: its maker may pass it to a newer thread. None after the first
        # request.
        self._threads: frozenset[threading.Thread] | None = frozenset(threading.enumerate())

    def note(self) -> None:
        """Record that the calling thread or coroutine requests an item."""
        thread, execution = threading.current_thread(), CURRENT.get()
        loop = running_loop()
        task = None if loop is None else asyncio.current_task(loop)
        self._touched = _time.now()
        self._threads = None
        self._thread = weakref.ref(thread)
        self._execution = None if execution is None else weakref.ref(execution)
        self._task = None if task is None else weakref.ref(task)
        # The runner or loop of an actor's thread. The `WAITING.runner` of other threads has no method `runs`.
        runner: Any = WAITING.runner
        self._runner = weakref.ref(runner) if hasattr(runner, "runs") else None
        self.name = "a coroutine" if task is not None else "a thread of its actor"
        if self._runner is None:
            _readers.add(thread)
            if task is None:
                self.name = thread.name

    @property
    def call(self) -> Any:
        """The entry of the call that reads the stream, if an actor's thread is running it; else None."""
        runner = None if self._runner is None else self._runner()
        running = getattr(runner, "running", None)
        return (
            None
            if running is None or self._execution is None or running is not self._execution()
            else running
        )

    def waits_for(self) -> list[Call | Stall]:
        """Return all calls and streams for which the reader waits; empty if it does not wait, or they are not known."""
        task = None if self._task is None else self._task()
        if self._runner is not None:
            runner = self._runner()
            if runner is not None and runner.waiting:
                found: list[Call | Stall] = runner.waits_for
                return found
        else:
            thread = self._thread()
            what = None if thread is None else waited_for_on(_stacks.top_frame(thread.ident))
            if what is not None:
                return awaited(what)
        return [] if task is None else awaited_by(task)

    @property
    def certain(self) -> bool:
        """Whether no other thread or coroutine is expected to begin reading: there is none, or none began for `PATIENCE_S`."""
        return self._alone or _time.now() - self._touched >= PATIENCE_S

    @property
    def _alone(self) -> bool:
        if self._task is not None:
            task = self._task()
            return task is not None and not task.done()
        execution = None if self._execution is None else self._execution()
        if self._runner is not None:
            runner = self._runner()
            return runner is not None and execution is not None and runner.runs(execution.chain)
        if self._execution is not None and (
            execution is None or execution.peer.running.get(execution.id) is not execution
        ):
            return False  # the reader's call has ended, so its thread may execute another call
        return self._thread() is not None and (self._threads is None or not _others_may(self._threads))
