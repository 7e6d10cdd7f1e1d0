"""Lifetimes of actors: handles, owners, names, kill(), exit_actor(), and calls before and after."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc import actors
from actorrpc.errors import (
    ActorDiedError,
    NameTakenError,
    PendingCallsLimitExceeded,
    UnknownActorError,
)
from tests.actors.e2e.kit import alive, open_gate, pass_gate, row_of, until

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]


@actorrpc.remote
class Mortal:
    """Writes to a file how it ended."""

    def __init__(self, path: str, big: Any = None) -> None:
        self.path = path
        self.kept: Any = None

    def ping(self) -> str:
        return "pong"

    def pid(self) -> int:
        return os.getpid()

    def block(self, gate: str) -> str:
        return pass_gate(gate)

    def keep(self, what: Any) -> None:
        self.kept = what

    def use(self) -> Any:
        return actorrpc.get(self.kept.ping.remote())

    def give(self) -> Any:
        return self.kept

    def me(self) -> Any:
        return actorrpc.current_actor()

    def make_and_keep(self, path: str, **options: Any) -> int:
        self.kept = Mortal.options(**options).remote(path)
        return actorrpc.get(self.kept.pid.remote())

    def stream(self, count: int) -> Any:
        yield from range(count)

    def on_stop(self) -> None:
        self._write("on_stop ")

    def __del__(self) -> None:
        self._write("del ")

    def _write(self, word: str) -> None:
        with open(self.path, "a") as file:
            file.write(word)


class _NotesUnpickling:
    """Appends a character to a file whenever it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.__dict__ = state
        with open(self.path, "a") as file:
            file.write("u")


def _ended(path: Path) -> bool:
    return path.exists() and path.read_text() == "on_stop del "


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return [str(tmp_path / f"end{n}") for n in range(4)]


def test_an_actor_ends_with_its_last_handle(place: str, tmp_path: Path) -> None:
    path = tmp_path / "end"
    actor = Mortal.remote(str(path))
    pid = actorrpc.get(actor.pid.remote())
    other = [actor]
    del actor
    assert actorrpc.get(other[0].ping.remote()) == "pong"
    other.clear()
    until(lambda: _ended(path))
    if place == "embedded":
        until(lambda: not alive(pid))


def test_pending_calls_and_streams_keep_their_actor_alive(tmp_path: Path, gate: Path) -> None:
    path = tmp_path / "end"
    stream = Mortal.remote(str(path)).stream.remote(100)
    gc.collect()
    assert list(stream.values()) == list(range(100))
    del stream
    until(lambda: _ended(path))
    path.unlink()
    actor = Mortal.remote(str(path))
    refs = [actor.block.remote(str(gate)), *(actor.ping.remote() for _ in range(5))]
    del actor
    gc.collect()
    open_gate(gate)
    assert actorrpc.get(refs) == ["go", *["pong"] * 5]
    until(lambda: _ended(path))


def test_handles_in_containers_closures_and_other_actors_keep_the_actor_alive(paths: list[str]) -> None:
    actor, holder = Mortal.remote(paths[0]), Mortal.remote(paths[1])
    actorrpc.get(holder.keep.remote(actor))
    same = actorrpc.get(holder.give.remote())
    assert same == actor
    assert hash(same) == hash(actor)
    assert {same: 1}[actor] == 1
    assert holder != actor
    del same, actor
    gc.collect()
    assert actorrpc.get(holder.use.remote()) == "pong"
    actorrpc.get(holder.keep.remote({"deep": [(actorrpc.get(holder.give.remote()),)]}))
    inside = actorrpc.get(holder.give.remote())["deep"][0][0]
    assert actorrpc.get(inside.ping.remote()) == "pong"
    assert actorrpc.get(call_it.remote(_pings(inside))) == "pong"
    del inside
    assert not os.path.exists(paths[0])
    actorrpc.get(holder.keep.remote(None))
    until(lambda: _ended(Path(paths[0])))
    del holder
    until(lambda: _ended(Path(paths[1])))


def _pings(actor: Any) -> Any:
    return lambda: actorrpc.get(actor.ping.remote())


@actorrpc.remote
def call_it(function: Any) -> Any:
    return function()


def test_a_handle_in_a_message_keeps_the_actor_alive(paths: list[str], gate: Path) -> None:
    holder = Mortal.remote(paths[1])
    busy = holder.block.remote(str(gate))
    kept = holder.keep.remote(Mortal.remote(paths[0]))
    gc.collect()
    open_gate(gate)
    actorrpc.get([busy, kept])
    assert actorrpc.get(holder.use.remote()) == "pong"


