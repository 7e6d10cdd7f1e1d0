"""Defers signal handlers of the program, so that an exception of a handler does not interrupt critical code.

Python runs signal handlers on the main thread, between any two bytecodes. If a handler raises there (such as the handler of
Ctrl-C, which raises KeyboardInterrupt), it would interrupt code that reads, writes or arms a connection, and frames of other
threads would be lost. Therefore, while there is an agent, each handler of the program is wrapped in a shield. The shield checks
whether a function marked :func:`uninterruptible` or a finaliser is on the stack. If not, the shield runs the
handler at once. Otherwise it defers the handler and wakes the main thread from its wait. The handler then runs after the critical
section: in :func:`checkpoint`, or, if the main thread calls no checkpoint, in the handler of ``SIGURG``, which the clock thread
sends to the main thread. (Without a handler, SIGURG is ignored.)

The program does not see the shields: handlers that it installs are wrapped, and ``signal.getsignal`` returns the program's own
handler. ``state.lock`` guards starts and ends of agents, which several threads may do at once. It is re-entrant, because a
handler may do it, too. Shields take no lock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, TypeVar

from actorrpc import _time
from actorrpc._exceptions import mark_handlers
from actorrpc._python import WEAK_CALLBACKS, signal_module

__all__ = [
    "REPEATS_S",
    "checkpoint",
    "defer_during",
    "die_with",
    "install",
    "is_protected",
    "loses_exceptions",
    "pending_here",
    "state",
    "uninstall",
    "uninterruptible",
    "wake_fd",
    "wake_main",
]

# Signals within this time of the first signal are the same request to end: Slurm and systemd signal all processes of a job, and
# `actorrpc up` and `--count` pass a signal on, so a worker may receive one request as several signals.
REPEATS_S: Final = 1.0

F = TypeVar("F", bound=Callable[..., Any])
_Handler = Callable[[int, FrameType | None], Any]

_protected: set[CodeType] = set()
_main = threading.main_thread().ident
# ``signal.signal``, which a program may have imported by name, calls ``_signal.signal``, which :func:`install` replaces.
_set_native: Final[Any] = signal_module.signal
_get_native: Final[Any] = signal_module.getsignal
_WAKE_SIGNAL: Final = int(signal.SIGURG)


class _State:
    __slots__ = ("laters", "lock", "pending", "signalled", "wake_fd")

    def __init__(self) -> None:
        self.signalled = False  # whether wake_main() has sent a SIGURG that was not handled yet
        #: deferred handlers, by signal
        self.pending: dict[int, _Handler] = {}
        self.wake_fd = -1
        #: for each agent, a function that arranges that :func:`wake_main` is called a moment later
        self.laters: list[Callable[[], None]] = []
        self.lock = threading.RLock()


state = _State()


class _Shield:
    """Wraps a handler of the program; may defer its calls. SIGURG has a shield even if the program does not handle it."""

    __slots__ = ("handler",)

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        within = bool(state.laters) and _is_within(frame)
        if number == _WAKE_SIGNAL and state.signalled:
            state.signalled = False
            if within:
                _nudge()
            else:
                _run_pending(frame)
            return
        if not callable(self.handler):
            return
        if within:
            state.pending[number] = self.handler
            _wake()
            _nudge()
            return
        if state.pending.pop(number, None) is not None and not state.pending:
            _quiet()
        _run(self.handler, number, frame)


def uninterruptible(marked: F) -> F:
    """Mark a function, or all methods of a class: while there is an agent, signal handlers do not run in it or in its callees."""
    methods = vars(marked).values() if isinstance(marked, type) else (marked,)
    _protected.update(each.__code__ for each in methods if isinstance(each, FunctionType))
    return marked


def is_protected(frame: FrameType) -> bool:
    """Return whether a frame belongs to a function marked :func:`uninterruptible`."""
    return frame.f_code in _protected


def loses_exceptions(code: CodeType) -> bool:
    """Return whether the interpreter discards exceptions of this code: a finaliser, or the callback of a weak collection."""
    return code.co_name == "__del__" or code in WEAK_CALLBACKS


def _is_within(frame: FrameType | None) -> bool:
    while frame is not None:
        if is_protected(frame) or loses_exceptions(frame.f_code):
            return True
        frame = frame.f_back
    return False


def _run(handler: _Handler, number: int, frame: FrameType | None) -> None:
    try:
        handler(number, frame)
    except BaseException as error:
        mark_handlers(error)
        raise


def pending_here() -> bool:
    """Return whether this is the main thread and a handler was deferred."""
    return bool(state.pending) and threading.get_ident() == _main


def checkpoint() -> None:
    """Run the deferred handlers, if this is the main thread. They may raise, so the caller must hold no lock."""
    if state.pending and threading.get_ident() == _main:
        _run_pending(sys._getframe(1))


def _run_pending(frame: FrameType | None) -> None:
    while state.pending:
        for number in list(state.pending):  # a copy: another signal may change the table at any step
            handler = state.pending.pop(number, None)
            if handler is None:
                continue
            if not state.pending:
                _quiet()
            _run(handler, number, frame)


def _wake() -> None:
    try:
        os.eventfd_write(state.wake_fd, 1)
    except (OSError, OverflowError, ValueError):  # there is no eventfd
        pass


def _quiet() -> None:
    try:
        os.eventfd_read(state.wake_fd)
    except (BlockingIOError, OSError, ValueError):  # ValueError: it was closed
        pass


def _nudge() -> None:
    laters = state.laters
    if laters:
        laters[-1]()


def wake_fd() -> int:
    """Return the eventfd that becomes readable when a handler was deferred; -1 if there is none.

    Threads that poll a connection also poll this descriptor, so that the main thread wakes. Other threads then poll again.
    """
    return state.wake_fd


def wake_main() -> None:
    """Send a signal that makes the main thread run deferred handlers. Called by the clock thread after a handler was deferred."""
    # The last agent may end meanwhile and remove the shield of SIGURG. The signal then has no effect, because the default action
    # of SIGURG is to ignore it.
    if state.pending and _main is not None:
        state.signalled = True
        try:
            signal.pthread_kill(_main, _WAKE_SIGNAL)
        except (OSError, ValueError):
            pass


def _shielded(number: int, handler: Any) -> Any:
    if type(handler) is not _Shield and (
        callable(handler) or (number == _WAKE_SIGNAL and handler in (signal.SIG_DFL, signal.SIG_IGN))
    ):
        return _Shield(handler)
    return handler


def _own(handler: Any) -> Any:
    return handler.handler if type(handler) is _Shield else handler


def _set(number: int, handler: Any) -> Any:
    """Replacement of ``_signal.signal``."""
    checkpoint()  # run the old handler for signals that arrived while it was installed and were deferred
    return _own(_set_native(number, _shielded(number, handler)))


def _get(number: int) -> Any:
    """Replacement of ``_signal.getsignal``."""
    return _own(_get_native(number))


def install(later: Callable[[], None]) -> None:
    """Wrap handlers that the program installs from now on; if this is the main thread, also installed handlers.

    ``later`` is called in signal handlers. It must arrange that :func:`wake_main` is called a moment later, without taking a lock
    that the main thread may hold. :func:`uninstall` undoes this.
    """
    global _main
    _main = threading.main_thread().ident
    with state.lock:
        try:
            state.laters.append(later)
            signal_module.signal, signal_module.getsignal = _set, _get
            # Wrap handlers before _open(): no handler may interrupt _open() between opening and storing the descriptor.
            _replace(_shielded)
            _open()
        except BaseException:
            uninstall(later)
            raise


def defer_during(function: Callable[[], None]) -> None:
    """Call a function, and defer signal handlers until it has returned, even if there is no agent."""
    if state.laters or threading.get_ident() != threading.main_thread().ident:
        _call_protected(function)
    else:
        try:
            install(_nothing_later)
            _call_protected(function)
        finally:
            uninstall(_nothing_later)
        checkpoint()


@uninterruptible
def _call_protected(function: Callable[[], None]) -> None:
    function()


def _nothing_later() -> None:
    """Do nothing: :func:`defer_during` calls :func:`checkpoint` itself."""


@uninterruptible
def uninstall(later: Callable[[], None]) -> None:
    """Undo :func:`install`. For the last agent, also unwrap the program's handlers, if this is the main thread."""
    with state.lock:
        if later not in state.laters:
            return
        try:
            if len(state.laters) == 1:
                _close()
            state.laters.remove(later)  # after the last agent's function was removed, no handler is deferred
        finally:
            try:
                if not state.laters:
                    _give_back()
            except BaseException:  # a handler that was just unwrapped ran and raised: unwrap the others
                _give_back()
                raise


