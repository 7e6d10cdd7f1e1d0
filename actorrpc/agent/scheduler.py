"""What an agent does when time has passed.

Corked writes leave, credit goes out, silent peers are asked for a sign of life, shared memory that has died goes back
to its lender, and memory that is kept for reuse is given back to the system. All of it runs on ticks that stop when there
is nothing left to look after: of an idle worker, only the pulse is left, which wakes the clock once in a heartbeat (at most
four times, whatever the number of peers), and not at all where nobody is connected. Between two idle workers, one asks and
the other answers: two small frames in a heartbeat. Runs on the clock's thread; what may block goes to the pool.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from actorrpc import _time
from actorrpc.agent.peers import MembershipEvents
from actorrpc.agent.timers import Tick
from actorrpc.transport.connection_state import CLOSED
from actorrpc.transport.failure_detector import is_direct, process_state
from actorrpc.wire import frames
from actorrpc.wire.frames import pack_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.agent.calls import Call
    from actorrpc.agent.peers import Peer
    from actorrpc.agent.threads import Pool
    from actorrpc.agent.timers import Clock
    from actorrpc.config import Settings
    from actorrpc.transport.buffers import BufferPool
    from actorrpc.transport.connection import Connection
    from actorrpc.transport.object_store import ObjectStore
    from actorrpc.transport.shared_memory import Borrower
    from actorrpc.wire.identity import WorkerRecord

__all__ = ["Scheduler"]

INFINITE: Final = float("inf")
_EXPECTED_S: Final = 2e-3  # rarely: a tick in the middle of every few calls costs more than it is worth
# A reply that lies there until the clock looks costs as much as so many that a pool thread reads.
_UNATTENDED: Final = 64
_SOON_S: Final = 0.005
_HAND_BACK_S: Final = 0.05
_TRIM_S: Final = 30.0
_OBJECTS_S: Final = 0.5  # between two looks whether objects in shared memory have readers


class _ScheduledAgent(Protocol):
    """The parts of an agent that its ticks look after."""

    record: WorkerRecord
    settings: Settings
    clock: Clock
    pool: Pool
    buffers: BufferPool
    objects: ObjectStore
    on_peer_end: list[Callable[[Peer], None]]

    def peers(self) -> list[Peer]: ...
    def peer_ended(self, peer: Peer, state: str, cause: str) -> None: ...


class Scheduler:
    """The ticks of one agent. Thread-safe; pokes are cheap enough for the path of every call."""

    def __init__(self, agent: _ScheduledAgent) -> None:
        self._agent = agent
        clock, settings = agent.clock, agent.settings
        self.corked: dict[Connection, None] = {}
        self._cork = Tick(clock, settings.cork_us * 1e-6, self._uncork)
        #: connections that the pool listens to again soon, if nobody comes to read what is expected there
        self.expecting: dict[Connection, None] = {}
        self.expected = Tick(clock, _EXPECTED_S, self._listen)
        self._laden: dict[tuple[Connection, int], None] = {}
        self._soon = Tick(clock, _SOON_S, self._send_laden)
        self.changes = MembershipEvents(agent.pool.submit)
        agent.on_peer_end.append(self._ended)
        self.pulse = Tick(clock, settings.heartbeat, self._beat)
        self._hand_back = Tick(clock, _HAND_BACK_S, self._hand_back_lanes)
        self._ringing = False
        self._trimming = Tick(clock, _TRIM_S, self._trim)
        self._objects = Tick(clock, _OBJECTS_S, self._trim_objects)

    def cork(self, conn: Connection) -> None:
        """Leave what is in the outbox for a moment, so that more can leave with it."""
        self.corked[conn] = None
        if not self._cork.active:
            self._cork.poke()

    def _listen(self) -> bool:
        busy = bool(self.expecting)
        late = _time.now() - 0.5 * _EXPECTED_S
        for conn in list(self.expecting):
            # A thread that expects and waits, again and again, is left alone.
            if conn.expecting < late:
                self.expecting.pop(conn, None)
                # Who has made many calls may be at it still. Who has made few, or the last one a while ago, waits elsewhere: in
                # torch.futures.wait_all(), say, which is C, and reads nothing.
                if conn.listen():
                    calls = list(conn.peer.pending.values())
                    if len(calls) <= _UNATTENDED or calls[-1].made < late:
                        conn.unattended = _UNATTENDED
        return busy

    def flush(self) -> None:
        """Send everything that was corked: somebody is about to wait."""
        corked = self.corked
        while corked:
            try:
                conn, _ = corked.popitem()
            except KeyError:
                return
            conn.flush()

    def _uncork(self) -> bool:
        busy = bool(self.corked)
        self.flush()
        return busy

    def soon(self, conn: Connection, taken_up: int = 0) -> None:
        """Send what is in the outbox soon, if nothing takes it along before.

        Args:
            taken_up: the number of a large request whose bytes do not count as unread any more. Its answer says so, too.
        """
        self._laden[conn, taken_up] = None
        if not self._soon.active:
            self._soon.poke()

    def _send_laden(self) -> bool:
        busy = False
        while self._laden:
            (conn, taken_up), _ = self._laden.popitem()
            busy = True
            if taken_up in conn.peer.running:
                conn.outbox.append(pack_frame(frames.CREDIT, taken_up))
            if conn.outbox:
                conn.flush()
        return busy

    def freed(self) -> None:
        """Hear, in a finaliser, that borrowed memory has died; it goes back soon, with whatever is sent or by itself."""
        if not self._ringing:
            self._ringing = True
            self._agent.clock.call_soon(self._hand_back.poke)

    def _hand_back_lanes(self) -> bool:
        self._ringing = False
        for conn in self._connections():
            if conn.state is not CLOSED and conn.lane.hand_back(conn.outbox):
                self._agent.pool.submit(conn.flush)
        return False

    def _connections(self) -> list[Connection]:
        return [conn for peer in self._agent.peers() for conn in list(peer.conns)]

    def keep_trim(self) -> None:
        """Have memory kept for reuse given back to the system when it is not used any more."""
        if not self._trimming.active:
            self._trimming.poke()

    def keep_objects(self) -> None:
        """Have shared memory given back to the system whose objects nobody reads any more."""
        self._objects.poke()

    def _trim_objects(self) -> bool:
        objects = self._agent.objects
        self._agent.pool.submit(objects.trim)
        return objects.writes

    def _trim(self) -> bool:
        self._agent.buffers.trim()
        kept = self._agent.buffers.stats().free_bytes
        for conn in self._connections():
            if conn.lane.lender is not None:
                kept += conn.lane.lender.stats().free_bytes
        return kept > 0

    def before_fork(self) -> None:
        """Hold back the return of borrowed memory while it is unclear what a child inherits."""
        for borrower in self._borrowers():
            borrower.before_fork()

    def after_fork_in_parent(self) -> None:
        """End what :meth:`before_fork` began."""
        for borrower in self._borrowers():
            borrower.after_fork_in_parent()

    def _borrowers(self) -> list[Borrower]:
        return [conn.lane.borrower for conn in self._connections() if conn.lane.borrower is not None]

    def watch(self, call: Call) -> None:
        """Have the clock look after the call's deadline."""
        peer = call.peer
        if call.deadline < peer.scan_at and call.future is not None:
            peer.scan_at = call.deadline
            self._agent.clock.at(call.deadline, lambda: self._scan(peer))
        if not self.pulse.active and not peer.is_self:
            self.pulse.poke()

    def _scan(self, peer: Peer) -> None:
        """End the calls whose time is over; runs on the clock's thread."""
        now = _time.now()
        peer.scan_at = INFINITE
        earliest = INFINITE
        late: list[Call] = []
        for call in list(peer.pending.values()):
            if call.future is None:
                continue
            if call.deadline <= now:
                late.append(call)
            elif call.deadline < earliest:
                earliest = call.deadline
        if earliest < peer.scan_at:
            peer.scan_at = earliest
            self._agent.clock.at(earliest, lambda: self._scan(peer))
        if late:
            self._agent.pool.submit(lambda: [call.expire() for call in late])

    def _beat(self) -> bool:
        """Look after all connected peers: ask those that are silent, and see what long silence means."""
        now = self._agent.clock.now()
        wait = INFINITE
        for peer in self._agent.peers():
            conn = peer.conn
            if conn is None or conn.state is CLOSED or peer.state != "alive":
                continue
            wait = min(wait, self._look_at(peer, conn, now))
        if wait == INFINITE:
            return False
        self.pulse.interval = wait
        return True

    def _look_at(self, peer: Peer, conn: Connection, now: float) -> float:
        settings, failure_detector = self._agent.settings, peer.failure_detector
        look = failure_detector.look(
            now,
            conn.heard,
            heartbeat=settings.heartbeat,
            misses=settings.heartbeat_misses,
            late=self.pulse.late,
            receiving=bool(conn.assemblies) or conn.reader.mid_frame,
        )
        if look.ask:
            conn.outbox.append(pack_frame(frames.PING))
            conn.flush()  # without waiting
        if look.state == "alive":
            if peer.told == "suspect":
                self.changes.note(peer, "alive", "it answers again")
        elif peer.told == "alive":
            failure_detector.direct = None
            self.changes.note(peer, "suspect", f"it has been silent for {failure_detector.silent:.1f} s")
            self._agent.pool.submit(partial(self._examine, peer, conn))
        elif look.state == "lost":
            why = self._why_dead(peer)
            if why:
                self._agent.pool.submit(partial(self._agent.peer_ended, peer, "dead", why))
        return look.wait

    def _examine(self, peer: Peer, conn: Connection) -> None:
        """Find out whether the peer's process can be asked; reads long tables, so on a pool thread."""
        is_here = peer.record.host == self._agent.record.host
        peer.failure_detector.direct = is_here and is_direct(conn.stream.sock, peer.record.pid)

    @staticmethod
    def _why_dead(peer: Peer) -> str:
        """Say why a peer that is lost is dead; empty where it is merely busy, or not examined yet."""
        silent = f"it has been silent for {peer.failure_detector.silent:.1f} s"
        if peer.failure_detector.direct is None:
            return ""
        if not peer.failure_detector.direct:
            return silent
        state = process_state(peer.record.pid)
        return "" if state == "running" else f"{silent} and its process is {state}"

    def _ended(self, peer: Peer) -> None:
        self.changes.note(peer, peer.state, peer.cause or "it has left the group")
