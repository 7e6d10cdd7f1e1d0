"""Opens connections to peers, and resumes connections that have broken.

A connection that another process opens is a pending connection until that process has proved that it has the key; see
:mod:`actorrpc.agent.acceptor`. A connection to a peer is opened by the thread that sends it the first message, before the
time-out of the message, under the peer's ``dial_lock``.

Between two processes of one host, each direction that shares memory has a second Unix socket, over which the descriptors of the
memory are sent. A random token ties this socket to its connection.

:class:`Connector`: ``_lock`` guards its tables; no other code runs under it.

:class:`Resumption`: when a TCP connection breaks, it is resumed over another socket within a grace time. The side that opened the
connection (the dialling side) dials again until the grace time has passed; the other side waits. Both sides notice early if the
peer's process has ended, because connections to its address are refused then. Until the connection is resumed, messages wait in
its outbox, and deadlines of calls apply. If it is not resumed, the peer is considered dead. Attempts run on pool threads, and
there may be several at a time for one connection, on both sides. They need no lock, because the latest attempt wins
(:mod:`actorrpc.transport.stream`): before a side sends the number of received bytes, it calls :meth:`Connection.standstill`,
which ends all earlier attempts, and :meth:`Connection.resume` is a single step under the connection's locks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import struct
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from actorrpc import _limits, _time
from actorrpc._exceptions import undo_on_error
from actorrpc.agent.acceptor import Admission, AdmittingAgent, PendingConnection, no_room
from actorrpc.errors import (
    AuthenticationError,
    LimitError,
    PeerDiedError,
    ProtocolError,
    RpcError,
    RpcTimeoutError,
    ShutdownError,
)
from actorrpc.transport.connection import Connection
from actorrpc.transport.failure_detector import process_state, set_up_tcp
from actorrpc.transport.shared_memory import Borrower, Lender
from actorrpc.transport.signals import Taken, checkpoint, uninterruptible
from actorrpc.transport.stream import CLOSED, SUSPENDED, ReliableStream, SocketStream, Stream
from actorrpc.transport.tls import AnySocket, Tls, authenticate
from actorrpc.wire.frames import GOODBYE, INTRO, pack_frame
from actorrpc.wire.handshake import Dialler, Purpose, Session
from actorrpc.wire.identity import WorkerRecord
from actorrpc.wire.keys import Key

if TYPE_CHECKING:
    from collections.abc import Collection

    from actorrpc.agent.peers import Peer, PeerTable
    from actorrpc.agent.scheduler import Scheduler
    from actorrpc.transport.connection import Events
    from actorrpc.transport.object_store import ObjectStore

__all__ = ["Connector", "Resumption"]

_log = logging.getLogger("actorrpc.links")
_ATTEMPT_S: Final = 2.0  # the time limit of one attempt to resume
_PAUSES_S: Final = (0.0, 0.02, 0.05, 0.1, 0.2)  # pauses between attempts to resume; the last is repeated
_PROBE_S: Final = 0.25  # seconds between two checks whether the peer still listens, on the side that waits
_REFUSALS: Final = 5  # failed handshakes (bytes may be damaged) before the connection is closed
_COUNT: Final = struct.Struct("<Q")
_UNKNOWN: Final = (1 << 64) - 1


class _ConnectingAgent(AdmittingAgent, Protocol):
    """The parts of an agent that :class:`Connector` and :class:`Resumption` use."""

    scheduler: Scheduler
    objects: ObjectStore
    peer_table: PeerTable

    def peer_ended(self, peer: Peer, state: str, cause: str) -> None: ...
    def dismiss(self, conns: Collection[Connection]) -> None: ...
    def shut_down_error(self) -> ShutdownError: ...


class _PeerGoneError(Exception):
    """The peer has died. The text says how this was noticed; the cause, if any, is the error to raise."""


class Resumption:
    """Resumes the broken connections of one agent. Thread-safe."""

    def __init__(self, agent: _ConnectingAgent, connector: Connector) -> None:
        self._agent = agent
        self._connector = connector

    def begin(self, conn: Connection, error: BaseException) -> None:
        """Begin to resume a connection that was just suspended. Called under its locks, so a pool thread does the work."""
        self._agent.pool.submit(partial(self._begin, conn, error, conn.lapses))

    def _begin(self, conn: Connection, error: BaseException, lapse: int) -> None:
        agent, grace = self._agent, self._agent.settings.session_grace
        if agent.closed_down:
            conn.close(error)
            return
        _log.info("the connection to %r is interrupted: %s", _name(conn), error)
        until = _time.now() + grace
        agent.clock.at(until, partial(agent.pool.submit, partial(self._give_up, conn, error, lapse)))
        if _session(conn).dialled:
            self._redial(conn, error, lapse, until, 0, 0)
        else:
            self._probe(conn, error, lapse)

    @staticmethod
    def _over(conn: Connection, lapse: int) -> bool:
        return conn.state is not SUSPENDED or conn.lapses != lapse

    def _give_up(self, conn: Connection, error: BaseException, lapse: int) -> None:
        if not self._over(conn, lapse):
            grace = self._agent.settings.session_grace
            conn.close(
                ConnectionError(f"the connection broke ({error}) and did not come back within {grace} s"),
            )

    # -- the side that dials -----------------------------------------------------------------------

    def _redial(
        self, conn: Connection, error: BaseException, lapse: int, until: float, attempt: int, refusals: int
    ) -> None:
        if self._over(conn, lapse):
            return
        if self._agent.closed_down:
            conn.close(error)
            return
        limit = min(until, _time.now() + _ATTEMPT_S)
        gone = True
        for family, address in self._connector.addresses(conn.peer):
            try:
                number = next(_session(conn).attempts)
                sock, _ = self._connector.dial(conn.peer, family, address, Purpose.RESUME, conn.attach, limit)
                if self._agree(conn, sock, number, limit):
                    return
                conn.close(error)  # the other side had already closed the connection
                return
            except LimitError:  # the other side answered that it has no descriptor left: try again later
                gone = False
            except RpcError as refused:
                gone = False
                refusals += 1
                if refusals >= _REFUSALS:
                    conn.close(refused)
                    return
            except OSError as failed:
                gone = gone and failed.errno == errno.ECONNREFUSED
        if gone:
            conn.close(error)
            return
        pause = _PAUSES_S[min(attempt, len(_PAUSES_S) - 1)]
        again = partial(self._redial, conn, error, lapse, until, attempt + 1, refusals)
        self._agent.clock.after(pause, partial(self._agent.pool.submit, again))

    def _agree(self, conn: Connection, sock: AnySocket, number: int, limit: float) -> bool:
        with undo_on_error(sock.close):
            sock.settimeout(max(0.05, limit - _time.now()))
            mine = conn.standstill(number)
            if mine is None:  # a later attempt has begun, and will resume the connection
                sock.close()
                return True
            sock.sendall(_COUNT.pack(mine))
            theirs = _read_count(sock)
            if theirs == _UNKNOWN:
                sock.close()
                return False
            self._resume(conn, sock, number, theirs)
        return True

    # -- the side that waits -----------------------------------------------------------------------

    def _probe(self, conn: Connection, error: BaseException, lapse: int) -> None:
        """Check whether the peer still listens; if all its addresses refuse connections, close the connection."""
        if self._over(conn, lapse):
            return
        # The address of a peer that has not introduced itself is unknown.
        addresses = [] if conn.peer is None else self._connector.addresses(conn.peer)
        gone = bool(addresses)
        for family, address in addresses:
            try:
                with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
                    sock.settimeout(_PROBE_S)
                    sock.connect(address)
                gone = False
            except OSError as failed:
                gone = gone and failed.errno == errno.ECONNREFUSED
        if gone or self._agent.closed_down:
            conn.close(error)
            return
        again = partial(self._probe, conn, error, lapse)
        self._agent.clock.after(_PROBE_S, partial(self._agent.pool.submit, again))

    def admit(self, sock: AnySocket, proved: Session, answer: bytes, conn: Connection | None) -> None:
        """Resume a connection over a socket that the peer has opened. This side may not have noticed yet that the old socket
        broke.

        Args:
            proved: the result of the handshake on the new socket.
            answer: the last message of the handshake, which is still to be sent.
            conn: the connection to resume; None: this worker does not have it any more.
        """
        # Take this attempt's number before the answer is sent: afterwards, the peer may begin a later attempt, which needs a
        # higher number.
        session = None if conn is None else conn.session
        number = 0 if session is None else next(session.attempts)
        try:
            sock.settimeout(self._agent.settings.handshake_timeout)
            sock.sendall(answer)
            theirs = _read_count(sock)
            worker = proved.peer_name, proved.peer_incarnation
            if conn is None or conn.state is CLOSED or session is None or session.other != worker:
                sock.sendall(_COUNT.pack(_UNKNOWN))
                sock.close()
                return
            mine = None
            if not session.is_overtaken(number):
                conn.suspend(ConnectionResetError("the other side has opened another socket"))
                mine = conn.standstill(number)
            if mine is None:
                sock.close()
                return
            sock.sendall(_COUNT.pack(mine))
            self._resume(conn, sock, number, theirs)
        except (OSError, EOFError) as error:
            _log.info("a connection of %r was not resumed: %s", proved.peer_name, error)
            sock.close()

    # -- both --------------------------------------------------------------------------------------

    def _resume(self, conn: Connection, sock: AnySocket, number: int, theirs: int) -> None:
        stream = self._connector.stream(sock, local=False)
        pool = self._agent.pool

        def move() -> None:
            """Make the pool watch the new descriptor. Called under the connection's locks, so no thread closes the descriptor."""
            pool.forget(conn.fd)
            pool.watch(stream.sock.fileno(), conn.turn)

        try:
            resumed = conn.resume(stream, number, theirs, move)
        except ProtocolError as error:
            conn.close(error)
            resumed = False
        if not resumed:
            sock.close()
            return
        conn.register()
        self._agent.pool.submit(conn.writer.flush_waiting)
        _log.info("the connection to %r was resumed", _name(conn))


