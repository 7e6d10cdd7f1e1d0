"""Looking at this process's own group: :func:`state`, :func:`trace`, and :func:`printed`, its logs."""

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
_SHARE: Final = 0.6  # of the time, for the first answers: what is left is for their further pages
_SOON_S: Final = 0.2  # then it is looked whether there are processes that cannot answer
_DUMP_S: Final = 0.25  # of the time is kept for the stacks of processes that do not answer
_TRACE_S: Final = 10.0
_AT_ONCE: Final = 16
_PAGES: Final = 100


class _Inquiry:
    """The questions to one worker, page after page."""

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
        self.ended = ""  # why it is over, where that is not the last page
        self.done: Future[None] = Future()
        self.done.label = f"what {record.name!r} says of itself"
        self._observer = observer
        self._agent = agent
        self._parts = parts
        self._first = first or {}
        self._asked: Future[dict[str, Any]] | None = None
        self._begun = _time.now()

    def begin(self, until: float) -> None:
        """Ask; returns at once."""
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
        """Wait no more."""
        if self._asked is not None:
            self._observer.forget(self._asked)

    @property
    def is_idle(self) -> bool:
        """Whether there is no answer to be waited for: its process is stopped, or gone."""
        here = self._agent.record.host == self.record.host
        return not self.done.done() and here and process_state(self.record.pid) != "running"

    @property
    def heard(self) -> float:
        """When its process has sent something last, or was asked."""
        conns = () if self._is_own else self._agent.peer_table.adopt(self.record).conns
        return max([self._begun, *(each.heard for each in list(conns))])

    def found(self) -> dict[str, Any] | Silent:
        """Return what it has said, or why it has not."""
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
    """Return how all workers of the group are, and what their actors do: see :class:`~actorrpc.observe.GroupState`.

    All workers are asked at once. Each answers from the thread that reads its connections, behind no mailbox, and no code of
    users runs for it. One that does not answer in time is named with the reason: stopped, dead, busy in C code, or silent.

    Args:
        timeout: for all of it, in seconds.
        stacks: also ask for the stacks of all threads.

    Raises:
        NotInitializedError: this process is in no group.
        ConfigError: the timeout is no number of seconds.

    Thread-safe. It waits for the timeout at most; where workers may join without a driver (a dynamic ``init_rpc`` group), also
    for the store that knows who is there.
    """
    begun = _time.now()
    until = begun + wait_limit(timeout)
    worker = _worker("state() looks at")
    parts = ["process", "actors", "supervised", "holders", *(["threads"] if stacks else [])]
    asked = _ask_all(worker, parts, begun, until, _DUMP_S if stacks else 0.0)
    late = [each for each in asked if not each.pages] if stacks else []
    if len(late) > 1:  # stacks may have to be dumped: of all at once
        with ThreadPoolExecutor(min(len(late), _AT_ONCE), "actorrpc-observe") as pool:
            dumped = dict(zip(map(id, late), pool.map(_Inquiry.found, late), strict=True))
    else:
        dumped = {}
    answers = [(each.record, dumped.get(id(each)) or each.found()) for each in asked]
    return assemble(answers, _time.now() - begun)


def trace(
    path: str | os.PathLike[str], seconds: float | None = None, *, timeout: float = _TRACE_S
) -> TraceSummary:
    """Write what the flight recorders of all workers have into a file that https://ui.perfetto.dev and chrome://tracing open.

    Each worker keeps its last 32 768 calls, made and executed, with their moments. Calls and executions are slices, with arrows
    between them; the time in mailboxes is shown apart. What is under way ends with the recording, and is marked as unfinished.
    The clocks of hosts are compared over the connections. Profiles of ``torch.profiler`` that
    :func:`actorrpc.observe.keep_profile` was given are merged.

    Args:
        path: the file, which is replaced.
        seconds: wait so long first, and leave out what was over before; by default, all that is there is written.
        timeout: how long the workers may take to answer, in seconds; one that sends nothing is given a fifth of it, and at least
            a second.

    Raises:
        NotInitializedError: this process is in no group.
        ConfigError: ``seconds`` or the timeout is no number of seconds.
        OSError: the file cannot be written; nobody was asked then, where that could be seen before.

    Thread-safe. A worker that does not answer is named in the summary's ``missing``.
    """
    check_path(os.fspath(path))
    return write(os.fspath(path), recordings(seconds, timeout))


def recordings(seconds: float | None = None, timeout: float = _TRACE_S) -> list[Recording]:
    """Return what the flight recorders of all workers have; arguments and errors as of :func:`trace`."""
    worker = _worker("the calls to be traced are those of")
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
    """Ask all workers at once, and wait for their answers; ``rest``: seconds of the time that are left for something else."""
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
    """Return what is to be added to another host's moments to have them on this clock, and how far off that may be."""

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
    """Return what the processes of the cluster have printed, as its driver keeps it.

    Args:
        since: the number of the first line.
        timeout: how long the driver may take, in seconds.

    Returns:
        ``[number, time, pid, label, is_error, text]`` of each line, in order, and the number of the one that follows them.

    Raises:
        NotInitializedError: this process is in no group.
        RpcError: the driver cannot be asked, has not answered in time, or keeps no logs.
    """
    worker = _worker("the logs are those of")
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
    """Wait until all are done, but for none whose process has sent nothing for ``silence`` seconds."""
    for each in inquiries:
        while not each.done.done() and (limit := min(until, each.heard + silence)) > _time.now():
            with contextlib.suppress(RpcError):
                each.done.wait(limit - _time.now())


def _members(worker: Worker, until: float) -> list[WorkerRecord]:
    """Return the workers of the group, those that this one knows of where nobody says who is there."""
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
    """Ask rank 0 who is in the group; nobody where it does not say."""
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
