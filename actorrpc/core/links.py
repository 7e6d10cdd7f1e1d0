"""Links: how connections come about. Listening, dialling, and the handshake before anything else.

Listening sockets are served by the pool: an accepted socket is a *guest* until it has proved that it knows
the key. Guests are few, have little time, and may send nothing but the handshake's fixed messages; their
bytes never reach the frame reader. Dialling happens on the thread that makes the first call to a peer, within
that call's deadline, under the peer's ``dial_lock``.

Besides the main connection there are two kinds of side connections, each tied to its main one by a random
token: a descriptors-only Unix socket per direction for shared memory, and stripes for very large messages
between hosts.

``_lock`` guards the tables here; nothing is called under it.
"""

from __future__ import annotations

import errno
import logging
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from actorrpc.core.connection import Connection
from actorrpc.core.frames import INTRO, STREAM_ABORT, pack_frame
from actorrpc.core.handshake import Acceptor, Dialler, Purpose, Session
from actorrpc.core.identity import WorkerRecord
from actorrpc.core.interrupts import checkpoint, pending_here, uninterruptible
from actorrpc.core.keys import Key, remove_file
from actorrpc.core.tensor_lane import Borrower, Lender
from actorrpc.errors import (
    AuthenticationError,
    PeerDiedError,
    ProtocolError,
    RpcError,
    RpcTimeoutError,
    ShutdownError,
)

if TYPE_CHECKING:
    from actorrpc.core.agent import Agent
    from actorrpc.core.peer import Peer

__all__ = ["Links"]

_log = logging.getLogger("actorrpc.links")
_FAILURES_PER_S: Final = 3
_BUSY: Final = (errno.EAGAIN, errno.ECONNRESET, errno.EPIPE)
_GONE: Final = (errno.ECONNREFUSED, errno.ENOENT, errno.ECONNRESET, errno.EPIPE)


class _Guest:
    """An accepted socket that has proved nothing yet."""

    __slots__ = ("acceptor", "address", "local", "sock", "timer")

    def __init__(self, sock: socket.socket, address: str, local: bool, acceptor: Acceptor) -> None:
        self.sock = sock
        self.address = address
        self.local = local
        self.acceptor = acceptor
        self.timer: Any = None


class _Taken:
    """Holds a lock that is waited for in slices: Ctrl-C ends the wait, and can never leave the lock taken."""

    __slots__ = ("_limit", "_lock", "held")

    def __init__(self, lock: threading.Lock, limit: float) -> None:
        self._lock = lock
        self._limit = limit
        self.held = False

    @uninterruptible
    def __enter__(self) -> _Taken:
        while not self.held and time.monotonic() <= self._limit and not pending_here():
            self.held = self._lock.acquire(timeout=0.1)
        return self

    @uninterruptible
    def __exit__(self, *_: object) -> None:
        if self.held:
            self._lock.release()


