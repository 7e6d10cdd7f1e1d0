"""The threads that run the sync methods of actors, and the order in which runners get a turn.

**Turns.** The interpreter runs one thread at a time. If a read brings calls for many actors and a thread is woken for each, all
of them wait for the GIL: each call costs several thread switches, and each waiting thread wakes two hundred times a second to
request the GIL. So :class:`ActorThreads` wakes few runners at a time (``_AT_ONCE``), and a runner that has run its calls wakes
the next. A runner in one of actorrpc's waits passes its turn on at once. A runner that blocks elsewhere is found within
milliseconds by ``_look()``, which the clock's thread calls, and its turn no longer counts. Each look that finds such runners
wakes up to twice as many runners as the look before. If calls are long on average, more runners may have a turn at the same time
(``_WIDE``), unless the clock's thread is late, which shows that threads are waiting for the GIL rather than for something else.

**Threads.** At most ``MAX_RUNNERS`` runners of a worker have an :class:`ActorThread` of their own, for their whole life. Runners
that are made while so many exist share threads: a shared :class:`ActorThread` serves the runners that have a turn, one after the
other. An actor with its own thread may use thread-local data, but every call costs a thread switch (1 000 actors of one worker in
turn: 13 000 calls/s if each has a thread; 40 000 if all but eight share threads).

An actor's thread sleeps on the connection of its last caller, and so reads the next call itself. If another thread reads that
connection, the actor's thread sleeps on a lock of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from actorrpc import _time
from actorrpc._limits import NO_THREAD
from actorrpc.agent.daemon_threads import Daemon
from actorrpc.agent.threads import follow_torch
from actorrpc.agent.timers import Tick
from actorrpc.futures import WAITING
from actorrpc.transport.stream import CLOSED

if TYPE_CHECKING:
    from actorrpc.actors.host.threads import Runner
    from actorrpc.agent.agent import Agent
    from actorrpc.transport.connection import Connection

__all__ = ["MAX_RUNNERS", "ActorThread", "ActorThreads"]

MAX_RUNNERS: Final = 128
_AT_ONCE: Final = 1  # how many runners may run calls at a time (see "Turns" above), if calls are short
_WIDE: Final = 32  # how many runners may run calls at a time, if calls are long
_STALLED_S: Final = 2e-3  # a turn of about this many seconds does not count against the limit any more
_SHORT_S: Final = 60e-6  # calls are long if they take longer than this on average
_COMPETED_S: Final = 300e-6  # a tick that is later than this had to wait for the GIL
_KEPT: Final = 8  # how many idle shared threads are kept; further idle threads end


class ActorThread:
    """A thread that serves runners. Implements connection.ReadWaiter.

    Args:
        runner: the runner that the thread serves first.
        own: the thread serves only this runner. Otherwise it is a shared thread, and ends if too many shared threads are idle.

    Attributes:
        caller: the connection of the last call, on which the thread sleeps.
        given: the runner that a shared thread serves next.
    """

    def __init__(self, threads: ActorThreads, runner: Runner, *, own: bool) -> None:
        self.ident = 0
        self.caller: Connection | None = None
        #: see connection.ReadWaiter
        self.polling: Connection | None = None
        self.awake = False
        self.given = None if own else runner
        self._own = runner if own else None
        self._threads = threads
        self._parked = _time.Lock()
        self._parked.acquire()

    def start(self) -> None:
        """Start the thread. If the system cannot start a thread, the calls that wait for this thread are refused."""
        runner = self._own or self.given
        assert runner is not None
        try:
            Daemon(self._run, f"actorrpc-actor-{runner.title}" if self._own else "actorrpc-actors").start()
        except NO_THREAD:
            self.given = None
            self._threads.on.pop(runner, None)
            runner.no_thread()
            self._threads.pass_on()

    def _run(self) -> None:
        self.ident = threading.get_ident()
        follow_torch()
        threads, own = self._threads, self._own
        while True:
            runner = own or self._next()
            if runner is None:
                if threads.wait(self):
                    continue
                break
            WAITING.runner = runner
            lives = runner.run_on(self)
            threads.on.pop(runner, None)
            if own is None:
                WAITING.runner = runner = None  # so that an idle thread keeps no actor alive
            elif not lives:
                break
            elif threads.ready:
                self._hand_over()
            else:
                self._sleep()
        WAITING.runner = None
        self.flush()
        if threads.ready:
            threads.pass_on()

    def _next(self) -> Runner | None:
        runner, self.given = self.given, None
        return runner or self._threads.next_shared()

    def flush(self) -> None:
        """Send the answers that are still buffered."""
        if self.caller is not None and self.caller.outbox:
            self.caller.flush()

    # -- sleeping ----------------------------------------------------------------------------------

    def wake(self) -> None:
        """End the thread's sleep; if it is not asleep, end its next sleep at once."""
        try:
            self._parked.release()
        except RuntimeError:
            pass
        self.awake = True
        conn = self.polling
        if conn is not None:
            conn.wake()

    def _sleep(self) -> None:
        """Wait for work on the connection of the last caller, from which the next call probably comes."""
        conn = self.caller
        if conn is not None:
            came = conn.reading(self, conn.answering)
            if conn.outbox:
                conn.flush(not came)
            if came is not None:
                if self.awake:  # wake() was called, and the caller of _sleep() checks for work next
                    self.awake = False
                    self._parked.acquire(False)
                return
            if conn.state is CLOSED:
                self.caller = None
            # Another thread reads the connection. Yield once, in case that thread is about to queue work.
            _time.pause(0)
            if self._threads.ready if self._own is None else self._own.queue.has_ready:
                return
        self._parked.acquire()
        self.awake = False

    def _hand_over(self) -> None:
        """Sleep while other runners have a turn: their threads send this thread's answers, and read messages."""
        conn = self.caller
        if conn is not None and conn.outbox:
            agent = self._threads.agent
            if conn not in agent.scheduler.corked:
                agent.scheduler.cork(conn)
        self._threads.pass_on()
        self._parked.acquire()
        self.awake = False


