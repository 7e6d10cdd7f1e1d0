"""Actor groups: on one worker, where tests hold members up with events, and large arguments between processes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import errors
from actorrpc.actors.api import get_actor, list_actors
from actorrpc.actors.client.actor_class import ActorClass
from actorrpc.actors.groups import broadcast
from actorrpc.actors.groups.group import ActorGroup, current_rank, spawn
from actorrpc.actors.groups.mesh import Point
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.refs.wait import get
from tests.actors.e2e.kit import until
from tests.layers import rest_is_slow
from tests.migration.rows import row
from tests.ranks import rpc_group

# With one worker the actors live in this process and share these objects with the tests.


class _Gates(dict[Any, threading.Event]):
    """Events that are created at their first use. Two threads that use a key at the same time get the same event."""

    def __missing__(self, key: Any) -> threading.Event:
        return self.setdefault(key, threading.Event())


_gates = _Gates()
_notes: list[Any] = []


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    _gates.clear()
    _notes.clear()
    yield
    for gate in _gates.values():
        gate.set()


@ActorClass
class Worker:
    """Returns its rank, counts, fails, and waits for the test."""

    def __init__(self, base: int = 0, *, extra: int = 0) -> None:
        self.rank = current_rank().rank
        self.base = base + extra
        self.count = 0

    def add(self, value: int) -> int:
        return self.base + self.rank + value

    def where(self) -> Point:
        return current_rank()

    def increment(self) -> int:
        self.count += 1
        return self.count

    def note(self, what: Any) -> None:
        _notes.append((self.rank, what))

    def fail_at(self, rank: int) -> int:
        if self.rank == rank:
            raise KeyError(f"rank {rank}")
        return self.rank

    def hold(self, *ranks: int) -> int:
        """Wait for the test if this member has one of the ranks."""
        if self.rank in ranks:
            _gates["holding", self.rank].set()
            assert _gates[self.rank].wait(30)
        return self.rank

    def call_group(self, workers: ActorGroup[Any]) -> list[int]:
        return list(get(workers.add.call(1)))

    def restart_group(self, workers: ActorGroup[Any]) -> None:
        workers.restart(0)

    def numbers(self) -> Iterator[int]:
        yield self.rank


@pytest.fixture
def workers(one_worker: None) -> Iterator[ActorGroup[Any]]:
    made: ActorGroup[Any] = spawn({"hosts": 2, "gpus": 3}, Worker, 100)
    get(made.ready())
    yield made
    for gate in list(_gates.values()):
        gate.set()


def _until_dead(handle: Any) -> None:
    """Return when calls to a killed actor fail: calls that were already sent may still run."""
    try:
        while True:
            get(handle.where.remote())
    except errors.ActorDiedError:
        pass


# -- creating groups ----------------------------------------------------------------------------------------


@row("mesh.m.call(x).get()", "from-monarch")
@row("current_rank()", "from-monarch")
def test_current_rank_gives_members_their_rank_and_coordinates(workers: ActorGroup[Any]) -> None:
    places = get(workers.where.call())
    assert [place.rank for place in places] == list(range(6))
    assert [dict(place) for place in places] == [
        {"hosts": host, "gpus": gpu} for host in range(2) for gpu in range(3)
    ]
    assert all(place.size == 6 and place.extents == {"hosts": 2, "gpus": 3} for place in places)
    assert list(get(workers.add.call(0))) == [100 + rank for rank in range(6)]  # known in the constructor


class Plain:
    """A class without @remote."""

    def where(self) -> int:
        return current_rank().rank


@row("this_host().spawn_procs(", "from-monarch")
def test_per_rank_and_options_functions_set_arguments_and_options_of_each_member(one_worker: None) -> None:
    made = spawn(
        {"x": 3},
        Worker,
        100,
        per_rank=lambda point: ((), {"extra": 10 * point["x"]}),
        options=lambda point: {"name": f"member{point.rank}"},
    )
    assert list(get(made.add.call(0))) == [100, 111, 122]
    assert get(get_actor("member2").add.remote(0)) == 122
    assert get_actor("member1") == made.handles[1]
    both = spawn(2, Worker, per_rank=lambda point: ((50,), {}), options={"max_concurrency": 2})
    assert list(get(both.add.call(0))) == [50, 51]


def test_wrong_sizes_arguments_and_options_of_a_group_are_refused(one_worker: None) -> None:
    with pytest.raises(errors.ConfigError, match="at least 1"):
        spawn(0, Worker)
    with pytest.raises(TypeError, match="unexpected keyword"):
        spawn(2, Worker, nothing=1)
    with pytest.raises(errors.ConfigError, match="one name 'x'"):
        spawn(2, Worker, options={"name": "x"})
    with pytest.raises(errors.WrongTypeError, match="options must be"):
        spawn(2, Worker, options=[1])  # type: ignore[arg-type]
    with pytest.raises(errors.WrongTypeError, match="per_rank must return"):
        spawn(2, Worker, per_rank=lambda point: (1, 2))  # type: ignore[arg-type,return-value]
    with pytest.raises(errors.ConfigError, match="naem") as caught:
        spawn(2, Worker, options={"naem": "x"})
    assert caught.value.__notes__ == ["while rank 0 (rank=0) of a group of 2 was made"]


def test_current_rank_raises_outside_of_a_group(one_worker: None) -> None:
    with pytest.raises(errors.ActorError, match="no actor runs here"):
        current_rank()
    alone_made = ActorClass(Plain).remote()
    with pytest.raises(errors.ActorError, match="not made by spawn"):
        get(alone_made.where.remote())


def test_ready_fails_with_the_error_of_a_failed_constructor_and_names_its_rank(one_worker: None) -> None:
    made = spawn(3, Worker, per_rank=lambda point: (("no",) if point.rank == 1 else (), {"extra": 1}))
    with pytest.raises(errors.ActorDiedError, match="TypeError") as caught:
        get(made.ready())
    assert caught.value.rank == 1  # type: ignore[attr-defined]
    assert "rank 1" in caught.value.__notes__[0]
    good = made.slice(rank=slice(0, 3, 2))
    get(good.ready())
    assert list(get(good.add.call(0))) == [1, 3]


# -- calling all --------------------------------------------------------------------------------------------


@row("mesh.m.call_one(x).get()", "from-monarch")
@row("mesh.m.choose(x)", "from-monarch")
@row("no groups of actors", "from-ray")
def test_group_methods_can_be_called_by_attribute_name_and_function(workers: ActorGroup[Any]) -> None:
    assert list(get(workers.call("add", 1))) == list(get(workers.call(Worker.add, 1)))
    assert list(get(workers.endpoint("add").call(value=1))) == list(get(workers.add.call(1)))
    assert get(workers.slice(hosts=0, gpus=0).call_one(Worker.add, 1)) == 101
    with pytest.raises(errors.ConfigError, match="has 6"):
        workers.call_one(Worker.add, 1)
    assert get(workers.choose("add", 1)) in range(101, 107)
    assert sorted(get(ref) for _, ref in workers.stream("add", 1)) == list(range(101, 107))


def test_a_group_call_raises_the_first_failure_without_waiting_for_other_members(
    workers: ActorGroup[Any],
) -> None:
    held = workers.slice(gpus=0).hold.call(0)
    assert _gates["holding", 0].wait(30)
    with pytest.raises(KeyError, match="rank 4") as caught:
        get(workers.fail_at.call(4))  # rank 0 has not answered yet
    assert caught.value.rank == 4  # type: ignore[attr-defined]
    assert caught.value.__notes__ == ["raised by rank 4 (hosts=1, gpus=1), of 6 Worker (hosts=2, gpus=3)"]
    _gates[0].set()
    assert list(get(held)) == [0, 3]


def test_a_failure_in_a_slice_names_both_ranks(workers: ActorGroup[Any]) -> None:
    with pytest.raises(KeyError) as caught:
        get(workers.slice(hosts=1).fail_at.call(4))
    assert caught.value.rank == 1  # type: ignore[attr-defined]
    assert (
        "rank 1 (gpus=1) of the slice, rank 4 (hosts=1, gpus=1) of the whole group"
        in caught.value.__notes__[0]
    )


def test_return_exceptions_gives_exceptions_as_values(workers: ActorGroup[Any]) -> None:
    for ref in (
        workers.fail_at.options(return_exceptions=True).call(4),
        workers.options(return_exceptions=True).call("fail_at", 4),
        workers.options(return_exceptions=True, priority=1)(hosts=slice(None)).fail_at.call(4),
    ):
        values = get(ref)
        assert [values[rank] for rank in (0, 1, 2, 3, 5)] == [0, 1, 2, 3, 5]
        assert isinstance(values[4], KeyError)
        assert values[4].rank == 4  # type: ignore[attr-defined]
    with pytest.raises(KeyError):
        get(workers.options(return_exceptions=True).fail_at.options(return_exceptions=False).call(4))


def test_wrong_arguments_of_group_calls_raise_before_anything_is_sent(workers: ActorGroup[Any]) -> None:
    for call in (workers.note.call, workers.note.broadcast, workers.note.stream, workers.note.choose):
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            call()
    with pytest.raises(TypeError):
        workers.note.call(threading.Lock())
    get(workers.note.call("sent"))
    assert {what for _, what in _notes} == {"sent"}


def test_cancelling_a_group_call_cancels_the_calls_of_all_members(workers: ActorGroup[Any]) -> None:
    held = workers.hold.call(*range(6))
    for rank in range(6):
        assert _gates["holding", rank].wait(30)
    behind = workers.increment.call()
    assert behind.cancel()
    with pytest.raises(errors.CancelledError):
        get(behind)
    while any(info.pending_calls for info in list_actors()):  # until they have left the mailboxes
        pass
    for rank in range(6):
        _gates[rank].set()
    get(held)
    assert list(get(workers.increment.call())) == [1] * 6


def test_calls_to_a_group_and_to_its_slices_keep_their_order(workers: ActorGroup[Any]) -> None:
    for number in range(20):
        (workers if number % 2 else workers.slice(gpus=1)).note.broadcast(number)
    get(workers.note.call("end"))
    for rank in range(6):
        mine = [what for who, what in _notes if who == rank]
        numbers = range(20) if rank % 3 == 1 else range(1, 20, 2)
        assert mine == [*numbers, "end"]


# -- other ways of calling ----------------------------------------------------------------------------------


def test_choose_selects_the_least_busy_member(workers: ActorGroup[Any]) -> None:
    held = [workers.hold.choose(*range(6)) for _ in range(5)]
    for rank in range(5):
        assert _gates["holding", rank].wait(30)
    assert [get(workers.add.choose(0)) for _ in range(3)] == [105] * 3
    for rank in range(5):
        _gates[rank].set()
    assert sorted(get(held)) == [0, 1, 2, 3, 4]


def test_choose_skips_dead_members(workers: ActorGroup[Any]) -> None:
    workers.slice(hosts=0).kill()
    for handle in workers.slice(hosts=0):
        _until_dead(handle)
    assert {get(workers.add.choose(0)) for _ in range(12)} == {103, 104, 105}
    with pytest.raises(errors.ActorDiedError):
        get(workers.slice(hosts=0).add.choose(0))


def test_a_slice_without_members_gives_no_results_and_cannot_choose(workers: ActorGroup[Any]) -> None:
    empty = workers.slice(gpus=slice(0, 0))
    assert list(get(empty.add.call(1))) == []
    with pytest.raises(errors.ConfigError, match="there is no member to choose"):
        empty.add.choose(1)


@pytest.mark.prints(r"broadcast of Worker\.fail_at of 6 Worker .* failed for rank 4 .*KeyError\('rank 4'\)")
def test_broadcast_calls_all_members_and_logs_failures(
    workers: ActorGroup[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "actorrpc"):
        assert workers.fail_at.broadcast(4) is None
        assert workers.broadcast("increment") is None
        assert list(get(workers.increment.call())) == [2] * 6
        until(
            lambda: bool(caplog.records)
        )  # a pool thread logs the failure, possibly after the later answers
        gc.collect()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "Worker.fail_at" in lines[0]
    assert "rank 4 (hosts=1, gpus=1)" in lines[0]


@row("await mesh.m.call(x)", "from-monarch")
def test_group_stream_yields_results_as_they_complete(workers: ActorGroup[Any]) -> None:
    stream = workers.hold.stream(0, 5)
    first = [next(stream) for _ in range(4)]
    assert sorted(point.rank for point, _ in first) == [1, 2, 3, 4]
    assert all(get(ref) == point.rank for point, ref in first)
    _gates[5].set()
    point, ref = next(stream)
    assert (point["hosts"], point["gpus"], get(ref)) == (1, 2, 5)
    _gates[0].set()
    assert [point.rank for point, _ in stream] == [0]

    async def ranks() -> list[int]:
        assert list(await workers.add.call(0)) == list(range(100, 106))
        return sorted([point.rank async for point, _ in workers.add.stream(0)])

    assert asyncio.run(ranks()) == list(range(6))


def test_generator_methods_cannot_be_called_on_a_whole_group(workers: ActorGroup[Any]) -> None:
    for call in (workers.numbers.call, workers.numbers.broadcast, workers.numbers.stream):
        with pytest.raises(errors.WrongTypeError, match="one by one"):
            call()
    assert [get(ref) for ref in workers.numbers.choose()] == [0]


# -- slices, names, sending ---------------------------------------------------------------------------------


@row("mesh.slice(gpus=", "from-monarch")
def test_slices_of_a_group_share_its_members(workers: ActorGroup[Any]) -> None:
    get(workers.slice(hosts=1).increment.call())
    assert list(get(workers.increment.call())) == [1, 1, 1, 2, 2, 2]
    part = workers.slice(hosts=1, gpus=slice(None, None, 2))
    assert (part.size, len(part), part.extents, bool(part)) == (2, 2, {"gpus": 2}, True)
    assert list(get(part.add.call(0))) == [103, 105]
    assert list(part) == [workers.handles[3], workers.handles[5]] == list(part.handles)
    assert list(get(workers.flatten().slice(rank=slice(4, None)).add.call(0))) == [104, 105]
    with pytest.raises(errors.ConfigError, match="no dimension 'racks'"):
        workers.slice(racks=1)


def test_unknown_methods_of_a_group_raise_with_a_suggestion(workers: ActorGroup[Any]) -> None:
    with pytest.raises(AttributeError, match="did you mean 'increment'"):
        workers.incremnt  # noqa: B018
    with pytest.raises(AttributeError, match="no method 'nothing'"):
        workers.call("nothing")
    with pytest.raises(errors.WrongTypeError, match="by name"):
        workers.call(3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"group\.add\.call\(\.\.\.\)"):
        workers.add(1)
    assert "increment" in dir(workers)
    assert repr(workers) == "<ActorGroup of 6 Worker (hosts=2, gpus=3)>"
    assert repr(workers.add) == "<add of <ActorGroup of 6 Worker (hosts=2, gpus=3)>>"


def test_a_group_can_be_sent_to_an_actor_but_not_restarted_there(workers: ActorGroup[Any]) -> None:
    caller = ActorClass(Worker.__actor_class__)
    one = spawn(1, caller).handles[0]
    assert get(one.call_group.remote(workers)) == list(range(101, 107))
    assert get(one.call_group.remote(workers.slice(hosts=1))) == [104, 105, 106]
    with pytest.raises(errors.ConfigError, match="came from another worker"):
        get(one.restart_group.remote(workers))


# -- restarting members -------------------------------------------------------------------------------------


def test_restart_replaces_a_member_in_the_group_and_its_slices(workers: ActorGroup[Any]) -> None:
    part = workers.slice(hosts=1)
    get(workers.increment.call())
    old = workers.handles[4]
    made = workers.restart(4)
    assert made != old
    assert workers.handles[4] == made == part.handles[1]
    assert list(get(workers.increment.call())) == [2, 2, 2, 2, 1, 2]
    assert list(get(part.increment.call())) == [3, 2, 3]
    assert get(made.where.remote()) == workers.mesh.coords_of(4)
    assert get(made.add.remote(0)) == 104
    _until_dead(old)


def test_restart_accepts_a_rank_or_coordinates(workers: ActorGroup[Any]) -> None:
    workers.slice(hosts=1, gpus=1).kill()
    _until_dead(workers.handles[4])
    with pytest.raises(errors.ActorDiedError) as caught:
        get(workers.increment.call())
    assert caught.value.rank == 4  # type: ignore[attr-defined]
    workers.slice(hosts=1).restart(gpus=1)
    assert list(get(workers.add.call(0))) == list(range(100, 106))
    with pytest.raises(IndexError):
        workers.restart(6)
    with pytest.raises(errors.ConfigError, match="not both"):
        workers.restart(1, hosts=1)
    with pytest.raises(errors.ConfigError, match="give gpus"):
        workers.restart(hosts=1)


# -- distribution of large arguments ------------------------------------------------------------------------


def test_weight_of_counts_the_bytes_of_plain_tensors_arrays_and_bytes() -> None:
    tensor = torch.zeros(1000)
    assert broadcast.weight_of(tensor) == 4000
    assert broadcast.weight_of([tensor, {"a": (tensor,)}, b"12345", "xyz"]) == 8008
    assert broadcast.weight_of(tensor.numpy()) == 4000
    assert broadcast.weight_of(memoryview(b"1234")) == 4
    assert broadcast.weight_of([1, None, object()]) == 0
    assert broadcast.weight_of([tensor, torch.zeros(5, requires_grad=True)]) == 0
    assert broadcast.weight_of(torch.nn.Linear(1000, 1000)) == 0
    cyclic: list[Any] = [tensor]
    cyclic.append(cyclic)
    assert broadcast.weight_of(cyclic) == 4000
    assert broadcast.weight_of([[1] * 10_000, tensor]) == 4000


@ActorClass
class Receiver:
    """Takes large arguments."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def take(self, tensor: torch.Tensor, *, more: torch.Tensor | None = None) -> tuple[int, int, float]:
        rank = current_rank().rank
        before = float(tensor.sum())
        tensor.add_(rank)  # changes only this member's copy
        self.seen.append("large")
        return rank, os.getpid(), before + (0.0 if more is None else float(more.sum()))

    def large(self) -> torch.Tensor:
        return torch.full((_LARGE,), 2.0)

    def small(self) -> list[Any]:
        self.seen.append("small")
        return self.seen


