"""The clock: the one thread that runs functions at their due times.

It handles time-outs of calls, delayed writes, checks for queued work that no thread runs, heartbeats and batched releases of
references. The thread sleeps until the next function is due, so an idle group costs nearly no CPU time. The functions must be
short and must not block, take locks that are held for long, or run user code: longer work is submitted to the pool.

``_lock`` guards the heap and ``_sleeping_until``; no other code runs under it, and no other lock is taken under it. The lock is
re-entrant, as a signal handler or a finaliser may set a timer on a thread that holds the lock.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from actorrpc import _time
from actorrpc._exceptions import report
from actorrpc._limits import start_thread
from actorrpc.agent.daemon_threads import Daemon
from actorrpc.transport.signals import uninterruptible

__all__ = ["Clock", "Tick", "Timer"]

_log = logging.getLogger("actorrpc.clock")
_NEVER: Final = float("inf")


class Timer:
    """A function that the clock runs once. ``cancel`` may be called from any thread, at any time."""

    __slots__ = ("due", "run")

    def __init__(self, due: float, run: Callable[[], Any] | None) -> None:
        self.due = due
        self.run = run

    def cancel(self) -> None:
        """Prevent the run, unless the function is running already."""
        self.run = None


@uninterruptible
class Tick:
    """Calls ``look()`` at an interval for as long as ``look`` returns that there is work left.

    :meth:`wake` starts it. On the path of a call, test ``active`` first: that saves the call of ``wake``.
    """

    __slots__ = ("_clock", "_due", "_look", "active", "interval", "late")

    def __init__(self, clock: Clock, interval: float, look: Callable[[], bool]) -> None:
        self._clock = clock
        self.interval = interval  # seconds until the next call of ``look``, which may change this value
        self._look = look
        self._due = 0.0
        self.active = False
        self.late = 0.0  # by how many seconds the last call of ``look`` was late

    def wake(self) -> None:
        """Make sure that ``look`` is called within the interval."""
        if not self.active:
            self.active = True
            self._due = self._clock.now() + self.interval
            self._clock.at(self._due, self._run)

    def _run(self) -> None:
        # Reset ``active`` before ``look`` is called: a wake() during the call then starts the tick again, so no work is missed.
        self.active = False
        self.late = self._clock.now() - self._due
        if self._look() and not self.active:
            self.wake()


@uninterruptible
class Clock:
    """Runs timers on a thread of its own. Thread-safe; may be used in signal handlers and finalisers."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self._lock = _time.RLock()
        self._wake = _time.Lock()
        self._wake.acquire()
        self._sleeping_until = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None

    def now(self) -> float:
        """Return the time in seconds; only differences mean anything."""
        return _time.now()

    def start(self) -> None:
        """Start the thread.

        Raises:
            LimitError: the system can start no thread.
        """
        thread = Daemon(self._run, "actorrpc-clock", lambda _: self.start())
        start_thread(thread)
        self._thread = thread

    def at(self, due: float, run: Callable[[], Any]) -> Timer:
        """Run ``run()`` on the clock's thread at the time ``due`` of :meth:`now`; return a timer that can be cancelled."""
        timer = Timer(due, run)
        entry = (due, next(self._count), timer)
        with self._lock:
            heapq.heappush(self._heap, entry)
            wake = due < self._sleeping_until
            if wake:
                self._sleeping_until = 0.0
        if wake:
            self._wake_clock()
        return timer

    def after(self, delay: float, run: Callable[[], Any]) -> Timer:
        """Run ``run()`` in ``delay`` seconds."""
        return self.at(self.now() + delay, run)

    def call_soon(self, run: Callable[[], Any]) -> None:
        """Run ``run()`` now, on the clock's thread. No effect after :meth:`close`: finalisers may call it still later."""
        if not self._closed:
            self.at(self.now(), run)

    def close(self) -> None:
        """End the thread. Timers that are not due yet never run."""
        self._closed = True
        self._wake_clock()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)

    def _wake_clock(self) -> None:
        try:
            self._wake.release()
        except RuntimeError:  # the thread was woken already
            pass

    def _run(self) -> None:
        while not self._closed:
            run: Callable[[], Any] | None = None
            with self._lock:
                # Set before the steps below: if a finaliser on this thread sets a timer between them, at() resets
                # ``_sleeping_until``, and this thread does not sleep past the timer.
                self._sleeping_until = _NEVER
                until = self._heap[0][0] if self._heap else _NEVER
                is_due = until <= _time.now()
                if is_due:
                    self._sleeping_until = 0.0
                    run = heapq.heappop(self._heap)[2].run
                elif self._sleeping_until:
                    self._sleeping_until = until
            if is_due:
                if run is not None:
                    self._do(run)
                continue
            _time.doze(self._wake, until, idle=True)

    def _do(self, run: Callable[[], Any]) -> None:
        try:
            run()
        except BaseException as error:
            report(_log, error, "a timer raised")
