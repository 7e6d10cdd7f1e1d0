"""Supervision groups in a simulation that follows a seed: restarts, deaths, ends, monitors, and refused children."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from actorrpc.actors.client.handle import ActorHandle
from actorrpc.actors.client.route import Route
from actorrpc.actors.groups.supervision import Supervision, supervise
from actorrpc.actors.supervision.strategies import STRATEGIES
from actorrpc.agent.context import set_worker
from actorrpc.errors import (
    ActorDiedError,
    ConfigError,
    SupervisionError,
    WrongTypeError,
)
from tests.actors.fleet import World
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


# -- giving up ------------------------------------------------------------------------------------------------------


@pytest.mark.prints(r"supervision group .*: it has given up after .* its constructor raised")
def test_a_constructor_that_raises_during_a_restart_counts_as_a_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, 2)
    group = scene.group(0, 1, max_restarts=4)
    errors = [ValueError("not yet"), ValueError("nor now")]
    scene.refuse = lambda number: errors.pop(0) if errors else None
    scene.kill(1)
    assert scene.settled_events() == ["-1", "!1", "!1", "+1"]
    assert group.state == "up"
    scene.refuse = lambda number: ValueError("never again")
    scene.kill(1)
    over = group.monitor()
    scene.world.settle()
    error = over.value()
    assert isinstance(error, SupervisionError)
    assert "its constructor raised ValueError: never again" in str(error)
    assert "its constructor raised ValueError: not yet" in str(error)
    assert scene.living() == []


@pytest.mark.prints(
    r"supervision group #\d+: it has given up: .* its constructor raised ValueError: wrong arguments"
)
def test_a_group_fails_if_the_first_construction_of_a_child_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 2)
    scene.refuse = lambda number: ValueError("wrong arguments") if number == 2 else None
    scene.routes.append(scene.world.create(scene.driver, max_restarts=-1))
    scene.names[scene.routes[2].actor_id] = 2
    group = scene.group(0, 1, 2)
    assert scene.settled_events() == ["!2", "-1", "-0"]
    error = group.monitor().value()
    assert error is not None
    assert isinstance(error.cause, ValueError)
    assert "wrong arguments" in str(error)
    late = scene.world.call(scene.driver, scene.routes[0], 1)
    scene.world.settle()
    assert isinstance(error_of(late), ActorDiedError)


# -- nested -----------------------------------------------------------------------------------------------------------


@pytest.mark.prints("supervision group 'outer': it has given up after 2 restarts within 60 s")
def test_an_inner_group_that_gives_up_is_restarted_by_its_outer_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for spawner in (False, True):
        scene = Scene(monkeypatch, 5, spawner=spawner)
        inner = scene.group(1, 2, strategy="one_for_all", max_restarts=1, name="inner")
        deep = scene.group(3, max_restarts=0, name="deep")
        outer = scene.group(0, inner, deep, 4, strategy="rest_for_one", max_restarts=2, name="outer")
        scene.kill(2)
        assert scene.settled_events() == ["-2", "-1", "+1", "+2"]
        assert (inner.restarts, outer.restarts) == (2, 0)
        scene.kill(1)  # The inner group gives up; the outer group restarts it and all later children.
        assert scene.settled_events() == ["-1", "-2", "-4", "-3", "+1", "+2", "+3", "+4"]
        scene.kill(1)  # the restart count of the inner group was reset
        assert scene.settled_events() == ["-1", "-2", "+1", "+2"]
        scene.kill(3)
        assert scene.settled_events() == ["-3", "-4", "+3", "+4"]
        assert {group.state for group in (inner, deep, outer)} == {"up"}
        scene.kill(3)
        assert scene.settled_events() == ["-3", "-4", "-2", "-1", "-0"]
        assert {group.state for group in (inner, deep, outer)} == {"failed"}
        error = outer.monitor().value()
        assert error is not None
        assert inner.monitor().value() is error
        assert "supervision group 'deep': it has given up after no restart within 60 s" in str(error)
        monkeypatch.undo()


@pytest.mark.prints(r"supervision group #\d+: it has given up: .* worker= has put it there")
def test_all_enclosing_groups_fail_if_the_worker_of_a_placed_child_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, 2)
    scene.routes.append(scene.world.create(scene.driver, max_restarts=-1, worker="w2"))
    scene.names[scene.routes[2].actor_id] = 2
    scene.world.settle()
    inner = scene.group(1, 2)
    outer = scene.group(0, inner)
    scene.world.workers[2].die()
    scene.world.settle()
    assert (inner.state, outer.state) == ("failed", "failed")
    assert "worker= has put it there" in str(outer.monitor().value())
    assert scene.living() == []


# -- leaving and ending -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_child_that_exits_or_is_killed_leaves_its_group(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    scene = Scene(monkeypatch, 3)
    group = scene.group(0, 1, 2, strategy="one_for_all")
    if how == "kill":
        scene.routes[1].kill()
    else:
        scene.driver.runtime.supervisor.note_ended(scene.routes[1].actor_id, 0, "exit", "exit_actor()")
    scene.world.settle()
    scene.events.clear()
    assert group.state == "up"
    del scene.routes[1]
    scene.kill(0)
    assert scene.settled_events() == ["-0", "-2", "+0", "+2"]
    for route in scene.routes:
        route.kill()
    scene.world.settle()
    assert group.state == "ended"
    assert group.monitor().value() is None


def test_end_stops_all_children_in_reverse_order_and_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        scene = Scene(monkeypatch, 4, seed, spawner=seed % 2 == 0)
        failures: list[Any] = []
        inner = scene.group(2, 3)
        group = scene.group(0, 1, inner, on_failure=failures.append)
        with pytest.raises(ConfigError, match="is a child of"):
            inner.end()
        if seed % 3 == 0:
            scene.kill(1)
            for _ in range(seed):
                scene.world.step()
        monkeypatch.setattr(Supervision, "monitor", staticmethod(partial(_settles, scene.world)))
        scene.world.on(scene.driver)
        with group:
            pass
        if seed % 3:
            assert scene.events == ["-3", "-2", "-1", "-0"]
        assert scene.living() == []
        assert (group.state, inner.state) == ("ended", "ended")
        group.end()
        late = scene.world.call(scene.driver, scene.routes[2], 1)
        scene.world.settle()
        assert "which it belongs to, was ended" in str(error_of(late))
        assert not failures
        monkeypatch.undo()


def _settles(world: World) -> _Settles:
    return _Settles(world)


class _Settles:
    def __init__(self, world: World) -> None:
        self._world = world

    def wait(self, timeout: float) -> None:
        self._world.settle()


def test_shutdown_of_the_supervisor_ends_the_group_without_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 2)
    failures: list[Any] = []
    group = scene.group(0, 1, strategy="one_for_all", on_failure=failures.append)
    monkeypatch.setattr(
        "actorrpc.actors.supervision.supervisor.collect_all", lambda futures: _Settles(scene.world)
    )
    scene.driver.runtime.supervisor.close(True)
    scene.world.settle()
    assert group.monitor().value() is None
    assert (scene.living(), failures) == ([], [])


def test_a_group_keeps_its_children_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 2)
    group = scene.group(0, 1)
    scene.routes.clear()
    gc.collect()
    scene.world.settle()
    assert scene.living() == [0, 1]
    assert len(group.children) == 2
    del group
    gc.collect()
    scene.world.settle()
    assert scene.living() == []


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
