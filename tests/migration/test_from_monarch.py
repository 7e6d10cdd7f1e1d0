"""The rows of docs/migration/from-monarch.md."""

from __future__ import annotations

import asyncio
import collections
import threading
from typing import Any

import pytest
import torch

import actorrpc
import actorrpc.autograd as dist_autograd
from actorrpc import actors, get, testing
from tests.actors import things
from tests.actors.e2e.kit import until
from tests.cluster.joiners import is_there, joiner
from tests.migration import test_from_multiprocessing, test_from_ray
from tests.migration.rows import check, row


def test_each_row_of_the_page_has_a_test() -> None:
    check("from-monarch.md", globals(), test_from_multiprocessing, test_from_ray)


class Worker:
    """A class without decorator."""

    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.rank = actorrpc.current_rank()["gpus"]

    def add(self, x: int) -> int:
        return int(self.base + self.rank + x)

    def set(self, base: int) -> None:
        self.base = base

    def rank_now(self) -> int:
        return int(actorrpc.current_rank()["gpus"])

    def itself(self) -> Any:
        return actorrpc.current_actor(), actorrpc.get_runtime_context().actor_id

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.rank


@actorrpc.remote
class Both:
    """A class with plain methods and coroutines."""

    def plain(self) -> int:
        return threading.get_ident()

    @actorrpc.method(thread=True)
    def on_a_thread(self) -> int:
        return threading.get_ident()

    async def coroutine(self) -> int:
        await asyncio.sleep(0)
        return threading.get_ident()


@pytest.fixture
def group(near: testing.InProcessCluster) -> Any:
    return actorrpc.spawn({"gpus": 3}, Worker, 10)


@pytest.mark.usefixtures("near")
@row("class A(Actor)")
def test_any_class_can_be_an_actor_with_all_its_methods() -> None:
    counted = actorrpc.remote(collections.Counter).remote("abca")  # a class of another library
    assert get(counted.most_common.remote(1)) == [("a", 2)]
    assert get(things.Counter.remote().add.remote()) == 1  # a decorated class


@pytest.mark.usefixtures("near")
@row("this_host().spawn_procs(")
def test_spawn_creates_a_group_in_one_step() -> None:
    group = actorrpc.spawn({"gpus": 2}, Worker, 10, options={"worker": "worker0", "name": None})
    assert list(get(group.add.call(1)).values()) == [11, 12]
    assert {row.worker for row in actorrpc.list_actors()} == {"worker0"}


@row("mesh.m.call(x).get()")
def test_calling_all_actors_of_a_group_returns_a_value_mesh(group: Any) -> None:
    found = get(group.add.call(1))
    assert isinstance(found, actors.ValueMesh)
    assert list(found.values()) == [11, 12, 13]


@row("mesh.m.call_one(x).get()")
def test_call_one_calls_the_only_actor_of_a_slice(group: Any) -> None:
    assert get(group.slice(gpus=2).add.call_one(1)) == 13
    assert get(next(iter(group)).add.remote(1)) == 11
    with pytest.raises(ValueError):
        group.add.call_one(1)


@row("mesh.m.choose(x)")
@row("no groups of actors", "from-ray.md")
def test_choose_broadcast_and_stream(group: Any) -> None:
    chosen = group.add.choose(1)
    assert isinstance(chosen, actorrpc.ObjectRef)
    assert get(chosen) in (11, 12, 13)
    assert group.set.broadcast(20) is None
    found = {point["gpus"]: ref for point, ref in group.add.stream(1)}
    assert all(isinstance(ref, actorrpc.ObjectRef) for ref in found.values())
    assert {rank: get(ref) for rank, ref in found.items()} == {0: 21, 1: 22, 2: 23}


@row("mesh.slice(gpus=")
def test_groups_can_be_sliced(group: Any) -> None:
    assert group.slice(gpus=slice(0, 2)).extents == {"gpus": 2}
    assert list(get(group.slice(gpus=slice(0, 2)).add.call(1)).values()) == [11, 12]
    assert list(group(gpus=0)) == list(group.slice(gpus=0))


@row("current_rank()")
def test_current_rank_is_known_in_constructors_and_methods(group: Any) -> None:
    assert list(get(group.rank_now.call()).values()) == [0, 1, 2]
    assert list(get(group.add.call(0)).values()) == [10, 11, 12]  # known in the constructor


