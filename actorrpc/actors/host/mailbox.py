"""The mailbox: which call of an actor runs next, and where. A state machine that runs nothing itself.

A :class:`Mailbox` has a :class:`GroupQueue` for each concurrency group, and one more for each group's ``async def`` methods;
that of the default group has the plain methods of an actor that has async ones, too, which run on its event loop.
A queue hands out its entries in order:

* higher priority first; within a priority, in the order of arrival;
* the calls of one caller (of one priority) never overtake each other, also where the arguments of one are still on
  their way: then only that caller's calls wait. In a queue that runs several at a time, whatever is ready runs;
* a call that is sent again goes before the later calls of its caller;
* at most ``limit`` at a time. In a yielding queue each wait, of whichever thread, makes room for one more.

**Descendants.** An entry that descends from an execution which is under way here (its id is in the entry's path)
does not queue: it goes to the runner that runs that execution, which runs it nested while it waits. What is left
there when the execution ends comes back into its queue, in order.

Each method that changes something returns :class:`Wakeups`: which runners to wake and which queues need one more, after the
lock was released. The lock guards everything here; it is re-entrant, because the garbage
collector may run a finaliser that makes a call to this very actor at any allocation, and it is a leaf.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

__all__ = ["NEW", "NOTHING", "TAKEN", "Entry", "GroupQueue", "Mailbox", "ThreadSlot", "Wakeups"]

NEW: Final = "new"  # in a queue
TAKEN: Final = "taken"  # handed out
OVER: Final = "over"  # cancelled, or finished
_LOOKED_AT: Final = 1000


class ThreadSlot(Protocol):
    """Where executions of a queue run: a runner (a thread), as far as the mailbox knows it."""

    work: deque[Entry]


class WaitingBystanders(Protocol):
    """Threads that serve no runner, as far as the mailbox knows them."""

    waiting: int


class Entry:
    """One call in a mailbox, as far as that goes.

    Attributes:
        place: grows with each call of a caller.
        again: it is the repetition of the call that had its ``place``, and goes before its caller's later calls.
        path: the executions that it descends from.
        ready: its arguments are here.
        loose: it may overtake, and be overtaken by, other calls of its caller while its arguments are on their way.
    """

    # Of the class, as one is made for each call, and most differ in few things.
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
        """Who called; calls of equal callers keep their order."""
        return None

    def __lt__(self, other: Entry) -> bool:
        if self.number == other.number and self.priority == other.priority:
            return self.place < other.place  # one of them is a repetition
        return (-self.priority, self.number) < (-other.priority, other.number)


class Wakeups:
    """What the caller does after a step, without the lock: wake runners, and start one more for each of some queues."""

    # Of the class, as most steps leave nothing: an object of its own costs no call.
    wake: Sequence[Any] = ()
    start: Sequence[GroupQueue] = ()


NOTHING: Final = Wakeups()  # most steps leave nothing to be done; never changed


def _hold(held: deque[Entry], entry: Entry) -> None:
    """Insert an entry into the held entries of its caller, in order. Only the entry of a repeated call is not the last."""
    if not held or held[-1] < entry:
        held.append(entry)
    else:
        bisect.insort(held, entry)


class GroupQueue:
    """The queue of one concurrency group. Its mailbox's lock guards it.

    Args:
        limit: how many of its calls run at a time.
        yielding: calls in one of our waits do not count.
        loose: whatever is ready runs; calls of one caller are kept in order where it has several that are.
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
        self.bystanders: WaitingBystanders | None = None
        self.slots = 0  # runners that exist, or are being started
        self.idle: list[Any] = []
        self.fresh: deque[Entry] = deque()  # entries in the order of arrival; Mailbox.put adds to it
        self._heap: list[Entry] = []  # entries whose order is another one
        # By caller and priority, in order: an entry that is not ready comes first, and holds the caller's later ones.
        self._held: dict[tuple[object, int], deque[Entry]] = {}
        self._parked: set[Entry] = set()
        self.waiting = 0  # entries in here that have neither been handed out nor cancelled
        self._of_chain: dict[
            int, dict[Entry, None]
        ] = {}  # the waiting entries, by each execution they descend from

    @property
    def has_ready(self) -> bool:
        """Whether there may be one that can be handed out: one that waits for its arguments, or behind another one, cannot."""
        return self.waiting > 0 and bool(self.fresh or self._heap)

    @property
    def full(self) -> bool:
        """Whether as many run as may run at a time."""
        running = self.running - self.resting
        if self.bystanders is not None:
            running -= self.bystanders.waiting
        return running >= self.limit

    def _put_before(self, entry: Entry) -> None:
        """Give an entry that came again the number of the first of its caller's later ones."""
        for each in self.entries():
            if (
                each.caller == entry.caller
                and each.priority == entry.priority
                and each.place > entry.place
                and each.number < entry.number
            ):
                entry.number = each.number
                return

    def put_back(self, entry: Entry) -> None:
        """Put in an entry that came earlier than others which are here, or does not take the place behind all others."""
        if entry.again:
            self._put_before(entry)
        entry.queue = self
        self.waiting += 1
        self._enter(entry)
        heapq.heappush(self._heap, entry)

    def _enter(self, entry: Entry) -> None:
        for execution in entry.path:
            self._of_chain.setdefault(execution, {})[entry] = None

    def left(self, entry: Entry) -> None:
        """Record that an entry was handed out or cancelled."""
        self.waiting -= 1
        for execution in entry.path:
            rest = self._of_chain.get(execution)
            if rest is not None:
                rest.pop(entry, None)
                if not rest:
                    del self._of_chain[execution]

    def descendant(self, running: Mapping[int, object]) -> Entry | None:
        """Return the first entry that is ready and descends from one of some executions."""
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
        """Take out the next entry that can run; None if there is none."""
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
                entry.state = TAKEN
                if entry.path:
                    self.left(entry)
                else:
                    self.waiting -= 1
                return entry
            if entry.loose:
                entry.parked = True  # comes back when it is ready
                self._parked.add(entry)
            else:
                # An entry that comes again may go before one that is held already, and holds that.
                _hold(self._held.setdefault((entry.caller, entry.priority), deque()), entry)

    def release(self, entry: Entry) -> None:
        """Record that an entry whose arguments were missing is ready, or was cancelled.

        The entries that it held are released, up to the next one that is not ready and holds the others.
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
        """Return the earlier call of its caller that an entry waits for, whose arguments are not here."""
        held = self._held.get((entry.caller, entry.priority))
        return held[0] if held and held[0] < entry and not entry.loose else None

    def heads(self) -> list[Entry]:
        """Return the entries that are not ready, for which later calls of their callers wait."""
        return [held[0] for held in list(self._held.values()) if len(held) > 1 and not held[0].ready]

    def entries(self) -> list[Entry]:
        """Return the entries that wait here, in order."""
        everything = itertools.chain(self.fresh, self._heap, *self._held.values(), self._parked)
        # A set: an entry that came back from a runner may be here twice.
        return sorted({entry for entry in everything if entry.state is NEW and entry.slot is None})

    def oldest(self) -> Entry | None:
        """Return the entry that has waited longest. Of very many that came out of order, only some are compared."""
        fresh = next((entry for entry in self.fresh if entry.state is NEW and entry.slot is None), None)
        others = itertools.chain(self._heap, *self._held.values(), self._parked)
        waiting = (
            entry
            for entry in itertools.islice(others, _LOOKED_AT)
            if entry.state is NEW and entry.slot is None
        )
        return min(
            (entry for entry in (fresh, *waiting) if entry is not None),
            key=lambda entry: entry.number,
            default=None,
        )

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
        async_lanes: the same for ``async def`` methods; empty for an actor that has none.
        reentrant: calls that descend from a running one run within it.
        running: the runner of each execution; None: it runs on an event loop. Single steps are atomic and need no lock.
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
            yielding: calls that wait do not count against the limits.
            loose: whether calls may overtake others whose arguments are missing; None: in queues that run several at a time.
        """
        with self._lock:
            self.reentrant = reentrant
            for name, limit in limits.items():
                queue = self.queues.setdefault(name, GroupQueue(name, limit))
                queue.limit, queue.yielding = limit, yielding
                queue.loose = limit > 1 if loose is None else loose
            for name, limit in async_limits.items():
                self.async_lanes[name] = GroupQueue(name, limit, is_async=True, loose=loose is not False)

    # -- putting in --------------------------------------------------------------------------------

    def put(self, entry: Entry, queue: GroupQueue) -> Wakeups | None:
        """Put an entry in. Returns None if the mailbox is closed: it is then the caller's to refuse."""
        with self._lock:
            if self.closed:
                return None
            if entry.state is not NEW:  # cancelled while its actor was being made
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
                    return NOTHING  # one of its runners is about to look for itself
            todo = Wakeups()
            self._look(queue, todo)
            return todo

    def _slot_of(self, entry: Entry, queue: GroupQueue) -> ThreadSlot | None:
        """Return the runner that runs what the entry descends from."""
        if queue.is_async or (queue.running + queue.waiting < queue.limit):
            return None  # another thread of the actor is free for it
        for execution in reversed(entry.path):
            slot = self.running.get(execution)
            if slot is not None:
                return slot
        return None

    def ready(self, entry: Entry) -> Wakeups:
        """Record that an entry's arguments have arrived."""
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
                queue.left(entry)
                slot.work.append(entry)
                todo.wake = (slot,)
            queue.release(entry)
            self._look(queue, todo)
        return todo

    def cancel(self, entry: Entry) -> Wakeups | None:
        """Take an entry out that has not been handed out; None if it is too late for that."""
        todo = Wakeups()
        with self._lock:
            if entry.state is not NEW:
                return None
            entry.state = OVER
            queue = entry.queue
            if queue is not None:
                if entry.slot is None:
                    queue.left(entry)
                queue.release(entry)
                self._look(queue, todo)
        return todo

    # -- handing out -------------------------------------------------------------------------------

    def _look(self, queue: GroupQueue, todo: Wakeups) -> None:
        """If the queue can run one more entry, add the runner to wake, or the queue to start one for, to ``todo``."""
        if queue.full and not (queue.is_async and self.reentrant and self.running):
            return
        if queue.is_async:
            todo.start = (*todo.start, queue)
        elif queue.idle:
            todo.wake = (*todo.wake, queue.idle.pop())
        elif queue.yielding or (queue.slots < queue.limit and queue.slots <= queue.running):
            # Otherwise a runner that is neither idle nor running is about to look for itself.
            queue.slots += 1
            todo.start = (*todo.start, queue)

    def take(self, queue: GroupQueue, slot: Any = None) -> tuple[Entry | None, Wakeups | None]:
        """Hand out the queue's next entry to a runner (or to the event loop); None: no entry can run now.

        A runner that gets None is idle from then on, and is named in a later ``Wakeups.wake``.
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
        """Do :meth:`done` and then :meth:`take` in one step, for a runner that has run an entry."""
        with self._lock:
            left: Wakeups | None = None
            if slot.work:
                left = self.done(queue, slot)
            else:
                queue.running -= 1
            if queue.waiting:
                entry, todo = self.take(queue, slot)
                if left is None or not (left.wake or left.start):
                    return entry, todo
                if todo is not None:
                    left.wake, left.start = (*left.wake, *todo.wake), (*left.start, *todo.start)
                return entry, left
            if not self.closed:
                queue.idle.append(slot)
            return None, left

    def take_descendant(self, queue: GroupQueue) -> Entry | None:
        """Hand out an entry of an async queue that descends from a running execution, over the limit."""
        with self._lock:
            if not self.reentrant or not self.running:
                return None
            entry = queue.descendant(self.running)
            if entry is not None:
                entry.state = TAKEN
                queue.left(entry)
                queue.running += 1
            return entry

    def take_within(self, queue: GroupQueue, fits: Callable[[Entry], bool]) -> Entry | None:
        """Hand out an entry of an async queue that may run within what blocks its event loop, over the limit.

        ``fits`` is called under the lock, and takes no other lock.
        """
        with self._lock:
            for entry in queue.entries():
                if fits(entry):
                    entry.state = TAKEN
                    queue.left(entry)
                    queue.running += 1
                    return entry
        return None

    def take_nested(self, slot: ThreadSlot) -> Entry | None:
        """Hand out to a runner that waits an entry that may run within what it runs."""
        with self._lock:
            while slot.work:
                entry = slot.work.popleft()
                if entry.state is NEW:
                    entry.state = TAKEN
                    return entry
        return None

    def slot_of(self, execution: int) -> ThreadSlot | None:
        """Return the runner that runs an execution, or runs something else within it; None where none does."""
        return self.running.get(execution)

    def done(self, queue: GroupQueue, slot: ThreadSlot | None = None) -> Wakeups:
        """Record the end of an entry that :meth:`take` handed out. Entries that waited to run within it are queued again."""
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
        """Record that a thread or coroutine of an entry in a yielding queue waits: another entry may run."""
        todo = Wakeups()
        with self._lock:
            queue.resting += 1
            if queue.waiting:
                self._look(queue, todo)
        return todo

    def look(self) -> Wakeups:
        """Record that there may be room for another entry: a thread that serves no runner waits."""
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

    def leave(self, queue: GroupQueue, slot: Any) -> bool:
        """Let an idle runner end; False if it is wanted."""
        with self._lock:
            if slot not in queue.idle:
                return False
            queue.idle.remove(slot)
            queue.slots -= 1
            return True

    def understaffed(self, queue: GroupQueue) -> list[Entry]:
        """Record that no runner could be started for a queue; return the entries that must not wait for one.

        If the queue has other runners, that is the first entry alone: they run the rest, and may be waiting for the first.
        """
        with self._lock:
            queue.slots -= 1
            entries: list[Entry] = []
            while not (entries and queue.slots) and (entry := queue.next()) is not None:
                entry.state = OVER
                entries.append(entry)
            return entries

    # -- looking and ending ------------------------------------------------------------------------

    def counts(self) -> tuple[int, int]:
        """Return how many entries wait and how many run."""
        with self._lock:
            queues = [*self.queues.values(), *self.async_lanes.values()]
            nested = sum(len(slot.work) for slot in set(self.running.values()) if slot is not None)
            return sum(queue.waiting for queue in queues) + nested, sum(queue.running for queue in queues)

    def glance(self) -> list[tuple[GroupQueue, int, int, Entry | None]]:
        """Return, for each queue: how many entries wait, how many run, and the entry that has waited longest."""
        with self._lock:
            queues = [*self.queues.values(), *self.async_lanes.values()]
            return [(queue, queue.waiting, queue.running, queue.oldest()) for queue in queues]

    def close_if_idle(self) -> bool:
        """Take no more if nothing waits or runs; say whether that is so. One step: nothing can come in between."""
        with self._lock:
            idle = not any(self.counts())
            self.closed = self.closed or idle
            return idle

    def close(self) -> tuple[list[Entry], list[Any]]:
        """Take no more entries. Return the waiting entries, in order, and the idle runners."""
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
