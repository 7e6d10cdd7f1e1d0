"""A debug session: one call that is held by ``breakpoint()``, by a front end or after a failure, and its front end.

The thread of the call writes output, and waits for commands. The threads that read connections attach front ends and queue the
commands of the front ends. There is no lock: shared data changes by single atomic steps (a deque, single assignments).

While the call is held, the worker repeatedly sends the caller notices that extend the deadline of the call, by at most 15 s at a
time. After the hold, a last notice sets the total extension to the duration of the hold. If the worker dies, the deadline passes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from actorrpc.debugger import EVENT, HELD, OVER, RUNS, pack
from actorrpc.debugger.prompt import Prompt
from actorrpc.futures import interruption_point

if TYPE_CHECKING:
    from actorrpc.agent.calls import Execution
    from actorrpc.agent.peers import Peer
    from actorrpc.debugger.debugger import Debugger

__all__ = ["DebugSession"]

_log = logging.getLogger("actorrpc.debugger")
_LOOK_S: Final = 0.1  # how often a held call checks whether it must be released
_AHEAD_S: Final = 15.0  # how far ahead the deadline of the caller is extended while the call is held
_PIECE: Final = 8 << 10  # the most characters in one event
_KEPT: Final = 64 << 10  # the most characters of a stop's output that are kept for a later front end
_GO_ON: Final = "continue\n"


class DebugSession:
    """The session of a call that is or was held.

    Attributes:
        number: identifies the session on its worker.
        execution: the call; None for a thread that executes no call.
        title: describes the call.
        why: the reason for the latest hold.
        state: ``HELD``, ``RUNS`` (between two stops) or ``OVER``.
        since: when the call was stopped last, on the monotonic clock.
        place: the file, the line, and the name of the function of the last stop.
        thread: the identifier of the thread that is held.
        attached: the attached front end, or None.
    """

    def __init__(self, debugger: Debugger, execution: Execution | None, title: str, why: str) -> None:
        self.number = next(debugger.numbers)
        self.execution = execution
        self.title = title
        self.why = why
        self.state = RUNS
        self.since = 0.0
        self.place = ("", 0, "")
        self.thread = threading.get_ident()
        self.attached: Peer | None = None
        self.prompt = Prompt(self)
        self._debugger = debugger
        self._lines: deque[str] = deque()
        self._come = threading.Event()
        self._written: list[str] = []
        self._unsent = 0
        self._shown: deque[str] = deque()  # the output of the current stop
        self._shown_size = 0
        self._put_off_until = 0.0
        self._asks = False  # the prompt waits for a command

    @property
    def name(self) -> str:
        """The name by which a front end attaches to the session."""
        return f"{self._debugger.worker}:{self.number}"

    @property
    def where(self) -> str:
        """The place of the last stop, as text."""
        file, line, function = self.place
        return f"{os.path.basename(file)}:{line}, in {function}()"

    # -- for the prompt, on the thread of the call -----------------------------------------------------------------

    def write(self, text: str) -> int:
        """Append output for the front end."""
        self._written.append(text)
        self._unsent += len(text)
        if self._unsent >= _PIECE:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Send the output to the front end."""
        text, self._written, self._unsent = "".join(self._written), [], 0
        for begin in range(0, len(text), _PIECE):
            self._show(text[begin : begin + _PIECE])

    def _show(self, text: str) -> None:
        self._shown.append(text)
        self._shown_size += len(text)
        while self._shown_size > _KEPT:
            self._shown_size -= len(self._shown.popleft())
        self._tell({"text": text})

    def readline(self) -> str:
        """Wait for the next command of the front end and return it. If the call must be released, return ``continue``."""
        while True:
            self._come.clear()
            try:
                line = self._lines.popleft()
            except IndexError:
                if not self._asks:
                    self._asks = True
                    self._tell({})
            else:
                self._asks = False
                self._shown.clear()
                self._shown_size = 0
                return line
            why = self._debugger.why_not_held(self)
            if why:
                _log.warning("%s is no longer held, %s: it continues", self.title, why)
                self._asks = False
                return _GO_ON
            self._put_off(_AHEAD_S)
            interruption_point()
            self._come.wait(_LOOK_S)

    def stops(self, frame: FrameType) -> None:
        """Note that the call is held at a line, before output about that line is written."""
        self.place = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        self._shown.clear()
        self._shown_size = 0
        self.since = self._put_off_until = time.monotonic()
        self.state = HELD
        self._debugger.held(self)
        self._tell({})

    def resumes(self) -> None:
        """Note that the call is no longer held."""
        self.flush()
        self._debugger.let_go(self)
        if self.state == HELD:
            self.state = RUNS
        self._put_off(0.0)
        self._tell({})

    def _put_off(self, ahead: float) -> None:
        """Extend the callers' deadlines by the time of the hold, up to ``ahead`` seconds from now."""
        until = time.monotonic() + ahead
        if self.execution is not None and (not ahead or until - self._put_off_until > ahead / 3):
            seconds, self._put_off_until = until - self._put_off_until, until
            self._debugger.extend_deadline(self.execution, seconds)

    # -- for front ends: any thread ------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        """Queue a command."""
        self._lines.append(line.rstrip("\n") + "\n")
        self._come.set()

    def attach(self, peer: Peer) -> dict[str, Any]:
        """Attach a front end; return the answer for it, with the output of the current stop."""
        self.attached = peer
        return {
            "state": self.state,
            "asks": self._asks,
            "text": "".join(self._shown),
            "session": self.number,
        }

    def let_go(self) -> None:
        """Release the call for good, because its front end has disconnected."""
        self.attached = None
        self._lines.clear()
        self.say("quit")

    def close(self) -> None:
        """Tell the front end that the call has ended."""
        self.state = OVER
        self._tell({})

    def _tell(self, what: dict[str, Any]) -> None:
        peer = self.attached
        if peer is not None:
            self._debugger.notify(
                peer, EVENT, pack({"session": self.number, "state": self.state, "asks": self._asks, **what})
            )