def test_a_cancelled_call_releases_the_handles_in_its_arguments(paths: list[str], gate: Path) -> None:
    unpickled = Path(paths[3])
    callee = Mortal.remote(paths[0])
    keeper = Mortal.remote(paths[1])
    target = Mortal.remote(paths[2])
    actorrpc.get(keeper.keep.remote((target, _NotesUnpickling(unpickled), "x" * 300_000)))
    del target
    given = keeper.give.remote()
    actorrpc.wait([given])
    before = unpickled.read_text()
    blocked = callee.block.remote(str(gate))
    cancelled = callee.keep.remote(given)
    del given
    until(lambda: unpickled.read_text() != before)  # the callee fetches the value before the call's turn
    actorrpc.cancel(cancelled)
    with pytest.raises(actorrpc.CancelledError):
        actorrpc.get(cancelled)
    until(lambda: row_of(callee).pending_calls == 0)
    open_gate(gate)
    assert actorrpc.get(blocked) == "go"  # no later call makes callee look into its queue
    actorrpc.get(keeper.keep.remote(None))
    del cancelled
    until(lambda: _ended(Path(paths[2])))


def test_a_handle_from_current_actor_does_not_keep_the_actor_alive(paths: list[str]) -> None:
    actor = Mortal.remote(paths[0])
    me = actorrpc.get(actor.me.remote())
    assert me == actor
    actorrpc.get(actor.keep.remote(me))  # weak: it does not keep the actor alive
    del actor, me
    until(lambda: _ended(Path(paths[0])))


def test_detached_actors_live_until_they_are_killed(place: str, paths: list[str]) -> None:
    maker = Mortal.remote(paths[1])
    pid = actorrpc.get(maker.make_and_keep.remote(paths[0], lifetime="detached", name="stays"))
    actorrpc.kill(maker)
    del maker
    gc.collect()
    actor = actorrpc.get_actor("stays")
    assert actorrpc.get(actor.pid.remote()) == pid
    actorrpc.kill(actor)
    with pytest.raises(actorrpc.ActorDiedError, match="killed"):
        actorrpc.get(actor.ping.remote())
    if place == "embedded":
        until(lambda: not alive(pid))
    with pytest.raises(actorrpc.UnknownActorError):
        actorrpc.get_actor("stays")


@pytest.mark.parametrize("end", ["dropped", "killed"])
def test_an_actor_ends_when_the_actor_that_created_it_ends(place: str, paths: list[str], end: str) -> None:
    if place == "group" and end == "killed":
        pytest.skip("kill() of an actor does not end a worker of a group, which owns its actors")
    maker = Mortal.remote(paths[1])
    pid = actorrpc.get(maker.make_and_keep.remote(paths[0]))
    child = actorrpc.get(maker.give.remote())
    assert actorrpc.get(child.pid.remote()) == pid
    if end == "killed":
        actorrpc.kill(maker)
        until(lambda: not alive(pid))
        with pytest.raises(actorrpc.ActorDiedError):
            actorrpc.get(child.ping.remote())
    else:
        del child, maker
        until(lambda: _ended(Path(paths[1])) and os.path.exists(paths[0]))


def test_an_actor_whose_handle_is_dropped_at_once_ends(paths: list[str]) -> None:
    for path in paths:
        Mortal.remote(path)
    for path in paths:
        until(lambda path=path: not os.path.exists(path) or _ended(Path(path)))
    until(lambda: all(row.state == "DEAD" for row in actorrpc.list_actors()))


def test_a_name_is_free_again_after_the_last_handle_was_dropped(paths: list[str], gate: Path) -> None:
    for path in paths[:2]:
        actor = Mortal.options(name="again").remote(path)
        actorrpc.get(actor.ping.remote())
        del actor
    Mortal.options(name="again").remote(paths[2])  # dropped before the actor was constructed
    actor = Mortal.options(name="again", get_if_exists=True).remote(paths[3])
    blocked = actor.block.remote(str(gate))
    with pytest.raises(actorrpc.NameTakenError) as caught:
        Mortal.options(name="again").remote(paths[3])
    assert caught.value.actor_id == actor.actor_id
    open_gate(gate)
    actorrpc.get(blocked)
    actorrpc.kill(actor)
    actor = Mortal.options(name="again").remote(paths[3])
    assert actorrpc.get(actor.make_and_keep.remote(paths[3], name="more")) > 0
    actorrpc.get(actor.keep.remote(None))
    assert (
        actorrpc.get(actor.make_and_keep.remote(paths[3], name="more")) > 0
    )  # the handle was dropped on the creating worker


def test_constructor_arguments_are_released_with_the_actor(place: str, paths: list[str]) -> None:
    """An actor that is a constructor argument lives as long as the other actor may be restarted or holds it."""
    inner = Mortal.remote(paths[0])
    outer = Mortal.remote(paths[1], inner)
    actorrpc.get(outer.ping.remote())
    del outer
    until(lambda: _ended(Path(paths[1])))
    del inner
    until(lambda: _ended(Path(paths[0])))


