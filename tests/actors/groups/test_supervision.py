"""Supervision groups in a simulation that follows a seed: order of restarts, deaths, monitors, and refused children."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from actorrpc.actors.client.handle import ActorHandle
from actorrpc.actors.client.route import Route
from actorrpc.actors.groups.supervision import supervise
from actorrpc.actors.supervision.strategies import STRATEGIES
from actorrpc.agent.context import set_worker
from actorrpc.errors import (
    ActorDiedError,
    ActorUnavailableError,
    ConfigError,
    SupervisionError,
    WrongTypeError,
)
from tests.actors.scene import Scene, error_of


@pytest.fixture(autouse=True)
def _no_runtime() -> Iterator[None]:
    yield
    set_worker(None)


# -- strategies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spawner", [False, True])
@pytest.mark.parametrize(
    ("strategy", "events"),
    [
        ("one_for_one", "-1 +1"),
        ("one_for_all", "-1 -3 -2 -0 +0 +1 +2 +3"),
        ("rest_for_one", "-1 -3 -2 +1 +2 +3"),
    ],
)
def test_each_strategy_ends_and_restarts_children_in_its_order(
    monkeypatch: pytest.MonkeyPatch, strategy: Any, events: str, spawner: bool
) -> None:
    for seed in range(10):
        scene = Scene(monkeypatch, 4, seed, spawner)
        group = scene.group(0, 1, 2, 3, strategy=strategy)
        scene.kill(1)
        assert scene.settled_events() == events.split()
        assert scene.living() == [0, 1, 2, 3]
        assert group.state == "up"
        monkeypatch.undo()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_death_of_a_process_restarts_children_by_the_strategy(
    monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    scene = Scene(monkeypatch, 3, spawner=True)
    group = scene.group(0, 1, 2, strategy=strategy)
    scene.resident(1).worker.die()
    scene.world.settle()
    assert scene.living() == [0, 1, 2]
    assert group.restarts == {"one_for_one": 1, "one_for_all": 3, "rest_for_one": 2}[strategy]
    rows = {scene.names[row.actor_id]: row for row in scene.driver.runtime.supervisor.states()}
    assert rows[1].restarts == 1
    assert rows[0].restarts == (1 if strategy == "one_for_all" else 0)
    if strategy == "rest_for_one":
        assert "was ended with the other children of supervision group" in rows[2].death_cause


def test_calls_made_during_a_restart_run_on_the_next_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(30):
        scene = Scene(monkeypatch, 2, seed, spawner=seed % 2 == 0)
        scene.group(0, 1, strategy="one_for_all", backoff=1.0)
        scene.kill(0)
        for _ in range(seed):
            scene.world.step()
        futures = [scene.world.call(scene.driver, scene.routes[1], number) for number in range(4)]
        scene.world.settle()
        for number, future in enumerate(futures):
            error = future.exception()
            if error is None:
                assert future.value() == number
            else:
                assert isinstance(error, ActorUnavailableError), error
        late = scene.world.call(scene.driver, scene.routes[1], 9)
        scene.world.settle()
        assert late.value() == 9
        monkeypatch.undo()


def test_the_back_off_of_a_group_doubles_and_is_jittered(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: dict[float, list[float]] = {}
    for jitter in (0.0, 1.0):
        scene = Scene(monkeypatch, 1)
        scene.world.jitter = jitter
        scene.group(0, max_restarts=10, backoff=1.0)
        for _ in range(4):
            began = scene.world.clock.now()
            scene.kill(0)
            while "+0" not in scene.events:
                if not scene.world.step():
                    scene.world.clock.advance(0.05)
            scene.events.clear()
            waits.setdefault(jitter, []).append(round(scene.world.clock.now() - began, 1))
            while scene.world.step():
                pass
        monkeypatch.undo()
    assert waits == {0.0: [0.0, 1.0, 2.0, 4.0], 1.0: [0.0, 0.5, 1.0, 2.0]}


def test_children_that_die_together_are_each_restarted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late action that ends a dead incarnation must not end the next one."""
    for seed in range(60):
        scene = Scene(monkeypatch, 3, seed, spawner=True)
        scene.scatter(monkeypatch)
        group = scene.group(0, 1, 2, strategy="one_for_all", backoff=0.0)
        for number in range(3):
            scene.resident(number).worker.die()
        scene.world.settle()
        assert scene.living() == [0, 1, 2]
        assert group.restarts == 3
        monkeypatch.undo()


