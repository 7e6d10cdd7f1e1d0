"""Names: one actor each, decided in one step at rank 0, free again when the actor is dead."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from actorrpc.actors.spec.actor_spec import ActorDescriptor
from actorrpc.agent.context import set_worker
from actorrpc.errors import ActorDiedError, NameTakenError, PeerDiedError, UnknownActorError
from actorrpc.wire.identity import WorkerKey
from tests.actors.fleet import INFO, World


@pytest.fixture(autouse=True)
def _no_runtime() -> Iterator[None]:
    yield
    set_worker(None)


def _run(world: World, worker: int, what: str, *args: object, **options: object) -> object:
    """Ask from a worker; RPC goes on meanwhile."""
    names = world.workers[worker].runtime.names
    world.on(world.workers[worker])
    return getattr(names, what)(*args, **options)


def test_a_name_is_found_from_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    route = world.create(world.workers[1], name="clock")
    for worker in range(3):
        descriptor = _run(world, worker, "lookup", "clock")
        assert isinstance(descriptor, ActorDescriptor)
        assert descriptor.actor_id == route.actor_id
        assert descriptor.anchor is None  # handles got by name are weak
        assert _run(world, worker, "list") == [("", "clock")]
    world.settle()


def test_a_name_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    route = world.create(world.workers[1], name="clock")
    for worker in (0, 1, 2):
        with pytest.raises(
            NameTakenError, match="'clock' in the default namespace already, a Counter"
        ) as caught:
            world.create(world.workers[worker], name="clock")
        assert type(caught.value) is NameTakenError
        assert isinstance(caught.value, ValueError)
        again = world.create(world.workers[worker], name="clock", get_if_exists=True)
        assert again.actor_id == route.actor_id
    assert world.create(world.workers[2], name="clock", namespace="other").actor_id != route.actor_id
    world.settle()


def test_one_of_many_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    names = world.workers[0].runtime.names
    found: list[ActorDescriptor | None] = []
    start = threading.Barrier(8)

    def ask(actor_id: int) -> None:
        descriptor = ActorDescriptor(
            actor_id=actor_id, info=INFO, supervisor=WorkerKey(0, "x"), supervisor_name="w0", name="only"
        )
        start.wait()
        found.append(names.put_in(descriptor))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count(None) == 1
    assert len({descriptor.actor_id for descriptor in found if descriptor is not None}) == 1


def test_unknown_names_say_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    driver = world.workers[0]
    with pytest.raises(UnknownActorError, match="no actor has a name there"):
        _run(world, 0, "lookup", "counter")
    keep = [world.create(driver, name="counter"), world.create(driver, name="far", namespace="lab")]
    with pytest.raises(UnknownActorError, match="did you mean 'counter'"):
        _run(world, 2, "lookup", "countre")
    with pytest.raises(UnknownActorError, match="there are: 'counter'"):
        _run(world, 2, "lookup", "zzz")
    with pytest.raises(UnknownActorError, match=r"there is one in namespace 'lab': give namespace="):
        _run(world, 1, "lookup", "far")
    assert _run(world, 1, "lookup", "far", "lab") is not None
    assert _run(world, 1, "list", "lab") == [("lab", "far")]
    world.settle()
    del keep


def test_the_namespace_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    world.workers[1].runtime.names.namespace = "lab"
    route = world.create(world.workers[1], name="far")
    assert _run(world, 1, "lookup", "far").actor_id == route.actor_id  # type: ignore[attr-defined]
    with pytest.raises(UnknownActorError):
        _run(world, 0, "lookup", "far")
    world.settle()


def test_a_name_is_free_when_its_actor_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    for worker in (0, 1):
        route = world.create(world.workers[worker], name="clock")
        world.settle()
        route.kill()
        world.settle()
        with pytest.raises(UnknownActorError):
            _run(world, 2, "lookup", "clock")


def test_a_name_stays_while_its_actor_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    route = world.create(world.workers[0], name="clock", max_restarts=1)
    world.settle()
    next(each for each in world.workers if each.actors_here).die()
    world.settle()
    assert world.workers[0].runtime.names.lookup("clock").actor_id == route.actor_id


def test_names_of_a_creator_that_died_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    route = world.create(world.workers[2], name="clock", worker="w1")
    detached = world.create(world.workers[2], name="wall", worker="w1", lifetime="detached")
    world.settle()
    world.workers[2].die()
    world.settle()
    with pytest.raises(UnknownActorError, match="wall"):
        _run(world, 1, "lookup", "clock")
    assert _run(world, 1, "lookup", "wall").actor_id == detached.actor_id  # type: ignore[attr-defined]
    late = world.call(world.workers[1], world.workers[1].runtime.routes.of(route.descriptor), 1)
    world.settle()
    assert late.done()
    assert isinstance(late.exception(), ActorDiedError) or late.value() == 1


def test_rank_0_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    _run(world, 1, "list")
    world.workers[0].die()
    world.settle()
    with pytest.raises(PeerDiedError, match="names are kept by rank 0"):
        _run(world, 1, "lookup", "x")
