"""The queue: first the class of its actor, step by step with hypothesis, then the queue as a whole."""

from __future__ import annotations

import asyncio
import itertools
import queue as standard
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorrpc.actors.api import cancel, get_actor, list_actors
from actorrpc.actors.client.actor_class import ActorClass
from actorrpc.actors.library.queue import Empty, Full, Queue, QueueActor, Ticket
from actorrpc.actors.refs.wait import get
from actorrpc.errors import ActorDiedError, RpcTimeoutError, ShutdownError
from tests.migration.rows import row


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

    def ticket(self) -> Ticket:
        return (1, next(self.tickets))

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.step()
        self.loop.close()


# -- inside the actor ---------------------------------------------------------------------------------------


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

    run = simulation.loop.run_until_complete
    size, (getters, putters) = run(queue.qsize()), run(queue.waiting())
    assert not (size and getters)
    assert not (putters and not run(queue.full()))
    with_callers = [
        task.result()[0]
        for ticket, task in gets.items()
        if ticket not in given_up and task.done() and task.result() is not None
    ]
    accepted = [item for item, task in puts.values() if task.done() and task.result()]
    assert putters == sum(not task.done() for _, task in puts.values())
    assert getters == sum(not task.done() for task in gets.values())
    inside = run(queue.get_batch(size, simulation.ticket(), ()))
    assert inside == sorted(
        inside
    )  # no put overtakes a waiting put, and withdrawn items return to their position
    assert sorted(inside + with_callers) == sorted(accepted)


async def _true() -> bool:
    return True


# -- the queue as a whole -----------------------------------------------------------------------------------


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


@row("ray.util.ActorPool", "from-ray")
def test_items_come_out_in_the_order_they_were_put(queue: Queue[Any]) -> None:
    for n in range(10):
        queue.put(n)
    assert (queue.qsize(), queue.size(), len(queue), bool(queue)) == (10, 10, 10, True)
    assert [queue.get() for _ in range(10)] == list(range(10))
    assert queue.empty()


@_small
@row("Queue(maxsize=2)", "from-multiprocessing")
@row("Channel.open()", "from-monarch")
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
    with pytest.raises(Empty, match="3 items from a queue of size 2"):
        queue.get_nowait_batch(3)
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
