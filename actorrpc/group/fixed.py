"""How the workers of a fixed group (``world_size`` given) meet: at rank 0, over encrypted connections.

1. Rank 0 listens, announces its address in the store (:mod:`actorrpc.group.rank0`), and starts its agent.
2. Each other worker reads the address, connects to rank 0 as a visitor, and sends its record.
3. When all records have come, rank 0 checks them. It answers with an error at once, or with the table of all workers when it is
   ready to serve calls, because members may call rank 0 as soon as they have the table.

A worker that waits too long tells rank 0, and rank 0 answers all visitors with an error that names the missing ranks. The record
of a visitor whose connection has ended is dropped, so that killed workers leave nothing behind.

On rank 0, pool threads receive the records, and drop the records of visitors whose connection has ended; the
thread that joins does all other work. ``_lock`` guards ``_here``, ``_late``, ``_over``, ``_admitted`` and ``_is_published``; no
other code runs under it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from actorrpc import _time
from actorrpc.agent.agent import Agent
from actorrpc.agent.peers import Peer
from actorrpc.config import Settings
from actorrpc.errors import (
    ConfigError,
    RendezvousError,
    RpcError,
)
from actorrpc.group import rank0
from actorrpc.group.rank0 import LEADER, MeetingAtRank0
from actorrpc.group.rendezvous import (
    StoreLike,
    check_device_maps,
    listed,
    pack,
    unpack,
)
from actorrpc.group.store import poll, some
from actorrpc.transport.signals import checkpoint
from actorrpc.transport.stream import OPEN
from actorrpc.transport.visit import Target, Visitor
from actorrpc.wire import frames
from actorrpc.wire.frames import pack_frame, pack_header
from actorrpc.wire.identity import WorkerRecord
from actorrpc.wire.keys import Key

__all__ = ["FixedRendezvous"]

_MEET, _MET = "meet", "met"  # names of notices: a visitor sends "meet", and rank 0 answers with "met"
_TABLE, _ERROR, _OVER = "table", "error", "over"
_ERRORS: Final = {each.__name__: each for each in (RendezvousError, ConfigError)}
_GRACE_S: Final = 2.0  # how long to wait until the others have read an error, or until rank 0 has sent it
_log = logging.getLogger("actorrpc.cluster")
_LOOK_S: Final = 1.0  # how often rank 0 checks that no other rank 0 has replaced its address
_ATTEMPT_S: Final = 2.0  # the time limit of one attempt to connect, which Ctrl-C does not interrupt
_PART: Final = 1 << 20  # bytes of records in one notice


class FixedRendezvous(MeetingAtRank0):
    """One worker's part in the rendezvous of a fixed group; see :class:`Rendezvous`.

    The worker calls :meth:`enter`, rank 0 then :meth:`gather`, and, when it serves calls, :meth:`publish`.
    """

    def __init__(self, store: StoreLike, *, size: int, timeout: float) -> None:
        # torchrun keeps its store when it restarts the workers, so each restart needs another prefix. Each host counts its own
        # restarts: on several hosts the counts may differ, and are not used.
        alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"
        super().__init__(store, f"fixed/{size}/{restarts}/", timeout)
        self._size = size
        self._table: dict[str | int, WorkerRecord] = {}  # by name and by rank
        self._lock = _time.Lock()
        # On rank 0: the visitors by the incarnations of their workers, and their records.
        self._here: dict[str, tuple[Peer, WorkerRecord]] = {}
        self._late = 0.0  # the time-out of the first worker that has timed out, or 0
        # Whether the meeting has ended. If so, visitors get the answer ``_OVER``, except workers that took part (``_admitted``).
        self._over = False
        self._admitted: frozenset[str] = frozenset()  # incarnations
        self._is_published = False
        self._changed = _time.Event()

    def resolve(self, to: str | int) -> WorkerRecord | None:
        """Return the worker of this name or rank; None if there is none."""
        return self._table.get(to)

    def members(self) -> list[WorkerRecord]:
        """Return the records of all workers by rank; an empty list before they have met."""
        return [self._table[rank] for rank in range(self._size)] if self._table else []

    def enter(self, record: WorkerRecord, own_key: Key | None, settings: Settings) -> Key | None:
        """Agree on the group's key, and return it; None if the group has none. Except on rank 0, also meet the other workers.

        Rank 0 publishes its address, so its sockets must listen already; connections then wait until its agent has started.

        Workers that were given a key use it. Otherwise rank 0 makes a file that only this user can read, and the others on its
        host read it.

        Raises:
            AuthenticationError: the workers do not share a key.
            RendezvousError: a worker did not join in time, a name or rank is taken, some workers cannot reach each other, or the
                store failed.
            ConfigError: the device maps of some workers do not fit.
        """
        self._deadline = _time.now() + self.timeout
        self.key_is_given = own_key is not None
        if record.rank:
            return self._follow(record, own_key, settings)
        key = self._make_key() if own_key is None and not settings.insecure else own_key
        shown = WorkerRecord(
            name="rank0", rank=0, incarnation=record.incarnation, host="unknown", tcp=record.tcp
        )
        # The store is readable by others: it gets the host and the socket's path only if the workers need them.
        if self._key_file is not None or not record.tcp:
            shown = replace(shown, host=record.host, unix_path=record.unix_path)
        self._announce(key, shown.to_bytes(), record.host)
        return key

    def _set_table(self, records: Collection[WorkerRecord]) -> None:
        for each in records:
            self._table[each.name] = self._table[each.rank] = each

    # -- rank 0 ----------------------------------------------------------------------------------------

    def gather(self, agent: Agent, sockets: list[socket.socket]) -> None:
        """Start rank 0's agent, and collect the records of all workers.

        Raises:
            RendezvousError, ConfigError: as :meth:`enter`; all connected workers raise the same error.
        """
        agent.on_notice[_MEET] = self._received
        agent.inbox.prompt.add(_MEET)
        agent.on_peer_end.append(self._ended)
        agent.start(sockets)
        look_at, log_at = _time.now() + _LOOK_S, _time.now() + rank0.SILENT_S
        while (found := self._close_when_all_are_here()) is None:
            self._changed.wait(min(0.1, max(0.0, self._deadline - _time.now())))
            self._changed.clear()
            checkpoint()
            if _time.now() >= log_at:
                log_at = math.inf
                here = [record for _, record in list(self._here.values())]
                _log.warning("init_rpc on rank 0 waits for rank %s", self._missing([agent.record, *here]))
            if _time.now() >= look_at:
                look_at = _time.now() + _LOOK_S
                if self._find(LEADER) not in (self._value, None):
                    self._send(pack(_OVER))
                    raise RendezvousError(
                        "another rank 0 has come to the store: give every worker a rank of its own, and every group its own port "
                        "or file"
                    )
        records = [agent.record, *found]
        try:
            self._judge(records)
        except (RendezvousError, ConfigError) as error:
            self._send(pack(_ERROR, type(error).__name__, str(error)))
            poll(lambda: not self._here, _time.now() + _GRACE_S)
            raise
        self._set_table(records)
        self._forget_key_file()  # every worker has read it

    def _received(self, peer: Peer, body: bytes) -> None:
        """Handle a visitor's notice: the worker's record, and its time-out in seconds if the time-out has passed, otherwise 0."""
        try:
            packed, late = unpack(body, bytes, float)
            record = WorkerRecord.from_bytes(packed)
        except RendezvousError as error:
            self._send(pack(_ERROR, RendezvousError.__name__, f"rank 0 refuses this worker: {error}"), [peer])
            return
        with self._lock:
            # After the meeting, only its workers are admitted. Such a worker sends its record again if it has reconnected, or if
            # it times out before publish(). It gets the table, as the others do.
            is_admitted = not self._over or record.incarnation in self._admitted
            if is_admitted:
                self._here[record.incarnation] = peer, record
                self._late = self._late or late
            is_published = self._is_published
        if not is_admitted:
            self._send(pack(_OVER), [peer])
        elif is_published:
            self._send_table([peer])
        self._changed.set()

    def _ended(self, peer: Peer) -> None:
        """Remove the record of a visitor whose connection has ended."""
        with self._lock:
            for incarnation in [name for name, each in self._here.items() if each[0] is peer]:
                del self._here[incarnation]

    def _close_when_all_are_here(self) -> list[WorkerRecord] | None:
        """If all records have come or a worker has timed out, admit no more visitors and return the records; otherwise None."""
        with self._lock:
            if not self._late and _time.now() >= self._deadline:
                self._late = self.timeout
            # Visitors never resume a broken connection, so drop each visitor whose connection is suspended.
            here = {name: each for name, each in self._here.items() if _is_connected(each[0])}
            if len(here) + 1 < self._size and not self._late:
                return None
            self._over, self._here, self._admitted = True, here, frozenset(here)
            return [record for _, record in here.values()]

    def _judge(self, records: list[WorkerRecord]) -> None:
        """Check the records of the connected workers."""
        size = self._size
        if len(records) < size:
            raise RendezvousError(
                f"{len(records)} of {size} workers came within {self._late:g} s; missing: rank {self._missing(records)}; here: "
                f"{listed(records)}. A worker that has another key than rank 0, or none, does not come; its own error says so"
            )
        ranks, names = Counter(r.rank for r in records), Counter(r.name for r in records)
        wrong = [r for r in records if ranks[r.rank] > 1] or [r for r in records if not 0 <= r.rank < size]
        if wrong:
            raise RendezvousError(
                f"every worker needs a rank of its own from 0 to {size - 1}: {listed(wrong)}"
            )
        same = [r for r in records if names[r.name] > 1]
        if same:
            raise RendezvousError(f"every worker needs a name of its own: {listed(same)}")
        hosts = {r.host for r in records}
        mute = [r for r in records if (len(hosts) > 1 or r.unix_path is None) and not r.tcp]
        if mute and len(records) > 1:
            raise RendezvousError(
                f"the workers are on {len(hosts)} hosts (or in containers, or of different users) and these "
                f"listen on no address that the others can reach: {listed(mute)}. Give every worker the same key "
                "(ACTORRPC_KEY_FILE), and do not set ACTORRPC_TRANSPORT=unix; then they listen on TCP (ACTORRPC_BIND says on "
                "which address)"
            )
        by_name = {each.name: each for each in records}
        check_device_maps(records, by_name.get, fixed=True)

    def _missing(self, records: list[WorkerRecord]) -> str:
        return some(sorted(set(range(self._size)) - {each.rank for each in records}))

    def publish(self) -> None:
        """Send the table to all workers. Rank 0 calls this when it serves calls."""
        with self._lock:
            self._is_published = True
            peers = [peer for peer, _ in self._here.values()]
        self._send_table(peers)

    def _send_table(self, peers: list[Peer]) -> None:
        rows = [each.to_bytes() for each in self.members()]
        while rows:
            part: list[bytes] = []
            size = 0
            while rows and size < _PART:
                part.append(rows.pop())
                size += len(part[-1])
            self._send(pack(_TABLE, part), peers)

    def leave(self) -> None:
        """Send an error to the workers that wait for the table, if rank 0 leaves before :meth:`publish`. Idempotent."""
        if self._table and not self._is_published:
            text = "rank 0 could not start after the workers had met; its own error says why. Start all workers again"
            self._send(pack(_ERROR, RendezvousError.__name__, text))
            self._here = {}

    def _send(self, body: bytes, peers: Iterable[Peer] | None = None) -> None:
        """Send a notice to visitors (by default to all) over their own connections, because visitors cannot be dialled."""
        # All visitors share the bytes, which may be some MiB.
        notice = pack_frame(frames.NOTICE, body=body, extra=pack_header({"notice": _MET}))
        for peer in [each for each, _ in list(self._here.values())] if peers is None else peers:
            conn = peer.conn
            if conn is not None:
                conn.outbox.append(notice)
                conn.flush()

    # -- other ranks -----------------------------------------------------------------------------------

    def _follow(self, record: WorkerRecord, own_key: Key | None, settings: Settings) -> Key | None:
        """Visit rank 0 and wait for the table; return the key."""

        def visit(address: bytes, key: Key | None) -> tuple[list[WorkerRecord], Key | None] | RpcError | None:
            answer = self._visit(WorkerRecord.from_bytes(address), key, record, settings)
            return (answer, key) if isinstance(answer, list) else answer

        table, key = self._reach(
            visit,
            own_key,
            record.host,
            insecure=settings.insecure,
            rank=record.rank,
            caller="init_rpc",
            # Look less often in large groups, because all workers ask one server.
            slowest=min(0.5, max(0.02, self._size / 2000)),
        )
        self._set_table(table)
        return key

    def _visit(
        self, leader: WorkerRecord, key: Key | None, record: WorkerRecord, settings: Settings
    ) -> list[WorkerRecord] | RpcError | None:
        """Send the record to rank 0, and wait for its answer: the table, an error, or None if rank 0 has met its group before.

        Raises:
            OSError: rank 0 cannot be reached, or has ended.
            ProtocolError: rank 0 refuses the connection.
            LimitError: rank 0 has no descriptor left.
            RendezvousError: rank 0 has no address here, or has not answered in time.
        """
        target = Target.of(leader, key, settings)
        # The record in the store has the name "rank0", not the name of the worker, so the handshake checks only the incarnation.
        target = replace(target, record=None, incarnation=leader.incarnation)
        if not target.addresses:
            raise RendezvousError(
                "rank 0 is on another host (or in a container, or of another user) and listens on no address that this worker "
                "can reach: give rank 0 an address (ACTORRPC_BIND)"
            )
        limit = self._deadline
        rows: list[WorkerRecord] = []
        with contextlib.closing(Visitor(target, min(limit, _time.now() + _ATTEMPT_S))) as visitor:
            visitor.tell(_MEET, pack(record.to_bytes(), 0.0))
            while True:
                for body in visitor.hear(_MET, limit):
                    kind, *rest = unpack(body)
                    if kind == _TABLE:
                        rows += map(WorkerRecord.from_bytes, rest[0])
                        if len(rows) < self._size:
                            continue
                        if record in rows and len(rows) == self._size:
                            return rows
                        return RendezvousError(
                            "rank 0 has sent a table without this worker: start all workers again"
                        )
                    elif kind == _ERROR:
                        return _ERRORS.get(rest[0], RendezvousError)(rest[1])
                    else:
                        return None
                if _time.now() >= limit:
                    if limit > self._deadline:
                        raise RendezvousError(f"rank 0 has not answered within {self.timeout:g} s")
                    # Tell rank 0 that the time-out has passed. Rank 0 then sends an error that names the missing ranks.
                    visitor.tell(_MEET, pack(record.to_bytes(), float(self.timeout)))
                    limit += _GRACE_S


def _is_connected(peer: Peer) -> bool:
    conn = peer.conn
    return conn is not None and conn.state is OPEN
