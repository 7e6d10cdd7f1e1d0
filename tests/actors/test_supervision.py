"""Supervision groups over a network that follows a seed: who ends and begins in what order, and who is told what."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from actorrpc.actors.handle import ActorHandle
from actorrpc.actors.route import Route
from actorrpc.actors.runtime import set_runtime
from actorrpc.actors.siblings import STRATEGIES
from actorrpc.actors.snapshot import Snapshot
from actorrpc.actors.supervision import Supervision, supervise
from actorrpc.errors import (
    ActorDiedError,
    ActorUnavailableError,
    ConfigError,
    SupervisionError,
    WrongTypeError,
)
from tests.actors.fleet import Resident, Worker, World


@pytest.fixture(autouse=True)
def _no_runtime() -> Iterator[None]:
    yield
    set_runtime(None)


class Scene:
    """A driver with some actors, which it can put into groups; what happens to their incarnations is written down."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        count: int,
        seed: int = 1,
        spawner: bool = False,
        **options: Any,
    ) -> None:
        self.world = World(monkeypatch, seed, workers=1 if spawner else 3, spawner=spawner)
        self.driver = self.world.workers[0]
        options.setdefault("max_restarts", -1)
        self.routes = [self.world.create(self.driver, **options) for _ in range(count)]
        self.names = {route.actor_id: number for number, route in enumerate(self.routes)}
        self.world.settle()
        self.events: list[str] = []
        self.refuse: Callable[[int], BaseException | None] = lambda number: None
        self.world.constructor = self._constructed
        ends = Resident.end

        def end(resident: Resident) -> None:
            if not resident.ended:
                self.events.append(f"-{self.names[resident.spec.actor_id]}")
            ends(resident)

        monkeypatch.setattr(Resident, "end", end)
        dies = Worker.die

        def die(worker: Worker) -> None:
            if not worker.dead:
                self.events.extend(
                    f"-{self.names[each.spec.actor_id]}" for each in worker.residents_here.values()
                )
            dies(worker)

        monkeypatch.setattr(Worker, "die", die)

    def scatter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have deeds done at any time later, as threads would that are held up."""

        def perform(deeds: list[Callable[[], object]]) -> None:
            def first() -> None:
                deeds[0]()
                perform(deeds[1:])

            if deeds:
                self.world.tasks.append((self.driver, first))

        for module in ("families", "supervision", "supervisor"):
            monkeypatch.setattr(f"actorrpc.actors.{module}.perform", perform)

    def _constructed(self, spec: Any) -> BaseException | None:
        number = self.names.get(spec.actor_id, -1)
        error = self.refuse(number)
        self.events.append(f"{'!' if error is not None else '+'}{number}")
        return error

    def handle(self, number: int) -> ActorHandle[Any]:
        route = self.routes[number]
        return ActorHandle(route.card, route)

    def group(self, *children: Any, **options: Any) -> Supervision:
        self.world.on(self.driver)
        found = [self.handle(each) if isinstance(each, int) else each for each in children]
        return supervise(found, **options)

    def where(self, number: int) -> Resident:
        actor_id = self.routes[number].actor_id
        return next(
            resident
            for worker in self.world.workers
            if not worker.dead
            for resident in worker.residents_here.values()
            if resident.spec.actor_id == actor_id
        )

    def kill(self, number: int) -> None:
        """As if it had died by itself."""
        self.world.on(self.driver)
        self.routes[number].kill(no_restart=False)

    def lives(self) -> list[int]:
        return sorted(
            self.names[resident.spec.actor_id]
            for worker in self.world.workers
            if not worker.dead
            for resident in worker.residents_here.values()
        )

    def happened(self, seconds: float = 60.0) -> list[str]:
        self.world.settle(seconds)
        events, self.events = self.events, []
        return events


def _error(future: Any) -> BaseException:
    assert future.done()
    error = future.exception()
    assert error is not None
    return error  # type: ignore[no-any-return]


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
def test_who_ends_and_begins_in_what_order(
    monkeypatch: pytest.MonkeyPatch, strategy: Any, events: str, spawner: bool
) -> None:
    for seed in range(10):
        scene = Scene(monkeypatch, 4, seed, spawner)
        group = scene.group(0, 1, 2, 3, strategy=strategy)
        scene.kill(1)
        assert scene.happened() == events.split()
        assert scene.lives() == [0, 1, 2, 3]
        assert group.state == "up"
        monkeypatch.undo()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_death_of_a_process_is_a_death(monkeypatch: pytest.MonkeyPatch, strategy: Any) -> None:
    scene = Scene(monkeypatch, 3, spawner=True)
    group = scene.group(0, 1, 2, strategy=strategy)
    scene.where(1).worker.die()
    scene.world.settle()
    assert scene.lives() == [0, 1, 2]
    assert group.restarts == {"one_for_one": 1, "one_for_all": 3, "rest_for_one": 2}[strategy]
    rows = {scene.names[row.actor_id]: row for row in scene.driver.runtime.supervisor.states()}
    assert rows[1].restarts == 1
    assert rows[0].restarts == (1 if strategy == "one_for_all" else 0)
    if strategy == "rest_for_one":
        assert "was ended with the others of supervision group" in rows[2].death_cause


def test_calls_that_wait_reach_the_next_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_back_off_grows_and_is_jittered(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_state_goes_into_the_next_life_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 2)
    scene.group(0, 1, strategy="one_for_all")
    for number in range(2):
        scene.driver.runtime.supervisor.note_checkpoint(
            scene.routes[number].actor_id, 0, Snapshot.of(f"state {number}")
        )
    scene.kill(0)
    scene.world.settle()
    for number in range(2):
        spec = scene.where(number).spec
        assert (spec.epoch, spec.state.open()) == (1, f"state {number}")


def test_those_that_die_together_are_made_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order to end an incarnation that is gone already does not reach the next one, however late it is."""
    for seed in range(60):
        scene = Scene(monkeypatch, 3, seed, spawner=True)
        scene.scatter(monkeypatch)
        group = scene.group(0, 1, 2, strategy="one_for_all", backoff=0.0)
        for number in range(3):
            scene.where(number).worker.die()
        scene.world.settle()
        assert scene.lives() == [0, 1, 2]
        assert group.restarts == 3
        monkeypatch.undo()


