"""Who waits for what, as far as streams are concerned: what the search for deadlocks looks at.

The runners of actors know what they wait for. Threads of the user's that read streams get an :class:`Onlooker`, which runs
nothing, and knows that too. What a coroutine awaits is written on the future of its event loop. Nothing here takes a lock:
what others look at changes by single atomic steps.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final

from actorrpc import _stacks
from actorrpc.agent.calls import CURRENT, Call, Execution
from actorrpc.agent.daemon_threads import Daemon
from actorrpc.futures import WAITING, Future, NestedRunner, bystander

__all__ = [
    "PATIENCE_S",
    "Onlooker",
    "Stall",
    "StreamReader",
    "awaited",
    "awaited_by",
    "loop_on",
    "waited_for_on",
]

PATIENCE_S: Final = 30.0
"""So long a stream is left alone that may have been handed to somebody who has not begun to read it."""

_NOBODY: Final = (0, 0, 0)


class Stall:
    """What may be waited for and is no call: a stream's next item, or that its consumer takes some."""

    __slots__ = ()


def awaited(what: object) -> list[Call | Stall]:
    """Return the calls and streams that a wait for ``what`` is for, all of them; none where that is not known."""
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
    """Return the calls and streams that a coroutine awaits, all of them; none where that is not known."""
    found: list[Call | Stall] = []
    left: list[Any] = [getattr(task, "_fut_waiter", None)]
    while left:
        waiter = left.pop()
        if waiter is None or waiter.done():
            continue
        if isinstance(waiter, asyncio.Task):
            left.append(getattr(waiter, "_fut_waiter", None))
        else:
            left += getattr(waiter, "_children", ())  # of asyncio.gather()
            found += awaited(getattr(waiter, "stands_for", None))
    return found


# The methods that wait for their object.
_WAITS: Final = {each.__code__ for each in (Call.drive, Future.wait, Future.park)}


def waited_for_on(frame: FrameType | None) -> Call | Future[Any] | None:
    """Return what a thread waits for, by its stack: nothing is written down for that on the path of a call."""
    while frame is not None and frame.f_code not in _WAITS:
        frame = frame.f_back
    return None if frame is None else _stacks.local(frame, "self")


def loop_on(
    frame: FrameType | None, end: CodeType | None = None
) -> tuple[asyncio.AbstractEventLoop | None, Any]:
    """Return the event loop that runs on a stack, if it is asyncio's, and the task for whose end it runs.

    Args:
        end: it is looked for above the frames of this code.
    """
    while frame is not None and frame.f_code is not end:
        caller = frame.f_back
        if frame.f_code is asyncio.BaseEventLoop.run_forever.__code__:
            until = asyncio.BaseEventLoop.run_until_complete.__code__
            task = _stacks.local(caller, "future") if caller is not None and caller.f_code is until else None
            return _stacks.local(frame, "self"), task
        frame = caller
    return None, None


def _key(execution: Execution | None) -> tuple[int, int, int]:
    """Return what tells an execution from others, without holding it."""
    return _NOBODY if execution is None else (execution.chain, execution.id, id(execution.peer))


class Onlooker:
    """Stands in the place of a runner for a thread that is no actor's. See futures.NestedRunner.

    Args:
        beside: hears of the waits as well.

    Attributes:
        key: of the execution in which the thread waits.
    """

    def __init__(self, beside: NestedRunner | None = None) -> None:
        self.work = ()
        self._beside = beside
        self.ident = threading.get_ident()
        self.key = _NOBODY
        self._waits: list[object] = []

    @property
    def waiting(self) -> bool:
        """Whether the thread is in one of our waits."""
        return bool(self._waits)

    @property
    def waits_for(self) -> list[Call | Stall]:
        """What the thread waits for, all of it; nothing where it does not wait, or for something else."""
        try:
            return awaited(self._waits[-1])
        except IndexError:
            return []

    def begin_wait(self, stir: Callable[[], None], what: object) -> None:
        """Note what the thread is about to wait for."""
        self.key = _key(CURRENT.get())
        self._waits.append(what)
        if self._beside is not None:
            self._beside.begin_wait(stir, what)

    def end_wait(self) -> None:
        """Note that it waits no more."""
        self._waits.pop()
        if self._beside is not None:
            self._beside.end_wait()

    def begin_await(self) -> None:
        """Note that a coroutine on the thread is about to wait, while others may go on."""
        if self._beside is not None:
            self._beside.begin_await()

    def end_await(self) -> None:
        """Note that it goes on."""
        if self._beside is not None:
            self._beside.end_await()

    def serve(self) -> None:
        """Do nothing: nothing is run here."""


