"""The threads that an actor's runners use, and which of those that have something to do goes on.

**Whose turn it is.** The interpreter runs one thread at a time. Where a read brings calls for many actors, waking a thread for
each has them all wait for the interpreter: each call then costs several switches of threads, and each of those that wait wakes
two hundred times a second to look. So :class:`ActorThreads` wakes few at a time (``_AT_ONCE``), and a runner that has done what
it had wakes the next. One that waits in one of our waits passes its turn on at once. One that blocks elsewhere is noticed by a
tick, within milliseconds, and from then on does not count; each tick that finds one has up to twice as many woken as the one
before.
Where calls are long on average, more of them run at a time (``_WIDE``), unless the clock's thread is late, which is how it shows
that threads wait for the interpreter rather than for something else.

**Whose thread it is.** The first ``MAX_RUNNERS`` runners of a worker have a thread each, for all of their lives. Those beyond
share threads: a runner that has something to do is lent one (:class:`SharedThread`), which goes from one to the next. A thread
of its own serves an actor whose code keeps something by thread; but with it every call costs a switch of threads (1 000 actors
of one worker in turn: 13 000 calls/s, where each has a thread; 40 000, where all but eight share).

Both sleep (:meth:`Carrier._sleep`) on the connection of their last caller, and so read the next call themselves; where
somebody else reads that, on a lock of their own.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from actorrpc import _time
from actorrpc._limits import NO_THREAD
from actorrpc.agent.daemon_threads import Daemon
from actorrpc.agent.threads import follow_torch
from actorrpc.agent.timers import Tick
from actorrpc.futures import WAITING
from actorrpc.transport.connection_state import CLOSED

if TYPE_CHECKING:
    from actorrpc.agent.agent import Agent
    from actorrpc.transport.connection import Connection

__all__ = ["MAX_RUNNERS", "ActorThreads", "Carrier", "Runner", "SharedThread"]

MAX_RUNNERS: Final = 128
_AT_ONCE: Final = 1  # runners that are woken to run at a time, where their calls are short
_WIDE: Final = 32  # and where they are long
_STALLED_S: Final = 2e-3  # a turn that takes longer does not count any more
_SHORT_S: Final = 60e-6  # calls that take longer on average are long
_COMPETED_S: Final = 300e-6  # a tick that is later than this had to wait for the interpreter
_KEPT: Final = 8  # shared threads beyond this many end when they have nothing to do


class Runner(Protocol):
    """Runs the calls of one queue of an actor: an ActorThread.

    Attributes:
        shared: it is lent a thread while it has something to do, and has none of its own.
    """

    shared: bool

    def start(self) -> None:
        """Take part from now on. Where the system has no thread, the calls that wait for one are refused."""

    def rouse(self) -> None:
        """Wake the runner's own thread."""

    def run_on(self, carrier: SharedThread) -> None:
        """Run the calls that wait on a thread that is lent for that."""

    def understaffed(self) -> None:
        """End, as the system has no thread for it."""


class Carrier:
    """A thread that runs methods, as far as its sleep goes. See connection.ReadWaiter."""

    def __init__(self, threads: ActorThreads) -> None:
        self.ident = 0
        self.caller: Connection | None = None
        #: see connection.ReadWaiter
        self.polling: Connection | None = None
        self.awake = False
        self._threads = threads
        self._parked = _time.Lock()
        self._parked.acquire()

    def rouse(self) -> None:
        """End the thread's sleep, or its next one."""
        try:
            self._parked.release()
        except RuntimeError:
            pass
        self.awake = True
        conn = self.polling
        if conn is not None:
            conn.wake()

    def _forget_wakes(self) -> None:
        """Drop the calls of :meth:`rouse` so far: the thread is awake, and looks for work next."""
        self.awake = False
        self._parked.acquire(False)

    def _has_come(self) -> bool:
        """Say whether there is something to do that nobody has woken it for."""
        return bool(self._threads.ready)

    def _sleep(self) -> None:
        """Wait for work, where it is most likely to come from: the connection of the last caller."""
        conn = self.caller
        if conn is not None:
            came = conn.reading(self, conn.answering)
            if conn.outbox:
                conn.flush(not came)
            if came is not None:
                if self.awake:
                    self._forget_wakes()
                return
            if conn.state is CLOSED:
                self.caller = None
            # Somebody else is reading it: what that thread brings in is worth one turn of the interpreter.
            _time.pause(0)
            if self._has_come():
                return
        self._parked.acquire()
        self.awake = False


