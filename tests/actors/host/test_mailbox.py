"""The mailbox in a seeded simulation without threads: order, limits, nested calls, retries and cancellation."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from actorrpc.actors.host.mailbox import Entry, GroupQueue, Mailbox, Wakeups
from tests.actors.entries import Call


class SimulatedRunner:
    """A runner that the simulator steps."""

    def __init__(self, world: World, queue: GroupQueue) -> None:
        self.world = world
        self.queue = queue
        self.work: deque[Entry] = deque()
        self.frames: list[tuple[Entry, int]] = []  # running entries, innermost last
        self.parked = False
        self.resting = False

    def step(self) -> None:
        world, mailbox = self.world, self.world.mailbox
        if self.resting:
            mailbox.resume(self.queue)
            self.resting = False
            return
        if not self.frames:
            if self.parked:
                return
            entry, todo = mailbox.dequeue(self.queue, self)
            world.do(todo)
            if entry is None:
                self.parked = True
                return
            self.begin(entry)
            return
        choice = world.random.random()
        if choice < 0.35 and self.queue.yielding:
            self.resting = True
            world.do(mailbox.rest(self.queue))
        elif choice < 0.35 and len(self.frames) < 6:
            # The running call waits: its descendants may run.
            nested = mailbox.dequeue_nested(self)
            if nested is not None:
                self.begin(nested)
        elif choice < 0.55 and len(world.entries) < world.most:
            # The running call makes a call that comes back to this actor.
            world.make(path=self.path())
        elif choice < 0.8:
            entry, execution = self.frames.pop()
            mailbox.running.pop(execution, None)
            world.finished.append(entry)
            if world.random.random() < world.fails:
                world.again(entry)
            if not self.frames:
                world.do(mailbox.done(self.queue, self))

    def path(self) -> tuple[int, ...]:
        return tuple(execution for _, execution in self.frames)

    def begin(self, entry: Entry) -> None:
        world = self.world
        assert entry.ready, "the call ran without its arguments"
        assert entry not in world.started, "the call ran twice"
        assert entry not in world.cancelled, "the call ran although it was cancelled"
        if self.frames:
            assert set(entry.path) & set(self.path()), "the nested call is no descendant of a running call"
        world.started.append(entry)
        world.executions += 1
        self.frames.append((entry, world.executions))
        world.mailbox.running[world.executions] = self
        runners = [runner for runner in world.runners if runner.queue is self.queue and not runner.resting]
        top = sum(1 for runner in runners if runner.frames) - world.waiting * self.queue.yielding
        assert top <= self.queue.limit, "more calls run than the limit allows"


class World:
    """An actor, its runners and its callers; the seed chooses every step."""

    def __init__(self, seed: int, limits: dict[str, int]) -> None:
        self.random = random.Random(seed)
        self.mailbox = Mailbox()
        yielding = self.random.random() < 0.3
        self.mailbox.configure(
            limits,
            {},
            reentrant=not yielding and self.random.random() < 0.8,
            yielding=yielding,
            loose=self.random.choice([None, True, False]),
        )
        self.waiting = 0  # number of waiting foreign threads
        for queue in self.mailbox.queues.values():
            queue.foreign_threads = self
        self.runners: list[SimulatedRunner] = []
        self.entries: list[Entry] = []
        self.started: list[Entry] = []
        self.finished: list[Entry] = []
        self.cancelled: list[Entry] = []
        self.unready: list[Entry] = []
        self.needs: dict[Entry, Entry] = {}  # retried call -> the call whose result is its argument
        self.put_at: dict[Entry, int] = {}
        self.executions = 0
        self.most = 40
        self.fails = 0.15

    def do(self, todo: Wakeups | None) -> None:
        if todo is None:
            return
        for runner in todo.wake:
            runner.parked = False
        for queue in todo.start:
            self.runners.append(SimulatedRunner(self, queue))

    def make(self, path: tuple[int, ...] = ()) -> None:
        pick = self.random
        ready = pick.random() < 0.8
        entry = Call(
            pick.choice("abc"),
            path=path,
            priority=pick.choice([0, 0, 0, 5, -1]),
            ready=ready,
            loose=pick.random() < 0.15,
            place=len(self.entries),
        )
        queue = self.mailbox.queues[pick.choice(list(self.mailbox.queues))]
        self.entries.append(entry)
        if not ready:
            self.unready.append(entry)
        self.put(entry, queue)

    def put(self, entry: Entry, queue: GroupQueue) -> None:
        self.put_at[entry] = len(self.started)
        self.do(self.mailbox.put(entry, queue))

    def again(self, failed: Entry) -> None:
        """Retry a call. Later calls of its caller that wait for arguments now wait for this one."""
        assert failed.queue is not None
        ready = self.random.random() < 0.8
        entry = Call(
            failed.caller,
            priority=failed.priority,
            ready=ready,
            loose=failed.loose,
            place=failed.place,
            again=True,
        )
        for each in self.unready:
            if each.caller == entry.caller and each.place > entry.place:
                self.needs[each] = entry
        self.entries.append(entry)
        if not ready:
            self.unready.append(entry)
        self.put(entry, failed.queue)

    def can_be_ready(self, entry: Entry) -> bool:
        needed = self.needs.get(entry)
        return needed is None or needed in self.finished or needed in self.cancelled

    def look(self) -> None:
        """Start or end the wait of a foreign thread."""
        if self.waiting and self.random.random() < 0.5:
            self.waiting -= 1
        else:
            self.waiting += 1
            self.do(self.mailbox.look())

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.2 and len(self.entries) < self.most:
            self.make()
        elif choice < 0.22:
            self.look()
        elif choice < 0.3 and self.unready:
            entry = self.random.choice(self.unready)
            if self.can_be_ready(entry):
                self.unready.remove(entry)
                self.do(self.mailbox.ready(entry))
        elif choice < 0.35 and self.entries:
            entry = self.random.choice(self.entries)
            todo = self.mailbox.cancel(entry)
            if todo is not None:
                assert entry not in self.started
                self.cancelled.append(entry)
                self.do(todo)
            else:
                assert entry in self.started or entry in self.cancelled
        elif self.runners:
            self.random.choice(self.runners).step()

    def run(self) -> None:
        for _ in range(600):
            self.step()
        self.most = self.waiting = 0
        self.fails = 0.0
        for _ in range(20_000):
            for entry in [each for each in self.unready if self.can_be_ready(each)]:
                self.unready.remove(entry)
                self.do(self.mailbox.ready(entry))
            if len(self.finished) + len(self.cancelled) == len(self.entries):
                break
            for runner in list(self.runners):
                runner.step()


def _overtaken(world: World) -> list[tuple[Entry, Entry]]:
    """Return pairs of calls of one caller that ran in a wrong order."""
    wrong = []
    for later, entry in enumerate(world.started):
        for other in world.started[later + 1 :]:
            same = (
                entry.caller == other.caller
                and entry.queue is other.queue
                and entry.priority == other.priority
            )
            if (
                same
                and other.place < entry.place
                and later >= world.put_at[other]
                and not entry.path
                and not other.path
                and not (other.loose or entry.loose)
            ):
                wrong.append((other, entry))
    return wrong


@pytest.mark.limit(120)
@pytest.mark.parametrize("limits", [{"": 1}, {"": 3}, {"": 1, "io": 2}], ids=str)
def test_every_call_runs_once_in_order_within_the_concurrency_limit(limits: dict[str, int]) -> None:
    for seed in range(300):
        world = World(seed, limits)
        world.run()
        assert len(world.finished) + len(world.cancelled) == len(world.entries), (
            f"seed {seed}: some never ran"
        )
        assert not _overtaken(world), f"seed {seed}"
        assert world.mailbox.counts() == (0, 0), f"seed {seed}"


def _run_all(mailbox: Mailbox, queue: GroupQueue) -> list[Any]:
    ran = []
    while True:
        entry, _ = mailbox.dequeue(queue)
        if entry is None:
            return ran
        ran.append(entry.payload)
        mailbox.done(queue)


def test_a_ready_call_releases_the_later_calls_up_to_the_next_pending_one() -> None:
    mailbox = Mailbox()
    queue = mailbox.queues[""]
    first, second = (Call("a", payload, ready=False) for payload in ("a1", "a3"))
    behind = Call("a", "a2")
    for entry in (first, behind, second, Call("a", "a4")):
        mailbox.put(entry, queue)
    assert _run_all(mailbox, queue) == []
    assert (queue.waiting, queue.has_ready) == (
        4,
        False,
    )  # otherwise a runner would poll the queue again and again
    assert queue.held_behind(behind) is first
    mailbox.ready(first)
    assert queue.held_behind(behind) is None
    assert queue.heads() == [second]
    assert _run_all(mailbox, queue) == ["a1", "a2"]
    mailbox.ready(second)
    assert _run_all(mailbox, queue) == ["a3", "a4"]


def test_glance_shows_the_oldest_waiting_call_of_each_queue() -> None:
    mailbox = Mailbox()
    mailbox.configure({"": 1, "io": 1}, {}, loose=False)
    queue = mailbox.queues[""]
    first, blocked, urgent = Call("a"), Call("b", ready=False), Call("c", priority=5)
    for entry in (first, blocked, urgent):
        mailbox.put(entry, queue)

    def seen() -> list[tuple[str, int, int, Entry | None]]:
        return [
            (each.name, waiting, running, oldest)
            for each, waiting, running, oldest in mailbox.queue_lengths()
        ]

    assert seen() == [("", 3, 0, first), ("io", 0, 0, None)]
    assert mailbox.dequeue(queue)[0] is urgent
    assert seen()[0] == ("", 2, 1, first)
    mailbox.done(queue)
    assert mailbox.dequeue(queue)[0] is first
    assert mailbox.dequeue(queue)[0] is None  # the remaining call waits for its arguments
    assert seen()[0] == ("", 1, 1, blocked)
