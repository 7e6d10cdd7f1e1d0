"""Ctrl-C that never leaves a connection in pieces.

A KeyboardInterrupt raised between two bytecodes of the code that reads, writes or arms a connection would
lose frames of other threads. So while ``signal.default_int_handler`` is in force, it is replaced, on the main
thread, by a handler that looks whether a function marked :func:`uninterruptible` is on the stack. If none is,
KeyboardInterrupt is raised as ever. If one is, the interrupt is noted, the wait that the main thread sits in
is woken, and the interrupt is raised when the section is over: by :func:`checkpoint`, or, where no checkpoint
follows, by sending the signal again.

A program that has installed its own SIGINT handler keeps it. No lock is used here: handlers run on the main
thread only.

Handlers of the program, of any signal, may make calls, in the middle of one that the main thread makes. Who holds a lock that
such a call would wait for is then below it on the stack, and goes on only when the handler returns: functions that hold one
are marked :func:`holding`, and :func:`beneath` finds them, for who is about to wait.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

from actorrpc import _time

__all__ = [
    "beneath",
    "checkpoint",
    "holding",
    "install",
    "pending_here",
    "resend",
    "state",
    "uninstall",
    "uninterruptible",
    "wake_fd",
]

F = TypeVar("F", bound=Callable[..., Any])

_protected: set[CodeType] = set()
_holding: set[CodeType] = set()
_main = threading.main_thread().ident
_installed = False


class _InterruptState:
    __slots__ = ("pending", "resend", "resent", "wake_fd")

    def __init__(self) -> None:
        self.pending = False
        self.resent = False
        self.wake_fd = -1
        self.resend: Callable[[], None] | None = None


state = _InterruptState()


def uninterruptible(function: F) -> F:
    """Mark a function whose execution, callees included, Ctrl-C must not cut in two."""
    _protected.add(function.__code__)
    return function


def holding(function: F) -> F:
    """Mark a method that holds a lock of its ``self`` while it runs."""
    _holding.add(function.__code__)
    return function


def beneath(*owners: object) -> int:
    """Say how many methods marked :func:`holding` of these owners wait, on this thread, for a signal handler to return.

    The caller counts where it is one itself. For who would wait otherwise: it looks through the whole stack.
    """
    if threading.get_ident() != _main:
        return 0
    count = 0
    walk: FrameType | None = sys._getframe(1)
    while walk is not None:
        if walk.f_code in _holding and any(walk.f_locals.get("self") is owner for owner in owners):
            count += 1
        walk = walk.f_back
    return count


def pending_here() -> bool:
    """Say whether this is the main thread and an interrupt has been put off."""
    return state.pending and threading.get_ident() == _main


def checkpoint() -> None:
    """Raise an interrupt that was put off, if this is the main thread and there is one."""
    if state.pending and threading.get_ident() == _main:
        state.pending = False
        _quiet()
        raise KeyboardInterrupt


def _quiet() -> None:
    try:
        os.eventfd_read(state.wake_fd)
    except (BlockingIOError, OSError, ValueError):  # ValueError: it was closed
        pass


def wake_fd() -> int:
    """Return the eventfd that becomes readable when an interrupt was put off; -1 if there is none.

    A thread that polls a connection polls it, too, so that the main thread comes out; others find nothing to do.
    """
    return state.wake_fd


def _handle(_signum: int, frame: FrameType | None) -> None:
    resent, state.resent = state.resent, False
    if resent and not state.pending:
        return  # sent again, but a checkpoint has raised it meanwhile
    walk = frame
    while walk is not None:
        # What a finaliser raises is lost, this included.
        if walk.f_code in _protected or walk.f_code.co_name == "__del__":
            state.pending = True
            if state.wake_fd >= 0:
                os.eventfd_write(state.wake_fd, 1)
            if state.resend is not None:
                state.resend()
            return
        walk = walk.f_back
    if state.pending:
        state.pending = False
        _quiet()
    raise KeyboardInterrupt


def resend() -> None:
    """Send the main thread its put-off interrupt again; called by the clock a moment after it was put off."""
    if state.pending and _main is not None:
        state.resent = True
        try:
            signal.pthread_kill(_main, signal.SIGINT)
        except (OSError, ValueError):
            pass


def install(later: Callable[[], None]) -> None:
    """Take over SIGINT if Python's default handler is in force and this is the main thread.

    ``later`` is called in the handler and must arrange, without taking a lock that the main thread may hold,
    for :func:`resend` to be called a moment later.
    """
    global _installed, _main
    _main = threading.main_thread().ident
    if threading.current_thread() is not threading.main_thread():
        return
    # It is ours already in a child that was forked from a worker: then only what belonged to the parent is renewed.
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _handle):
        state.pending = state.resent = False
        _close()
        state.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        state.resend = later
        signal.signal(signal.SIGINT, _handle)
        _installed = True


def uninstall() -> None:
    """Give SIGINT back, if it is still ours and this is the main thread."""
    global _installed
    if not _installed or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is _handle:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _installed = False
    state.resend = None
    _close()


def _close() -> None:
    fd, state.wake_fd = state.wake_fd, -1
    if fd >= 0:
        os.close(fd)


def abandon() -> None:
    """Let go, in a forked child, of what belongs to the parent. The handler stays, and acts as Python's own."""
    state.pending = state.resent = False
    state.resend = None
    _close()


class Taken:
    """Holds a lock that is waited for in slices: Ctrl-C ends the wait, and can never leave the lock taken."""

    __slots__ = ("_limit", "_lock", "held")

    def __init__(self, lock: threading.Lock, limit: float) -> None:
        self._lock = lock
        self._limit = limit
        self.held = False

    @uninterruptible
    def __enter__(self) -> Taken:
        while not self.held and _time.now() <= self._limit and not pending_here():
            self.held = self._lock.acquire(timeout=0.1)
        return self

    @uninterruptible
    def __exit__(self, *_: object) -> None:
        if self.held:
            self._lock.release()
