"""Routes and queues of calls: each call ends once, in order, and is made again only where that is allowed."""

from __future__ import annotations

import gc
import inspect
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from actorrpc.actors.client import supervisor_client
from actorrpc.actors.client.call_queue import CallQueue
from actorrpc.actors.client.pending_call import PendingCall, ResultFuture
from actorrpc.actors.spec.actor_spec import HostedActorGoneError
from actorrpc.actors.spec.options import CallOptions
from actorrpc.agent.context import set_worker
from actorrpc.errors import (
    ActorDiedError,
    ActorUnavailableError,
    CancelledError,
    PendingCallsLimitExceeded,
    RemoteError,
    RemoteTraceback,
    RpcTimeoutError,
    ShutdownError,
)
from actorrpc.futures import Future
from actorrpc.serialization import codec, exceptions
from tests.actors.fleet import INFO, World
from tests.layers import rest_is_slow


@pytest.fixture(autouse=True)
def _no_runtime() -> Iterator[None]:
    yield
    set_worker(None)


def _outcome(future: Future[Any]) -> Any:
    assert future.done()
    future.acknowledge()
    return future.error if future.error is not None else future.value_or_none


# -- the plain way -----------------------------------------------------------------------------------------


def test_calls_made_before_the_actor_is_there_are_sent_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        world = World(monkeypatch, seed)
        driver = world.workers[0]
        route = world.create(driver)
        futures = []
        for number in range(10):
            futures.append(world.call(driver, route, number))
            for _ in range(world.random.randrange(4)):
                world.step()
        world.settle()
        assert [_outcome(each) for each in futures] == list(range(10))
        assert [entry[3] for entry in world.log] == list(range(10))


def test_a_call_to_an_actor_that_is_there_goes_straight_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    driver = world.workers[0]
    route = world.create(driver)
    world.settle()
    located = route.located()
    world.settle()
    sent: list[Any] = []
    genuine = driver.agent.call
    names = inspect.signature(genuine)
    monkeypatch.setattr(
        driver.agent, "call", lambda *args: (sent.append(names.bind(*args).arguments), genuine(*args))[1]
    )
    first = world.call(driver, route, 1)
    second = world.call(driver, route, 2)
    assert [entry["args"] for entry in sent] == [(1,), (2,)]
    assert sent[0]["mail"] is sent[1]["mail"]  # prepared once
    assert sent[0]["mail"].header == {
        "mailbox": located.value().instance_id,
        "method": "step",
        "keep": True,
    }
    assert route.pending == 2
    world.settle()
    assert (first.value(), second.value()) == (1, 2)
    assert route.pending == 0
    assert first.route is None  # a result that is kept does not keep the actor


def test_options_go_into_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    driver = world.workers[0]
    route = world.create(driver, concurrency_groups={"io": 2})
    route.located()
    world.settle()
    headers: list[dict[str, Any]] = []
    genuine = driver.agent.call

    def send(*args: Any) -> Any:
        headers.append(inspect.signature(genuine).bind(*args).arguments["mail"].header)
        return genuine(*args)

    monkeypatch.setattr(driver.agent, "call", send)
    options = CallOptions().merged(priority=3, concurrency_group="io", num_returns=2, allow_out_of_order=True)
    route.call(INFO.methods["step"], options, (1,), {}, refs=False)
    route.call(
        INFO.methods["step"],
        CallOptions().merged(num_returns="streaming", max_buffered_items=4),
        (1,),
        {},
        refs=True,
    )
    base = {"mailbox": route.location.instance_id, "method": "step"}
    assert headers == [
        {**base, "group": "io", "priority": 3, "num_returns": 2, "unordered": True},
        {**base, "window": 4, "keep": True},
    ]
    world.settle()


def test_arguments_of_waiting_calls_are_taken_as_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 3)
    driver = world.workers[0]
    route = world.create(driver)
    things = [1, 2]
    future = world.call(driver, route, things)
    things.append(3)
    world.settle()
    assert future.value() == [1, 2]


def test_what_cannot_be_sent_is_refused_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 3)
    driver = world.workers[0]
    route = world.create(driver)
    with pytest.raises(TypeError, match="cannot"):
        world.call(driver, route, (n for n in ()))
    world.settle()


def test_a_handle_from_elsewhere_knows_where_the_actor_is(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 4)
    driver, _, other = world.workers
    route = world.create(driver)
    route.located()
    world.settle()
    world.on(other)
    there = other.runtime.routes.of(route.descriptor)
    assert there is not route
    assert other.runtime.routes.of(route.descriptor) is there
    future = world.call(other, there, 5)
    assert there.queue._asking is False
    world.settle()
    assert future.value() == 5


