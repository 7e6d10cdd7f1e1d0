"""The debugger's front end: lists the held calls, attaches to one of them, or sends commands to many.

Debugger commands are sent to the worker over the same kind of connection as other queries; there is no extra port. A
separate thread reads the terminal, so that the main thread can always answer the worker's heartbeats.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

from actorrpc._exceptions import undo_on_error
from actorrpc.cli.text import span, table
from actorrpc.debugger import EVENT, HELD, OVER, REQUEST, RUNS, pack, unpack
from actorrpc.errors import RpcError
from actorrpc.observe.model import HeldCall, ObservedWorker
from actorrpc.observe.visitor import Target, Visit

__all__ = ["Attached", "cast", "lines", "matching", "talk"]

_SLICE_S: Final = 0.05
_STEP_S: Final = 1.0  # how long the end of the input waits until a running call is held or has ended
_DETACH_S: Final = 1.0  # how long a worker may take to acknowledge a detach


@dataclass(slots=True)
class Attached:
    """A front end that is attached, or attaching, to a call. Not thread-safe.

    Attributes:
        name: the session's name.
        state: the call's state as the worker last reported it.
        asks: whether the call waits for a command.
        text: output of the worker that was not shown yet.
    """

    name: str
    visit: Visit
    session: int = 0
    state: str = ""
    asks: bool = False
    text: list[str] = field(default_factory=list)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def to(cls, held: str, target: Target, until: float) -> Attached:
        """Attach to the held call with the session name ``held``.

        Raises:
            OSError, RpcError: attaching failed.
        """
        made = cls(held, Visit(target, until), int(held.rpartition(":")[2]))
        with undo_on_error(made.visit.close):
            made._query({"do": "attach", "session": made.session}, until)
        return made

    @classmethod
    def entering(cls, title: str, actor_id: str, target: Target, until: float) -> Attached:
        """Interrupt an actor's running call (or hold the idle actor), and attach.

        Raises:
            OSError, RpcError: attaching failed.
        """
        made = cls(title, Visit(target, until))
        with undo_on_error(made.visit.close):
            made._query({"do": "enter", "actor": actor_id}, until)
            while not made.session or not made.asks:
                if time.monotonic() > until:
                    raise RpcError(
                        f"{title} has reached no line of Python where it could be held: it runs C code, or waits for "
                        "something outside of actorrpc. actorrpc stack shows where it is"
                    )
                made.hear(until)
            made.name = f"{made.visit.name}:{made.session}"
        return made

    def _query(self, request: dict[str, Any], until: float) -> dict[str, Any]:
        number = next(self._numbers)
        self.visit.tell(REQUEST, pack({**request, "id": number}))
        answer: dict[str, Any] | None = None
        while answer is None and time.monotonic() < until:
            for body in self.visit.hear(EVENT, until):  # may also return events that follow the answer
                found = unpack(body)
                if found.get("id") == number:
                    answer = found
                self._receive(found)
        if answer is not None:
            if "error" in answer:
                raise RpcError(str(answer["error"]))
            return answer
        raise TimeoutError(f"worker {self.visit.name!r} has not answered in time")

    def hear(self, until: float) -> None:
        """Wait for messages of the worker, at most until ``until``, and process them."""
        for body in self.visit.hear(EVENT, until):
            self._receive(unpack(body))

    def _receive(self, found: dict[str, Any]) -> None:
        session = found.get("session")
        if type(session) is not int or session != (self.session or session):
            return
        self.session = session
        self.state = str(found.get("state", ""))
        self.asks = found.get("asks") is True
        if "text" in found:
            self.text.append(str(found["text"]))

    def say(self, line: str) -> None:
        """Send a command to the debugger that holds the call."""
        self.asks = False
        self.visit.tell(REQUEST, pack({"do": "say", "session": self.session, "line": line}))

    def shown(self) -> str:
        """Return the output that was not shown yet, and clear it."""
        found, self.text = "".join(self.text), []
        return found

    def detach(self) -> None:
        """Detach, wait at most 1 s until the worker lets another front end attach, and close the connection."""
        try:
            self._query({"do": "detach", "session": self.session}, time.monotonic() + _DETACH_S)
        except (OSError, RpcError):  # the worker, or the call, has ended
            pass
        self.visit.close()


# -- listing -------------------------------------------------------------------------------------------------------


def matching(workers: Iterable[ObservedWorker], actors: Collection[str], which: str) -> list[HeldCall]:
    """Return the held calls that ``which`` selects: a session, worker or call, one of ``actors`` (ids), or ``all``."""
    found = [(worker, each) for worker in workers for each in worker.held]
    exact = [each for _, each in found if each.session == which]
    if exact or which == "all":
        return exact or [each for _, each in found]
    return [each for worker, each in found if which in (worker.name, each.call) or each.actor_id in actors]


def lines(held: Sequence[HeldCall]) -> list[str]:
    """Return the held calls as a table."""
    if not held:
        return [
            "no call is held; breakpoint() in a method holds its call, and actorrpc debug ACTOR --now holds a running call"
        ]
    return table(
        ["SESSION", "CALL", "WHERE", "SINCE", "HELD BY"],
        [
            (
                each.session,
                each.call,
                f"{each.file}:{each.line} in {each.function}()",
                span(each.since) if each.is_held else "runs",
                each.why + (", attached" if each.attached else ""),
            )
            for each in held
        ],
    )


# -- commands -------------------------------------------------------------------------------------------------------


def talk(attached: Attached, read: TextIO, write: Callable[[str], Any], is_terminal: bool) -> bool:
    """Run a session with a held call until the call has ended or the user detaches; return whether the call has ended.

    A line of the input is sent when the call asks for a command. ``detach``, the end of the input, and Ctrl-C detach: a held
    call stays held. After a command that lets the call run, the next line waits until the call is held again; the end of the
    input and ``detach`` wait at most ``_STEP_S`` for that.
    """
    typed: queue.Queue[str | None] = queue.Queue()
    wanted, ended = threading.Semaphore(0), threading.Event()

    def type_in() -> None:
        # On a terminal, read a line only when the call needs it: lines after the end of the session are for the shell.
        while wanted.acquire() and not ended.is_set():
            line = read.readline()
            typed.put(line or None)
            if not line:
                return

    threading.Thread(target=type_in, name="typed", daemon=True).start()
    waits_for_line = told = False
    said = 0.0
    try:
        while True:
            write(attached.shown())
            if attached.state == OVER:
                return True
            if (attached.asks or not is_terminal) and not waits_for_line:
                waits_for_line, told = True, False
                wanted.release()
            if not attached.asks and attached.state != HELD and not told and is_terminal:
                told = True
                write("(the call runs; Ctrl-C detaches)\n")
            line = typed.queue[0] if not typed.empty() else ""
            ends = line is None or line.strip() == "detach"
            # A line is used when the call asks for a command. ``detach`` and the end of the input are also used if the call
            # still runs _STEP_S after the last command.
            late = attached.state == RUNS and time.monotonic() > said + _STEP_S
            if line == "" or not (attached.asks or (ends and late)):
                attached.hear(time.monotonic() + _SLICE_S)
                continue
            typed.get_nowait()
            waits_for_line = False
            if line is None or ends:
                if line is None and is_terminal:
                    write("\n")
                break
            attached.say(line)
            said = time.monotonic()
    except KeyboardInterrupt:
        write("\n")
    except ConnectionError:
        if attached.state == HELD:
            raise
        return True  # the worker has left the group, so the call has ended
    finally:
        ended.set()
        wanted.release()
    attached.detach()
    return False


def cast(
    sessions: Sequence[Attached], commands: Sequence[str], timeout: float
) -> list[tuple[list[str], str, bool]]:
    """Send commands to many held calls: each command to all calls, then wait at most ``timeout`` seconds for its answers.

    Returns:
        For each different answer: the names of its sessions, its text, and whether the calls are held again or have ended. If
        not, they are running.
    """
    texts: dict[str, list[str]] = {each.name: [] for each in sessions}
    late: set[str] = set()
    for each in sessions:
        each.shown()
    for command in commands:
        asked = [each for each in sessions if each.state != OVER and each.name not in late]
        for each in asked:
            each.say(command)
        until = time.monotonic() + timeout
        for each in asked:
            # Wait until the call asks for the next command or has ended; meanwhile it may report that it runs.
            while not each.asks and each.state != OVER and time.monotonic() < until:
                each.hear(min(until, time.monotonic() + _SLICE_S))
            texts[each.name].append(each.shown().removesuffix("(Pdb) "))
            if not each.asks and each.state != OVER:
                late.add(each.name)
    folded: dict[tuple[str, bool], list[str]] = {}
    for each in sessions:
        folded.setdefault(("".join(texts[each.name]), each.name not in late), []).append(each.name)
    return [(names, text, complete) for (text, complete), names in folded.items()]
