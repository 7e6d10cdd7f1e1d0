"""Queries of this process's own group: :func:`state`, :func:`trace`, and :func:`printed` for its logs."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from actorrpc import _time
from actorrpc.agent.agent import Agent
from actorrpc.agent.context import Worker, current_worker
from actorrpc.agent.peers import Peer
from actorrpc.errors import NotInitializedError, RpcError
from actorrpc.futures import Future
from actorrpc.group.rendezvous import Rendezvous
from actorrpc.observe import processes
from actorrpc.observe.assemble import Silent, assemble
from actorrpc.observe.model import GroupState
from actorrpc.observe.protocol import merge, patience
from actorrpc.observe.startup import Observer
from actorrpc.observe.tracing.trace import CLOCK, Recording, TraceSummary, check_path, compare_clocks, write
from actorrpc.transport.connection_state import CLOSED
from actorrpc.transport.failure_detector import process_state
from actorrpc.validation import wait_limit
from actorrpc.wire.identity import WorkerRecord

__all__ = ["printed", "recordings", "state", "trace"]

_TIMEOUT_S: Final = 1.0
_SHARE: Final = 0.6  # the part of the time-out that the driver has for sending the list of members
_SOON_S: Final = 0.2  # after this time, processes that are stopped or have ended are no longer waited for
_DUMP_S: Final = 0.25  # the part of the time-out that is reserved for dumping stacks of silent processes
_TRACE_S: Final = 10.0
_AT_ONCE: Final = 16
_PAGES: Final = 100


class _Inquiry:
    """The query of one worker, which requests page after page."""

    def __init__(
        self,
        observer: Observer,
        agent: Agent,
        record: WorkerRecord,
        parts: list[str],
        first: dict[str, int] | None = None,
    ) -> None:
        self.record = record
        self.pages: list[dict[str, Any]] = []
        self.ended = ""  # why the query ended before the last page
        self.done: Future[None] = Future()
        self.done.label = f"what {record.name!r} says of itself"
        self._observer = observer
        self._agent = agent
        self._parts = parts
        self._first = first or {}
        self._asked: Future[dict[str, Any]] | None = None
        self._begun = _time.now()

    def begin(self, until: float) -> None:
        """Start the query; returns at once. Connects on a pool thread if there is no connection."""
        try:
            peer = self._agent.peer_table.adopt(self.record) if not self._is_own else self._agent.self_peer
        except RpcError as error:
            self._over(str(error))
            return
        if peer.state != "alive":
            self._over(f"{peer.state}: {peer.cause}" if peer.cause else peer.state)
            return
        conn = peer.conn
        if peer.is_self or (conn is not None and conn.state is not CLOSED):
            self._ask(peer, self._parts, self._first)
        else:
            self._agent.submit(functools.partial(self._connect, peer, until))

    @property
    def _is_own(self) -> bool:
        return self.record.incarnation == self._agent.record.incarnation

    def _connect(self, peer: Peer, until: float) -> None:
        try:
            self._agent.connector.connect(peer, until, "to look at it")
        except (RpcError, OSError) as error:
            self._over(str(error))
            return
        self._ask(peer, self._parts, self._first)

    def _ask(self, peer: Peer, parts: list[str], begin: dict[str, int]) -> None:
        asked = self._asked = self._observer.ask(peer, {"what": parts, "from": begin})
        asked.add_done_callback(functools.partial(self._heard, peer))

    def _heard(self, peer: Peer, asked: Future[dict[str, Any]]) -> None:
        if asked.error is not None:
            self._over(str(asked.error))
            return
        found = asked.value()
        self.pages.append(found)
        following = found.get("next")
        if isinstance(following, dict) and following and len(self.pages) < _PAGES:
            begin = {part: at for part, at in following.items() if part in self._parts and type(at) is int}
            if begin:
                self._ask(peer, list(begin), begin)
                return
        self._over("")

    def _over(self, why: str) -> None:
        self.ended = why
        self.done.try_complete(None, self._agent.submit)

    def give_up(self) -> None:
        """Discard the current question; a late answer is ignored."""
        if self._asked is not None:
            self._observer.forget(self._asked)

    @property
    def is_idle(self) -> bool:
        """Whether waiting is useless, because the worker's process on this host is stopped or has ended."""
        here = self._agent.record.host == self.record.host
        return not self.done.done() and here and process_state(self.record.pid) != "running"

    @property
    def heard(self) -> float:
        """When the worker last sent something, or when the query began, whichever is later."""
        conns = () if self._is_own else self._agent.peer_table.adopt(self.record).conns
        return max([self._begun, *(each.heard for each in list(conns))])

    def found(self) -> dict[str, Any] | Silent:
        """Return the answer, or the reason why there is none."""
        if self.pages:
            return merge(self.pages)
        if self._agent.record.host == self.record.host:
            state, reason = processes.why_silent(self.record.pid)
            silent = Silent(state, reason, processes.figures(self.record.pid))
            if state == "busy" and "threads" in self._parts:
                silent.dump(self.record.pid, time.monotonic() + _DUMP_S)
            return silent
        peer = self._agent.peer_table.adopt(self.record)
        if peer.state != "alive":
            return Silent(peer.state, peer.cause or "it has left the group")
        return Silent("silent", self.ended or "it has not answered in time, and runs on another host")