def test_actors_that_wait_for_a_restart_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was planned before the group was made does not happen twice, nor out of order."""
    for seed in range(20):
        scene = Scene(monkeypatch, 2, seed, spawner=seed % 2 == 0, restart_backoff_s=5.0)
        for _ in range(2):
            scene.kill(1)
            scene.world.settle(1.0)
        assert scene.lives() == [0]
        scene.events.clear()
        group = scene.group(0, 1, strategy="one_for_all", backoff=0.0)
        for _ in range(seed):
            scene.world.step()
        scene.kill(0)
        assert scene.happened() == ["-0", "+0", "+1"]
        assert scene.lives() == [0, 1]
        assert group.state == "up"
        monkeypatch.undo()


# -- giving up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spawner", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_death_too_many(monkeypatch: pytest.MonkeyPatch, strategy: Any, spawner: bool) -> None:
    scene = Scene(monkeypatch, 3, spawner=spawner)
    told: list[SupervisionError] = []
    group = scene.group(
        0, 1, 2, strategy=strategy, max_restarts=2, period=1000.0, name="web", on_failure=told.append
    )
    over, watched = group.monitor(), [route.watch() for route in scene.routes]
    for _ in range(2):
        scene.kill(1)
        scene.happened()
    assert group.state == "up"
    assert not over.done()
    scene.kill(1)
    call = scene.world.call(scene.driver, scene.routes[0], 1)
    assert scene.happened() == ["-1", "-2", "-0"]
    assert scene.lives() == []
    assert group.state == "failed"
    (error,) = told
    assert over.value() is error
    text = str(error)
    assert text.startswith("supervision group 'web': it has given up, as 2 restarts within 1000 s did not do")
    assert text.count("it was killed with kill()") == 4  # the last, and the list of all three
    for death in watched:
        assert "supervision group 'web', which it belongs to, has ended: it has given up" in str(
            death.value()
        )
    if call.exception() is not None:
        assert isinstance(call.exception(), ActorDiedError)
    late = scene.world.call(scene.driver, scene.routes[2], 1)
    scene.world.settle()
    assert "max_restarts=2" in str(_error(late))
    assert group.monitor().value() is error
    assert len(told) == 1


def test_deaths_outside_of_the_period_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 1)
    group = scene.group(0, max_restarts=1, period=10.0)
    for _ in range(4):
        scene.kill(0)
        scene.world.settle()
        scene.world.clock.advance(11.0)
    assert group.state == "up"
    assert scene.lives() == [0]


def test_a_constructor_that_raises_in_a_restart_is_one_more_death(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 2)
    group = scene.group(0, 1, max_restarts=4)
    errors = [ValueError("not yet"), ValueError("nor now")]
    scene.refuse = lambda number: errors.pop(0) if errors else None
    scene.kill(1)
    assert scene.happened() == ["-1", "!1", "!1", "+1"]
    assert group.state == "up"
    scene.refuse = lambda number: ValueError("never again")
    scene.kill(1)
    over = group.monitor()
    scene.world.settle()
    error = over.value()
    assert isinstance(error, SupervisionError)
    assert "its constructor raised ValueError: never again" in str(error)
    assert "its constructor raised ValueError: not yet" in str(error)
    assert scene.lives() == []


def test_a_first_constructor_that_raises_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 2)
    scene.refuse = lambda number: ValueError("wrong arguments") if number == 2 else None
    scene.routes.append(scene.world.create(scene.driver, max_restarts=-1))
    scene.names[scene.routes[2].actor_id] = 2
    group = scene.group(0, 1, 2)
    assert scene.happened() == ["!2", "-1", "-0"]
    error = group.monitor().value()
    assert error is not None
    assert isinstance(error.cause, ValueError)
    assert "wrong arguments" in str(error)
    late = scene.world.call(scene.driver, scene.routes[0], 1)
    scene.world.settle()
    assert isinstance(_error(late), ActorDiedError)


def test_a_place_that_is_gone_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 1)
    scene.routes.append(scene.world.create(scene.driver, max_restarts=-1, worker="w2"))
    scene.names[scene.routes[1].actor_id] = 1
    scene.world.settle()
    group = scene.group(0, 1)
    scene.world.workers[2].die()
    scene.world.settle()
    assert "worker= has put it there" in str(group.monitor().value())
    assert scene.lives() == []


# -- nested -----------------------------------------------------------------------------------------------------------


def test_a_group_in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for spawner in (False, True):
        scene = Scene(monkeypatch, 5, spawner=spawner)
        inner = scene.group(1, 2, strategy="one_for_all", max_restarts=1, name="inner")
        deep = scene.group(3, max_restarts=0, name="deep")
        outer = scene.group(0, inner, deep, 4, strategy="rest_for_one", max_restarts=2, name="outer")
        scene.kill(2)
        assert scene.happened() == ["-2", "-1", "+1", "+2"]
        assert (inner.restarts, outer.restarts) == (2, 0)
        scene.kill(1)  # one too many for the inner one: the outer one makes it, and what is behind it, again
        assert scene.happened() == ["-1", "-2", "-4", "-3", "+1", "+2", "+3", "+4"]
        scene.kill(1)  # the inner one has a new account
        assert scene.happened() == ["-1", "-2", "+1", "+2"]
        scene.kill(3)
        assert scene.happened() == ["-3", "-4", "+3", "+4"]
        assert {group.state for group in (inner, deep, outer)} == {"up"}
        scene.kill(3)
        assert scene.happened() == ["-3", "-4", "-2", "-1", "-0"]
        assert {group.state for group in (inner, deep, outer)} == {"failed"}
        error = outer.monitor().value()
        assert error is not None
        assert inner.monitor().value() is error
        assert "supervision group 'deep': it has given up, as no restart within 60 s did not do" in str(error)
        monkeypatch.undo()


# -- leaving and ending -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "exit", "handle"])
def test_one_that_leaves_is_out(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    scene = Scene(monkeypatch, 3)
    group = scene.group(0, 1, 2, strategy="one_for_all")
    if how == "kill":
        scene.routes[1].kill()
    elif how == "exit":
        scene.driver.runtime.supervisor.note_ended(scene.routes[1].actor_id, 0, "exit", "exit_actor()")
    else:
        group._children = (group._children[0], group._children[2])
        del scene.routes[1]
        gc.collect()
    scene.world.settle()
    scene.events.clear()
    assert group.state == "up"
    if how != "handle":
        del scene.routes[1]
    scene.kill(0)
    assert scene.happened() == ["-0", "-2", "+0", "+2"]
    for route in scene.routes:
        route.kill()
    scene.world.settle()
    assert group.state == "ended"
    assert group.monitor().value() is None


def test_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        scene = Scene(monkeypatch, 4, seed, spawner=seed % 2 == 0)
        told: list[Any] = []
        inner = scene.group(2, 3)
        group = scene.group(0, 1, inner, on_failure=told.append)
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
        assert scene.lives() == []
        assert (group.state, inner.state) == ("ended", "ended")
        group.end()
        late = scene.world.call(scene.driver, scene.routes[2], 1)
        scene.world.settle()
        assert "which it belongs to, was ended" in str(_error(late))
        assert not told
        monkeypatch.undo()


def _note(fired: list[Any], done: Any) -> None:
    fired.append(done.value())


def _settles(world: World) -> _Settles:
    return _Settles(world)


class _Settles:
    def __init__(self, world: World) -> None:
        self._world = world

    def wait(self, timeout: float) -> None:
        self._world.settle()


def test_leaving_the_network_ends_the_group_without_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 2)
    told: list[Any] = []
    group = scene.group(0, 1, strategy="one_for_all", on_failure=told.append)
    monkeypatch.setattr("actorrpc.actors.supervisor.collect_all", lambda futures: _Settles(scene.world))
    scene.driver.runtime.supervisor.close(True)
    scene.world.settle()
    assert group.monitor().value() is None
    assert (scene.lives(), told) == ([], [])


def test_a_group_that_nobody_refers_to_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 2)
    scene.group(0, 1, strategy="one_for_all")
    gc.collect()
    scene.kill(0)
    assert scene.happened() == ["-0", "-1", "+0", "+1"]


def test_a_group_keeps_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 2)
    group = scene.group(0, 1)
    scene.routes.clear()
    gc.collect()
    scene.world.settle()
    assert scene.lives() == [0, 1]
    assert len(group.children) == 2
    del group
    gc.collect()
    scene.world.settle()
    assert scene.lives() == []


# -- chaos ------------------------------------------------------------------------------------------------------------


def test_no_incarnation_gets_what_was_meant_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call runs at most once; one that its caller was told about as lost never runs later; all come to an end."""
    restarts = 0
    for seed in range(300):
        scene = Scene(monkeypatch, 3, seed, spawner=seed % 2 == 0)
        world = scene.world
        if seed % 4 < 2:
            scene.scatter(monkeypatch)
        group = scene.group(0, 1, 2, strategy=STRATEGIES[seed % 3], max_restarts=1000, backoff=0.01)
        calls: list[tuple[int, Any]] = []
        lost: dict[int, int] = {}  # a call that has failed -> how much had been executed then
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
            if number in lost and not _error(future).maybe_executed:  # type: ignore[attr-defined]
                assert number not in ran
            elif number in lost:
                assert number not in ran[lost[number] :]
            elif future.exception() is None:
                assert number in ran
        epochs: dict[int, int] = {}
        for actor_id, epoch, _, _ in world.log:  # no incarnation works once there is a later one
            assert epoch >= epochs.get(actor_id, 0)
            epochs[actor_id] = epoch
        assert scene.lives() == [0, 1, 2]
        assert group.state == "up"
        restarts += group.restarts
        monkeypatch.undo()
    assert restarts > 1000


