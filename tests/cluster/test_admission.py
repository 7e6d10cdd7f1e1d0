"""An actor starts when the resources that it requests are free: on the driver's machine and on joined workers alike."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

import actorrpc
from actorrpc import get, rpc
from actorrpc.actors.spec.actor_spec import ProcessSpec
from actorrpc.agent import peers
from actorrpc.cluster import ClusterContext, init, scale
from actorrpc.compat import ray
from actorrpc.compat.ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from actorrpc.errors import (
    ActorDiedError,
    ConfigError,
    PlacementError,
    UnknownWorkerError,
    UnplacedActorError,
)
from tests.cluster.drive import cluster, until
from tests.cluster.joiners import is_there, joiner, wait_for
from tests.cluster.remotes import Place
from tests.migration.rows import row

pytestmark = [pytest.mark.limit(90), pytest.mark.slow]
_MEANS = ("--num-cpus", "2", "--num-gpus", "2", "--resources", "disk=2")


class Peer:
    def where(self) -> str:
        return rpc.get_worker_info().name


@pytest.fixture(autouse=True)
def _test_leaves_nothing() -> None:
    """Disable the leak check of single tests: threads of the shared cluster start and end between tests."""


@pytest.fixture(scope="module")
def driver() -> Iterator[ClusterContext]:
    with init(
        listen="tcp://127.0.0.1:0", num_cpus=2, num_gpus=2, resources={"disk": 2}, labels={"zone": "driver"}
    ) as context:
        workers = [
            joiner(context.address, "--name", each, "--labels", f"zone={each}", *_MEANS)
            for each in ("w1", "w2")
        ]
        with workers[0], workers[1]:
            wait_for("w1", "w2")
            yield context


def _needs(resource: str, amount: float) -> dict[str, Any]:
    name = {"CPU": "num_cpus", "GPU": "num_gpus"}.get(resource)
    return {name: amount} if name else {"resources": {resource: amount}}


def _all_free() -> None:
    until(lambda: [actorrpc.available_resources().get(each) for each in ("CPU", "GPU", "disk")] == [6.0] * 3)


@pytest.mark.parametrize("resource", ["CPU", "GPU", "disk"])
@pytest.mark.parametrize(
    "place",
    [{"labels": {"zone": "driver"}}, {"worker": "driver"}, {"labels": {"zone": "w1"}}, {"worker": "w1"}],
)
@row("init(num_cpus=2): a third", "from-ray")
def test_an_actor_waits_for_resources_that_others_have_and_more_than_exist_is_refused(
    driver: ClusterContext, place: dict[str, Any], resource: str
) -> None:
    _all_free()
    having = [Place.options(**place, **_needs(resource, 1)).remote() for _ in range(2)]
    found = get([each.where.remote() for each in having])
    late = Place.options(**place, **_needs(resource, 1), placement_timeout=0.05).remote()
    with pytest.raises(PlacementError, match=rf"within 0.05 s.*'Place' needs {resource} 1, .*{resource} 0/2"):
        get(late.where.remote())
    with pytest.raises(PlacementError, match=rf"no place.*'Place' needs {resource} 3, .*{resource} 0/2"):
        Place.options(**place, **_needs(resource, 3)).remote()
    waits = Place.options(**place, **_needs(resource, 1)).remote().where.remote()
    assert actorrpc.wait([waits], timeout=0)[0] == []
    actorrpc.kill(having[0])
    assert get(waits) in found or "driver" not in place.values()


def test_actors_without_a_place_raise_placement_error_also_on_workers(driver: ClusterContext) -> None:
    late = Place.options(labels={"zone": "a"}, placement_timeout=0.05).remote()
    with pytest.raises(PlacementError, match=r"within 0.05 s.*needs label zone=a") as found:
        get(late.where.remote())
    assert isinstance(found.value, ActorDiedError)
    assert type(found.value.cause) is PlacementError
    assert isinstance(pickle.loads(pickle.dumps(found.value)), UnplacedActorError)
    with pytest.raises(PlacementError, match="dead"):
        get(actorrpc.ready(late))
    maker = Place.options(worker="w1").remote()
    for options in (
        {"labels": {"zone": "nowhere"}},
        {"worker": "driver", "resources": {"tape": 1}},
        {"num_cpus": 1000},
    ):
        with pytest.raises(PlacementError, match="'Place' needs ") as here:
            get(Place.options(**options).remote().where.remote())
        with pytest.raises(PlacementError) as there:
            get(maker.make.remote(options))
        assert str(there.value).partition("; there are")[0] == str(here.value).partition("; there are")[0]


def test_an_actor_in_the_process_of_another_actor_books_nothing(driver: ClusterContext) -> None:
    kept = Place.remote()
    where = actorrpc.get(kept.where.remote())
    neighbour = Place.options(worker=where, num_cpus=1).remote()
    assert actorrpc.get(neighbour.where.remote()) == where
    with pytest.raises(PlacementError, match="needs disk 1, worker"):
        Place.options(worker=where, resources={"disk": 1}).remote()


def test_worker_together_with_spread_raises_config_error(driver: ClusterContext) -> None:
    with pytest.raises(ConfigError, match="worker= fixes where"):
        Place.options(worker="driver", spread=True).remote()


def test_actors_spread_over_hosts_and_overflow_to_hosts_with_room(driver: ClusterContext) -> None:
    _all_free()
    for options in ({"spread": True}, {}):
        actors = [Place.options(**options, num_cpus=1).remote() for _ in range(6)]
        found = Counter(
            each if each in ("w1", "w2") else "driver" for each in get([a.where.remote() for a in actors])
        )
        assert found == {"driver": 2, "w1": 2, "w2": 2}
        with pytest.raises(PlacementError, match=r"needs CPU 1; .*CPU 0/2.*CPU 0/2.*CPU 0/2"):
            get(Place.options(**options, num_cpus=1, placement_timeout=0.05).remote().where.remote())
        del actors
        _all_free()


def test_an_actor_keeps_its_cpus_while_it_waits(driver: ClusterContext) -> None:
    _all_free()
    first = Place.options(num_cpus=2, worker="w1").remote()
    inner = {"num_cpus": 1, "labels": {"zone": "w1"}, "placement_timeout": 0.05}
    with pytest.raises(PlacementError, match=r"'Place' needs CPU 1, .*CPU 0/2"):
        get(first.make.remote(inner))
    assert get(first.make.remote({**inner, "num_cpus": 0})) == "w1"


@actorrpc.remote(num_cpus=1)
def _depth(n: int) -> int:
    return 1 + int(get(_depth.remote(n - 1))) if n else 0


@actorrpc.remote(num_gpus=2, num_cpus=2)
def _gpus() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_tasks_wait_for_resources_and_lend_their_cpus_while_they_wait(driver: ClusterContext) -> None:
    _all_free()
    having = [Place.options(num_cpus=2, num_gpus=1, spread=True).remote() for _ in range(3)]
    get([each.where.remote() for each in having])
    waits = [_depth.remote(7), *(_gpus.options(env={"A": each}).remote() for each in "bc")]
    assert actorrpc.wait(waits, timeout=0)[0] == []
    with pytest.raises(PlacementError, match=r"'task worker' needs CPU 3; .*CPU 0/2"):
        get(_depth.options(num_cpus=3).remote(0))
    for each in having:
        actorrpc.kill(each)
    assert get(waits) == [7, "0,1", "0,1"]  # more nested tasks than CPUs
    _all_free()  # although there are references to the results


@pytest.mark.parametrize(
    ("strategy", "bundles", "machines"),
    [
        ("STRICT_PACK", 2, 1),
        ("STRICT_PACK", 3, 0),
        ("STRICT_SPREAD", 3, 3),
        ("STRICT_SPREAD", 4, 0),
        ("PACK", 3, 2),
        ("SPREAD", 4, 3),
    ],
)
def test_a_placement_group_books_its_bundles_for_its_actors_and_tasks(
    driver: ClusterContext, strategy: str, bundles: int, machines: int
) -> None:
    _all_free()
    group = ray.util.placement_group([{"CPU": 1}] * bundles, strategy)
    assert group.wait(30) == bool(machines)
    row = ray.util.placement_group_table(group)
    assert len(set(row["bundles_to_node_id"].values())) == machines
    if machines:
        places = [PlacementGroupSchedulingStrategy(group, each) for each in range(bundles)]
        where = ray.remote(lambda: rpc.get_worker_info().name).options(num_cpus=1)
        found = ray.get([where.options(scheduling_strategy=each).remote() for each in places])
        assert len({each if each in ("w1", "w2") else "" for each in found}) == machines
        until(lambda: actorrpc.available_resources().get("CPU", 0) == 6 - bundles)
        make = ray.remote(Peer).options(num_cpus=1)
        members = [make.options(scheduling_strategy=each).remote() for each in places]
        ray.get([each.where.remote() for each in members])
        assert actorrpc.available_resources().get("CPU", 0) == 6 - bundles
        late = make.options(scheduling_strategy=places[0], placement_timeout=0.05).remote()
        with pytest.raises(PlacementError, match=r"needs CPU 1, a bundle .*bundle 0: .*CPU 0/1"):
            ray.get(late.where.remote())
    ray.util.remove_placement_group(group)
    _all_free()


def _create_group(name: str, removed_at: int) -> bool:
    """Create a placement group, and remove it before the numbered line of the code; return whether there was such a line."""
    lines = itertools.count(1)
    found: list[Any] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(("ray/placement.py", "cluster/resources.py")):
            return None
        if event == "line" and next(lines) == removed_at:
            with contextlib.suppress(ValueError):  # other threads cannot find it yet
                found.append(ray.util.get_placement_group(name))
                ray.util.remove_placement_group(found[0])
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        group = ray.util.placement_group([{"CPU": 1}], name=name)
    finally:
        sys.settrace(before)
    if not found:
        ray.util.remove_placement_group(group)
    return next(lines) > removed_at


def test_a_placement_group_that_is_removed_while_it_is_created_books_nothing(driver: ClusterContext) -> None:
    _all_free()
    free = actorrpc.available_resources()["CPU"]
    for step in itertools.count(1):
        was_removed = _create_group(f"group {step}", step)
        assert actorrpc.available_resources()["CPU"] == free
        if not was_removed:
            break


def test_a_task_that_waits_for_a_removed_placement_group_fails(driver: ClusterContext) -> None:
    _all_free()
    having = [Place.options(num_cpus=2, spread=True).remote() for _ in range(3)]
    get([each.where.remote() for each in having])
    group = ray.util.placement_group([{"CPU": 1}])
    task = ray.remote(os.getpid).options(
        num_cpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group)
    )
    waits = task.remote()
    ray.util.remove_placement_group(group)
    with pytest.raises(ray.exceptions.WorkerCrashedError, match="its placement group has been removed"):
        ray.get(waits)
    for each in having:
        actorrpc.kill(each)


@pytest.mark.prints("has waited for resources for 10 s")  # on a busy machine, a worker needs longer to join
def test_an_actor_and_a_restart_wait_for_their_worker_to_join(driver: ClusterContext) -> None:
    with pytest.raises(UnknownWorkerError):
        Place.options(worker="w3").remote()
    with pytest.raises(PlacementError, match=r"needs worker 'w3'; there are"):
        get(Place.options(worker="w3", placement_timeout=0.05).remote().where.remote())
    waits = Place.options(worker="w3", placement_timeout=80).remote()
    zone, again = {"labels": {"zone": "w3"}}, {"max_restarts": 2, "max_task_retries": -1}
    with joiner(driver.address, "--name", "w3", "--labels", "zone=w3"):
        assert get(waits.where.remote()) == "w3"
        patient = Place.options(**zone, **again, placement_timeout=None).remote()
        hasty = Place.options(**zone, **again, placement_timeout=0.05).remote()
        assert get([patient.where.remote(), hasty.where.remote()]) == ["w3", "w3"]
    with pytest.raises(PlacementError, match=r"within 0.05 s.*needs label zone=w3"):
        get(hasty.where.remote())
    with joiner(driver.address, "--name", "w3", "--labels", "zone=w3"):
        assert get(patient.where.remote()) == "w3"
        rows = {each.actor_id: each.restarts for each in actorrpc.list_actors()}
        assert rows[patient.actor_id] == 1


def test_a_dead_worker_gets_no_actor_even_before_the_cluster_is_notified(driver: ClusterContext) -> None:
    first, second = scale(2, labels={"zone": "x"})
    found, placed = cluster(), []

    # Like a supervisor of an actor on that worker, which is notified of the death before the cluster is.
    def at_once(peer: peers.Peer) -> None:
        if peer.name == first:  # not a worker of an earlier test
            needs = ProcessSpec(label="Place", labels={"zone": "x"}, spread=True, booking=7)
            placed.append(found.spawn(needs))

    found.agent.on_peer_end.insert(0, at_once)
    try:
        found.kill(first)
        until(lambda: placed)
        assert placed[0].wait(20).name == second
    finally:
        found.agent.on_peer_end.remove(at_once)
        scale(0)
        until(lambda: not is_there(second))