def test_a_restart_planned_before_the_group_existed_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The restart runs once and in the order of the group."""
    for seed in range(20):
        scene = Scene(monkeypatch, 2, seed, spawner=seed % 2 == 0, restart_backoff_s=5.0)
        for _ in range(2):
            scene.kill(1)
            scene.world.settle(1.0)
        assert scene.living() == [0]
        scene.events.clear()
        group = scene.group(0, 1, strategy="one_for_all", backoff=0.0)
        for _ in range(seed):
            scene.world.step()
        scene.kill(0)
        assert scene.settled_events() == ["-0", "+0", "+1"]
        assert scene.living() == [0, 1]
        assert group.state == "up"
        monkeypatch.undo()


# -- random deaths ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_incarnation_runs_a_call_that_was_meant_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call runs at most once and completes; a call that was reported as lost does not run later."""
    restarts = 0
    for seed in range(300):
        scene = Scene(monkeypatch, 3, seed, spawner=seed % 2 == 0)
        world = scene.world
        if seed % 4 < 2:
            scene.scatter(monkeypatch)
        group = scene.group(0, 1, 2, strategy=STRATEGIES[seed % 3], max_restarts=1000, backoff=0.01)
        calls: list[tuple[int, Any]] = []
        lost: dict[int, int] = {}  # failed call -> number of executed calls at that time
        for number in range(200):
            what = world.random.randrange(10)
            if what == 0:
                scene.kill(world.random.randrange(3))
            elif what < 4:
                calls.append(
                    (number, world.call(scene.driver, scene.routes[world.random.randrange(3)], number))
                )
            else:
                world.step()
            for each, future in calls:
                if each not in lost and future.done() and future.exception() is not None:
                    lost[each] = len(world.log)
        world.settle()
        ran = [entry[3] for entry in world.log]
        assert len(ran) == len(set(ran))
        for number, future in calls:
            assert future.done()
            if number in lost and not error_of(future).maybe_executed:  # type: ignore[attr-defined]
                assert number not in ran
            elif number in lost:
                assert number not in ran[lost[number] :]
            elif future.exception() is None:
                assert number in ran
        epochs: dict[int, int] = {}
        for actor_id, epoch, _, _ in world.log:  # an incarnation runs nothing after a later one has started
            assert epoch >= epochs.get(actor_id, 0)
            epochs[actor_id] = epoch
        assert scene.living() == [0, 1, 2]
        assert group.state == "up"
        restarts += group.restarts
        monkeypatch.undo()
    assert restarts > 1000


def _note(fired: list[Any], done: Any) -> None:
    fired.append(done.value())


@pytest.mark.prints(r"supervision group #\d+: it has given up after 1 restart within 60 s")
def test_monitors_of_children_and_group_fire_exactly_once_when_it_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(30):
        scene = Scene(monkeypatch, 3, seed, spawner=seed % 2 == 0)
        group = scene.group(0, 1, 2, strategy=STRATEGIES[seed % 3], max_restarts=1)
        fired: list[Any] = []
        for route in scene.routes:
            for _ in range(2):
                route.watch().add_done_callback(partial(_note, fired))
        group.monitor(fired.append)
        while group.state != "failed":
            scene.kill(scene.world.random.randrange(3))
            for _ in range(scene.world.random.randrange(30)):
                scene.world.step()
            scene.world.clock.advance(0.05)
        scene.world.settle()
        assert len(fired) == 7
        assert sum(type(each) is SupervisionError for each in fired) == 1
        assert scene.living() == []
        scene.routes[0].watch().add_done_callback(partial(_note, fired))
        assert len(fired) == 8  # at once
        monkeypatch.undo()


# -- invalid groups ------------------------------------------------------------------------------------------------


def test_invalid_children_and_options_of_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 2)
    one = scene.handle(0)
    for children in ([], ()):
        with pytest.raises(ConfigError, match="at least one child"):
            supervise(children)
    for wrong in (one, "abc", 7, [7], [one, None]):
        with pytest.raises(WrongTypeError, match="supervise\\(\\) takes"):
            supervise(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="given twice"):
        supervise([one, one])
    options: list[tuple[dict[str, Any], str]] = [
        ({"strategy": "all"}, "strategy must be one of 'one_for_one', 'one_for_all', 'rest_for_one'"),
        ({"max_restarts": -1}, "an int of at least 0 .*, not -1"),
        ({"max_restarts": 1.5}, "an int of at least 0 .*, not 1.5"),
        ({"max_restarts": True}, "an int of at least 0 .*, not True"),
        ({"period": 0}, "period must be a number of seconds above 0"),
        ({"period": float("inf")}, "period must be"),
        ({"backoff": -1}, "backoff must be a number of seconds of at least 0"),
        ({"backoff": "1"}, "backoff must be"),
        ({"name": ""}, "name must be"),
        ({"on_failure": 7}, "on_failure must be callable"),
    ]
    for given, text in options:
        with pytest.raises(ConfigError, match=text):
            supervise([one], **given)
    group = supervise([one])
    with pytest.raises(ConfigError, match="is a child of supervision group"):
        supervise([scene.handle(1), one])
    outer = supervise([group, scene.handle(1)])  # the refused group has not claimed its other child
    with pytest.raises(ConfigError, match="is a child of supervision group"):
        supervise([group])
    with pytest.raises(TypeError, match="callback must be callable"):
        outer.monitor(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stays in the process"):
        pickle.dumps(outer)
    assert "one_for_one, 2 children" in repr(outer)
    assert outer.children == (group, scene.handle(1))
    assert outer.strategy == "one_for_one"


def test_dead_foreign_and_unrestartable_actors_cannot_be_supervised(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 1, max_restarts=0)
    with pytest.raises(ConfigError, match="was made with max_restarts=0"):
        scene.group(0)
    scene.routes[0].kill()
    scene.world.settle()
    with pytest.raises(ActorDiedError, match="killed with kill"):
        scene.group(0)
    world = scene.world
    route: Route = world.create(world.workers[1], max_restarts=-1)
    world.settle()
    world.on(scene.driver)
    there = scene.driver.runtime.routes.of(route.descriptor)
    with pytest.raises(ConfigError, match="is supervised by worker 'w1'"):
        supervise([ActorHandle(there.descriptor, there)])
    own = world.create(scene.driver, max_restarts=-1)
    group = supervise([ActorHandle(own.descriptor, own)])
    own.kill()
    world.settle()
    with pytest.raises(ConfigError, match="has ended"):
        supervise([group])
