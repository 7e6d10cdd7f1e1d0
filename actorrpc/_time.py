"""The clock of this package, and the functions that make the locks, pollers and threads of the path of a call.

Callers read this module's attributes (``_time.now()``), because tests replace them. A virtual clock (:mod:`actorrpc.testing`)
replaces the functions that read the time and wait for it. A simulated scheduler (``tests/agent/steps.py``) replaces the locks,
pollers and threads as well, and so decides which thread runs next. Code that starts and watches other processes uses
``time.monotonic`` itself, because other processes run in real time.

A thread that waits for a deadline calls one of the functions below in a loop, and reads :func:`now` again after each call:
if time is virtual, any amount of time may have passed.

:mod:`actorrpc.agent` and :mod:`actorrpc.transport` make their locks and pollers with :data:`Lock`, :data:`RLock`,
:data:`Condition`, :data:`Event`, :data:`poll` and :data:`epoll`, and start their threads with :data:`start`. They do so when
they make an agent, a connection or a thread, not for each call.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import Any, Final

__all__ = [
    "SLICE_S",
    "Condition",
    "Event",
    "Lock",
    "RLock",
    "doze",
    "epoll",
    "near_s",
    "now",
    "patience",
    "pause",
    "poll",
    "sleep",
    "start",
]

#: How long a waiting thread sleeps at most before it checks its condition again, in seconds of real time. (A signal that arrives
#: just before the thread blocks on a lock does not wake the thread.)
SLICE_S: Final = 1.0


def _doze(lock: threading.Lock, until: float, idle: bool = False) -> bool:
    return lock.acquire(timeout=max(min(until - now(), threading.TIMEOUT_MAX if idle else SLICE_S), 0.0))


#: Seconds since an arbitrary moment; never runs backwards. Only differences have a meaning. Thread-safe.
now: Callable[[], float] = time.monotonic

#: ``doze(lock, until, idle=False)``: sleep until this thread acquires the lock, until the time ``until``, or for :data:`SLICE_S`;
#: return whether the lock was acquired. May return earlier. ``idle=True`` is for the clock thread, on which no thread waits: its
#: sleep is not limited to :data:`SLICE_S`.
doze: Callable[..., bool] = _doze

#: ``patience(seconds)``: return how many real seconds a thread that waits for ``seconds`` may sleep at a time. By default a
#: builtin function, because a builtin is fast.
patience: Callable[[float], float] = float

#: ``sleep(seconds)``: like ``time.sleep``.
sleep: Callable[[float], None] = time.sleep

#: A thread that reads a connection calls :func:`patience` only if its deadline is less than this many seconds away.
near_s: float = 1.0

#: ``pause(seconds)``: sleep in real time, even if time is virtual, so that other threads run.
pause: Callable[[float], None] = time.sleep

Lock: Callable[[], threading.Lock] = threading.Lock
RLock: Callable[[], threading.RLock] = threading.RLock
Condition: Callable[..., threading.Condition] = threading.Condition
Event: Callable[[], threading.Event] = threading.Event
poll: Callable[[], select.poll] = select.poll
epoll: Callable[[], select.epoll] = select.epoll

#: ``start(thread)``: start a :class:`threading.Thread`, or an object of a subclass.
start: Callable[[Any], None] = threading.Thread.start
