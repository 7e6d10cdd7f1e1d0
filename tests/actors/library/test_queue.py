"""The queue: first the class of its actor, step by step with hypothesis, then the queue as a whole."""

from __future__ import annotations

import asyncio
import itertools
import queue as standard
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorrpc.actors.api import cancel, get_actor, list_actors
from actorrpc.actors.client.actor_class import ActorClass
from actorrpc.actors.library.queue import Empty, Full, Queue, QueueActor, Ticket
from actorrpc.actors.refs.wait import get
from actorrpc.errors import ActorDiedError, RpcTimeoutError, ShutdownError
from tests.actors.alone import alone


class _Simulation:
    """An instance of the queue's actor class on an event loop whose clock the test advances."""

    def __init__(self, maxsize: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.now = 0.0
        self.loop.time = lambda: self.now  # type: ignore[method-assign]
        self.queue = QueueActor(maxsize)
        self.tickets = itertools.count()

    def start(self, coroutine: Coroutine[Any, Any, Any], steps: int = 0) -> asyncio.Task[Any]:
        task = self.loop.create_task(coroutine)
        self.step(steps)
        return task

    def step(self, steps: int = 5) -> None:
        async def turn() -> None:
            for _ in range(steps):
                await asyncio.sleep(0)

        if steps:
            self.loop.run_until_complete(turn())

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def ticket(self) -> Ticket:
        return (1, next(self.tickets))

    def put(self, item: Any, timeout: float | None = None) -> asyncio.Task[bool]:
        return self.start(self.queue.put(item, self.ticket(), timeout), 5)

    def get(self, timeout: float | None = None) -> asyncio.Task[tuple[Any] | None]:
        return self.start(self.queue.get(self.ticket(), timeout, ()), 5)

    def rest(self) -> list[Any]:
        """Remove and return all items."""
        count = self.do(self.queue.qsize())
        return list(self.do(self.queue.get_batch(count, self.ticket(), ())))

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.step()
        self.loop.close()


@pytest.fixture
def simulation(request: pytest.FixtureRequest) -> Iterator[_Simulation]:
    simulation = _Simulation(getattr(request, "param", 0))
    yield simulation
    simulation.close()


_room_for_one = pytest.mark.parametrize("simulation", [1], indirect=True)


# -- inside the actor ---------------------------------------------------------------------------------------


@_room_for_one
def test_a_later_put_does_not_overtake_waiting_puts(simulation: _Simulation) -> None:
    simulation.put(0)
    waiting = simulation.put(1)
    simulation.start(simulation.queue.get(simulation.ticket(), None, ()))
    simulation.put(2)
    assert waiting.result() is True
    assert [simulation.get().result() for _ in range(2)] == [(1,), (2,)]


def test_an_item_put_at_the_deadline_of_a_get_is_not_lost(simulation: _Simulation) -> None:
    task = simulation.get(timeout=5)
    # In one iteration of the loop, the item is handed to the waiting get and its deadline passes.
    simulation.start(simulation.queue.put("a", simulation.ticket(), None))
    simulation.now += 6
    simulation.step()
    assert task.result() == ("a",) or simulation.rest() == ["a"]


def test_an_item_for_a_cancelled_get_goes_to_the_next_one(simulation: _Simulation) -> None:
    first, second = simulation.get(), simulation.get()
    simulation.do(
        simulation.queue.put("a", simulation.ticket(), None)
    )  # the future of the first get has it, but its task has not run
    first.cancel()
    simulation.step()
    assert first.cancelled()
    assert second.result() == ("a",)


def test_withdrawn_items_return_to_their_position(simulation: _Simulation) -> None:
    simulation.do(simulation.queue.put_batch(list(range(5))))
    tickets = [simulation.ticket() for _ in range(4)]
    for ticket in tickets:
        simulation.do(simulation.queue.get(ticket, None, ()))
    simulation.do(simulation.queue.withdraw(tickets[2]))
    simulation.do(simulation.queue.withdraw(tickets[0]))
    simulation.do(simulation.queue.withdraw(tickets[0]))  # has no effect
    simulation.do(simulation.queue.withdraw(tickets[3]))
    assert simulation.rest() == [0, 2, 3, 4]


@pytest.mark.slow
@given(st.data(), st.integers(0, 3))
def test_every_item_is_in_the_queue_or_with_exactly_one_caller(data: st.DataObject, maxsize: int) -> None:
    simulation = _Simulation(maxsize)
    try:
        _play(data, simulation, maxsize)
    finally:
        simulation.close()


def _play(data: st.DataObject, simulation: _Simulation, maxsize: int) -> None:
    queue = simulation.queue
    gets: dict[Ticket, asyncio.Task[Any]] = {}
    puts: dict[Ticket, tuple[int, asyncio.Task[bool]]] = {}
    given_up: set[Ticket] = set()
    received: list[Ticket] = []
    acknowledged: set[Ticket] = set()  # acknowledged items are never withdrawn
    items = itertools.count()
    for _ in range(data.draw(st.integers(1, 25), label="steps")):
        what = data.draw(
            st.sampled_from(["put", "get", "cancel", "withdraw", "time", "receive", "batch"]), label="what"
        )
        timeout = data.draw(st.sampled_from([None, 0, 1.0, 2.0]), label="timeout")
        ticket = simulation.ticket()
        if what == "put":
            item = next(items)
            puts[ticket] = (item, simulation.start(queue.put(item, ticket, timeout)))
        elif what == "get":
            arrived, received = tuple(received), []
            acknowledged.update(arrived)
            gets[ticket] = simulation.start(queue.get(ticket, timeout, arrived))
        elif what == "time":
            simulation.now += 1.5
        elif what == "batch":
            count = data.draw(st.integers(0, 2), label="count")
            batch = [next(items) for _ in range(count)]
            task = simulation.start(queue.put_batch(batch))
            simulation.step()
            if task.result() is None:
                puts.update({(2, item): (item, simulation.start(_true())) for item in batch})
        elif what == "receive":
            received = [
                each
                for each in gets
                if each not in given_up | acknowledged and gets[each].done() and gets[each].result()
            ]
        elif gets:
            chosen = data.draw(st.sampled_from(sorted(gets)), label="ticket")
            if chosen in received or chosen in acknowledged or (gets[chosen].done() and what == "cancel"):
                continue
            given_up.add(chosen)
            if what == "cancel":
                gets[chosen].cancel()
            simulation.start(queue.withdraw(chosen))
        simulation.step(data.draw(st.integers(0, 3), label="turns"))
    simulation.step(10)

    inside = [item for _, item in queue._items]
    numbers = [number for number, _ in queue._items]
    assert numbers == sorted(numbers)
    assert not (queue._items and queue._getters)
    assert not (queue._putters and queue._room())
    with_callers = [
        task.result()[0]
        for ticket, task in gets.items()
        if ticket not in given_up and task.done() and task.result() is not None
    ]
    accepted = [item for item, task in puts.values() if task.done() and task.result()]
    assert sorted(inside + with_callers) == sorted(accepted)
    assert len(queue._putters) == sum(not task.done() for _, task in puts.values())
    assert len(queue._getters) == sum(not task.done() for task in gets.values())


async def _true() -> bool:
    return True


# -- the queue as a whole -----------------------------------------------------------------------------------


@pytest.fixture
def one_worker(tmp_path: Path) -> Iterator[None]:
    with alone(tmp_path):
        yield


@pytest.fixture
def queue(one_worker: None, request: pytest.FixtureRequest) -> Iterator[Queue[Any]]:
    made: Queue[Any] = Queue(maxsize=getattr(request, "param", 0))
    yield made
    made.shutdown(force=True)


_small = pytest.mark.parametrize("queue", [2], indirect=True)


def _until_waiting(queue: Queue[Any], getters: int = 0, putters: int = 0) -> None:
    """Wait until the numbers of waiting callers match. Each query arrives after the earlier calls of this process."""
    while get(queue.actor.waiting.remote()) != (getters, putters):  # type: ignore[union-attr]
        pass


@ActorClass
class User:
    """Uses a queue inside an actor."""

    def take(self, queue: Queue[Any]) -> Any:
        return queue.get()

    def give(self, queue: Queue[Any], items: list[Any]) -> Queue[Any]:
        for item in items:
            queue.put(item)
        return queue


@ActorClass
class AsyncUser:
    """Uses a queue inside an async actor."""

    async def take(self, queue: Queue[Any]) -> Any:
        return await queue.get_async()


def test_items_come_out_in_the_order_they_were_put(queue: Queue[Any]) -> None:
    for n in range(10):
        queue.put(n)
    assert (queue.qsize(), queue.size(), len(queue), bool(queue)) == (10, 10, 10, True)
    assert [queue.get() for _ in range(10)] == list(range(10))
    assert queue.empty()


@_small
def test_putting_into_a_full_queue_raises_full(queue: Queue[Any]) -> None:
    assert queue.maxsize == 2
    assert not queue.full()
    queue.put_nowait(1)
    queue.put(2, timeout=0)
    assert queue.full()
    assert not queue.empty()
    for full in (
        lambda: queue.put_nowait(3),
        lambda: queue.put(3, block=False),
        lambda: queue.put(3, timeout=0.001),
        lambda: queue.put_nowait_batch([3]),
        lambda: asyncio.run(queue.put_async(3, timeout=0.001)),
    ):
        with pytest.raises(Full) as caught:
            full()
        assert isinstance(caught.value, standard.Full)
    assert queue.get_nowait_batch(2) == [1, 2]


def test_getting_from_an_empty_queue_raises_empty(queue: Queue[Any]) -> None:
    for empty in (
        queue.get_nowait,
        lambda: queue.get(block=False),
        lambda: queue.get(timeout=0.001),
        lambda: queue.get_nowait_batch(1),
        lambda: asyncio.run(queue.get_async(timeout=0.001)),
        lambda: asyncio.run(queue.get_async(block=False)),
    ):
        with pytest.raises(Empty) as caught:
            empty()
        assert isinstance(caught.value, standard.Empty)
    assert queue.get_nowait_batch(0) == []


@_small
def test_batches_are_put_and_taken_completely_or_not_at_all(queue: Queue[Any]) -> None:
    with pytest.raises(Full, match="3 items to a queue of size 0 and maxsize 2"):
        queue.put_nowait_batch(range(3))
    assert queue.empty()
    queue.put_nowait_batch(iter([1, 2]))
    with pytest.raises(Empty, match="3 items from a queue of size 2"):
        queue.get_nowait_batch(3)
    assert queue.qsize() == 2


def test_wrong_arguments_of_a_queue_are_refused_and_change_nothing(queue: Queue[Any]) -> None:
    with pytest.raises(TypeError, match="items must be an iterable, not 3"):
        queue.put_nowait_batch(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="actor_options must be a dict of options"):
        Queue(3, actor_options=[1])  # type: ignore[arg-type]
    assert queue.empty()
    assert repr(queue) == f"<actorrpc.Queue(maxsize={queue.maxsize}) in {queue.actor!r}>"


@_small
def test_a_put_waits_until_there_is_room(queue: Queue[Any]) -> None:
    user = User.remote()
    ref = user.give.remote(queue, [1, 2, 3])
    _until_waiting(queue, putters=1)
    assert [queue.get() for _ in range(3)] == [1, 2, 3]
    assert get(ref).qsize() == 0


def test_more_callers_can_wait_than_the_default_max_concurrency(queue: Queue[Any]) -> None:
    async def main() -> list[int]:
        gets = [asyncio.ensure_future(queue.get_async()) for _ in range(1200)]
        await asyncio.sleep(0)
        await asyncio.gather(*[queue.put_async(n) for n in range(1200)])
        return await asyncio.gather(*gets)

    assert sorted(asyncio.run(main())) == list(range(1200))


def test_no_item_is_lost_if_coroutines_that_wait_for_it_are_cancelled(queue: Queue[Any]) -> None:
    async def main() -> list[Any]:
        waits = [asyncio.ensure_future(queue.get_async()) for _ in range(3)]
        await asyncio.sleep(0)
        # An item may be in flight to a coroutine while it is cancelled.
        await queue.put_async("a")
        for each in waits[:2]:
            each.cancel()
        await queue.put_async("b")
        await queue.put_async("c")
        done = await asyncio.gather(*waits, return_exceptions=True)
        got = [each for each in done if isinstance(each, str)]
        while len(got) < 3:
            got.append(await queue.get_async())
        return got

    assert sorted(asyncio.run(main())) == ["a", "b", "c"]
    assert queue.empty()


@pytest.mark.parametrize("users", [User, AsyncUser], ids=["thread", "loop"])
def test_no_item_is_lost_if_a_method_that_waits_for_it_is_cancelled(queue: Queue[Any], users: Any) -> None:
    user = users.remote()
    ref = user.take.remote(queue)
    _until_waiting(queue, getters=1)
    cancel(ref)
    _until_waiting(queue)
    queue.put("a")
    assert queue.get(timeout=10) == "a"


def test_no_item_is_lost_if_a_method_that_waits_for_it_times_out(queue: Queue[Any]) -> None:
    user = User.remote()
    with pytest.raises(RpcTimeoutError):
        get(user.take.options(timeout=0.2).remote(queue))
    _until_waiting(queue)
    queue.put("a")
    assert queue.get(timeout=10) == "a"


def test_shutdown_ends_the_actor_and_waiting_callers(one_worker: None) -> None:
    queue: Queue[int] = Queue()
    user = User.remote()
    other = get(user.give.remote(queue, [1]))
    assert queue.get() == 1
    waiting = user.take.remote(other)
    _until_waiting(queue, getters=1)
    queue.shutdown()
    with pytest.raises(ActorDiedError):
        get(waiting)
    with pytest.raises(ActorDiedError):
        other.put(1)
    with pytest.raises(ShutdownError, match="shut down"):
        queue.put(1)
    queue.shutdown()
    other.shutdown()  # the actor is already dead


def test_actor_options_are_applied_to_the_queues_actor(one_worker: None) -> None:
    queue: Queue[int] = Queue(actor_options={"name": "the-queue", "worker": "w0"})
    queue.put(1)
    assert get(get_actor("the-queue").qsize.remote()) == 1
    assert any(info.name == "the-queue" for info in list_actors())
    queue.shutdown()
