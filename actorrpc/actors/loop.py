"""The event loop of an actor that has ``async def`` methods: a thread that runs nothing else."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from actorrpc.core.daemons import Daemon
from actorrpc.core.exception_text import report
from actorrpc.core.limits import NO_THREAD
from actorrpc.core.threads import follow_torch
from actorrpc.futures import Future

__all__ = ["EventLoop"]

_log = logging.getLogger("actorrpc.actors")


class EventLoop:
    """An asyncio loop on a thread of its own. Methods may be called by any thread.

    The thread is started by :meth:`start`, never under a lock; what is submitted before is kept.
    """

    def __init__(self, title: str, lost: Callable[[BaseException], Any]) -> None:
        self._title = title
        self._lost = lost
        self._loop = asyncio.new_event_loop()
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
        follow_torch()
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            while not self._closed:
                _log.warning(
                    "a method of %s stopped the event loop, which all of them need: it goes on", self._title
                )
                self._loop.run_forever()
        except BaseException as error:  # sys.exit() in a task that a method has begun, for one
            self._lost(error)
        finally:
            self._over = True
            try:
                left = asyncio.all_tasks(self._loop)
                for task in left:
                    task.cancel()
                if left:
                    self._loop.run_until_complete(asyncio.wait(left, timeout=2.0))
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            except BaseException as error:
                report(_log, error, "the event loop of %s did not end cleanly", self._title)
            finally:
                asyncio.set_event_loop(None)
                self._loop.close()

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
