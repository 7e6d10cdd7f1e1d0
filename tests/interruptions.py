"""Send a signal whose handler raises, at every step of the interpreter inside the library.

A step is a place in a function of the package or of ``threading`` where the interpreter checks for signals: after the call of a
C function, at the start of a Python function, and at the start of each loop iteration. A trace function raises the signal, so
its handler sees the same stack as for a signal that the kernel sends at that moment.
"""

from __future__ import annotations

import contextlib
import dis
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import actorrpc

__all__ = ["Interrupted", "Steps", "raising"]

_OURS = (os.path.dirname(actorrpc.__file__), threading.__file__)
_SIGNAL_CHECKS = frozenset(
    code
    for name, code in dis.opmap.items()
    if name.startswith(("CALL", "JUMP_BACKWARD", "RESUME")) and not name.startswith("CALL_INTRINSIC")
)
_NEVER = sys.maxsize
_tracers: list[Any] = []


class Interrupted(Exception):
    """Raised by the signal handler."""


@contextlib.contextmanager
def raising(number: int = signal.SIGUSR1) -> Iterator[list[int]]:
    """Install a handler that raises ``Interrupted``; each call of it adds an element to the yielded list."""
    raised: list[int] = []

    def handler(number: int, _: FrameType | None) -> None:
        raised.append(number)
        raise Interrupted

    before = signal.signal(number, handler)
    try:
        yield raised
    finally:
        signal.signal(number, before)


class Steps:
    """Counts the steps that the library takes on this thread, and sends a signal at one of them."""

    def __init__(self, number: int = signal.SIGUSR1) -> None:
        self._number = number
        # Kept until the process ends. When a trace function disables tracing from within, the interpreter may call it once more
        # after releasing its reference (observed under load: a call of another method, or a crash).
        self._tracer = self._trace
        _tracers.append(self._tracer)
        self._at = _NEVER
        self._returned = False
        self.taken = 0
        self.place = ""

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        frame.f_trace_lines = False
        checks = True  # whether the last opcode of this frame made the interpreter check for signals
        self._returned = False
        code = frame.f_code.co_code

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal checks
            if event == "opcode":
                checked, checks = checks and not self._returned, code[frame.f_lasti] in _SIGNAL_CHECKS
                self._returned = False
                if checked:
                    self.taken += 1
                    if self.taken == self._at:
                        sys.settrace(None)
                        self.place = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                        signal.raise_signal(self._number)
                        return None
            elif event == "return":
                self._returned = True  # after a return, the caller does not check for signals
            elif event == "exception":
                checks = False
            return trace

        # Python 3.13 ignores f_trace_opcodes of a frame that has no trace function.
        frame.f_trace, frame.f_trace_opcodes = trace, True
        return trace

    def run(self, work: Callable[[], Any], at: int = _NEVER) -> Any:
        """Call ``work``; send the signal before step number ``at``."""
        self.taken, self._at, self.place = 0, at, ""
        before = sys.gettrace()
        sys.settrace(self._tracer)
        try:
            return work()
        finally:
            sys.settrace(before)

    def at_each(self, work: Callable[[], Any], raised: list[int], check: Callable[[str], None]) -> int:
        """Call ``work`` repeatedly, with the signal one step later each time; return the number of calls that were interrupted.

        Args:
            raised: the list of :func:`raising`. A deferred exception is awaited before the next call of ``work``.
            check: called after each call of ``work``, with the place where the signal was sent.
        """
        at, count = 1, 0
        swallowed: list[str] = []
        while True:
            del raised[:]
            try:
                self.run(work, at)
                if raised:
                    swallowed.append(f"{self.place} (step {at})")
            except Interrupted:
                pass
            if not self.place:
                assert not swallowed, f"the exception of the signal handler was swallowed: {swallowed}"
                return count
            try:
                late = threading.Event()
                while not raised:
                    late.wait(0.0005)
            except Interrupted:
                pass
            count += 1
            check(f"{self.place} (step {at})")
            at += 1
