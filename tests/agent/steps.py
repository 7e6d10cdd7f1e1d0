"""Threads of which one runs at a time. At each step the running thread stops, and a random thread continues.

The tested code and its threads are real. The seed of the random generator determines the schedule, so that a seed that
found an error finds it again. :meth:`Steps.install` replaces the locks, pollers, sleeps and threads in ``actorrpc._time``,
from which the code gets all of them, by versions that take steps. If ``share`` is given, lines of some files are steps, too,
because the interpreter may switch threads there. Time is virtual and stands still unless a test moves it.
"""

from __future__ import annotations

import inspect
import math
import random
import select
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType
from typing import Any

import pytest

from actorrpc import _time
from actorrpc._stacks import top_frames

__all__ = ["Condition", "Epoll", "Event", "Lock", "Poll", "RLock", "Steps", "Task"]

_OFTEN = 0.05  # the share of lines that are steps half of the time


def _held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Task:
    """A thread, and the condition that it waits for."""

    name: str
    go: threading.Lock = field(default_factory=_held)
    ready: Callable[[], bool] | None = None
    due: float = math.inf
    where: object = ""
    rests_until: int = 0
    ident: int = 0
    error: BaseException | None = None
    finished: bool = False


class Steps:
    """Runs each task on its own thread, one task at a time.

    Args:
        dice: decides which task continues, and which tasks rest for a while.
        share: the probability, from 0 to 1, that a line of ``files`` is a step. For some randomly chosen lines it is 0.5.
    """

    def __init__(self, dice: random.Random, share: float = 0.0, files: frozenset[str] = frozenset()) -> None:
        self._dice = dice
        self._share = share
        self._files = files
        self.tasks: list[Task] = []
        self._back = _held()
        self._count = 0
        self._mine = threading.local()
        self._often: dict[tuple[CodeType, int], float] = {}
        self.now = 0.0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace time, locks, pollers and threads of the tested code."""
        for name, value in {
            "now": self._tell_time,
            "doze": self._doze,
            "sleep": self._pause,
            "pause": self._pause,
            "Lock": partial(Lock, self),
            "RLock": partial(RLock, self),
            "Condition": partial(Condition, self),
            "Event": partial(Event, self),
            "poll": partial(Poll, self),
            "epoll": partial(Epoll, self),
            "start": self.start,
        }.items():
            monkeypatch.setattr(_time, name, value)

    def _tell_time(self) -> float:
        self.now += 1e-6
        return self.now

    def _doze(self, lock: threading.Lock, until: float, idle: bool = False) -> bool:
        due = until if idle else min(until, self.now + _time.SLICE_S)
        self.step(lambda: not lock.locked(), due, "to tick" if idle else "to be woken")
        return lock.acquire(False)

    def _pause(self, seconds: float) -> None:
        self.step()

    def start(self, thread: threading.Thread) -> None:
        """Start a thread that runs, and is joined, in steps."""
        task, run = Task(thread.name), thread.run
        self.tasks.append(task)
        thread.run = lambda: self._run(task, run)  # type: ignore[method-assign]
        thread.join = lambda timeout=None: self.step(  # type: ignore[method-assign]
            lambda: task.finished, math.inf if timeout is None else self.now + timeout, thread.name
        )
        threading.Thread.start(thread)

    def spawn(self, run: Callable[[], object], name: str = "") -> Task:
        """Run ``run()`` on a new thread, in steps."""
        self.start(threading.Thread(target=run, name=name, daemon=True))
        return self.tasks[-1]

    def _run(self, task: Task, run: Callable[[], object]) -> None:
        self._mine.task = task
        task.ident = threading.get_ident()
        task.go.acquire()
        if self._files:
            sys.settrace(self._enter)
        try:
            run()
        except BaseException as error:
            task.error = error
        finally:
            sys.settrace(None)
        task.finished = True
        self._back.release()

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            place = frame.f_code, frame.f_lineno
            often = self._often.get(place)
            if often is None:
                often = self._often[place] = 0.5 if self._dice.random() < _OFTEN else self._share
            if self._dice.random() < often:
                self.step(rests=True)  # gives other threads time to reach a conflicting line
        return self._line

    def step(
        self,
        ready: Callable[[], bool] | None = None,
        due: float = math.inf,
        where: object = "",
        rests: bool = False,
    ) -> None:
        """Let other tasks run. This task continues when ``ready()`` is true or at the time ``due``; later if ``rests``."""
        task: Task | None = getattr(self._mine, "task", None)
        if task is None:
            if ready is not None and not ready():
                raise AssertionError(f"a thread that is not a task would wait here: {where}")
            return
        task.ready, task.due, task.where = ready, due, where
        if rests or not self._dice.randrange(8):
            # Most errors appear only if a thread is suspended for a while.
            task.rests_until = self._count + self._dice.choice((10, 100, 600))
        self._back.release()
        task.go.acquire()

    def advance(self) -> bool:
        """Let a random task make a step; return whether any task was able to."""
        self._count += 1
        able = [task for task in self.tasks if task.ready is None or task.ready() or task.due <= self.now]
        if not able:
            return False
        task = self._dice.choice([task for task in able if task.rests_until < self._count] or able)
        task.go.release()
        self._back.acquire()
        if task.finished:
            self.tasks.remove(task)
            if task.error is not None:
                raise task.error
        return True

    def run_out(self, until: float = math.inf) -> None:
        """Let tasks make steps, and move time when no task is able to, until no task can run before the time ``until``."""
        while True:
            for _ in range(20_000):
                if not self.advance():
                    break
            else:
                raise AssertionError("the tasks never come to rest\n" + self.where())
            if self.next_due == math.inf or self.next_due > until:
                return
            self.now = self.next_due

    @property
    def left(self) -> int:
        """The number of unfinished tasks."""
        return len(self.tasks)

    @property
    def next_due(self) -> float:
        """The earliest time at which a waiting task may continue."""
        return min((task.due for task in self.tasks), default=math.inf)

    def where(self) -> str:
        """Describe the position of each task."""
        stacks = top_frames()
        lines = [f"at {self.now:.6f}:"]
        for task in self.tasks:
            lines.append(f"-- {task.name} waits for {task.where or 'its turn'}, until {task.due:.6f}")
            for each in traceback.extract_stack(stacks.get(task.ident)):
                if "/threading.py" not in each.filename and each.filename != __file__:
                    lines.append(f"     {each.filename.rsplit('/', 1)[-1]}:{each.lineno} {each.line}")
        return "\n".join(lines)


class _Waitable:
    """An object on which tasks wait in steps; named after the line that created it."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        frame = inspect.currentframe()
        for _ in range(2):  # this method, and the initializer of the subclass
            frame = frame.f_back if frame is not None else None
        assert frame is not None
        self._name = f"the object created by {frame.f_code.co_qualname} in line {frame.f_lineno}"

    def __str__(self) -> str:
        return self._name


