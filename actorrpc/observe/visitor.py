"""A visitor: asks workers how they are, from a process that is in no group. Without torch, and without an agent.

It dials a worker as its peers do, proves the key in the same handshake, says under a rank of visitors who it is, and sends the
notice that asks. To the worker it is no member: nobody is told of it, and its goodbye leaves nothing behind. One thread at a time
uses one visit.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import ssl
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from actorrpc._undo import undo_on_error
from actorrpc.config import Settings
from actorrpc.errors import AuthenticationError, ProtocolError, RpcError
from actorrpc.observe.protocol import ACT, ACTED, ACTING, ANSWER, ASK, merge, pack, unpack
from actorrpc.observe.tracing.trace import CLOCK, compare_clocks
from actorrpc.transport.failure_detector import process_state
from actorrpc.transport.tls import AnySocket, Tls, TlsSocket, explain, shake_hands
from actorrpc.wire import frames
from actorrpc.wire.frames import Frame, FrameReader, pack_frame
from actorrpc.wire.handshake import Dialler, Session
from actorrpc.wire.headers import pack_header, unpack_header
from actorrpc.wire.identity import FIRST_VISITOR, WorkerRecord, host_identity, new_incarnation
from actorrpc.wire.integrity import SealedReader, Seals
from actorrpc.wire.keys import Key

__all__ = ["KeptVisits", "Target", "Visit"]

_SLICE_S: Final = 0.1  # how often it is looked whether the process that is waited for has stopped
_MAX_FRAME: Final = 16 << 20
_PAGES: Final = 200
_SAY_EVERY: Final = 1 << 20


@dataclass(slots=True, kw_only=True)
class Target:
    """A worker to be visited.

    Attributes:
        record: who it is; None where only its address is known.
        addresses: where it listens: paths of Unix sockets, or ``(host, port)``.
        key: the group's; None where it has none.
        settings: for TLS and seals.
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
        """Return the names of the workers that an answer tells of, by their process ids: members, and those that have printed."""
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
        """The process id of a worker of this host; 0 for others."""
        record = self.record
        return record.pid if record is not None and record.host == host_identity() else 0


