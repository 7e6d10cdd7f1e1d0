"""The event loops of an actor that has ``async def`` methods.

There is one loop for each concurrency group, including the default group, so that a blocked loop does not block other groups. The
coroutines of the group run on it. The loop of the default group also runs the actor's plain methods, which block it, unless they
have ``thread=True`` or a concurrency group. A watch logs each method that holds the loop for longer than a second, once.

A ``get()`` on the loop's thread blocks the loop, and so all coroutines of its concurrency group. So that such a wait can end,
the thread runs plain methods of the loop within the wait, if they descend from the waiting call or this call waits for them.
If the call waits for a coroutine of the same loop, the coroutine can never continue, and ends with DeadlockError. Circles through
other loops of the actor, or through other actors, are found by ``deadlock_detector.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from actorrpc import _stacks
from actorrpc._exceptions import is_a, report
from actorrpc._limits import NO_THREAD
from actorrpc._python import LOGS_PENDING
from actorrpc._torch import set_grad_enabled
from actorrpc.actors.host.mailbox import Entry, Envelope, GroupQueue
from actorrpc.actors.spec.actor_spec import ActorExit, exit_text
from actorrpc.actors.streams.stalls import Stall, awaited
from actorrpc.agent.calls import CURRENT, Call, Execution
from actorrpc.agent.daemon_threads import Daemon
from actorrpc.agent.threads import follow_torch
from actorrpc.agent.timers import Tick
from actorrpc.errors import DeadlockError
from actorrpc.futures import WAITING, Future

if TYPE_CHECKING:
    from actorrpc.actors.host.actor import HostedActor
    from actorrpc.agent.agent import Agent

__all__ = ["EventLoop"]

_log = logging.getLogger("actorrpc.actors")
_HELD_S: Final = 1.0  # a method that holds the loop for longer is logged
_END_S: Final = 2.0  # how long coroutines may take to end after they were cancelled at the actor's end


class EventLoop:
    """An asyncio loop on a thread of its own, which runs the calls of one queue.

    Any thread may call the methods, unless their docstring says otherwise, and read the attributes: they change by single atomic
    steps. :meth:`submit` starts the thread.

    Attributes:
        entries: the calls that run on the loop, by the number of their execution.
        due: the plain methods that wait for their turn on the loop, in order. Any thread may remove an entry, and has to run or
            answer it then.
        plain: the innermost plain method that is running.
        depth: how many plain methods are running, each within the wait of the method before.
        ident: the thread's id; 0 before it has started.
    """

    def __init__(self, hosted: HostedActor, queue: GroupQueue) -> None:
        self.queue = queue
        self.entries: dict[int, Envelope] = {}
        self.due: dict[Envelope, None] = {}
        self.plain: Envelope | None = None
        self.depth = 0
        self.ident = 0
        self._hosted = hosted
        self._title = f"{hosted.title} (concurrency group {queue.name!r})" if queue.name else hosted.title
        self._context = Context()
        self._grad = True
        self._waits: list[tuple[Callable[[], None], object, Execution | None]] = []
        self._look = False  # there may be new calls that serve() has to run, or to fail
        self._warned = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_complain)
        self._watch = _LoopWatch(self, self._loop, self._title, hosted.agent)
        self._thread: Daemon | None = None
        self._lock = threading.Lock()  # guards `_thread` and `_closed`; leaf
        self._closed = False
        self._over = False  # only used by the loop's own thread

    # -- the thread ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the thread, once. Must not be called under a lock."""
        with self._lock:
            if self._thread is not None or self._closed:
                return
            self._thread = thread = Daemon(self._run, f"actorrpc-loop-{self._title}")
        try:
            thread.start()
        except NO_THREAD:
            self._thread = None  # the next call tries again
            raise

    def _run(self) -> None:
        WAITING.runner = self
        follow_torch()
        self.ident = threading.get_ident()
        self._context = copy_context()
        self._grad = torch.is_grad_enabled()
        asyncio.set_event_loop(self._loop)
        try:
            self._run_loop()
        except BaseException as error:
            self._hosted.broken(error)
        finally:
            self._over = self._watch.over = True
            try:
                self._end_tasks()
            except BaseException as error:
                report(_log, error, "the event loop of %s did not end cleanly", self._title)
            finally:
                WAITING.runner = None
                asyncio.set_event_loop(None)
                self._loop.close()

    def _run_loop(self) -> None:
        while not self._closed:
            try:
                self._loop.run_forever()
            except SystemExit as exit:
                # Raised by a task or a callback that a method has started: asyncio does not catch it.
                self._hosted.exited(None, exit_text(exit), "sys.exit")
                continue
            if not self._closed:
                _log.warning(
                    "a method of %s stopped the event loop, which all of its methods need: the loop is started again",
                    self._title,
                )

    def _end_tasks(self) -> None:
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            _, stubborn = self._loop.run_until_complete(asyncio.wait(left, timeout=_END_S))
            for task in stubborn:
                _log.info("%r was cancelled with %s, but has not ended, and is dropped", task, self._title)
                setattr(task, LOGS_PENDING, False)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())

    def _stop(self) -> None:
        if not self._over:  # else _end_tasks() runs the loop, and must not be stopped
            self._loop.stop()

    def close(self) -> Future[None]:
        """End the loop and its tasks; the returned future completes when the loop's thread has ended, or after 5 s."""
        over: Future[None] = Future()
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is None:
            self._loop.close()
            over.set_result(None)
            return over
        try:
            self._loop.call_soon_threadsafe(self._stop)
        except RuntimeError:  # the loop is closed
            pass

        def wait() -> None:
            if thread.ident is not None:
                thread.join(5.0)
            over.set_result(None)

        try:
            Daemon(wait, "actorrpc-loop-end").start()
        except NO_THREAD:  # do not wait for the end of the loop's thread
            over.set_result(None)
        return over

    # -- running calls ---------------------------------------------------------------------------------------

    def submit(self, run: Callable[[], Any]) -> bool:
        """Call ``run()`` on the loop soon; return False if the loop has ended.

        Raises:
            RuntimeError, MemoryError: the system could not start the loop's thread.
        """
        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:
            return False
        if self._thread is None:
            self._start()
        return True

    def task(self, coroutine: Coroutine[Any, Any, Any], context: Context) -> asyncio.Task[Any]:
        """Start a coroutine; only on the loop's own thread."""
        return self._loop.create_task(coroutine, context=context)

    def turn(self, entry: Envelope, run: Callable[[], Any]) -> None:
        """Add a plain method to :attr:`due`, and schedule ``run()`` behind queued callbacks; only on the loop's own thread."""
        self.due[entry] = None
        self._loop.call_soon(run, context=self.fresh_context())

    def fresh_context(self) -> Context:
        """Return a context for a call: a copy of the thread's initial context, not of the context of another call."""
        return self._context.copy()

    def pop_due(self) -> list[Envelope]:
        """Remove and return the plain methods that wait for their turn; called by the thread that ends the actor."""
        return [each for each in list(self.due) if self.due.pop(each, each) is None]

    @property
    def current(self) -> Envelope | None:
        """The call whose own code is running on the thread; None if no code runs, or that of a task that a call started."""
        if self.plain is not None:
            return self.plain
        task = asyncio.current_task(self._loop)
        return next((each for each in list(self.entries.values()) if task and each.task is task), None)

    # -- waiting: see futures.NestedRunner -------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether the thread is in one of actorrpc's waits, which blocks the loop."""
        return bool(self._waits)

    @property
    def running(self) -> Envelope | None:
        """The call whose wait blocks the loop; None if the loop is not blocked, or a task waits that is not a call."""
        try:
            execution = self._waits[-1][2]
        except IndexError:
            return None
        return None if execution is None else self.entries.get(execution.chain)

    @property
    def waits_for(self) -> list[Call | Stall]:
        """All calls and streams that the thread waits for; empty if they are not known."""
        try:
            return awaited(self._waits[-1][1])
        except IndexError:
            return []

    def runs(self, execution: int) -> bool:
        """Whether the loop runs an execution."""
        return execution in self.entries

    @property
    def work(self) -> bool:
        """Whether :meth:`serve` may have work."""
        return self._look

    def wake(self) -> None:
        """Make the thread call :meth:`serve` if it waits."""
        self._look = True
        try:
            self._waits[-1][0]()
        except IndexError:
            pass

    def begin_wait(self, wake: Callable[[], None], what: object) -> None:
        """See futures.NestedRunner."""
        self._waits.append((wake, what, CURRENT.get()))
        self._look = True
        self._hosted.registry.deadlocks.wake()
        if not self._warned:
            self._warned = True
            entry = self.running
            name = "a task" if entry is None else f"{entry.header.get('method')}()"
            self._hosted.agent.submit(
                partial(
                    _log.warning,
                    "%s of actor %s waits (get() and the like) on the actor's event loop%s, and blocks all coroutines on the "
                    "loop. In an async method, await the ObjectRef; mark a plain method with @method(thread=True) to run it in "
                    "a thread. This warning is logged once.",
                    name,
                    self._hosted.title,
                    f" of concurrency group {self.queue.name!r}" if self.queue.name else "",
                )
            )

    def end_wait(self) -> None:
        """See futures.NestedRunner."""
        self._waits.pop()

    def begin_await(self) -> None:
        """See futures.NestedRunner."""
        if self.queue.limit == 1 and self.queue.waiting:
            self._hosted.registry.deadlocks.wake()

    def end_await(self) -> None:
        """See futures.NestedRunner."""

    def serve(self) -> None:
        """Run one plain method within the wait, or fail the awaited calls that can never end because the wait blocks the loop."""
        self._look = False
        entry = self._next()
        if entry is not None:
            self._look = True  # there may be more
            self._run_within(entry)
            return
        for each in self._awaited():
            if each.begun:
                # If the loop no longer runs the method, only the answer waits, for a checkpoint or a future.
                never_ends = self.runs(each.chain)
            else:  # a plain method that has not begun may run within this wait when its arguments arrive
                never_ends = not (self._hosted.mailbox.reentrant and self._hosted.is_plain(each))
            if never_ends:
                error = self._circle(each)
                self._hosted.registry.deadlocks.note(error)
                self._hosted.deadlocked(each, error)

    def _next(self) -> Envelope | None:
        if not self._hosted.mailbox.reentrant:
            return None
        awaited = self._awaited()
        execution = self._waits[-1][2]
        chain = 0 if execution is None else execution.chain

        def fits(entry: Entry) -> bool:
            return (
                isinstance(entry, Envelope)
                and entry.ready
                and self._hosted.is_plain(entry)
                and (chain in entry.path or entry in awaited)
            )

        for each in list(self.due):
            if fits(each) and self.due.pop(each, each) is None:
                return each
        found = self._hosted.mailbox.dequeue_within(self.queue, fits)
        return found if isinstance(found, Envelope) else None

    def _awaited(self) -> list[Envelope]:
        """Return the calls of this loop's own queue for which the thread waits."""
        calls = [each for each in self.waits_for if isinstance(each, Call) and each.peer.is_self]
        found: list[Any] = [call.peer.running.get(call.id) for call in calls]
        return [
            each
            for each in found
            if isinstance(each, Envelope) and each.hosted is self._hosted and each.queue is self.queue
        ]

    def may_run(self, entry: Envelope, execution: Execution) -> bool:
        """Whether a call may run within the wait of ``execution``."""
        return (
            self._hosted.mailbox.reentrant and self._hosted.is_plain(entry) and execution.chain in entry.path
        )

    def _circle(self, entry: Envelope) -> DeadlockError:
        running = self.running
        waiter = "a task of its own" if running is None else f"{running.header.get('method')}()"
        title = self._hosted.title
        return DeadlockError(
            f"{entry.title} can never end: {waiter} waits for it with get(), which blocks the event "
            f"loop of {title} on which {entry.title} has to run. Use await instead of get()",
            maybe_executed=entry.begun > 0,
            worker=self._hosted.agent.name,
        )

    def _run_within(self, entry: Envelope) -> None:
        # A new list, so that wake() does not wake the outer wait while a call runs within it.
        waits, self._waits = self._waits, []
        grad = torch.is_grad_enabled()
        if grad is not self._grad:
            set_grad_enabled(self._grad)
        try:
            self._hosted.executor.run_plain(entry, self, within=True)
        finally:
            set_grad_enabled(grad)
            self._waits = waits


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception of a callback, or of a task that no code retrieved, unless the exception has ended the actor."""
    if not is_a(context.get("exception"), (ActorExit, SystemExit)):
        loop.default_exception_handler(context)


class _LoopWatch:
    """Logs the methods that hold the loop for longer than a second, each once.

    It wraps the loop's selector, which the loop calls when it sleeps, so that an idle loop costs nothing. A loop without a
    selector (uvloop's) is not watched.
    """

    def __init__(self, owner: EventLoop, loop: asyncio.AbstractEventLoop, title: str, agent: Agent) -> None:
        self._owner = owner
        self._loop = loop
        self._title = title
        self._agent = agent
        self._tick = Tick(self._agent.clock, _HELD_S, self._look)
        self._turn = 0  # counts the iterations of the loop
        self._sleeps = False
        self.over = False
        # The loop's iteration at the last check, the id of the plain method or task that ran in it, and since when. An iteration
        # runs all callbacks that are ready: with a thousand coroutines it is long although each of them yields soon. Objects
        # that run in an iteration existed when it began, so no two of them have the same id.
        self._seen: tuple[int, int] | None = None
        self._since = 0.0
        self._named: set[str] = set()
        selector = getattr(loop, "_selector", None)
        if selector is not None:
            self._select = selector.select
            selector.select = self._selected

    def _selected(self, timeout: float | None = None) -> Any:
        """Select for the loop, count an iteration, and wake the watch."""
        self._sleeps = True
        try:
            return self._select(timeout)
        finally:
            self._turn += 1
            self._sleeps = False
            self._tick.wake()

    def _look(self) -> bool:
        if self._sleeps or self.over:
            return False
        # Real time: a virtual clock may call this twice within a moment.
        now = time.monotonic()
        present = self._present()
        if present != self._seen:
            self._seen, self._since = present, now
        elif now - self._since >= _HELD_S * 0.9 and self._owner.ident not in self._agent.held:
            self._since = now
            self._agent.submit(self._report)  # in a pool thread, because it reads source files
        return True

    def _present(self) -> tuple[int, int]:
        return self._turn, id(self._owner.plain or asyncio.current_task(self._loop))

    def _report(self) -> None:
        entry = self._owner.current
        name = "a task" if entry is None else entry.title
        if name in self._named:
            return
        frame = _stacks.top_frame(self._owner.ident)
        if frame is None or self._sleeps or self.over or self._present() != self._seen:
            return
        self._named.add(name)
        _log.warning(
            "%s has held the event loop of actor %s for more than %.0f s: its coroutines are blocked. In an "
            "async method, await a slow operation (asyncio.to_thread() runs a function in a thread); mark a plain method with "
            "@method(thread=True) to run it in a thread. This warning is logged once for each method. The method's stack:\n%s",
            name,
            self._title,
            _HELD_S,
            "".join(_users_part(traceback.extract_stack(frame)).format()),
        )


def _users_part(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Remove the outer frames that belong to the loop and to this package."""
    ours = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(asyncio.__file__), threading.__file__)
    left = itertools.dropwhile(lambda each: each.filename.startswith(ours), stack)
    return traceback.StackSummary.from_list(list(left) or list(stack))