def test_weak_and_strong_routes_share_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 5)
    driver = world.workers[0]
    strong = world.create(driver, name="x")
    weak = driver.runtime.routes.of(driver.runtime.names.lookup("x"))
    assert weak is not strong
    assert weak.anchor is None
    futures = [world.call(driver, (strong, weak)[number % 2], number) for number in range(6)]
    world.settle()
    assert [entry[3] for entry in world.log] == list(range(6))
    assert [each.value() for each in futures] == list(range(6))
    del strong, futures
    gc.collect()
    world.settle()
    error = _outcome(_settled(world, world.call(driver, weak, 7)))
    assert isinstance(error, ActorDiedError)
    assert "its last handle is gone" in str(error)


def _settled(world: World, future: Future[Any]) -> Future[Any]:
    world.settle()
    return future


def test_a_pending_call_keeps_its_actor_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(30):
        world = World(monkeypatch, seed)
        driver = world.workers[0]
        route = world.create(driver)
        for _ in range(world.random.randrange(30)):
            world.step()
        future = world.call(driver, route, 1)
        del route
        world.settle()
        assert future.value() == 1
        assert driver.runtime.supervisor.states()[0].state == "DEAD"
        assert not any(worker.actors_here for worker in world.workers)


# -- limits, deadlines, cancellation -------------------------------------------------------------------------


def test_max_pending_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 6)
    driver = world.workers[0]
    route = world.create(driver, max_pending_calls=2)
    futures = [world.call(driver, route, 0), world.call(driver, route, 1)]
    with pytest.raises(PendingCallsLimitExceeded, match="max_pending_calls=2") as caught:
        world.call(driver, route, 2)
    assert caught.value.maybe_executed is False
    assert caught.value.method == "step"
    world.settle()
    futures.append(world.call(driver, route, 3))
    world.settle()
    assert [each.value() for each in futures] == [0, 1, 3]


def test_a_waiting_call_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 7)
    driver = world.workers[0]
    route = world.create(driver)
    futures = [world.call(driver, route, number) for number in range(4)]
    assert futures[1].cancel()
    assert not futures[1].cancel()
    assert route.pending == 3
    error = _outcome(futures[1])
    assert isinstance(error, CancelledError)
    assert error.maybe_executed is False
    world.settle()
    assert [entry[3] for entry in world.log] == [0, 2, 3]


def test_a_waiting_call_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 8, spawner=True)
    driver = world.workers[0]
    route = world.create(driver)
    world.tasks.clear()  # the actor is never made
    future = world.call(driver, route, 1, timeout=2.0)
    late = world.call(driver, route, 2)
    world.settle(5)
    error = _outcome(future)
    assert isinstance(error, RpcTimeoutError)
    assert error.maybe_executed is False
    assert "to be created" in str(error)
    assert not late.done()
    driver.runtime.routes.close()
    error = _outcome(late)
    assert isinstance(error, ShutdownError)


# -- deaths ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before it is taken back", "as it is taken back", "after that"])
def test_a_call_that_is_cancelled_as_its_actor_dies_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    world = World(monkeypatch, 12)
    driver = world.workers[0]
    route = world.create(driver, max_restarts=1, max_task_retries=1)
    world.behaviour = lambda hosted, header, args: hosted.worker.die() or 0
    future = world.call(driver, route, 1)
    caught, rest = CallQueue.caught, PendingCall.rest
    cancelled: list[bool] = []

    def catching(queue: CallQueue, failed: ResultFuture, error: BaseException) -> bool:
        if moment == "before it is taken back":
            cancelled.append(failed.cancel())
        monkeypatch.setattr(PendingCall, "rest", resting)
        found = caught(queue, failed, error)
        if moment == "after that":
            cancelled.append(failed.cancel())
        return found

    def resting(pending: PendingCall) -> None:
        rest(pending)
        if moment == "as it is taken back":
            assert pending.future is not None
            cancelled.append(pending.future.cancel())

    monkeypatch.setattr(CallQueue, "caught", catching)
    world.settle()
    assert cancelled == [True]
    error = _outcome(future)
    assert isinstance(error, CancelledError)
    assert error.maybe_executed
    assert [entry[3] for entry in world.log] == [1]
    world.behaviour = lambda hosted, header, args: args[0]
    assert route.pending == 0
    later = world.call(driver, route, 2)
    world.settle()
    assert _outcome(later) == 2  # the queue goes on