_LARGE = 1 << 19  # elements: 2 MiB


class _Counted:
    """Counts how often this process pickles a large snapshot."""

    def __init__(self) -> None:
        self.count = 0
        pack = Snapshot.__reduce_ex__

        def counted(snapshot: Snapshot, protocol: Any) -> Any:
            self.count += snapshot.nbytes > _LARGE
            return pack(snapshot, protocol)

        Snapshot.__reduce_ex__ = counted  # type: ignore[method-assign,assignment]


def _receivers(per_worker: int, workers: int) -> ActorGroup[Any]:
    return spawn(
        {"workers": workers, "each": per_worker},
        Receiver,
        options=lambda point: {"worker": f"worker{point['workers'] + 1}"},
    )


def _fan_out(rank: int, world_size: int) -> None:
    if rank:
        return
    counted = _Counted()
    made = _receivers(2, world_size - 1)
    # Called before the members exist; the order of the caller is kept nevertheless.
    first = made.take.call(torch.ones(_LARGE))
    then = made.small.call()
    found = get(first)
    assert [each[0] for each in found] == list(range(made.size))
    assert [each[2] for each in found] == [float(_LARGE)] * made.size
    assert list(get(then)) == [["large", "small"]] * made.size
    assert counted.count == broadcast.WIDTH, counted.count
    tensor = torch.ones(_LARGE)
    second = made.take.call(tensor, more=torch.ones(_LARGE))
    tensor.zero_()  # the call has copied it
    assert [each[2] for each in get(second)] == [2.0 * _LARGE] * made.size
    assert counted.count == 3 * broadcast.WIDTH, counted.count
    # With few members the argument is sent directly.
    few = made.slice(each=0)
    assert few.size <= broadcast.DIRECT
    get(few.take.call(torch.ones(_LARGE)))
    assert counted.count == 3 * broadcast.WIDTH, counted.count


