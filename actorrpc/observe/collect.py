"""Builds a worker's answer to a question, as plain values, from the tables of the worker.

Most parts run on the thread that reads the questioner's connection. Therefore no code of users runs (no ``repr``, property or
method of a user's object), and the only waits are for locks that other threads hold for microseconds.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType
from typing import Any, Final

import torch

from actorrpc import _time
from actorrpc._python import AWAITED, GatheringFuture
from actorrpc._stacks import top_frames
from actorrpc._torch import NoFunctionModes
from actorrpc.actors.host.actor import HostedActor
from actorrpc.actors.host.mailbox import Envelope
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.spec.class_info import TASKS
from actorrpc.actors.streams.producer import Producer
from actorrpc.actors.streams.stalls import Stall, awaited, awaited_by, loop_on, waited_for_on
from actorrpc.actors.supervision.record import LifetimeToken
from actorrpc.agent.calls import Call, Execution
from actorrpc.agent.context import Worker
from actorrpc.agent.peers import Peer, state_of
from actorrpc.autograd.contexts import Context
from actorrpc.cluster import forwarding
from actorrpc.debugger import HELD
from actorrpc.debugger.session import DebugSession
from actorrpc.flight_recorder import CALLED, EXECUTED, NOTED, UNDER_WAY
from actorrpc.futures import Future
from actorrpc.observe import processes
from actorrpc.rpc.refcount.tables import Outcome
from actorrpc.transport.stream import CLOSED
from actorrpc.transport.writer import BlockedSends
from actorrpc.wire import versions

__all__ = ["answer", "figures", "member_records"]

INFINITE: Final = float("inf")
# Limits of one answer.
_ACTORS: Final = 500
_SUPERVISED: Final = 1000
_VALUES: Final = 2000
_THREADS: Final = 200
_LINES: Final = 2000
_RECORDS: Final = 8192
_UNDER_WAY: Final = 2000  # unfinished calls, executions and streams of a worker; of more, the oldest are sent
_LATEST: Final = 4096  # records of a worker from which the run times of its actors are computed
_FRAMES: Final = 100  # frames of one stack
_CALLS: Final = 100  # calls of one worker, or of one actor
_CONNECTIONS: Final = 1000
_STREAMS: Final = 50
_SEGMENTS: Final = 100  # the largest segments of shared memory
_CONTEXTS: Final = 20
_MEMBERS: Final = 100  # members that are listed for one wait in a barrier or in shutdown
_DEAD: Final = 1000  # dead actors of one supervisor
_TEXT: Final = 2000  # characters of one text
_BYTES: Final = 512 << 10  # bytes of log lines, approximately


_Part = tuple[dict[str, Any], int | None]


def answer(worker: Worker, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a worker to a question."""
    what = asked.get("what")
    parts = {each for each in what if isinstance(each, str)} if isinstance(what, list) else {"process"}
    begin = asked.get("from")
    first = begin if isinstance(begin, dict) else {}
    found = _introduction(worker, asked)
    following: dict[str, int] = {}
    for part, gather, most in _PARTS:
        if part in parts:
            at = first.get(part, 0)
            is_place = type(at) is int and (at >= 0 or part == "records")
            fields, place = gather(worker, at if is_place else 0, most)
            found |= fields
            if place is not None:
                following[part] = place
    if following:
        found["next"] = following
    return found


