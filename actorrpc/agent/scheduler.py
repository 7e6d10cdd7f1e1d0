"""The periodic work of an agent.

Ticks (functions that the clock calls at an interval) send delayed frames and CREDIT, send PING to silent peers, return borrowed
shared memory to its lender, and release unused memory to the system. A tick stops when it has no work left. An idle worker has
one tick, the pulse, which wakes the clock once in a heartbeat (at most four times, whatever the number of peers), and none if it
has no connections. Two idle workers exchange two small frames in a heartbeat, a PING and a PONG. Ticks run on the clock's thread;
work that may block is submitted to the pool.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from actorrpc import _time
from actorrpc.agent.peers import MembershipEvents
from actorrpc.agent.timers import Tick
from actorrpc.transport.failure_detector import is_direct, process_state
from actorrpc.transport.stream import CLOSED
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
    from actorrpc.transport.device_memory import DeviceLane
    from actorrpc.transport.object_store import ObjectStore
    from actorrpc.transport.shared_memory import Borrower
    from actorrpc.wire.identity import WorkerRecord

__all__ = ["Scheduler"]

INFINITE: Final = float("inf")
_EXPECTED_S: Final = 2e-3  # how long a socket stays disarmed without a reader (shorter: too many ticks)
# If no caller read the reply of a disarmed connection before the tick, callers must read this many replies before the connection
# is disarmed again. One reply that waits for the tick costs as much as this many replies that are read by pool threads.
_UNATTENDED: Final = 64
_SOON_S: Final = 0.005
_HAND_BACK_S: Final = 0.05
_TRIM_S: Final = 30.0
_LENT_S: Final = 30.0  # how long device memory is kept after the connection has ended
_OBJECTS_S: Final = 0.5  # how often shared memory is checked for readers


class _ScheduledAgent(Protocol):
    """The parts of an agent that its ticks use."""

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
    """The ticks of one agent. Thread-safe."""

    def __init__(self, agent: _ScheduledAgent) -> None:
        self._agent = agent
        clock, settings = agent.clock, agent.settings
        self.corked: dict[Connection, None] = {}
        self._cork = Tick(clock, settings.cork_us * 1e-6, self.flush)
        #: disarmed connections, to which the pool listens again soon unless a caller reads the expected reply
        self.expecting: dict[Connection, None] = {}
        self.expected = Tick(clock, _EXPECTED_S, self._listen)
        self._laden: dict[tuple[Connection, int], None] = {}
        self._soon = Tick(clock, _SOON_S, self._send_laden)
        self.changes = MembershipEvents(agent.pool.submit)
        agent.on_peer_end.append(self._ended)
        self.pulse = Tick(clock, settings.heartbeat, self._beat)
        self._hand_back = Tick(clock, _HAND_BACK_S, self._hand_back_lanes)
        self._trimming = Tick(clock, _TRIM_S, self._trim)
        self._objects = Tick(clock, _OBJECTS_S, self._trim_objects)
        self._lent: set[DeviceLane] = set()  # of closed connections; the peers may still read their memory

    def cork(self, conn: Connection) -> None:
        """Send the outbox after ``Settings.cork_us`` microseconds, together with the frames that are added until then."""
        self.corked[conn] = None
        if not self._cork.active:
            self._cork.wake()

    def expect(self, conn: Connection) -> None:
        """Arrange that the pool listens to a disarmed connection again soon, unless a caller reads the expected reply."""
        self.expecting[conn] = None
        if not self.expected.active:
            self.expected.wake()

    def _listen(self) -> bool:
        busy = bool(self.expecting)
        late = _time.now() - 0.5 * _EXPECTED_S
        for conn in list(self.expecting):
            # If a thread makes one call after the other and waits for each, ``expecting`` is a recent time.
            if conn.expecting < late:
                self.expecting.pop(conn, None)
                # If there are many pending calls and the last is recent, the thread may still be making calls. Otherwise it waits
                # in code that reads nothing, such as torch.futures.wait_all(): do not disarm the connection for a while.
                if conn.listen():
                    calls = list(conn.peer.pending.values())
                    if len(calls) <= _UNATTENDED or calls[-1].made < late:
                        conn.unattended = _UNATTENDED
        return busy

    def flush(self) -> bool:
        """Flush all corked connections, because a thread is about to wait; return whether there were any."""
        corked = self.corked
        busy = bool(corked)
        while corked:
            try:
                conn, _ = corked.popitem()
            except KeyError:  # another thread has taken the last entry
                break
            conn.flush()
        return busy

    def soon(self, conn: Connection, taken_up: int = 0) -> None:
        """Send the outbox within some milliseconds.

        Args:
            taken_up: the number of a large request that has been opened. Unless its answer is sent before, a CREDIT frame tells
                the sender that the bytes of the request are read.
        """
        self._laden[conn, taken_up] = None
        if not self._soon.active:
            self._soon.wake()

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
        """Return borrowed memory soon, because views of it have died. May be called in a finaliser."""
        if not self._hand_back.active:
            self._hand_back.wake()

    def _hand_back_lanes(self) -> bool:
        for conn in self._connections():
            if conn.state is not CLOSED and conn.lane.hand_back(conn.outbox):
                self._agent.pool.submit(conn.flush)
        return False

    def _connections(self) -> list[Connection]:
        return [conn for peer in self._agent.peers() for conn in list(peer.conns)]

    def keep_trim(self) -> None:
        """Start the tick that releases unused buffers to the system."""
        if not self._trimming.active:
            self._trimming.wake()

    def keep_lent(self, lane: DeviceLane) -> None:
        """Keep the lent device memory of a closed connection for 30 s, because the peer may still read the memory."""
        if lane.is_lending:
            self._lent.add(lane)
            release = partial(self._release, lane)
            self._agent.clock.after(_LENT_S, lambda: self._agent.pool.submit(release))

    def _release(self, lane: DeviceLane) -> None:
        self._lent.discard(lane)
        lane.release()

    def release_lent(self) -> None:
        """Release the device memory of all closed connections."""
        for lane in list(self._lent):
            self._release(lane)

    def abandon(self) -> None:
        """Keep references to the device memory of closed connections in a forked child."""
        for lane in list(self._lent):
            lane.abandon()

    def keep_objects(self) -> None:
        """Start the tick that releases shared memory without readers to the system."""
        self._objects.wake()

    def _trim_objects(self) -> bool:
        objects = self._agent.objects
        self._agent.pool.submit(objects.trim)
        return objects.writes

    def _trim(self) -> bool:
        self._agent.buffers.trim()
        kept = self._agent.buffers.stats().free_bytes
        for conn in self._connections():
            kept += sum([lender.stats().free_bytes for lender in conn.lane.lenders()])
        return kept > 0

    def before_fork(self) -> None:
        """Stop returning borrowed memory until :meth:`after_fork_in_parent`, because the child may inherit it."""
        for borrower in self._borrowers():
            borrower.before_fork()

    def after_fork_in_parent(self) -> None:
        """Undo :meth:`before_fork`."""
        for borrower in self._borrowers():
            borrower.after_fork_in_parent()

    def _borrowers(self) -> list[Borrower]:
        return [conn.lane.borrower for conn in self._connections() if conn.lane.borrower is not None]

    def watch(self, call: Call) -> None:
        """Start the pulse; if the call has a future, set a timer for its deadline. Otherwise, the waiting thread ends it."""
        peer = call.peer
        if call.deadline < peer.scan_at and call.future is not None:
            peer.scan_at = call.deadline
            self._agent.clock.at(call.deadline, lambda: self._scan(peer))
        if not self.pulse.active and not peer.is_self:
            self.pulse.wake()

    def _scan(self, peer: Peer) -> None:
        """End the calls to a peer whose deadlines have passed. Runs on the clock's thread."""
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
        """Send PING to silent peers, and handle suspect and lost peers; return False if there are no connections."""
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
            conn.last_received,
            heartbeat=settings.heartbeat,
            misses=settings.heartbeat_misses,
            late=self.pulse.late,
            receiving=bool(conn.assemblies) or conn.reader.mid_frame,
        )
        if look.ping_due:
            conn.outbox.append(pack_frame(frames.PING))
            conn.flush()  # without waiting
        if look.state == "alive":
            if peer.announced == "suspect":
                self.changes.note(peer, "alive", "it answers again")
        elif peer.announced == "alive":
            failure_detector.direct = None
            self.changes.note(peer, "suspect", f"it has been silent for {failure_detector.silent:.1f} s")
            self._agent.pool.submit(partial(self._examine, peer, conn))
        elif look.state == "lost":
            why = self._why_dead(peer)
            if why:
                self._agent.pool.submit(partial(self._agent.peer_ended, peer, "dead", why))
        return look.wait

    def _examine(self, peer: Peer, conn: Connection) -> None:
        """Determine whether the peer's process can be inspected (:func:`is_direct`). Slow, so it runs on a pool thread."""
        is_here = peer.record.host == self._agent.record.host
        peer.failure_detector.direct = is_here and is_direct(conn.stream.sock, peer.record.pid)

    @staticmethod
    def _why_dead(peer: Peer) -> str:
        """Return the cause of death of a lost peer; empty if the peer is busy, or was not examined yet."""
        silent = f"it has been silent for {peer.failure_detector.silent:.1f} s"
        if peer.failure_detector.direct is None:
            return ""
        if not peer.failure_detector.direct:
            return silent
        state = process_state(peer.record.pid)
        return "" if state == "running" else f"{silent} and its process is {state}"

    def _ended(self, peer: Peer) -> None:
        self.changes.note(peer, peer.state, peer.cause or "it has left the group")
