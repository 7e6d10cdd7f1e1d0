"""Ends of supervision groups, in a simulation that follows a seed: giving up, leaving, end(), and notifications."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from actorrpc.actors.groups.supervision import Supervision
from actorrpc.actors.supervision.strategies import STRATEGIES
from actorrpc.agent.context import set_worker
from actorrpc.errors import (
    ActorDiedError,
    ConfigError,
    SupervisionError,
)
from tests.actors.fleet import World
from tests.actors.scene import Scene, error_of


@pytest.fixture(autouse=True)
def _no_runtime() -> Iterator[None]:
    yield
    set_worker(None)


# -- giving up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spawner", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.prints("supervision group 'web': it has given up after 2 restarts within 1000 s")
def test_a_group_gives_up_after_max_restarts_and_ends_all_its_children(
    monkeypatch: pytest.MonkeyPatch, strategy: Any, spawner: bool
) -> None:
    scene = Scene(monkeypatch, 3, spawner=spawner)
    failures: list[SupervisionError] = []
    group = scene.group(
        0, 1, 2, strategy=strategy, max_restarts=2, period=1000.0, name="web", on_failure=failures.append
    )
    over, watched = group.monitor(), [route.watch() for route in scene.routes]
    for _ in range(2):
        scene.kill(1)
        scene.settled_events()
    assert group.state == "up"
    assert not over.done()
    scene.kill(1)
    call = scene.world.call(scene.driver, scene.routes[0], 1)
    assert scene.settled_events() == ["-1", "-2", "-0"]
    assert scene.living() == []
    assert group.state == "failed"
    (error,) = failures
    assert over.value() is error
    text = str(error)
    assert text.startswith("supervision group 'web': it has given up after 2 restarts within 1000 s")
    assert (
        text.count("it was killed with kill()") == 4
    )  # once for the last death, and in the list of all three
    for death in watched:
        assert "supervision group 'web', which it belongs to, has ended: it has given up" in str(
            death.value()
        )
    if call.exception() is not None:
        assert isinstance(call.exception(), ActorDiedError)
    late = scene.world.call(scene.driver, scene.routes[2], 1)
    scene.world.settle()
    assert "max_restarts=2" in str(error_of(late))
    assert group.monitor().value() is error
    assert len(failures) == 1


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


def test_children_are_restarted_on_the_workers_where_they_were_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Handle:
        _is_actor_handle = True

    scene = Scene(monkeypatch, 0)
    near = Handle()
    for number, place in enumerate(["w2", near, None]):
        scene.routes.append(scene.world.create(scene.driver, max_restarts=-1, worker=place))
        scene.names[scene.routes[number].actor_id] = number
        near.__dict__["_actorrpc_route"] = scene.routes[0]
    scene.world.settle()
    scene.group(0, 1, 2, strategy="one_for_all")
    for turn in (1, 2):
        scene.kill(2)
        scene.world.settle()
        assert [scene.resident(number).worker.record.name for number in range(2)] == ["w2", "w2"]
        assert [scene.resident(number).spec.epoch for number in range(3)] == [turn] * 3


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


def test_an_inner_group_ends_with_its_outer_group_after_all_its_children_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, 3)
    inner = scene.group(1, 2)
    outer = scene.group(0, inner, strategy="one_for_all")
    for number in (1, 2):
        scene.routes[number].kill()
    scene.world.settle()
    assert (inner.state, outer.state) == ("up", "up")
    scene.events.clear()
    scene.kill(0)
    assert scene.settled_events() == ["-0", "+0"]
    scene.routes[0].kill()
    scene.world.settle()
    assert (inner.state, outer.state) == ("ended", "ended")
    assert inner.monitor().value() is None
    assert outer.monitor().value() is None


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
        monkeypatch.setattr(Supervision, "monitor", partial(_settles, scene.world))
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