def _read_count(sock: AnySocket) -> int:
    data = b""
    while len(data) < _COUNT.size:
        more = sock.recv(_COUNT.size - len(data))
        if not more:
            raise ConnectionResetError(errno.ECONNRESET, "closed before the number of received bytes came")
        data += more
    count: Any = _COUNT.unpack(data)[0]
    return int(count)


def _name(conn: Connection) -> str:
    return _session(conn).other[0]


def _session(conn: Connection) -> ReliableStream:
    assert conn.session is not None  # a connection without a session is never suspended
    return conn.session


_BUSY: Final = (errno.EAGAIN, errno.ECONNRESET, errno.EPIPE)
_GONE: Final = (errno.ECONNREFUSED, errno.ENOENT)


class _DialledSocket(socket.socket):
    """A socket whose finaliser closes it without a ResourceWarning: an interrupted handshake may drop it at any step."""

    def __del__(self) -> None:
        # Not self.close(), which needs attributes that an interrupted constructor has not set. It would fail, and the descriptor
        # would stay open, because the interpreter closes no socket whose class has a __del__.
        socket.SocketType.close(self)


class Connector:
    """Opens and accepts the connections of one agent. Thread-safe.

    Args:
        events: receives the events of the connections.
        key: the group's key; None if it has none.
    """

    def __init__(self, agent: _ConnectingAgent, events: Events, key: Key | None) -> None:
        self._agent = agent
        self._events = events
        self._key = key.reveal() if key is not None else b""
        self.tls = Tls.load(agent.settings)
        # Re-entrant: a signal handler may make a call while the main thread has the lock.
        self._lock = _time.RLock()
        self.admission = Admission(agent, self._key, self._admit, self.tls)
        self._connections: dict[bytes, Connection] = {}
        self._introducing: dict[Connection, Session] = {}
        self._dialling: set[socket.socket] = set()  # sockets in a handshake; changed atomically, no lock
        self.resumption = Resumption(agent, self)

    @property
    def key(self) -> Key | None:
        """The group's key; None if it has none."""
        return Key.revealed(self._key) if self._key else None

    # -- accepted connections --------------------------------------------------------------------------

    def _admit(self, pending: PendingConnection, answer: bytes) -> None:
        session = pending.acceptor.result
        sock = pending.sock
        if session.purpose is Purpose.MAIN:
            conn = self._connection(sock, session, session.attach, pending.local, False)
            with self._lock:
                self._introducing[conn] = session
            self._welcome(conn, sock, answer)
            try:
                conn.register()
            except (OSError, ValueError):  # the epoll was closed meanwhile
                conn.close()
            if self._agent.closed_down:  # the thread that closes the agent may have read the table before
                self._agent.dismiss([conn])
            return
        with self._lock:
            main = self._connections.get(session.attach)
        if session.purpose is Purpose.RESUME:
            self.resumption.admit(sock, session, answer, main)
            return
        if main is None or main.state is CLOSED:
            sock.close()
            return
        if session.purpose is Purpose.LANE and isinstance(sock, socket.socket) and pending.local:
            # Set the borrower before the answer is sent: the peer lends memory as soon as it has received the answer.
            main.lane.borrow(
                Borrower(
                    sock,
                    max_buffers=self._agent.settings.max_buffers,
                    on_freed=self._agent.scheduler.freed,
                    adopt=self._agent.objects.adopt,
                )
            )
            sock.setblocking(False)
            sock.send(answer)
        else:
            sock.close()

    # -- connections -----------------------------------------------------------------------------------

    def _connection(
        self, sock: AnySocket, session: Session, attach: bytes, local: bool, dialled: bool
    ) -> Connection:
        agent = self._agent
        try:
            stream = self.stream(sock, local)
            if not local and agent.settings.session_grace:
                stream = ReliableStream(stream, (session.peer_name, session.peer_incarnation), dialled)
            conn = Connection(
                stream,
                epoll=agent.pool.epoll,
                events=self._events,
                settings=agent.settings,
                attach=attach,
                local=local,
            )
        except OSError as error:
            # Either the peer has reset the connection, or this process has no descriptor left: a Connection opens a second one.
            if not dialled and error.errno in _limits.NO_DESCRIPTOR:
                with contextlib.suppress(OSError):
                    sock.send(no_room(error))
            sock.close()
            raise
        # Watch the descriptor before other threads can find the connection and close it. Otherwise its number could be reused,
        # and this entry would replace the entry of another connection.
        agent.pool.watch(conn.fd, conn.turn)
        return conn

    def stream(self, sock: AnySocket, local: bool) -> Stream:
        """Return the stream over a socket after its handshake; ``local``: the socket is not TCP.

        Raises:
            OSError: the other side has reset the connection.
        """
        made = SocketStream(sock) if isinstance(sock, socket.socket) else sock
        if not local:
            set_up_tcp(made.sock, self._agent.settings)
        return made

    def _welcome(self, conn: Connection, sock: AnySocket, answer: bytes) -> None:
        """Send the last message of a handshake.

        The connection is entered into the table before the message is sent: the peer may resume the connection as soon as it has
        received the message. A thread that closes the agent may find the connection in the table and send a GOODBYE; the writer's
        lock ensures that the GOODBYE follows the message.
        """
        try:
            with conn.writer.lock:
                self._enter(conn)
                sock.settimeout(None)
                sock.sendall(answer)
        except OSError:
            conn.enter(CLOSED)
            self._agent.pool.forget(conn.fd)
            self.forget(conn)
            conn.reap()  # reap() is idempotent: a thread that closes the agent may call it as well
            raise
        conn.flush()

    def _enter(self, conn: Connection) -> None:
        with self._lock:
            self._connections[conn.attach] = conn

    def introduced(self, conn: Connection, body: bytes) -> None:
        """Handle the first frame of an accepted connection, which has the peer's record. Under the read lock."""
        with self._lock:
            session = self._introducing.pop(conn, None)
        if session is None:
            raise ProtocolError("a peer introduced itself twice")
        record = WorkerRecord.from_bytes(body)
        if record.name != session.peer_name or record.incarnation != session.peer_incarnation:
            raise ProtocolError(f"{session.peer_name!r} introduced itself as {record.name!r}")
        peer = self._agent.peer_table.adopt(record)
        if peer.state != "alive":
            # An ended peer opens a connection in two cases. 1. It opened two connections, and its end was read from the other
            # connection first. 2. The peer was silent for too long and is considered dead, but is alive. A GOODBYE with flags
            # tells the peer that it is considered dead; otherwise it would wait for answers.
            _log.info(
                "%r, which is considered %s, has opened a connection; it is closed", record.name, peer.state
            )
            if peer.state == "dead":
                conn.outbox.append(pack_frame(GOODBYE, flags=1))
                conn.flush()
            conn.close()
            return
        self._join(peer, conn)

    def _join(self, peer: Peer, conn: Connection) -> None:
        conn.peer = peer
        peer.out_of_reach = ""
        peer.conns.append(conn)
        if peer.conn is None or peer.conn.state is CLOSED:
            peer.conn = conn
        self._agent.scheduler.pulse.wake()

    def forget(self, conn: Connection) -> None:
        """Remove a connection that has ended from the tables."""
        with self._lock:
            if self._connections.get(conn.attach) is conn:
                del self._connections[conn.attach]
            self._introducing.pop(conn, None)

    # -- dialling --------------------------------------------------------------------------------------

    def connect(self, peer: Peer, deadline: float, what: str) -> Connection:
        """Return the connection to a peer; open it if there is none. Interruptible.

        Args:
            what: the function that is called, for error messages.

        Raises:
            PeerDiedError: the peer has ended, another run has taken its place, or it cannot be reached within
                ``Settings.reach_timeout``; then ``peer.out_of_reach`` says why.
            RpcTimeoutError: the deadline has passed.
            AuthenticationError, VersionError: the two workers do not share a key, a protocol version or an address.
            ShutdownError: this worker has shut down.
            LimitError: this process or the peer has no descriptor left.
        """
        limit = min(deadline, _time.now() + self._agent.settings.reach_timeout)
        while True:
            try:
                with Taken(peer.dial_lock, limit) as taken:
                    if taken.held:
                        conn = peer.conn
                        if conn is not None and conn.state is not CLOSED:
                            return conn
                        peer.check_alive(f"cannot call {what}")
                        return self._dial_main(peer, limit, what, deadline)
            except _PeerGoneError as gone:
                # Not under ``dial_lock``: peer_ended() runs hooks and handlers.
                self._agent.peer_ended(peer, "dead", str(gone))
                raise gone.__cause__ or peer.died(f"cannot call {what}", maybe_executed=False) from None
            checkpoint()
            if _time.now() > limit:
                raise self._unreached(peer, "another thread is still connecting to it", what, deadline)

    def _dial_main(self, peer: Peer, limit: float, what: str, deadline: float) -> Connection:
        tried: list[str] = []
        gone = True
        queue = deque(self.addresses(peer))
        while queue:
            family, address = queue.popleft()
            attach = secrets.token_bytes(16)
            try:
                # Leave time for the other addresses of the peer.
                now = _time.now()
                until = now + (limit - now) / (1 + len(queue))
                sock, session = self.dial(peer, family, address, Purpose.MAIN, attach, until)
                return self._establish(peer, sock, family == socket.AF_UNIX, session)
            except PeerDiedError as error:
                # The answer was not authenticated, so it may be an attacker's. But an attacker at this address could also refuse
                # the connection, with the same result.
                raise _PeerGoneError("a new run of it answers at its address") from error
            except LimitError as error:
                raise LimitError(
                    f"cannot call {what}: {error}; nothing was sent. Call again when it has descriptors left, or raise its limit"
                ) from error
            except (TimeoutError, OSError) as error:
                if isinstance(error, RpcError):
                    raise
                if error.errno in _limits.NO_DESCRIPTOR:
                    raise LimitError(
                        f"cannot call {what}: there is no connection to {peer.name!r}, none can be opened, and nothing was "
                        f"sent: {_limits.explain_descriptors(error)}"
                    ) from error
                # The peer is busy if the handshake has timed out while its process runs.
                busy = (
                    isinstance(error, TimeoutError)
                    and peer.record.host == self._agent.record.host
                    and process_state(peer.record.pid) == "running"
                )
                if (busy or error.errno in _BUSY) and _time.now() < limit and not self._agent.closed_down:
                    # The peer's backlog is full, or the peer has just ended; in the latter case the next attempt is refused.
                    _time.sleep(0.02)
                    queue.appendleft((family, address))
                    continue
                late = (
                    f"no answer within {_time.now() - now:.1f} s"
                    if isinstance(error, TimeoutError)
                    else str(error)
                )
                tried.append(f"{_shown(address)}: {late}")
                gone = gone and isinstance(error, OSError) and error.errno in _GONE
        if not tried:
            raise AuthenticationError(f"cannot call {what}: {self._no_way(peer.record)}")
        if gone:
            raise _PeerGoneError(f"its address refuses connections ({'; '.join(tried)})")
        raise self._unreached(peer, "; ".join(tried), what, deadline)

    def _no_way(self, record: WorkerRecord) -> str:
        """Explain why there is no address at which this worker can reach another worker."""
        own, transport = self._agent.record, self._agent.settings.transport
        here = record.host == own.host
        where = "on the same host" if here else "on another host"
        listens = " and ".join(["a Unix socket"] * bool(record.unix_path) + ["TCP"] * bool(record.tcp))
        if transport != "auto" and (here or transport == "unix"):
            return (
                f"worker {own.name!r} has ACTORRPC_TRANSPORT={transport} (or transport={transport!r}), and worker "
                f"{record.name!r}, {where}, listens on {listens or 'no address'} only: give all workers the same transport"
            )
        return (
            f"worker {record.name!r} runs on another host than worker {own.name!r}, and listens on no TCP address. Give every "
            "worker the same key (ACTORRPC_KEY) and an address (ACTORRPC_BIND), so that they listen on TCP"
        )

    def _unreached(self, peer: Peer, why: str, what: str, deadline: float) -> RpcError:
        """Return the error of a call to a peer to which no connection could be made; the peer may be alive."""
        record = peer.record
        host = "of this host" if record.host == self._agent.record.host else f"on host {record.tcp[0][0]}"
        peer.out_of_reach = (
            f"worker {peer.name!r} {host} cannot be reached from worker {self._agent.record.name!r} ({why})"
        )
        return (RpcTimeoutError if _time.now() >= deadline else PeerDiedError)(
            f"cannot call {what}: {peer.out_of_reach}; the call was not executed",
            maybe_executed=False,
            worker=peer.name,
        )

    @uninterruptible
    def _establish(self, peer: Peer, sock: AnySocket, local: bool, session: Session) -> Connection:
        conn = self._connection(sock, session, session.attach, local, True)
        conn.outbox.append(pack_frame(INTRO, body=self._agent.record.to_bytes()))
        self._enter(conn)
        self._join(peer, conn)
        try:
            conn.register()
        except (OSError, ValueError):  # the epoll, or this connection, was closed meanwhile
            conn.close()
        if self._agent.closed_down:  # after _enter(), so a later close of the agent finds the connection
            conn.close()
            conn.reap()
            raise self._agent.shut_down_error()
        conn.flush()
        return conn

    def addresses(self, peer: Peer) -> list[tuple[int, Any]]:
        """Return the addresses of a peer that this worker can connect to, as (family, address)."""
        record, transport = peer.record, self._agent.settings.transport
        addresses: list[tuple[int, Any]] = []
        if record.host == self._agent.record.host and record.unix_path and transport != "tcp":
            addresses.append((socket.AF_UNIX, record.unix_path))
        if transport != "unix" and not addresses:
            for host, port in record.tcp:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses.extend((info[0], info[4]) for info in found)
        return addresses

    def dial(
        self, peer: Peer, family: int, address: Any, purpose: Purpose, attach: bytes, limit: float
    ) -> tuple[AnySocket, Session]:
        """Connect and perform the handshake; return the socket and the session.

        Raises:
            OSError: no connection.
            RpcError: the handshake has failed.
            ShutdownError: this worker has shut down meanwhile.
        """
        agent = self._agent
        record = agent.record
        plain = _DialledSocket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            with undo_on_error(plain.close):
                near = not _limits.make_room(plain.fileno())
                if near and purpose is not Purpose.RESUME and not _limits.has_room(1):
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                plain.settimeout(max(0.05, limit - _time.now()))
                self._dialling.add(plain)
                if agent.closed_down:  # the thread that closes the agent may have read ``_dialling`` before
                    raise self._agent.shut_down_error()
                plain.connect(address)
                limit = min(limit, _time.now() + agent.settings.handshake_timeout)
                dialler = Dialler(
                    key=self._key,
                    name=record.name,
                    incarnation=record.incarnation,
                    purpose=purpose,
                    attach=attach,
                    peer_name=peer.record.name,
                    peer_incarnation=peer.record.incarnation,
                    insecure=not self._key,
                )
                tls = None if family == socket.AF_UNIX else self.tls
                return authenticate(plain, tls, dialler, limit, f"worker {peer.name!r} at {_shown(address)}")
        except AuthenticationError as error:
            if not dialler.replaced:
                raise
            raise PeerDiedError(
                f"the run of {peer.name!r} that was called (pid {peer.record.pid}) has ended, and a new run of this worker "
                "answers at its address; nothing was sent. A worker that looks up the name again finds the new run",
                maybe_executed=False,
                worker=peer.name,
            ) from error
        except OSError as error:
            if agent.closed_down:
                raise self._agent.shut_down_error() from error
            raise
        finally:
            self._dialling.discard(plain)

    def stop_dialling(self) -> None:
        """Shut down sockets that are connecting or in a handshake, so that their threads end before the agent does."""
        for sock in self._dialling.copy():
            with contextlib.suppress(OSError):  # the socket is not connected yet, or was closed already
                sock.shutdown(socket.SHUT_RDWR)

    # -- side connections --------------------------------------------------------------------------------

    def open_lane(self, conn: Connection) -> Lender | None:
        """Return the Lender of memory to the peer, and open its descriptor socket if needed; None if that is not possible."""
        peer: Peer = conn.peer
        lane, path = conn.lane, peer.record.unix_path
        if not conn.local or not path or _time.now() < lane.opens_at:
            return None
        with peer.dial_lock:
            if lane.lender is not None or _time.now() < lane.opens_at:
                return lane.lender
            settings = self._agent.settings
            limit = _time.now() + settings.handshake_timeout
            try:
                sock, _ = self.dial(peer, socket.AF_UNIX, path, Purpose.LANE, conn.attach, limit)
            except (OSError, RpcError) as error:
                _log.info("no shared memory with %r: %s", peer.name, error)
                # A lack of descriptors or a time-out on either side may be temporary.
                lane.cannot_lend(isinstance(error, (OSError, LimitError)))
                return None
            sock.setblocking(False)
            lane.lend(
                Lender(
                    cast(socket.socket, sock),
                    limit_bytes=settings.lane_bytes,
                    threshold=settings.lane_threshold,
                )
            )
            return lane.lender

    # -- the end -----------------------------------------------------------------------------------------

    def connections(self) -> list[Connection]:
        """Return all connections in the table, including those whose peer has not introduced itself yet."""
        # Without the lock, because fork hooks call this: in a forked child, a thread that does not exist there may hold it.
        return list(self._connections.values())

    def abandon(self) -> None:
        """Close the descriptors in a forked child. The files of Unix sockets stay, because the parent uses them."""
        self.admission.abandon()
        for conn in self.connections():
            conn.abandon()


def _shown(address: Any) -> str:
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"
