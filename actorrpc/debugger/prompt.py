"""pdb, for a call that is held: it reads and writes through a debug session, and never leaves the user's part of the stack.

What differs from pdb: ``quit`` lets the call go on, as ``continue`` does; tracing ends with the outermost frame of the user's
code, as the thread has other calls to run; what a command prints goes to the session, and what other threads print at that
moment does not; breakpoints end with the call.
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
from typing import Any, Final, Protocol

from actorrpc._exception_text import line_of

__all__ = ["Console", "Prompt", "users_frames"]

_PACKAGE: Final = __name__.partition(".")[0]
_OUTSIDE: Final = (_PACKAGE, "asyncio", "threading")
_YIELDS: Final = dis.opmap["YIELD_VALUE"]


def _is_outside(frame: FrameType) -> bool:
    """Whether a frame is of code that runs the user's code: this package, or an event loop."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OUTSIDE


def users_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of the user's code that a stack ends with, the innermost first: below them is what runs it."""
    while frame is not None and _is_outside(frame):
        frame = frame.f_back
    found = []
    while frame is not None and not _is_outside(frame):
        found.append(frame)
        frame = frame.f_back
    return found


class Console(Protocol):
    """What a prompt reads from and writes to, and tells of its stops."""

    def write(self, text: str) -> int:
        """Take what is printed."""

    def flush(self) -> None:
        """Send it."""

    def readline(self) -> str:
        """Return the next command; waits for it."""

    def stops(self, frame: FrameType) -> None:
        """Hear that the call is held at a line, before anything is written of it."""

    def goes_on(self) -> None:
        """Hear that it is not held any more."""

    def traced_no_more(self) -> None:
        """Hear that no line of the call will be stopped at any more."""


class Prompt(pdb.Pdb):
    """The debugger of one call, on its thread."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            stdin=console,  # type: ignore[arg-type]
            stdout=console,  # type: ignore[arg-type]
            nosigint=True,
            readrc=False,
            skip=[f"{each}{rest}" for each in _OUTSIDE for rest in ("", ".*")],
        )
        self.use_rawinput = False
        self.breaks = {}  # those of other calls of this process are theirs
        self.prompt = "(Pdb) "
        self._console = console
        self._outermost: FrameType | None = None
        self._own_breakpoints: list[bdb.Breakpoint] = []

    @property
    def traces(self) -> bool:
        """Whether it may stop at another line."""
        return self._outermost is not None

    # -- beginning and ending ---------------------------------------------------------------------------------

    def trace(self, frame: FrameType) -> None:
        """Stop at the next line of ``frame``; on its own thread."""
        self._trace(frame)
        sys.settrace(self.trace_dispatch)

    def hold(self, frame: FrameType) -> None:
        """Stop at once, where ``frame`` is; on its own thread, from within a trace function or a wait."""
        self._trace(frame)
        self.interaction(frame, None)
        if self._outermost is not None:
            sys.settrace(self.trace_dispatch)

    def examine(self, error: BaseException) -> None:
        """Stop where an exception was raised that has left the call."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None and _is_outside(trace.tb_frame):
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
            self.end()
            return None
        return found

    def _is_within(self, frame: FrameType | None) -> bool:
        """Whether a frame is of the call that is debugged: while its coroutine awaits, the thread runs other things."""
        while frame is not None and frame is not self._outermost:
            frame = frame.f_back
        return frame is not None

    def end(self) -> None:
        """Trace no more, and forget the breakpoints of this call."""
        sys.settrace(None)
        self._clear_own()
        frame, self._outermost = self._outermost, None
        if frame is not None:
            frame.f_trace = None
        self._console.traced_no_more()

    def interaction(self, frame: FrameType | None, *trace: Any) -> None:
        """See pdb.Pdb: read commands until one of them has the call go on."""
        at = frame
        if at is None:
            last = trace[0]
            while last is not None and last.tb_next is not None:
                last = last.tb_next
            at = last.tb_frame if last is not None else sys._getframe()
        try:
            # Within it: from here on the call is seen as held, and may be cancelled, which interrupts whatever runs.
            self._console.stops(at)
            super().interaction(frame, *trace)
        finally:
            self._console.goes_on()

    def _cmdloop(self) -> None:
        self.cmdloop()  # an interruption of the call ends it, and the call

    # -- commands -----------------------------------------------------------------------------------------------

    def set_continue(self) -> None:
        """See bdb.Bdb."""
        super().set_continue()
        if not self.breaks:
            self.end()

    def set_break(self, *args: Any, **kwargs: Any) -> Any:
        """See bdb.Bdb."""
        before = len(bdb.Breakpoint.bpbynumber)
        found = super().set_break(*args, **kwargs)
        self._own_breakpoints += [each for each in bdb.Breakpoint.bpbynumber[before:] if each is not None]
        return found

    def do_quit(self, arg: str) -> Any:
        """q(uit) | exit

        The debugger lets go of the call, which goes on as if it had not been held.
        """
        self._clear_own()
        return self.do_continue(arg)

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> Any:
        """EOF

        As quit.
        """
        return self.do_quit(arg)

    def _clear_own(self) -> None:
        for each in self._own_breakpoints:
            if bdb.Breakpoint.bpbynumber[each.number] is each:
                self.clear_bpbynumber(each.number)
        self._own_breakpoints.clear()

    def _not_here(self, arg: str) -> None:
        self.error("there is no such thing in a call that is debugged from elsewhere")

    do_run = do_restart = do_interact = do_debug = _not_here

    def onecmd(self, line: str) -> bool:
        """See cmd.Cmd. What a command raises is said, and does not end the call: sys.exit() at the prompt, a repr that fails."""
        try:
            return super().onecmd(line)
        except (Exception, SystemExit) as error:
            self.error(line_of(error))
            return False

    def default(self, line: str) -> None:
        """Run a line as Python, in the frame that is looked at; what it prints goes to the session."""
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
    """Whether a frame that is left will be entered again: a coroutine that awaits, a generator that has yielded."""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _YIELDS


# -- what commands print -------------------------------------------------------------------------------------------


class _ByThread(io.TextIOBase):
    """Stands in for ``sys.stdout`` while commands run: what their threads print goes to their sessions, all else as before."""

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


#: guards the stand-in for ``sys.stdout``; nothing is called under it
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
