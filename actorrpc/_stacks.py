"""Inspect the stack of another thread without crashing the interpreter.

CPython makes the Python object of a frame when code first asks for it. In version 3.11, making the object may start the garbage
collector. The collector runs finalisers, and other threads may run between the instructions of a finaliser. If thread B returns
from a frame at that moment while thread A is making the frame's object, the interpreter in A uses memory that B has released: it
crashes, or writes into B's next frame. The functions here therefore switch the collector off while they make these objects. Later
versions of Python start the collector between two instructions only, where this cannot happen.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Final

__all__ = ["local", "top_frame", "top_frames", "without_collection"]

# The thread that switches the collector off holds this lock until it has switched it on again. No other lock is taken under it.
# It is re-entrant because a signal handler may inspect a stack while the main thread does.
_off: Final = threading.RLock()


@contextlib.contextmanager
def _collector_off() -> Generator[None]:
    with _off:
        was_on = gc.isenabled()
        try:
            gc.disable()
            yield
        finally:
            if was_on:
                gc.enable()


def without_collection() -> AbstractContextManager[None]:
    """Return a context that switches the collector off on Python 3.11, and has no effect on later versions."""
    return _collector_off() if sys.version_info < (3, 12) else contextlib.nullcontext()


def top_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by thread identifier. ``f_back`` of the frames is safe to read."""
    with without_collection():
        found = sys._current_frames()
        for frame in found.values():
            _make_all(frame)
    return found


def top_frame(ident: int | None) -> FrameType | None:
    """Return the innermost frame of a thread, or None if there is no such thread. ``f_back`` is safe to read."""
    with without_collection():
        found = sys._current_frames().get(ident or 0)
        _make_all(found)
    return found


def local(frame: FrameType, name: str) -> Any:
    """Return a local variable of a frame, which another thread may be running; None if the frame has no such variable."""
    with without_collection():
        return frame.f_locals.get(name)


def _make_all(frame: FrameType | None) -> None:
    """Create the frame objects of a stack, so that ``f_back`` creates none. They live as long as the frames."""
    while frame is not None:
        frame = frame.f_back


# A fork waits for a thread that has switched the collector off. Otherwise the collector would stay off in the child.
os.register_at_fork(before=_off.acquire, after_in_parent=_off.release, after_in_child=_off.release)
