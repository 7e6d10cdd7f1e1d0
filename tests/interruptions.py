"""A handler of the program that raises, at every step of the interpreter inside of the library.

A step is a place where the interpreter looks for signals, in a function of the package or of ``threading``: behind a call of a
function written in C, at the beginning of one in Python, and where a loop begins anew. The signal is raised by a trace function,
so its handler finds the very stack that it would find if the kernel had sent it in that moment.
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
_LOOKS = frozenset(
    code for name, code in dis.opmap.items() if name.startswith(("CALL", "JUMP_BACKWARD", "RESUME"))
)
_NEVER = sys.maxsize
_tracers: list[Any] = []


class Interrupted(Exception):
    """What the handler raises."""


@contextlib.contextmanager
def raising(number: int = signal.SIGUSR1) -> Iterator[list[int]]:
    """Have the signal's handler raise; the list grows with each time that it does."""
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
        # Kept for as long as the process lives: where a trace function ends its own tracing from within, the interpreter may call
        # it once more after it has let go of it (seen beside load: another method in its place, or a crash).
        self._tracer = self._trace
        _tracers.append(self._tracer)
        self._at = _NEVER
        self._returned = False
        self.taken = 0
        self.place = ""

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        looks = True  # whether the interpreter has just looked for signals, in this frame
        self._returned = False
        code = frame.f_code.co_code

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal looks
            if event == "opcode":
                looked, looks = looks and not self._returned, code[frame.f_lasti] in _LOOKS
                self._returned = False
                if looked:
                    self.taken += 1
                    if self.taken == self._at:
                        sys.settrace(None)
                        self.place = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                        signal.raise_signal(self._number)
                        return None
            elif event == "return":
                self._returned = True  # the caller does not look then
            elif event == "exception":
                looks = False
            return trace

        return trace

    def run(self, work: Callable[[], Any], at: int = _NEVER) -> Any:
        """Do the work, with the signal sent before its ``at``-th step."""
        self.taken, self._at, self.place = 0, at, ""
        before = sys.gettrace()
        sys.settrace(self._tracer)
        try:
            return work()
        finally:
            sys.settrace(before)

    def at_each(self, work: Callable[[], Any], raised: list[int], check: Callable[[str], None]) -> int:
        """Do the work again and again, with the signal sent one step later each time; return how often.

        Args:
            raised: as :func:`raising` gives it: what is put off comes before the next time.
            check: called after each time, with the place where the signal was sent.
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
                assert not swallowed, f"what a handler had raised did not come out: {swallowed}"
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