def state(timeout: float = _TIMEOUT_S, *, stacks: bool = False) -> GroupState:
    """Return the state of all workers and actors of the group; see :class:`~actorrpc.observe.GroupState`.

    All workers are queried at once. Each answers on the thread that reads its connections, so full mailboxes do not delay the
    answer, and no code of users runs for it. A worker that does not answer in time is listed with the reason: stopped, dead, busy
    in C code, or silent.

    Args:
        timeout: for the whole query, in seconds.
        stacks: also request the stacks of all threads.

    Raises:
        NotInitializedError: this process is in no group.
        ConfigError: the timeout is not a number of seconds.

    Thread-safe. Waits for at most ``timeout``; in a dynamic ``init_rpc`` group, where workers join without a driver, reading the
    list of members from the store may take longer.
    """
    begun = _time.now()
    until = begun + wait_limit(timeout)
    worker = _worker("state() queries")
    parts = ["process", "actors", "supervised", "holders", *(["threads"] if stacks else [])]
    asked = _ask_all(worker, parts, begun, until, _DUMP_S if stacks else 0.0)
    late = [each for each in asked if not each.pages] if stacks else []
    if len(late) > 1:  # found() may wait for a stack dump, so it runs for all late workers at once
        with ThreadPoolExecutor(min(len(late), _AT_ONCE), "actorrpc-observe") as pool:
            dumped = dict(zip(map(id, late), pool.map(_Inquiry.found, late), strict=True))
    else:
        dumped = {}
    answers = [(each.record, dumped.get(id(each)) or each.found()) for each in asked]
    return assemble(answers, _time.now() - begun)


def trace(
    path: str | os.PathLike[str], seconds: float | None = None, *, timeout: float = _TRACE_S
) -> TraceSummary:
    """Write the records of all workers' flight recorders into a trace file for https://ui.perfetto.dev or chrome://tracing.

    Each worker keeps the times of its last 32 768 calls, made and executed. In the trace, calls and executions are slices with
    arrows between them, and the time in mailboxes has its own tracks. A call that has not finished ends with the trace, and is
    marked as unfinished. The clocks of different hosts are compared over the connections, and times are adjusted. Profiles of
    ``torch.profiler`` that workers stored with :func:`actorrpc.observe.keep_profile` are merged into the trace.

    Args:
        path: the file; an existing file is replaced.
        seconds: record for so long first, and leave out what ended before; by default, all existing records are written.
        timeout: how long the workers may take to answer, in seconds. A worker that sends nothing for a fifth of this time, and at
            least a second, is given up.

    Raises:
        NotInitializedError: this process is in no group.
        ConfigError: ``seconds`` or the timeout is not a number of seconds.
        OSError: the file cannot be written. A missing or read-only directory is detected before workers are queried.

    Thread-safe. The summary's ``missing`` names the workers that did not answer.
    """
    check_path(os.fspath(path))
    return write(os.fspath(path), recordings(seconds, timeout))


def recordings(seconds: float | None = None, timeout: float = _TRACE_S) -> list[Recording]:
    """Return the records of all workers' flight recorders; arguments and errors as for :func:`trace`."""
    worker = _worker("trace() records")
    wait = 0.0 if seconds is None else wait_limit(seconds)
    limit = wait_limit(timeout)
    begun = _time.now()
    if wait:
        _time.sleep(wait)
    asked_at = _time.now()
    until = asked_at + limit
    collected = []
    for each in _ask_all(worker, ["records", "profiles"], asked_at, until, 0.0):
        record, found = each.record, each.found()
        if isinstance(found, dict):
            is_here = record.host == worker.agent.record.host
            found["clock"] = (0.0, 0.0) if is_here else _clock(worker, record, until)
        made = Recording.of(record.name, record.pid, found)
        if wait:
            made.since(begun)
        collected.append(made)
    return collected


def _worker(what: str) -> Worker:
    worker = current_worker()
    if worker is None or worker.observer is None:
        raise NotInitializedError(
            f"{what} a group, and this process is in none: call actorrpc.init() or init_rpc() first"
        )
    worker.agent.check_process()
    return worker


