"""Resumption: a TCP connection that breaks goes on over another socket, within a grace time.

The side that had dialled dials again, for as long as the grace time lasts; the other side waits for it. Either one finds
out at once where the peer's process is gone: nobody listens at its address any more. Until the connection goes on, what is
to be sent waits in its outbox, under the deadlines of the calls; when it does not, its end is the peer's.

Attempts run on pool threads, and several for one connection may be under way at both ends. Nothing is guarded here: the
latest counts, by the number that each draws. :meth:`Connection.standstill`, before a side tells how far it has come, puts an
end to all earlier ones, and :meth:`Connection.resume` is a single step under the connection's locks.
"""

from __future__ import annotations

import errno
import logging
import socket
import struct
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actorrpc import moments
from actorrpc.core.handshake import Purpose, Session
from actorrpc.core.tls import Stream
from actorrpc.errors import LimitError, ProtocolError, RpcError

if TYPE_CHECKING:
    from actorrpc.core.agent import Agent
    from actorrpc.core.connection import Connection
    from actorrpc.core.links import Links

__all__ = ["Resumption"]

_log = logging.getLogger("actorrpc.links")
_ATTEMPT_S: Final = 2.0  # for dialling, shaking hands and saying how far each side has come
_PAUSES_S: Final = (0.0, 0.02, 0.05, 0.1, 0.2)  # between attempts; the last one for all that follow
_PROBE_S: Final = 0.25  # how often the side that waits looks whether the peer still listens
_REFUSALS: Final = (
    5  # handshakes that may fail before the peer is taken for another one: bytes can be damaged
)
_COUNT: Final = struct.Struct("<Q")
_UNKNOWN: Final = (1 << 64) - 1


