"""Pending connections: accepted connections whose other end has not proved yet that it has the group's key.

Pool threads serve the listening sockets. A pending connection has a short time limit and may send the handshake's fixed messages
only; its bytes are not passed to the frame reader. The number of pending connections is limited: each has one of
``max_unauthenticated`` places. If all places are taken, a new connection replaces a pending connection that is probably not a
member's: of the address with the most pending connections, the oldest that is silent, or else the oldest. A member needs
its place for a few round trips only, and dials again if it lost the place. Therefore silent connections and floods of connections
do not keep members out, even if they come from a member's address.

An address whose pending connections fail to prove the key gets ``FAILURES_PER_S`` answers per second. Further connections that
fail to prove the key are not answered, and keep their places until their time limit, or until the places are needed. This limits
how fast an attacker can guess, and members that share the address (one host, one NAT) are still served. Unix sockets have no
such limit.

Unless ``ACTORRPC_TLS=off`` is set, a TCP connection begins with the TLS handshake, within the same time limit and the same
places. A peer that does not use TLS is refused, and the reason is sent to it without TLS. A connection whose TLS handshake failed
is read until the other end closes it or until the time limit: closing a socket with unread bytes would reset the connection, and
the TLS alert with the reason would be lost.

If there are no descriptors for another connection, accepting pauses and is tried again; meanwhile, further connections wait in
the kernel's backlog. After a second without success, the connections in the backlog are refused: each is accepted over a reserved
descriptor, sent the reason without TLS, and closed.

``_lock`` guards the tables; no other code runs under it. The thread that runs a step of a pending connection's handshake holds
the ``turn`` of that connection. A thread that has to close the socket does not wait for the turn: it marks the connection, and
the thread that releases the turn closes the socket.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import select
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from actorrpc import _limits, _time
from actorrpc._exceptions import undo_on_error
from actorrpc.errors import AuthenticationError, ProtocolError
from actorrpc.transport.tls import SAME, AnySocket, Tls, describe
from actorrpc.transport.tls_socket import HELLO
from actorrpc.wire.handshake import Acceptor, Refusal
from actorrpc.wire.keys import remove_file

if TYPE_CHECKING:
    from actorrpc.agent.threads import Pool
    from actorrpc.agent.timers import Clock
    from actorrpc.config import Settings
    from actorrpc.wire.identity import WorkerRecord

__all__ = ["FAILURES_PER_S", "Admission", "AdmittingAgent", "PendingConnection", "no_room"]

FAILURES_PER_S: Final = 3
_MAX_ADDRESSES: Final = 1024  # the most addresses in the table of failures, and in the table of refusals
_READ: Final = 4096  # more than a first message of TLS has: closing a socket with unread bytes would reset the connection
_AGAIN_S: Final = 0.2  # time between two attempts to accept if there are no descriptors
_PATIENCE_S: Final = 1.0  # if no descriptor is available for so long, connections in the backlog are refused
_MINUTE_S: Final = 60.0
_MAX_CAUSES: Final = 8  # the most causes of refusals that are told apart
_VARYING: Final = re.compile(
    r"'[^']*'|[0-9]+"
)  # the parts in which the texts about refusals of one cause differ
_LOG_S: Final = 10.0  # the shortest time between two log lines that no connection can be accepted
_log = logging.getLogger("actorrpc.links")


class PendingConnection:
    """An accepted socket whose handshake has not finished."""

    __slots__ = ("_gone", "acceptor", "address", "fd", "local", "over", "sock", "timer", "turn")

    def __init__(self, sock: socket.socket, address: str, local: bool, acceptor: Acceptor) -> None:
        self.sock: AnySocket = sock
        self.fd = sock.fileno()  # stays the same when a TLS socket replaces ``sock``
        self.over = False  # whether the TLS handshake has failed, so that further bytes are discarded
        self.address = address
        self.local = local
        self.acceptor = acceptor
        self.timer: Any = None
        self.turn = _time.RLock()
        self._gone = False

    @property
    def is_silent(self) -> bool:
        """Whether the other end has sent neither a first TLS message nor the HELLO message of this package's handshake."""
        return isinstance(self.sock, socket.socket) and not self.acceptor.greeted

    def close(self) -> None:
        """Close the socket: now, or, if another thread runs a step of the handshake, when that thread has finished the step.

        During a step, TLS may replace ``sock`` by another object. And if the descriptor were closed during a step, its number
        could be reused while the step still uses the number.
        """
        self._gone = True
        self.sweep()

    def sweep(self) -> None:
        """Close the socket if :meth:`close` was called and no other thread runs a step. Also called after each step."""
        if self._gone and self.turn.acquire(blocking=False):
            try:
                self.sock.close()
            finally:
                self.turn.release()


