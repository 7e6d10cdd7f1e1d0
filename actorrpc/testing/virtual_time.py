"""Virtual time: it stands still until a test lets it pass, and a thread that waits for it wakes up at once.

    with testing.VirtualTime() as clock:
        ...
        clock.advance(60.0)                  # everything that is due within a minute happens now, in order

While it is in force, all of actorrpc in this process goes by it (:mod:`actorrpc._time`). It passes from one thing that is
due to the next, and only when nothing moves: every thread of the process waits. So a test gives the same result on a busy
machine. What is due within a tenth of a second comes due by itself (messages that are gathered for a moment, threads that
are brought in); the rest when :meth:`VirtualTime.advance` is called, or, with ``autojump``, as soon as nothing else can
happen while somebody waits.

What does not go by it: ``time.sleep``, ``asyncio`` and the time-outs of other libraries, and other processes. A thread that
sleeps in real time counts as one that waits.

``_lock`` guards the time and the table of those who wait, and is a leaf. ``_driving`` is held by the thread that lets time pass,
and taken before it.
"""

from __future__ import annotations

import logging
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

_BY_ITSELF_S: Final = 0.1
_SLICE_S: Final = 0.02  # real: those who wait for a socket look at the time so often
_STALE_S: Final = 0.05  # real: a thread that has not looked again for so much longer waits no more
_NAP_S: Final = 0.0004  # real: nothing moves where nothing has moved for so long
_REST_S: Final = 0.004  # real: at most, between two looks where something moves
_SOON_S: Final = 0.0002  # real: at least
_RAN_S: Final = 5e-6  # of processor time: less is what looking itself costs
_STUCK_S: Final = 5.0  # real: after so long, somebody is told that time stands still
_NEVER: Final = math.inf

_log = logging.getLogger("actorrpc.testing")


@dataclass(slots=True)
class _Wait:
    """One that waits: until when; on which lock, or in slices that end at ``looks_by`` (real); whether it is idle; who."""

    due: float
    lock: threading.Lock | None
    looks_by: float
    idle: bool
    thread: int


#: The one that is in force.
_in_force: VirtualTime | None = None