class Links:
    """Makes and accepts the connections of one agent. Thread-safe."""

    def __init__(self, agent: Agent, key: Key | None) -> None:
        self._agent = agent
        self._key = key.reveal() if key is not None else b""
        self._insecure = key is None
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        self._guests: dict[int, _Guest] = {}
        self._failures: dict[str, list[float]] = {}
        self._mains: dict[bytes, Connection] = {}
        self._introducing: dict[Connection, Session] = {}
        self._ready: dict[tuple[Connection, int], threading.Lock] = {}

    # -- listening -----------------------------------------------------------------------------------

    def listen(self, sockets: list[socket.socket]) -> None:
        """Serve these listening sockets from now on."""
        pool = self._agent.pool
        for sock in sockets:
            sock.setblocking(False)
            self._listeners.append(sock)
            fd = sock.fileno()
            pool.watch(fd, partial(self._accept, sock))
            # Edge-triggered: accepted until there is nothing left, never re-armed.
            pool.epoll.register(fd, select.EPOLLIN | select.EPOLLET)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, where = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    _log.error("cannot accept a connection: %s", error)
                    self._agent.clock.after(0.2, lambda: self._agent.submit(lambda: self._accept(listener)))
                return
            local = sock.family == socket.AF_UNIX
            address = "local" if local else str(where[0])
            settings = self._agent.settings
            with self._lock:
                refused = len(self._guests) >= settings.max_unauthenticated or self._banned(address)
            if refused:
                sock.close()
                continue
            sock.setblocking(False)
            record = self._agent.record
            guest = _Guest(
                sock,
                address,
                local,
                Acceptor(
                    key=self._key, name=record.name, incarnation=record.incarnation, insecure=self._insecure
                ),
            )
            fd = sock.fileno()
            with self._lock:
                self._guests[fd] = guest
            guest.timer = self._agent.clock.after(
                settings.handshake_timeout, partial(self._agent.submit, partial(self._dismiss, fd, guest))
            )
            self._agent.pool.watch(fd, partial(self._serve, fd, guest))
            self._agent.pool.epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)

    def _banned(self, address: str) -> bool:
        times = self._failures.get(address)
        if not times:
            return False
        now = time.monotonic()
        times[:] = [when for when in times if now - when < 1.0]
        if not times:
            del self._failures[address]
        return len(times) >= _FAILURES_PER_S

    def _serve(self, fd: int, guest: _Guest) -> None:
        """Take the next step of a guest's handshake. One thread at a time: the descriptor is one-shot."""
        try:
            data = guest.sock.recv(512)
            if not data:
                self._dismiss(fd, guest)
                return
            answer = guest.acceptor.feed(data)
            if guest.acceptor.done:
                self._admit(fd, guest, answer)
                return
            if answer:
                guest.sock.send(answer)
            self._agent.pool.epoll.modify(fd, select.EPOLLIN | select.EPOLLONESHOT)
        except BlockingIOError:
            self._agent.pool.epoll.modify(fd, select.EPOLLIN | select.EPOLLONESHOT)
        except ProtocolError as error:
            farewell = guest.acceptor.farewell
            if farewell:
                try:
                    guest.sock.send(farewell)
                except OSError:
                    pass
            if isinstance(error, AuthenticationError) and not guest.local:
                with self._lock:
                    self._failures.setdefault(guest.address, []).append(time.monotonic())
            _log.warning("a connection from %s was refused: %s", guest.address, error)
            self._dismiss(fd, guest)
        except OSError:
            self._dismiss(fd, guest)

    def _dismiss(self, fd: int, guest: _Guest) -> None:
        if self._leave(fd, guest):
            guest.sock.close()

    def _leave(self, fd: int, guest: _Guest) -> bool:
        with self._lock:
            if self._guests.get(fd) is not guest:
                return False
            del self._guests[fd]
        guest.timer.cancel()
        self._agent.pool.forget(fd)
        return True

    def _admit(self, fd: int, guest: _Guest, answer: bytes) -> None:
        session = guest.acceptor.result
        if not self._leave(fd, guest):
            return
        sock = guest.sock
        if session.purpose is Purpose.MAIN:
            sock.setblocking(True)
            sock.sendall(answer)
            conn = self._connection(sock, session.attach, guest.local)
            with self._lock:
                self._introducing[conn] = session
            self._register(conn, session.leftover)
            return
        with self._lock:
            main = self._mains.get(session.attach)
        if main is None or main.broken:
            sock.close()
            return
        if session.purpose is Purpose.LANE and guest.local:
            # In place before the lender can name any memory: it waits for our answer.
            main.borrower = Borrower(sock, on_freed=self._agent.upkeep.freed)
            sock.setblocking(False)
            sock.send(answer)
        elif session.purpose is Purpose.BULK:
            sock.setblocking(True)
            sock.sendall(answer)
            self._add_stripe(sock, main)
        else:
            sock.close()

    # -- connections -----------------------------------------------------------------------------------

    def _connection(self, sock: socket.socket, attach: bytes, local: bool) -> Connection:
        if not local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        agent = self._agent
        return Connection(
            sock,
            epoll=agent.pool.epoll,
            events=agent.inbox,
            settings=agent.settings,
            attach=attach,
            local=local,
        )

    def _register(self, conn: Connection, leftover: bytes) -> None:
        with self._lock:
            self._mains[conn.attach] = conn
        self._watch(conn, leftover)

    def _watch(self, conn: Connection, leftover: bytes = b"") -> None:
        agent = self._agent

        def ready() -> None:
            frames = conn.turn()
            if frames:
                agent.deliver(conn, frames, False)

        agent.pool.watch(conn.fd, ready)
        if leftover:
            frames = conn.preload(leftover)
            if frames:
                agent.deliver(conn, frames, True)  # on any thread: others are woken for what came
        conn.register()

    def introduced(self, conn: Connection, body: bytes) -> None:
        """Take the first frame of an accepted connection: who is speaking. Under the read lock."""
        with self._lock:
            session = self._introducing.pop(conn, None)
        if session is None:
            raise ProtocolError("a peer introduced itself twice")
        record = WorkerRecord.from_bytes(body)
        if record.name != session.peer_name or record.incarnation != session.peer_incarnation:
            raise ProtocolError(f"{session.peer_name!r} introduced itself as {record.name!r}")
        peer = self._agent.adopt(record)
        if peer.state != "alive":
            raise ProtocolError(
                f"{record.name!r} is {peer.state} and may not come back as the same incarnation"
            )
        self._join(peer, conn)

    @staticmethod
    def _join(peer: Peer, conn: Connection) -> None:
        conn.peer = peer
        peer.conns.append(conn)
        if peer.conn is None or peer.conn.broken:
            peer.conn = conn

    def forget(self, conn: Connection) -> None:
        """Drop what is kept about a connection that has ended."""
        with self._lock:
            if self._mains.get(conn.attach) is conn:
                del self._mains[conn.attach]
            self._introducing.pop(conn, None)
        for stripe in list(conn.stripes):
            stripe.close()
            if self._agent.closed_down:  # then nobody else sees to it any more
                self._agent.pool.forget(stripe.fd)
                stripe.reap()
        if conn.main is not None and conn in conn.main.stripes:
            conn.main.stripes.remove(conn)

    # -- dialling --------------------------------------------------------------------------------------

    def connect(self, peer: Peer, deadline: float, what: str) -> Connection:
        """Return a connection to a peer, making it if there is none. Interruptible.

        Raises:
            PeerDiedError: nobody listens there any more.
            RpcTimeoutError: no connection within the deadline, or the connect time-out.
            AuthenticationError, VersionError: the two do not share a key or a protocol.
        """
        limit = min(deadline, time.monotonic() + self._agent.settings.connect_timeout)
        with _Taken(peer.dial_lock, limit) as taken:
            checkpoint()
            if not taken.held:
                raise RpcTimeoutError(
                    f"cannot call {what}: no connection to {peer.name!r} in time",
                    maybe_executed=False,
                    worker=peer.name,
                )
            conn = peer.conn
            if conn is not None and not conn.broken:
                return conn
            peer.check_alive(f"cannot call {what}")
            return self._dial_main(peer, limit, what, deadline)

    def _dial_main(self, peer: Peer, limit: float, what: str, deadline: float) -> Connection:
        tried: list[str] = []
        gone = True
        queue = deque(self._addresses(peer))
        while queue:
            family, address = queue.popleft()
            attach = secrets.token_bytes(16)
            try:
                sock, leftover = self._dial(peer, family, address, Purpose.MAIN, attach, limit)
            except (TimeoutError, OSError) as error:
                if isinstance(error, RpcError):
                    raise
                if error.errno in _BUSY and time.monotonic() < limit:
                    # Too many at once at its door, or it has just ended: then nobody will listen the next time.
                    time.sleep(0.02)
                    queue.appendleft((family, address))
                    continue
                tried.append(f"{address}: {error}")
                gone = gone and isinstance(error, OSError) and error.errno in _GONE
                continue
            return self._establish(peer, sock, family == socket.AF_UNIX, attach, leftover)
        if not tried:
            why = (
                f"cannot call {what}: {peer.name!r} runs on another host and has no address there. Give every worker the same "
                f"key (ACTORRPC_KEY) and an address (ACTORRPC_BIND), so that they listen on TCP"
            )
            raise AuthenticationError(why)
        if gone:
            self._agent.peer_ended(
                peer, "dead", f"nobody listens at its address any more ({'; '.join(tried)})"
            )
            raise peer.died(f"cannot call {what}", maybe_executed=False)
        raise (RpcTimeoutError if time.monotonic() >= deadline else PeerDiedError)(
            f"cannot call {what}: {peer.name!r} cannot be reached ({'; '.join(tried)}); the call was not executed",
            maybe_executed=False,
            worker=peer.name,
        )

    @uninterruptible
    def _establish(
        self, peer: Peer, sock: socket.socket, local: bool, attach: bytes, leftover: bytes
    ) -> Connection:
        conn = self._connection(sock, attach, local)
        conn.outbox.append(pack_frame(INTRO, body=self._agent.record.to_bytes()))
        self._join(peer, conn)
        try:
            self._register(conn, leftover)
        except (OSError, ValueError):  # the epoll, or this very connection, was closed meanwhile
            conn.close()
        if self._agent.closed_down:  # looked at when it can be found by whoever closes the agent
            conn.close()
            conn.reap()
            raise ShutdownError(f"worker {self._agent.name!r} has shut down", maybe_executed=False)
        conn.flush()
        return conn

    def _addresses(self, peer: Peer) -> list[tuple[int, Any]]:
        record, transport = peer.record, self._agent.settings.transport
        addresses: list[tuple[int, Any]] = []
        if peer.same_host and record.unix_path and transport != "tcp":
            addresses.append((socket.AF_UNIX, record.unix_path))
        if transport != "unix" and not addresses:
            for host, port in record.tcp:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses.extend((info[0], info[4]) for info in found)
        return addresses

    def _dial(
        self, peer: Peer, family: int, address: Any, purpose: Purpose, attach: bytes, limit: float
    ) -> tuple[socket.socket, bytes]:
        """Connect and shake hands; return the socket and what was received beyond the handshake."""
        agent = self._agent
        record = agent.record
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(max(0.05, limit - time.monotonic()))
            sock.connect(address)
            limit = min(limit, time.monotonic() + agent.settings.handshake_timeout)
            dialler = Dialler(
                key=self._key,
                name=record.name,
                incarnation=record.incarnation,
                purpose=purpose,
                attach=attach,
                peer_name=peer.record.name,
                peer_incarnation=peer.record.incarnation,
                insecure=self._insecure,
            )
            data = dialler.start()
            while True:
                sock.settimeout(max(0.05, limit - time.monotonic()))
                if data:
                    sock.sendall(data)
                if dialler.done:
                    return sock, dialler.result.leftover
                received = sock.recv(4096)
                if not received:
                    raise ConnectionResetError(errno.ECONNRESET, "closed during the handshake")
                data = dialler.feed(received)
        except BaseException:
            sock.close()
            raise

    # -- side connections --------------------------------------------------------------------------------

    def open_lane(self, conn: Connection) -> Lender | None:
        """Make the descriptor socket over which memory is lent to the peer; None where that is not possible."""
        peer: Peer = conn.peer
        path = peer.record.unix_path
        if not conn.local or not path or conn.lane_failed:
            return None
        with peer.dial_lock:
            if conn.lender is not None:
                return cast(Lender, conn.lender)
            settings = self._agent.settings
            try:
                sock, _ = self._dial(
                    peer,
                    socket.AF_UNIX,
                    path,
                    Purpose.LANE,
                    conn.attach,
                    time.monotonic() + settings.handshake_timeout,
                )
            except (OSError, RpcError) as error:
                _log.info("no shared memory with %r: %s", peer.name, error)
                conn.lane_failed = True
                return None
            sock.setblocking(False)
            lender = Lender(sock, limit_bytes=settings.lane_bytes, threshold=settings.lane_threshold)
            conn.lender = lender
            return lender

    def stripes(self, conn: Connection, total: int, deadline: float) -> list[Connection]:
        """Return further connections for a message of ``total`` bytes, made at first use; none where they are of no use."""
        settings = self._agent.settings
        if conn.local or total < settings.stripe_threshold or settings.stripes < 2:
            return []
        if conn.stripes or conn.lane_failed:
            return list(conn.stripes)
        peer: Peer = conn.peer
        with peer.dial_lock:
            if conn.stripes or conn.lane_failed:
                return list(conn.stripes)
            limit = min(deadline, time.monotonic() + self._agent.settings.handshake_timeout)
            for _ in range(self._agent.settings.stripes - 1):
                for family, address in self._addresses(peer):
                    try:
                        sock, _left = self._dial(peer, family, address, Purpose.BULK, conn.attach, limit)
                    except (OSError, RpcError) as error:
                        _log.info("no further connection to %r: %s", peer.name, error)
                        continue
                    self._add_stripe(sock, conn)
                    break
            conn.lane_failed = not conn.stripes
        return list(conn.stripes)

    def _add_stripe(self, sock: socket.socket, main: Connection) -> None:
        stripe = self._connection(sock, b"", False)
        stripe.main = main
        stripe.peer = main.peer
        stripe.assemblies = main.assemblies
        main.stripes.append(stripe)
        self._watch(stripe)

    def stream_ready(self, conn: Connection, stream: int) -> None:
        """The peer has the memory for a stream: chunks may come over any of its connections."""
        with self._lock:
            lock = self._ready.pop((conn, stream), None)
        if lock is not None:
            lock.release()

    def expect_ready(self, conn: Connection, stream: int) -> threading.Lock:
        """Return a lock that is released when the peer is ready for a stream."""
        lock = threading.Lock()
        lock.acquire()
        with self._lock:
            self._ready[conn, stream] = lock
        return lock

    def send_striped(
        self,
        conn: Connection,
        stripes: list[Connection],
        stream: int,
        pieces: Iterator[tuple[int, int, memoryview]],
        ready: threading.Lock,
        deadline: float | None,
    ) -> bool:
        """Send chunks over several connections at once; each takes the next one when it has sent the last."""
        conn.flush()
        until = min(deadline or float("inf"), time.monotonic() + 30.0)
        while not ready.acquire(timeout=0.1):
            if conn.broken or pending_here() or time.monotonic() > until:
                with self._lock:
                    self._ready.pop((conn, stream), None)
                conn.outbox.append(pack_frame(STREAM_ABORT, stream))
                conn.flush()
                return False
        left = deque(pieces)

        def take() -> Iterator[tuple[int, int, memoryview]]:
            while left:
                try:
                    yield left.popleft()
                except IndexError:
                    return

        results: list[bool] = []
        finished = threading.Semaphore(0)

        def send(stripe: Connection) -> None:
            try:
                results.append(stripe.send_chunks(stream, take(), deadline))
            finally:
                finished.release()

        for stripe in stripes:
            self._agent.submit(partial(send, stripe))
        results.append(conn.send_chunks(stream, take(), deadline))
        if not results[-1]:
            left.clear()  # nobody waits for the others: each ends with the chunk that it has begun
            return False
        for _ in stripes:
            finished.acquire()
        return all(results) and len(results) == len(stripes) + 1

    # -- the end -----------------------------------------------------------------------------------------

    def connections(self) -> list[Connection]:
        """Return all connections that are not forgotten, also those whose peer is still to introduce itself."""
        # Without the lock: in a forked child, a thread that does not exist there may hold it.
        return [conn for main in list(self._mains.values()) for conn in (main, *main.stripes)]

    def stop_listening(self) -> None:
        """Accept no more."""
        for sock in self._listeners:
            self._agent.pool.forget(sock.fileno())

    def close(self) -> None:
        """Close what is left: listening sockets (and their files) and guests."""
        for sock in self._listeners:
            path = sock.getsockname() if sock.family == socket.AF_UNIX else None
            sock.close()
            if path:
                remove_file(path)
        self._listeners = []
        for guest in list(self._guests.values()):
            guest.sock.close()
        self._guests.clear()

    def abandon(self) -> None:
        """Close the descriptors in a forked child; the files belong to the parent."""
        for sock in self._listeners:
            sock.close()
        for guest in self._guests.values():
            guest.sock.close()
        for conn in self.connections():
            conn.abandon()
