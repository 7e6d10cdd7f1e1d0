"""Queries of this process's own group: :func:`state`, :func:`trace`, and :func:`printed` for the logs of the group."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from actorrpc import _time
from actorrpc.agent.context import Worker, current_worker
from actorrpc.errors import NotInitializedError, RpcError, RpcTimeoutError
from actorrpc.group.rendezvous import Rendezvous
from actorrpc.observe.assemble import Silent
from actorrpc.observe.model import GroupState
from actorrpc.observe.outside import FoundGroup, GroupLook, look, members_of
from actorrpc.observe.trace import Recording, TraceSummary, check_path, write
from actorrpc.observe.visitor import Question, Target, patience
from actorrpc.transport.failure_detector import process_state
from actorrpc.transport.stream import CLOSED
from actorrpc.validation import wait_limit
from actorrpc.wire.identity import WorkerRecord

__all__ = ["printed", "recordings", "state", "trace"]

_TIMEOUT_S: Final = 1.0
_SHARE: Final = 0.6  # the part of the time-out within which the driver must send the list of members
_SLICE_S: Final = 0.1  # seconds between two checks whether the process of a queried worker on this host runs
_TRACE_S: Final = 10.0


def state(timeout: float = _TIMEOUT_S, *, stacks: bool = False) -> GroupState:
    """Return the state of all workers and actors of the group; see :class:`~actorrpc.observe.GroupState`.

    All workers are queried at once. Each answers on the thread that reads its connections, so full mailboxes do not delay the
    answer, and no code of users runs for it. A worker that does not answer in time is listed with the reason; see ``state`` of
    :class:`~actorrpc.observe.ObservedWorker`.

    Args:
        timeout: for the whole query, in seconds; None: without a limit.
        stacks: also request the stacks of all threads.

    Raises:
        NotInitializedError: this process is in no group.
        ConfigError: the timeout is not a number of seconds.

    Thread-safe. Waits for at most ``timeout``; in a dynamic ``init_rpc`` group, where workers join without a driver, reading the
    list of members from the store may take longer.
    """
    limit = wait_limit(timeout)
    parts = ["process", "actors", "supervised", "holders", *(["threads"] if stacks else [])]
    return _look(_worker("state() queries"), parts, limit).state


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
        seconds: wait so long first, and leave out calls that ended before the wait; None or 0: write all existing records.
        timeout: how long the workers may take to answer, in seconds. A worker that sends nothing for a fifth of this time, but at
            least for a second, counts as missing.

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
    return _look(worker, ["records", "profiles"], limit).recordings(begun if wait else None)


def _worker(what: str) -> Worker:
    worker = current_worker()
    if worker is None or worker.observer is None:
        raise NotInitializedError(
            f"{what} a group, and this process is in none: call actorrpc.init() or init_rpc() first"
        )
    worker.agent.check_process()
    return worker


def _look(worker: Worker, parts: list[str], timeout: float) -> GroupLook:
    """Query all workers of a worker's group at once."""
    begun, silence = time.monotonic(), patience(timeout)
    members = _members(worker, begun + min(silence, _SHARE * timeout))
    group = FoundGroup(what=worker.what, targets=[_target(worker, each) for each in members])
    left = max(0.0, begun + timeout - time.monotonic())
    found = look(group, parts, left, silence=silence, query_worker=partial(_query, worker))
    found.took = time.monotonic() - begun
    return found


def _target(worker: Worker, record: WorkerRecord) -> Target:
    return Target(record=record, addresses=[], key=None, settings=worker.agent.settings)


def _query(worker: Worker, question: Question) -> dict[str, Any] | Silent:
    """Query another worker, or this worker itself, over the connections of the group; see :data:`outside.Query`."""
    agent, target, silence = worker.agent, question.target, question.silence
    record = target.record
    assert record is not None
    is_own = record.incarnation == agent.record.incarnation
    peer = agent.self_peer if is_own else agent.peer_table.adopt(record)
    if peer.state != "alive":
        if target.local_pid:  # look() catches the error, and reads from /proc why the worker does not answer
            raise RpcError(f"{peer.state}: {peer.cause}" if peer.cause else peer.state)
        return Silent(peer.state, peer.cause or "it has left the group")
    deadline = _time.now() + question.until - time.monotonic()
    late = "it has not answered in time" + ("" if target.local_pid else ", and runs on another host")
    if not is_own and (peer.conn is None or peer.conn.state is CLOSED):
        if target.local_pid and process_state(target.local_pid) != "running":
            raise TimeoutError(late)
        agent.connector.connect(peer, min(deadline, _time.now() + silence), "to look at it")

    def send(message: dict[str, Any]) -> dict[str, Any]:
        begun = _time.now()
        asked = worker.observer.query(peer, message)
        agent.flush()
        try:
            while True:
                with contextlib.suppress(RpcTimeoutError):
                    answer: dict[str, Any] = asked.wait(max(0.0, min(_SLICE_S, deadline - _time.now())))
                    return answer
                last_received = max([begun, *(each.last_received for each in list(peer.conns))])
                is_late = _time.now() >= min(deadline, last_received + silence)
                if is_late or (target.local_pid and process_state(target.local_pid) != "running"):
                    raise TimeoutError(late)
        finally:
            worker.observer.forget(asked)

    return question.ask(send, _time.now)


def printed(since: int, timeout: float) -> tuple[list[list[Any]], int]:
    """Return the output of the cluster's processes that the driver has kept.

    Args:
        since: the number of the first line.
        timeout: how long the driver may take, in seconds.

    Returns:
        ``[number, time, pid, label, is_error, text, worker, host]`` of each line, in order, and the number of the line after
        the last.

    Raises:
        NotInitializedError: this process is in no group.
        RpcError: the driver cannot be reached, has not answered in time, or keeps no logs.
    """
    worker = _worker("logs are those of")
    driver = worker.agent.peer(0).record
    why = "it starts no processes"
    found: dict[str, Any] = {}
    try:
        until = time.monotonic() + wait_limit(timeout)
        answer = _query(worker, Question(_target(worker, driver), ["logs"], until, {"logs": since}))
    except (OSError, RpcError) as error:
        why = str(error)
    else:
        if isinstance(answer, Silent):
            why = answer.reason
        else:
            found = answer
    rows, end = found.get("logs"), found.get("log_end")
    if not isinstance(rows, list) or not isinstance(end, int):
        raise RpcError(f"worker {driver.name!r} keeps no logs: {why}")
    return rows, end


def _members(worker: Worker, until: float) -> list[WorkerRecord]:
    """Return the workers of the group; if the list of members cannot be read, the workers that this worker knows."""
    agent, own = worker.agent, worker.agent.record
    known = {each.record.incarnation: each.record for each in (agent.self_peer, *agent.peers())}
    rows = [
        each
        for each in known.values()
        if not each.is_visitor
        and (each.incarnation == own.incarnation or agent.peer_table.adopt(each).state == "alive")
    ]
    told: Iterable[WorkerRecord] = ()
    with contextlib.suppress(OSError, RpcError):
        if own.rank == 0 or isinstance(worker.group.membership, Rendezvous):
            told = agent.members()
        elif driver := next((each for each in rows if each.rank == 0), None):
            found = _query(worker, Question(_target(worker, driver), ["members"], until))
            told = () if isinstance(found, Silent) else members_of(found, set())
    return list({each.incarnation: each for each in (*rows, *told)}.values())