class Resumption:
    """Brings the broken connections of one agent back. Thread-safe.

    Args:
        links: dials, and knows the connections.
    """

    def __init__(self, agent: Agent, links: Links) -> None:
        self._agent = agent
        self._links = links

    def begin(self, conn: Connection, error: BaseException) -> None:
        """Try to bring a connection back that has just been suspended. Called under its locks: goes on elsewhere."""
        self._agent.submit(partial(self._begin, conn, error, conn.lapses))

    def _begin(self, conn: Connection, error: BaseException, lapse: int) -> None:
        agent, grace = self._agent, self._agent.settings.session_grace
        if agent.closed_down:
            conn.close(error)
            return
        _log.info("the connection to %r is interrupted: %s", _name(conn), error)
        until = moments.now() + grace
        agent.clock.at(until, partial(agent.submit, partial(self._give_up, conn, error, lapse)))
        if conn.dialled:
            self._redial(conn, error, lapse, until, 0, 0)
        else:
            self._probe(conn, error, lapse)

    @staticmethod
    def _over(conn: Connection, lapse: int) -> bool:
        return conn.broken or not conn.suspended or conn.lapses != lapse

    @staticmethod
    def _end(conn: Connection, error: BaseException) -> None:
        conn.close(error)
        if conn.main is not None:  # it was to bring parts of messages, which never come now
            conn.main.close(error)

    def _give_up(self, conn: Connection, error: BaseException, lapse: int) -> None:
        if not self._over(conn, lapse):
            grace = self._agent.settings.session_grace
            self._end(
                conn,
                ConnectionError(f"the connection broke ({error}) and did not come back within {grace} s"),
            )

    # -- the side that dials -----------------------------------------------------------------------

    def _redial(
        self, conn: Connection, error: BaseException, lapse: int, until: float, attempt: int, refusals: int
    ) -> None:
        if self._over(conn, lapse):
            return
        if self._agent.closed_down:
            self._end(conn, error)
            return
        limit = min(until, moments.now() + _ATTEMPT_S)
        gone = True
        for family, address in self._links.addresses(conn.peer):
            try:
                number = next(conn.attempts)
                sock, _ = self._links.dial(conn.peer, family, address, Purpose.RESUME, conn.attach, limit)
                if self._agree(conn, sock, number, limit):
                    return
                self._end(conn, error)  # the other side has given it up
                return
            except LimitError:  # it has no descriptor for it now
                gone = False
            except RpcError as refused:
                gone = False
                refusals += 1
                if refusals >= _REFUSALS:
                    self._end(conn, refused)
                    return
            except OSError as failed:
                gone = gone and failed.errno == errno.ECONNREFUSED
        if gone:
            self._end(conn, error)
            return
        pause = _PAUSES_S[min(attempt, len(_PAUSES_S) - 1)]
        again = partial(self._redial, conn, error, lapse, until, attempt + 1, refusals)
        self._agent.clock.after(pause, partial(self._agent.submit, again))

    def _agree(self, conn: Connection, sock: Stream, number: int, limit: float) -> bool:
        try:
            sock.settimeout(max(0.05, limit - moments.now()))
            mine = conn.standstill(number)
            if mine is None:  # another one has begun, and does what there is to do
                sock.close()
                return True
            sock.sendall(_COUNT.pack(mine))
            theirs = _read_count(sock)
            if theirs == _UNKNOWN:
                sock.close()
                return False
            self._go_on(conn, sock, number, theirs)
        except BaseException:
            sock.close()
            raise
        return True

    # -- the side that waits -----------------------------------------------------------------------

    def _probe(self, conn: Connection, error: BaseException, lapse: int) -> None:
        """Look whether the peer's process is still there, as far as its address says so."""
        if self._over(conn, lapse):
            return
        # Who has not introduced itself yet, has no address.
        addresses = [] if conn.peer is None else self._links.addresses(conn.peer)
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
            self._end(conn, error)
            return
        again = partial(self._probe, conn, error, lapse)
        self._agent.clock.after(_PROBE_S, partial(self._agent.submit, again))

    def admit(self, sock: Stream, session: Session, answer: bytes, conn: Connection | None) -> None:
        """Take a socket that is to take the place of a connection's, which may not have noticed that it is broken.

        Args:
            answer: the last message of the handshake.
        """
        # Before the other side hears that it may go on: from there, its next attempt is a later one here as well.
        number = 0 if conn is None else next(conn.attempts)
        try:
            sock.settimeout(self._agent.settings.handshake_timeout)
            sock.sendall(answer)
            theirs = _read_count(sock)
            if conn is None or not self._belongs(conn, session):
                sock.sendall(_COUNT.pack(_UNKNOWN))
                sock.close()
                return
            mine = None
            if not conn.overtaken(number):
                conn.suspend(ConnectionResetError("the other side has begun a new one"))
                mine = conn.standstill(number)
            if mine is None:
                sock.close()
                return
            sock.sendall(_COUNT.pack(mine))
            self._go_on(conn, sock, number, theirs)
        except (OSError, EOFError) as error:
            _log.info("a connection of %r did not come back: %s", session.peer_name, error)
            sock.close()

    @staticmethod
    def _belongs(conn: Connection, session: Session) -> bool:
        return (
            not conn.broken
            and conn.replay is not None
            and conn.other == (session.peer_name, session.peer_incarnation)
        )

    # -- both --------------------------------------------------------------------------------------

    def _go_on(self, conn: Connection, sock: Stream, number: int, theirs: int) -> None:
        sock.settimeout(None)
        old = conn.fd
        try:
            resumed = conn.resume(sock, number, theirs, partial(self._agent.pool.forget, old))
        except ProtocolError as error:
            self._end(conn, error)
            resumed = False
        if not resumed:
            sock.close()
            return
        self._links.watch(conn)
        self._agent.submit(conn.flush_waiting)
        _log.info("the connection to %r goes on", _name(conn))


def _read_count(sock: Stream) -> int:
    data = b""
    while len(data) < _COUNT.size:
        more = sock.recv(_COUNT.size - len(data))
        if not more:
            raise ConnectionResetError(errno.ECONNRESET, "closed before it was said how far it has come")
        data += more
    count: Any = _COUNT.unpack(data)[0]
    return int(count)


def _name(conn: Connection) -> str:
    name: str = conn.other[0] if conn.peer is None else conn.peer.name
    return name