@row("await mesh.m.call(x)")
def test_calls_of_a_group_can_be_awaited(group: Any) -> None:
    async def waits() -> Any:
        return await group.add.call(2)

    assert list(asyncio.run(waits()).values()) == [12, 13, 14]


@pytest.mark.usefixtures("near")
@row("endpoints are all sync, or all async")
def test_a_class_may_have_plain_methods_and_coroutines() -> None:
    both = Both.remote()
    loop = get(both.coroutine.remote())
    assert get(both.plain.remote()) == loop
    assert get(both.on_a_thread.remote()) != loop


@row("context().actor_instance")
def test_an_actor_can_get_its_own_handle_and_id(group: Any) -> None:
    first = next(iter(group))
    assert get(first.itself.remote()) == (first, first.actor_id)


@pytest.mark.usefixtures("passing")
@row("a failure that no __supervise__ handles")
@row("process.terminate()", "from-multiprocessing.md")
def test_the_death_of_an_actor_fails_only_its_calls_and_strategies_restart_actors() -> None:
    group = actorrpc.spawn({"gpus": 2}, Worker, 10)
    actorrpc.kill(next(iter(group)))
    with pytest.raises(actorrpc.ActorDiedError):
        get(group.add.call(1))
    assert get(group(gpus=1).add.call_one(1)) == 12

    for strategy, kept in (("one_for_one", 21), ("one_for_all", 12)):
        group = actorrpc.spawn({"gpus": 2}, Worker, 10, options={"max_restarts": -1})
        get(group.set.call(19))
        with actorrpc.supervise(group, strategy=strategy):
            first, second = group
            first.kill(no_restart=False)
            assert get(first.add.remote(1)) == 11
            assert get(second.add.remote(1)) == kept


@pytest.mark.usefixtures("passing")
@row("__supervise__(self, failure)")
@pytest.mark.prints("it has given up")
def test_monitors_and_on_failure_are_called_once() -> None:
    log: list[Any] = []
    group = actorrpc.spawn({"gpus": 2}, Worker, options={"max_restarts": -1})
    first, second = group
    get(group.add.call(1))
    actorrpc.monitor(second, log.append)
    given_up: list[Any] = []
    supervision = actorrpc.supervise(group, max_restarts=1, on_failure=given_up.append)
    first.kill(no_restart=False)
    get(first.add.remote(1))
    first.kill(no_restart=False)
    assert isinstance(supervision.monitor().wait(60), actorrpc.SupervisionError)
    until(lambda: given_up and log)
    [error] = given_up
    assert str(error).count("it was killed with kill()") >= 2
    assert [type(each) for each in log] == [actorrpc.ActorDiedError]


@row("RDMABuffer")
def test_tensors_can_be_arguments_and_results(group: Any) -> None:
    found = list(get(group.scale.call(torch.ones(2))).values())
    assert [each.tolist() for each in found] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


@pytest.mark.usefixtures("near")
@row("mesh.m.rref(x)")
def test_gradients_flow_through_calls() -> None:
    net = things.Net.remote(2)
    x = torch.ones(1, 2, requires_grad=True)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [net(x).sum()])
        assert x in dist_autograd.get_gradients(context)


@actorrpc.remote
class Member:
    def total(self, x: float) -> float:
        tensor = torch.tensor(x + actorrpc.current_rank().rank)
        torch.distributed.all_reduce(tensor, group=actorrpc.collective_group())
        return float(tensor)


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
class TestProcesses:
    """Rows that need processes."""

    @row("RDMABuffer")
    def test_actors_of_a_group_can_reduce_in_a_collective(self) -> None:
        group = Member.group(2)
        collective = actorrpc.collective(group)
        assert list(get(group.total.call(1.0)).values()) == [3.0, 3.0]
        collective.destroy()


@pytest.mark.slow
@row("setup of hosts by HostMesh")
def test_a_worker_joins_by_a_command() -> None:
    with (
        actorrpc.init(listen="tcp://127.0.0.1:0") as context,
        joiner(context.address, "--name", "there"),
    ):
        until(lambda: is_there("there"))
        actor = things.Counter.options(worker="there").remote()
        assert get(actor.add.remote()) == 1
        del actor


@pytest.mark.slow
@row("this_host().spawn_procs(")
def test_placement_is_an_option_of_spawn() -> None:
    with actorrpc.init(num_gpus=0), pytest.raises(actorrpc.PlacementError, match="needs GPU 1"):
        actorrpc.spawn({"gpus": 2}, Worker, options={"num_gpus": 1})
