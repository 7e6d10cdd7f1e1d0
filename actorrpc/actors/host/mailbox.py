"""The mailbox: decides which call of an actor runs next, and where. A state machine that runs no calls itself.

A :class:`Mailbox` has a :class:`GroupQueue` for each concurrency group; that of an actor with ``async def`` methods has one more
queue per group, for these methods. The async queue of the default group also gets the actor's plain methods, which run on its
event loop, unless they have ``thread=True`` or a concurrency group. A queue hands out its entries in order:

* higher priority first; within a priority, in the order of arrival;
* the calls of one caller with one priority do not overtake each other: if the arguments of a call are not complete, the later
  calls of its caller wait. A queue that runs several calls at a time is usually ``loose``: its ready calls do not wait;
* a call that is sent again comes before the later calls of its caller;
* at most ``limit`` at a time, apart from descendants. In a yielding queue, each wait of any thread makes room for one more.

**Descendants** of a reentrant actor. If an entry descends from an execution which is under way here (the execution's id is in the
entry's path) and no other thread can run it, it does not wait in the queue: it is passed to the runner of that execution, which
runs it nested while it waits. Entries that the runner has not run when the execution ends return to the queue, in order. In an
async queue, descendants start without regard to the limit.

A method after which further entries can run returns :class:`Wakeups`: the runners to wake, and the queues that need a further
runner, after the lock was released. The lock guards the queues and the state of their entries. It is re-entrant, because the
garbage collector may run a finaliser that calls this very actor at any allocation, and it is a leaf. Without the lock,
:class:`Envelope` has what an entry needs to be executed and answered.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from actorrpc import _time
from actorrpc.agent.calls import CALLER_BIT, MAILBOX_BIT, Execution
from actorrpc.agent.executor import path_of
from actorrpc.wire.frames import MAIL, Header

if TYPE_CHECKING:
    import asyncio

    from actorrpc.actors.host.actor import HostedActor
    from actorrpc.agent.peers import Peer
    from actorrpc.agent.timers import Timer
    from actorrpc.transport.connection import Connection
    from actorrpc.wire.frames import Frame

__all__ = [
    "DEQUEUED",
    "GRACE_S",
    "NEW",
    "NOTHING",
    "Entry",
    "Envelope",
    "GroupQueue",
    "Mailbox",
    "ThreadSlot",
    "Wakeups",
]

GRACE_S: Final = 5.0
"""How many seconds a coroutine may take to clean up, and make calls, after it was cancelled."""

NEW: Final = "new"  # in a queue
DEQUEUED: Final = "dequeued"
OVER: Final = "over"  # cancelled, or finished
_LOOKED_AT: Final = 1000

_UNUSUAL: Final = frozenset({"place", "priority", "unordered", "unresolved"})
"""The fields of a header that change how a call is queued."""

_CALLER: Final = (1 << MAILBOX_BIT - CALLER_BIT) - 1


class ThreadSlot(Protocol):
    """The attributes of a runner that the mailbox uses."""

    work: deque[Entry]


class WaitingForeignThreads(Protocol):
    """The attributes of ForeignThreads that the mailbox uses."""

    waiting: int


class Entry:
    """One call in a mailbox.

    Attributes:
        place: increases with each call of a caller.
        again: it repeats the call that had its ``place``, and comes before its caller's later calls.
        path: the executions that it descends from.
        ready: its arguments are complete.
        loose: it may overtake calls of its caller whose arguments are missing, and be overtaken while its own are missing.
    """

    # Class attributes are the defaults: an entry is made for each call, and most set few of these.
    path: tuple[int, ...] = ()
    priority = 0
    ready = True
    loose = False
    place = 0
    again = False
    number = 0
    state: str = NEW
    parked = False
    queue: GroupQueue | None = None
    slot: ThreadSlot | None = None

    @property
    def caller(self) -> object:
        """The caller; calls of equal callers keep their order."""
        return None

    def __lt__(self, other: Entry) -> bool:
        if self.number == other.number and self.priority == other.priority:
            return self.place < other.place  # one of the two entries is a repetition
        return (-self.priority, self.number) < (-other.priority, other.number)


class Envelope(Entry, Execution):
    """A call of an actor: it waits in the mailbox, is executed and is answered.

    Attributes:
        frame: the message; :meth:`claim_frame` removes the attribute.
        whole: the whole message has arrived; if False, only its beginning has: see HostedActor.receive_rest.
        opened: ``(args, kwargs)`` if they were decoded before the call's turn, or the error of an argument; otherwise None.
    """

    # Class attributes are the defaults: an envelope is made for each call, and most calls set few of these.
    frame: Frame
    header: Header
    hosted: HostedActor | None = None
    whole = True
    opened: Any = None
    task: asyncio.Task[Any] | None = None
    start_forbidden = False  # the call was cancelled: if it has not begun, it must not begin
    unwanted = False  # the caller has cancelled the call
    grace: Timer | None = None  # after the coroutine was cancelled: the time to its second cancellation
    sole = False  # only this package refers to the result
    _circles: dict[int, float] | None = None

    @property
    def caller(self) -> object:
        """The caller; calls of equal callers keep their order."""
        return self.peer, self.chain >> CALLER_BIT & _CALLER

    @property
    def circles(self) -> dict[int, float]:
        """Execution -> the time when the search for deadlocks first found it in one circle of waits with this call."""
        if self._circles is None:
            self._circles = {}
        return self._circles

    @property
    def title(self) -> str:
        """The actor and the method, for messages."""
        method = f"{self.header.get('method', '__init__')}()"
        return method if self.hosted is None else f"{self.hosted.title}.{method}"

    @property
    def reserved(self) -> bool:
        """Whether the call only reserves its place: the caller sends the message when its arguments are complete."""
        frame: Frame | None = getattr(self, "frame", None)  # another thread may remove it
        return not self.whole and frame is not None and frame.flags == MAIL

    def __init__(self, conn: Connection | None, peer: Peer, frame: Frame, header: Header) -> None:
        self.conn = conn
        self.peer = peer
        self.frame = frame
        self.header = header
        self.id = self.place = frame.id
        self.chain = frame.chain
        self.received_at = received_at = _time.now() if conn is None else conn.last_received
        self.deadline = received_at + frame.remaining
        self.nested = {}
        if frame.chain >> MAILBOX_BIT:
            self.path = path_of(header, frame.chain)
        if not _UNUSUAL.isdisjoint(header):
            self.apply_header(header)

    def apply_header(self, header: Header) -> None:
        """Set the attributes that depend on the header fields :data:`_UNUSUAL`."""
        self.ready = self.ready and "unresolved" not in header
        self.priority = int(header.get("priority", 0))
        self.loose = bool(header.get("unordered"))
        if "place" in header:
            self.place, self.again = int(header["place"]), True

    def claim_frame(self) -> Frame | None:
        """Remove and return the message, to decode or discard it. Exactly one caller gets the message; others get None."""
        try:
            frame = self.frame
            del self.frame  # atomic. ``__dict__.pop`` would make a dictionary, and slow down each later access to an attribute
        except AttributeError:
            return None
        return frame

    def keep_opened(self, opened: Any) -> None:
        """Set ``opened``, for the call's turn. If the call was cancelled, do not: the mailbox may refer to it for a long time."""
        self.opened = opened
        if self.state is OVER:
            self.opened = None

    def cancel(self, stop: bool = False, late: bool = False) -> None:
        """Cancel the call for its caller. Runs on a pool thread.

        ``stop``: a method that runs in a thread is interrupted. Without ``stop`` it continues: if only the caller's time-out has
        passed or the caller has ended, no user has asked for an interruption. A coroutine is cancelled in both cases.
        """
        # Set before `running` is read: the thread that replaces the call in `running` by its stream reads `unwanted` afterwards.
        self.unwanted = True
        if self.hosted is not None:
            self.hosted.cancel(self, stop, late)
        stream = self.peer.running.get(self.id)
        if stream is not None and stream is not self:
            stream.cancel(stop)


