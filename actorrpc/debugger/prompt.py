"""A pdb for a held call, which reads and writes through a debug session and stops in frames of the user's code only.

Differences to pdb: ``quit`` removes the call's breakpoints and continues the call. Tracing ends when the outermost frame of the
user's code returns, because the thread runs other calls afterwards. The output of a command goes to the session, while the output
of other threads does not. Breakpoints are removed at the end of the call.
"""

from __future__ import annotations

import bdb
import dis
import io
import pdb
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from actorrpc._exceptions import line_of

if TYPE_CHECKING:
    from actorrpc.debugger.session import DebugSession

__all__ = ["Prompt", "is_outside", "users_frames"]

_PACKAGE: Final = __name__.partition(".")[0]
_OUTSIDE: Final = (_PACKAGE, "asyncio", "threading")
# The instruction of a suspended frame: YIELD_VALUE, or in Python 3.12 and 3.13 the instruction after it.
_YIELDS: Final = frozenset({dis.opmap["YIELD_VALUE"], dis.opmap["RESUME"]})


def is_outside(frame: FrameType) -> bool:
    """Return whether a frame belongs to code that calls the user's code: this package, an event loop, or threading."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OUTSIDE


def users_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the innermost consecutive frames of the user's code in a stack, the innermost first.

    Skips the innermost frames of this package, event loops and threading; the list ends before the next such frame.
    """
    while frame is not None and is_outside(frame):
        frame = frame.f_back
    found = []
    while frame is not None and not is_outside(frame):
        found.append(frame)
        frame = frame.f_back
    return found


class Prompt(pdb.Pdb):
    """The pdb of one call. It runs on the thread of the call; ``console`` is its input and output, and learns of its stops."""

    def __init__(self, console: DebugSession) -> None:
        super().__init__(
            stdin=console,  # type: ignore[arg-type]
            stdout=console,  # type: ignore[arg-type]
            nosigint=True,
            readrc=False,
            skip=[f"{each}{rest}" for each in _OUTSIDE for rest in ("", ".*")],
        )
        self.use_rawinput = False
        self.breaks = {}  # the base class has copied the breakpoints of other calls of this process
        self.prompt = "(Pdb) "
        self._console = console
        self._outermost: FrameType | None = None
        self._own_breakpoints: list[bdb.Breakpoint] = []

    @property
    def traces(self) -> bool:
        """Whether the call is traced, so that it may stop at another line."""
        return self._outermost is not None

    # -- beginning and ending ---------------------------------------------------------------------------------

    def trace(self, frame: FrameType) -> None:
        """Stop at the next line of ``frame``; called on the thread of the call."""
        self._trace(frame)
        sys.settrace(self.trace_dispatch)

    def hold(self, frame: FrameType) -> None:
        """Stop at once, at the current line of ``frame``; called on the thread of the call, in a trace function or a wait."""
        self._trace(frame)
        self.interaction(frame, None)
        if self._outermost is not None:
            sys.settrace(self.trace_dispatch)

    def examine(self, error: BaseException) -> None:
        """Stop in the frame in which an exception was raised that has ended the call; the call cannot be resumed there."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None and is_outside(trace.tb_frame):
            trace = trace.tb_next
        self.reset()
        self.botframe = trace.tb_frame if trace is not None else None
        self.message(line_of(error))
        self.interaction(None, trace)

    def _trace(self, frame: FrameType) -> None:
        self.reset()
        frames = users_frames(frame) or [frame]
        for each in frames:
            each.f_trace = self.trace_dispatch
        self._outermost = self.botframe = frames[-1]
        self.set_step()

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """See bdb.Bdb."""
        if event == "call" and not self._is_within(frame):
            return None
        found = super().trace_dispatch(frame, event, arg)
        if event == "return" and frame is self._outermost and not _is_suspended(frame):
            self.close()
            return None
        return found

    def _is_within(self, frame: FrameType | None) -> bool:
        """Return whether a frame belongs to the debugged call. While the call's coroutine awaits, the thread runs other code."""
        while frame is not None and frame is not self._outermost:
            frame = frame.f_back
        return frame is not None

    def close(self) -> None:
        """End tracing, and remove the breakpoints of this call."""
        sys.settrace(None)
        self._clear_own()
        frame, self._outermost = self._outermost, None
        if frame is not None:
            frame.f_trace = None

    def interaction(self, frame: FrameType | None, *trace: Any) -> None:
        """See pdb.Pdb: read commands until one of them continues the call."""
        at = frame
        if at is None:
            last = trace[0]
            while last is not None and last.tb_next is not None:
                last = last.tb_next
            at = last.tb_frame if last is not None else sys._getframe()
        try:
            # stops() is in the try block: a cancellation may interrupt each later statement, and resumes() must run then, too.
            self._console.stops(at)
            super().interaction(frame, *trace)
        finally:
            self._console.resumes()

    def _cmdloop(self) -> None:
        self.cmdloop()  # pdb's method catches KeyboardInterrupt; this method does not, so an interruption ends the call

    # -- commands -----------------------------------------------------------------------------------------------

    def set_continue(self) -> None:
        """See bdb.Bdb."""
        super().set_continue()
        if not self.breaks:
            self.close()

    def set_break(self, *args: Any, **kwargs: Any) -> Any:
        """See bdb.Bdb."""
        before = len(bdb.Breakpoint.bpbynumber)
        found = super().set_break(*args, **kwargs)
        self._own_breakpoints += [each for each in bdb.Breakpoint.bpbynumber[before:] if each is not None]
        return found

    def do_quit(self, arg: str) -> Any:
        """q(uit) | exit

        Continue the call as if it had not been held.
        """
        self._clear_own()
        return self.do_continue(arg)

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> Any:
        """EOF

        The same as quit.
        """
        return self.do_quit(arg)

    def _clear_own(self) -> None:
        for each in self._own_breakpoints:
            if bdb.Breakpoint.bpbynumber[each.number] is each:
                self.clear_bpbynumber(each.number)
        self._own_breakpoints.clear()

    def _not_here(self, arg: str) -> None:
        self.error("this command is not available when a call is debugged remotely")

    do_run = do_restart = do_interact = do_debug = _not_here

    def onecmd(self, line: str) -> bool:
        """See cmd.Cmd. Errors of a command (a repr that raises, sys.exit() at the prompt) are printed and do not end the call."""
        try:
            return super().onecmd(line)
        except (Exception, SystemExit) as error:
            self.error(line_of(error))
            return False

    def default(self, line: str) -> None:
        """Run a line as Python code in the current frame; its output goes to the session."""
        text = line[1:].strip() if line[:1] == "!" else line
        frame = self.curframe
        names, values = frame.f_globals, self.curframe_locals  # type: ignore[union-attr]
        with _printing_to(self._console.write):
            try:
                code = compile(text, "<stdin>", "eval")
            except SyntaxError:
                exec(compile(text + "\n", "<stdin>", "exec"), names, values)
                return
            found = eval(code, names, values)
            if found is not None:
                self.message(repr(found))


