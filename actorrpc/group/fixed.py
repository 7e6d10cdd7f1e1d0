"""How the workers of a fixed group (``world_size`` given) meet: at rank 0, over encrypted connections.

1. Rank 0 listens and writes one value into the store: its address, with an HMAC of the group's key. Then it starts its agent.
2. Each other worker reads the value, connects to rank 0 as a visitor, and sends its record.
3. When all records have come, rank 0 checks them. It answers with an error at once, or with the table of all workers when it is
   ready to serve calls, because members may call rank 0 as soon as they have the table.

A worker that waits too long tells rank 0, and rank 0 answers all visitors with an error that names the missing ranks. The record
of a visitor whose connection has ended is dropped, so that killed workers leave nothing behind. Several groups may use one store,
one after the other: each group's rank 0 overwrites the value. A worker that reads the value of an earlier group finds no rank 0
there, or a rank 0 that has met its group already; it polls the store for the next value.

The store does not protect the value, so an attacker can replace it by an earlier one; the handshake with the worker at that
address then fails. On rank 0, pool threads receive the records, and drop the records of visitors whose connection has ended; the
thread that joins does all other work. ``_lock`` guards ``_here``, ``_late`` and ``_over``; no other code runs under it. Once no
visitor is admitted, the joining thread reads and replaces ``_here`` without the lock.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from actorrpc import _time
from actorrpc.agent.agent import Agent
from actorrpc.agent.peers import Peer
from actorrpc.config import Settings
from actorrpc.errors import (
    AuthenticationError,
    ConfigError,
    LimitError,
    ProtocolError,
    RendezvousError,
    RpcError,
)
from actorrpc.group.rendezvous import (
    FILE,
    GIVEN,
    OTHERS,
    Rendezvous,
    StoreLike,
    check_device_maps,
    listed,
    pack,
    unpack,
)
from actorrpc.group.store import attempts, poll, some
from actorrpc.transport.signals import checkpoint
from actorrpc.transport.stream import OPEN
from actorrpc.transport.visit import Target, Visitor
from actorrpc.wire import frames, keys
from actorrpc.wire.frames import pack_frame, pack_header
from actorrpc.wire.identity import WorkerRecord
from actorrpc.wire.keys import Key

__all__ = ["SILENT_S", "FixedRendezvous"]

_NONE: Final = "none"  # the group has no key, because its settings are insecure
_LEADER: Final = "leader"
_MEET, _MET = "meet", "met"  # the notices of a visitor and of rank 0
_TABLE, _ERROR, _OVER = "table", "error", "over"
_ERRORS: Final = {each.__name__: each for each in (RendezvousError, ConfigError)}
_GRACE_S: Final = 2.0  # how long to wait until the others have read an error, or until rank 0 has sent it
# How long a problem with a value must last before it is raised: an earlier group in this store may have left the value.
_STALE_S: Final = 2.0
SILENT_S = 10.0
"""How long a worker waits for other workers before it logs, once, for which workers it waits."""
_log = logging.getLogger("actorrpc.cluster")
_LOOK_S: Final = 1.0  # how often rank 0 checks that no other rank 0 has replaced its address
_ATTEMPT_S: Final = 2.0  # the time limit of one attempt to connect, which Ctrl-C does not interrupt
_PART: Final = 1 << 20  # bytes of records in one notice


class FixedRendezvous(Rendezvous):
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
        self._deadline = 0.0
        self._value = b""  # the value in the store that rank 0 has written
        self._table: dict[str | int, WorkerRecord] = {}  # by name and by rank
        self._lock = _time.Lock()
        # On rank 0: the visitors by the incarnations of their workers, and their records.
        self._here: dict[str, tuple[Peer, WorkerRecord]] = {}
        self._late = 0.0  # the time-out of the first worker that has timed out, or 0
        self._over = False  # visitors that come now get the answer ``_OVER``
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
        # The store is readable by others: it gets the host and the path only if the workers need them to find the key or rank 0.
        if self._key_file is not None or not record.tcp:
            shown = replace(shown, host=record.host, unix_path=record.unix_path)
        kind = GIVEN if self.key_is_given else _NONE if key is None else FILE
        body = pack(kind, self._key_file or "", shown.to_bytes())
        self._value = pack(body, b"" if key is None else key.sign(self._purpose(), body))
        self._store_op("set", _LEADER, self._value)
        return key

    def _purpose(self) -> str:
        return f"the address of rank 0 in {self._prefix}"

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
        look_at, log_at = _time.now() + _LOOK_S, _time.now() + SILENT_S
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
                if self._store_op("get", _LEADER) != self._value:
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
        packed, late = unpack(body)
        record = WorkerRecord.from_bytes(packed)
        with self._lock:
            if not self._over:
                self._here[record.incarnation] = peer, record
                self._late = self._late or late
            # A worker whose record was stored before sends a second notice when its time-out passes. It gets the table or an
            # error later. Only a visitor whose record was not stored has come too late.
            comes_late = self._here.get(record.incarnation, (None,))[0] is not peer
        if comes_late:
            _send_notice(peer, _packed_notice(pack(_OVER)))
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
            self._over, self._here = True, here
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
                "(ACTORRPC_KEY_FILE); then they listen on TCP (ACTORRPC_BIND says on which address)"
            )
        by_name = {each.name: each for each in records}
        check_device_maps(records, by_name.get, fixed=True)

    def _missing(self, records: list[WorkerRecord]) -> str:
        return some(sorted(set(range(self._size)) - {each.rank for each in records}))

    def publish(self) -> None:
        """Send the table to all workers. Rank 0 calls this when it serves calls."""
        rows = [each.to_bytes() for each in self.members()]
        while rows:
            part: list[bytes] = []
            size = 0
            while rows and size < _PART:
                part.append(rows.pop())
                size += len(part[-1])
            self._send(pack(_TABLE, part))
        self._here = {}

    def leave(self) -> None:
        """Send an error to the workers that wait for the table, if rank 0 leaves before :meth:`publish`. Idempotent."""
        if self._table and self._here:
            text = "rank 0 could not start after the workers had met; its own error says why. Start all workers again"
            self._send(pack(_ERROR, RendezvousError.__name__, text))
            self._here = {}

    def _send(self, body: bytes) -> None:
        notice = _packed_notice(body)  # all visitors share the bytes, which may be some MiB
        for peer, _ in list(self._here.values()):
            _send_notice(peer, notice)

    # -- other ranks -----------------------------------------------------------------------------------

    def _follow(self, record: WorkerRecord, own_key: Key | None, settings: Settings) -> Key | None:
        """Visit rank 0 and wait for the table; return the key. Repeat this while the store has the value of an earlier group."""
        problem: Exception | None = None  # of the last attempt
        over = b""  # the value of a rank 0 that has met its group already
        refused, since = b"", 0.0  # the value with which attempts have failed, and since when
        log_at = _time.now() + SILENT_S
        # Poll less often in large groups, because all workers ask one server.
        for _ in attempts(self._deadline, slowest=min(0.5, max(0.02, self._size / 2000))):
            if _time.now() >= log_at:
                log_at = math.inf
                why = "" if problem is None else f": {problem}"
                _log.warning("init_rpc on rank %d waits for rank 0%s", record.rank, why)
            value = self._find(_LEADER)
            if value is None or value == over:
                continue
            try:
                leader, key = self._read_value(value, record, own_key, settings)
                answer = self._visit(leader, key, record, settings)
            except (ProtocolError, RendezvousError) as error:
                if value != refused:
                    refused, since = value, _time.now()
                elif _time.now() - since >= _STALE_S:
                    raise
                problem = error
            except (OSError, LimitError) as error:
                problem = error
            else:
                if isinstance(answer, RpcError):
                    raise answer
                if answer is not None:
                    self._set_table(answer)
                    return key
                over, problem = value, RendezvousError("rank 0 has met other workers already")
        if isinstance(problem, ProtocolError):
            raise problem
        why = "" if problem is None else f"; the last attempt to reach it failed: {problem}"
        raise RendezvousError(f"rank 0 did not come within {self.timeout:g} s (the workers meet there){why}")

    def _read_value(
        self, value: bytes, record: WorkerRecord, own_key: Key | None, settings: Settings
    ) -> tuple[WorkerRecord, Key | None]:
        """Return the address of rank 0, as a record, and the key of the group, or None if the group has no key.

        Raises:
            OSError: the run of the group that has written the value has ended.
            AuthenticationError: the workers do not share a key.
            RendezvousError: the value cannot be read.
        """
        body, mac = unpack(value, bytes, bytes)
        kind, path, packed = unpack(body, str, str, bytes)
        leader = WorkerRecord.from_bytes(packed)
        if kind == _NONE:
            if own_key is None and settings.insecure:
                return leader, None
            raise AuthenticationError(
                "rank 0 has no key, because it was started with insecure=True: give all workers the same settings and key"
            )
        if kind == FILE and leader.host == record.host and (keys.is_stale(path) or not os.path.lexists(path)):
            raise ConnectionRefusedError("the store has the address of a run that has ended")
        key = self._accept(kind, path, leader.host, own_key, record.host)
        if not key.has_signed(self._purpose(), body, mac):
            raise AuthenticationError(
                "the address of rank 0 in the store was not written with this worker's key: give all workers the same "
                f"ACTORRPC_KEY. If they have it, {OTHERS}"
            )
        return leader, key

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
        target = Target.of(leader, key, replace(settings, transport="auto"))
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
                    visitor.tell(_MEET, pack(record.to_bytes(), self.timeout))
                    limit += _GRACE_S


def _is_connected(peer: Peer) -> bool:
    conn = peer.conn
    return conn is not None and conn.state is OPEN


def _packed_notice(body: bytes) -> bytes:
    return pack_frame(frames.NOTICE, body=body, extra=pack_header({"notice": _MET}))


def _send_notice(peer: Peer, notice: bytes) -> None:
    """Send a notice to a visitor over its own connection, because visitors cannot be dialled."""
    conn = peer.conn
    if conn is not None:
        conn.outbox.append(notice)
        conn.flush()
