"""Routes and their call queues: every call ends once and in order, and is repeated only where its options allow it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from actorrpc import errors
from actorrpc.actors.client import supervisor_client
from actorrpc.actors.client.pending_call import ResultFuture
from actorrpc.actors.spec.actor_spec import HostedActorGoneError
from actorrpc.actors.spec.options import CallOptions
from actorrpc.agent.context import set_worker
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


def _settled(world: World, future: Future[Any]) -> Future[Any]:
    world.settle()
    return future


def test_a_call_to_an_actor_under_construction_times_out_as_not_executed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, 8, spawner=True)
    driver = world.workers[0]
    route = world.create(driver)
    world.tasks.clear()  # the actor is never made
    future = world.call(driver, route, 1, timeout=2.0)
    late = world.call(driver, route, 2)
    world.settle(5)
    error = _outcome(future)
    assert isinstance(error, errors.RpcTimeoutError)
    assert error.maybe_executed is False
    assert "to be created" in str(error)
    assert not late.done()
    driver.runtime.routes.close()
    error = _outcome(late)
    assert isinstance(error, errors.ShutdownError)


def test_actor_errors_keep_their_attributes_on_the_wire() -> None:
    cause = ValueError("no")
    cause.__cause__ = errors.RemoteTraceback("the lines of another worker")
    error = errors.ActorDiedError(
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
    assert isinstance(raised, errors.RemoteError)
    for each in (twice, exceptions.original(raised)):
        assert type(each) is errors.ActorDiedError
        assert each.args == ("it is dead",)
        assert (each.maybe_executed, each.worker, each.actor, each.method) == (False, "w", "A#1", "m")
        assert each.report == {"exit_code": 3}
        assert type(each.cause) is ValueError
        assert each.__cause__ is each.cause
        assert str(each.cause.__cause__).strip() == "the lines of another worker"


def test_an_actor_without_its_supervisor_serves_callers_that_have_its_location(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(10):
        world = World(monkeypatch, seed)
        driver, place, other = world.workers
        route = world.create(driver, worker="w1", max_restarts=5)
        route.queue.located()
        world.settle()
        world.on(other)
        there = other.runtime.routes.of(route.descriptor)
        assert _outcome(_settled(world, world.call(other, there, 1))) == 1
        watched = there.watch()
        driver.die()
        world.settle()
        # The actor lives on and serves callers that already have its location.
        assert _outcome(_settled(world, world.call(other, there, 2))) == 2
        assert isinstance(watched.value(), errors.ActorDiedError)
        assert "'w0', its supervisor, has ended" in str(watched.value())
        place.die()
        error = _outcome(_settled(world, world.call(other, there, 3)))
        assert isinstance(error, errors.ActorDiedError)
        assert "'w0', its supervisor, has ended" in str(error)


def test_calls_end_with_shutdown_error_when_the_supervisor_leaves_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, 3)
    driver, _, other = world.workers
    route = world.create(driver)
    world.tasks.clear()  # the actor is never made
    world.on(other)
    there = other.runtime.routes.of(route.descriptor)
    future = world.call(other, there, 1)
    monkeypatch.setattr(supervisor_client, "current", lambda: None)
    _settled(world, future)
    report = future._report
    assert report is not None
    assert report.seen  # not reported as never retrieved: its caller ends as well
    error = _outcome(future)
    assert isinstance(error, errors.ShutdownError)
    assert "leaves its group, and its actors end with it" in str(error)


def test_a_broken_stream_asks_the_supervisor_why_before_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream's connection has failed, but its worker is not known to be dead: the route asks for the state of the actor."""
    world = World(monkeypatch, 1, workers=3)
    driver = world.workers[0]
    route = world.create(driver)
    route.queue.located()
    world.settle()
    location, peer = route.queue.place
    explain = partial(route.explain, INFO.methods["step"], CallOptions())
    error = peer.died("the stream", maybe_executed=True)
    found = explain(error, driver.agent.peer("w0"))  # the error comes from an earlier incarnation
    assert isinstance(found, errors.ActorUnavailableError)
    assert "it has been restarted" in str(found)
    found = explain(error, peer)
    assert isinstance(found, Future)
    assert peer.state == "alive"
    next(each for each in world.workers if each.record.name == location.worker_name).die()
    world.settle()
    died = _outcome(found)
    assert isinstance(died, errors.ActorDiedError)
    assert died.maybe_executed is True
    assert location.worker_name in str(died)


def test_each_call_that_finds_its_actor_gone_looks_up_the_location_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, 1)
    driver, place, other = world.workers
    route = world.create(driver, worker="w1", max_restarts=1)
    route.queue.located()
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
        assert isinstance(
            _outcome(future), errors.ActorUnavailableError
        )  # its supervisor still reaches the actor


@pytest.mark.limit(100)
@pytest.mark.parametrize("block", rest_is_slow(range(10), 3))
def test_every_call_ends_once_and_in_order_with_random_deaths(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
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
                assert way.queue.pending >= len(left), (
                    f"seed {seed}, {maker}: {way.queue.pending} calls, not {left}"
                )
    world.settle(100)
    fails = 0.0
    executed: dict[int, int] = {}
    order: dict[tuple[int, str], list[int]] = {}
    for _, epoch, caller, argument in world.log:
        value = argument[0] if isinstance(argument, list) else argument
        executed[value] = executed.get(value, 0) + 1
        values = order.setdefault((epoch, caller), [])
        if value not in values:  # repeated calls come later
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
                (
                    errors.ActorDiedError,
                    errors.ActorUnavailableError,
                    errors.CancelledError,
                    errors.RpcTimeoutError,
                    KeyError,
                ),
            ), f"{context}: {outcome!r}"
            if isinstance(outcome, KeyError):
                continue
            assert isinstance(outcome, errors.CancelledError) == (which in given_up), context
            if outcome.maybe_executed is False:
                assert times == 0, f"{context} was executed: {outcome!r}"
            assert outcome.maybe_executed is not None
    for (epoch, caller), values in order.items():
        assert values == sorted(values), f"seed {seed}: {caller} in epoch {epoch}: {values}"
    for _, way in routes.values():
        assert way.queue.pending == 0, f"seed {seed}"
    states = driver.runtime.supervisor.states()
    if states[0].state == "DEAD":
        assert watched.done(), f"seed {seed}"
    else:
        assert not watched.done()
        world.on(driver)
        final = world.call(driver, route, -1)
        world.settle()
        assert _outcome(final) == -1, f"seed {seed}"