def _give_back() -> None:
    if _replace(lambda _, handler: _own(handler)):
        signal_module.signal, signal_module.getsignal = _set_native, _get_native


def _replace(by: Callable[[int, Any], Any]) -> bool:
    if threading.get_ident() != _main:
        return False
    for number in signal.valid_signals():
        before = _get_native(number)
        after = by(number, before)
        if after is not before:
            _set_native(number, after)
    return True


@uninterruptible
def _open() -> None:
    if state.wake_fd < 0:
        state.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    if state.pending:
        _wake()


def _close() -> None:
    fd, state.wake_fd = state.wake_fd, -1
    if fd >= 0:
        os.close(fd)


def abandon() -> None:
    """Reset the state in a forked child. Shields then run the program's handlers at once."""
    state.lock = threading.RLock()  # another thread may have held it at the fork
    state.pending.clear()
    state.laters.clear()
    _close()


@uninterruptible
class Taken:
    """Acquires a lock for a block, waiting until the time ``limit``; a deferred signal handler ends the wait.

    ``held``: whether the lock was acquired. Signal handlers cannot interrupt the methods, so the lock is always released.
    """

    __slots__ = ("_limit", "_lock", "held")

    def __init__(self, lock: threading.Lock, limit: float) -> None:
        self._lock = lock
        self._limit = limit
        self.held = False

    def __enter__(self) -> Taken:
        while not self.held and _time.now() <= self._limit and not pending_here():
            self.held = self._lock.acquire(timeout=0.1)
        return self

    def __exit__(self, *_: object) -> None:
        if self.held:
            self._lock.release()


# -- the end of the parent -------------------------------------------------------------------------------

_PR_SET_PDEATHSIG: Final = 1
_prctl: Final[Any] = ctypes.CDLL(None).prctl  # loaded now, because a forked process may not be able to


def die_with(parent: int, number: int) -> None:
    """Let the kernel send a signal to this process, which was just forked, when its parent thread ends; see ``prctl(2)``.

    Args:
        parent: the parent's process id; if the parent has ended already, this process ends now.
    """
    _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # the parent has ended before prctl() took effect
        os._exit(1)
