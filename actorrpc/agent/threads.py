"""The pool: worker threads scheduled by the kernel, of which one is always listening.

All threads sleep in one ``epoll``. The one that the kernel wakes reads what has come and executes it itself:
a call is handed from thread to thread only when there is more to do than one thread should do.

The invariant that everything rests on: *at least one thread is always in epoll, or about to be.* A thread
that leaves epoll may read, but before it runs user code or blocks it makes sure that another one is in epoll,
starting a thread if need be (:meth:`Pool.ensure_reader`). So heartbeats, cancellations and further calls are
served whatever user code does, and nested or cyclic calls of any depth cannot run out of threads below
``max_threads``. At ``max_threads``, the last thread only reads and queues.

How many threads run work at once is bounded by the *width*: in a rush of short calls all of them are ready to run and wait
for the interpreter, and one more would only make the others slower. A thread that comes on top of them only listens. Where
none of them ends its work for some milliseconds, they are blocked, and the width grows by a part of itself.

Work of a batch that nobody has taken up is looked after by a tick: waits of a thread in C++ or on an
``Event`` are invisible otherwise. ``_lock`` guards starting and ending threads and is taken last; nothing is
called under it.
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
from actorrpc._exception_text import report
from actorrpc._limits import NO_THREAD, explain_threads
from actorrpc.agent.daemon_threads import Daemon
from actorrpc.agent.timers import Clock, Tick
from actorrpc.errors import LimitError
from actorrpc.futures import Future
from actorrpc.transport.signals import uninterruptible

__all__ = ["Pool", "follow_torch"]

_log = logging.getLogger("actorrpc.threads")

_WIDTH: Final = 32  # threads that run work at once, until they are seen to be blocked
_BLOCKED_S: Final = 0.01  # so long without any end of work says that they are
_KEPT: Final = 8  # idle threads beyond this many end
_SLOW_S: Final = 200e-6  # calls that take longer than this on average are spread over threads at once
_HELPED_S: Final = 0.1  # a helper that has been at one task for this long needs a helper itself
_FLOWING: Final = 4  # calls that end between two ticks: work that flows needs no more threads
_COMPETED_S: Final = 300e-6  # a tick that is later than this had to wait for the interpreter
_PATIENCE_S: Final = 0.1  # how often a thread is brought in all the same
_STUCK_S: Final = 5.0  # with every thread blocked for this long, queued calls are refused


def follow_torch() -> None:
    """Have ``torch.set_num_threads`` count on this thread as well.

    How many threads OpenMP may use is each thread's own number. torch sets it on its way into loops of its own, but MKL and
    oneDNN (LSTMs, products) may be called before that, and would take all processors.
    """
    torch.get_num_threads()


class Pool:
    """Threads, the epoll they sleep in, and the queue of work that has been read but not started.

    Args:
        clock: for the starvation tick.
        execute: runs a queued message ``(connection, frame, arrival time)``.
        refuse: ends a queued message that can never be run (every thread is blocked), and says why.
        max_threads: the most threads.
        starvation_s: how long work may lie in the queue before another thread is brought in.
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
        self.threads: dict[int, threading.Thread] = {}
        self._leaving: list[threading.Thread] = []
        self.finished = 0
        self._execute = execute
        self._refuse = refuse
        self._max = max_threads
        self._starting = 0
        self._denied = False  # the system had no thread for us when we last asked
        self._lock = _time.RLock()
        self._sources: dict[int, Callable[[], object]] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Edge-triggered and never read: each write wakes one thread.
        self.epoll.register(self._wake_fd, select.EPOLLIN | select.EPOLLET)
        self.stopping = False
        self._mean = 0.0
        self._starvation_s = starvation_s
        self._starvation = Tick(clock, starvation_s / 2, self._starving)
        self._oldest: Any = None
        self._since = 0.0
        self._seen_finished = 0
        self._seen = 0
        self._asked = 0.0
        self._crowded = False
        self._helpers = 0
        self._forsaken = False
        self._helped = 0.0
        # How wide it is, and since when how much work has been done: a race over them costs some milliseconds at most.
        self._width = _WIDTH
        self._full_since = 0.0
        self._full_finished = -1

    # -- what threads wait for -------------------------------------------------------------------

    def watch(self, fd: int, ready: Callable[[], object]) -> None:
        """Call ``ready()`` on a pool thread when the (registered) descriptor has something to read."""
        self._sources[fd] = ready

    def forget(self, fd: int) -> None:
        """Take a descriptor out."""
        self._sources.pop(fd, None)
        try:
            self.epoll.unregister(fd)
        except (OSError, ValueError):
            pass

    @uninterruptible
    def wake(self) -> None:
        """Wake one thread for the queue; start one if none is there to be woken."""
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
        """Run ``task()`` on a pool thread. When the pool has ended, only what is owed to a future is still done: here."""
        self._put(task)
        if self._forsaken:
            self._settle()

    @uninterruptible
    def _put(self, task: Callable[[], Any]) -> None:
        self.queue.append(task)
        self.wake()

    def _settle(self) -> None:
        """Call back whom completed futures still have to, without threads; drop what else there is.

        Their calls are over, and a thread that waits for what follows from them would wait for ever.
        """
        while True:
            try:
                task = self.queue.popleft()
            except IndexError:
                return
            if isinstance(getattr(task, "__self__", None), Future):
                self._run_internal(task)

    def hand_out(self) -> None:
        """See to the queue, after messages were put there by a thread that will itself run the first of them."""
        if self._mean > _SLOW_S and not self._crowded:
            self.wake()
        self._starvation.poke()

    # -- keeping a reader ------------------------------------------------------------------------

    def ensure_reader(self) -> bool:
        """Make sure that a thread other than this one is in epoll; False if that is not possible any more."""
        if self.idle:
            return True
        return self._start()

    @uninterruptible
    def _start(self) -> bool:
        with self._lock:
            if self.stopping:
                return False
            count = len(self.threads) + self._starting
            if count >= self._max:
                return False
            self._starting += 1
        # Where one ends that was not to, as memory has run out, another one takes its place: one has to listen.
        thread = Daemon(self._loop, f"actorrpc-{count}", lambda _: self._start())
        try:
            thread.start()
        except NO_THREAD:  # the system has no more, or the interpreter is shutting down
            with self._lock:
                self._starting -= 1
                self._denied = True
            return False
        self._denied = False
        return True

    def start(self, count: int) -> None:
        """Start the first threads, at most as many as there may be.

        Raises:
            LimitError: the system has not so many.
        """
        for _ in range(min(count, self._max)):
            if not self._start():
                raise LimitError(explain_threads())

    def is_member(self) -> bool:
        """Say whether the calling thread belongs to the pool."""
        return threading.get_ident() in self.threads

    def _loop(self) -> None:
        me = threading.get_ident()
        idle, queue, poll, sources = self.idle, self.queue, self.epoll.poll, self._sources
        starvation = self._starvation
        # Idle from the first moment, so that the one that started this thread may rely on it.
        idle.add(me)
        with self._lock:
            self.threads[me] = threading.current_thread()
            self._starting -= 1
        follow_torch()
        listening_for = 0.0  # seconds for which it leaves the queue to others
        try:
            while not self.stopping:
                if queue and not listening_for:
                    idle.discard(me)
                    running = len(self.threads) - len(idle)
                    if running > self._width and self._is_full(running):
                        listening_for = _BLOCKED_S
                        idle.add(me)
                        self._starvation.poke()
                        continue
                    try:
                        task = queue.popleft()
                    except IndexError:
                        continue
                    if not idle and not self._start():
                        # The last thread never runs user code.
                        queue.appendleft(task)
                        listening_for = 0.05
                        self._starvation.poke()
                        continue
                    if queue:
                        # Wake-ups may merge into one: the tick sees to what is left if this task blocks.
                        if not starvation.active:
                            starvation.poke()
                    # How long work takes matters only where more of it is waiting.
                    begun = _time.now() if queue else 0.0
                    try:
                        if type(task) is tuple:
                            self._execute(task)
                        else:
                            task()
                    except BaseException as error:
                        self._raised(error)
                    self.finished += 1
                    if begun:
                        self._mean += 0.125 * (min(_time.now() - begun, 1.0) - self._mean)
                    task = None  # an idle thread keeps no arguments, results or futures alive
                    continue
                idle.add(me)
                if queue and not listening_for:
                    continue
                if len(idle) > _KEPT and self._retire(me):
                    return
                try:
                    events = poll(listening_for or -1, 1)
                except InterruptedError:
                    continue
                except (OSError, ValueError):  # the epoll was closed: the pool is ending
                    return
                listening_for = 0.0
                if events:
                    ready = sources.get(events[0][0])
                    if ready is not None:
                        idle.discard(me)
                        try:
                            ready()
                        except BaseException as error:
                            report(_log, error, "reading failed")
        finally:
            idle.discard(me)
            self._leave(me)

    def _is_full(self, running: int) -> bool:
        """Say whether more threads run work than the width, or make room where these are blocked."""
        now = _time.now()
        if self.finished != self._full_finished:
            self._full_since, self._full_finished = now, self.finished
        elif now - self._full_since >= _BLOCKED_S:
            self._full_since = now
            self._width = running + self._width // 4
            return False
        return True

    def _retire(self, me: int) -> bool:
        with self._lock:
            if len(self.idle) <= _KEPT:
                return False
            self.idle.discard(me)
            self._width = max(_WIDTH, min(self._width, len(self.threads)))
            return True

    @staticmethod
    def _raised(error: BaseException) -> None:
        # The thread is for others, too: what ends a program ends no thread of ours.
        report(_log, error, "a task of the pool raised")

    def _run_internal(self, task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:
            self._raised(error)
        self.finished += 1

    # -- starvation ------------------------------------------------------------------------------

    def _starving(self) -> bool:
        """Bring in a thread if the oldest work of the queue has lain there too long. Runs on the clock's thread."""
        try:
            oldest = self.queue[0]
        except IndexError:
            self._oldest = None
            return False
        now = _time.now()
        # The clock's own delay tells whether the threads that run compete for the interpreter (then one more
        # makes everything slower) or are blocked (then one more is what is needed).
        self._crowded = self._starvation.late > _COMPETED_S
        done, self._seen = self.finished - self._seen, self.finished
        if oldest is not self._oldest:
            self._oldest = oldest
            self._since = self._asked = now
            self._seen_finished = self.finished
        elif now - self._since >= self._starvation_s and done < _FLOWING:
            if not self._crowded or now - self._asked >= _PATIENCE_S:
                self._asked = now
                self._width = max(self._width, len(self.threads) - len(self.idle) + 1)
                self.wake()
            if not self._can_grow():
                self._help(now)
                if now - self._since > _STUCK_S and self.finished == self._seen_finished:
                    self._refuse_all()
        return True

    def _can_grow(self) -> bool:
        """Say whether the pool can still bring in a thread."""
        return len(self.idle) > 1 or (len(self.threads) < self._max and not self._denied)

    def _help(self, now: float) -> None:
        """Have the queue's internal work done by a thread beyond the most, which runs no calls.

        Ends of peers, sends that were put off and callbacks are what the calls that hold all threads may be waiting for.
        """
        if self._helpers and now - self._helped < _HELPED_S:
            return
        if all(type(task) is tuple for task in list(self.queue)):
            return
        self._helpers += 1
        self._helped = now
        try:
            Daemon(self._help_out, "actorrpc-helper").start()
        except NO_THREAD:
            self._helpers -= 1

    def _help_out(self) -> None:
        me = threading.get_ident()
        with self._lock:
            self.threads[me] = threading.current_thread()
        try:
            while not self.stopping:
                task = self._take_internal()
                if task is None:
                    return
                self._helped = _time.now()
                self._run_internal(task)
        finally:
            self._helpers -= 1
            self._leave(me)

    def _take_internal(self) -> Any:
        for task in list(self.queue):
            if type(task) is not tuple:
                try:
                    self.queue.remove(task)
                except (ValueError, IndexError):
                    continue  # somebody else took it
                return task
        return None

    def _refuse_all(self) -> None:
        for _ in range(len(self.queue)):
            try:
                task = self.queue.popleft()
            except IndexError:
                return
            if type(task) is tuple:
                why = explain_threads() if self._denied else "it may have no more (ACTORRPC_MAX_THREADS)"
                self._refuse(task, f"all {len(self.threads)} threads are blocked, and {why}")
            else:
                self.queue.append(task)

    # -- the end ---------------------------------------------------------------------------------

    def close(self, timeout: float = 2.0) -> list[threading.Thread]:
        """End the threads; return those that are still in user code after ``timeout`` seconds.

        One that is about to end, and gets no processor, is not in user code.
        """
        with self._lock:
            self.stopping = True
        until = time.monotonic() + timeout  # threads end in real time, also where a test has another one
        while True:
            with self._lock:
                left = [t for t in self.threads.values() if t is not threading.current_thread()]
            if not left or time.monotonic() > until:
                break
            # Each write wakes one sleeper; those in user code end when they come back.
            for _ in left:
                os.eventfd_write(self._wake_fd, 1)
            left[0].join(0.02)
        with self._lock:
            leaving = [t for t in self._leaving if t is not threading.current_thread()]
        for each in leaving:
            # What a thread lets go of at its very end may be torch's (a process group that joins threads of its own): where
            # the interpreter ends meanwhile, that aborts the process.
            each.join(max(0.0, until - time.monotonic()))
        with self._lock:
            # Where threads are left in user code, the last of them closes what they all use.
            self._forsaken = True
            last = not self.threads
        if last:
            self._close_descriptors()
        else:
            self._wake_sleeper()
        self._settle()
        return [each for each in left if each.ident not in self.idle]

    def _leave(self, me: int) -> None:
        with self._lock:
            thread = self.threads.pop(me, None)
            self._leaving = [each for each in self._leaving if each.is_alive()]
            if thread is not None:
                self._leaving.append(thread)
            forsaken = self._forsaken
            last = forsaken and not self.threads
        if last:
            self._close_descriptors()
        if forsaken:
            self._wake_sleeper()  # nobody else does any more: one wakes the next
            self._settle()  # it may have read answers, and queued what they have completed

    def _wake_sleeper(self) -> None:
        with self._lock:
            # Under it, as the last to leave closes the descriptor: its number is somebody else's then.
            # A thread that was being started may have come after the last had left: it finds out by itself.
            if self.threads and self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _close_descriptors(self) -> None:
        self.epoll.close()
        with self._lock:
            fd, self._wake_fd = self._wake_fd, -1
        if fd >= 0:
            os.close(fd)

    def abandon(self) -> None:
        """Close the descriptors in a forked child, which has none of the threads."""
        self.stopping = True
        self.epoll.close()
        try:
            os.close(self._wake_fd)
        except OSError:
            pass