def _is_suspended(frame: FrameType) -> bool:
    """Return whether a frame has not returned but is suspended: a coroutine that awaits, or a generator that has yielded."""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in _YIELDS


# -- the output of commands ----------------------------------------------------------------------------------------


class _ByThread(io.TextIOBase):
    """Replaces ``sys.stdout`` while commands run: their threads print to their sessions, other threads to ``usual``."""

    def __init__(self, usual: Any) -> None:
        self.usual = usual
        self.writers: dict[int, Callable[[str], Any]] = {}

    def write(self, text: str) -> int:
        """See io.TextIOBase."""
        writer = self.writers.get(threading.get_ident())
        if writer is None:
            return int(self.usual.write(text))
        writer(text)
        return len(text)

    def flush(self) -> None:
        """See io.TextIOBase."""
        if threading.get_ident() not in self.writers:
            self.usual.flush()

    def fileno(self) -> int:
        """See io.TextIOBase."""
        return int(self.usual.fileno())

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """See io.TextIOBase."""
        return str(self.usual.encoding)


#: guards the replacement of ``sys.stdout``; no other lock is taken under it
_printing: Final = threading.Lock()
_stand_in: _ByThread | None = None


@contextmanager
def _printing_to(write: Callable[[str], Any]) -> Iterator[None]:
    global _stand_in
    thread = threading.get_ident()
    with _printing:
        if _stand_in is None or sys.stdout is not _stand_in:
            _stand_in = sys.stdout = _ByThread(sys.stdout)
        used = _stand_in
        outer = used.writers.get(thread)
        used.writers[thread] = write
    try:
        yield
    finally:
        with _printing:
            if outer is not None:
                used.writers[thread] = outer
            else:
                used.writers.pop(thread, None)
            if not used.writers and sys.stdout is used:
                sys.stdout, _stand_in = used.usual, None