class Wakeups:
    """The runners to wake and the queues to serve after a mailbox operation: the argument of ``HostedActor.carry_out``.

    Attributes:
        wake: the runners whose threads wait, and now have an entry to run.
        start: the queues that need one more runner, or whose event loop must start the waiting calls.
    """

    # Class attributes are the defaults, so that an object for "nothing to do" costs no call.
    wake: Sequence[Any] = ()
    start: Sequence[GroupQueue] = ()


NOTHING: Final = Wakeups()  # shared by most operations; never changed


def _hold(held: deque[Entry], entry: Entry) -> None:
    """Insert an entry into the held entries of its caller, in order. Only a repeated call is not appended at the end."""
    if not held or held[-1] < entry:
        held.append(entry)
    else:
        bisect.insort(held, entry)


class GroupQueue:
    """The queue of one concurrency group. Its mailbox's lock guards it.

    Args:
        limit: how many of its calls run at a time.
        yielding: calls that are in one of actorrpc's waits do not count.
        loose: all ready entries may run; the ready calls of one caller keep their order.
    """

    def __init__(
        self, name: str, limit: int, *, yielding: bool = False, is_async: bool = False, loose: bool = False
    ) -> None:
        self.name = name
        self.limit = limit
        self.yielding = yielding
        self.is_async = is_async
        self.loose = loose
        self.running = 0
        self.resting = 0  # threads and coroutines that wait, in a yielding queue
        self.foreign_threads: WaitingForeignThreads | None = None
        self.slots = 0  # runners that exist or are being started
        self.idle: list[Any] = []
        self.fresh: deque[Entry] = deque()  # entries in the order of arrival; Mailbox.put adds to it
        self._heap: list[Entry] = []  # entries that are not in the order of arrival
        # By caller and priority, in order: the first entry is not ready, and holds back the caller's later entries.
        self._held: dict[tuple[object, int], deque[Entry]] = {}
        self._parked: set[Entry] = set()
        self.waiting = 0  # entries here that were neither dequeued nor cancelled
        # The waiting entries, by each execution they descend from.
        self._of_chain: dict[int, dict[Entry, None]] = {}

    @property
    def has_ready(self) -> bool:
        """Whether there may be an entry that can be dequeued: entries that wait for arguments, or behind another, cannot."""
        return self.waiting > 0 and bool(self.fresh or self._heap)

    @property
    def full(self) -> bool:
        """Whether as many entries run as the limit allows."""
        running = self.running - self.resting
        if self.foreign_threads is not None:
            running -= self.foreign_threads.waiting
        return running >= self.limit

    def put_back(self, entry: Entry) -> None:
        """Queue an entry that has a path or a priority, repeats a call, or returns from a runner that did not run it."""
        if entry.again:
            # Give it the number of the first of its caller's later entries, so that it is dequeued before them: of entries with
            # equal numbers, the entry with the lower `place` is dequeued first.
            key = entry.caller, entry.priority
            later = [
                e.number for e in self.entries() if (e.caller, e.priority) == key and e.place > entry.place
            ]
            entry.number = min((entry.number, *later))
        entry.queue = self
        self.waiting += 1
        for execution in entry.path:
            self._of_chain.setdefault(execution, {})[entry] = None
        heapq.heappush(self._heap, entry)

    def removed(self, entry: Entry) -> None:
        """Record that an entry was dequeued, cancelled or passed to a runner."""
        self.waiting -= 1
        for execution in entry.path:
            rest = self._of_chain.get(execution)
            if rest is not None:
                rest.pop(entry, None)
                if not rest:
                    del self._of_chain[execution]

    def descendant(self, running: Mapping[int, object]) -> Entry | None:
        """Return the first ready entry that descends from one of the executions in ``running``."""
        return min(
            (
                entry
                for execution in running.keys() & self._of_chain.keys()
                for entry in self._of_chain[execution]
                if entry.ready and entry.slot is None
            ),
            default=None,
        )

    def next(self) -> Entry | None:
        """Dequeue the next entry that can run; None if there is none."""
        fresh, heap = self.fresh, self._heap
        while True:
            if heap and (not fresh or heap[0] < fresh[0]):
                entry = heapq.heappop(heap)
            elif fresh:
                entry = fresh.popleft()
            else:
                return None
            if entry.state is not NEW or entry.slot is not None:
                continue  # over, or moved to a runner
            if self._held and not entry.loose:
                held = self._held.get((entry.caller, entry.priority))
                if held is not None and held[0] < entry:
                    _hold(held, entry)
                    continue
            if entry.ready:
                entry.state = DEQUEUED
                if entry.path:
                    self.removed(entry)
                else:
                    self.waiting -= 1
                return entry
            if entry.loose:
                entry.parked = True  # release() queues it again when it is ready
                self._parked.add(entry)
            else:
                # A repeated entry may belong before the first held entry, and then holds that entry back.
                _hold(self._held.setdefault((entry.caller, entry.priority), deque()), entry)

    def release(self, entry: Entry) -> None:
        """Record that an entry whose arguments were missing is ready, or was cancelled.

        The entries that it held back are released, up to the next entry that is not ready.
        """
        key = (entry.caller, entry.priority)
        held = self._held.get(key)
        if held is not None and held[0] is entry:
            while held and (held[0].ready or held[0].state is not NEW):
                each = held.popleft()
                if each.state is NEW:
                    heapq.heappush(self._heap, each)
            if not held:
                del self._held[key]
        elif entry.parked:
            entry.parked = False
            self._parked.remove(entry)
            if entry.state is NEW:
                heapq.heappush(self._heap, entry)

    def held_behind(self, entry: Entry) -> Entry | None:
        """Return the earlier call of the same caller that holds an entry back, because the call's arguments are not complete."""
        held = self._held.get((entry.caller, entry.priority))
        return held[0] if held and held[0] < entry and not entry.loose else None

    def heads(self) -> list[Entry]:
        """Return the entries that are not ready and hold back later calls of their callers."""
        return [held[0] for held in list(self._held.values()) if len(held) > 1 and not held[0].ready]

    def entries(self) -> list[Entry]:
        """Return the waiting entries, in order."""
        everything = itertools.chain(self.fresh, self._heap, *self._held.values(), self._parked)
        # A set, because an entry that returned from a runner may be here twice.
        return sorted({entry for entry in everything if entry.state is NEW and entry.slot is None})

    def oldest(self) -> Entry | None:
        """Return the entry that has waited longest. Of very many out-of-order entries, only some are compared."""
        fresh = (entry for entry in self.fresh if entry.state is NEW and entry.slot is None)
        others = itertools.islice(itertools.chain(self._heap, *self._held.values(), self._parked), _LOOKED_AT)
        waiting = (entry for entry in others if entry.state is NEW and entry.slot is None)
        return min((*itertools.islice(fresh, 1), *waiting), key=lambda entry: entry.number, default=None)

    def drain(self) -> list[Entry]:
        """Remove and return all entries, in order."""
        everything = self.entries()
        for queue in (self.fresh, self._heap, self._held, self._parked):
            queue.clear()
        self._of_chain.clear()
        self.waiting = 0
        return everything


