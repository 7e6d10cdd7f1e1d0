"""Members: who is in the group, how they are, and word of every change of that."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

from actorrpc import moments
from actorrpc.core.agent import Agent
from actorrpc.core.changes import Listener, state_of
from actorrpc.core.identity import WorkerRecord
from actorrpc.core.peer import Peer
from actorrpc.errors import RpcError, WrongTypeError
from actorrpc.rpc import api
from actorrpc.rpc.group import Group

__all__ = ["WorkerState", "on_member_change", "workers"]

_log = logging.getLogger("actorrpc.members")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """How one worker is, as far as this one knows.

    Attributes:
        name: its name in the group.
        rank: its number in the group.
        state: ``"alive"``; ``"suspect"``: connected, but silent for two heartbeats; ``"dead"``: its process ended, or
            it was silent for too long; ``"left"``: it shut down. The last two are final.
        last_seen: seconds since anything was heard of it; 0 for this worker itself, None where there has been no contact.
        host: the machine it runs on: the name of this one, or the address that it can be reached at.
        pid: its process there.
    """

    name: str
    rank: int
    state: str
    last_seen: float | None
    host: str
    pid: int


def workers() -> list[WorkerState]:
    """Return how every worker of the group is, this one included, by rank. Thread-safe.

    Workers that have ended are listed, too, if there was contact with them: the last 128 that did. Of workers that there has
    been no contact with, nothing is known but that they joined. Where workers may join at any time, the store or the driver
    is asked who is there; where that fails, those are listed that this worker knows.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
    """
    agent = api.group().agent
    try:
        records = agent.members()
    except RpcError as error:
        _log.info("nobody says who is in the group: %s", error)
        records = []
    members = [peer for peer in agent.peers() if not peer.record.is_visitor]
    known = {peer.record.incarnation: peer for peer in (agent.self_peer, *members)}
    rows = {row.incarnation: row for row in [*(peer.record for peer in known.values()), *records]}
    now = moments.now()
    states = [_state(agent, row, known.get(row.incarnation), now) for row in rows.values()]
    return sorted(states, key=lambda state: (state.rank, state.name, state.state))


def _state(agent: Agent, record: WorkerRecord, peer: Peer | None, now: float) -> WorkerState:
    seen: float | None = None
    if peer is not None and peer.is_self:
        seen = 0.0
    elif peer is not None:
        conn = peer.conn
        heard = peer.liveness.heard if conn is None else max(conn.heard, peer.liveness.heard)
        seen = max(0.0, now - heard) if heard > 0 else None
    if record.host == agent.record.host:
        host = socket.gethostname()
    else:
        host = record.tcp[0][0] if record.tcp else record.host[:8]
    return WorkerState(
        name=record.name,
        rank=record.rank,
        state="alive" if peer is None else state_of(peer),
        last_seen=seen,
        host=host,
        pid=record.pid,
    )


def on_member_change(callback: Listener) -> Callable[[], None]:
    """Have ``callback(worker, old, new, reason)`` called whenever the state of another worker changes.

    ``worker`` is a :class:`WorkerInfo`; ``old`` and ``new`` are states as in :class:`WorkerState`; ``reason`` says why in
    words. Each change is told once, in order, on a thread of the pool and with no lock held; the callback may make calls,
    but the next change is told only when it has returned. What it raises is logged. It is not called for joining, nor once
    this worker has shut down.

    So that all ends are noticed, this worker connects to all others that are there (in the background). A worker that
    joins later is watched from the first contact with it.

    Returns:
        What ends it: a function without arguments, which may be called more than once and on any thread.

    Raises:
        NotInitializedError: RPC is not initialised in this process.
        WrongTypeError: ``callback`` cannot be called.
    """
    group = api.group()
    if not callable(callback):
        raise WrongTypeError(f"callback must be callable with four arguments, not {callback!r}")
    remove = group.agent.upkeep.changes.listen(callback)
    group.agent.submit(lambda: _watch(group))
    return remove


def _watch(group: Group) -> None:
    try:
        group.watch_all()
    except RpcError as error:
        _log.info("only workers that there is contact with are watched: %s", error)
