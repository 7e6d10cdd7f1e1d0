"""The flight recorder: the last calls of a worker, each with its times.

The recorder is on by default, so that a user can still see after a fault which calls led to it. A ring of :data:`KEPT` records
has a record for each call that this worker made (:meth:`FlightRecorder.on_answer`) or executed (:meth:`FlightRecorder.on_end`),
and for each restart, stream, backward pass and large copy (:meth:`FlightRecorder.noted`). The two records of a
call are found by its caller, its callee and its number (``id``), which is unique between these two workers.

Times are seconds on this process's clock (``actorrpc._time``).
"""

from __future__ import annotations

import itertools
import struct
import sys
import threading
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

from actorrpc import _time

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
    "in_words",
    "method_of",
    "name_of",
]

KEPT: Final = 32768
"""The number of records in the ring: 2.5 MB in all, which the kernel allocates as the ring fills."""

# In all records: ``number`` counts the records in the order of writing; ``id`` is the number of the call between the two workers;
# ``chain`` is the number of the chain of nested calls to which the call belongs; ``thread`` is the thread that made or ran it.

CALLED: Final = 0
"""``(number, CALLED, made, answered, id, callee, chain, method, thread, failed, waits, bytes out, bytes in)``; ``waits``: True
if the call was synchronous: the thread that made the call waited for it."""

EXECUTED: Final = 1
"""``(number, EXECUTED, arrived, begun, ended, id, caller, chain, method, thread, failed, actor)``"""

COPIED_BYTES: Final = 1 << 20
"""The fewest bytes of a copy (of tensors or other memory) for which there is a record."""

NOTED: Final = 2
"""``(number, NOTED, begun, ended, kind, what, thread)``"""

UNDER_WAY: Final = -1
"""The number in the record of a call that has not ended. Such a record is made on request and is not in the ring; its end is the
time of the request. For an execution that is still queued, ``begun`` is also that time, and the thread is 0."""

# A record begins with its number + 1 (0: the slot is empty) and its kind. Names are numbers from `_Names`.
_HEAD: Final = struct.Struct("<qB")
# failed, waits; callee, method; made, answered; id, chain, thread; bytes out, bytes in
_CALLED: Final = struct.Struct("<q B ? ? x 2i 2d 3Q 2q".replace(" ", ""))
# failed; caller, method, actor; arrived, begun, ended; id, chain, thread
_EXECUTED: Final = struct.Struct("<q B ? 2x 3i 3d 3Q".replace(" ", ""))
# kind, what; begun, ended; thread
_NOTED: Final = struct.Struct("<q B 3x 2i 2d Q".replace(" ", ""))
_SIZE: Final = max(_CALLED.size, _EXECUTED.size, _NOTED.size)
_pack_called: Final = _CALLED.pack_into
_pack_executed: Final = _EXECUTED.pack_into
_head_at: Final = _HEAD.unpack_from

_MODULES: Final = 4096  # the most modules in OWN_MODULES; a full table is emptied
_PUBLIC: Final = ("", "rpc", "autograd", "optim", "nn")  # the modules whose functions messages name
OWN: Final = "actorrpc."
"""The prefix of the names of the package's internal calls; the function's name without its module follows."""


def method_of(actor: str, method: str) -> str:
    """Return the name of a method in metrics and traces, ``Class/method``; the name of a function is unchanged."""
    if actor:
        return f"{actor.partition('#')[0].partition('(')[0]}/{method}"
    kind, dot, name = method.rpartition(".")
    return f"{kind}/{name}" if dot and not kind.endswith("<locals>") else method


_NAMED: Final = frozenset({FunctionType, BuiltinFunctionType, MethodType, type})


class _OwnModules(dict[Any, bool]):
    """A table from the name of a module to whether the module belongs to this package."""

    def __missing__(self, module: Any) -> bool:
        if len(self) >= _MODULES:
            self.clear()
        found = self[module] = type(module) is str and module.startswith(OWN)
        return found


OWN_MODULES: Final = _OwnModules()
"""``type(function) is FunctionType and OWN_MODULES[function.__module__]`` says whether a function is an internal function of the
package. Each call evaluates this, so the answers are kept in a table."""


def name_of(function: Any) -> str:
    """Return the name of a called function or class. For other callables, whose attributes may raise, return the class's name."""
    if type(function) is FunctionType and OWN_MODULES[function.__module__]:
        return f"{OWN}{function.__qualname__}"
    return str(function.__qualname__ if type(function) in _NAMED else type(function).__qualname__)


def in_words(label: str) -> str:
    """Return the name of a call for error messages. Names of the package's internal functions are replaced."""
    if not label.startswith(OWN):
        return label
    name = label.partition(" ")[0]
    modules = (sys.modules.get(f"{OWN}{each}".rstrip(".")) for each in _PUBLIC)
    is_public = any(name[len(OWN) :] in getattr(module, "__all__", ()) for module in modules)
    return name if is_public else "an internal function of actorrpc"