class Mailbox:
    """All queues of one actor. Thread-safe. A new mailbox has the default queue, which runs one call at a time.

    Attributes:
        queues: by concurrency group; ``""`` is the default group.
        async_lanes: the queues for ``async def`` methods; empty for an actor that has none.
        reentrant: a call that descends from a running call runs within it.
        running: execution -> its runner, which may be running another execution nested; None: it runs on an event loop. Single
            operations are atomic and need no lock.
    """

    def __init__(self) -> None:
        self.queues = {"": GroupQueue("", 1)}
        self.async_lanes: dict[str, GroupQueue] = {}
        self.reentrant = True
        self.closed = False
        self.running: dict[int, ThreadSlot | None] = {}
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)

    def configure(
        self,
        limits: dict[str, int],
        async_limits: dict[str, int],
        *,
        reentrant: bool = True,
        yielding: bool = False,
        loose: bool | None = None,
    ) -> None:
        """Set the queues of an actor that has been constructed; the default queue stays the same object.

        Args:
            limits: concurrency group -> how many of its calls run at a time.
            async_limits: the same for ``async def`` methods.
            yielding: waiting calls do not count against the limits.
            loose: whether calls may overtake others whose arguments are missing; None: only in queues that run several at a time.
        """
        with self._lock:
            self.reentrant = reentrant
            for name, limit in limits.items():
                queue = self.queues.setdefault(name, GroupQueue(name, limit))
                queue.limit, queue.yielding = limit, yielding
                queue.loose = limit > 1 if loose is None else loose
            for name, limit in async_limits.items():
                self.async_lanes[name] = GroupQueue(name, limit, is_async=True, loose=loose is not False)

    # -- queueing --------------------------------------------------------------------------------

    def put(self, entry: Entry, queue: GroupQueue) -> Wakeups | None:
        """Queue an entry. Returns None if the mailbox is closed; then the caller has to refuse the entry."""
        with self._lock:
            if self.closed:
                return None
            if entry.state is not NEW:  # the call was cancelled while its actor was being constructed
                return NOTHING
            if not entry.number:
                entry.number = next(self._numbers)
            if entry.path and self.reentrant and entry.ready:
                slot = self._slot_of(entry, queue)
                if slot is not None:
                    entry.queue = queue
                    entry.slot = slot
                    slot.work.append(entry)
                    todo = Wakeups()
                    todo.wake = (slot,)
                    return todo
            if queue.loose:
                entry.loose = True
            if entry.path or entry.again or entry.priority:
                queue.put_back(entry)
            else:
                entry.queue = queue
                queue.waiting += 1
                queue.fresh.append(entry)
            if not queue.is_async:
                if queue.running >= queue.limit and (not queue.yielding or queue.full):
                    return NOTHING
                if queue.idle:
                    todo = Wakeups()
                    todo.wake = (queue.idle.pop(),)
                    return todo
                if queue.slots >= queue.limit and not queue.yielding:
                    return NOTHING  # a runner that is neither idle nor runs an entry will check the queue
            todo = Wakeups()
            self._look(queue, todo)
            return todo

    def _slot_of(self, entry: Entry, queue: GroupQueue) -> ThreadSlot | None:
        """Return the runner of an execution from which the entry descends; None if there is none, or another thread is free."""
        if queue.is_async or (queue.running + queue.waiting < queue.limit):
            return None  # the loop, or another thread of the actor, can run the entry
        for execution in reversed(entry.path):
            slot = self.running.get(execution)
            if slot is not None:
                return slot
        return None

    def ready(self, entry: Entry) -> Wakeups:
        """Record that an entry's arguments are complete."""
        todo = Wakeups()
        with self._lock:
            if entry.ready or entry.state is not NEW:
                return todo
            entry.ready = True
            queue = entry.queue
            if queue is None:
                return todo
            slot = self._slot_of(entry, queue) if entry.path and self.reentrant else None
            if slot is not None:
                entry.slot = slot
                queue.removed(entry)
                slot.work.append(entry)
                todo.wake = (slot,)
            queue.release(entry)
            self._look(queue, todo)
        return todo

    def cancel(self, entry: Entry) -> Wakeups | None:
        """Remove an entry that was not dequeued; None if it was dequeued or cancelled before."""
        todo = Wakeups()
        with self._lock:
            if entry.state is not NEW:
                return None
            entry.state = OVER
            queue = entry.queue
            if queue is not None:
                if entry.slot is None:
                    queue.removed(entry)
                queue.release(entry)
                self._look(queue, todo)
        return todo

    # -- dequeueing -------------------------------------------------------------------------------

    def _look(self, queue: GroupQueue, todo: Wakeups) -> None:
        """If the queue can run one more entry, add an idle runner to ``todo.wake``, or the queue to ``todo.start``."""
        if queue.full and not (queue.is_async and self.reentrant and self.running):
            return
        if queue.is_async:
            todo.start = (*todo.start, queue)
        elif queue.idle:
            todo.wake = (*todo.wake, queue.idle.pop())
        elif queue.yielding or (queue.slots < queue.limit and queue.slots <= queue.running):
            # If there are more runners than running entries, one runner is between two entries, and will check the queue.
            queue.slots += 1
            todo.start = (*todo.start, queue)

    def dequeue(self, queue: GroupQueue, slot: Any = None) -> tuple[Entry | None, Wakeups | None]:
        """Return the next entry for a runner (or for the event loop), or None if no entry can run now; and runners to wake.

        A runner that gets no entry is idle from then on, and a later ``Wakeups.wake`` names it.
        """
        with self._lock:
            if queue.waiting and (queue.running < queue.limit or (queue.yielding and not queue.full)):
                entry = queue.next()
                if entry is not None:
                    queue.running += 1
                    if queue.idle and slot in queue.idle:
                        # This thread polled the queue itself and is still listed as idle. Remove it, so that the next
                        # entry wakes another runner.
                        queue.idle.remove(slot)
                    todo = None
                    if slot is not None and queue.waiting and (queue.running < queue.limit or queue.yielding):
                        todo = Wakeups()
                        self._look(queue, todo)
                    return entry, todo
            if slot is not None and slot not in queue.idle and not self.closed:
                queue.idle.append(slot)
            return None, None

    def turn(self, queue: GroupQueue, slot: ThreadSlot) -> tuple[Entry | None, Wakeups | None]:
        """Call :meth:`done` and :meth:`dequeue` in one step, for a runner that has run an entry; return as :meth:`dequeue`."""
        with self._lock:
            left: Wakeups | None = None
            if slot.work:
                left = self.done(queue, slot)
            else:
                queue.running -= 1
            if queue.waiting:
                entry, todo = self.dequeue(queue, slot)
                if left is None or not (left.wake or left.start):
                    return entry, todo
                if todo is not None:
                    left.wake, left.start = (*left.wake, *todo.wake), (*left.start, *todo.start)
                return entry, left
            if not self.closed:
                queue.idle.append(slot)
            return None, left

    def dequeue_descendant(self, queue: GroupQueue) -> Entry | None:
        """Dequeue an entry of an async queue that descends from a running execution, ignoring the limit."""
        with self._lock:
            if not self.reentrant or not self.running:
                return None
            entry = queue.descendant(self.running)
            if entry is not None:
                entry.state = DEQUEUED
                queue.removed(entry)
                queue.running += 1
            return entry

    def dequeue_within(self, queue: GroupQueue, fits: Callable[[Entry], bool]) -> Entry | None:
        """Dequeue an entry of an async queue that may run within the call that blocks its event loop, ignoring the limit.

        ``fits`` is called under the lock, and takes no other lock.
        """
        with self._lock:
            for entry in queue.entries():
                if fits(entry):
                    entry.state = DEQUEUED
                    queue.removed(entry)
                    queue.running += 1
                    return entry
        return None

    def dequeue_nested(self, slot: ThreadSlot) -> Entry | None:
        """Dequeue, for a waiting runner, an entry that may run nested within its execution."""
        with self._lock:
            while slot.work:
                entry = slot.work.popleft()
                if entry.state is NEW:
                    entry.state = DEQUEUED
                    return entry
        return None

    def done(self, queue: GroupQueue, slot: ThreadSlot | None = None) -> Wakeups:
        """Record the end of an entry that :meth:`dequeue` returned. Queue the entries again that did not run nested within it."""
        with self._lock:
            queue.running -= 1
            if slot is None or not slot.work:
                return NOTHING
            todo = Wakeups()
            left = list(slot.work)
            slot.work.clear()
            for entry in left:
                if entry.state is NEW and entry.queue is not None:
                    entry.slot = None
                    entry.queue.put_back(entry)
                    if entry.queue is not queue:
                        self._look(entry.queue, todo)
            return todo

    def rest(self, queue: GroupQueue) -> Wakeups:
        """Record that a thread or coroutine of a running entry has begun to wait: a yielding queue may run one more entry."""
        todo = Wakeups()
        with self._lock:
            queue.resting += 1
            if queue.waiting:
                self._look(queue, todo)
        return todo

    def look(self) -> Wakeups:
        """Return the runners to wake or to start after a thread without a runner has begun to wait (see ForeignThreads)."""
        todo = Wakeups()
        with self._lock:
            for queue in self.queues.values():
                if queue.waiting:
                    self._look(queue, todo)
        return todo

    def resume(self, queue: GroupQueue) -> None:
        """Record that the wait of :meth:`rest` has ended."""
        with self._lock:
            queue.resting -= 1

    def remove_slot(self, queue: GroupQueue, slot: Any) -> bool:
        """Remove an idle runner, because it ends; return False if the runner is not idle."""
        with self._lock:
            if slot not in queue.idle:
                return False
            queue.idle.remove(slot)
            queue.slots -= 1
            return True

    def no_thread(self, queue: GroupQueue) -> list[Entry]:
        """Record that no runner could be started for a queue; return the entries to refuse.

        If the queue has other runners, only its first entry is returned, because calls that these runners execute may wait for
        that entry. These runners run the other entries.
        """
        with self._lock:
            queue.slots -= 1
            entries: list[Entry] = []
            while not (entries and queue.slots) and (entry := queue.next()) is not None:
                entry.state = OVER
                entries.append(entry)
            return entries

    # -- counting and closing ------------------------------------------------------------------------

    def counts(self) -> tuple[int, int]:
        """Return how many entries wait and how many run."""
        with self._lock:
            queues = [*self.queues.values(), *self.async_lanes.values()]
            nested = sum(len(slot.work) for slot in set(self.running.values()) if slot is not None)
            return sum(queue.waiting for queue in queues) + nested, sum(queue.running for queue in queues)

    def queue_lengths(self) -> list[tuple[GroupQueue, int, int, Entry | None]]:
        """Return, for each queue: how many entries wait, how many run, and the entry that has waited longest."""
        with self._lock:
            queues = [*self.queues.values(), *self.async_lanes.values()]
            return [(queue, queue.waiting, queue.running, queue.oldest()) for queue in queues]

    def close_if_idle(self) -> bool:
        """Close the mailbox if no entry waits or runs; return whether it was closed. Atomic: no entry can come in between."""
        with self._lock:
            idle = not any(self.counts())
            self.closed = self.closed or idle
            return idle

    def close(self) -> tuple[list[Entry], list[Any]]:
        """Close the mailbox. Return the waiting entries, in order, and the idle runners."""
        with self._lock:
            self.closed = True
            entries: list[Entry] = []
            slots: list[Any] = []
            for queue in (*self.queues.values(), *self.async_lanes.values()):
                entries.extend(queue.drain())
                slots.extend(queue.idle)
                queue.idle.clear()
            for slot in set(self.running.values()):
                if slot is not None:
                    entries.extend(entry for entry in slot.work if entry.state is NEW)
                    slot.work.clear()
            for entry in entries:
                entry.state = OVER
            return sorted(entries), slots