def test_monitors_of_a_group_that_gives_up_fire_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert scene.lives() == []
        scene.routes[0].watch().add_done_callback(partial(_note, fired))
        assert len(fired) == 8  # at once
        monkeypatch.undo()


# -- what is refused -----------------------------------------------------------------------------------------------


def test_what_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
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
        ({"max_restarts": -1}, "at least 0, not -1"),
        ({"max_restarts": 1.5}, "at least 0, not 1.5"),
        ({"max_restarts": True}, "at least 0, not True"),
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
    outer = supervise([group, scene.handle(1)])  # what was refused has left no trace
    with pytest.raises(ConfigError, match="is a child of supervision group"):
        supervise([group])
    with pytest.raises(TypeError, match="callback must be callable"):
        outer.monitor(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stays in the process"):
        pickle.dumps(outer)
    assert "one_for_one, 2 children" in repr(outer)
    assert outer.children == (group, scene.handle(1))
    assert outer.strategy == "one_for_one"


def test_children_that_cannot_be_supervised(monkeypatch: pytest.MonkeyPatch) -> None:
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
    there = scene.driver.runtime.routes.of(route.card)
    with pytest.raises(ConfigError, match="is looked after by worker 'w1'"):
        supervise([ActorHandle(there.card, there)])
    own = world.create(scene.driver, max_restarts=-1)
    group = supervise([ActorHandle(own.card, own)])
    own.kill()
    world.settle()
    with pytest.raises(ConfigError, match="is over"):
        supervise([group])
