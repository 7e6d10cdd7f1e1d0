"""How long actors live, what happens when they end, and how they are found by name."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import actors
from actorrpc.errors import (
    ActorDiedError,
    CancelledError,
    NameTakenError,
    PendingCallsLimitExceeded,
    RpcTimeoutError,
    UnknownActorError,
)
from tests.actors.e2e.kit import alive, open_gate, pass_gate, until

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]


@actorrpc.remote
class Mortal:
    """Writes down, in a file, how it ended."""

    def __init__(self, path: str, big: Any = None) -> None:
        self.path = path
        self.kept: Any = None

    def ping(self) -> str:
        return "pong"

    def pid(self) -> int:
        return os.getpid()

    def block(self, gate: str) -> str:
        return pass_gate(gate)

    def big(self) -> Any:
        return torch.ones(1 << 20)

    def keep(self, what: Any) -> None:
        self.kept = what

    def use(self) -> Any:
        return actorrpc.get(self.kept.ping.remote())

    def give(self) -> Any:
        return self.kept

    def me(self) -> Any:
        return actorrpc.current_actor()

    def leave(self) -> None:
        actorrpc.exit_actor()

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


def _ended(path: Path) -> bool:
    return path.exists() and path.read_text() == "on_stop del "


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return [str(tmp_path / f"end{n}") for n in range(4)]


def test_the_last_handle(place: str, tmp_path: Path) -> None:
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


def test_a_pending_call_keeps_it(tmp_path: Path, gate: Path) -> None:
    path = tmp_path / "end"
    first = Mortal.remote(str(path)).ping.remote()
    assert actorrpc.get(first) == "pong"
    until(lambda: _ended(path))
    path.unlink()
    actor = Mortal.remote(str(path))
    refs = [actor.block.remote(str(gate)), *(actor.ping.remote() for _ in range(5))]
    del actor
    gc.collect()
    open_gate(gate)
    assert actorrpc.get(refs) == ["go", *["pong"] * 5]
    until(lambda: _ended(path))


def test_a_large_result_is_there_when_its_process_was_to_end(tmp_path: Path) -> None:
    """The last handle goes long before somebody asks for the result."""
    path = tmp_path / "end"
    actor = Mortal.remote(str(path))
    ref = actor.big.remote()
    actorrpc.wait([ref], fetch_local=False)
    del actor
    until(lambda: path.exists())  # its hooks have run
    assert float(actorrpc.get(ref).sum()) == 1 << 20


def test_handles_in_containers_closures_and_other_actors(paths: list[str]) -> None:
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


def test_a_handle_on_its_way_keeps_the_actor(paths: list[str], gate: Path) -> None:
    holder = Mortal.remote(paths[1])
    busy = holder.block.remote(str(gate))
    kept = holder.keep.remote(Mortal.remote(paths[0]))
    gc.collect()
    open_gate(gate)
    actorrpc.get([busy, kept])
    assert actorrpc.get(holder.use.remote()) == "pong"


def test_actors_that_hold_themselves_by_name_end(paths: list[str]) -> None:
    actor = Mortal.remote(paths[0])
    me = actorrpc.get(actor.me.remote())
    assert me == actor
    actorrpc.get(actor.keep.remote(me))  # weak: it does not count
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


def test_owned_actors_end_with_their_owner(paths: list[str]) -> None:
    maker = Mortal.remote(paths[1])
    pid = actorrpc.get(maker.make_and_keep.remote(paths[0]))
    child = actorrpc.get(maker.give.remote())
    assert actorrpc.get(child.pid.remote()) == pid
    rows = {row.actor_id for row in actorrpc.list_actors() if row.state == "ALIVE"}
    assert child.actor_id in rows
    del child
    del maker
    until(lambda: _ended(Path(paths[1])) and os.path.exists(paths[0]))


def test_an_actor_whose_owner_is_killed_is_dead(place: str, paths: list[str]) -> None:
    if place == "group":
        pytest.skip("kill() of an actor does not end a worker of a group, which owns its actors")
    maker = Mortal.remote(paths[1])
    pid = actorrpc.get(maker.make_and_keep.remote(paths[0]))
    child = actorrpc.get(maker.give.remote())
    actorrpc.kill(maker)
    until(lambda: not alive(pid))
    with pytest.raises(actorrpc.ActorDiedError):
        actorrpc.get(child.ping.remote())


def test_exit_actor(place: str, paths: list[str]) -> None:
    actor = Mortal.remote(paths[0])
    pid = actorrpc.get(actor.pid.remote())
    leaving, late = actor.leave.remote(), actor.ping.remote()
    for ref in (leaving, late, actor.ping.remote()):
        with pytest.raises(actorrpc.ActorDiedError, match="exit_actor"):
            actorrpc.get(ref)
    until(lambda: _ended(Path(paths[0])))
    if place == "embedded":
        until(lambda: not alive(pid))
    assert not actorrpc.is_alive(actor)


def test_an_actor_that_is_dropped_at_once(paths: list[str]) -> None:
    for path in paths:
        Mortal.remote(path)
    for path in paths:
        until(lambda path=path: not os.path.exists(path) or _ended(Path(path)))
    until(lambda: all(row.state == "DEAD" for row in actorrpc.list_actors()))


def test_a_name_is_free_when_its_last_handle_is_gone(paths: list[str], gate: Path) -> None:
    for path in paths[:2]:
        actor = Mortal.options(name="again").remote(path)
        actorrpc.get(actor.ping.remote())
        del actor
    Mortal.options(name="again").remote(paths[2])  # and is gone before it was made
    actor = Mortal.options(name="again", get_if_exists=True).remote(paths[3])
    blocked = actor.block.remote(str(gate))
    with pytest.raises(actorrpc.NameTakenError) as caught:
        Mortal.options(name="again").remote(paths[3])
    assert caught.value.actor_id == actor.actor_id
    open_gate(gate)
    actorrpc.get(blocked)
    actorrpc.kill(actor)
    actor = Mortal.options(name="again").remote(paths[3])
    assert actorrpc.get(actor.make_and_keep.remote(paths[3], name="another")) > 0
    assert actorrpc.get(actor.make_and_keep.remote(paths[3], name="more")) > 0
    actorrpc.get(actor.keep.remote(None))
    assert actorrpc.get(actor.make_and_keep.remote(paths[3], name="more")) > 0  # dropped where it was made


def test_arguments_of_the_constructor_are_let_go(place: str, paths: list[str]) -> None:
    """An actor given to a constructor lives as long as that actor may be restarted, or holds it."""
    inner = Mortal.remote(paths[0])
    outer = Mortal.remote(paths[1], inner)
    actorrpc.get(outer.ping.remote())
    del outer
    until(lambda: _ended(Path(paths[1])))
    del inner
    until(lambda: _ended(Path(paths[0])))


def test_a_stream_keeps_its_actor(paths: list[str]) -> None:
    stream = Mortal.remote(paths[0]).stream.remote(100)
    gc.collect()
    assert [actorrpc.get(ref) for ref in stream] == list(range(100))
    del stream
    until(lambda: _ended(Path(paths[0])))


def test_a_worker_option(place: str, paths: list[str]) -> None:
    here = Mortal.options(worker=0).remote(paths[0])
    assert actorrpc.get(here.pid.remote()) == os.getpid()
    first = Mortal.remote(paths[1])
    beside = Mortal.options(worker=first).remote(paths[2])
    assert actorrpc.get(beside.pid.remote()) == actorrpc.get(first.pid.remote())
    del beside, here
    until(lambda: _ended(Path(paths[0])) and _ended(Path(paths[2])))
    assert actorrpc.get(first.ping.remote()) == "pong"
    with pytest.raises(actorrpc.RpcError, match="nobody"):
        Mortal.options(worker="nobody").remote(paths[3])


def test_two_actors_of_one_process_end_one_by_one(place: str, paths: list[str]) -> None:
    first = Mortal.remote(paths[0])
    pid = actorrpc.get(first.pid.remote())
    second = Mortal.options(worker=first).remote(paths[1])
    assert actorrpc.get(second.pid.remote()) == pid
    del first
    until(lambda: _ended(Path(paths[0])))
    if place == "group":
        assert actorrpc.get(second.ping.remote()) == "pong"
    else:  # the process was the first one's own
        until(lambda: not actorrpc.is_alive(second))
        with pytest.raises(actorrpc.ActorDiedError):
            actorrpc.get(second.ping.remote())


# -- actors that are killed, exit and come back --------------------------------------------------------------


@actorrpc.remote
class Fragile:
    """Counts; where it is given a gate, it is made when that opens."""

    def __init__(self, start: int = 0, path: str = "") -> None:
        if path:
            pass_gate(path)
        self.count = start

    def step(self) -> int:
        self.count += 1
        return self.count

    def block(self, path: str) -> str:
        return pass_gate(path)

    def make(self, **options: Any) -> Any:
        return Fragile.options(**options).remote(10)


def error_of(ref: Any) -> BaseException:
    """What getting a result raises."""
    with pytest.raises(Exception) as caught:
        actorrpc.get(ref, timeout=30)
    return caught.value


def test_calls_before_it_is_there() -> None:
    fragile = Fragile.remote()
    assert actorrpc.get([fragile.step.remote() for _ in range(200)]) == list(range(1, 201))


def test_kill_is_for_good(gate: Path) -> None:
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
    # Where it shared a worker, its thread is still at the gate.
    descriptor = os.open(gate, os.O_RDWR)
    os.close(descriptor)


def test_kill_and_restart() -> None:
    fragile = Fragile.options(max_restarts=2).remote(5)
    for _ in range(3):
        assert actorrpc.get([fragile.step.remote(), fragile.step.remote()]) == [6, 7]
        actors.kill(fragile, no_restart=False)
    error = error_of(fragile.step.remote())
    assert isinstance(error, ActorDiedError)
    assert "max_restarts is 2" in str(error)


def test_names() -> None:
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


def test_a_weak_handle_does_not_keep_it() -> None:
    strong = Fragile.options(name="weak").remote()
    weak = actors.get_actor("weak")
    assert actorrpc.get(weak.step.remote()) == 1
    ended = actors.monitor(weak)
    del strong
    gc.collect()
    assert "its last handle is gone" in str(ended.wait(30))
    assert isinstance(error_of(weak.step.remote()), ActorDiedError)


def test_deadlines_and_cancellation_while_it_is_made(gate: Path) -> None:
    blocked = Fragile.remote(path=str(gate))
    refs = [blocked.step.remote() for _ in range(4)]
    assert actorrpc.actors.cancel(refs[1])
    error = error_of(refs[1])
    assert isinstance(error, CancelledError)
    assert error.maybe_executed is False
    late = blocked.step.options(timeout=0.05).remote()
    error = error_of(late)
    assert isinstance(error, RpcTimeoutError)
    assert error.maybe_executed is False
    open_gate(gate)
    assert actorrpc.get([refs[0], refs[2], refs[3]]) == [1, 2, 3]


def test_max_pending_calls(gate: Path) -> None:
    fragile = Fragile.options(max_pending_calls=2).remote()
    refs = [fragile.block.remote(str(gate)), fragile.step.remote()]
    with pytest.raises(PendingCallsLimitExceeded, match="max_pending_calls=2"):
        fragile.step.remote()
    open_gate(gate)
    assert actorrpc.get(refs) == ["go", 1]
    assert actorrpc.get(fragile.step.remote()) == 2
