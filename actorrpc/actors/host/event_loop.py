"""The event loops of an actor that has ``async def`` methods, and the threads that run them.

There is one for each concurrency group, the default group included: what blocks one of them does not hold the others. The
coroutines of the group run on it; on that of the default group, the actor's plain methods do, too, which block it. A watch
names what holds the loop for longer than a second: it goes by the loop's selector, which says when the loop sleeps, and
costs an idle loop nothing.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from actorrpc import _stacks
from actorrpc._exception_text import is_a, report
from actorrpc._limits import NO_THREAD
from actorrpc.actors.spec.actor_spec import ActorExit
from actorrpc.agent.daemon_threads import Daemon
from actorrpc.agent.threads import follow_torch
from actorrpc.agent.timers import Tick
from actorrpc.futures import WAITING, Future

if TYPE_CHECKING:
    from actorrpc.actors.host.loop_thread import LoopThread
    from actorrpc.agent.agent import Agent

__all__ = ["EventLoop"]

_log = logging.getLogger("actorrpc.actors")
_HELD_S: Final = 1.0  # whatever holds the loop for longer is named
_END_S: Final = 2.0  # how long coroutines may take to end with their actor


class EventLoop:
    """An asyncio loop on a thread of its own. Methods may be called by any thread.

    The thread is started by :meth:`start`, never under a lock; what is submitted before is kept.

    Args:
        title: the actor, in messages, and the group where that is not the default one.
        runner: what the thread does while it waits.
        exits: hears, on the loop's thread, of a ``sys.exit()`` that no call's own code has made.
        lost: hears, on the loop's thread, of anything else that has ended the loop.
        agent: has the clock that the watch goes by.
    """

    def __init__(
        self,
        title: str,
        runner: LoopThread,
        exits: Callable[[SystemExit], Any],
        lost: Callable[[BaseException], Any],
        agent: Agent,
    ) -> None:
        self._title = title
        self.runner = runner
        runner.loop = self
        self._exits = exits
        self._lost = lost
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_complain)
        self._watch = _LoopWatch(self._loop, title, runner, agent)
        self._started = False
        self._thread: threading.Thread | None = None
        # Guards starting and ending; leaf.
        self._lock = threading.Lock()
        self._closed = False
        self._over = False  # only on the loop's own thread

    def start(self) -> None:
        """Start the thread, once."""
        with self._lock:
            if self._started or self._closed:
                return
            self._started = True
        thread = Daemon(self._run, f"actorrpc-loop-{self._title}")
        try:
            thread.start()
        except NO_THREAD:
            self._started = False  # the next call tries again
            raise
        self._thread = thread

    def _run(self) -> None:
        WAITING.runner = self.runner
        follow_torch()
        self.runner.begin()
        asyncio.set_event_loop(self._loop)
        try:
            self._run_on()
        except BaseException as error:
            self._lost(error)
        finally:
            self._over = self._watch.over = True
            try:
                left = asyncio.all_tasks(self._loop)
                for task in left:
                    task.cancel()
                if left:
                    _, stubborn = self._loop.run_until_complete(asyncio.wait(left, timeout=_END_S))
                    for task in stubborn:
                        _log.info("%r has not ended with %s, and is dropped", task, self._title)
                        task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio would say so at any time
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            except BaseException as error:
                report(_log, error, "the event loop of %s did not end cleanly", self._title)
            finally:
                WAITING.runner = None
                asyncio.set_event_loop(None)
                self._loop.close()

    def _run_on(self) -> None:
        while True:
            try:
                self._loop.run_forever()
            except (
                SystemExit
            ) as exit:  # of a task or a callback that a method has begun: asyncio lets it pass
                self._exits(exit)
                if self._closed:
                    return
                continue
            if self._closed:
                return
            _log.warning(
                "a method of %s stopped the event loop, which all of them need: it goes on", self._title
            )

    def _stop(self) -> None:
        if not self._over:  # otherwise it is waiting for the end of its tasks
            self._loop.stop()

    def submit(self, run: Callable[[], Any]) -> bool:
        """Call ``run()`` on the loop soon; False if the loop is over.

        Raises:
            RuntimeError, MemoryError: the system has no thread for it.
        """
        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:
            return False
        if not self._started:
            self.start()
        return True

    def task(self, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context) -> asyncio.Task[Any]:
        """Start a coroutine; only on the loop's own thread."""
        return self._loop.create_task(coroutine, context=context)

    def turn(self, run: Callable[[], Any], context: contextvars.Context) -> None:
        """Call ``run()`` in its turn, behind what is to run already; only on the loop's own thread."""
        self._loop.call_soon(run, context=context)

    def current(self) -> asyncio.Task[Any] | None:
        """Return the task that runs on the loop in this moment. For any thread."""
        return asyncio.current_task(self._loop)

    def close(self) -> Future[None]:
        """End the loop and its tasks; completes when its thread is over."""
        over: Future[None] = Future()
        with self._lock:
            self._closed = True
            started = self._started
        if not started:
            if not self._loop.is_closed():
                self._loop.close()
            over.set_result(None)
            return over
        try:
            self._loop.call_soon_threadsafe(self._stop)
        except RuntimeError:  # closed already
            pass
        thread = self._thread

        def wait() -> None:
            if thread is not None and thread is not threading.current_thread():
                thread.join(5.0)
            over.set_result(None)

        try:
            Daemon(wait, "actorrpc-loop-end").start()
        except NO_THREAD:  # it ends by itself
            over.set_result(None)
        return over


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what nobody has looked at, but for the ends of the actor, which have been seen to."""
    if not is_a(context.get("exception"), (ActorExit, SystemExit)):
        loop.default_exception_handler(context)


class _LoopWatch:
    """Names, once each, the methods that hold the loop for longer than a second.

    Where the loop is not asyncio's own (uvloop's has no selector) nothing is watched.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, title: str, runner: LoopThread, agent: Agent) -> None:
        self._loop = loop
        self._title = title
        self._runner = runner
        self._agent = agent
        self._tick = Tick(agent.clock, _HELD_S, self._look)
        self._turn = 0  # of the loop
        self._sleeps = False
        self.over = False
        # The turn, and what ran in it, at the last look, and since when that is known. A turn runs all that is ready: a thousand
        # coroutines take it long, of which none holds the loop. Whatever runs in a turn was there at its beginning, therefore
        # no two of them have the same id.
        self._seen: tuple[int, int] | None = None
        self._since = 0.0
        self._named: set[str] = set()
        selector = getattr(loop, "_selector", None)
        if selector is not None:
            self._select = selector.select
            selector.select = self._selected

    def _selected(self, timeout: float | None = None) -> Any:
        """Select for the loop, and note that a new turn of it begins."""
        self._sleeps = True
        try:
            return self._select(timeout)
        finally:
            self._turn += 1
            self._sleeps = False
            self._tick.poke()

    def _look(self) -> bool:
        if self._sleeps or self.over:
            return False
        # In real time: a virtual clock may look twice within a moment.
        now = time.monotonic()
        present = self._present()
        if present != self._seen:
            self._seen, self._since = present, now
        elif now - self._since >= _HELD_S * 0.9 and self._runner.ident not in self._agent.held:
            self._since = now
            self._agent.submit(self._report)  # it reads source files
        return True

    def _present(self) -> tuple[int, int]:
        return self._turn, id(self._runner.plain or asyncio.current_task(self._loop))

    def _report(self) -> None:
        name = self._runner.holder(asyncio.current_task(self._loop))
        if name in self._named:
            return
        frame = _stacks.top_frame(self._runner.ident)
        if frame is None or self._sleeps or self.over or self._present() != self._seen:
            return
        self._named.add(name)
        _log.warning(
            "%s has held the event loop of actor %s for more than %.0f s: none of its coroutines goes on meanwhile. In an "
            "async method, await what takes long (asyncio.to_thread() runs a function on a thread); a plain method is "
            "taken off the loop by @method(thread=True). This is said once for each method. What it is doing:\n%s",
            name or "a task",
            self._title,
            _HELD_S,
            "".join(_users_part(traceback.extract_stack(frame)).format()),
        )


def _users_part(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Cut what is the loop's and ours off the outer end of a stack."""
    ours = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(asyncio.__file__), threading.__file__)
    left = itertools.dropwhile(lambda each: each.filename.startswith(ours), stack)
    return traceback.StackSummary.from_list(list(left) or list(stack))
