"""Threads that do not keep the process alive, and that its end does not cut short either.

``join()`` returns when a thread has run its last Python code. What it keeps in C++ is taken down after that, on the thread,
and needs the interpreter where it holds Python objects: torch's inductor leaves some with the thread that happens to import it.
An interpreter that is being finalized has such a thread exit, in a destructor, and C++ aborts the process for it ("terminate
called without an active exception"). So the end of the interpreter waits for those that are on their way out. It does not wait
for those that run code of others: that may go on for ever.
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
from pathlib import Path
from types import FrameType
from typing import Any, Final

from actorrpc import _stacks, _time
from actorrpc._exception_text import report
from actorrpc.transport import signals

__all__ = ["ACTING", "Daemon"]

_log = logging.getLogger("actorrpc.threads")

#: The workers (:class:`~actorrpc.agent.context.Worker`) that the calling thread acts for; the last one is in force.
ACTING: Final[ContextVar[tuple[Any, ...]]] = ContextVar("actorrpc_acting_worker", default=())

_WAIT_S: Final = 2.0
_ENGAGED_S: Final = 0.05  # how long a thread must have been seen in code of others
_MANY: Final = 64
_OURS: Final = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(os.__file__).parent) + os.sep + "threading.py",
)
# All that have been started and have Python code to run.
_running: Final[set[Daemon]] = set()
# The native ids of threads that have run all of their Python code, but the end of Daemon.run.
_leaving: Final[deque[int]] = deque()


class Daemon(threading.Thread):
    """A daemon thread that calls ``target()``, which is not to raise: where it does, that is logged, and ``lost(error)`` called.

    What raises may be anybody's (memory has run out); what depends on the thread must not wait for it for ever.
    """

    def __init__(
        self, target: Callable[[], Any], name: str, lost: Callable[[BaseException], Any] | None = None
    ) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._lost = lost

    def start(self) -> None:
        """Start it. It acts for the worker that the calling thread acts for."""
        self._acting = ACTING.get()[-1:]  # its context has no variables of this one's
        # A handler that raised in Thread.start, which does not know whether the thread has begun then, would end the thread.
        signals.put_off_during(self._start)

    def _start(self) -> None:
        _running.add(self)
        try:
            _time.start(self)
        except BaseException:
            _running.discard(self)
            raise

    def run(self) -> None:
        """Call it."""
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
    """Drop those that are gone; any number of threads may be at it."""
    for _ in range(len(_leaving)):
        try:
            thread = _leaving.popleft()
        except IndexError:
            return
        if _is_there(thread):
            _leaving.append(thread)


def _is_engaged(frame: FrameType | None) -> bool:
    """Say whether a thread with this stack runs code of others."""
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
        time.sleep(0.001)  # they need the interpreter


def _after_fork() -> None:
    _leaving.clear()
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)
