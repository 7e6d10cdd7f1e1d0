"""The time that everything here goes by: what is due, and how long a wait may take.

Call these as ``_time.now()`` and so on, through the module: a virtual clock (:mod:`actorrpc.testing`) puts other functions
in their place. Starting and watching of other processes goes by ``time.monotonic`` itself, since those live in real time.

A thread that waits for a deadline calls one of the functions below, in a loop that looks at :func:`now` again after each:
where time is virtual, it may have passed in a moment, or not at all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["SLICE_S", "doze", "near_s", "now", "patience", "sleep"]

#: The longest sleep of a wait before it looks around again, in seconds of real time: a signal that comes just before a lock
#: sleeps does not wake it.
SLICE_S: Final = 1.0


def _doze(lock: threading.Lock, until: float, idle: bool = False) -> bool:
    return lock.acquire(timeout=max(min(until - now(), threading.TIMEOUT_MAX if idle else SLICE_S), 0.0))


#: Seconds since some moment; never runs backwards. Only differences mean anything. Thread-safe.
now: Callable[[], float] = time.monotonic

#: ``doze(lock, until, idle=False)``: sleep until the lock is released or the time has come, for :data:`SLICE_S` at most;
#: return whether the lock was taken. It may be before either. ``idle``: nobody waits for what sleeps here (a clock), and it
#: sleeps until then.
doze: Callable[..., bool] = _doze

#: ``patience(seconds)``: return how long, in real seconds, to sleep at once of a wait that takes ``seconds`` from now.
#: A builtin: it costs next to nothing.
patience: Callable[[float], float] = float

#: ``sleep(seconds)``: let so much time pass.
sleep: Callable[[float], None] = time.sleep

#: A deadline that is nearer than this, in seconds, bounds a sleep that :func:`patience` is not asked about otherwise.
near_s: float = 1.0
