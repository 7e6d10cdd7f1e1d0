"""Virtual time: it stands still until a test advances it, and a thread wakes as soon as the time reaches its deadline.

    with testing.VirtualTime() as clock:
        ...
        clock.advance(60.0)                  # everything that is due within a minute happens now, in order

While it is in force, all of actorrpc in this process uses virtual time (:mod:`actorrpc._time`). The time jumps from one deadline
to the next, and only when every other thread of the process waits. So a test gives the same result on a busy machine. Deadlines
within the next tenth of a second are reached automatically, because batches of messages and starting threads have such
deadlines. Later deadlines are reached by :meth:`VirtualTime.advance`; with ``autojump``, also when all threads wait.

``time.sleep``, ``asyncio``, time-outs of other libraries and other processes still use the real time. A thread that sleeps in
real time counts as waiting.

``_lock`` guards the time and the table of waiting threads, and is a leaf. ``_driving`` is held by the thread that advances the
time, and is acquired before ``_lock``.
"""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

from actorrpc import _stacks, _time
from actorrpc.validation import number

__all__ = ["VirtualTime"]

_FORWARD = "a number of seconds of at least 0, finite: time never runs backwards"

# Seconds of virtual time, except where a comment says "real".

_BY_ITSELF_S: Final = 0.1  # deadlines within this time are reached automatically
_SLICE_S: Final = 0.02  # real: a thread that waits for a socket reads the time at this interval
_STALE_S: Final = 0.05  # real: a thread whose slice ended longer ago no longer counts as waiting
_NAP_S: Final = (
    0.0004  # real: if other threads use no processor time during this pause, they count as waiting
)
_REST_S: Final = 0.004  # real: longest pause between two checks whether threads run
_SOON_S: Final = 0.0002  # real: shortest such pause
_RAN_S: Final = 5e-6  # processor time: if other threads use more during a check, a thread runs
_NEVER: Final = math.inf


@dataclass(slots=True)
class _Wait:
    """A waiting thread.

    Attributes:
        due: the virtual time at which its wait ends.
        lock: the lock on which it waits; None if it waits in slices of real time.
        looks_by: the real time until which the wait counts, unless the thread begins another slice; infinity for a lock.
        idle: whether the thread is a clock thread, whose wait does not count for autojump.
    """

    due: float
    lock: threading.Lock | None
    looks_by: float
    idle: bool


#: The virtual time that is in force in this process.
_in_force: VirtualTime | None = None