class _Names:
    """Numbers for the names in records. Thread-safe.

    The number of names is not bounded (each actor has its own), so old names are removed by generations. A generation ends when
    it has three names for each record of the ring. A record refers to names of the generation that was current when the record
    was written. When that generation is removed, two generations later, newer records have overwritten the record.
    """

    __slots__ = ("_limit", "_lock", "_next", "numbers", "texts")

    def __init__(self, kept: int) -> None:
        self._limit = 3 * kept
        self._lock = threading.Lock()  # guards adding; no other lock is taken under it
        self._next = 1
        self.numbers: dict[str, int] = {"": 0}
        self.texts: list[dict[int, str]] = [{0: ""}, {}]  # names by number: this generation, the last

    def add(self, name: str) -> int:
        """Return the number of a name, after assigning a number if it has none."""
        with self._lock:
            number = self.numbers.get(name)
            if number is None:
                if len(self.numbers) >= self._limit:
                    self.texts = [{0: ""}, self.texts[0]]
                    self.numbers = {"": 0}
                number = self._next
                self._next += 1
                self.texts[0][number] = name
                self.numbers[name] = number
            return number

    def text(self, number: int) -> str:
        """Return a name by its number."""
        current, before = self.texts
        return current.get(number) or before.get(number, "")


class FlightRecorder:
    """The ring of one worker. Thread-safe. An agent calls ``on_answer`` and ``on_end`` like the hooks of ``CallHooks``.

    ``pack_into`` writes a record into a buffer in one atomic step. A record therefore adds no object that Python's garbage
    collector counts, and refers to no call, frame or argument. Records in the form of tuples provoked a full collection of 80 ms
    while the ring filled.

    Args:
        kept: how many records the ring has; a power of two.
    """

    __slots__ = ("_last", "_mask", "_names", "_next", "_ring")

    def __init__(self, kept: int = KEPT) -> None:
        self._mask = kept - 1
        self._ring = bytearray(kept * _SIZE)
        self._names = _Names(kept)
        self._last = 0
        self._next: Callable[[], int] = itertools.count(1).__next__

    def on_answer(self, call: Any, error: BaseException | None) -> None:
        """Record an ended ``Call`` of an agent."""
        numbers, peer, label, reply = self._names.numbers, call.peer.name, call.label, call.outcome
        self._last = number = self._next()
        _pack_called(
            self._ring,
            (number & self._mask) * _SIZE,
            number,
            CALLED,
            error is not None,
            call.future is None,
            numbers.get(peer) or self._names.add(peer),
            numbers.get(label) or self._names.add(label),
            call.made,
            _time.now(),
            call.id,
            call.chain,
            call.thread,
            call.size or len(call.frame),
            0 if reply is None else len(reply[6]),
        )

    def on_end(self, execution: Any, error: BaseException | None) -> None:
        """Record an ended ``Execution`` of an agent."""
        actor, what, peer = execution.actor, execution.what, execution.peer.name
        if type(what) is not str:
            what = name_of(what)
        numbers = self._names.numbers
        self._last = number = self._next()
        now = _time.now()
        _pack_executed(
            self._ring,
            (number & self._mask) * _SIZE,
            number,
            EXECUTED,
            error is not None,
            numbers.get(peer) or self._names.add(peer),
            numbers.get(what) or self._names.add(what),
            0 if actor is None else numbers.get(actor.title) or self._names.add(actor.title),
            execution.received_at,
            execution.begun or now,
            now,
            execution.id,
            execution.chain,
            execution.thread,
        )

    def noted(self, begun: float, kind: str, what: str) -> None:
        """Record a restart, a stream, a backward pass or a copy, which began at ``begun`` and ends now, on this thread."""
        names = self._names.add(kind), self._names.add(what)
        self._last = number = self._next()
        place, thread = (number & self._mask) * _SIZE, threading.get_ident()
        _NOTED.pack_into(self._ring, place, number, NOTED, *names, begun, _time.now(), thread)

    @property
    def total(self) -> int:
        """How many records were written, overwritten records included."""
        # Threads set ``_last`` without a lock, so a slower thread may have replaced a higher number: look for later records.
        number = self._last
        while self._at(number + 1) == number + 1:
            number += 1
        return number

    def since(self, first: int, most: int) -> list[tuple[Any, ...]]:
        """Return up to ``most`` of the records that are still in the ring, from number ``first`` on, in order.

        A record that another thread is writing at this moment is left out.
        """
        total = self.total
        found: list[tuple[Any, ...]] = []
        for number in range(max(first, total - self._mask - 1) + 1, total + 1):
            place = (number & self._mask) * _SIZE
            record = self._record(bytes(self._ring[place : place + _SIZE]))
            if record[0] == number - 1:
                found.append(record)
                if len(found) == most:
                    break
        return found

    def _at(self, number: int) -> int:
        return int(_head_at(self._ring, (number & self._mask) * _SIZE)[0])

    def _record(self, slot: bytes) -> tuple[Any, ...]:
        text = self._names.text
        number, kind = _head_at(slot)
        if kind == CALLED:
            _, _, failed, waits, peer, what, made, answered, id, chain, thread, sent, received = (
                _CALLED.unpack_from(slot)
            )
            return (
                *(number - 1, CALLED, made, answered, id, text(peer), chain, text(what)),
                *(thread, failed, waits, sent, received),
            )
        if kind == EXECUTED:
            _, _, failed, peer, what, actor, *times, id, chain, thread = _EXECUTED.unpack_from(slot)
            return (
                *(number - 1, EXECUTED, *times, id, text(peer), chain, text(what)),
                *(thread, failed, text(actor)),
            )
        _, _, peer, what, begun, ended, thread = _NOTED.unpack_from(slot)
        return number - 1, NOTED, begun, ended, text(peer), text(what), thread