class ActorThreads:
    """All runners of this worker, the threads that they have, and the order of their turns. Thread-safe.

    ``_lock`` guards the tables of runners and of idle shared threads. It is a leaf, and re-entrant, because the garbage collector
    may run while it is held. Turns need no lock: each operation on ``ready`` and ``on`` is atomic. A thread that adds a runner to
    ``ready`` checks ``on`` afterwards, and a thread that removes its runner from ``on`` checks ``ready`` afterwards. Therefore at
    least one of them wakes the next runner. If both threads do, one runner too many runs for a moment.

    Attributes:
        ready: runners that have calls to run and were not woken yet, in order.
        on: the runners that have a turn, and since when; without runners that wait in actorrpc or have stalled.
    """

    def __init__(self, agent: Agent, most: int = MAX_RUNNERS) -> None:
        self.agent = agent
        self.ready: deque[Runner] = deque()
        self.on: dict[Runner, float] = {}
        # Mean duration of recent calls, in seconds; only measured while other runners are ready.
        self._mean = 0.0
        self._width = _AT_ONCE
        self._lock = _time.RLock()
        self._all: dict[Runner, None] = {}
        self._owners = 0  # runners that have their own thread
        self._most = most
        self._idle: dict[ActorThread, None] = {}
        self._reading: set[int] = set()  # ids of shared threads that sleep or read, and then check `ready`
        self._crowded = False
        self._burst = 1
        self._to_start: deque[Runner] = deque()
        self._closed = False
        self._tick = Tick(agent.clock, _STALLED_S, self._look)

    # -- the runners ------------------------------------------------------------------------------

    def add(self, runner: Runner) -> bool:
        """Add a runner; return whether it gets a thread of its own."""
        with self._lock:
            self._all[runner] = None
            own = self._owners < self._most
            self._owners += own
            return own

    def remove(self, runner: Runner) -> bool:
        """Record that a runner has ended; return False if that was recorded before."""
        with self._lock:
            if runner not in self._all:
                return False
            del self._all[runner]
            self._owners -= not runner.shared
        self.on.pop(runner, None)
        return True

    def close(self) -> None:
        """End the shared threads when they are idle, and wake all runners in ``ready``, because the clock will wake none later.

        A runner that is added to ``ready`` later is woken by the thread that adds it.
        """
        with self._lock:
            self._closed = True
            idle = list(self._idle)
        for thread in idle:
            thread.wake()
        self.pass_on()

    def start(self, runner: Runner) -> None:
        """Start a new runner. A pool thread starts the runners that have threads of their own, one after the other."""
        runner.shared = not self.add(runner)
        if runner.shared:
            runner.start()
            return
        runner.thread = ActorThread(self, runner, own=True)
        with self._lock:
            self._to_start.append(runner)
            first = len(self._to_start) == 1
        if first:
            self.agent.submit(self._start_all)

    def _start_all(self) -> None:
        while True:
            # The runner stays in the queue until it has started, so that other threads do not submit _start_all meanwhile.
            self._to_start[0].start()
            with self._lock:
                self._to_start.popleft()
                if not self._to_start:
                    return

    # -- turns --------------------------------------------------------------------------

    def call(self, runner: Runner) -> None:
        """Queue an idle runner for a turn, in which it checks its mailbox."""
        self.ready.append(runner)
        if runner.shared and threading.get_ident() in self._reading:
            return  # this is a shared thread that reads, and serves the runner next
        self.pass_on()

    def pass_on(self) -> None:
        """Give turns to ready runners, as far as the limit allows."""
        ready, on, width = self.ready, self.on, self._width
        while ready and (len(on) < width or self._closed):
            try:
                runner = ready.popleft()
            except IndexError:
                return
            self._wake(runner)
        if (ready or len(on) > _AT_ONCE) and not self._tick.active:
            self._tick.wake()

    def _wake(self, runner: Runner) -> None:
        self.on[runner] = _time.now()
        if runner not in self._all:  # it has ended, so its thread will not remove it from `on`
            self.on.pop(runner, None)
            return
        if not runner.shared:
            runner.thread.wake()
            return
        with self._lock:
            thread = self._idle.popitem()[0] if self._idle else None
            if thread is not None:
                thread.given = runner
        if thread is None:
            self.agent.submit(ActorThread(self, runner, own=False).start)
        else:
            thread.wake()

    def took(self, seconds: float) -> None:
        """Record the duration of a call, measured while other runners were ready, and set how many runners may have a turn."""
        # Bounded, so that a single call that was preempted by other processes makes little difference.
        self._mean += 0.125 * (min(seconds, 4 * _SHORT_S) - self._mean)
        self._width = _WIDE if self._mean > _SHORT_S and not self._crowded else _AT_ONCE

    def _look(self) -> bool:
        """Find runners whose turn has stalled, and wake others; return whether to look again. Runs on the clock's thread."""
        self._crowded = self._tick.late > _COMPETED_S
        ready, on = self.ready, self.on
        long_ago = _time.now() - 0.75 * _STALLED_S
        stalled = [runner for runner, since in on.copy().items() if since <= long_ago]
        for runner in stalled:
            on.pop(runner, None)
        if ready and stalled:
            for _ in range(self._burst):
                try:
                    self._wake(ready.popleft())
                except IndexError:
                    break
            # If the clock's thread is late, too, turns are long because threads compete for the GIL: do not wake more threads.
            self._burst = 1 if self._crowded else min(2 * self._burst, _WIDE)
        else:
            self._burst = 1
        self.pass_on()
        return bool(ready) or len(on) > _AT_ONCE

    # -- shared threads -------------------------------------------------------------------------

    def next_shared(self) -> Runner | None:
        """Return the next shared runner, with a turn; None if no turn is free. Wake earlier runners that have own threads."""
        ready, on = self.ready, self.on
        found: Runner | None = None
        while found is None and ready and len(on) < self._width:
            try:
                runner = ready.popleft()
            except IndexError:
                break
            if runner.shared:
                found = runner
                on[runner] = _time.now()
            else:
                self._wake(runner)
        if ready and not self._tick.active:
            self._tick.wake()
        return found

    def wait(self, thread: ActorThread) -> bool:
        """Make a shared thread sleep until there may be work; return False if it has to end."""
        with self._lock:
            if self._closed or len(self._idle) >= _KEPT:
                return False
            self._idle[thread] = None
        self._reading.add(thread.ident)
        try:
            thread._sleep()
        finally:
            self._reading.discard(thread.ident)
            with self._lock:
                self._idle.pop(thread, None)
        return True