class VirtualTime:
    """A clock of this process that a test controls. Thread-safe; used as a context manager.

    Args:
        autojump: advance time automatically to the next deadline when all threads wait, at least one other than clock threads.
        patience: how many real seconds :meth:`advance` waits for threads that run.

    Raises:
        ConfigError: ``patience`` is not a positive number.
    """

    def __init__(self, *, autojump: bool = False, patience: float = 30.0) -> None:
        self.autojump = bool(autojump)
        self._patience = number("patience", patience, unit="seconds")
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._driving = threading.Lock()
        self._waits: dict[Any, _Wait] = {}
        self._now = 0.0
        self._began = 0.0
        self._flows_from: float | None = None
        self._state = "new"  # -> in force -> over
        self._thread: threading.Thread | None = None
        self._before: tuple[Any, ...] = ()

    # -- in force --------------------------------------------------------------------------------------

    def start(self) -> VirtualTime:
        """Bring it into force in this process.

        Raises:
            RuntimeError: this object was started before, or another virtual time is in force.
        """
        if self._state != "new":
            raise RuntimeError("a VirtualTime can be started once")
        if _time.now is not time.monotonic:
            raise RuntimeError("another virtual clock is in force in this process, which can have only one")
        # Begin at the real time, so that no time that was recorded before lies in the future.
        self._began = self._now = time.monotonic()
        self._before = (_time.now, _time.doze, _time.patience, _time.sleep, _time.near_s)
        _time.now, _time.doze, _time.patience = self.now, self._doze, self._slice
        _time.sleep, _time.near_s = self.sleep, _NEVER
        self._state = "in force"
        global _in_force
        _in_force = self
        self._thread = threading.Thread(target=self._run, name="virtual-time", daemon=True)
        self._thread.start()
        return self

    def flow(self) -> None:
        """Let time pass as the real time does from now on. Used at shutdown, which may wait for threads in user code."""
        with self._lock:
            if not self._stands:
                return
            self._flows_from = time.monotonic()
            for wait in self._waits.values():
                if wait.idle:
                    _wake(wait)
            self._changed.notify_all()

    def close(self) -> None:
        """Restore the real time. Idempotent."""
        self.flow()
        with self._lock:
            if self._state != "in force":
                return
            self._state = "over"
            self._changed.notify_all()
        self._give_back()
        if self._thread is not None:
            self._thread.join()

    def _give_back(self) -> None:
        global _in_force
        _in_force = None
        _time.now, _time.doze, _time.patience, _time.sleep, _time.near_s = self._before

    def _abandon(self) -> None:
        """Restore the real time in a forked child, which has no thread that could advance the virtual time."""
        self._lock = threading.Lock()  # another thread of the parent may have held these locks
        self._changed = threading.Condition(self._lock)
        self._driving = threading.Lock()
        self._waits.clear()
        self._flows_from = time.monotonic()
        self._state, self._thread = "over", None
        self._give_back()

    def __enter__(self) -> VirtualTime:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the time --------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the time in seconds; only differences between two times mean anything."""
        since = self._flows_from
        return self._now if since is None else self._now + (time.monotonic() - since)

    @property
    def elapsed(self) -> float:
        """How many seconds of virtual time have passed since the start."""
        return self.now() - self._began

    def advance(self, seconds: float) -> None:
        """Advance the time. Everything that is due happens in order; each step ends when all other threads wait.

        Deadlines in the next tenth of a second are then reached automatically, so the time may advance a little more.

        Raises:
            ConfigError: ``seconds`` is negative or not finite.
            RuntimeError: the virtual time is not in force, or threads ran for longer than ``patience``; the message names them.
        """
        length = number("seconds", seconds, right=_FORWARD)
        self._check()
        with self._driving:
            target = self._now + length
            self._let_pass(length)
            with self._lock:
                self._jump(target)
            # Also reach the deadlines that are due automatically after that.
            self._let_pass(_BY_ITSELF_S)

    def _let_pass(self, seconds: float) -> None:
        """Reach all deadlines within ``seconds``; the time stops at the last of them. Under ``_driving``."""
        target = self._now + seconds
        while True:
            self._settle()
            with self._lock:
                due = self._next()
                if due > target:
                    return
                self._jump(due)

    def sleep(self, seconds: float) -> None:
        """Sleep until so much virtual time has passed."""
        due = self.now() + seconds
        lock = threading.Lock()
        lock.acquire()
        while self.now() < due:
            if self._flows_from is not None:
                time.sleep(min(0.01, max(0.0, due - self.now())))
            else:
                self._doze(lock, due)

    # -- waiting threads (see _time.py) -----------------------------------------------------------------

    def _doze(self, lock: threading.Lock, until: float, idle: bool = False) -> bool:
        if math.isnan(until):
            raise ValueError("a wait cannot take NaN seconds")
        with self._lock:
            flows = self._flows_from is not None
            if not flows:
                if until <= self._now:
                    return lock.acquire(False)
                self._enter(lock, _Wait(until, lock, _NEVER, idle))
        if flows:
            left = min(until - self.now(), threading.TIMEOUT_MAX if idle else _time.SLICE_S)
            return lock.acquire(timeout=max(left, 0.0))
        try:
            return lock.acquire() if idle else lock.acquire(timeout=_time.SLICE_S)
        finally:
            with self._lock:
                self._waits.pop(lock, None)

    def _slice(self, seconds: float) -> float:
        if math.isnan(seconds):
            raise ValueError("a wait cannot take NaN seconds")
        if seconds > 0.0:
            with self._lock:
                looks_by = time.monotonic() + _SLICE_S + _STALE_S
                me = threading.get_ident()
                self._enter(me, _Wait(self.now() + seconds, None, looks_by, False))
        return min(seconds, _SLICE_S)

    def _enter(self, key: Any, wait: _Wait) -> None:
        """Add a waiting thread to the table. Under the lock."""
        self._waits[key] = wait
        if wait.due - self._now <= _BY_ITSELF_S or (self.autojump and not wait.idle):
            self._changed.notify_all()

    def _next(self) -> float:
        """Return the next deadline. Under the lock."""
        real = time.monotonic()
        for key in [key for key, wait in self._waits.items() if wait.looks_by < real]:
            del self._waits[key]
        return min((wait.due for wait in self._waits.values()), default=_NEVER)

    def _jump(self, to: float) -> None:
        """Set the time to ``to``, and wake the threads whose deadlines are reached. Under the lock."""
        self._now = max(self._now, to)
        for wait in self._waits.values():
            if wait.due <= self._now:
                _wake(wait)

    # -- whether any thread runs --------------------------------------------------------------------------

    def _settle(self) -> None:
        until = time.monotonic() + self._patience
        rest = _SOON_S
        while not self._is_quiet():
            self._check()
            if time.monotonic() > until:
                raise RuntimeError(
                    f"virtual time cannot pass: after {self._patience} s, threads still run: {_running()}"
                )
            time.sleep(rest)
            rest = min(2.0 * rest, _REST_S)

    def _is_quiet(self) -> bool:
        """Return whether every other thread of this process waits, and no deadline of such a wait has been reached."""
        everyone, mine = time.process_time(), time.thread_time()
        time.sleep(_NAP_S)
        if (time.process_time() - everyone) - (time.thread_time() - mine) > _RAN_S:
            return False
        if _runnable():  # a thread is runnable, but has no processor yet
            return False
        with self._lock:
            self._next()
            return all(wait.due > self._now for wait in self._waits.values())

    @property
    def _stands(self) -> bool:
        """Whether this time is in force, and only :meth:`advance` and the thread of :meth:`_run` change it."""
        return self._state == "in force" and self._flows_from is None

    def _check(self) -> None:
        if not self._stands:
            raise RuntimeError("this VirtualTime is not in force: its block has ended, or has not begun")

    # -- automatic advance ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Advance the time automatically; runs in its own thread."""
        rest = _SOON_S
        while True:
            with self._lock:
                self._changed.wait_for(lambda: not self._stands or self._due_by_itself() < _NEVER)
                if not self._stands:
                    return
            with self._driving:
                if quiet := self._is_quiet():
                    with self._lock:
                        due = self._due_by_itself()
                        if self._stands and due < _NEVER:
                            self._jump(due)
            if quiet:
                rest = _SOON_S
            else:
                time.sleep(rest)
                rest = min(2.0 * rest, _REST_S)

    def _due_by_itself(self) -> float:
        """Return the next deadline if it is reached automatically, else infinity. Under the lock."""
        due = self._next()
        jumps = self.autojump and not all(wait.idle for wait in self._waits.values())
        return due if jumps or due - self._now <= _BY_ITSELF_S else _NEVER


def _after_fork() -> None:
    if _in_force is not None:
        _in_force._abandon()


os.register_at_fork(after_in_child=_after_fork)


def _wake(wait: _Wait) -> None:
    if wait.lock is not None:
        try:
            wait.lock.release()
        except RuntimeError:  # the thread is awake
            pass


def _runnable() -> list[int]:
    """Return the ids of this process's other threads that run, are runnable, or are in an uninterruptible wait."""
    found = []
    for name in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{name}/stat", "rb", buffering=0) as file:
                state = file.read(256).rpartition(b")")[2].split()[0]
        except (OSError, IndexError):  # the thread has ended
            continue
        if state in (b"R", b"D") and int(name) != threading.get_native_id():
            found.append(int(name))
    return found


def _running() -> str:
    """Name the threads that run, and the functions in which they are."""
    ids = _runnable()
    frames = _stacks.top_frames()
    shown = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread.native_id in ids and frame is not None:
            shown.append(
                f"{thread.name} in {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
            )
    return "; ".join(shown) or "some, now and then"