class Lock(_Waitable):
    """A lock that is taken in steps."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._lock = threading.Lock()
        self.release = self._lock.release
        self.locked = self._lock.locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Like ``threading.Lock``."""
        steps = self._steps
        due = steps.now + timeout if timeout >= 0 else math.inf
        steps.step()
        while not self._lock.acquire(False):
            if not blocking or steps.now >= due:
                return False
            steps.step(lambda: not self._lock.locked(), due, self)
        return True

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """A re-entrant lock that is taken in steps."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._owner = self._depth = 0
        self.release = self._release

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Like ``threading.Lock``."""
        me = threading.get_ident()
        if self._owner != me and not super().acquire(blocking, timeout):
            return False
        self._owner = me
        self._depth += 1
        return True

    def _release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            self._lock.release()


class Condition(_Waitable):
    """A condition on which tasks wait in steps. Its lock must have been acquired once only."""

    def __init__(self, steps: Steps, lock: Lock | None = None) -> None:
        super().__init__(steps)
        self._own = RLock(steps) if lock is None else lock
        self.acquire = self._own.acquire
        self.release = self._own.release
        self._waiters: list[list[bool]] = []

    def __enter__(self) -> None:
        self._own.acquire()

    def __exit__(self, *_: object) -> None:
        self._own.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Like ``threading.Condition``."""
        steps = self._steps
        told = [False]
        self._waiters.append(told)
        self.release()
        steps.step(lambda: told[0], math.inf if timeout is None else steps.now + max(timeout, 0.0), self)
        self.acquire()
        self._waiters = [each for each in self._waiters if each is not told]
        return told[0]

    def notify_all(self) -> None:
        """Like ``threading.Condition``."""
        for told in self._waiters:
            told[0] = True
        self._waiters = []


class Event(_Waitable):
    """An event on which tasks wait in steps."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        event = threading.Event()
        self.is_set, self.set, self.clear = event.is_set, event.set, event.clear

    def wait(self, timeout: float | None = None) -> bool:
        """Like ``threading.Event``."""
        steps = self._steps
        steps.step(self.is_set, math.inf if timeout is None else steps.now + timeout, self)
        return self.is_set()


class Poll(_Waitable):
    """A poll that waits in steps. ``reads``: it waits for incoming bytes, not for room in the kernel's send buffer."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._poll = select.poll()
        self.reads = False
        self.unregister = self._poll.unregister

    def register(self, fd: int, mask: int) -> None:
        """Like ``select.poll``."""
        self.reads = bool(mask & select.POLLIN)
        self._poll.register(fd, mask)

    def poll(self, wait_ms: float | None = None) -> list[tuple[int, int]]:
        """Like ``select.poll``."""
        steps = self._steps
        due = math.inf if wait_ms is None else steps.now + wait_ms * 1e-3
        steps.step(lambda: bool(self._poll.poll(0)), due, self)
        return self._poll.poll(0)


class Epoll(_Waitable):
    """An epoll that is armed and waits in steps."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._epoll = epoll = select.epoll()
        self._ready = select.poll()
        self._ready.register(epoll.fileno(), select.POLLIN)
        self.fileno = epoll.fileno
        self.close = epoll.close

    def register(self, fd: int, mask: int) -> None:
        """Like ``select.epoll``."""
        self._steps.step()
        self._epoll.register(fd, mask)

    def unregister(self, fd: int) -> None:
        """Like ``select.epoll``."""
        self._steps.step()
        self._epoll.unregister(fd)

    def modify(self, fd: int, mask: int) -> None:
        """Like ``select.epoll``."""
        self._steps.step()
        self._epoll.modify(fd, mask)
        self._steps.step()

    def poll(self, timeout: float, most: int) -> list[tuple[int, int]]:
        """Like ``select.epoll``."""
        steps = self._steps
        due = math.inf if timeout < 0 else steps.now + timeout
        while True:
            steps.step(lambda: self._epoll.closed or bool(self._ready.poll(0)), due, self)
            found = self._epoll.poll(0, most)
            if found or steps.now >= due:
                return found

    def mask(self, fd: int) -> int:
        """Return the events for which a descriptor is armed."""
        with open(f"/proc/self/fdinfo/{self._epoll.fileno()}") as lines:
            for line in lines:
                parts = line.split()
                if parts[0] == "tfd:" and int(parts[1]) == fd:
                    return int(parts[3], 16)
        return 0
