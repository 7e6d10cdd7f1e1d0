"""A visitor queries workers from a process that is in no group. It needs neither torch nor an agent.

It connects to a worker as a peer does, proves the key in the same handshake, introduces itself with a rank from the range of
visitors, and sends questions. It is not a member of the group: other workers do not learn of the visitor, and the
worker forgets the visitor when it disconnects.

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

A question ``{"id", "do", "whom"}`` requests an action; its answer is ``{"id", "problem"}``. Pickle is not used.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgpack

from actorrpc._exceptions import undo_on_error
from actorrpc.config import Settings
from actorrpc.errors import AuthenticationError, ProtocolError, RpcError
from actorrpc.observe.trace import compare_clocks
from actorrpc.transport.failure_detector import process_state
from actorrpc.transport.tls import AnySocket, Tls, authenticate
from actorrpc.transport.tls_socket import TlsSocket
from actorrpc.wire import frames
from actorrpc.wire.frames import Frame, FrameReader, pack_frame, pack_header, unpack_header
from actorrpc.wire.handshake import Dialler, Session
from actorrpc.wire.identity import FIRST_VISITOR, WorkerRecord, host_identity, new_incarnation
from actorrpc.wire.keys import Key

__all__ = [
    "ACTING",
    "ANSWER",
    "ASK",
    "KeptVisits",
    "Target",
    "Visit",
    "all_pages",
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

_SLICE_S: Final = 0.1  # seconds between two checks whether the worker's process on this host runs
_MAX_FRAME: Final = 16 << 20
_SAY_EVERY: Final = 1 << 20


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


def all_pages(
    query: Callable[[list[str], dict[str, int]], dict[str, Any]],
    parts: list[str],
    begin: dict[str, int] | None,
) -> dict[str, Any]:
    """Request page after page (at most ``_PAGES``), and return one answer with the rows of all pages.

    Args:
        query: sends a question for the given parts, from the given begins on, and returns the answer.
        begin: by part: where the first page begins.
    """
    whole: dict[str, Any] = {}
    wanted, at = parts, begin or {}
    for _ in range(_PAGES):
        page = query(wanted, at)
        for part in _PAGED:
            if isinstance(page.get(part), list) and isinstance(whole.get(part), list):
                page[part] = [*whole[part], *page[part]]
        whole |= page
        following = page.get("next")
        rows = following.items() if isinstance(following, dict) else ()
        at = {part: place for part, place in rows if part in parts and type(place) is int}
        if not at:
            break
        wanted = list(at)
    return whole


@dataclass(slots=True, kw_only=True)
class Target:
    """The address of a worker, and what a visitor needs to connect to it.

    Attributes:
        record: the worker's record; None if only its address is known.
        addresses: where the worker listens: paths of Unix sockets, or ``(host, port)``.
        key: the key of the group; None if the group has none.
        settings: the settings of TLS.
    """

    record: WorkerRecord | None
    addresses: list[str | tuple[str, int]]
    key: Key | None
    settings: Settings = field(default_factory=Settings)

    @classmethod
    def of(cls, record: WorkerRecord, key: Key | None, settings: Settings) -> Target:
        """Return the target that a record describes."""
        addresses: list[str | tuple[str, int]] = list(record.tcp)
        if record.unix_path and record.host == host_identity():
            addresses = [record.unix_path]
        return cls(record=record, addresses=addresses, key=key, settings=settings)

    @staticmethod
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

    @property
    def local_pid(self) -> int:
        """The process id of the worker if it is on this host, else 0."""
        record = self.record
        return record.pid if record is not None and record.host == host_identity() else 0


class Visit:
    """A connection of a visitor to one worker. Not thread-safe.

    Args:
        target: the worker.
        until: the time limit for connecting, on the monotonic clock.
        acts: allow :meth:`act`; the visitor gets a name by which the worker accepts actions.
        silence: seconds without a byte from the worker after which a wait fails.

    Attributes:
        silence: the argument ``silence``; may be changed.

    Raises:
        OSError: there is no connection (TimeoutError: not in time).
        AuthenticationError, VersionError, ProtocolError: the handshake has failed.
    """

    def __init__(
        self, target: Target, until: float, *, acts: bool = False, silence: float = float("inf")
    ) -> None:
        self._acts = acts
        self.silence = silence
        self._numbers = 0
        self._received = self._said = 0
        self._target = target
        self._pid = target.local_pid
        if not target.addresses:
            raise OSError("it listens on no address that this process can reach")
        problem: OSError | None = None
        for address in target.addresses:
            try:
                self._sock, result = self._connect(address, until)
                break
            except OSError as error:
                if isinstance(error, RpcError):
                    raise
                problem = error
        else:
            assert problem is not None
            raise problem
        self.name = result.peer_name
        self.incarnation = result.peer_incarnation
        self._reader = FrameReader(max_frame=_MAX_FRAME, max_chunk=_MAX_FRAME)
        own = WorkerRecord(
            name=self._own,
            rank=FIRST_VISITOR + secrets.randbits(29),
            incarnation=self._incarnation,
            host=f"visitor-{secrets.token_hex(8)}",
            pid=os.getpid(),
        )
        self._send(pack_frame(frames.INTRO, body=own.to_bytes()))

    def _connect(self, address: str | tuple[str, int], until: float) -> tuple[AnySocket, Session]:
        """Connect and perform the handshake; return the socket and the session."""
        target = self._target
        self._own = f"{ACTING if self._acts else 'visitor-'}{secrets.token_hex(6)}"
        self._incarnation = new_incarnation()
        tls = None
        if isinstance(address, str):
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            with undo_on_error(plain.close):
                plain.settimeout(_remaining(until))
                plain.connect(address)
        else:
            tls = Tls.load(target.settings)
            plain = socket.create_connection(address, _remaining(until))
        record = target.record
        dialler = Dialler(
            name=self._own,
            incarnation=self._incarnation,
            key=b"" if target.key is None else target.key.reveal(),
            peer_name=None if record is None else record.name,
            peer_incarnation=None if record is None else record.incarnation,
            insecure=target.key is None,
        )
        try:
            wait = partial(self._wait, until)
            return authenticate(plain, tls, dialler, until, f"the worker at {address}", wait)
        except AuthenticationError as error:
            if dialler.replaced:  # another run of the worker has the address; the key is right
                raise ConnectionRefusedError(str(error)) from error
            raise

    def _wait(self, until: float, sock: AnySocket) -> None:
        """Wait until the socket is readable.

        Raises:
            TimeoutError: no byte arrived in time, or the worker's process on this host is stopped or has ended.
        """
        if isinstance(sock, TlsSocket) and sock.pending:
            return
        pid = self._pid
        until = min(until, time.monotonic() + self.silence)
        poller = select.poll()
        poller.register(sock.fileno(), select.POLLIN)
        while not poller.poll(1000 * min(_SLICE_S, _remaining(until))):
            if time.monotonic() >= until or (pid and process_state(pid) != "running"):
                raise TimeoutError("it has not answered in time")

    def _send(self, frame: bytes) -> None:
        self._sock.settimeout(1.0)
        self._sock.sendall(frame)

    # -- questions ---------------------------------------------------------------------------------------------

    def query(self, parts: list[str], until: float, begin: dict[str, int] | None = None) -> dict[str, Any]:
        """Return the worker's answer, with all pages of the requested parts; for records also with the comparison of clocks.

        Raises:
            OSError: the connection has ended (TimeoutError: no answer in time).
            ProtocolError: the worker sent something that is not valid.
        """

        def query(wanted: list[str], at: dict[str, int]) -> dict[str, Any]:
            return self._say({"what": wanted, "from": at}, until)

        found = all_pages(query, parts, begin)
        if "records" in parts:  # a worker on this host uses the same clock
            found["clock"] = (0.0, 0.0) if self._pid else compare_clocks(query, time.monotonic)
        return found

    def tell(self, notice: str, body: bytes) -> None:
        """Send a notice. Raises OSError if the connection has ended."""
        self._send(pack_frame(frames.NOTICE, body=body, extra=pack_header({"notice": notice})))

    def hear(self, notice: str, until: float) -> list[bytes]:
        """Wait for frames; return the bodies of the notices with this name among them, which may be none.

        Raises:
            OSError: the connection has ended.
        """
        try:
            return self._notices(notice, until)
        except TimeoutError:
            return []

    def _notices(self, notice: str, until: float) -> list[bytes]:
        return [
            bytes(frame.body)
            for frame in self._frames(until)
            if frame.kind == frames.NOTICE and unpack_header(frame.extra).get("notice") == notice
        ]

    def act(self, what: str, whom: str, until: float) -> str:
        """Request an action; return the problem that prevented it, or an empty string.

        Raises the errors of :meth:`query`.
        """
        return str(self._say({"do": what, "whom": whom}, until).get("problem", ""))

    def _say(self, question: dict[str, Any], until: float) -> dict[str, Any]:
        self._numbers += 1
        self.tell(ASK, pack({"id": self._numbers, **question}))
        while True:
            for body in self._notices(ANSWER, until):
                found = unpack(body)
                if found["id"] == self._numbers:
                    return found

    def _frames(self, until: float) -> list[Frame]:
        """Wait for frames and return them, after answering pings and acknowledging what was received."""
        while True:
            self._wait(until, self._sock)
            try:
                count = self._sock.recvmsg_into(self._reader.target(), 0, socket.MSG_DONTWAIT)[0]
            except BlockingIOError:
                continue
            if not count:
                raise ConnectionResetError("the worker has closed the connection")
            found = self._reader.fed(count)
            self._received += count
            for frame in found:
                if frame.kind == frames.PING:
                    self._send(pack_frame(frames.PONG, frame.id))
                elif frame.kind == frames.GOODBYE:
                    raise ConnectionResetError("the worker has left")
            if self._received - self._said >= _SAY_EVERY:
                self._said = self._received
                self._send(pack_frame(frames.ACK, self._received))
            if found:
                return found

    def close(self) -> None:
        """Send GOODBYE and close the socket. Idempotent."""
        with contextlib.suppress(OSError, ProtocolError):
            self._send(pack_frame(frames.GOODBYE))
        with contextlib.suppress(OSError):
            self._sock.close()


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

    def query(
        self, target: Target, parts: list[str], begin: dict[str, int] | None, until: float, silence: float
    ) -> dict[str, Any]:
        """Query a worker, in the visit that was kept or in a new visit; for arguments and errors, see :class:`Visit`."""
        visit = None if target.record is None else self._visits.pop(target.record.incarnation, None)
        if visit is not None:
            visit.silence = silence
            # On these errors, the worker has closed the connection, or another worker has its address now.
            with contextlib.suppress(ConnectionError, ProtocolError):
                return self._query(visit, target, parts, begin, until)
        return self._query(Visit(target, until, silence=silence), target, parts, begin, until)

    def _query(
        self, visit: Visit, target: Target, parts: list[str], begin: dict[str, int] | None, until: float
    ) -> dict[str, Any]:
        with undo_on_error(visit.close):
            found = visit.query(parts, until, begin)
        self._keep(target, visit)
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


def _remaining(until: float) -> float:
    return max(0.001, until - time.monotonic())