_APART: dict[str, Any] = {"lane": False}  # like separate hosts: no shared memory


@pytest.mark.limit(120)
def test_the_caller_sends_a_large_argument_to_a_few_members_only() -> None:
    rpc_group(_fan_out, 7, options=_APART)


def _die(above: Any, root: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(above: Any, root: Any) -> Any:
    raise OSError("no copy here")


def _broken_tree(rank: int, world_size: int, how: str) -> None:
    if rank == 1:  # the first worker in the tree, which has two children
        broadcast._fetch_copy = _die if how == "die" else _fail
    if rank:
        return
    made = _receivers(2, world_size - 1).options(return_exceptions=True)
    get(made.ready())
    found = get(made.take.call(torch.ones(_LARGE)))
    for point, value in found.items():
        if point["workers"] == 0:
            assert isinstance(value, errors.ActorDiedError if how == "die" else OSError), value
            assert value.rank == point.rank  # type: ignore[union-attr]
        else:
            assert value[2] == float(_LARGE)


@pytest.mark.limit(120)
@pytest.mark.parametrize("how", rest_is_slow(["die", "fail"]))
def test_workers_below_a_lost_worker_still_get_a_large_argument(how: str) -> None:
    rpc_group(_broken_tree, 7, how, may_die=(1,) if how == "die" else (), options=_APART)


def _broadcast_value(rank: int, world_size: int, apart: bool) -> None:
    if rank:
        return
    counted = _Counted()
    made = _receivers(2, world_size - 1)
    ref = actorrpc.put(torch.ones(_LARGE))
    near = actorrpc.broadcast(ref, made)
    assert actorrpc.wait(near, num_returns=made.size, fetch_local=False)[1] == []
    if apart:  # one copy for each worker; this process sends only the first few
        assert counted.count == broadcast.WIDTH, counted.count
    else:
        assert counted.count == 0, counted.count
    found = get([actor.take.remote(each) for actor, each in zip(made, near, strict=True)])
    assert [each[0] for each in found] == list(range(made.size))
    assert {each[2] for each in found} == {float(_LARGE)}  # each member has changed only its own copy
    # A value on another worker is sent from there, not from this process.
    before = counted.count
    there = made.handles[-1].large.remote()
    near = actorrpc.broadcast(there, [*made, made.handles[0]])
    found = get([actor.take.remote(each) for actor, each in zip(made, near, strict=False)])
    assert {each[2] for each in found} == {2.0 * _LARGE}
    if apart:
        assert counted.count == before, counted.count


@pytest.mark.limit(120)
@pytest.mark.parametrize("apart", rest_is_slow([True, False]), ids=["hosts", "one host"])
def test_broadcast_copies_a_large_value_to_all_workers(apart: bool) -> None:
    rpc_group(_broadcast_value, 6, apart, options=_APART if apart else {})


def test_broadcast_takes_references_to_small_pending_and_failed_values(workers: ActorGroup[Any]) -> None:
    handles = list(workers)
    for value in (7, "text", [1, 2], torch.ones(3), torch.ones(1 << 17)):
        near = actorrpc.broadcast(actorrpc.put(value), handles)
        for each in get(near):
            assert torch.equal(each, value) if isinstance(value, torch.Tensor) else each == value
    pending = handles[0].hold.remote(0)
    near = actorrpc.broadcast(pending, [handles[0], handles[1]])
    assert actorrpc.wait(near, timeout=0)[0] == []
    for gate in range(6):
        _gates[gate].set()
    assert len({*get(near)}) == 1
    failing = handles[0].fail_at.remote(0)
    for each in actorrpc.broadcast(failing, handles):
        with pytest.raises(KeyError):
            get(each)
    assert actorrpc.broadcast(pending, []) == []
    with pytest.raises(TypeError, match=r"put\(\) the value first"):
        actorrpc.broadcast(torch.ones(1), handles)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes the handle of an actor"):
        actorrpc.broadcast(pending, [pending])  # type: ignore[list-item]
