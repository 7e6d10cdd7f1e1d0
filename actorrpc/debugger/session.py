"""A debug session: one call that ``breakpoint()`` (or a front end, or a failure) holds, and the front end that is attached to it.

The thread of the call writes, reads and waits here; the threads that read connections attach front ends and put in what they
say. What both use changes by single atomic steps (a deque, single assignments): there is no lock.

While the call is held, its callers are told repeatedly to move its deadline by a few seconds. When these messages end, the
deadline stays where it is.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from actorrpc.debugger.prompt import Prompt
from actorrpc.debugger.protocol import EVENT, HELD, OVER, RUNS, pack
from actorrpc.futures import interruption_point

if TYPE_CHECKING:
    from actorrpc.agent.calls import Execution
    from actorrpc.agent.peers import Peer
    from actorrpc.debugger.debugger import Debugger

__all__ = ["DebugSession"]

_log = logging.getLogger("actorrpc.debugger")
_LOOK_S: Final = 0.1  # how often a held call looks whether it is still wanted
_AHEAD_S: Final = 15.0  # by so much the deadlines of callers are put off before the time has passed
_PIECE: Final = 8 << 10  # characters that are sent together
_KEPT: Final = 64 << 10  # characters of the last stop, for a front end that comes later
_GO_ON: Final = "continue\n"


class DebugSession:
    """One call that is, or was, held.

    Attributes:
        number: names it in its worker.
        execution: the call; None for a thread that runs none.
        title: the call, in words.
        why: the reason for which it was held first.
        state: ``HELD``, ``RUNS`` (between two stops) or ``OVER``.
        since: when it was held last, on the monotonic clock.
        place: where that was: the file, the line, and the name of the function.
        attached: the front end.
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
        self._shown: deque[str] = deque()  # of this stop
        self._shown_size = 0
        self._put_off_until = 0.0
        self._asks = False  # the prompt waits for a command

    @property
    def name(self) -> str:
        """What a front end calls it."""
        return f"{self._debugger.worker}:{self.number}"

    @property
    def where(self) -> str:
        """Its place, in words."""
        file, line, function = self.place
        return f"{os.path.basename(file)}:{line}, in {function}()"

    # -- for its prompt, on the thread of the call -----------------------------------------------------------------

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
        """Return the next command of the front end, as soon as there is one; where the call is to go on, a command for that."""
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
                _log.warning("%s is not held any more, %s: it goes on", self.title, why)
                self._asks = False
                return _GO_ON
            self._put_off(_AHEAD_S)
            interruption_point()
            self._come.wait(_LOOK_S)

    def stops(self, frame: FrameType) -> None:
        """See Console."""
        self.place = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        self._shown.clear()
        self._shown_size = 0
        self.since = self._put_off_until = time.monotonic()
        self.state = HELD
        self._debugger.held(self)
        self._tell({})

    def goes_on(self) -> None:
        """See Console."""
        self.flush()
        self._debugger.let_go(self)
        if self.state == HELD:
            self.state = RUNS
        self._put_off(0.0)
        self._tell({})

    def traced_no_more(self) -> None:
        """See Console: the session goes on as long as the call does, which may come to another breakpoint()."""

    def _put_off(self, ahead: float) -> None:
        """Have the deadlines of the callers put off until now and ``ahead`` seconds more."""
        until = time.monotonic() + ahead
        if self.execution is not None and (not ahead or until - self._put_off_until > ahead / 3):
            seconds, self._put_off_until = until - self._put_off_until, until
            self._debugger.put_off(self.execution, seconds)

    # -- for front ends: any thread ------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        """Put in a command."""
        self._lines.append(line.rstrip("\n") + "\n")
        self._come.set()

    def attach(self, peer: Peer) -> dict[str, Any]:
        """Attach a front end; returns what it is to show."""
        self.attached = peer
        return {
            "state": self.state,
            "asks": self._asks,
            "text": "".join(self._shown),
            "session": self.number,
        }

    def let_go(self) -> None:
        """Release the call, and do not hold it again, as its front end has ended."""
        self.attached = None
        self._lines.clear()
        self.say("quit")

    def end(self) -> None:
        """Tell the front end that the call has ended."""
        self.state = OVER
        self._tell({})

    def _tell(self, what: dict[str, Any]) -> None:
        peer = self.attached
        if peer is not None:
            self._debugger.notify(
                peer, EVENT, pack({"session": self.number, "state": self.state, "asks": self._asks, **what})
            )
