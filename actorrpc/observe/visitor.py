"""A visitor (:mod:`actorrpc.transport.visit`) queries workers from a process that is in no group.

A question and its answer are notices, plain values packed by msgpack. A question names the requested parts and, for parts that
are sent in pages, where the page begins. An answer has at most one page of each part, and its key ``"next"`` gives the begin of
the following pages. For records, a negative begin counts from the end: -100 requests the last 100. The parts ("it" is the queried
worker):

* ``process``: the process and its connections. ``actors``: the actors that it hosts. ``supervised``: the table of the actors that
  it supervises. ``holders``: which workers have references to the values that it owns. ``threads``: stacks.
* ``members``: the records of the group's workers that it can list without querying other workers.
* ``logs``: the output of the processes that it has started.
* ``records``: the records of its flight recorder, unfinished calls (with the first page), and the time on its clock.
* ``profiles``: the torch profiles that it keeps. ``metrics``: sums over its calls.

A question with ``"of"``, the incarnation of another worker, is passed on to that worker over an existing connection, once: the
answer is the other worker's, with the name of the worker that has passed it on under ``"through"``. If there is no such
connection, the answer has ``"problem"``.

A question ``{"id", "do", "whom"}`` requests an action; its answer is ``{"id", "problem"}``. Pickle is not used.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgpack

from actorrpc._exceptions import undo_on_error
from actorrpc.errors import ProtocolError, RpcError, UnknownWorkerError
from actorrpc.observe.trace import compare_clocks
from actorrpc.transport.visit import Target, Visitor
from actorrpc.wire.identity import WorkerRecord

__all__ = [
    "ACTING",
    "ANSWER",
    "ASK",
    "KeptVisits",
    "Question",
    "Target",
    "Visit",
    "names_by_pid",
    "pack",
    "patience",
    "unpack",
]

ASK: Final = "observe"
ANSWER: Final = "observed"
#: the prefix of the names of visitors that may request actions
ACTING: Final = "acting-visitor-"

_PAGED: Final = ("actors", "supervised", "holders", "threads", "logs", "records", "profiles")
_MAX_ANSWER: Final = 4 << 20  # bytes
_PATIENCE_S: Final = 1.0
_PAGES: Final = 200


def patience(timeout: float) -> float:
    """Return for how many seconds of a time-out a worker may send nothing before its query ends.

    A call in C may hold the worker's GIL for a while, so this is at least one second (or the time-out, if that is shorter).
    """
    return min(timeout, max(_PATIENCE_S, timeout / 5))


def pack(value: dict[str, Any]) -> bytes:
    """Pack a question or an answer."""
    packed: bytes = msgpack.packb(value, unicode_errors="replace")
    return packed


def unpack(body: bytes) -> dict[str, Any]:
    """Unpack a question or an answer.

    Raises:
        ProtocolError: the bytes are no question and no answer.
    """
    try:
        if len(body) > _MAX_ANSWER:
            raise ValueError("too long")
        found = msgpack.unpackb(body, strict_map_key=False, unicode_errors="replace")
        if not isinstance(found, dict) or type(found.get("id")) is not int:
            raise ValueError("not a map with a number")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"a question about this worker, or its answer, cannot be read: {error}"
        ) from error
    return found


def names_by_pid(found: dict[str, Any]) -> dict[int, str]:
    """Return the names of workers by process id, from an answer with the members or with the workers that have log lines."""
    names: dict[int, str] = {}
    printed = found.get("log_workers")
    for row in printed if isinstance(printed, list) else []:
        if isinstance(row, list) and [type(each) for each in row] == [int, str]:
            names[row[0]] = row[1]
    rows = found.get("members")
    for packed in rows if isinstance(rows, list) else []:
        with contextlib.suppress(RpcError, TypeError):
            record = WorkerRecord.from_bytes(packed)
            names[record.pid] = record.name
    return names


@dataclass(frozen=True, slots=True)
class Question:
    """A question to a worker.

    Attributes:
        target: the worker.
        parts: the requested parts of the worker's state.
        until: the time limit for the answer, also for connecting, on the monotonic clock.
        begin: by part: where the first page begins.
        silence: seconds without a byte from the worker after which a wait fails.
        of: the incarnation of another worker, to which the worker passes the question on; empty: the question is for the worker.
    """

    target: Target
    parts: list[str]
    until: float
    begin: dict[str, int] = field(default_factory=dict)
    silence: float = float("inf")
    of: str = ""

    def ask(
        self, send: Callable[[dict[str, Any]], dict[str, Any]], now: Callable[[], float]
    ) -> dict[str, Any]:
        """Request page after page (at most ``_PAGES``); return one answer with the rows of all pages.

        For records, the answer also has the comparison of clocks.

        Args:
            send: sends the message that requests a page, and returns the answer.
            now: reads the local clock.

        Raises:
            UnknownWorkerError: the worker did not pass the question on.
        """

        def page(parts: list[str], at: dict[str, int]) -> dict[str, Any]:
            found = send({"what": parts, "from": at, **({"of": self.of} if self.of else {})})
            if self.of and found.get("incarnation") != self.of:
                raise UnknownWorkerError(str(found.get("problem") or "it does not pass on questions"))
            return found

        whole: dict[str, Any] = {}
        wanted, at = self.parts, self.begin
        for _ in range(_PAGES):
            found = page(wanted, at)
            for part in _PAGED:
                if isinstance(found.get(part), list) and isinstance(whole.get(part), list):
                    found[part] = [*whole[part], *found[part]]
            whole |= found
            following = found.get("next")
            rows = following.items() if isinstance(following, dict) else ()
            at = {part: place for part, place in rows if part in self.parts and type(place) is int}
            if not at:
                break
            wanted = list(at)
        if "records" in self.parts:
            is_here = self.target.local_pid and not self.of  # a worker on this host uses the same clock
            whole["clock"] = (0.0, 0.0) if is_here else compare_clocks(page, now)
        return whole


class Visit(Visitor):
    """A connection of a visitor that queries one worker. Not thread-safe.

    Args:
        target: the worker.
        until: the time limit for connecting, on the monotonic clock.
        acts: allow :meth:`act`; the visitor gets a name by which the worker accepts actions.
        silence: seconds without a byte from the worker after which a wait fails.

    Raises the errors of :class:`~actorrpc.transport.visit.Visitor`.
    """

    def __init__(
        self, target: Target, until: float, *, acts: bool = False, silence: float = float("inf")
    ) -> None:
        super().__init__(target, until, name=ACTING if acts else "visitor-", silence=silence)
        self._numbers = 0

    def query(self, question: Question) -> dict[str, Any]:
        """Return the worker's answer, with all pages of the requested parts.

        Raises:
            OSError: the connection has ended (TimeoutError: no answer in time).
            ProtocolError: the worker sent something that is not valid.
            UnknownWorkerError: the worker did not pass the question on.
        """
        return question.ask(partial(self._say, until=question.until), time.monotonic)

    def act(self, what: str, whom: str, until: float, seconds: float = 0.0) -> str:
        """Request an action; return the problem that prevented it, or an empty string.

        ``seconds`` is the time-out of a drain; 0 for the default.

        Raises the errors of :meth:`query`.
        """
        asked = {"do": what, "whom": whom, "seconds": seconds}
        return str(self._say(asked, until).get("problem", ""))

    def _say(self, question: dict[str, Any], until: float) -> dict[str, Any]:
        self._numbers += 1
        self.tell(ASK, pack({"id": self._numbers, **question}))
        while True:
            for body in self._notices(ANSWER, until):
                found = unpack(body)
                if found["id"] == self._numbers:
                    return found


class KeptVisits:
    """Visits that stay open between two queries, because the handshake is the most expensive part of a query.

    A worker closes the connection of a visitor that has been silent for long; the next query then opens a new visit. Thread-safe,
    except for :meth:`pool` and :meth:`close`: the methods consist of atomic dict operations.

    Args:
        keeps: whether visits stay open; otherwise, each visit is closed after its query.
    """

    def __init__(self, keeps: bool = True) -> None:
        self._keeps = keeps
        self._visits: dict[str, Visit] = {}
        self._pool: ThreadPoolExecutor | None = None

    def pool(self, most: int) -> ThreadPoolExecutor:
        """Return a thread pool for queries, which is kept until :meth:`close`. Not thread-safe."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(most, "observe")
        return self._pool

    def query(self, question: Question) -> dict[str, Any]:
        """Query a worker, in the visit that was kept or in a new visit; for errors, see :class:`Visit`."""
        target = question.target
        visit = None if target.record is None else self._visits.pop(target.record.incarnation, None)
        if visit is not None:
            visit.silence = question.silence
            # On these errors, the worker has closed the connection, or another worker has its address now.
            with contextlib.suppress(ConnectionError, ProtocolError):
                return self._query(visit, question)
        return self._query(Visit(target, question.until, silence=question.silence), question)

    def _query(self, visit: Visit, question: Question) -> dict[str, Any]:
        with undo_on_error(visit.close):
            found = visit.query(question)
        self._keep(question.target, visit)
        return found

    def _keep(self, target: Target, visit: Visit) -> None:
        if target.record is None or not self._keeps:
            visit.close()
            return
        other = self._visits.pop(target.record.incarnation, None)
        self._visits[target.record.incarnation] = visit
        if other is not None:
            other.close()

    def keep_only(self, incarnations: Collection[str]) -> None:
        """Close the visits to workers that are not among the given incarnations."""
        for each in list(self._visits):
            if each not in incarnations and (visit := self._visits.pop(each, None)) is not None:
                visit.close()

    def close(self) -> None:
        """Close all visits and the pool. The object may be used again afterwards."""
        self.keep_only(())
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None
