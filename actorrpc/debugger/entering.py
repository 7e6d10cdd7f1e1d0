"""Brings another thread, which runs Python code, into the debugger: it calls a function of ours at its next line.

CPython 3.11 has no function for that, but what such a function is made of: a trace function is set for the other thread, which
calls ``enter`` within that thread at its next event, and is gone. A thread that is in code in C comes to it later, or never.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from actorrpc import _stacks

__all__ = ["enter"]

_LINE: Final = 2  # PyTrace_LINE
_api: Final = ctypes.pythonapi
_TRACE: Final = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.py_object, ctypes.py_object, ctypes.c_int, ctypes.c_void_p
)


def _declared(name: str, result: Any, *arguments: Any) -> Any:
    found = getattr(_api, name, None)
    if found is not None:
        found.restype, found.argtypes = result, arguments
    return found


_interpreter = _declared("PyInterpreterState_Get", ctypes.c_void_p)
_first = _declared("PyInterpreterState_ThreadHead", ctypes.c_void_p, ctypes.c_void_p)
_next = _declared(
    "PyThreadState_Next", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)  # the last one is for accumulate()
_frame_of = _declared("PyThreadState_GetFrame", ctypes.c_void_p, ctypes.c_void_p)
_let_go = _declared("Py_DecRef", None, ctypes.c_void_p)
_set_trace = _declared("_PyEval_SetTrace", ctypes.c_int, ctypes.c_void_p, _TRACE, ctypes.py_object)


def _event(run: Callable[[FrameType], bool], frame: FrameType, what: int, _argument: Any) -> int:
    """Be called by the interpreter, on the thread that was meant, at each event until ``run`` has returned True."""
    if what == _LINE and run(frame):  # a frame that is being left comes to no other line
        found: object = sys.gettrace()
        if found is run:
            sys.settrace(None)
    return 0


_EVENT: Final = _TRACE(_event)


def enter(thread: int, run: Callable[[FrameType], bool]) -> bool:
    """Have a thread call ``run(frame)`` at each line that it comes to, until that returns True; False if it was not found, as
    it has gone on meanwhile.

    ``run`` must not raise. It may set another trace function. The thread's own trace function, if it has one, is replaced.
    """
    frame = _stacks.top_frame(thread)
    if frame is None:
        return False
    # Between two instructions of ours, another thread may run and end, and the state that was found is no memory any more.
    # Therefore one call of C goes through all states, and sets the trace function of the one that is meant: it is at this frame.
    with _stacks.without_collection():  # finalisers are instructions as well
        head = map(_first, (_interpreter(),))
        steps = itertools.accumulate(itertools.chain(head, itertools.repeat(0)), _next)
        states, places = itertools.tee(itertools.takewhile(bool, steps))
        frames, taken = itertools.tee(map(_frame_of, places))
        meant = itertools.compress(states, map(operator.eq, frames, itertools.repeat(id(frame))))
        found = list(map(_set_trace, meant, itertools.repeat(_EVENT), itertools.repeat(run)))
        for each in taken:
            if each is not None:
                _let_go(each)
    return bool(found)
