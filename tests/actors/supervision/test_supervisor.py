"""The supervisor in a simulation that follows a seed: placement, restarts, reports, ends and names of actors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from actorrpc import errors
from actorrpc.actors.spec.actor_spec import ActorState, SharedSlot
from actorrpc.actors.spec.options import NEW_PROCESS
from actorrpc.agent.context import set_worker
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerInfo
from tests.actors.fleet import Worker, World
from tests.actors.scene import error_of


@pytest.fixture(autouse=True)
def _no_runtime() -> Iterator[None]:
    yield
    set_worker(None)


def _state(worker: Worker) -> ActorState:
    return worker.runtime.supervisor.states()[0]  # type: ignore[no-any-return]


# -- placement -----------------------------------------------------------------------------------------------


def test_actors_are_placed_round_robin_on_the_other_living_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1, workers=4)
    driver = world.workers[0]
    routes = [world.create(driver) for _ in range(6)]
    world.settle()
    assert [len(each.actors_here) for each in world.workers] == [0, 2, 2, 2]
    world.workers[2].die()
    world.settle()
    more = [world.create(driver) for _ in range(4)]
    world.settle()
    assert [len(each.actors_here) for each in world.workers[:2]] == [0, 4]
    del routes, more


def test_placing_an_actor_on_an_unknown_or_dead_worker_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    with pytest.raises(errors.UnknownWorkerError):
        world.create(world.workers[0], worker="nobody")
    with pytest.raises(errors.ConfigError, match="needs the embedded cluster"):
        world.create(world.workers[0], worker=NEW_PROCESS)
    world.workers[0].agent.peer(2)
    world.workers[2].die()
    world.settle()
    with pytest.raises(errors.PeerDiedError):
        world.create(world.workers[0], worker="w2")
    assert world.workers[0].runtime.supervisor.states() == []


def test_an_actor_dies_with_the_error_if_its_process_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, 1, workers=1, spawner=True)
    assert world.spawner is not None
    world.spawner.refuse = True
    route = world.create(world.workers[0], max_restarts=-1)
    future = world.call(world.workers[0], route, 1)
    world.settle()
    error = error_of(future)
    assert isinstance(error, errors.ActorDiedError)
    assert isinstance(error.cause, OSError)
    assert "no process could be started for it: OSError: no more processes" in str(error)


# -- restarts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noticed", [True, False])
def test_a_placement_on_a_dead_worker_is_repeated_without_counting_as_restart(
    monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    """The scheduler may notice the death of a worker later than the supervisors of its actors, or never."""
    world = World(monkeypatch, 1, workers=3, spawner=True)
    driver, first, other = world.workers
    assert world.spawner is not None
    asked: list[float] = []

    def spawn(spec: Any) -> Future[WorkerInfo]:
        asked.append(world.clock.now())
        where = other.record if noticed and len(asked) > 5 else first.record
        slot: Future[WorkerInfo] = Future()
        slot.set_result(SharedSlot(where.name, where.rank, booking=spec.booking))
        return slot

    given_back: list[int] = []
    world.spawner.spawn = spawn  # type: ignore[method-assign]
    world.spawner.give_back = given_back.append  # type: ignore[attr-defined]
    route = world.create(driver, max_restarts=1)
    world.settle()
    assert _state(driver).worker == first.record.name
    first.die()
    future = world.call(driver, route, 1)
    world.settle()
    row = _state(driver)
    assert row.restarts == 1
    if noticed:
        assert len(asked) == 6
        assert (row.state, row.worker) == ("ALIVE", other.record.name)
        late = world.call(driver, route, 2)
        world.settle()
        assert late.value() == 2
        assert len(set(given_back)) == 5
    else:
        assert row.state == "DEAD"
        assert 30.0 < asked[-1] - asked[1] < 31.0
        assert isinstance(error_of(future), errors.ActorDiedError)


# -- ends ------------------------------------------------------------------------------------------------------------


def test_kill_ends_an_actor_at_every_stage_of_its_life(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100):
        world = World(monkeypatch, seed, spawner=seed % 2 == 0)
        driver = world.workers[0]
        route = world.create(driver, max_restarts=-1)
        futures = [world.call(driver, route, number) for number in range(3)]
        for _ in range(seed // 2):
            world.step()
        world.on(driver)
        route.kill()
        world.settle()
        late = world.call(driver, route, 9)
        world.settle()
        for future in futures:
            assert future.done()
            future.exception()
        assert isinstance(error_of(late), errors.ActorDiedError)
        assert not any(each.actors_here for each in world.workers if not each.dead), seed


def test_dropping_the_last_handle_ends_an_actor_at_every_stage_of_its_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(100):
        world = World(monkeypatch, seed, spawner=seed % 2 == 0)
        driver = world.workers[0]
        route = world.create(driver, max_restarts=-1)
        future = world.call(driver, route, 1) if seed % 3 == 0 else None
        for _ in range(seed // 2):
            world.step()
        watched = route.watch()
        del route
        world.settle()
        assert future is None or future.value() == 1
        assert "its last handle is gone" in str(watched.value()), seed
        assert not any(each.actors_here for each in world.workers), seed


def test_the_supervisor_remembers_a_limited_number_of_dead_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1, remembered=2)
    driver = world.workers[0]
    routes = [world.create(driver) for _ in range(3)]
    world.settle()
    for route in routes:
        route.kill()
        world.settle()
    assert len(driver.runtime.supervisor.states()) == 2
    last, before = reversed(driver.runtime.supervisor.states())
    assert driver.runtime.supervisor.page(0, 5, dead=1) == ([last], False)
    assert driver.runtime.supervisor.page(0, 1, dead=5) == ([last], True)
    assert driver.runtime.supervisor.page(1, 1, dead=5) == ([before], False)
    causes = [str(route.watch().value()) for route in routes]
    assert "no longer has a record of it" in causes[0]
    assert "it was killed with kill()" in causes[2]


def test_a_caller_that_cannot_reach_a_living_actor_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    driver, place, other = world.workers
    route = world.create(driver, worker="w1")
    world.settle()
    world.on(other)
    there = other.runtime.routes.of(route.descriptor)
    peer = other.agent.peer(place.record.rank)
    peer.out_of_reach = "worker 'w1' on host h cannot be reached (no answer)"
    begun = world.clock.now()
    failed = world.call(other, there, 1)
    world.settle(2)
    error = error_of(failed)
    assert isinstance(error, errors.ActorUnavailableError)
    assert "it was not executed, and is not made again: worker 'w1' on host h cannot be reached" in str(error)
    assert error.maybe_executed is False
    assert world.clock.now() - begun < 3
    peer.out_of_reach = ""
    later = world.call(other, there, 2)
    world.settle()
    assert later.value() == 2


def test_the_error_after_max_restarts_lists_all_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1, workers=1, spawner=True)
    driver = world.workers[0]
    route = world.create(driver, max_restarts=2, restart_window_s=60.0, restart_backoff_s=0.01)
    for number in range(3):
        world.settle()
        if number == 1:
            world.on(driver)
            route.kill(no_restart=False)
        else:
            world.workers[-1].die()
    world.settle()
    future = world.call(driver, route, 1)
    world.settle()
    text = str(error_of(future))
    assert "not restarted again: it was restarted 2 times within 60 s, and max_restarts is 2" in text
    before = text.split("before that, it had died like this:")[1].split("\n")[1:]
    assert len(before) == 2
    assert "was ended by SIGKILL" in before[0]
    assert "killed with kill()" in before[1]


def test_monitors_fire_exactly_once_if_the_supervisor_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100):
        world = World(monkeypatch, seed)
        creator, watcher = world.workers[1:]
        route = world.create(creator, max_restarts=-1)
        world.settle()
        world.on(watcher)
        there = watcher.runtime.routes.of(replace(route.descriptor, anchor=None))
        fired: list[errors.ActorDiedError] = []
        for _ in range(3):
            world.on(watcher)
            there.watch().add_done_callback(lambda done, fired=fired: fired.append(done.value()))  # type: ignore[misc]
            for _ in range(world.random.randrange(6)):
                world.step()
        assert not fired
        if seed % 2:
            world.on(creator)
            route.kill()
            for _ in range(world.random.randrange(6)):
                world.step()
        creator.die()
        world.settle()
        world.on(watcher)
        there.watch().add_done_callback(lambda done, fired=fired: fired.append(done.value()))  # type: ignore[misc]
        world.settle()
        assert len(fired) == 4
        assert all(type(each) is errors.ActorDiedError for each in fired)


# -- names ---------------------------------------------------------------------------------------------------


def _run(world: World, worker: int, what: str, *args: object, **options: object) -> object:
    """Call a function of the name registry from a worker."""
    names = world.workers[worker].runtime.names
    world.on(world.workers[worker])
    return getattr(names, what)(*args, **options)


def test_names_of_a_dead_creator_are_free_unless_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    route = world.create(world.workers[2], name="clock", worker="w1")
    detached = world.create(world.workers[2], name="wall", worker="w1", lifetime="detached")
    world.settle()
    world.workers[2].die()
    world.settle()
    with pytest.raises(errors.UnknownActorError, match="wall"):
        _run(world, 1, "lookup", "clock")
    assert _run(world, 1, "lookup", "wall").actor_id == detached.actor_id  # type: ignore[attr-defined]
    late = world.call(world.workers[1], world.workers[1].runtime.routes.of(route.descriptor), 1)
    world.settle()
    assert late.done()
    assert isinstance(late.exception(), errors.ActorDiedError) or late.value() == 1


def test_lookup_raises_if_rank_0_which_keeps_the_names_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    with pytest.raises(errors.UnknownActorError):
        _run(world, 1, "lookup", "x")
    world.workers[0].die()
    world.settle()
    with pytest.raises(errors.PeerDiedError, match="names are kept by rank 0"):
        _run(world, 1, "lookup", "x")