class AdmittingAgent(Protocol):
    """The parts of an agent that :class:`Admission` uses."""

    record: WorkerRecord
    settings: Settings
    pool: Pool
    clock: Clock
    closed_down: bool


class Admission:
    """Accepts connections for one agent and performs their handshakes. Thread-safe.

    Args:
        key: the group's key; empty if the group has none.
        admit: called with a pending connection that has proved the key, and with the last message of the handshake. ``admit`` has
            to send this message, and owns the socket from then on.
        tls: the settings of TLS for TCP connections; None: no TLS.
    """

    def __init__(
        self,
        agent: AdmittingAgent,
        key: bytes,
        admit: Callable[[PendingConnection, bytes], None],
        tls: Tls | None,
    ) -> None:
        self._agent = agent
        self._key = key
        self._admit = admit
        self._tls = tls
        self._lock = _time.Lock()
        self._listeners: list[socket.socket] = []
        self._pending: dict[int, PendingConnection] = {}  # by descriptor, the oldest first
        self._failures: dict[str, list[float]] = {}
        self._closed = False
        self._scarce = False  # the hard limit of descriptors is near
        self._resting: set[socket.socket] = set()
        self._short_since: dict[socket.socket, float] = {}  # when a listener first lacked a descriptor
        # The reserved descriptor for refusing connections; -1: it could not be opened, or a thread is using it.
        self._held = -1
        self._logged_at = float("-inf")
        self._refused: Counter[str] = Counter()  # by address, since the last log line about refusals
        self._refused_since = float("-inf")
        self._refused_last = ""
        # The causes of refusals that were logged and have occurred within a minute, and when each occurred last.
        self._causes: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._pending)

    # -- listening -----------------------------------------------------------------------------------

    def listen(self, sockets: list[socket.socket]) -> None:
        """Serve these listening sockets from now on.

        Raises:
            ConfigError: TCP connections are encrypted, and the package for that is missing.
        """
        pool = self._agent.pool
        if any(sock.family != socket.AF_UNIX for sock in sockets):
            if self._tls is not None:
                self._tls.serve()
            else:
                _log.warning(
                    "TCP connections of %r are not encrypted (ACTORRPC_TLS=off): the network can read and change all data",
                    self._agent.record.name,
                )
        self._scarce = not _limits.make_room(pool.epoll.fileno())
        self._held = _open_one()
        for sock in sockets:
            sock.setblocking(False)
            self._listeners.append(sock)
            fd = sock.fileno()
            pool.watch(fd, partial(self._accept, sock))
            # Edge-triggered and not re-armed, so _accept() must accept until the backlog is empty.
            pool.epoll.register(fd, select.EPOLLIN | select.EPOLLET)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            # A connection has two descriptors: its socket, and an eventfd that is opened after the handshake. The new connection
            # needs both, and each pending connection still needs its eventfd.
            if self._scarce and not _limits.has_room(2 + len(self._pending)):
                self._rest(listener, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
                return
            try:
                sock, where = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                self._short_since.pop(listener, None)
                return
            except OSError as error:
                if error.errno in _limits.NO_DESCRIPTOR:
                    self._rest(listener, error)
                return
            self._short_since.pop(listener, None)
            self._scarce = not _limits.make_room(sock.fileno())
            local = sock.family == socket.AF_UNIX
            sock.setblocking(False)
            self._enter(sock, "local" if local else str(where[0]), local)

    def _rest(self, listener: socket.socket, error: OSError) -> None:
        """Accept again later, because epoll (edge-triggered) reports each connection in the backlog only once."""
        now = _time.now()
        with self._lock:
            if listener in self._resting or listener not in self._listeners:
                return
            self._resting.add(listener)
            in_vain = now - self._short_since.setdefault(listener, now) >= _PATIENCE_S
            logs = now - self._logged_at >= _LOG_S
            if logs:
                self._logged_at = now
        if logs:
            _log.error(
                "%r accepts no more connections until some have ended: %s",
                self._agent.record.name,
                _limits.explain_descriptors(error),
            )
        if in_vain:
            self._send_away(listener, error)
        self._agent.clock.after(_AGAIN_S, partial(self._agent.pool.submit, partial(self._resume, listener)))

    def _send_away(self, listener: socket.socket, error: OSError) -> None:
        """Refuse the connections in the backlog: accept each, send the reason, and close it."""
        with self._lock:
            held, self._held = self._held, -1
        if held >= 0:
            os.close(held)
        try:
            while True:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError):
                    sock.setblocking(False)
                    sock.send(no_room(error))
                    sock.shutdown(socket.SHUT_WR)
                    sock.recv(_READ)  # closing with unread bytes would discard the reason
        except OSError:  # the backlog is empty, or another thread has opened the released descriptor
            pass
        held = _open_one()
        with self._lock:
            if self._held < 0 and not self._closed:
                self._held, held = held, -1
        if held >= 0:
            os.close(held)

    def _resume(self, listener: socket.socket) -> None:
        with self._lock:
            self._resting.discard(listener)
        if not self._agent.closed_down:
            self._accept(listener)

    def _enter(self, sock: socket.socket, address: str, local: bool) -> None:
        agent = self._agent
        pending = PendingConnection(sock, address, local, self._acceptor())
        pending.timer = agent.clock.after(
            agent.settings.handshake_timeout, partial(agent.pool.submit, partial(self._dismiss, pending))
        )
        with self._lock:
            closed = self._closed
            full = len(self._pending) >= max(1, agent.settings.max_unauthenticated)
            out = self._least() if full else None
            if out is not None:
                # Remove the old connection and enter the new one under one lock, so that no other thread removes the old one too.
                del self._pending[out.fd]
            if not closed:
                self._pending[pending.fd] = pending
                # Watch the descriptor before the lock is released: afterwards, another thread may remove and close the
                # connection, and the number of its descriptor may be reused. Watching the number then would replace another
                # entry.
                agent.pool.watch(pending.fd, partial(self._serve, pending))
                try:
                    agent.pool.epoll.register(pending.fd, select.EPOLLIN | select.EPOLLONESHOT)
                except (OSError, ValueError):  # the agent has been closed
                    closed = True
                    del self._pending[pending.fd]
                    agent.pool.forget(pending.fd)
        if out is not None:
            self._stop_watching(out)
            out.close()
        if closed:  # the agent was closed after the connection was accepted
            pending.timer.cancel()
            pending.close()

    def _acceptor(self, binding: bytes = b"") -> Acceptor:
        record = self._agent.record
        return Acceptor(
            key=self._key,
            name=record.name,
            incarnation=record.incarnation,
            insecure=not self._key,
            binding=binding,
        )

    def _least(self) -> PendingConnection:
        """Return the pending connection to be replaced by a new one. Under the lock."""
        counts = Counter(pending.address for pending in self._pending.values())
        most = max(counts.values())
        crowd = [pending for pending in self._pending.values() if counts[pending.address] == most]
        return next((pending for pending in crowd if pending.is_silent), crowd[0])

    # -- the handshake ---------------------------------------------------------------------------------

    def _serve(self, pending: PendingConnection) -> None:
        """Run the next step of a pending connection's handshake. One thread at a time, as the epoll entry is one-shot."""
        try:
            with pending.turn:
                answer = self._step(pending) if self._is_here(pending) else None
        finally:
            pending.sweep()
        if answer is None:
            return
        try:
            with undo_on_error(pending.close):
                self._admit(pending, answer)
        except ProtocolError as error:
            self._refuse(pending, error)
        except OSError:
            pass

    def _step(self, pending: PendingConnection) -> bytes | None:
        """Run one step. If it proves the key, remove the connection from the table and return the last message; else None."""
        tls = None if pending.local else self._tls
        try:
            if tls is not None and not self._secured(pending, tls):
                self._listen_to(pending)
                return None
            data = pending.sock.recv(_READ)
            if not data:
                self._dismiss(pending)
                return None
            if data.startswith(HELLO) and not pending.local and not pending.acceptor.greeted:
                self._turn_away(pending, "TLS")
            answer = pending.acceptor.feed(data)
            if pending.acceptor.done:
                return answer if self._remove(pending) else None
            if answer:
                pending.sock.send(answer)
            self._listen_to(pending)
        except BlockingIOError:
            self._listen_to(pending)
        except ProtocolError as error:
            self._refuse(pending, error)
        except ssl.SSLError as error:
            assert tls is not None
            self._fail(pending, error, tls)
        except OSError:
            self._dismiss(pending)
        return None

    def _secured(self, pending: PendingConnection, tls: Tls) -> bool:
        """Continue the TLS handshake; return whether it has finished, so that the handshake of this package can continue."""
        sock = pending.sock
        if isinstance(sock, socket.socket):
            first = sock.recv(1, socket.MSG_PEEK)
            if not first:
                self._dismiss(pending)
                return False
            if first != HELLO:
                sock.recv(_READ)
                self._turn_away(pending, "ACTORRPC_TLS=off, or is no worker")
            pending.sock = sock = tls.accept(sock)
        if pending.over:
            if not sock.discard():
                self._dismiss(pending)
            return False
        if not sock.secured:
            if not sock.handshake():
                return False
            pending.acceptor = self._acceptor(sock.binding)
        return True

    def _turn_away(self, pending: PendingConnection, theirs: str) -> None:
        """Raise the error for a connection of which only one side uses TLS. ``_refuse`` sends the reason without TLS."""
        sock = pending.sock
        host, port = (sock if isinstance(sock, socket.socket) else sock.sock).getsockname()[:2]
        own = describe(self._tls)
        reason = f"{host}:{port} has {own}, and this connection has {theirs}: {SAME}"
        pending.acceptor.refusal = Acceptor.refuse(Refusal.PROTOCOL, reason)
        raise ProtocolError(f"it has {theirs}, and this worker has {own}: {SAME}")

    def _fail(self, pending: PendingConnection, error: ssl.SSLError, tls: Tls) -> None:
        """Shut down a pending connection whose TLS handshake has failed. OpenSSL has sent an alert with the reason."""
        if not self._failed_often(pending.address):
            self._tell(
                f"a connection was refused: {tls.explain(error, f'the process that connected from {pending.address}')}",
                pending.address,
            )
        pending.over = True
        try:
            pending.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        self._listen_to(pending)

    def _listen_to(self, pending: PendingConnection) -> None:
        if self._is_here(pending):
            try:
                self._agent.pool.epoll.modify(pending.fd, select.EPOLLIN | select.EPOLLONESHOT)
            except (OSError, ValueError):  # another thread has closed the connection
                pass

    def _refuse(self, pending: PendingConnection, error: ProtocolError) -> None:
        if not pending.local and self._failed_often(pending.address):
            self._tell(f"a connection from {pending.address} was refused: {error}", pending.address)
            if not isinstance(error, AuthenticationError):
                self._dismiss(pending)
            return  # not answered; without a proof of the key, it keeps its place until its time limit
        refusal = pending.acceptor.refusal
        if refusal:
            try:
                pending.sock.send(refusal)
            except OSError:
                pass
        self._tell(f"a connection from {pending.address} was refused: {error}", pending.address)
        self._dismiss(pending)

    def _tell(self, text: str, address: str) -> None:
        """Log the first refusal of each cause at once, and count the further refusals: one line a minute reports them.

        A cause is new if it has not occurred for a minute. If ``_MAX_CAUSES`` causes are known, new causes are only counted.
        """
        now, cause = _time.now(), _VARYING.sub("", text.replace(address, ""))
        with self._lock:
            self._causes = {each: at for each, at in self._causes.items() if now - at < _MINUTE_S}
            known = cause in self._causes
            quiet = known or len(self._causes) >= _MAX_CAUSES
            if known or not quiet:
                self._causes[cause] = now
            if quiet:
                first = not self._refused
                self._refused[address] += 1
                self._refused_last = text
                if len(self._refused) > _MAX_ADDRESSES:  # count further addresses under the first address
                    count = self._refused.pop(address)
                    self._refused[next(iter(self._refused))] += count
            else:
                first, self._refused_since = False, now
        if not quiet:
            _log.warning("%s", text)
        elif first:
            self._agent.clock.at(
                self._refused_since + _MINUTE_S, partial(self._agent.pool.submit, self._sum_up)
            )

    def _sum_up(self) -> None:
        """Log the number of refusals since the last line."""
        with self._lock:
            refused, self._refused = self._refused, Counter()
            text = self._refused_last
            if refused:
                self._refused_since = _time.now()
        if refused:
            (address, most), *_ = refused.most_common(1)
            _log.warning(
                "%d more connections were refused within a minute, from %d addresses (%d from %s); the last one: %s",
                refused.total(),
                len(refused),
                most,
                address,
                text,
            )

    def _failed_often(self, address: str) -> bool:
        """Record that a connection has failed; return whether its address had ``FAILURES_PER_S`` failures in the last second."""
        now = _time.now()
        with self._lock:
            times = [when for when in self._failures.pop(address, ()) if now - when < 1.0]
            often = len(times) >= FAILURES_PER_S
            if not often:
                times.append(now)
            while len(self._failures) >= _MAX_ADDRESSES:
                del self._failures[next(iter(self._failures))]
            self._failures[address] = times
        return often

    def _dismiss(self, pending: PendingConnection) -> None:
        if self._remove(pending):
            pending.close()

    def _is_here(self, pending: PendingConnection) -> bool:
        return self._pending.get(pending.fd) is pending

    def _remove(self, pending: PendingConnection) -> bool:
        with self._lock:
            if not self._is_here(pending):
                return False
            del self._pending[pending.fd]
        self._stop_watching(pending)
        return True

    def _stop_watching(self, pending: PendingConnection) -> None:
        pending.timer.cancel()
        self._agent.pool.forget(pending.fd)

    # -- the end ---------------------------------------------------------------------------------------

    def stop_listening(self) -> None:
        for sock in self._listeners:
            self._agent.pool.forget(sock.fileno())

    def close(self) -> None:
        """Close the listening sockets, remove the files of Unix sockets, and close the pending connections."""
        for sock in self._listeners:
            path = sock.getsockname() if sock.family == socket.AF_UNIX else None
            sock.close()
            if path:
                remove_file(path)
        self._listeners = []
        self._sum_up()
        with self._lock:
            self._closed = True
            found = list(self._pending.values())
            self._pending.clear()
            held, self._held = self._held, -1
        if held >= 0:
            os.close(held)
        for pending in found:
            pending.close()

    def abandon(self) -> None:
        """Close the descriptors in a forked child. The files of Unix sockets stay, because the parent uses them."""
        for sock in self._listeners:
            sock.close()
        for pending in list(self._pending.values()):
            pending.sock.close()
        if self._held >= 0:
            os.close(self._held)


def no_room(error: OSError) -> bytes:
    """Return the message that refuses a connection because there is no descriptor for it."""
    return Acceptor.refuse(Refusal.BUSY, _limits.explain_refusal(error))


def _open_one() -> int:
    """Return a descriptor of /dev/null; -1 if none can be opened."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
