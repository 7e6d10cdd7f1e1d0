"""Makes another thread call a function at its next line of Python code, so that it enters the debugger.

CPython 3.11 has no API for this. :func:`enter` sets a trace function for the other thread by internal functions of CPython. The
interpreter calls the trace function on that thread at each new line, call or return of Python code. A thread that runs C code
is traced only after the return to Python code, which may be never.
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
)  # accumulate() passes two arguments; the function ignores the second
_frame_of = _declared("PyThreadState_GetFrame", ctypes.c_void_p, ctypes.c_void_p)
_let_go = _declared("Py_DecRef", None, ctypes.c_void_p)
_set_trace = _declared("_PyEval_SetTrace", ctypes.c_int, ctypes.c_void_p, _TRACE, ctypes.py_object)


def _event(run: Callable[[FrameType], bool], frame: FrameType, what: int, _argument: Any) -> int:
    """The trace function, which the interpreter calls on the other thread at each event until ``run`` has returned True."""
    if what == _LINE and run(frame):
        found: object = sys.gettrace()
        if found is run:
            sys.settrace(None)
    return 0


_EVENT: Final = _TRACE(_event)


def enter(thread: int, run: Callable[[FrameType], bool]) -> bool:
    """Make a thread call ``run(frame)`` at each line of Python code, until ``run`` returns True.

    Returns False if the thread was not found, because it has ended or its innermost frame has changed meanwhile. ``run`` must not
    raise. It may set another trace function. The thread's own trace function, if it has one, is replaced.
    """
    frame = _stacks.top_frame(thread)
    if frame is None:
        return False
    # Between two bytecodes of this function, the other thread may run and end, and its thread state would be freed. Therefore a
    # single call of C code (``list`` over iterators in C) goes through all thread states, and sets the trace function of the
    # state whose innermost frame is ``frame``.
    with _stacks.without_collection():  # finalisers would run bytecodes
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