class Visit:
    """A connection to one worker.

    Args:
        target: whom to visit.
        until: when it is to be there at latest, on the monotonic clock.
        acts: it may also be used to change something, and says so to the worker.
        silence: for how many seconds it may send nothing.

    Attributes:
        silence: the same.

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
        seals = Seals.of(result.key, dialled=True) if result.sealed else None
        self._seal = None if seals is None else seals.outgoing
        self._reader: FrameReader = (
            FrameReader(max_frame=_MAX_FRAME, max_chunk=_MAX_FRAME)
            if seals is None
            else SealedReader(seals.incoming, max_frame=_MAX_FRAME, max_chunk=_MAX_FRAME)
        )
        own = WorkerRecord(
            name=self._own,
            rank=FIRST_VISITOR + secrets.randbits(29),
            incarnation=self._incarnation,
            host=f"visitor-{secrets.token_hex(8)}",
            pid=os.getpid(),
        )
        self._send(pack_frame(frames.INTRO, body=own.to_bytes()))

    def _connect(self, address: str | tuple[str, int], until: float) -> tuple[AnySocket, Session]:
        """Connect and shake hands; return the socket, and what the handshake has established."""
        target = self._target
        self._own = f"{ACTING if self._acts else 'visitor-'}{secrets.token_hex(6)}"
        self._incarnation = new_incarnation()
        unix = isinstance(address, str)
        tls = None if unix else Tls.load(target.settings)
        sock: AnySocket
        if isinstance(address, str):
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            with undo_on_error(plain.close):
                plain.settimeout(_left(until))
                plain.connect(address)
        else:
            plain = socket.create_connection(address, _left(until))
        sock = plain
        try:
            if tls is not None:
                sock = tls.dial(plain, until)
            record = target.record
            dialler = Dialler(
                name=self._own,
                incarnation=self._incarnation,
                key=b"" if target.key is None else target.key.reveal(),
                peer_name=None if record is None else record.name,
                peer_incarnation=None if record is None else record.incarnation,
                insecure=target.key is None,
                binding=getattr(sock, "binding", b""),
                seals=target.settings.frame_integrity and tls is None and not unix,
            )
            try:
                return sock, shake_hands(sock, dialler, until, partial(self._wait, sock, until))
            except AuthenticationError as error:
                if dialler.replaced:  # no question of keys: the worker that is meant has ended
                    raise ConnectionRefusedError(str(error)) from error
                raise
        except ssl.SSLError as error:
            sock.close()
            raise explain(error, f"the worker at {address}") from error
        except BaseException:
            sock.close()
            raise

    def _wait(self, sock: AnySocket, until: float) -> None:
        """Wait for bytes; give up where the process is stopped, or gone.

        Raises:
            TimeoutError: none came in time, or none can come.
        """
        if isinstance(sock, TlsSocket) and sock.pending:
            return
        pid = self._pid
        until = min(until, time.monotonic() + self.silence)
        poller = select.poll()
        poller.register(sock.fileno(), select.POLLIN)
        while not poller.poll(1000 * min(_SLICE_S, _left(until))):
            if time.monotonic() >= until or (pid and process_state(pid) != "running"):
                raise TimeoutError("it has not answered in time")

    def _send(self, frame: bytes) -> None:
        self._sock.settimeout(1.0)
        self._sock.sendall(frame if self._seal is None else self._seal.sealed(frame))

    # -- asking ------------------------------------------------------------------------------------------------

    def ask(self, parts: list[str], until: float, begin: dict[str, int] | None = None) -> dict[str, Any]:
        """Return what the worker says of itself: all pages of the parts that are asked for.

        Raises:
            OSError: the connection has ended (TimeoutError: no answer in time).
            ProtocolError: what has come makes no sense.
        """
        pages: list[dict[str, Any]] = []
        wanted, at = parts, begin or {}
        while True:
            found = self._ask(wanted, at, until)
            pages.append(found)
            following = found.get("next")
            at = {}
            if isinstance(following, dict):
                at = {
                    part: place for part, place in following.items() if part in parts and type(place) is int
                }
            if not at or len(pages) >= _PAGES:
                return merge(pages)
            wanted = list(at)

    def clock(self, until: float) -> tuple[float, float | None]:
        """Return what is to be added to the worker's moments to have them on this process's clock, and how far off that may be.

        Both are seconds. The processes of a host have one clock. Raises what :meth:`ask` does.
        """
        if self._pid:
            return 0.0, 0.0
        return compare_clocks(lambda: self._ask(["records"], CLOCK, until), time.monotonic)

    def tell(self, notice: str, body: bytes) -> None:
        """Send a notice. Raises OSError where the connection has ended."""
        self._send(pack_frame(frames.NOTICE, body=body, extra=pack_header({"notice": notice})))

    def hear(self, notice: str, until: float) -> list[bytes]:
        """Return the notices of a name that have come, as soon as there are any frames; none after ``until``.

        Raises:
            OSError: the connection has ended.
        """
        try:
            found = self._frames(until)
        except TimeoutError:
            return []
        return [
            bytes(frame.body)
            for frame in found
            if frame.kind == frames.NOTICE and unpack_header(frame.extra).get("notice") == notice
        ]

    def _ask(self, parts: list[str], begin: dict[str, int], until: float) -> dict[str, Any]:
        return self._say(ASK, ANSWER, {"what": parts, "from": begin}, until)

    def act(self, what: str, whom: str, until: float) -> str:
        """Have the worker do something (:mod:`actorrpc.observe.actions`); return why it has not, empty where it has.

        Raises what :meth:`ask` does.
        """
        return str(self._say(ACT, ACTED, {"do": what, "whom": whom}, until).get("problem", ""))

    def _say(self, notice: str, answer: str, question: dict[str, Any], until: float) -> dict[str, Any]:
        self._numbers += 1
        self.tell(notice, pack({"id": self._numbers, **question}))
        while True:
            for frame in self._frames(until):
                if frame.kind == frames.NOTICE and unpack_header(frame.extra).get("notice") == answer:
                    found = unpack(frame.body)
                    if found["id"] == self._numbers:
                        return found

    def _frames(self, until: float) -> list[Frame]:
        """Return what has come, after what is to be answered at once."""
        while True:
            self._wait(self._sock, until)
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
        """Say goodbye, and hang up. Idempotent."""
        with contextlib.suppress(OSError, ProtocolError):
            self._send(pack_frame(frames.GOODBYE))
        with contextlib.suppress(OSError):
            self._sock.close()


class KeptVisits:
    """Visits that are open between two looks: most of what a look costs, on both sides, is the handshake.

    A worker that has not heard of a visitor for long hangs up; then there is a new visit. Thread-safe: its steps are a dict's.
    """

    def __init__(self) -> None:
        self._visits: dict[str, Visit] = {}
        self._pool: ThreadPoolExecutor | None = None

    def pool(self, most: int) -> ThreadPoolExecutor:
        """Return threads for looks, which are kept as well. By one thread at a time, as :meth:`close`."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(most, "observe")
        return self._pool

    def take(self, target: Target) -> Visit | None:
        """Return the visit to a worker that is open, if there is one; nobody else has it then."""
        return None if target.record is None else self._visits.pop(target.record.incarnation, None)

    def keep(self, target: Target, visit: Visit) -> None:
        """Have a visit for the next look."""
        if target.record is None:
            visit.close()
            return
        other = self._visits.pop(target.record.incarnation, None)
        self._visits[target.record.incarnation] = visit
        if other is not None:
            other.close()

    def keep_only(self, incarnations: Collection[str]) -> None:
        """Close those to workers that are gone."""
        for each in list(self._visits):
            if each not in incarnations and (visit := self._visits.pop(each, None)) is not None:
                visit.close()

    def close(self) -> None:
        """Hang up everywhere. There may be others after that."""
        self.keep_only(())
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())
