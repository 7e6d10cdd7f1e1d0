"""Reads the state of a group for all browsers that have the page open: at most once a second, and only while a browser asks.

Coroutines wait for the next state, a *look*. Looks are taken in a thread, because they wait for workers. They stop when no
coroutine waits, and none has asked for a look for ``_IDLE_S``. All coroutines run in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, Protocol

from actorrpc._exceptions import undo_on_error
from actorrpc.cli.actions import PARTS, act
from actorrpc.cli.dashboard import payloads
from actorrpc.cli.logs import Line, Reader
from actorrpc.cli.views import Picture, rates
from actorrpc.errors import RpcError
from actorrpc.observe.assemble import Silent
from actorrpc.observe.call_sums import CallTotals
from actorrpc.observe.outside import FoundGroup, GroupLook
from actorrpc.observe.trace import Recording, write

__all__ = ["Feed", "FeedLook", "See", "encoded"]

_log = logging.getLogger("actorrpc.cli")

_EVERY_S: Final = 1.0
_IDLE_S: Final = 3.0
# The pause between two looks is at least this many times the processor time of the last look.
_REST: Final = 2.0
_CHEAP_S: Final = 0.02  # seconds of processor time: if a look takes more, most looks omit the actors
# The pause between two looks at the actors: this many times the last look's processor time, at most _MOST_S.
_SHARE: Final = 50
_MOST_S: Final = 10.0
_WINDOW: Final = 10  # rates and percentiles of calls are computed over this number of looks
_LOG_BYTES: Final = 16 << 20
_TRACED: Final = 100_000  # greatest number of records, of all workers, in a trace file


class See(Protocol):
    """Reads the state of the group once.

    Args:
        parts: the parts to read; see :mod:`actorrpc.observe.visitor`.
        begin: for parts that are sent in pages: part -> the number of the first item.

    Raises:
        RpcError, OSError: there is no group, or no worker answers.
    """

    def __call__(self, parts: list[str], begin: dict[str, int] | None = None) -> GroupLook: ...


@dataclass(slots=True, kw_only=True)
class FeedLook:
    """The state of a group at one moment.

    Attributes:
        number: increases with each look.
        picture: None if no worker has answered; ``problem`` says why.
        now: the data of the first view, as JSON values.
        rates: calls per second of each actor, by its id.
        calls: the rows of the view of calls; None if no browser has that view open.
        actors_at: when the state of the actors was read, on the monotonic clock.
    """

    number: int
    picture: Picture | None
    problem: str
    now: dict[str, Any]
    rates: dict[str, float] = field(default_factory=dict)
    calls: list[dict[str, Any]] | None = None
    actors_at: float = 0.0
    _body: bytes = b""

    def body(self) -> bytes:
        """Return ``now`` as JSON, encoded once for all browsers. On the event loop's thread."""
        if not self._body:
            self._body = encoded(self.now)
        return self._body


