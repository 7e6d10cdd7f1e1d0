"""Signal handlers that never leave a connection in pieces, whatever they raise.

Python runs the program's signal handlers on the main thread, between any two bytecodes. What one raises there (Ctrl-C's
KeyboardInterrupt first of all) would cut the code that reads, writes or arms a connection in two, and lose frames of other
threads. Nothing but the handler itself can put that off, so while there is an agent, each handler of the program is run by one
of ours, which looks whether a function marked :func:`uninterruptible` is on the stack. If none is, the handler runs as ever. If
one is, that is noted, the wait that the main thread sits in is woken, and the handler runs when the section is over: in
:func:`checkpoint`, or, where no checkpoint follows, in the handler of a signal that the clock sends (``SIGURG``: it is harmless
where nobody expects it).

The program does not see ours: what it installs from then on is put behind one, and what it asks for is its own. No lock is
used here: handlers run on the main thread only.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from actorrpc import _time
from actorrpc._exception_text import mark_handlers

__all__ = [
    "checkpoint",
    "install",
    "is_protected",
    "loses_exceptions",
    "pending_here",
    "put_off_during",
    "ring",
    "state",
    "uninstall",
    "uninterruptible",
    "wake_fd",
]

F = TypeVar("F", bound=Callable[..., Any])
_Handler = Callable[[int, FrameType | None], Any]

_protected: set[CodeType] = set()
_main = threading.main_thread().ident
# What ``signal.signal`` and ``signal.getsignal`` call, also where a program has imported those by name.
_native: Final[Any] = sys.modules["_signal"]
_set_native: Final[Any] = _native.signal
_get_native: Final[Any] = _native.getsignal
_RING: Final = int(signal.SIGURG)
_weak_collections: Final[tuple[Any, ...]] = (WeakKeyDictionary(), WeakSet(), WeakValueDictionary())
# The callbacks with which weak collections drop an entry: all collections of one kind share the code.
_weak_callbacks: Final[frozenset[CodeType]] = frozenset(
    each._remove.__code__ for each in _weak_collections if hasattr(each, "_remove")
)


class _State:
    __slots__ = ("laters", "pending", "rung", "wake_fd")

    def __init__(self) -> None:
        self.rung = False  # the signal that comes is ours
        #: handlers that were put off, by their signals; the main thread's
        self.pending: dict[int, _Handler] = {}
        self.wake_fd = -1
        #: of each agent, what has :func:`ring` called a moment later
        self.laters: list[Callable[[], None]] = []


state = _State()


class _Shield:
    """Runs a handler of the program where it can harm nothing. For ``_RING``, also where the program has none."""

    __slots__ = ("handler",)

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        within = bool(state.laters) and _is_within(frame)
        if number == _RING and state.rung:
            state.rung = False
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
    """Mark a function, or all methods of a class, whose execution, callees included, a signal handler must not cut in two."""
    methods = vars(marked).values() if isinstance(marked, type) else (marked,)
    _protected.update(each.__code__ for each in methods if isinstance(each, FunctionType))
    return marked


def is_protected(frame: FrameType) -> bool:
    """Say whether a frame is that of a function marked :func:`uninterruptible`."""
    return frame.f_code in _protected


def loses_exceptions(code: CodeType) -> bool:
    """Say whether the interpreter prints and drops what a function raises: a finaliser, or the callback of a weak collection."""
    return code.co_name == "__del__" or code in _weak_callbacks


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
    """Say whether this is the main thread and a handler has been put off."""
    return bool(state.pending) and threading.get_ident() == _main


def checkpoint() -> None:
    """Run the handlers that were put off, if this is the main thread; they may raise. No lock is held where this is called."""
    if state.pending and threading.get_ident() == _main:
        _run_pending(sys._getframe(1))


def _run_pending(frame: FrameType | None) -> None:
    while state.pending:
        number = next(iter(state.pending))
        handler = state.pending.pop(number)
        if not state.pending:
            _quiet()
        _run(handler, number, frame)


def _wake() -> None:
    try:
        os.eventfd_write(state.wake_fd, 1)
    except (OSError, OverflowError, ValueError):  # there is none
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
    """Return the eventfd that becomes readable when a handler was put off; -1 if there is none.

    A thread that polls a connection polls it, too, so that the main thread comes out; others find nothing to do.
    """
    return state.wake_fd


def ring() -> None:
    """Have the main thread run what was put off; called by the clock a moment after that."""
    # Without an agent, the handler that makes it harmless may be gone: the signal is ignored then.
    if state.pending and _main is not None:
        state.rung = True
        try:
            signal.pthread_kill(_main, _RING)
        except (OSError, ValueError):
            pass


def _shielded(number: int, handler: Any) -> Any:
    if type(handler) is not _Shield and (
        callable(handler) or (number == _RING and handler in (signal.SIG_DFL, signal.SIG_IGN))
    ):
        return _Shield(handler)
    return handler


def _own(handler: Any) -> Any:
    return handler.handler if type(handler) is _Shield else handler


def _set(number: int, handler: Any) -> Any:
    """Stand in for ``_signal.signal``."""
    checkpoint()  # what was put off came while the handler was in force that is replaced now
    return _own(_set_native(number, _shielded(number, handler)))


def _get(number: int) -> Any:
    """Stand in for ``_signal.getsignal``."""
    return _own(_get_native(number))


def install(later: Callable[[], None]) -> None:
    """Shield what is to come from the program's handlers; those that it has are shielded if this is the main thread.

    ``later`` is called in handlers and must arrange, without taking a lock that the main thread may hold,
    for :func:`ring` to be called a moment later. :func:`uninstall` takes it back.
    """
    global _main
    _main = threading.main_thread().ident
    try:
        state.laters.append(later)
        _native.signal, _native.getsignal = _set, _get
        _replace(_shielded)  # first: from here on, no handler comes between what is opened and what keeps it
        _open()
    except BaseException:
        uninstall(later)
        raise


def put_off_during(function: Callable[[], None]) -> None:
    """Call a function; signal handlers run after it, even if there is no agent."""
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
    """Arrange nothing: what is put off is looked at soon."""


@uninterruptible
def uninstall(later: Callable[[], None]) -> None:
    """End what :func:`install` has begun; the last one gives the handlers back, if this is the main thread."""
    if later not in state.laters:
        return
    try:
        if len(state.laters) == 1:
            _close()
        state.laters.remove(later)  # nothing is put off any more
    finally:
        try:
            if not state.laters:
                _give_back()
        except BaseException:  # one that has been given back raised: there are others
            _give_back()
            raise


def _give_back() -> None:
    if _replace(lambda _, handler: _own(handler)):
        _native.signal, _native.getsignal = _set_native, _get_native


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
    """Let go, in a forked child, of what belongs to the parent. The program's handlers run as if they were not shielded."""
    state.pending.clear()
    state.laters.clear()
    _close()


@uninterruptible
class Taken:
    """Holds a lock that is waited for in slices: a handler that was put off ends the wait, and can never leave it taken."""

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
