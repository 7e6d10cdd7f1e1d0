"""The flight recorder: the last calls of a worker, each with its moments, written when it is over.

Always on, so that what led to a fault can still be seen after it. A record is a tuple in a ring of :data:`KEPT`: one for a call
that was made here (:meth:`FlightRecorder.called`), one for a call that was executed here (:meth:`FlightRecorder.executed`), and
one for anything else that took a time (:meth:`FlightRecorder.noted`). The two halves of a call are found by the name of the
caller, the name of the callee, and the call's number between them.

Moments are seconds on this process's clock (``actorrpc._time``). The names in records are texts that exist anyway; nothing of a
user's is kept alive, and nothing is written into the ring under a lock: ``append`` is one atomic step.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final

from actorrpc import _time
from actorrpc.wire.frames import REPLY

if TYPE_CHECKING:
    from actorrpc.wire.frames import Frame

__all__ = [
    "CALLED",
    "COPIED_BYTES",
    "EXECUTED",
    "KEPT",
    "NOTED",
    "OWN",
    "OWN_MODULES",
    "UNDER_WAY",
    "FlightRecorder",
    "method_of",
    "name_of",
]

KEPT: Final = 32768
"""Records; at about 400 bytes each, at most 13 MiB."""

CALLED: Final = 0
"""``(number, CALLED, made, answered, id, callee, chain, method, thread, failed, waits, bytes out, bytes in)``; ``waits``:
its thread has waited for it."""

EXECUTED: Final = 1
"""``(number, EXECUTED, arrived, begun, ended, id, caller, chain, method, thread, failed, actor)``"""

COPIED_BYTES: Final = 1 << 20
"""Copies of tensors and of other large memory are written down from this size on."""

NOTED: Final = 2
"""``(number, NOTED, begun, ended, kind, what, thread)``"""

UNDER_WAY: Final = -1
"""The number of what is not over, and therefore in no ring: a worker that is asked for its records adds such ones, which end at
that moment. Of an execution whose turn has not come, ``begun`` and ``ended`` are both that moment. Thread 0 is none."""


_MODULES: Final = 4096  # modules whose functions are called; more are forgotten, and looked at again
OWN: Final = "actorrpc."
"""What the names begin with of calls that the package makes for itself: of its functions, without their modules."""


def method_of(actor: str, method: str) -> str:
    """Return how metrics and traces name a method: ``Class/method``; of a function its name alone. Actors have no part in it."""
    if actor:
        return f"{actor.partition('#')[0].partition('(')[0]}/{method}"
    kind, dot, name = method.rpartition(".")
    return f"{kind}/{name}" if dot and not kind.endswith("<locals>") else method


_NAMED: Final = frozenset({FunctionType, BuiltinFunctionType, MethodType, type})


class _OwnModules(dict[Any, bool]):
    """Whether a module, by its name, is one of this package."""

    def __missing__(self, module: Any) -> bool:
        if len(self) >= _MODULES:
            self.clear()
        found = self[module] = type(module) is str and module.startswith(OWN)
        return found


OWN_MODULES: Final = _OwnModules()
"""Asked on the path of every call, and therefore a table: ``type(function) is FunctionType and OWN_MODULES[function.__module__]``
says whether a function is one that the package calls for itself."""


def name_of(function: Any) -> str:
    """Return how a function that is called is named: of an object that can be called, its class; its attributes are its own."""
    if type(function) is FunctionType and OWN_MODULES[function.__module__]:
        return f"{OWN}{function.__qualname__}"
    return str(function.__qualname__ if type(function) in _NAMED else type(function).__qualname__)


class FlightRecorder:
    """The ring of one worker. Thread-safe."""

    __slots__ = ("_next", "_ring", "_write")

    def __init__(self, kept: int = KEPT) -> None:
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=kept)
        self._write: Callable[[tuple[Any, ...]], None] = self._ring.append
        self._next: Callable[[], int] = itertools.count().__next__

    def called(self, call: Any, reply: Frame | None) -> None:
        """Write down an agent's ``Call`` that is over; ``reply``: its answer, None where there is none."""
        self._write(
            (
                self._next(),
                CALLED,
                call.made,
                _time.now(),
                call.id,
                call.peer.name,
                call.chain,
                call.label,
                call.thread,
                reply is None or reply[0] != REPLY,
                call.future is None,
                call.size or len(call.frame),
                0 if reply is None else len(reply[6]),
            )
        )

    def executed(self, execution: Any, failed: bool) -> None:
        """Write down an agent's ``Execution`` that is answered."""
        actor, what = execution.actor, execution.what
        if type(what) is not str:  # name_of(), without the call: this is on the path of every call
            if type(what) is FunctionType and OWN_MODULES[what.__module__]:
                what = f"{OWN}{what.__qualname__}"
            else:
                what = what.__qualname__ if type(what) in _NAMED else type(what).__qualname__
        self._write(
            (
                self._next(),
                EXECUTED,
                execution.arrived,
                execution.begun,
                _time.now(),
                execution.id,
                execution.peer.name,
                execution.chain,
                what,
                execution.thread,
                failed,
                "" if actor is None else actor.title,
            )
        )

    def noted(self, begun: float, kind: str, what: str) -> None:
        """Write down something that began at ``begun`` and is over now, on this thread: a restart, a stream, a pass, a copy."""
        self._write((self._next(), NOTED, begun, _time.now(), kind, what, threading.get_ident()))

    @property
    def total(self) -> int:
        """How many records were written, those included that have been overwritten."""
        try:
            return int(self._ring[-1][0]) + 1
        except IndexError:
            return 0

    def since(self, first: int, most: int) -> list[tuple[Any, ...]]:
        """Return up to ``most`` of the records that are still there, from number ``first`` on, in order."""
        while True:
            try:
                ring = list(self._ring)
                break
            except RuntimeError:  # another thread has written
                continue
        # Two threads that write at the same moment may do so in the other order than they have got their numbers.
        begin = max(0, first - ring[0][0] - 64) if ring else 0
        return sorted(each for each in ring[begin : begin + most + 128] if each[0] >= first)[:most]
