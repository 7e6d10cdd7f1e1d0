"""Placement: choice of workers by labels, host, resources and strategy, and errors for wrong options."""

from __future__ import annotations

from typing import Any

import pytest

from actorrpc.actors.spec.actor_spec import ProcessSpec
from actorrpc.cluster.scheduler import Booking, ResourceHolder, ResourceTable, needs_of
from actorrpc.errors import ConfigError
from tests.cluster.remotes import Place


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


def test_a_worker_that_joins_again_books_the_bundles_that_were_on_it() -> None:
    book = _book(_holder("a", 1, cpus=4))
    for group in ("first", "second"):
        holders = book.assign([{"CPU": 2}], "PACK")
        assert holders is not None
        book.reserve(group, [{"CPU": 2}], holders)
    del book.workers["a"]
    book.add_worker(_holder("a", 2, cpus=3))  # it has room for one of the two
    assert [_choose(book, bundle=(group, 0), num_cpus=2) for group in ("first", "second")] == ["a", None]
    assert _choose(book, num_cpus=2) is None


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