def _ask_all(worker: Worker, parts: list[str], begun: float, until: float, rest: float) -> list[_Inquiry]:
    """Query all workers at once, and wait for their answers until ``rest`` seconds before ``until``."""
    asked: list[_Inquiry] = []
    silence = patience(until - begun)
    for record in _members(worker, begun + min(silence, _SHARE * (until - begun))):
        asked.append(_Inquiry(worker.observer, worker.agent, record, parts))
        asked[-1].begin(until)
    worker.agent.flush()
    try:
        _wait(asked, min(until, begun + _SOON_S))
        _wait([each for each in asked if not each.is_idle], until - rest, silence)
    finally:
        for each in asked:
            each.give_up()
    return asked


def _clock(worker: Worker, record: WorkerRecord, until: float) -> tuple[float, float | None]:
    """Return the offset between another host's clock and this host's clock, and its error; see :func:`compare_clocks`."""

    def ask() -> dict[str, Any]:
        inquiry = _Inquiry(worker.observer, worker.agent, record, ["records"], CLOCK)
        inquiry.begin(until)
        worker.agent.flush()
        try:
            _wait([inquiry], until)
        finally:
            inquiry.give_up()
        return inquiry.pages[0] if inquiry.pages else {}

    return compare_clocks(ask, _time.now)


def printed(since: int, timeout: float) -> tuple[list[list[Any]], int]:
    """Return the output of the cluster's processes that the driver has kept.

    Args:
        since: the number of the first line.
        timeout: how long the driver may take, in seconds.

    Returns:
        ``[number, time, pid, label, is_error, text]`` of each line, in order, and the number of the line after the last.

    Raises:
        NotInitializedError: this process is in no group.
        RpcError: the driver cannot be reached, has not answered in time, or keeps no logs.
    """
    worker = _worker("logs are those of")
    until = _time.now() + wait_limit(timeout)
    driver = worker.agent.peer(0).record
    inquiry = _Inquiry(worker.observer, worker.agent, driver, ["logs"], {"logs": since})
    inquiry.begin(until)
    worker.agent.flush()
    try:
        inquiry.done.wait(max(0.0, until - _time.now()))
    finally:
        inquiry.give_up()
    found = merge(inquiry.pages) if inquiry.pages else {}
    rows, end = found.get("logs"), inquiry.pages[-1].get("log_end") if inquiry.pages else None
    if not isinstance(rows, list) or not isinstance(end, int):
        raise RpcError(f"worker {driver.name!r} keeps no logs: {inquiry.ended or 'it starts no processes'}")
    return rows, end


def _wait(inquiries: Iterable[_Inquiry], until: float, silence: float = math.inf) -> None:
    """Wait until all queries are done, but give up a query if its worker has sent nothing for ``silence`` seconds."""
    for each in inquiries:
        while not each.done.done() and (limit := min(until, each.heard + silence)) > _time.now():
            with contextlib.suppress(RpcError):
                each.done.wait(limit - _time.now())


def _members(worker: Worker, until: float) -> list[WorkerRecord]:
    """Return the workers of the group; if the list of members cannot be read, those that this worker has met."""
    agent = worker.agent
    known = {each.record.incarnation: each.record for each in (agent.self_peer, *agent.peers())}
    rows = [each for each in known.values() if not each.is_visitor and _is_alive(agent, each)]
    if agent.record.rank != 0 and not isinstance(worker.group.membership, Rendezvous):
        driver = next((each for each in rows if each.rank == 0), None)
        told = [] if driver is None else _told(worker, driver, until)
    else:
        try:
            told = agent.members()
        except RpcError:
            told = []
    return list({each.incarnation: each for each in (*rows, *told)}.values())


def _is_alive(agent: Agent, record: WorkerRecord) -> bool:
    return record.incarnation == agent.record.incarnation or agent.peer_table.adopt(record).state == "alive"


def _told(worker: Worker, driver: WorkerRecord, until: float) -> list[WorkerRecord]:
    """Request the list of members from rank 0; an empty list if it does not answer in time."""
    inquiry = _Inquiry(worker.observer, worker.agent, driver, ["members"])
    inquiry.begin(until)
    try:
        inquiry.done.wait(max(0.0, until - _time.now()))
    except RpcError:
        pass
    finally:
        inquiry.give_up()
    found = inquiry.pages[0].get("members") if inquiry.pages else None
    records = []
    for packed in found if isinstance(found, list) else []:
        try:
            records.append(WorkerRecord.from_bytes(packed))
        except RpcError:
            continue
    return records