def test_the_error_says_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 9, spawner=True)
    driver = world.workers[0]
    route = world.create(driver)
    world.behaviour = lambda hosted, header, args: hosted.worker.die() or 0
    first = world.call(driver, route, 1)
    second = world.call(driver, route, 2, method="other")
    world.settle()
    error = _outcome(first)
    assert type(error) is ActorDiedError
    assert error.maybe_executed is True
    assert error.method == "step"
    assert error.worker == "Counter-3"
    text = str(error)
    for part in ("Counter.step", "SIGKILL", "last words", "Counter-3", "max_restarts is 0"):
        assert part in text
    assert error.report.signal == 9
    other = _outcome(second)
    if other.maybe_executed:
        assert "oldest call of this process that was not answered is Counter.step" in str(other)
    third = world.call(driver, route, 3)
    assert isinstance(_outcome(third), ActorDiedError)
    assert third.error.maybe_executed is False
    assert third.error is not error


def test_a_constructor_error_reaches_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 10)
    driver = world.workers[0]
    world.constructor = lambda spec: ValueError("no such file")
    route = world.create(driver, max_restarts=3)
    early = world.call(driver, route, 1)
    located = route.located()
    world.settle()
    late = world.call(driver, route, 2)
    for future in (early, late, located):
        error = _outcome(future)
        assert isinstance(error, ActorDiedError)
        assert type(error.cause) is ValueError
        assert error.__cause__ is error.cause
        assert isinstance(error.cause.__cause__, RemoteTraceback)
        assert error.maybe_executed in (False, None)
        assert "its constructor raised ValueError: no such file" in str(error)


def test_actor_errors_keep_their_attributes_on_the_wire() -> None:
    cause = ValueError("no")
    cause.__cause__ = RemoteTraceback("the lines of another worker")
    error = ActorDiedError(
        "it is dead",
        maybe_executed=False,
        worker="w",
        actor="A#1",
        method="m",
        report={"exit_code": 3},
        cause=cause,
    )
    twice = pickle.loads(pickle.dumps(error))
    data = exceptions.dump(error, worker="w", dumps=codec.dumps)
    raised = exceptions.load(data, loads=codec.loads)
    assert isinstance(raised, RemoteError)
    for each in (twice, exceptions.original(raised)):
        assert type(each) is ActorDiedError
        assert each.args == ("it is dead",)
        assert (each.maybe_executed, each.worker, each.actor, each.method) == (False, "w", "A#1", "m")
        assert each.report == {"exit_code": 3}
        assert type(each.cause) is ValueError
        assert each.__cause__ is each.cause
        assert str(each.cause.__cause__).strip() == "the lines of another worker"


def test_the_supervisor_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(10):
        world = World(monkeypatch, seed)
        driver, place, other = world.workers
        route = world.create(driver, worker="w1", max_restarts=5)
        route.located()
        world.settle()
        world.on(other)
        there = other.runtime.routes.of(route.descriptor)
        assert _outcome(_settled(world, world.call(other, there, 1))) == 1
        watched = there.watch()
        driver.die()
        world.settle()
        # Until somebody ends it, it serves those who know where it is.
        assert _outcome(_settled(world, world.call(other, there, 2))) == 2
        assert isinstance(watched.value(), ActorDiedError)
        assert "'w0', its supervisor, has ended" in str(watched.value())
        place.die()
        error = _outcome(_settled(world, world.call(other, there, 3)))
        assert isinstance(error, ActorDiedError)
        assert "'w0', its supervisor, has ended" in str(error)


def test_the_supervisor_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 3)
    driver, _, other = world.workers
    route = world.create(driver)
    world.tasks.clear()  # the actor is never made
    world.on(other)
    there = other.runtime.routes.of(route.descriptor)
    future = world.call(other, there, 1)
    monkeypatch.setattr(supervisor_client, "current", lambda: None)
    _settled(world, future)
    assert future._report is not None
    assert future._report.seen  # its caller ends as well: that nobody has looked is not told
    error = _outcome(future)
    assert isinstance(error, ShutdownError)
    assert "leaves its group, and its actors end with it" in str(error)


