"""Placement: choice of workers, booking and release of resources, and errors for unsatisfiable requests."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import actorrpc
from actorrpc import rpc
from actorrpc.actors.spec.actor_spec import ProcessSpec
from actorrpc.agent.peers import Peer
from actorrpc.cluster import ClusterContext, init, scale
from actorrpc.cluster.driver import current_cluster
from actorrpc.cluster.scheduler import Booking, ResourceHolder, ResourceTable, needs_of
from actorrpc.errors import ActorDiedError, ConfigError, PlacementError, UnplacedActorError
from tests.cluster.drive import until
from tests.cluster.joiners import is_there, joiner, output, wait_for

pytestmark = pytest.mark.limit(90)


@actorrpc.remote
class Place:
    def where(self) -> str:
        return rpc.get_worker_info().name


def _try() -> list[str]:
    """Create unplaceable actors on a worker; return the error messages."""
    found = []
    for options in ({"labels": {"zone": "nowhere"}}, {"worker": "driver", "resources": {"tape": 1}}):
        try:
            actorrpc.get(Place.options(**options).remote().where.remote())
        except PlacementError as error:
            found.append(str(error))
    return found


# -- the resource table ------------------------------------------------------------------------------------------


def _holder(name: str, rank: int, cpus: float = 2, gpus: float = 0, **labels: str) -> ResourceHolder:
    totals = {"CPU": cpus, "GPU": gpus, "disk": 1.0}
    return ResourceHolder(
        name=name, rank=rank, hosts=frozenset({f"host-{name}"}), totals=totals, labels=labels
    )


def _book(*workers: ResourceHolder) -> ResourceTable:
    book = ResourceTable()
    book.workers = {each.name: each for each in workers}
    return book


def _choose(book: ResourceTable, booking: int = 0, **needs: Any) -> str | None:
    spec = ProcessSpec(label="Actor", **needs)
    found = book.choose(spec, True)
    if found is not None and booking:
        found.bookings[booking] = Booking(needs_of(spec))
    return None if found is None else found.name


def test_workers_are_chosen_by_labels_host_and_resources() -> None:
    book = _book(_holder("a", 1, zone="x"), _holder("b", 2, gpus=2, zone="y"))
    assert _choose(book) == "a"
    assert _choose(book, labels={"zone": "y"}) == "b"
    assert _choose(book, labels={"zone": "z"}) is None
    assert _choose(book, host="host-b") == "b"
    assert _choose(book, num_gpus=1, host="host-a") is None
    assert _choose(book, resources={"disk": 1}) == "a"
    assert _choose(book, resources={"tape": 1}) is None
    book.workers["a"].draining = True
    assert _choose(book) == "b"


def test_spread_alternates_between_workers() -> None:
    book = _book(*(_holder(name, rank) for rank, name in enumerate("abc", 1)))
    assert [_choose(book, number, spread=True) for number in range(1, 7)] == list("abcabc")


@pytest.mark.parametrize(
    ("strategy", "bundles", "chosen"),
    [
        ("PACK", [2, 2, 2], ["a", "a", "b"]),
        ("SPREAD", [1, 1, 1], ["a", "b", "a"]),
        ("STRICT_PACK", [2, 2], ["a", "a"]),
        ("STRICT_PACK", [4, 4], ["b", "b"]),
        ("STRICT_SPREAD", [1, 1], ["a", "b"]),
        ("STRICT_SPREAD", [1, 1, 1], None),
        ("PACK", [9], None),
    ],
)
def test_bundles_are_assigned_by_strategy(
    strategy: str, bundles: list[int], chosen: list[str] | None
) -> None:
    book = _book(_holder("a", 1, cpus=4), _holder("b", 2, cpus=8))
    found = book.assign([{"CPU": each} for each in bundles], strategy)
    assert (None if found is None else [each.name for each in found]) == chosen


# -- real workers --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _test_leaves_nothing() -> None:
    """Disable the leak check of single tests: threads and workers of the shared cluster start and end between tests."""


@pytest.fixture(scope="module")
def driver() -> Iterator[ClusterContext]:
    with init(
        listen="tcp://127.0.0.1:0", num_cpus=2, resources={"disk": 1}, labels={"here": "yes"}
    ) as context:
        yield context


@pytest.mark.parametrize("needs", [{"num_cpus": 1000}, {"num_gpus": 1000}, {"resources": {"tape": 1}}])
def test_a_request_that_no_worker_can_satisfy_raises_placement_error_at_once(
    driver: ClusterContext, needs: dict[str, Any]
) -> None:
    with pytest.raises(PlacementError, match="'Place' needs") as caught:
        Place.options(**needs).remote()
    of_worker = actorrpc.get(actorrpc.call(Place.remote(), _refusal, needs))
    assert of_worker.partition("; there are")[0] == str(caught.value).partition("; there are")[0]


def _refusal(_: Any, needs: dict[str, Any]) -> str:
    with pytest.raises(PlacementError) as caught:
        Place.options(**needs).remote()
    return str(caught.value)


@pytest.mark.slow
def test_calls_of_an_actor_without_a_place_raise_placement_error_also_on_workers(
    driver: ClusterContext,
) -> None:
    late = Place.options(labels={"zone": "a"}, placement_timeout=0.05).remote()
    with pytest.raises(PlacementError, match=r"within 0.05 s.*needs label zone=a") as found:
        actorrpc.get(late.where.remote())
    assert isinstance(found.value, ActorDiedError)
    assert type(found.value.cause) is PlacementError
    assert isinstance(pickle.loads(pickle.dumps(found.value)), UnplacedActorError)
    with pytest.raises(PlacementError, match="dead"):
        actorrpc.get(actorrpc.ready(late))
    with joiner(driver.address, "--name", "w1") as process:
        wait_for("w1")
        texts = rpc.rpc_sync("w1", _try)
        assert "needs label zone=nowhere" in texts[0]
        assert "needs tape 1, worker 'driver'" in texts[1]
        process.send_signal(signal.SIGTERM)
        assert output(process)[0] == 0
    until(lambda: not is_there("w1"))


@pytest.mark.slow
def test_an_actor_in_the_process_of_another_actor_books_nothing(driver: ClusterContext) -> None:
    kept = Place.remote()
    where = actorrpc.get(kept.where.remote())
    neighbour = Place.options(worker=where, num_cpus=1).remote()
    assert actorrpc.get(neighbour.where.remote()) == where
    with pytest.raises(PlacementError, match="needs disk 1, worker"):
        Place.options(worker=where, resources={"disk": 1}).remote()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"labels": ["zone"]}, "labels must be a dict of words"),
        ({"labels": {"zone": 1}}, r"labels\['zone'\] must be a str, not 1"),
        ({"resources": {"disk": -1}}, r"resources\['disk'\] must be"),
        ({"resources": {"GPU": 1}}, "give GPU with num_gpus"),
        ({"spread": 1}, "spread must be True or False"),
        ({"host": ""}, "host must be a non-empty str"),
        ({"placement_timeout": -1}, "placement_timeout"),
        ({"label_selector": {}}, "use labels="),
    ],
)
def test_wrong_placement_options_raise_config_error(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Place.options(**given)


def test_worker_together_with_spread_raises_config_error(driver: ClusterContext) -> None:
    with pytest.raises(ConfigError, match="worker= fixes where"):
        Place.options(worker="driver", spread=True).remote()


@pytest.mark.slow
def test_a_dead_worker_gets_no_actor_even_before_the_cluster_is_notified(driver: ClusterContext) -> None:
    first, second = scale(2, labels={"zone": "x"})
    found = current_cluster()
    assert found is not None
    placed = []

    # Like a supervisor of an actor on that worker, which is notified of the death before the cluster is.
    def at_once(peer: Peer) -> None:
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
