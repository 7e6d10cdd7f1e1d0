"""Placement: who suits a wish, what is booked and given back, and what is said where nobody suits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

import actorrpc
from actorrpc import rpc
from actorrpc.actors.processes import ProcessSpec
from actorrpc.cluster import Context, init
from actorrpc.cluster.placement import Book, Holder, lacking
from actorrpc.errors import ActorDiedError, ConfigError, PlacementError
from tests.cluster.drive import until
from tests.cluster.joiners import is_there, joiner, output

pytestmark = pytest.mark.limit(90)


@actorrpc.remote
class Place:
    def where(self) -> str:
        return rpc.get_worker_info().name


# -- the book ------------------------------------------------------------------------------------------


def _holder(name: str, rank: int, cpus: float = 2, gpus: float = 0, **labels: str) -> Holder:
    totals = {"CPU": cpus, "GPU": gpus, "disk": 1.0}
    return Holder(name=name, rank=rank, hosts=frozenset({f"host-{name}"}), totals=totals, labels=labels)


def _book(*workers: Holder) -> Book:
    book = Book()
    book.workers = {each.name: each for each in workers}
    return book


def _choose(book: Book, booking: int = 0, **wish: Any) -> str | None:
    spec = ProcessSpec(label="Actor", **wish)
    found = book.choose(spec, True)
    if found is not None and booking:
        found.bookings[booking] = {"CPU": spec.num_cpus or 0.0, "GPU": spec.num_gpus or 0.0, **spec.resources}
    return None if found is None else found.name


def test_wishes() -> None:
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


def test_bookings() -> None:
    book = _book(_holder("a", 1, gpus=1))
    assert _choose(book, 1, num_gpus=0.5) == "a"
    assert _choose(book, 2, num_gpus=0.5) == "a"
    assert _choose(book, 3, num_gpus=0.5) is None
    assert book.give_back(1)
    assert not book.give_back(1)
    assert _choose(book, 3, num_gpus=0.5) == "a"
    text = lacking(ProcessSpec(label="Actor", num_gpus=4, labels={"zone": "x"}), book)
    assert "'Actor' needs GPU 4, label zone=x" in text
    assert "'a' on host-a (CPU 2/2, GPU 0/1" in text


def test_spread() -> None:
    book = _book(*(_holder(name, rank) for rank, name in enumerate("abc", 1)))
    assert [_choose(book, number, spread=True) for number in range(1, 7)] == list("abcabc")


# -- real workers --------------------------------------------------------------------------------------------


@pytest.fixture
def driver() -> Iterator[Context]:
    with init(
        listen="tcp://127.0.0.1:0", num_cpus=2, resources={"disk": 1}, labels={"here": "yes"}
    ) as context:
        yield context


def test_waiting_booking_and_leaving(driver: Context) -> None:
    with pytest.raises(
        PlacementError, match=r"'Place' needs GPU 1, label zone=a; there are .*disk 1/1, CPU 2/2"
    ):
        Place.options(num_gpus=1, labels={"zone": "a"}).remote()
    late = Place.options(labels={"zone": "a"}, placement_timeout=0.05).remote()
    with pytest.raises(ActorDiedError, match=r"PlacementError: nothing became free within 0.05 s"):
        actorrpc.get(late.where.remote())
    here = Place.options(resources={"disk": 1}, labels={"here": "yes"}).remote()
    assert actorrpc.get(here.where.remote()).startswith("Place-")
    with joiner(driver.address, "--name", "w1", "--labels", "zone=a", "--num-gpus", "1") as process:
        first = Place.options(num_gpus=1, labels={"zone": "a"}, placement_timeout=80).remote()
        assert actorrpc.get(first.where.remote()) == "w1"
        second = Place.options(num_gpus=1, placement_timeout=0.05).remote()
        with pytest.raises(ActorDiedError, match=r"GPU 0/1"):
            actorrpc.get(second.where.remote())
        third = Place.options(num_gpus=1, placement_timeout=80).remote()
        actorrpc.kill(first)  # gives back what it had
        assert actorrpc.get(third.where.remote()) == "w1"
        process.send_signal(signal.SIGTERM)
        assert output(process)[0] == 0
    until(lambda: not is_there("w1"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"labels": ["zone"]}, "labels must be a dict of words"),
        ({"labels": {"zone": 1}}, "labels must be a dict of words"),
        ({"resources": {"disk": -1}}, r"resources\['disk'\] must be"),
        ({"resources": {"GPU": 1}}, "say GPU with num_gpus"),
        ({"spread": 1}, "spread must be True or False"),
        ({"host": ""}, "host must be a non-empty str"),
        ({"placement_timeout": -1}, "placement_timeout"),
        ({"label_selector": {}}, "say labels="),
    ],
)
def test_wrong_options(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Place.options(**given)


def test_contradictions(driver: Context) -> None:
    with pytest.raises(ConfigError, match="worker= says where"):
        Place.options(worker="driver", spread=True).remote()