def test_a_stream_whose_worker_is_not_known_to_be_dead_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is known to be broken before: what has become of the actor is asked, not guessed."""
    world = World(monkeypatch, 1, workers=3)
    driver = world.workers[0]
    route = world.create(driver)
    route.located()
    world.settle()
    location, peer = route.queue.place
    explain = partial(route.explain, INFO.methods["step"], CallOptions())
    error = peer.died("the stream", maybe_executed=True)
    found = explain(error, driver.agent.peer("w0"))  # of an incarnation before the one that lives
    assert isinstance(found, ActorUnavailableError)
    assert "it has been restarted" in str(found)
    found = explain(error, peer)
    assert isinstance(found, Future)
    assert peer.state == "alive"
    next(each for each in world.workers if each.record.name == location.worker_name).die()
    world.settle()
    died = _outcome(found)
    assert isinstance(died, ActorDiedError)
    assert died.maybe_executed is True
    assert location.worker_name in str(died)


def test_a_restarted_actor_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(30):
        world = World(monkeypatch, seed, workers=4)
        driver = world.workers[0]
        route = world.create(driver, max_restarts=1)
        route.located()
        world.settle()
        where = route.queue.location
        world.behaviour = lambda hosted, header, args: hosted.worker.die() if args[0] == 1 else args[0]
        futures = [world.call(driver, route, number) for number in range(4)]
        world.settle()
        assert _outcome(futures[0]) in (0,) or isinstance(_outcome(futures[0]), ActorUnavailableError)
        error = _outcome(futures[1])
        for behind in futures[2:]:
            assert isinstance(_outcome(behind), (int, ActorUnavailableError))
        assert type(error) is ActorUnavailableError
        assert error.maybe_executed is True
        assert "may have run" in str(error)
        last = world.call(driver, route, 9)
        world.settle()
        assert last.value() == 9
        assert route.queue.location.epoch == 1
        assert route.queue.location.worker != where.worker


def test_application_errors_are_retried_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 12)
    driver = world.workers[0]
    route = world.create(driver)
    route.located()
    world.settle()
    attempts: list[Any] = []

    def behaviour(hosted: Any, header: Any, args: Any) -> Any:
        attempts.append(args[0])
        return KeyError("x") if attempts.count(args[0]) < 3 else args[0]

    world.behaviour = behaviour
    plain = world.call(driver, route, 1)
    patient = world.call(driver, route, 2, max_task_retries=2, retry_exceptions=[KeyError])
    picky = world.call(driver, route, 3, max_task_retries=2, retry_exceptions=[ValueError])
    short = world.call(driver, route, 4, max_task_retries=1, retry_exceptions=True)
    world.settle()
    assert isinstance(_outcome(plain), KeyError)
    assert _outcome(patient) == 2
    assert isinstance(_outcome(picky), KeyError)
    assert isinstance(_outcome(short), KeyError)
    assert [attempts.count(number) for number in (1, 2, 3, 4)] == [1, 3, 1, 2]


def test_a_call_that_is_made_again_goes_before_what_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 13)
    driver = world.workers[0]
    route = world.create(driver, max_restarts=1)
    route.located()
    world.settle()
    ran: list[Any] = []

    def behaviour(hosted: Any, header: Any, args: Any) -> Any:
        ran.append(args[0])
        return KeyError("x") if ran.count("tries") < 3 else args[0]

    world.behaviour = behaviour
    tries = world.call(driver, route, "tries", max_task_retries=-1, retry_exceptions=True)
    world.is_there = lambda args: args[0] != "uses" or tries.done()
    uses = world.call(driver, route, "uses")
    after = world.call(driver, route, "after")
    world.settle()
    assert [_outcome(each) for each in (tries, uses, after)] == ["tries", "uses", "after"]
    assert ran == ["tries", "tries", "tries", "uses", "after"]


def test_a_late_call_asks_again_where_its_actor_is(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    driver, place, other = world.workers
    route = world.create(driver, worker="w1", max_restarts=1)
    route.located()
    world.settle()
    world.on(other)
    there = other.runtime.routes.of(route.descriptor)
    world.behaviour = lambda hosted, header, args: HostedActorGoneError(hosted.spec.instance_id)
    arrived: list[str] = []
    world.is_there = lambda args: args[0] in arrived
    early, late = world.call(other, there, "early"), world.call(other, there, "late")
    for name, future in (("early", early), ("late", late)):
        world.settle()
        arrived.append(name)
        world.tasks += [(place, hosted.work) for hosted in place.actors_here.values()]
        world.settle()
        assert isinstance(_outcome(future), ActorUnavailableError)  # its supervisor can reach it


# -- thousands of interleavings --------------------------------------------------------------------------------


@pytest.mark.limit(100)
@pytest.mark.parametrize("block", rest_is_slow(range(10), 3))
def test_every_call_ends_once_and_in_order(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    for seed in range(block * 200, block * 200 + 200):
        _play(monkeypatch, seed)


def _play(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    world = World(monkeypatch, seed, workers=4, spawner=seed % 2 == 0)
    chance = world.random
    restarts, retries = chance.choice([0, 1, 2, -1]), chance.choice([0, 0, 1, 2])
    driver, other = world.workers[0], world.workers[3]
    route = world.create(driver, max_restarts=restarts, max_task_retries=retries, restart_backoff_s=0.1)
    routes = {driver.record.name: (driver, route)}
    futures: list[tuple[str, int, ResultFuture]] = []
    ends: dict[int, int] = {}
    given_up: set[int] = set()
    fails = chance.choice([0.0, 0.3])
    options = CallOptions().merged(max_task_retries=retries, retry_exceptions=True)
    results: dict[int, Future[Any]] = {}
    number = 0
    deaths = 0
    watched = route.watch()

    def behaviour(hosted: Any, header: Any, args: Any) -> Any:
        return KeyError("x") if chance.random() < fails else args[0]

    def is_there(args: Any) -> bool:
        """A list names the call whose result it needs."""
        return not args or not isinstance(args[0], list) or len(args[0]) < 2 or results[args[0][1]].done()

    world.behaviour, world.is_there = behaviour, is_there
    for _ in range(chance.randrange(20, 60)):
        what = chance.random()
        if what < 0.45:
            name = chance.choice(list(routes))
            worker, way = routes[name]
            world.on(worker)
            argument: Any = number if chance.random() < 0.6 else [number]
            mine = [which for maker, which, _ in futures if maker == name]
            if mine and chance.random() < 0.2:
                argument = [number, chance.choice(mine)]
            future = way.call(
                INFO.methods["step"],
                options,
                (argument,),
                {},
                refs=True,
                timeout=chance.choice([None, None, 5.0]),
            )
            ends[number] = 0

            def count(_: Any, number: int = number) -> None:
                ends[number] += 1

            future.add_done_callback(count)
            futures.append((name, number, future))
            results[number] = future
            number += 1
        elif what < 0.5 and deaths < 3:
            homes = [each for each in world.workers if each.actors_here and each not in (driver, other)]
            if homes:
                deaths += 1
                chance.choice(homes).die()
        elif what < 0.52 and "w3" not in routes:
            world.on(other)
            routes["w3"] = (other, other.runtime.routes.of(route.descriptor))
        elif what < 0.54 and futures:
            _, which, future = chance.choice(futures)
            if future.cancel():
                given_up.add(which)
        elif what < 0.55:
            world.on(driver)
            route.kill(no_restart=False)
        else:
            for _ in range(chance.randrange(1, 12)):
                world.step()
            for maker, (_, way) in routes.items():
                left = [which for name, which, future in futures if name == maker and not future.done()]
                assert way.pending >= len(left), f"seed {seed}, {maker}: {way.pending} calls, not {left}"
    world.settle(100)
    fails = 0.0
    executed: dict[int, int] = {}
    order: dict[tuple[int, str], list[int]] = {}
    for _, epoch, caller, argument in world.log:
        value = argument[0] if isinstance(argument, list) else argument
        executed[value] = executed.get(value, 0) + 1
        values = order.setdefault((epoch, caller), [])
        if value not in values:  # what is made again comes later
            values.append(value)
    for name, which, future in futures:
        context = f"seed {seed}, call {which} of {name}"
        assert future.done(), f"{context} never ended"
        assert ends[which] == 1, f"{context} ended {ends[which]} times"
        times = executed.get(which, 0)
        outcome = _outcome(future)
        assert times <= 1 + retries, f"{context} was executed {times} times: {outcome!r}"
        if not isinstance(outcome, BaseException):
            assert times >= 1, context
        else:
            assert isinstance(
                outcome,
                (ActorDiedError, ActorUnavailableError, CancelledError, RpcTimeoutError, KeyError),
            ), f"{context}: {outcome!r}"
            if isinstance(outcome, KeyError):
                continue
            assert isinstance(outcome, CancelledError) == (which in given_up), context
            if outcome.maybe_executed is False:
                assert times == 0, f"{context} was executed: {outcome!r}"
            assert outcome.maybe_executed is not None
    for (epoch, caller), values in order.items():
        assert values == sorted(values), f"seed {seed}: {caller} in epoch {epoch}: {values}"
    for _, way in routes.values():
        assert way.pending == 0, f"seed {seed}"
    states = driver.runtime.supervisor.states()
    if states[0].state == "DEAD":
        assert watched.done(), f"seed {seed}"
    else:
        assert not watched.done()
        world.on(driver)
        final = world.call(driver, route, -1)
        world.settle()
        assert _outcome(final) == -1, f"seed {seed}"