def encoded(value: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


class Feed:
    """Reads the state of the group for the browsers of one server. Each state that was read is a look.

    Args:
        see: reads the state of the group.
        groups: returns the groups whose logs are read.
        every: the least time between the starts of two looks, in seconds.
        acts: whether the page may also kill and restart actors, and drain workers.
        rest: closes connections. Called in any thread, when no coroutine needs further looks.
    """

    def __init__(
        self,
        see: See,
        groups: Callable[[], list[FoundGroup]],
        every: float = _EVERY_S,
        *,
        acts: bool = False,
        rest: Callable[[], object] = bool,
    ) -> None:
        self._see = see
        self._groups = groups
        self._every = every
        self.acts = acts
        self._rest = rest
        self._asked = self._calls_asked = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._published = asyncio.Event()
        self._look: FeedLook | None = None
        self._number = 0
        self._waiting = self._waiting_for_calls = 0  # coroutines that wait for the next look
        self._spent = 0.0  # processor time of the last look
        self._actors_due = float("-inf")  # when the next look includes the actors
        self._totals = CallTotals()
        self._window: deque[tuple[float, dict[Any, Any]]] = deque(maxlen=_WINDOW + 1)
        #: returns the stacks of all threads, equal stacks once
        self.stacks = _Shared(every, lambda: self._seen([*PARTS, "threads"], payloads.stacks, folds=[])).get
        #: returns which worker holds which memory
        self.memory = _Shared(
            every, lambda: self._seen(["process", "holders"], payloads.memory, objects=[], holders=[])
        ).get
        self._records_lock = asyncio.Lock()  # records are read for one request at a time
        self._logs_lock = asyncio.Lock()  # guards _logs
        self._logs = _LogLines(groups)

    async def after(self, number: int, *, calls: bool = False) -> FeedLook:
        """Return a look after look ``number``; with ``calls``, a look that has sums over calls, or that has failed."""
        while True:
            moment = time.monotonic()
            self._asked = moment
            if calls:
                self._calls_asked = moment
            if self._task is None or self._task.done():
                # The task has not begun, or has ended because there was no request for _IDLE_S: the last look is out of date.
                self._look = None
                self._task = asyncio.create_task(self._run())
            found = self._look
            if found is not None and found.number > number:
                if not calls or found.calls is not None or found.problem:
                    return found
            self._waiting += 1
            self._waiting_for_calls += calls
            try:
                await self._published.wait()
            finally:
                self._waiting -= 1
                self._waiting_for_calls -= calls

    async def close(self) -> None:
        """Stop taking looks."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def hang_up(self) -> None:
        """Close all connections to workers. Called after the event loop and its threads have ended."""
        self._logs.close()
        self._rest()

    async def _run(self) -> None:
        while self._is_wanted():
            await self._look_on()
            # A coroutine may call after() while the thread closes the connections, so the loop checks again.
            await asyncio.to_thread(self._rest)

    def _is_wanted(self) -> bool:
        return bool(self._waiting) or time.monotonic() - self._asked < _IDLE_S

    async def _look_on(self) -> None:
        while self._is_wanted():
            begun = time.monotonic()
            with_calls = bool(self._waiting_for_calls) or begun - self._calls_asked < _IDLE_S
            whole = self._look is None or self._look.picture is None or begun >= self._actors_due
            parts = list(PARTS) if whole else ["process"]
            if with_calls:
                parts.append("metrics")
            self._number += 1
            try:
                self._look = await asyncio.to_thread(self._collect, self._number, parts, self._look)
            except Exception as error:  # the failed look passes the error to the waiting coroutines
                _log.exception("the group could not be queried")
                self._look = _failed(self._number, repr(error))
            self._published.set()
            self._published = asyncio.Event()
            # This process takes processor time from the job, so looks at a very large group are less frequent.
            await asyncio.sleep(max(begun + self._every - time.monotonic(), _REST * self._spent))

    def _collect(self, number: int, parts: list[str], before: FeedLook | None) -> FeedLook:
        """Read the state of the group; runs in a thread of asyncio's pool."""
        begun = time.thread_time()
        try:
            return self._take_one(number, parts, before)
        finally:
            self._spent = time.thread_time() - begun
            if "actors" in parts:
                rest = min(_SHARE * self._spent, _MOST_S) if self._spent > _CHEAP_S else 0.0
                self._actors_due = time.monotonic() + rest

    def _take_one(self, number: int, parts: list[str], before: FeedLook | None) -> FeedLook:
        old = before.picture if before is not None else None
        try:
            seen = self._see(parts)
            picture = None
            if "actors" not in parts and before is not None and old is not None:
                picture = old.with_workers(seen)
                if picture is None:  # a worker has joined, left or not answered: read the actors, too
                    parts[:] = [*PARTS, *parts[1:]]
                    seen = self._see(parts)
        except (RpcError, OSError) as error:
            return _failed(number, str(error))
        kept = before if picture is not None else None  # the look whose actors are shown again
        if picture is None:
            picture = Picture.of(seen)
        now = payloads.now(number, picture, old, None if kept is None else kept.now)
        made = FeedLook(number=number, picture=picture, problem="", now=now)
        made.actors_at = time.monotonic() if kept is None else kept.actors_at
        now["actions"] = self.acts
        now["actors_age"] = round(time.monotonic() - made.actors_at, 1)
        then = [old.state] if old is not None else []
        made.rates = rates(then, [picture.state]) if kept is None else kept.rates
        if "metrics" in parts:
            for run, (_, answer) in seen.answers.items():
                if not isinstance(answer, Silent):
                    self._totals.update(run, answer)
            rows = self._totals.rows()
            self._window.append((time.monotonic(), rows))
            first, last = self._window[0], self._window[-1]
            made.calls = payloads.calls(rows, first[1], last[0] - first[0])
        else:
            self._window.clear()
        return made

    # -- on demand -----------------------------------------------------------------------------------------------

    def _seen(
        self, parts: list[str], payload: Callable[[Picture], dict[str, Any]], **empty: Any
    ) -> dict[str, Any]:
        """Read the state, and return ``payload`` of it; if no worker answers, return the problem and ``empty``."""
        try:
            return payload(Picture.of(self._see(parts)))
        except (RpcError, OSError) as error:
            return {"problem": str(error), **empty}

    async def timeline(self, seconds: float) -> dict[str, Any]:
        """Return the last calls of all workers, arranged in lanes."""
        async with self._records_lock:
            return await asyncio.to_thread(self._take_timeline, seconds)

    def _take_timeline(self, seconds: float) -> dict[str, Any]:
        try:
            return payloads.timeline(self._recordings(payloads.records_each(self._worker_count())), seconds)
        except (RpcError, OSError) as error:
            return {**payloads.timeline([], seconds), "problem": str(error)}

    async def trace(self, seconds: float) -> BinaryIO | str:
        """Return the last calls of all workers as a file for Perfetto, which the caller closes; or the reason of a failure."""
        async with self._records_lock:
            return await asyncio.to_thread(self._write_trace, seconds)

    def _write_trace(self, seconds: float) -> BinaryIO | str:
        try:
            since = time.monotonic() - seconds
            found = self._recordings(payloads.records_each(self._worker_count(), _TRACED), since)
            # The file is deleted before the caller reads it, so that no file is left if this process is killed while reading.
            with tempfile.TemporaryDirectory(prefix="actorrpc-page-") as folder:
                path = os.path.join(folder, "trace.json")
                write(path, found)
                return open(path, "rb")
        except (RpcError, OSError) as error:
            return str(error)

    def _recordings(self, most: int, since: float | None = None) -> list[Recording]:
        found = self._see(["records"], {"records": -most}).recordings(since)
        for each in found:
            each.records = each.records[-most:]
        return found

    def _worker_count(self) -> int:
        look = self._look
        return 1 if look is None or look.picture is None else len(look.picture.state.workers)

    async def act(self, what: str, whom: str) -> str:
        """Apply an action, and return a sentence about the result; errors as of :func:`~actorrpc.cli.actions.act`."""
        said = await asyncio.to_thread(lambda: act(self._see([*PARTS]), what, whom))
        _log.info("from the page: %s %s", what, whom)
        return said

    async def logs(self, text: str, whom: str, most: int) -> dict[str, Any]:
        """Return the last ``most`` lines that contain a text; arguments and result as of ``_LogLines.search``."""
        async with self._logs_lock:
            return await asyncio.to_thread(self._logs.search, text, whom, most)


def _failed(number: int, problem: str) -> FeedLook:
    return FeedLook(number=number, picture=None, problem=problem, now=payloads.nothing(number, problem))


class _Shared:
    """Takes looks on request, one at a time. The last look is returned again until it is ``every`` seconds old."""

    def __init__(self, every: float, collect: Callable[[], dict[str, Any]]) -> None:
        self._every = every
        self._collect = collect
        self._lock = asyncio.Lock()
        self._at = float("-inf")
        self._found: dict[str, Any] = {}

    async def get(self) -> dict[str, Any]:
        async with self._lock:
            if time.monotonic() - self._at >= self._every:
                self._found = await asyncio.to_thread(self._collect)
                self._at = time.monotonic()
            return self._found


class _LogLines:
    """The lines that processes have printed, the last ``_LOG_BYTES``, also of ended processes. Not thread-safe."""

    def __init__(self, groups: Callable[[], list[FoundGroup]]) -> None:
        self._groups = groups
        self._reader: Reader | None = None
        self._lines: deque[Line] = deque()
        self._size = 0

    def _add(self, line: Line) -> None:
        self._lines.append(line)
        self._size += len(line.text) + 64
        while self._size > _LOG_BYTES:
            self._size -= len(self._lines.popleft().text) + 64

    def _read(self) -> str:
        """Read new lines; return why reading has failed, or an empty text."""
        try:
            if self._reader is None:
                reader = Reader(self._groups(), 0.8)
                self._lines.clear()
                self._size = 0
                with undo_on_error(reader.close):
                    reader.begin(self._add)
                self._reader = reader
            elif not self._reader.more():
                self._reader = None
                return "the driver has ended; these lines are the last that were read"
        except (RpcError, OSError) as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Hang up."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def search(self, text: str, whom: str, most: int) -> dict[str, Any]:
        """Return the last ``most`` lines that contain ``text``, of processes whose label or id contains ``whom``, in any case."""
        problem = self._read()
        text, whom = text.lower(), whom.lower()
        found: deque[Line] = deque(maxlen=most)
        matches = 0
        for line in self._lines:
            if text in line.text.lower() and (not whom or whom in f"{line.label} {line.pid}".lower()):
                found.append(line)
                matches += 1
        return payloads.logs(found, matches, len(self._lines), problem)
