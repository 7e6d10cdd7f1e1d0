"""The other workers: a worker (:class:`Peer`), the table of all (:class:`PeerTable`), and their states for listeners.

**Peer**: the connections of one worker, and the unfinished calls in both directions. ``pending`` maps call numbers to the
unfinished calls to the peer. A call is entered with its frame, before any part of it can be sent; the thread that removes a call
(``dict.pop``, atomic) ends it. ``running`` maps the peer's call numbers to its calls that are executed or queued in a mailbox
here. ``dial_lock`` is held while a connection is opened; no other lock is held when it is taken, and no handlers of a peer's end
run under it.

**PeerTable**: finds the peer of a name, a rank or a WorkerInfo, and records which peers have ended. The last ``KEPT`` ended peers
are kept, so that calls to them fail with the cause, and their last messages can still be opened; ``SETTLED_S`` after its end, a
peer drops data that only a living peer needs. For the last ``_REMEMBERED`` ended peers, the table keeps the cause of their end,
and an old record of such a peer does not create a living peer. Thread-safe. ``_lock`` guards the tables and the end of a peer;
no other code runs under it.

**MembershipEvents**: a worker is ``alive``, ``suspect`` (silent, but not known to be dead), ``dead`` or ``left``; the last two
states are final. The thread that detects a change queues it, and one pool thread at a time calls the listeners: once for each
change, in the order of the queue, without a lock. ``_lock`` guards the states, the queue and the listeners; no lock is taken
under it.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol

from actorrpc import _time
from actorrpc._exceptions import say
from actorrpc.errors import (
    BackpressureError,
    PeerDiedError,
    SerializationError,
    UnknownWorkerError,
    WrongTypeError,
)
from actorrpc.serialization import codec
from actorrpc.serialization.numbered_functions import NumberedFunctions
from actorrpc.transport.failure_detector import FailureDetector
from actorrpc.transport.signals import checkpoint, pending_here, uninterruptible
from actorrpc.transport.writer import SILENT_S, BlockedSends
from actorrpc.wire.frames import LATE, STOP
from actorrpc.wire.identity import WorkerInfo, WorkerKey, WorkerRecord

if TYPE_CHECKING:
    from actorrpc.transport.connection import Connection
    from actorrpc.transport.object_store import Segment

__all__ = [
    "KEPT",
    "MAX_PENDING",
    "NUMBERS_KEPT",
    "Cancellable",
    "DuplicateFilter",
    "Listener",
    "MembershipEvents",
    "MessageContext",
    "Peer",
    "PeerTable",
    "Window",
    "state_of",
]

_log = logging.getLogger("actorrpc.members")

Listener = Callable[[WorkerInfo, str, str, str], None]
"""Called with the worker, its old state, its new state, and the reason in words."""

_FINAL: Final = ("dead", "left")


def state_of(peer: Peer) -> str:
    """Return "alive", "suspect", "dead" or "left"."""
    return "suspect" if peer.state == "alive" and peer.announced == "suspect" else peer.state


class MembershipEvents:
    """Calls listeners when the state of a worker changes. Thread-safe.

    Args:
        submit: runs a function on a pool thread.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], None]) -> None:
        self._submit = submit
        # Re-entrant: while a thread holds it, the garbage collector may run a finaliser that removes a listener.
        self._lock = _time.RLock()
        self._listeners: dict[object, Listener] = {}
        self._unannounced: deque[tuple[WorkerInfo, str, str, str, list[object]]] = deque()
        self._announcing = False

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` for each change from now on; return an idempotent function that removes it."""
        mark = object()
        with self._lock:
            self._listeners[mark] = listener

        def remove() -> None:
            with self._lock:
                self._listeners.pop(mark, None)

        return remove

    def note(self, peer: Peer, state: str, reason: str) -> bool:
        """Record a peer's state; return whether it has changed. A final state never changes."""
        with self._lock:
            old = peer.announced
            if old in _FINAL or state == old:
                return False
            peer.announced = state
            if peer.record.is_visitor:
                return True  # not logged: a visitor answers PING only while it waits for an answer, so it is often suspect
            if self._listeners:
                self._unannounced.append((peer.record.info, old, state, reason, list(self._listeners)))
            start = bool(self._unannounced) and not self._announcing
            self._announcing = self._announcing or start
        _log.info("%r is %s, was %s: %s", peer.name, state, old, reason)
        if start:
            self._submit(self._announce)
        return True

    def _announce(self) -> None:
        while True:
            with self._lock:
                if not self._unannounced:
                    self._announcing = False
                    return
                worker, old, new, reason, marks = self._unannounced.popleft()
            for mark in marks:
                listener = self._listeners.get(mark)
                if listener is None:
                    continue
                try:
                    listener(worker, old, new, reason)
                except Exception:
                    _log.exception("a listener for changes of members raised")


# The most definitions (pickled classes and functions), and bytes of them, that this worker considers known to a peer. The peer's
# codec.DefinitionStore keeps at least four times as many of both.
_KNOWN: Final = 1024
_KNOWN_BYTES: Final = 64 << 20
MAX_PENDING: Final = 1 << 17  # the most pending calls to one peer; further calls wait, unless they are nested


class Cancellable(Protocol):
    """An execution, a call in an actor's mailbox, or a stream."""

    def cancel(self, stop: bool = False, late: bool = False) -> None:
        """Cancel the execution for its caller; see :meth:`~actorrpc.agent.calls.Execution.cancel`. Runs on a pool thread."""


NUMBERS_KEPT: Final = 4096  # a DuplicateFilter keeps at least so many numbers, at most about twice as many


class DuplicateFilter:
    """Detects duplicate numbers of a peer's requests or answers. Thread-safe without a lock: each step is atomic."""

    __slots__ = ("_older", "_younger")

    def __init__(self) -> None:
        self._younger: dict[int, object] = {}
        self._older: dict[int, object] = {}

    def __contains__(self, id: int) -> bool:
        return id in self._younger or id in self._older

    def first(self, id: int) -> bool:
        """Record a number; return False if it was recorded before."""
        younger, mark = self._younger, object()
        # Read ``_older`` before setdefault(): another thread may replace it with ``younger``, which then contains this number.
        if id in self._older or younger.setdefault(id, mark) is not mark:
            return False
        if len(younger) >= NUMBERS_KEPT and younger is self._younger:
            # ``_older`` is set first: between the two steps, the numbers of ``younger`` are in both.
            self._older = younger
            self._younger = {}
        return True


class MessageContext:
    """The references, objects and segments of one message. Higher packages fill it while they pickle or unpickle.

    Attributes:
        peer: the receiver or the sender of the message.
        sent: the references (forks of RRefs) that were registered while packing; rolled back if the message is not sent.
        received: the references that must be confirmed before user code may use them.
        held: objects that the sender keeps alive until it has received the answer; None for a message without an answer.
        objects: the segments of shared memory that the message uses, whose descriptors are sent with it.
    """

    __slots__ = ("_places", "held", "objects", "peer", "received", "sent")

    def __init__(self, peer: Peer, held: tuple[Any, ...] | None = None) -> None:
        self.peer = peer
        self._places: dict[Segment, int] | None = None
        self.held = held
        self.sent: list[Any] | None = None
        self.received: list[Any] | None = None
        self.objects: list[Any] | None = None

    def place_of(self, segment: Segment) -> int:
        """Return the index of a segment in ``objects``; add the segment if it is not there."""
        if self._places is None:
            self._places, self.objects = {}, []
        assert self.objects is not None
        place = self._places.setdefault(segment, len(self.objects))
        if place == len(self.objects):
            self.objects.append(segment)
        return place


class Window:
    """Limits the bytes of large calls that one peer has not started: at the limit, calls that are not nested wait. Thread-safe.

    ``_lock`` guards ``charged`` and ``_charges``, the bytes of each call; no lock is taken under it.

    Attributes:
        limit: callers wait while ``charged`` is at least this many bytes.
        charged: the bytes of calls that the peer has not started, without calls of less than ``outbound.CHARGED`` bytes.
        waiting: the number of threads that wait for room.
        blocked: records how long threads have waited.
    """

    __slots__ = ("_charges", "_lock", "_peer", "_room", "blocked", "charged", "limit", "waiting")

    def __init__(self, peer: Peer, limit: int) -> None:
        self._peer = peer
        self._lock = _time.RLock()  # re-entrant: the garbage collector may run user code under it
        self._room = _time.Condition(self._lock)
        self.limit = limit
        self.charged = 0
        self._charges: dict[int, int] = {}
        self.waiting = 0
        self.blocked = BlockedSends()

    @property
    def full(self) -> bool:
        """Whether callers have to wait."""
        return self.charged >= self.limit or len(self._peer.pending) >= MAX_PENDING

    def charge(self, call: Any, size: int) -> None:
        """Count ``size`` bytes of a call as sent and not started, unless the call has ended."""
        with self._lock:  # cheaper than entering the condition, which is Python code
            self._charges[call.id] = size
            self.charged += size
        # A thread that ends the call removes it from ``pending`` and then releases its charge. If that thread has done both
        # before the charge was set above, the charge is released here.
        if self._peer.pending.get(call.id) is not call:
            self.release(call)

    def release(self, call: Any) -> None:
        """Stop counting the bytes of a call, and wake threads that wait for room. Idempotent."""
        if self.charged:
            with self._lock:
                self.charged -= self._charges.pop(call.id, 0)
        if self.waiting:
            with self._room:
                if not self.full:
                    self._room.notify_all()

    def wait_for_room(self, deadline: float, what: str) -> None:
        """Sleep until the peer has started enough calls. Interruptible.

        Raises:
            BackpressureError: the peer has not started enough calls by the deadline; nothing was sent.
            PeerDiedError: the peer has ended.
        """
        begun = _time.now()
        late_at = begun + SILENT_S
        while not self._wait_for_room(deadline, late_at, what):
            checkpoint()
            if late_at <= _time.now():
                late_at = float("inf")
                if self.blocked.is_due(begun):
                    self.blocked.log(what, self._too_much())

    @uninterruptible
    def _wait_for_room(self, deadline: float, late_at: float, what: str) -> bool:
        # A signal handler that raised between two steps of the condition would leave its lock taken.
        with self._room:
            self.waiting += 1
            if self.blocked.since is None:
                self.blocked.since = _time.now()
            try:
                while self.full and not pending_here():
                    self._peer.check_alive(what)
                    now = _time.now()
                    if now >= deadline:
                        raise BackpressureError(
                            f"{what} was not sent within its time-out: {self._too_much()}",
                            maybe_executed=False,
                            worker=self._peer.name,
                        )
                    if now >= late_at:
                        break
                    self._room.wait(min(_time.patience(min(deadline, late_at) - now), 0.1))
                return not self.full
            finally:
                self.waiting -= 1
                if not self.waiting:
                    self.blocked.since = None

    def _too_much(self) -> str:
        peer = self._peer
        return (
            f"worker {peer.name!r} has not started calls of {self.charged} bytes, and {len(peer.pending)} calls to it are not "
            f"over. The setting window (ACTORRPC_WINDOW) allows {self.limit} bytes that have not started; at most "
            f"{MAX_PENDING} calls may be pending. Call less often, wait for results, or raise window"
        )

    def wake_all(self) -> None:
        """Wake the threads that wait for room."""
        with self._room:
            self._room.notify_all()


class _KnownDefinitions(set[bytes]):
    """Digests of definitions (pickled classes and functions) that were sent to the peer, which keeps only the latest.

    The set is cleared long before the peer drops a definition, so that definitions are sent again in time.
    """

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = 0

    def note(self, digest: bytes, size: int) -> None:
        """Record that a definition was sent."""
        self._bytes += size
        if len(self) >= _KNOWN or self._bytes > _KNOWN_BYTES:
            self.clear()
            self._bytes = size
        self.add(digest)


class Peer:
    """One worker of the group, in one incarnation (one run of its process). Thread-safe."""

    def __init__(self, record: WorkerRecord, *, own: WorkerRecord, window: int, definitions: Any) -> None:
        self.record = record
        self.name = record.name
        self.is_self = record.incarnation == own.incarnation
        #: whether the peer runs the same program; None if it accepts plain data only
        self.same_main = None if record.data_only else bool(record.main) and record.main == own.main
        self.state = "alive"
        self.cause = ""
        #: why no connection could be made in the last attempt; empty after a connection was made
        self.out_of_reach = ""
        self.conn: Connection | None = None
        self.conns: list[Connection] = []
        self.pending: dict[int, Any] = {}
        self.running: dict[int, Cancellable] = {}
        #: calls that the peer has cancelled before their execution began: the flags of their CANCEL frames
        self.cancelled: dict[int, int] = {}
        self.begun = DuplicateFilter()
        self.answered = DuplicateFilter()
        self.ids = itertools.count(1)  # the numbers of calls and of streams of chunks
        #: empty contexts of messages, for reuse; ``pop`` and ``append`` are atomic
        self.contexts: list[MessageContext] = []
        self.known = _KnownDefinitions()
        self.definitions = definitions
        self.functions = NumberedFunctions()
        self.dial_lock = _time.Lock()
        self.scan_at = float("inf")
        self.failure_detector = FailureDetector()
        #: the state last passed to the listeners of :class:`MembershipEvents`; calls test ``state``, which changes earlier
        self.announced = "alive"
        # Map devices of this worker to devices of the peer, for calls and for answers to this peer.
        self.device_map, self.answer_map = _device_maps(own, record)
        self.window = Window(self, window)

    @cached_property
    def key(self) -> WorkerKey:
        """The rank and the incarnation of the worker."""
        return WorkerKey(self.record.rank, self.record.incarnation)

    def __repr__(self) -> str:
        return f"<Peer {self.name!r} {self.state}, {len(self.pending)} calls out, {len(self.running)} in>"

    def on_cancel(self, id: int, flags: int, submit: Callable[[Callable[[], Any]], Any]) -> None:
        """Cancel a call of the peer, whose request may not have arrived yet.

        Args:
            flags: the flags of the CANCEL frame.
            submit: runs a function on a pool thread.
        """
        if len(self.cancelled) > 1 << 17:
            self.cancelled.clear()
        # Set before ``running`` is read. A thread that begins the call enters it into ``running`` and then reads ``cancelled``,
        # so one of the two threads sees the other's entry.
        self.cancelled[id] = flags
        execution = self.running.get(id)
        if execution is not None:
            self.cancelled.pop(id, None)
            # Cancelled on a pool thread, not under the read lock: nested calls complete futures, which may run callbacks.
            submit(partial(execution.cancel, bool(flags & STOP), bool(flags & LATE)))

    # -- the end -----------------------------------------------------------------------------------

    def end_calls(self) -> Iterator[Any]:
        """Remove and yield all calls in ``pending``, which the caller has to end; then wake the threads that wait for room."""
        while self.pending:
            try:
                yield self.pending.popitem()[1]
            except KeyError:
                break
        self.window.wake_all()

    def check_alive(self, what: str) -> None:
        """Raise PeerDiedError if the peer has ended."""
        if self.state != "alive":
            raise self.died(what, maybe_executed=False)

    def died(self, what: str, *, maybe_executed: bool) -> PeerDiedError:
        """Return the error of a call that ends because the peer has ended."""
        how = "has left the group" if self.state == "left" else "died"
        ran = "may have run before" if maybe_executed else "was not executed"
        return PeerDiedError(
            f"{what}: worker {self.name!r} (pid {self.record.pid}) {how}{': ' if self.cause else ''}{self.cause}; "
            f"the call {ran}. Calls to it fail from now on; it comes back only as a new worker.",
            maybe_executed=maybe_executed,
            worker=self.name,
        )

    def relieve(self) -> None:
        """Drop data that only a living peer needs. Called ``SETTLED_S`` after its end: its last messages have been opened."""
        self.known = _KnownDefinitions()
        self.cancelled = {}
        self.begun, self.answered = DuplicateFilter(), DuplicateFilter()
        self.definitions = None
        self.functions = NumberedFunctions()
        self.device_map = self.answer_map = None


class _ClusterDevices(dict[str, str]):
    """Maps the CUDA devices of a worker of a cluster to the CUDA devices of another worker.

    A tensor arrives on the same GPU if the receiver sees that GPU, otherwise on the receiver's device of the same number, and if
    there is no such device, on its first device.
    """

    def __init__(self, own: WorkerRecord, other: WorkerRecord) -> None:
        there = other.gpus
        for number, gpu in enumerate(own.gpus if there else ()):
            target = number if number < len(there) else 0
            if gpu in there and own.host == other.host:
                target = there.index(gpu)
            self[f"cuda:{number}"] = f"cuda:{target}"
        self._workers = own, other

    def __missing__(self, device: str) -> NoReturn:
        own, other = self._workers
        sees = ", ".join(f"cuda:{number}" for number in range(len(other.gpus))) or "no CUDA device"
        raise SerializationError(
            f"a tensor on {device} of worker {own.name!r} cannot be sent to worker {other.name!r}, which sees {sees}. Send "
            "tensor.cpu(), or give the receiver a device (actors: num_gpus=1)"
        )


def _device_maps(
    own: WorkerRecord, other: WorkerRecord
) -> tuple[dict[str, str] | None, dict[str, str] | None]:
    """Return two maps of devices here to devices of another worker: for tensors in calls, and for tensors in answers.

    Calls use this worker's own map; answers use the reverse of the other worker's map, by which the calls were sent here. If a
    map has no entry for a device, the entry of the other map is used (gradients, for example, are sent in calls). That does not
    apply to tensors on the CPU. Workers of a cluster have no maps of their own: see :class:`_ClusterDevices`.
    """
    if own.device_maps is None or other.device_maps is None:
        placed = _ClusterDevices(own, other) if own.gpus and own.device_maps == other.device_maps else None
        return placed, placed
    forth = {here: there for worker, here, there in own.device_maps if worker == other.name}
    back = {there: here for worker, here, there in other.device_maps if worker == own.name}

    def merged(first: dict[str, str], second: dict[str, str]) -> dict[str, str] | None:
        return {**{here: there for here, there in second.items() if here != "cpu"}, **first} or None

    return merged(forth, back), merged(back, forth)


KEPT: Final = 128
"""The number of ended peers that can still be looked up by name and are listed."""

_REMEMBERED: Final = 4096
SETTLED_S: Final = 30.0  # long enough for the last messages of an ended peer to be opened
_NOT_RANKS: Final = frozenset({bool, float, complex})


class _EndOfPeer(NamedTuple):
    """The end of a peer, which the table still knows after it has removed the peer."""

    name: str
    rank: int
    state: str
    cause: str


class PeerTable:
    """The peers of one agent. Thread-safe.

    Args:
        own: the record of this worker.
        window: the limit of bytes for each peer; see :class:`Window`.
        resolve: returns the record of the worker with this name or rank; None if there is no such worker.
        members: returns all records that are known.
        replaced: called with a peer whose place a new incarnation has taken, with no lock held.
    """

    def __init__(
        self,
        own: WorkerRecord,
        *,
        window: int,
        resolve: Callable[[str | int], WorkerRecord | None],
        members: Callable[[], list[WorkerRecord]],
        replaced: Callable[[Peer], None],
    ) -> None:
        self._own = own
        self._window = window
        self._resolve = resolve
        self.members = members
        self._replaced = replaced
        # Re-entrant: a signal handler may look up a peer while the main thread holds the lock.
        self._lock = _time.RLock()
        #: peers by name, rank and WorkerInfo, including the latest ended peers; every call reads it, without the lock
        self.known: dict[Any, Peer] = {}
        self._ended: deque[Peer] = deque()
        self._ends: dict[str, _EndOfPeer] = {}
        self.own = self._new(own)

    def _new(self, record: WorkerRecord) -> Peer:
        return Peer(record, own=self._own, window=self._window, definitions=codec.DefinitionStore())

    # -- looking up peers ------------------------------------------------------------------------------

    def peer(self, to: Any) -> Peer:
        """Return the peer of a name, rank or WorkerInfo.

        Raises:
            UnknownWorkerError: there is no such worker.
            PeerDiedError: the worker has ended, and its peer was removed from the table.
            WrongTypeError: ``to`` is of another type.
        """
        try:
            peer = self.known.get(to)
        except TypeError:  # not hashable
            peer = None
        # 1.0 and True are equal to rank 1, but are not accepted.
        if peer is None or peer.state != "alive" or type(to) in _NOT_RANKS:
            peer = self._find(to, peer)
        return peer

    def _find(self, to: Any, known: Peer | None) -> Peer:
        wanted = to.name if isinstance(to, WorkerInfo) else to
        if isinstance(wanted, bool) or not isinstance(wanted, (str, int)):
            name = getattr(to, "name", None)
            if not isinstance(name, str):
                raise WrongTypeError(
                    f"a worker is named by a str, an int rank or a WorkerInfo, not by {type(to).__name__} {say(to, repr)}"
                )
            wanted = name
        record = self._resolve(wanted)
        if record is None:
            if known is not None:
                return known
            with self._lock:
                ends = [end for end in self._ends.values() if wanted in (end.name, end.rank)]
            if ends:
                end = ends[-1]
                why = f": {end.cause}" if end.cause else ""
                raise PeerDiedError(
                    f"worker {end.name!r} {'has left the group' if end.state == 'left' else 'died'} long ago{why}; the call "
                    f"was not executed",
                    maybe_executed=False,
                    worker=end.name,
                )
            names = ", ".join(sorted(r.name for r in self.members())[:20])
            raise UnknownWorkerError(
                f"there is no worker {say(wanted, repr)} in the group; there are: {names}"
            )
        if known is not None and known.record.incarnation == record.incarnation:
            return known
        peer = self.adopt(record)
        if peer.state == "alive":
            with self._lock:
                self.known[to] = peer
        return peer

    def adopt(self, record: WorkerRecord) -> Peer:
        """Return the peer for a record; create it if it is new. A new incarnation ends the peer of the old one."""
        with self._lock:
            peer = self.known.get(record.name)
            if peer is not None and peer.record.incarnation == record.incarnation:
                return peer
        made = self.own if record.incarnation == self._own.incarnation else self._new(record)
        with self._lock:
            old = self.known.get(record.name)
            if old is not None and old.record.incarnation == record.incarnation:
                return old
            end = self._ends.get(record.incarnation)
            if end is not None:
                made.state = made.announced = end.state
                made.cause = end.cause
                return made
            self.known[record.name] = made
            self.known[record.rank] = made
            self.known[record.info] = made
        if old is not None:
            self._replaced(old)
        return made

    def peers(self) -> list[Peer]:
        """Return the peers that this worker has had contact with and has not removed. Takes no lock: fork hooks use it."""
        return list({id(peer): peer for peer in list(self.known.values())}.values())

    # -- the end of a peer -----------------------------------------------------------------------------

    def record_end(self, peer: Peer, state: str, cause: str) -> bool:
        """Record that a peer has ended; return whether it was alive before."""
        forgotten: list[Peer] = []
        with self._lock:
            if peer.state != "alive":
                return False
            peer.state = state
            peer.cause = cause
            if peer is not self.own:
                self._ends[peer.record.incarnation] = _EndOfPeer(peer.name, peer.record.rank, state, cause)
                self._ended.append(peer)
            while len(self._ended) > KEPT:
                forgotten.append(self._ended.popleft())
                self._unlist(forgotten[-1])
            while len(self._ends) > _REMEMBERED:
                del self._ends[next(iter(self._ends))]
        del forgotten  # freed outside of the lock: finalisers may run
        return True

    def forget(self, peer: Peer) -> None:
        """Remove an ended visitor (see ``identity.FIRST_VISITOR``) without remembering its end. Idempotent."""
        with self._lock:
            self._unlist(peer)
            self._ends.pop(peer.record.incarnation, None)
            if peer in self._ended:
                self._ended.remove(peer)

    def _unlist(self, peer: Peer) -> None:
        for known in [known for known, each in self.known.items() if each is peer]:
            del self.known[known]