def figures(worker: Worker, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a data-only worker to a question from another host: figures, without names of files and functions."""
    found = _introduction(worker, asked)
    found["limited"] = (
        "it takes data only, and reports calls and stacks over the Unix socket of its own host only"
    )
    connections = [
        {name: value for name, value in each.items() if name != "oldest_call"}
        for each in _connections(worker, _time.now())
    ]
    found["process"] = {
        **_facts(worker),
        "connections": connections,
    }
    return found


def _introduction(worker: Worker, asked: dict[str, Any]) -> dict[str, Any]:
    record = worker.agent.record
    return {
        "id": asked["id"],
        "name": record.name,
        "rank": record.rank,
        "incarnation": record.incarnation,
        "pid": record.pid,
    }


def _records(worker: Worker, first: int, most: int) -> _Part:
    recorder = worker.agent.flight_recorder
    found: dict[str, Any] = {}
    if recorder is not None and first <= 0:  # the first page
        # The unfinished calls are read before the records. A call that ends in between is then in both lists, and the receiver
        # drops one entry; in the other order, the call would be in no list.
        found["under_way"], found["under_way_all"] = _under_way(worker)
    total = 0 if recorder is None else recorder.total
    # A negative ``first`` counts from the end: -100 is the first of the last 100 records.
    rows = [] if recorder is None else recorder.since(first if first >= 0 else max(0, total + first), most)
    found["records"] = rows
    found["recorder"] = {
        "on": recorder is not None,
        "total": total,
        "now": _time.now(),
        "threads": {each.ident or 0: each.name for each in threading.enumerate()},
    }
    return found, rows[-1][0] + 1 if len(rows) == most else None


def _logs(worker: Worker, first: int, most: int) -> _Part:
    logs = getattr(getattr(worker.cluster, "engine", None), "logs", None)
    if logs is None:
        return {}, None
    lines, after, more = logs.history.since(first, most, _BYTES)
    found = {"logs": lines, "log_end": after, "log_workers": logs.history.workers()}
    return found, after if more else None


def _profiles(worker: Worker, first: int, _most: int) -> _Part:
    if worker.observer is None:
        return {}, None
    rows, place = worker.observer.profiles.piece(first)
    return {"profiles": rows}, place


def _metrics(worker: Worker, _first: int, _most: int) -> _Part:
    return {} if worker.observer is None else {"metrics": worker.observer.metrics()}, None


def _members(worker: Worker, _first: int, _most: int) -> _Part:
    is_whole = worker.cluster is not None or (worker.group is not None and worker.group.is_fixed)
    return {"members": member_records(worker), "members_all": is_whole}, None


def _under_way(worker: Worker) -> tuple[list[tuple[Any, ...]], int]:
    """Return records of unfinished calls, executions and streams, the oldest first, and the number of all such records.

    The flight recorder has records of finished calls only, so it has no record of a call that hangs.
    """
    agent, now = worker.agent, _time.now()
    rows: list[tuple[Any, ...]] = []
    for peer in {id(each): each for each in (agent.self_peer, *agent.peers())}.values():
        for call in list(peer.pending.values()):
            size = call.size or len(call.frame)
            what = (call.id, peer.name, call.chain, _text(call.label), call.thread)
            rows.append((UNDER_WAY, CALLED, call.made, now, *what, False, call.future is None, size, 0))
        for each in list(peer.running.values()):
            if isinstance(each, Execution) and each.begun:
                title = "" if each.actor is None else each.actor.title
                what = (each.id, peer.name, each.chain, _name_of(each.what), each.thread)
                rows.append((UNDER_WAY, EXECUTED, each.received_at, each.begun, now, *what, False, title))
            elif isinstance(each, Envelope):
                title = "" if each.hosted is None else each.hosted.title
                what = (each.id, peer.name, 0, _text(each.header.get("method", "__init__")), 0)
                rows.append((UNDER_WAY, EXECUTED, each.received_at, now, now, *what, False, title))
    for producer in [] if worker.actors is None else worker.actors.streams.all():
        if (since := producer.since) is not None:
            row = _stream(producer)
            title = f"{producer.stream:x} of {row['actor']}.{row['method']}()"
            rows.append((UNDER_WAY, NOTED, since, now, "stream", title, 0))
    rows.sort(key=lambda row: row[2])
    return rows[:_UNDER_WAY], len(rows)


def member_records(worker: Worker) -> list[bytes]:
    """Return the packed records of the group's members; if this worker has no list of them, its own and its living peers'."""
    agent = worker.agent
    if worker.cluster is not None:
        return [each.to_bytes() for each in worker.cluster.directory.members()]
    if worker.group is not None and worker.group.is_fixed:
        return [each.to_bytes() for each in agent.members()]
    peers = {each.record.incarnation: each for each in (agent.self_peer, *agent.peers())}
    return [
        each.record.to_bytes()
        for each in peers.values()
        if each.state == "alive" and not each.record.is_visitor
    ]


# -- the process -------------------------------------------------------------------------------------------------


@functools.cache
def _host() -> str:
    return socket.gethostname()


def _process(worker: Worker, _first: int, _most: int) -> _Part:
    agent, now = worker.agent, _time.now()
    peers = _members_known(worker)
    outgoing = [call for peer in peers for call in list(peer.pending.values())]
    running = [each for peer in agent.peers() for each in list(peer.running.values())]
    plain = [each for each in running if type(each) is Execution]
    buffers, objects = agent.buffers.stats(), agent.objects.stats()
    found: dict[str, Any] = {
        **_facts(worker),
        "output": forwarding.own_place(),
        "pool": {
            "threads": len(agent.pool.threads),
            "listening": len(agent.pool.idle),
            "queued": len(agent.pool.queue),
        },
        "connections": _connections(worker, now),
        "calls": [_plain_call(each, now) for each in plain[:_CALLS]],
        "outgoing": [_outgoing(each, now) for each in outgoing[:_CALLS]],
        "outgoing_count": len(outgoing),
        "memory_pool": {"used": buffers.lent_bytes, "kept": buffers.free_bytes},
        "objects": [
            {"segment": each.segment_id.hex(), "label": each.label, "site": each.site, "bytes": each.nbytes}
            for each in sorted(objects.held, key=lambda each: -each.nbytes)[:_SEGMENTS]
        ],
        "object_memory": {
            "held": objects.held_bytes,
            "kept": objects.free_bytes,
            "host": objects.host_bytes,
            "limit": objects.limit_bytes,
        },
    }
    return {"process": found | _subsystems(worker, now)}, None


def _subsystems(worker: Worker, now: float) -> dict[str, Any]:
    """Return the fields about subsystems that not every worker has."""
    found: dict[str, Any] = {}
    if worker.cluster is not None:
        deaths = list(worker.cluster.deaths)
        found["deaths"] = [{"what": _text(text), "since": max(0.0, now - when)} for text, when in deaths]
    if worker.group is not None:
        found["waits"] = [
            {
                "round": _text(each.round),
                "members": sorted(each.members)[:_MEMBERS],
                "since": now - each.begun,
            }
            for each in list(worker.group.waits)
        ]
    if worker.actors is not None and worker.actors.supervisor.is_drained:
        found["reason"] = (
            "it is drained: nothing new is placed on it. drain() ends its process after its calls, unless the process runs its "
            "own script. If drain() has timed out, call drain() again"
        )
    if worker.references is not None:
        counts = worker.references.table.pending_counts()
        found["references"] = {
            "held": counts.users,
            "owned": counts.owners,
            "promised": len(worker.references.promised),
        }
    if worker.autograd is not None:
        contexts = list(worker.autograd.contexts.live.values())
        found["autograd"] = {"contexts": len(contexts), "passes": sum(len(each.passes) for each in contexts)}
        found["contexts"] = [_context(each, now) for each in contexts[-_CONTEXTS:]]
    if worker.debugger is not None:
        found["held"] = [_held(each) for each in worker.debugger.sessions()[:_CALLS]]
    if worker.actors is not None:
        producers = sorted(worker.actors.streams.all(), key=lambda each: not each.pause)
        found["streams"] = [_stream(each) for each in producers[:_STREAMS]]
        found["stream_count"] = len(producers)
        broken = list(worker.actors.registry.deadlocks.found)
        found["deadlocks"] = [{"error": _text(text), "since": max(0.0, now - when)} for when, text in broken]
        found["tasks"] = sum(
            hosted.counts()[1] for hosted in worker.actors.registry.all() if _is_of_tasks(hosted)
        )
    return found


def _held(session: DebugSession) -> dict[str, Any]:
    actor = None if session.execution is None else session.execution.actor
    file, line, function = session.place
    return {
        "session": session.name,
        "call": _text(session.title),
        "actor_id": "" if actor is None or actor.spec is None else f"{actor.spec.actor_id:016x}",
        "why": _text(session.why),
        "is_held": session.state == HELD,
        "thread": session.thread,
        "file": file,
        "line": line,
        "function": function,
        "since": time.monotonic() - session.since,
        "attached": session.attached is not None,
    }


def _facts(worker: Worker) -> dict[str, Any]:
    return {**processes.figures(), "host": _host(), "what": worker.what, "versions": versions.here()}


def _members_known(worker: Worker) -> list[Peer]:
    """Return the peers of a worker that are members of the group, the worker itself included."""
    peers = [each for each in (worker.agent.self_peer, *worker.agent.peers()) if not each.record.is_visitor]
    return list({id(each): each for each in peers}.values())


def _connections(worker: Worker, now: float) -> list[dict[str, Any]]:
    others = [each for each in _members_known(worker) if not each.is_self]
    return [_connection(each, now) for each in others[:_CONNECTIONS]]


def _connection(peer: Peer, now: float) -> dict[str, Any]:
    conns = [each for each in list(peer.conns) if each.state is not CLOSED]
    last_received = max([each.last_received for each in conns] + [peer.failure_detector.last_received])
    lenders = [each.lane.lender for each in conns if each.lane.lender is not None]
    pending = list(peer.pending.values())  # in the order in which they were made
    borrowers = [each.lane.borrower for each in conns if each.lane.borrower is not None]
    device_lenders = [lender for each in conns for lender in each.lane.devices.lenders()]
    return {
        "worker": peer.name,
        "state": state_of(peer),
        "sockets": len(conns),
        "local": any(each.local for each in conns),
        "silent": max(0.0, now - last_received) if last_received > 0 else -1.0,
        "calls_out": len(pending),
        "oldest_call": _text(pending[0].label) if pending else "",
        "oldest": max(0.0, now - pending[0].made) if pending else 0.0,
        "calls_in": len(peer.running),
        "unread": peer.window.charged,
        "blocked": _lasted(peer.window.blocked, now),
        "stalled": max((_lasted(each.writer.blocked, now) for each in conns), default=0.0),
        "sent": sum(each.writer.sent for each in conns),
        "received": sum(each.reader.received for each in conns),
        "chunks_sent": sum(each.writer.sent_in_chunks for each in conns),
        "chunks_received": sum(each.reader.received_in_chunks for each in conns),
        "lent": sum(each.stats().lent_bytes for each in lenders),
        "placed": sum(each.placed_bytes for each in lenders),
        "borrowed": sum(each.held_bytes for each in borrowers),
        "taken": sum(each.taken_bytes for each in borrowers),
        "device_lent": sum(each.stats().lent_bytes for each in device_lenders),
        "device_placed": sum(each.placed_bytes for each in device_lenders),
        "device_taken": sum(each.lane.devices.taken_bytes for each in conns),
    }


def _lasted(blocked: BlockedSends, now: float) -> float:
    since = blocked.since
    return 0.0 if since is None else max(0.0, now - since)


def _remaining(deadline: float, now: float) -> float | None:
    return None if deadline == INFINITE else deadline - now


def _outgoing(call: Call, now: float) -> dict[str, Any]:
    return {
        "label": _text(call.label),
        "worker": call.peer.name,
        "since": max(0.0, now - call.made),
        "left": _remaining(call.deadline, now),
    }


def _text(value: object) -> str:
    """Return a string, shortened if it is long; "?" for other objects, whose ``__str__`` may be a user's."""
    if type(value) is not str:
        return "?"
    return value if len(value) <= _TEXT else f"{value[:_TEXT]} ..."


_WAITERS: Final = (asyncio.Future, asyncio.Task, GatheringFuture)
_FUNCTIONS: Final = (FunctionType, BuiltinFunctionType)


def _name_of(function: object) -> str:
    """Return the name of a function, without running code of a user's object."""
    while type(function) is functools.partial:
        function = function.func
    if type(function) is MethodType:
        function = function.__func__
    if type(function) is str:
        return _text(function)
    if type(function) in _FUNCTIONS:
        return _text(function.__qualname__)  # type: ignore[attr-defined]
    return _name_of_class(function if type(function) is type else type(function))


def _name_of_class(kind: type[Any]) -> str:
    """Return the name of a class, without running code of its metaclass."""
    return _text(type.__dict__["__qualname__"].__get__(kind))


def _plain_call(execution: Execution, now: float) -> dict[str, Any]:
    nested = [each for each in list(execution.nested) if isinstance(each, Call) and not each.done]
    return {
        "method": _name_of(execution.what),
        "caller": execution.peer.name,
        "left": _remaining(execution.deadline, now),
        "execution": f"{execution.chain:016x}",
        "chain": [f"{each:016x}" for each in execution.path[:-1]],
        "waits_for": [_say_awaited(each) for each in nested[:10]],
    }


def _context(context: Context, now: float) -> dict[str, Any]:
    # Other threads change ``receipts`` meanwhile. list() copies its values in one atomic step, without a lock.
    senders = Counter([each.sink.worker.rank for each in list(context.receipts.values())])
    return {
        "context": f"{context.id:x}",
        "origin": context.origin,
        "idle": max(0.0, now - context.touched),
        "sent": len(context.sends),
        "received": {str(rank): number for rank, number in senders.most_common(_CONNECTIONS)},
        "leaves": len(context.gradients),
        "passes": len(context.passes),
    }


def _stream(producer: Producer) -> dict[str, Any]:
    items, size = producer.ahead
    entry = producer.entry
    in_mailbox = isinstance(entry, Envelope) and entry.hosted is not None
    return {
        "method": _text(entry.header.get("method")) if in_mailbox else "",
        "actor": entry.hosted.title if in_mailbox else "",
        "consumer": producer.peer.name if producer.peer is not None else "",
        "items": items,
        "bytes": size,
        "limit": producer.limit,
        "pauses": bool(producer.pause),
    }


# -- actors ------------------------------------------------------------------------------------------------------


def _is_of_tasks(hosted: HostedActor) -> bool:
    return hosted.spec is not None and hosted.spec.info.name == TASKS


def _hosted(worker: Worker, first: int, most: int) -> _Part:
    """Return a page of actors, ordered by identifier, from the identifier ``first`` on.

    Pages begin at an identifier and not at a position, so that no actor is skipped if another one ends between two pages.
    """
    if worker.actors is None:
        return {"actors": []}, None
    now = _time.now()
    actors = [
        each
        for each in worker.actors.registry.all()
        if each.id >= first and each.spec is not None and not _is_of_tasks(each)
    ]
    actors.sort(key=lambda each: each.id)
    latest = _latest(worker)
    rows = [_actor(hosted, now, latest.get(hosted.title, [])) for hosted in actors[:most]]
    return {"actors": rows}, actors[most].id if len(actors) > most else None


def _latest(worker: Worker) -> dict[str, list[tuple[float, bool]]]:
    """Return ``(run time, failed)`` of the latest method calls, by the titles of the actors."""
    flight_recorder, found = worker.agent.flight_recorder, defaultdict(list)
    if flight_recorder is not None:
        for record in flight_recorder.since(flight_recorder.total - _LATEST, _LATEST):
            if record[1] == EXECUTED and record[11] and record[8] != "__init__":
                found[record[11]].append((record[4] - record[3], record[10]))
    return found


def _actor(hosted: HostedActor, now: float, latest: list[tuple[float, bool]]) -> dict[str, Any]:
    spec = hosted.spec
    assert spec is not None
    ran = sorted(seconds for seconds, _ in latest)
    running = list(itertools.islice(_running(hosted, now), _CALLS))
    mailbox = []
    for queue, waiting, under_way, oldest in hosted.mailbox.queue_lengths():
        row = {
            "group": queue.name,
            "is_async": queue.is_async,
            "waiting": waiting,
            "running": under_way,
            "limit": queue.limit,
        }
        if isinstance(oldest, Envelope):
            row["oldest"] = max(0.0, now - oldest.received_at)
            row["next"] = _text(oldest.header.get("method", "__init__"))
        mailbox.append(row)
    return {
        "actor_id": f"{spec.actor_id:016x}",
        "instance": f"{hosted.id:016x}",
        "title": hosted.title,
        "class_name": spec.info.name,
        "name": spec.descriptor.name,
        "namespace": spec.descriptor.namespace,
        "state": hosted.state,
        "supervisor": spec.descriptor.supervisor_name,
        "detached": spec.options.lifetime == "detached",
        "max_restarts": spec.options.max_restarts,
        "age": now - hosted.begun,
        "calls_done": max(0, hosted.calls - sum(each["method"] != "__init__" for each in running)),
        "mailbox": mailbox,
        "running": running,
        "latest": len(ran),
        "failed": sum(failed for _, failed in latest),
        "p50": ran[len(ran) // 2] if ran else 0.0,
        "p99": ran[len(ran) * 99 // 100] if ran else 0.0,
    }


def _running(hosted: HostedActor, now: float) -> Iterable[dict[str, Any]]:
    for runner in list(hosted.runners):
        entries = [each for each in runner.entered if isinstance(each, Envelope)]
        for entry in entries:
            waits_for = runner.waits_for if entry is entries[-1] else []
            yield _call(entry, now, runner.ident, waits_for)
    for loop in list(hosted.loops.values()):
        held = loop.running
        for entry in list(loop.entries.values()):
            if entry is held:
                yield _call(entry, now, loop.ident, loop.waits_for)
            else:
                awaits = [] if entry.task is None else _awaited_by(entry.task)
                yield _call(entry, now, loop.ident if entry is loop.plain else 0, awaits)


def _awaited_by(task: asyncio.Task[Any]) -> list[Call | Stall]:
    """Return the calls and streams that a coroutine awaits; empty if it awaits a user's future, whose methods must not run."""
    known = type(task) is asyncio.Task and type(getattr(task, AWAITED, None)) in _WAITERS
    return awaited_by(task) if known else []


def _call(entry: Envelope, now: float, thread: int, waits_for: list[Call | Stall]) -> dict[str, Any]:
    return {
        "method": _text(entry.header.get("method", "__init__")),
        "caller": entry.peer.name,
        "since": max(0.0, now - entry.received_at),
        "left": _remaining(entry.deadline, now),
        "execution": f"{entry.chain:016x}" if entry.begun else "",
        "chain": [f"{each:016x}" for each in (entry.path[:-1] if entry.begun else entry.path)],
        "thread": thread,
        "waits_for": [_say_awaited(each) for each in waits_for[:10]],
    }


def _say_awaited(what: object) -> str:
    if isinstance(what, Future):
        what = what.label
    if type(what) is str:
        return _text(what)
    if isinstance(what, Call):
        return f"the call of {_text(what.label)} on {what.peer.name!r}"
    if isinstance(what, Producer):
        items, size = what.ahead
        consumer = what.peer.name if what.peer is not None else "its consumer"
        return f"{consumer!r} to take some of {items} items ({size / (1 << 20):.1f} MiB) of its stream"
    return "the next item of a stream"


def _supervised(worker: Worker, first: int, most: int) -> _Part:
    if worker.actors is None:
        return {"supervised": []}, None
    rows, more = worker.actors.supervisor.page(first, most, dead=_DEAD)
    found = [
        {
            "actor_id": f"{row.actor_id:016x}",
            "instance": f"{row.instance_id:016x}",
            "class_name": row.class_name,
            "name": row.name,
            "namespace": row.namespace,
            "state": row.state,
            "worker": row.worker,
            "pid": row.pid,
            "restarts": row.restarts,
            "death_cause": _text(row.death_cause),
            "dead_for": row.dead_for,
            "detached": row.detached,
            "supervisor": row.supervisor,
        }
        for row in rows
        if row.class_name != TASKS
    ]
    return {"supervised": found}, first + most if more else None


# -- references --------------------------------------------------------------------------------------------------


def _holders(worker: Worker, first: int, most: int) -> _Part:
    """Return the references to a page of the values that this worker owns, added up by holder, class and actor."""
    if worker.references is None:
        return {"holders": []}, None
    agent = worker.agent
    names = {each.key: each.name for each in (agent.self_peer, *agent.peers())}
    rows: dict[tuple[str, str, str], list[int]] = {}
    values, more = worker.references.table.held_values(first, most)
    with NoFunctionModes():  # a torch function mode of the user may be active in this thread
        for outcome, handles, holders in values:
            what, actor, size = _value(outcome)
            counts = Counter(holders)
            if handles:
                counts[agent.self_peer.key] += handles
            for key, references in counts.items():
                row = rows.setdefault((names.get(key) or f"rank {key.rank}", what, actor), [0, 0])
                row[0] += references
                row[1] += size
    found = [
        {"holder": holder, "what": what, "actor_id": actor, "references": references, "bytes": size}
        for (holder, what, actor), (references, size) in rows.items()
    ]
    return {"holders": found}, first + most if more else None


def _value(outcome: Outcome | None) -> tuple[str, str, int]:
    """Return class, actor id (empty unless an actor's handles refer to the value) and bytes of a value; runs no code of it."""
    if outcome is None:
        return "nothing yet", "", 0
    if outcome.error is not None:
        return "an error", "", 0
    value: Any = outcome.value
    if issubclass(type(value), Future):  # a promise
        value = value.value_or_none
    kind = type(value)
    if kind is LifetimeToken:
        return "actor", f"{value.actor_id:016x}", 0
    if kind is Snapshot:
        return "a kept result", "", value.nbytes
    size = 0
    if kind in _TENSORS and value.layout is torch.strided:
        size = value.untyped_storage().nbytes()
    elif kind in _RAW:
        size = len(value)
    return _name_of_class(kind), "", size


_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_RAW: Final = frozenset({bytes, bytearray})


# -- stacks ------------------------------------------------------------------------------------------------------


def _stacks(worker: Worker, first: int, most: int) -> _Part:
    """Return a page of the stacks of all other threads, by identifier, from the identifier ``first`` on; see :func:`_hosted`."""
    names = {each.ident: each.name for each in threading.enumerate()}
    own = threading.get_ident()
    frames = sorted(each for each in top_frames().items() if first <= each[0] != own)
    stacks = [_stack(ident, names.get(ident, ""), frame) for ident, frame in frames[:most]]
    for wait in list(worker.group.waits) if worker.group is not None else ():
        for each in stacks:
            if each["ident"] == wait.thread:
                each["waits_for"].append(f"other workers to enter {_text(wait.round)}")
    return {"threads": stacks}, frames[most][0] if len(frames) > most else None


def _stack(ident: int, name: str, frame: FrameType | None) -> dict[str, Any]:
    waits_for = _waits_for(frame)
    found: list[dict[str, Any]] = []
    while frame is not None and len(found) < _FRAMES:
        code = frame.f_code
        found.append({"function": code.co_qualname, "file": code.co_filename, "line": frame.f_lineno or 0})
        frame = frame.f_back
    found.reverse()
    return {"ident": ident, "name": _text(name), "frames": found, "waits_for": waits_for}


def _waits_for(frame: FrameType | None) -> list[str]:
    """Describe what a thread waits for. If the thread is in ``run_until_complete()``, describe what that call's task awaits."""
    what = waited_for_on(frame)
    if what is not None:
        found: list[Any] = awaited(what) or [what]
    else:
        task = loop_on(frame)[1]
        found = _awaited_by(task) if isinstance(task, asyncio.Task) else []
    return [_say_awaited(each) for each in found[:10]]


#: ``(worker, begin, limit)`` -> fields of the answer, and the begin of the next page, or None
_Gather = Callable[[Worker, int, int], _Part]
_PARTS: Final[tuple[tuple[str, _Gather, int], ...]] = (
    ("actors", _hosted, _ACTORS),
    ("supervised", _supervised, _SUPERVISED),
    ("holders", _holders, _VALUES),
    ("threads", _stacks, _THREADS),
    ("process", _process, 0),
    ("members", _members, 0),
    ("logs", _logs, _LINES),
    ("records", _records, _RECORDS),
    ("profiles", _profiles, 0),
    ("metrics", _metrics, 0),
)