def test_the_worker_option_places_an_actor_on_a_worker_or_next_to_an_actor(
    place: str, paths: list[str]
) -> None:
    here = Mortal.options(worker=0).remote(paths[0])
    assert actorrpc.get(here.pid.remote()) == os.getpid()
    first = Mortal.remote(paths[1])
    neighbours = [Mortal.options(worker=first).remote(path) for path in paths[2:]]
    assert actorrpc.get([each.pid.remote() for each in neighbours]) == [actorrpc.get(first.pid.remote())] * 2
    del neighbours[0], here
    until(lambda: _ended(Path(paths[0])) and _ended(Path(paths[2])))
    assert actorrpc.get(first.ping.remote()) == "pong"
    del first
    until(lambda: _ended(Path(paths[1])))
    if place == "group":
        assert actorrpc.get(neighbours[0].ping.remote()) == "pong"
    else:  # the process belongs to the first actor
        until(lambda: not actorrpc.is_alive(neighbours[0]))
        with pytest.raises(actorrpc.ActorDiedError):
            actorrpc.get(neighbours[0].ping.remote())
    with pytest.raises(actorrpc.RpcError, match="nobody"):
        Mortal.options(worker="nobody").remote(paths[0])


# -- kill, restart, names ------------------------------------------------------------------------------------


@actorrpc.remote
class Fragile:
    """Counts calls."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def step(self) -> int:
        self.count += 1
        return self.count

    def block(self, path: str) -> str:
        return pass_gate(path)

    def make(self, **options: Any) -> Any:
        return Fragile.options(**options).remote(10)


def error_of(ref: Any) -> BaseException:
    """Return the exception that get() raises."""
    with pytest.raises(Exception) as caught:
        actorrpc.get(ref, timeout=30)
    return caught.value


def test_calls_made_before_the_actor_exists_run_in_order() -> None:
    fragile = Fragile.remote()
    assert actorrpc.get([fragile.step.remote() for _ in range(200)]) == list(range(1, 201))


def test_a_killed_actor_is_not_restarted_and_all_its_calls_fail(gate: Path) -> None:
    fragile = Fragile.options(max_restarts=-1).remote()
    fired: list[Any] = []
    actors.monitor(fragile).add_done_callback(lambda done: fired.append(done.value()))
    running = fragile.block.remote(str(gate))
    waiting = fragile.step.remote()
    actorrpc.get(actors.ready(fragile))
    actors.kill(fragile)
    for ref in (running, waiting, fragile.step.remote()):
        error = error_of(ref)
        assert isinstance(error, ActorDiedError)
        assert "it was killed with kill()" in str(error)
    until(lambda: fired)
    assert len(fired) == 1
    assert not actors.is_alive(fragile)
    # If it shared a worker, its thread still waits at the gate.
    descriptor = os.open(gate, os.O_RDWR)
    os.close(descriptor)


def test_kill_with_restart_resets_the_actor_up_to_max_restarts() -> None:
    fragile = Fragile.options(max_restarts=2).remote(5)
    for _ in range(3):
        assert actorrpc.get([fragile.step.remote(), fragile.step.remote()]) == [6, 7]
        actors.kill(fragile, no_restart=False)
    error = error_of(fragile.step.remote())
    assert isinstance(error, ActorDiedError)
    assert "max_restarts is 2" in str(error)


def test_a_named_actor_is_found_and_its_name_is_unique() -> None:
    fragile = Fragile.options(name="one").remote(1)
    assert actorrpc.get(actors.get_actor("one").step.remote()) == 2
    with pytest.raises(NameTakenError):
        Fragile.options(name="one").remote()
    again = Fragile.options(name="one", get_if_exists=True).remote(7)
    assert actorrpc.get(again.step.remote()) == 3
    with pytest.raises(NameTakenError, match="'one'"):
        actorrpc.get(Fragile.remote().make.remote(name="one"))
    actors.kill(fragile)
    with pytest.raises(UnknownActorError):
        actors.get_actor("one")


def test_a_handle_from_get_actor_does_not_keep_the_actor_alive() -> None:
    strong = Fragile.options(name="weak").remote()
    weak = actors.get_actor("weak")
    assert actorrpc.get(weak.step.remote()) == 1
    ended = actors.monitor(weak)
    del strong
    gc.collect()
    assert "its last handle is gone" in str(ended.wait(30))
    assert isinstance(error_of(weak.step.remote()), ActorDiedError)


def test_a_call_beyond_max_pending_calls_is_refused(gate: Path) -> None:
    fragile = Fragile.options(max_pending_calls=2).remote()
    refs = [fragile.block.remote(str(gate)), fragile.step.remote()]
    with pytest.raises(PendingCallsLimitExceeded, match="max_pending_calls=2"):
        fragile.step.remote()
    open_gate(gate)
    assert actorrpc.get(refs) == ["go", 1]
    assert actorrpc.get(fragile.step.remote()) == 2
