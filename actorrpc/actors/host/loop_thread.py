"""The thread of an actor's event loop as one that may wait: what runs on it, and what may run inside of a wait.

A ``get()`` on the loop's thread blocks the loop, and with it all coroutines of its concurrency group. So that this
ends: plain methods that the loop would run, and that descend from the call that waits (or are what it waits for), run
within the wait; a coroutine of this very loop that it waits for can never go on, and ends with DeadlockError. Circles
that lead through other loops of the actor, or through other actors, are found as those of serial actors are (see
``deadlock_detector.py``).

The loop's thread alone does all of it; other threads call :meth:`LoopThread.wake`, and look at what is said to be
open to them. No lock: what others look at changes by single atomic steps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from actorrpc.actors.host.envelope import Envelope
from actorrpc.actors.host.mailbox import Entry, GroupQueue
from actorrpc.actors.streams.stalls import Stall, awaited
from actorrpc.agent.calls import CURRENT, Call, Execution
from actorrpc.errors import DeadlockError

if TYPE_CHECKING:
    from actorrpc.actors.host.actor import HostedActor
    from actorrpc.actors.host.event_loop import EventLoop

__all__ = ["LoopThread"]

_log = logging.getLogger("actorrpc.actors")


class LoopThread:
    """What the thread of an event loop does while it waits. Made with its loop.

    Attributes:
        queue: whose calls run on the loop, and nowhere else.
        entries: the calls that run on the loop, by the number of their execution. Any thread may look.
        due: the plain methods whose turn on the loop has not come yet, in order. The thread that takes one out runs it, or
            answers it; any thread may.
        plain: the plain method that runs now, the innermost one. Any thread may look.
    """

    def __init__(self, hosted: HostedActor, queue: GroupQueue) -> None:
        self.queue = queue
        self.entries: dict[int, Envelope] = {}
        self.due: dict[Envelope, None] = {}
        self.plain: Envelope | None = None
        self.depth = 0
        self.ident = 0
        self.loop: EventLoop  # set by the loop when it is made
        self._hosted = hosted
        self._context = Context()
        self._grad = True
        self._waits: list[tuple[Callable[[], None], object, Execution | None]] = []
        self._look = False  # something may have come that can run, or cannot
        self._warned = False

    def begin(self) -> None:
        """Note that this thread is the loop's."""
        self.ident = threading.get_ident()
        self._context = copy_context()
        self._grad = torch.is_grad_enabled()

    def fresh_context(self) -> Context:
        """Return a context for a call: that of the thread, not of what happens to run or wait on it."""
        return self._context.copy()

    @property
    def current(self) -> Envelope | None:
        """The call that the loop's thread runs in this moment, as far as its own code goes, not that of its tasks."""
        plain = self.plain
        if plain is not None:
            return plain
        task = self.loop.current()
        if task is None:
            return None
        return next((each for each in list(self.entries.values()) if each.task is task), None)

    # -- waiting: see futures.NestedRunner ----------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether the thread is in one of our waits, which blocks the loop. Any thread may look."""
        return bool(self._waits)

    @property
    def running(self) -> Envelope | None:
        """The call that waits, and blocks the loop with it. Any thread may look."""
        try:
            execution = self._waits[-1][2]
        except IndexError:
            return None
        return None if execution is None else self.entries.get(execution.chain)

    @property
    def waits_for(self) -> list[Call | Stall]:
        """What the thread waits for, all of it; nothing where that is not known. Any thread may look."""
        try:
            return awaited(self._waits[-1][1])
        except IndexError:
            return []

    def runs(self, execution: int) -> bool:
        """Whether an execution is under way here. Any thread may look."""
        return execution in self.entries

    @property
    def work(self) -> bool:
        """Whether there is a reason to look around."""
        return self._look

    def wake(self) -> None:
        """Have the thread look around if it waits. For any thread."""
        self._look = True
        try:
            self._waits[-1][0]()
        except IndexError:
            pass

    def begin_wait(self, stir: Callable[[], None], what: object) -> None:
        """See futures.NestedRunner."""
        execution = CURRENT.get()
        self._waits.append((stir, what, execution))
        self._look = True
        self._hosted.registry.deadlocks.poke()
        if not self._warned:
            self._warned = True
            entry = self.running
            name = "a task" if entry is None else f"{entry.header.get('method')}()"
            self._hosted.agent.submit(
                partial(
                    _log.warning,
                    "%s of actor %s waits (get() and the like) on the actor's event loop%s, and blocks all coroutines on that. "
                    "In an async method, await the ObjectRef; a plain method is taken off the loop by @method(thread=True). "
                    "This is said once.",
                    name,
                    self._hosted.title,
                    f" of concurrency group {self.queue.name!r}" if self.queue.name else "",
                )
            )

    def end_wait(self) -> None:
        """See futures.NestedRunner."""
        self._waits.pop()

    def begin_await(self) -> None:
        """See futures.NestedRunner. Its coroutines are no task's: those that wait make no room for one."""
        if self.queue.limit == 1 and self.queue.waiting:
            self._hosted.registry.deadlocks.poke()

    def end_await(self) -> None:
        """See futures.NestedRunner."""

    def serve(self) -> None:
        """Run one plain method within the wait, or end what cannot go on because of it."""
        self._look = False
        entry = self._next()
        if entry is not None:
            self._look = True  # there may be more
            self._run_within(entry)
            return
        for each in self._awaited():
            if each.begun or not (self._hosted.mailbox.reentrant and self._hosted.is_plain(each)):
                # A plain method still has its arguments to get.
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
        found = self._hosted.mailbox.take_within(self.queue, fits)
        return found if isinstance(found, Envelope) else None

    def _awaited(self) -> list[Envelope]:
        """Return the calls to this very actor, on this loop, that the thread waits for."""
        found = []
        for call in self.waits_for:
            if not isinstance(call, Call) or not call.peer.is_self:
                continue
            entry: Any = call.peer.running.get(call.id)
            if isinstance(entry, Envelope) and entry.hosted is self._hosted:
                if entry.queue is self.queue:
                    found.append(entry)
        return found

    def may_run(self, entry: Envelope, execution: Execution) -> bool:
        """Whether a call is one that runs within the wait of ``execution``. For any thread."""
        return (
            self._hosted.mailbox.reentrant and self._hosted.is_plain(entry) and execution.chain in entry.path
        )

    def _circle(self, entry: Envelope) -> DeadlockError:
        running = self.running
        waiter = "a task of its own" if running is None else f"{running.header.get('method')}()"
        title = self._hosted.title
        return DeadlockError(
            f"{title}.{entry.header.get('method')}() can never end: {waiter} waits for it with get(), which blocks the event "
            f"loop of {title} that it needs. Await it instead",
            maybe_executed=entry.begun > 0,
            worker=self._hosted.agent.name,
        )

    def _run_within(self, entry: Envelope) -> None:
        waits, plain = self._waits, self.plain
        # The wait below is not stirred by calls that run above it; a wait up there brings its own.
        self._waits = []
        grad = torch.is_grad_enabled()
        if grad is not self._grad:
            torch._C._set_grad_enabled(self._grad)
        try:
            self._hosted.executor.run_plain(entry, self, within=True)
        finally:
            torch._C._set_grad_enabled(grad)
            self._waits = waits
            self.plain = plain

    # -- looking ------------------------------------------------------------------------------------------

    def ended(self) -> list[Envelope]:
        """Take out the calls whose turn has not come; for the thread that ends the actor."""
        found = []
        for each in list(self.due):
            if self.due.pop(each, each) is None:
                found.append(each)
        return found

    def holder(self, task: asyncio.Task[Any] | None) -> str:
        """Return the name of what runs on the loop, where that is one of the actor's methods. For any thread."""
        entry = self.plain
        if entry is None and task is not None:
            entry = next((each for each in list(self.entries.values()) if each.task is task), None)
        return "" if entry is None else f"{self._hosted.title}.{entry.header.get('method')}()"