class VirtualTime:
    """The time of this process, in a test's hands. Thread-safe; used as a context manager.

    Args:
        autojump: let time pass by itself when nothing else can happen and somebody waits.
        patience: how many real seconds :meth:`advance` and :meth:`settle` wait for threads that run.

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
        self._warned = False

    # -- in force --------------------------------------------------------------------------------------

    def start(self) -> VirtualTime:
        """Bring it into force in this process.

        Raises:
            RuntimeError: it was started before, or another virtual time is in force.
        """
        if self._state != "new":
            raise RuntimeError("a VirtualTime can be started once")
        if _time.now is not time.monotonic:
            raise RuntimeError("another virtual clock is in force in this process: only one can be")
        # From the real time on, so that nothing that was noted before lies in the future.
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
        """Let it pass as the real time does, from now on: for ends, which wait for threads that may be in user code."""
        with self._lock:
            if self._state != "in force" or self._flows_from is not None:
                return
            self._flows_from = time.monotonic()
            for wait in self._waits.values():
                if wait.idle:
                    _ring(wait)
            self._changed.notify_all()

    def close(self) -> None:
        """Give the real time back. Idempotent."""
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
        """Give the real time back in a forked child, where nothing of it lives that could let time pass."""
        self._lock = threading.Lock()  # another thread of the parent's may have held these
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
        """Return the time in seconds; only differences mean anything."""
        since = self._flows_from
        return self._now if since is None else self._now + (time.monotonic() - since)

    @property
    def elapsed(self) -> float:
        """How many seconds of virtual time have passed since the start."""
        return self.now() - self._began

    def advance(self, seconds: float) -> None:
        """Let so much time pass: what is due happens in order, each when nothing else moves any more.

        Raises:
            ConfigError: ``seconds`` is negative or not finite: time never runs backwards.
            RuntimeError: it is not in force, or threads went on running for longer than ``patience``; they are named.
        """
        length = number("seconds", seconds, right=_FORWARD)
        self._check()
        with self._driving:
            target = self._now + length
            self._let_pass(length)
            with self._lock:
                self._jump(target)
            # What follows within moments belongs to it.
            self._let_pass(_BY_ITSELF_S)

    def settle(self) -> None:
        """Wait until nothing moves any more; no time passes but what passes by itself. Errors as :meth:`advance`."""
        self._check()
        with self._driving:
            self._let_pass(_BY_ITSELF_S)

    def _let_pass(self, seconds: float) -> None:
        """Let what is due within so many seconds happen, and no more time pass than that takes. Under ``_driving``."""
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

    # -- those who wait (see _time.py) -----------------------------------------------------------------

    def _doze(self, lock: threading.Lock, until: float, idle: bool = False) -> bool:
        if math.isnan(until):
            raise ValueError("a wait cannot take NaN seconds")
        with self._lock:
            flows = self._flows_from is not None
            if not flows:
                if until <= self._now:
                    return lock.acquire(False)
                self._enter(lock, _Wait(until, lock, _NEVER, idle, threading.get_ident()))
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
                self._enter(me, _Wait(self.now() + seconds, None, looks_by, False, me))
        return min(seconds, _SLICE_S)

    def _enter(self, key: Any, wait: _Wait) -> None:
        """Note somebody who waits. Under the lock."""
        self._waits[key] = wait
        if wait.due - self._now <= _BY_ITSELF_S or (self.autojump and not wait.idle):
            self._changed.notify_all()

    def _next(self) -> float:
        """Return when the next thing is due. Under the lock."""
        real = time.monotonic()
        for key in [key for key, wait in self._waits.items() if wait.looks_by < real]:
            del self._waits[key]
        return min((wait.due for wait in self._waits.values()), default=_NEVER)

    def _jump(self, to: float) -> None:
        """Let it be so late. Under the lock."""
        self._now = max(self._now, to)
        for wait in self._waits.values():
            if wait.due <= self._now:
                _ring(wait)

    # -- whether anything moves --------------------------------------------------------------------------

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
        """Say whether every other thread of this process waits, for something that has not come."""
        everyone, mine = time.process_time(), time.thread_time()
        time.sleep(_NAP_S)
        if (time.process_time() - everyone) - (time.thread_time() - mine) > _RAN_S:
            return False
        if _states(b"RD"):  # woken, but a busy machine does not let it run yet
            return False
        with self._lock:
            self._next()
            return all(wait.due > self._now for wait in self._waits.values())

    def _check(self) -> None:
        if self._state != "in force" or self._flows_from is not None:
            raise RuntimeError("this VirtualTime is not in force: its block has ended, or has not begun")

    # -- by itself ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Let time pass where nobody has to say so; runs on its own thread."""
        rest = _SOON_S
        while True:
            with self._lock:
                if self._state != "in force" or self._flows_from is not None:
                    return
                if not self._goes_by_itself(self._next()):
                    if not self._changed.wait(_STUCK_S):
                        self._warn()
                    continue
            with self._driving:
                quiet = self._is_quiet()
                if quiet:
                    with self._lock:
                        due = self._next()
                        if self._flows_from is None and self._goes_by_itself(due):
                            self._jump(due)
            if quiet:
                rest = _SOON_S
            else:
                time.sleep(rest)
                rest = min(2.0 * rest, _REST_S)

    def _warn(self) -> None:
        """Say so where the main thread waits for a time that only it could let pass. Under the lock."""
        main = threading.main_thread().ident
        self._next()
        if not self._warned and any(
            wait.thread == main and wait.due < _NEVER for wait in self._waits.values()
        ):
            self._warned = True
            _log.warning(
                "the main thread waits, and virtual time stands still: call advance() before the wait, or on another "
                "thread, or make the clock with autojump=True"
            )

    def _goes_by_itself(self, due: float) -> bool:
        if due == _NEVER:
            return False
        return due - self._now <= _BY_ITSELF_S or (
            self.autojump and not all(wait.idle for wait in self._waits.values())
        )


def _after_fork() -> None:
    if _in_force is not None:
        _in_force._abandon()


os.register_at_fork(after_in_child=_after_fork)


def _ring(wait: _Wait) -> None:
    if wait.lock is not None:
        try:
            wait.lock.release()
        except RuntimeError:  # it is awake
            pass


def _states(wanted: bytes) -> list[int]:
    """Return the other threads of this process that are in one of these states of the kernel's."""
    found, me = [], threading.get_native_id()
    for name in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{name}/stat", "rb", buffering=0) as file:
                state = file.read(256).rpartition(b")")[2].split()[0]
        except (OSError, IndexError):  # it has ended
            continue
        if int(name) != me and state in [bytes([each]) for each in wanted]:
            found.append(int(name))
    return found


def _running() -> str:
    """Name the threads that run, and where."""
    ids = _states(b"RD")
    frames = _stacks.top_frames()
    shown = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread.native_id in ids and frame is not None:
            shown.append(
                f"{thread.name} in {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
            )
    return "; ".join(shown) or "some, now and then"
