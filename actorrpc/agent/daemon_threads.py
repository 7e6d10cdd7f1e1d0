"""Daemon threads that the end of the interpreter does not interrupt while they end.

``join()`` returns when a thread has run its last Python code. After that, the thread destroys its C++ objects, and needs the
interpreter if these refer to Python objects (torch's inductor leaves such objects in the thread that imports it). If the
interpreter is being finalized meanwhile, it makes the thread exit within a destructor, and C++ aborts the process ("terminate
called without an active exception"). Therefore the end of the interpreter waits for threads that are about to end, for at
most 2 s. It waits only 0.05 s for threads that run user code, which may never end.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

from actorrpc import _stacks, _time
from actorrpc._exceptions import report, undo_on_error
from actorrpc.transport import signals

__all__ = ["ACTING", "Daemon"]

_log = logging.getLogger("actorrpc.threads")

#: The workers (:class:`~actorrpc.agent.context.Worker`) that the calling thread acts for; the last one is in force.
ACTING: Final[ContextVar[tuple[Any, ...]]] = ContextVar("actorrpc_acting_worker", default=())

_WAIT_S: Final = 2.0
_ENGAGED_S: Final = 0.05  # the end of the interpreter waits for so long for threads that run user code
_MANY: Final = 64
_OURS: Final = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(os.__file__).parent) + os.sep + "threading.py",
)
# All threads that were started and have not run all of their Python code.
_running: Final[set[Daemon]] = set()
# The native ids of threads that have run all of their Python code except the end of Daemon.run.
_leaving: Final[deque[int]] = deque()


class Daemon(threading.Thread):
    """A daemon thread that calls ``target()``. If that raises, the error is logged and ``lost(error)`` is called."""

    def __init__(
        self, target: Callable[[], Any], name: str, lost: Callable[[BaseException], Any] | None = None
    ) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._lost = lost

    def start(self) -> None:
        """Start the thread. It acts for the worker that the calling thread acts for."""
        self._acting = ACTING.get()[-1:]  # a new thread begins with an empty context
        # Thread.start ends the thread if a signal handler raises in it.
        signals.defer_during(self._start)

    def _start(self) -> None:
        _running.add(self)
        with undo_on_error(partial(_running.discard, self)):
            _time.start(self)

    def run(self) -> None:
        """Call ``target()``."""
        try:
            ACTING.set(self._acting)
            super().run()
        except BaseException as error:
            report(_log, error, "the thread %s has ended unexpectedly", self.name)
            if self._lost is not None:
                self._lost(error)
        finally:
            _leaving.append(threading.get_native_id())
            _running.discard(self)
            if len(_leaving) > _MANY:
                _forget()


def _is_there(thread: int) -> bool:
    return os.path.exists(f"/proc/self/task/{thread}")


def _forget() -> None:
    """Remove ended threads from ``_leaving``. Any number of threads may call it at once."""
    for _ in range(len(_leaving)):
        try:
            thread = _leaving.popleft()
        except IndexError:
            return
        if _is_there(thread):
            _leaving.append(thread)


def _is_engaged(frame: FrameType | None) -> bool:
    """Return whether a thread with this stack runs user code."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False


@atexit.register
def _see_off() -> None:
    now = time.monotonic()
    engaged_at, until = now + _ENGAGED_S, now + _WAIT_S
    while time.monotonic() < until:
        _forget()
        if not _leaving:
            frames = _stacks.top_frames() if _running else {}
            others = [_is_engaged(frames.get(thread.ident or 0)) for thread in tuple(_running)]
            if all(others) and (not others or time.monotonic() > engaged_at):
                return
        time.sleep(0.001)  # the threads need the interpreter


def _after_fork() -> None:
    _leaving.clear()
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)