_onlookers: Final[weakref.WeakSet[Onlooker]] = weakref.WeakSet()


def _others_may(known: frozenset[threading.Thread]) -> bool:
    """Whether the user has threads that may be about to read a stream, which was made when there were the ``known`` ones.

    That is those that were started since, and those that have read streams before; not one that waits for something of ours.
    """
    readers = {each.ident: each.waiting for each in list(_onlookers)}
    for thread in threading.enumerate():
        if isinstance(thread, Daemon) or thread.name.startswith("actorrpc") or thread.ident is None:
            continue
        if not readers.get(thread.ident, thread in known):
            return True
    return False


class StreamReader:
    """Who reads a stream: the thread or the coroutine that has asked for its last item, or else has made it.

    It holds neither.

    Attributes:
        name: what messages call it.
        threads: those there were when it made the stream, which it may have handed to another, who is about to read it; None
            where it has asked for an item itself.
    """

    __slots__ = ("_key", "_runner", "_task", "name", "threads")

    def __init__(self, runner: Any, key: tuple[int, int, int], task: asyncio.Task[Any] | None) -> None:
        self._runner = weakref.ref(runner)
        self._key = key
        self._task = None if task is None else weakref.ref(task)
        self.name = "a coroutine" if task is not None else threading.current_thread().name
        if task is None and not isinstance(runner, Onlooker):
            self.name = "a thread of its actor"
        self.threads: frozenset[threading.Thread] | None = None

    @staticmethod
    def here(known: StreamReader | None) -> StreamReader:
        """Return the one that calls this; ``known``, if that is it."""
        runner: Any = WAITING.runner
        if runner is None or runner is bystander():
            runner = WAITING.runner = Onlooker(runner)
            _onlookers.add(runner)
        loop = asyncio._get_running_loop()
        task = None if loop is None else asyncio.current_task(loop)
        key = _key(CURRENT.get())
        if (
            known is not None
            and known._key == key
            and known._runner() is runner
            and (known._task() if known._task is not None else None) is task
        ):
            return known
        return StreamReader(runner, key, task)

    @property
    def call(self) -> Any:
        """The entry of the call that reads the stream, where an actor's thread runs it now; else None."""
        running = getattr(self._runner(), "running", None)
        execution = getattr(running, "execution", None)
        return running if execution is not None and execution.chain == self._key[0] else None

    def waits_for(self) -> list[Call | Stall]:
        """Return what it waits for, all of it; nothing where it does not wait, or that is not known."""
        runner = self._runner()
        if runner is not None and runner.waiting:
            found: list[Call | Stall] = runner.waits_for
            return found
        task = None if self._task is None else self._task()
        return [] if task is None else awaited_by(task)

    @property
    def alone(self) -> bool:
        """Whether nobody else can be about to read the stream."""
        if self._task is not None:
            task = self._task()
            return task is not None and not task.done()
        runner = self._runner()
        if isinstance(runner, Onlooker):
            return runner.key == self._key and (self.threads is None or not _others_may(self.threads))
        runs: Callable[[int], bool] | None = getattr(runner, "runs", None)
        return runs is not None and runs(self._key[0])
