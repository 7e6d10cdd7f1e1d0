"""Threads of which one runs at a time, and hands over at steps: which one goes on is drawn by lot.

What is tried out is the real code on real threads; the orders that it runs in are those of the dice, so that a seed that
found an error finds it again. Steps are taken by what is put in the place of locks, pollers and sleeps, and, where a share
is given, before lines of some files: there the interpreter may change threads as well. Time stands still unless it is moved.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

__all__ = ["Condition", "Lock", "Steps", "Task"]

_OFTEN = 0.05  # how many of the lines are steps often


def _held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Task:
    """One thread, and what it waits for."""

    name: str
    go: threading.Lock = field(default_factory=_held)
    ready: Callable[[], bool] | None = None
    due: float = math.inf
    where: str = ""
    rests_until: int = 0
    ident: int = 0
    error: BaseException | None = None
    over: bool = False


class Steps:
    """Runs tasks on threads of their own, one at a time.

    Args:
        dice: draws which one goes on, and which ones rest for a while.
        share: how many of the lines of ``files`` are steps, from 0 to 1. Some lines, drawn once, are every other time.
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

    def spawn(self, run: Callable[[], object], name: str = "") -> Task:
        """Have ``run()`` run on a thread of its own, in steps."""
        task = Task(name)
        self.tasks.append(task)
        threading.Thread(target=self._run, args=(task, run), daemon=True).start()
        return task

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
        task.over = True
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
                self.step(rests=True)  # for as long as it takes others to come to where it hurts
        return self._line

    def step(
        self,
        ready: Callable[[], bool] | None = None,
        due: float = math.inf,
        where: str = "",
        rests: bool = False,
    ) -> None:
        """Let others go on first; not to be chosen before ``ready()``, or the time ``due``, and rather later if it rests."""
        task: Task | None = getattr(self._mine, "task", None)
        if task is None:
            if ready is not None and not ready():
                raise AssertionError(f"what is not a task would wait here: {where}")
            return
        task.ready, task.due, task.where = ready, due, where
        if rests or not self._dice.randrange(8):
            # A thread that is not let run for a while is what most errors need.
            task.rests_until = self._count + self._dice.choice((10, 100, 600))
        self._back.release()
        task.go.acquire()

    def go_on(self) -> bool:
        """Have one task make a step; say whether there was any that could."""
        self._count += 1
        able = [task for task in self.tasks if task.ready is None or task.ready() or task.due <= self.now]
        if not able:
            return False
        task = self._dice.choice([task for task in able if task.rests_until < self._count] or able)
        task.go.release()
        self._back.acquire()
        if task.over:
            self.tasks.remove(task)
            if task.error is not None:
                raise task.error
        return True

    @property
    def left(self) -> int:
        """How many tasks are not over."""
        return len(self.tasks)

    @property
    def next_due(self) -> float:
        """When the first of the tasks that wait has waited long enough."""
        return min((task.due for task in self.tasks), default=math.inf)

    def where(self) -> str:
        """Say where each task stands."""
        stacks = sys._current_frames()
        lines = [f"at {self.now:.6f}:"]
        for task in self.tasks:
            lines.append(f"-- {task.name} waits for {task.where or 'its turn'}, until {task.due:.6f}")
            for each in traceback.extract_stack(stacks.get(task.ident)):
                if "/threading.py" not in each.filename and each.filename != __file__:
                    lines.append(f"     {each.filename.rsplit('/', 1)[-1]}:{each.lineno} {each.line}")
        return "\n".join(lines)


class Lock:
    """A lock that is taken in steps."""

    def __init__(self, steps: Steps, name: str = "a lock") -> None:
        self._steps = steps
        self._name = name
        self._lock = threading.Lock()
        self.release = self._lock.release
        self.locked = self._lock.locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Do as the lock of ``threading`` does."""
        steps = self._steps
        due = steps.now + timeout if timeout >= 0 else math.inf
        steps.step()
        while not self._lock.acquire(False):
            if not blocking or steps.now >= due:
                return False
            steps.step(lambda: not self._lock.locked(), due, self._name)
        return True

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition(Lock):
    """A condition that is waited for in steps; not re-entrant."""

    def __init__(self, steps: Steps, name: str = "a condition") -> None:
        super().__init__(steps, name)
        self._waiters: list[list[bool]] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Do as the condition of ``threading`` does."""
        steps = self._steps
        told = [False]
        self._waiters.append(told)
        self.release()
        steps.step(
            lambda: told[0], math.inf if timeout is None else steps.now + max(timeout, 0.0), self._name
        )
        self.acquire()
        self._waiters = [each for each in self._waiters if each is not told]
        return told[0]

    def notify_all(self) -> None:
        """Do as the condition of ``threading`` does."""
        for told in self._waiters:
            told[0] = True
        self._waiters = []