class ActorThreads:
    """All runners of this worker, which of them have threads of their own, and whose turn it is. Thread-safe.

    ``_lock`` guards which runners there are, and which shared threads have nothing to do; it is a leaf, and re-entrant, as the
    collector may run there. What concerns the turns takes no lock: each step on ``ready`` and ``on`` is atomic. Who puts a
    runner into ``ready`` looks at ``on`` after that, and who takes himself out of ``on`` looks at ``ready`` after that: so
    either wakes the next one. Both may, and one more than was meant runs for a moment.

    Attributes:
        ready: runners that have something to do, and have not been woken, in order.
        on: those that have been, and when; but for those that wait, or have stalled.
    """

    def __init__(self, agent: Agent, most: int = MAX_RUNNERS) -> None:
        self.agent = agent
        self.ready: deque[Runner] = deque()
        self.on: dict[Runner, float] = {}
        self._mean = 0.0  # how long a call takes, of late, in seconds; measured only where others are waiting
        self._width = _AT_ONCE
        self._lock = _time.RLock()
        self._all: dict[Runner, None] = {}
        self._owners = 0  # that have threads of their own
        self._most = most
        self._idle: dict[SharedThread, None] = {}
        self._reading: set[int] = (
            set()
        )  # shared threads that sleep, or read: they look at ``ready`` afterwards
        self._crowded = False
        self._burst = 1
        self._to_start: deque[Runner] = deque()
        self._closed = False
        self._tick = Tick(agent.clock, _STALLED_S, self._look)

    # -- who there is ------------------------------------------------------------------------------

    def add(self, runner: Runner) -> bool:
        """Record a new runner; say whether it gets a thread of its own."""
        with self._lock:
            self._all[runner] = None
            own = self._owners < self._most
            self._owners += own
            return own

    def remove(self, runner: Runner) -> bool:
        """Record that a runner has ended; False if that is known."""
        with self._lock:
            if runner not in self._all:
                return False
            del self._all[runner]
            self._owners -= not runner.shared
        self.on.pop(runner, None)
        return True

    def close(self) -> None:
        """End the shared threads as soon as they have nothing to do; all turns come at once, as no tick brings them any more.

        A runner that has been called is woken here, or, where it comes into ``ready`` behind this, by the thread that has put
        it there, which sees that it is closed.
        """
        with self._lock:
            self._closed = True
            idle = list(self._idle)
        for carrier in idle:
            carrier.rouse()
        self.pass_on()

    def start(self, runner: Runner) -> None:
        """Have a new runner started: on a pool thread, one after the other, where it is to have a thread of its own."""
        runner.shared = not self.add(runner)
        if runner.shared:
            runner.start()
            return
        with self._lock:
            self._to_start.append(runner)
            first = len(self._to_start) == 1
        if first:
            self.agent.submit(self._start_all)

    def _start_all(self) -> None:
        while True:
            # The one that is being started stays in until that is done: who comes meanwhile submits nothing.
            self._to_start[0].start()
            with self._lock:
                self._to_start.popleft()
                if not self._to_start:
                    return

    # -- whose turn it is --------------------------------------------------------------------------

    def call(self, runner: Runner) -> None:
        """Have a runner that has been idle look for work, in its turn."""
        self.ready.append(runner)
        if runner.shared and threading.get_ident() in self._reading:
            return  # this thread runs it itself in a moment
        self.pass_on()

    def pass_on(self) -> None:
        """Wake those whose turn it is."""
        ready, on, width = self.ready, self.on, self._width
        while ready and (len(on) < width or self._closed):
            try:
                runner = ready.popleft()
            except IndexError:
                return
            self._wake(runner)
        if (ready or len(on) > _AT_ONCE) and not self._tick.active:
            self._tick.poke()

    def _wake(self, runner: Runner) -> None:
        self.on[runner] = _time.now()
        if runner not in self._all:  # it has ended, and takes itself out no more, unless it does so just now
            self.on.pop(runner, None)
            return
        if not runner.shared:
            runner.rouse()
            return
        with self._lock:
            carrier = self._idle.popitem()[0] if self._idle else None
            if carrier is not None:
                carrier.given = runner
        if carrier is None:
            self.agent.submit(SharedThread(self, runner).start)
        else:
            carrier.rouse()

    def took(self, seconds: float) -> None:
        """Record how long a call took, where others were waiting."""
        # One that was interrupted by other processes says nothing: it takes several to make a difference.
        self._mean += 0.125 * (min(seconds, 4 * _SHORT_S) - self._mean)
        self._width = _WIDE if self._mean > _SHORT_S and not self._crowded else _AT_ONCE

    def _look(self) -> bool:
        """See who has stalled. Runs on the clock's thread."""
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
            # Where the clock is late as well, turns take long because of others, and one more makes that worse.
            self._burst = 1 if self._crowded else min(2 * self._burst, _WIDE)
        else:
            self._burst = 1
        self.pass_on()
        return bool(ready) or len(on) > _AT_ONCE

    # -- of shared threads -------------------------------------------------------------------------

    def next_shared(self) -> Runner | None:
        """Give a shared thread a runner whose turn it is; wake those with threads of their own that come before it."""
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
            self._tick.poke()
        return found

    def wait(self, carrier: SharedThread) -> bool:
        """Have a shared thread sleep until there may be something to do; False if it is to end."""
        with self._lock:
            if self._closed or len(self._idle) >= _KEPT:
                return False
            self._idle[carrier] = None
        self._reading.add(carrier.ident)
        try:
            carrier._sleep()
        finally:
            self._reading.discard(carrier.ident)
            with self._lock:
                self._idle.pop(carrier, None)
        return True


class SharedThread(Carrier):
    """A thread that is lent to runners, one after the other. Ends when there are too many that have nothing to do."""

    def __init__(self, threads: ActorThreads, runner: Runner) -> None:
        super().__init__(threads)
        self.given: Runner | None = runner

    def start(self) -> None:
        """Start the thread. Where the system has none, the calls hear of it that wait for one."""
        try:
            Daemon(self._run, "actorrpc-actors").start()
        except NO_THREAD:
            runner, self.given = self.given, None
            if runner is not None:
                self._threads.on.pop(runner, None)
                runner.understaffed()
                self._threads.pass_on()

    def _run(self) -> None:
        self.ident = threading.get_ident()
        follow_torch()
        threads = self._threads
        while True:
            runner, self.given = self.given, None
            if runner is None:
                runner = threads.next_shared()
            if runner is None:
                if not threads.wait(self):
                    break
                continue
            runner.run_on(self)
            WAITING.runner = None
            threads.on.pop(runner, None)
            runner = None  # an idle thread keeps no actor alive
        if self.caller is not None and self.caller.outbox:
            self.caller.flush()
