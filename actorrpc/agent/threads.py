"""The thread pool, whose threads read connections and execute the requests.

All threads sleep in one ``epoll``. The thread that the kernel wakes reads the request and executes it itself: a request is
handed to another thread only when there is more work than one thread should do.

Invariant: *at least one thread is always in epoll, or about to be.* A thread that leaves epoll may read, but before it runs user
code or blocks it makes sure that another thread is in epoll, and starts a thread if there is none (:meth:`Pool.ensure_reader`).
So heartbeats, cancellations and further calls are served whatever user code does, unless it holds the GIL, and nested or cyclic
calls of any depth find a thread as long as there are fewer than ``max_threads``. At ``max_threads``, the last thread only reads
and queues.

The *width* bounds how many threads run work at once. If many short calls arrive at once, all these threads are ready to run and
compete for the interpreter, and another thread would only slow them down: a thread above the width only reads. If no work ends
for some milliseconds, the threads are considered blocked, and the width grows by a quarter.

A :class:`Tick` checks the work that waits in the queue, as the pool cannot tell that a thread waits in C++ or for an ``Event``.
``_lock`` guards starting and ending threads and is taken last; no other code runs under it.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch

from actorrpc import _time
from actorrpc._exceptions import report
from actorrpc._limits import NO_THREAD, explain_threads
from actorrpc.agent.daemon_threads import Daemon
from actorrpc.agent.timers import Clock, Tick
from actorrpc.errors import LimitError
from actorrpc.futures import Future
from actorrpc.transport.signals import uninterruptible

__all__ = ["Pool", "follow_torch"]

_log = logging.getLogger("actorrpc.threads")

_WIDTH: Final = 32  # the first width: the most threads that run work at once
_BLOCKED_S: Final = 0.01  # the running threads count as blocked if no work ends for so long
_KEPT: Final = 8  # idle threads beyond this many end
_SLOW_S: Final = 200e-6  # if work takes longer on average, another thread is woken at once for queued work
_HELPED_S: Final = 0.1  # if a helper (_start_helper) runs one task for so long, another helper is started
_FLOWING: Final = 4  # if at least this many tasks end between two ticks, the queue needs no more threads
_COMPETED_S: Final = 300e-6  # if a tick is later than this, threads compete for the interpreter
_PATIENCE_S: Final = (
    0.1  # if threads compete for the interpreter, at most one thread is woken or started in this time
)
_LAST_S: Final = (
    0.05  # how often the last permitted thread, which only reads, checks whether it may run tasks
)
_STUCK_S: Final = 5.0  # queued calls are refused when every thread has been blocked for so long


def follow_torch() -> None:
    """Apply ``torch.set_num_threads`` to this thread.

    OpenMP stores the number of threads to use separately for each calling thread. torch sets it before its own loops, but may
    call MKL or oneDNN (LSTMs, matrix products) before that, which would use all processors.
    """
    torch.get_num_threads()


class Pool:
    """Threads, the epoll in which they sleep, and the queue of work that was read but not started.

    Args:
        clock: runs the tick that finds work which is queued for too long.
        execute: runs a queued message ``(connection, frame, arrival time)``.
        refuse: ends a queued message that cannot be run because every thread is blocked; called with the reason.
        max_threads: the most threads.
        starvation_s: how many seconds work may be queued before another thread is woken or started for it.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        execute: Callable[[Any], None],
        refuse: Callable[[Any, str], None],
        max_threads: int,
        starvation_s: float,
    ) -> None:
        self.epoll = _time.epoll()
        self.queue: deque[Any] = deque()
        self.idle: set[int] = set()
        self.threads: set[threading.Thread] = set()
        self.finished = 0
        self._execute = execute
        self._refuse = refuse
        self._max = max_threads
        self._denied = False  # the system refused the last start of a thread
        self._lock = _time.RLock()
        self._sources: dict[int, Callable[[], object]] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Edge-triggered and never read: each write wakes one thread.
        self.epoll.register(self._wake_fd, select.EPOLLIN | select.EPOLLET)
        self.stopping = False
        self._mean = 0.0  # moving average of the time that work takes, in seconds
        self._starvation = Tick(clock, starvation_s / 2, self._starving)
        # As of the last tick: the oldest queued work, since when it has been the oldest, and the value of ``finished``.
        self._oldest: Any = None
        self._since = 0.0
        self._seen = 0
        self._crowded = False
        self._asked = 0.0  # when the tick has last woken or started a thread
        self._helped_at = 0.0  # when the helper took its last task; 0: there is no helper
        self._abandoned = False
        # Any thread may change these three at any time: a lost change costs some milliseconds at most.
        self._width = _WIDTH
        self._stalled_since = 0.0
        self._stalled_at = -1

    # -- descriptors and the queue ---------------------------------------------------------------

    def watch(self, fd: int, ready: Callable[[], object]) -> None:
        """Call ``ready()`` on a pool thread when the (registered) descriptor has something to read."""
        self._sources[fd] = ready

    def forget(self, fd: int) -> None:
        """Stop watching a descriptor."""
        self._sources.pop(fd, None)
        try:
            self.epoll.unregister(fd)
        except (OSError, ValueError):
            pass

    @uninterruptible
    def wake(self) -> None:
        """Wake an idle thread for the queue, or start a thread if there is no idle one."""
        if self.idle:
            try:
                os.eventfd_write(self._wake_fd, 1)
            except BlockingIOError:  # the counter is full after 2^64 writes: start over
                os.eventfd_read(self._wake_fd)
            except (OSError, ValueError):  # the pool was closed just now
                pass
        else:
            self._start()

    def submit(self, task: Callable[[], Any]) -> None:
        """Run ``task()`` on a pool thread. After :meth:`close`, run only callbacks of futures, on the calling thread."""
        self._put(task)
        if self._abandoned:
            self._settle()

    @uninterruptible
    def _put(self, task: Callable[[], Any]) -> None:
        self.queue.append(task)
        self.wake()

    def _settle(self) -> None:
        """Run the queued callbacks of completed futures in this thread; discard all other queued tasks.

        A thread may wait for the result of such a callback.
        """
        while True:
            try:
                task = self.queue.popleft()
            except IndexError:
                return
            if isinstance(getattr(task, "__self__", None), Future):
                self._run_internal(task)

    def hand_out(self) -> None:
        """Called by a thread that has queued messages and will run the first: if work is slow, wake a thread for the others."""
        if self._mean > _SLOW_S and not self._crowded:
            self.wake()
        self._starvation.wake()

    # -- keeping a reader ------------------------------------------------------------------------

    def ensure_reader(self) -> bool:
        """Make sure that a thread other than this one is in epoll; False if there can be no more threads."""
        if self.idle:
            return True
        return self._start()

    @uninterruptible
    def _start(self) -> bool:
        # If the thread ends before the pool does, because memory has run out, a new thread replaces it.
        thread = Daemon(self._loop, f"actorrpc-{len(self.threads)}", lambda _: self._start())
        with self._lock:
            if self.stopping or len(self.threads) >= self._max:
                return False
            self.threads.add(thread)
        try:
            thread.start()
        except NO_THREAD:  # the system can start no more threads, or the interpreter is shutting down
            self._denied = True
            self._unregister(thread)
            return False
        self._denied = False
        return True

    def start(self, count: int) -> None:
        """Start ``count`` threads, but no more than the maximum.

        Raises:
            LimitError: the system can start no more threads.
        """
        for _ in range(min(count, self._max)):
            if not self._start():
                raise LimitError(explain_threads())

    def is_member(self) -> bool:
        """Return whether the calling thread belongs to the pool."""
        # Not current_thread(), which creates an object for each thread that Python has not started.
        me = threading.get_ident()
        # set.copy() is one step. tuple() is not: its allocation may start the garbage collector, and another thread may then run
        # and change the set.
        return any(each.ident == me for each in self.threads.copy())

    def _loop(self) -> None:
        me = threading.get_ident()
        idle, queue, poll, sources = self.idle, self.queue, self.epoll.poll, self._sources
        starvation = self._starvation
        idle.add(me)  # first, because ensure_reader() of the thread that has started this one relies on it
        follow_torch()
        listening_s = 0.0  # seconds for which this thread only reads, and takes no work from the queue
        try:
            while not self.stopping:
                try:
                    if queue and not listening_s:
                        idle.discard(me)
                        running = len(self.threads) - len(idle)
                        if running > self._width and self._is_full(running):
                            listening_s = _BLOCKED_S
                        elif not idle and not self._start():
                            listening_s = _LAST_S  # the last thread never runs user code
                        if listening_s:
                            starvation.wake()
                            continue
                        try:
                            task = queue.popleft()
                        except IndexError:
                            continue
                        # If several tasks are queued in quick succession, the pool may wake only one thread. If this thread's
                        # task blocks, `_starving` on the clock's thread wakes another thread for the queued tasks.
                        if queue and not starvation.active:
                            starvation.wake()
                        # The time that work takes is only measured if more work is queued.
                        begun = _time.now() if queue else 0.0
                        try:
                            if type(task) is tuple:
                                self._execute(task)
                            else:
                                task()
                        finally:
                            self.finished += 1
                            if begun:
                                self._mean += 0.125 * (min(_time.now() - begun, 1.0) - self._mean)
                            task = None  # an idle thread keeps no arguments, results or futures alive
                        continue
                    idle.add(me)
                    if queue and not listening_s:
                        continue
                    if len(idle) > _KEPT and self._retire(me):
                        return
                    try:
                        events = poll(listening_s or -1, 1)
                    except InterruptedError:
                        continue
                    except (OSError, ValueError):  # the epoll was closed: the pool is ending
                        return
                    listening_s = 0.0
                    ready = sources.get(events[0][0]) if events else None
                    if ready is not None:
                        idle.discard(me)
                        ready()
                except BaseException as error:
                    self._raised(error)
        finally:
            idle.discard(me)
            self._unregister(threading.current_thread())

    def _is_full(self, running: int) -> bool:
        """Return whether the width is used up. If the running threads are blocked, increase the width and return False."""
        now = _time.now()
        if self._stalled_for(now) < _BLOCKED_S:
            return True
        self._stalled_since = now
        self._width = running + self._width // 4
        return False

    def _stalled_for(self, now: float) -> float:
        """Return for how many seconds no work has ended, counted from the first call since the last work has ended."""
        if self.finished != self._stalled_at:
            self._stalled_since, self._stalled_at = now, self.finished
        return now - self._stalled_since

    def _retire(self, me: int) -> bool:
        with self._lock:
            if len(self.idle) <= _KEPT:
                return False
            self.idle.discard(me)
            self._width = max(_WIDTH, min(self._width, len(self.threads)))
            return True

    @staticmethod
    def _raised(error: BaseException) -> None:
        # SystemExit is logged as well, because it would end the thread.
        report(_log, error, "a task of the pool raised")

    def _run_internal(self, task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:
            self._raised(error)
        self.finished += 1

    # -- starvation ------------------------------------------------------------------------------

    def _starving(self) -> bool:
        """Wake or start a thread if work was queued for too long; False if the queue is empty. Runs on the clock's thread."""
        try:
            oldest = self.queue[0]
        except IndexError:
            self._oldest = None
            return False
        now = _time.now()
        stalled_s = self._stalled_for(now)
        # If this tick is late, the running threads compete for the interpreter, and another thread would slow them down.
        # Otherwise they are blocked, and another thread is needed.
        self._crowded = self._starvation.late > _COMPETED_S
        done, self._seen = self.finished - self._seen, self.finished
        if oldest is not self._oldest:
            self._oldest = oldest
            self._since = self._asked = now
        elif now - self._since >= 2 * self._starvation.interval and done < _FLOWING:
            if not self._crowded or now - self._asked >= _PATIENCE_S:
                self._asked = now
                self._width = max(self._width, len(self.threads) - len(self.idle) + 1)
                self.wake()
            if not self._can_grow():
                self._start_helper(now)
                if min(now - self._since, stalled_s) > _STUCK_S:
                    self._refuse_all()
        return True

    def _can_grow(self) -> bool:
        """Return whether the pool can still wake or start a thread."""
        return len(self.idle) > 1 or (len(self.threads) < self._max and not self._denied)

    def _start_helper(self, now: float) -> None:
        """Start a thread beyond the maximum, which runs the internal tasks of the queue but no calls.

        The calls that block all threads may wait for internal tasks: ends of peers, delayed sends and callbacks.
        """
        if now - self._helped_at < _HELPED_S or all(type(task) is tuple for task in list(self.queue)):
            return
        self._helped_at = now
        try:
            Daemon(self._run_helper, "actorrpc-helper").start()
        except NO_THREAD:
            pass

    def _run_helper(self) -> None:
        thread = threading.current_thread()
        with self._lock:
            self.threads.add(thread)
        try:
            while not self.stopping and (task := self._take_internal()) is not None:
                self._helped_at = _time.now()
                self._run_internal(task)
        finally:
            self._helped_at = 0.0
            self._unregister(thread)

    def _take_internal(self) -> Any:
        for task in list(self.queue):
            if type(task) is not tuple:
                try:
                    self.queue.remove(task)
                except (ValueError, IndexError):
                    continue  # another thread took it
                return task
        return None

    def _refuse_all(self) -> None:
        for _ in range(len(self.queue)):
            try:
                task = self.queue.popleft()
            except IndexError:
                return
            if type(task) is tuple:
                why = explain_threads() if self._denied else "no more are permitted (ACTORRPC_MAX_THREADS)"
                self._refuse(task, f"all {len(self.threads)} threads are blocked, and {why}")
            else:
                self.queue.append(task)

    # -- the end ---------------------------------------------------------------------------------

    def close(self, timeout: float = 2.0) -> list[threading.Thread]:
        """End the threads; return the threads that are still in user code after ``timeout`` seconds."""
        with self._lock:
            self.stopping = True
            left = [each for each in self.threads if each is not threading.current_thread()]
        until = time.monotonic() + timeout  # real time, even in tests with a virtual clock
        # Wait until the threads have ended, and not only left the pool: at its end, a thread may release objects of torch, and if
        # the interpreter ends meanwhile, the process is aborted.
        while (left := [each for each in left if each.is_alive()]) and time.monotonic() < until:
            # Each write wakes one sleeping thread. Threads in user code end when the user code returns.
            for _ in left:
                os.eventfd_write(self._wake_fd, 1)
            left[0].join(0.02)
        with self._lock:
            # If threads are still in user code, the last thread that ends closes the descriptors.
            self._abandoned = True
            last = not self.threads
        if last:
            self._close_descriptors()
        else:
            self._wake_sleeper()
        self._settle()
        return [each for each in left if each.ident not in self.idle]

    def _unregister(self, thread: threading.Thread) -> None:
        with self._lock:
            self.threads.discard(thread)
            abandoned = self._abandoned
            last = abandoned and not self.threads
        if last:
            self._close_descriptors()
        if abandoned:
            self._wake_sleeper()  # one thread wakes the next
            self._settle()  # this thread may have read answers and queued callbacks since close() ran the queue

    def _wake_sleeper(self) -> None:
        with self._lock:
            # Under the lock: the last thread may close the descriptor, whose number may then be reused.
            if self.threads and self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _close_descriptors(self) -> None:
        self.epoll.close()
        with self._lock:
            fd, self._wake_fd = self._wake_fd, -1
        if fd >= 0:
            os.close(fd)

    def abandon(self) -> None:
        """Close the descriptors in a forked child, which has no threads."""
        self.stopping = True
        self.epoll.close()
        try:
            os.close(self._wake_fd)
        except OSError:
            pass
