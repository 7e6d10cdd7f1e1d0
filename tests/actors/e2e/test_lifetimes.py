"""How long actors live, and what happens when they end."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from tests.actors.e2e.kit import Gate, Log, alive, open_gate, pass_gate, row_of, until

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

    def make(self, path: str) -> Any:
        return Mortal.remote(path)

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


def test_a_method_object_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "end"
    ping = Mortal.remote(str(path)).ping
    gc.collect()
    assert actorrpc.get(ping.remote()) == "pong"
    assert actorrpc.get(ping.remote()) == "pong"
    del ping
    until(lambda: _ended(path))


def test_a_result_outlives_its_actors_handles(tmp_path: Path) -> None:
    path = tmp_path / "end"
    ref = Mortal.remote(str(path)).big.remote()
    actorrpc.wait([ref], fetch_local=False)
    gc.collect()
    assert float(actorrpc.get(ref).sum()) == 1 << 20
    assert float(actorrpc.get(total.remote(ref))) == 1 << 20
    del ref
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


@actorrpc.remote
def total(x: Any) -> float:
    return float(x.sum())


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


def test_a_handle_got_by_name_is_weak(paths: list[str]) -> None:
    actor = Mortal.options(name="weak").remote(paths[0])
    by_name = actorrpc.get_actor("weak")
    assert by_name == actor
    assert actorrpc.get(by_name.ping.remote()) == "pong"
    with pytest.raises(actorrpc.NameTakenError, match="weak"):
        Mortal.options(name="weak").remote(paths[1])
    again = Mortal.options(name="weak", get_if_exists=True).remote(paths[1])
    assert again == actor
    del actor, again
    until(lambda: _ended(Path(paths[0])))
    with pytest.raises(actorrpc.ActorDiedError):
        actorrpc.get(by_name.ping.remote())
    with pytest.raises(ValueError, match="weak"):
        actorrpc.get_actor("weak")


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


@pytest.mark.parametrize("method", ["leave", "leave_async"])
def test_exit_actor_of_an_async_actor(method: str) -> None:
    actor = AsyncLeaver.remote()
    with pytest.raises(actorrpc.ActorDiedError, match="exit_actor"):
        actorrpc.get(getattr(actor, method).remote())
    with pytest.raises(actorrpc.ActorDiedError):
        actorrpc.get(actor.leave.remote())


@actorrpc.remote
class AsyncLeaver:
    async def leave_async(self) -> None:
        actorrpc.exit_actor()

    def leave(self) -> None:
        actorrpc.exit_actor()


def test_monitors_fire_once(paths: list[str]) -> None:
    actor = Mortal.remote(paths[0])
    fired: list[Any] = []
    first, second = actorrpc.monitor(actor, fired.append), actorrpc.monitor(actor)
    assert not first.done()
    actorrpc.kill(actor)
    error = first.wait(10)
    assert isinstance(error, actorrpc.ActorDiedError)
    assert isinstance(second.wait(10), actorrpc.ActorDiedError)
    until(lambda: fired)
    assert isinstance(actorrpc.monitor(actor).wait(10), actorrpc.ActorDiedError)
    assert len(fired) == 1


def test_monitors_fire_when_the_last_handle_goes(paths: list[str]) -> None:
    actor = Mortal.remote(paths[0])
    watched = actorrpc.monitor(actor)
    actorrpc.get(actor.ping.remote())
    del actor
    assert isinstance(watched.wait(10), actorrpc.ActorDiedError)


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


def test_an_actor_in_a_cycle_with_another(paths: list[str]) -> None:
    """Two actors that hold each other are a cycle over processes: kill ends it."""
    a, b = Mortal.remote(paths[0]), Mortal.remote(paths[1])
    actorrpc.get([a.keep.remote(b), b.keep.remote(a)])
    actorrpc.kill(a)
    del a, b


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


def test_ready_and_a_log(paths: list[str]) -> None:
    actor, log = Mortal.remote(paths[0]), Log.remote()
    assert actorrpc.get(actorrpc.ready(actor)) is None
    assert actorrpc.get(actor.ready()) is None
    assert actorrpc.get([log.add.remote(n) for n in range(3)]) == [1, 2, 3]
    assert actor.is_alive()
    gate = Gate.remote()
    assert actorrpc.get(gate.count.remote()) == 0
    assert row_of(actor).state == "ALIVE"


@actorrpc.remote
class Swallows:
    def boom(self) -> None:
        raise ValueError("boom")

    def swallow(self, other: Any, held: Any) -> str:
        gc.disable()  # what happens to come by and collects is no proof
        ref = other.boom.remote()
        try:
            actorrpc.get(ref)
        except ValueError:
            pass
        return "swallowed"

    def collect(self) -> None:
        gc.enable()
        gc.collect()


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True, reason="an error that get() raised leads by its traceback to the frame with its ObjectRef"
)
def test_an_error_that_a_method_has_caught_keeps_nothing(paths: list[str]) -> None:
    actor, other, held = Swallows.remote(), Swallows.remote(), Mortal.remote(paths[0])
    assert actorrpc.get(actor.swallow.remote(other, held)) == "swallowed"
    watched = actorrpc.monitor(held)
    del held
    try:
        watched.wait(1.0)
    finally:
        actorrpc.get(actor.collect.remote())
        watched.wait(30)  # then it goes
