"""Metrics: sums over the flight recorders of workers, and the scrape for Prometheus."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import actorrpc
from actorrpc import flight_recorder, rpc
from actorrpc.agent.context import current_worker
from actorrpc.flight_recorder import KEPT, FlightRecorder
from actorrpc.observe import GroupState, ObservedActor, ObservedWorker, collect
from actorrpc.observe.call_sums import BUCKETS, OTHER, CallSums, method_of
from actorrpc.observe.metrics import PARTS, CallTotals, GroupCollector
from actorrpc.observe.outside import find_groups, look
from actorrpc.wire.frames import REPLY, Frame
from tests.actors.e2e.kit import until
from tests.agent.virtual_clock import VirtualClock

pytestmark = [pytest.mark.limit(60)]


def _at_once(task: Callable[[], None]) -> None:
    task()


def _sums(clock: VirtualClock | None = None, kept: int = KEPT) -> tuple[FlightRecorder, CallSums]:
    recorder = FlightRecorder(kept)
    return recorder, CallSums(recorder, clock or VirtualClock(), _at_once)


def _write(recorder: FlightRecorder, method: str, seconds: float = 0.1) -> None:
    """Record a call of a function of this duration."""
    call = SimpleNamespace(
        peer=SimpleNamespace(name="w1"),
        label=method,
        made=5.0,
        id=1,
        chain=1,
        thread=1,
        size=100,
        future=None,
        outcome=Frame(REPLY, 0, 1, 0.0, 1, b"", bytes(10)),
    )
    # Patch only the recorder's clock, as the clock thread of a running cluster would sleep for hours.
    with mock.patch.object(flight_recorder, "_time", SimpleNamespace(now=lambda: 5.0 + seconds)):
        recorder.on_answer(call, None)


@pytest.mark.parametrize(
    ("actor", "method", "name"),
    [
        ("", "add", "add"),
        ("", "Counter.add", "Counter/add"),
        ("", "outer.<locals>.inner", "outer.<locals>.inner"),
        ("Counter#12ab", "add", "Counter/add"),
        ("Counter('a.#(b)')", "add", "Counter/add"),
    ],
)
def test_method_labels_have_names_of_classes_and_not_of_actors(actor: str, method: str, name: str) -> None:
    assert method_of(actor, method) == name


def test_histograms_count_and_sum_all_calls() -> None:
    recorder, sums = _sums()
    bounds = (0.0, *BUCKETS, 2 * BUCKETS[-1])
    times = [(low + high) / 2 for low, high in itertools.pairwise(bounds)]
    for seconds in times:
        _write(recorder, "add", seconds)
    ((side, method, failed, count, total, buckets),) = sums.read()["calls"]
    assert (side, method, failed, count) == ("client", "add", False, len(times))
    assert total == pytest.approx(sum(times))
    assert buckets == [1] * len(times)


def test_methods_beyond_the_first_200_are_one_series() -> None:
    recorder, sums = _sums()
    for number in range(1000):
        _write(recorder, f"made_{number}", 0.1)
    rows = {row[1]: row[3] for row in sums.read()["calls"]}
    assert len(rows) == 201
    assert rows[OTHER] == 800


def test_call_records_are_counted_before_they_are_overwritten_while_metrics_are_read() -> None:
    clock = VirtualClock()
    recorder, sums = _sums(clock, 128)
    sums.read()
    for _ in range(10):
        for _ in range(80):
            _write(recorder, "add", 0.1)
        clock.advance(0.25)
    found = sums.read()
    assert (found["calls"][0][3], found["dropped"], found["sent"]) == (800, 0, 80_000)
    for _ in range(178):
        _write(recorder, "add", 0.1)
    assert sums.read()["dropped"] == 50


def _row(method: str, count: int) -> list[Any]:
    return ["client", method, False, count, 1.0, [count] + [0] * len(BUCKETS)]


def test_metric_totals_keep_the_counts_of_ended_workers() -> None:
    totals = CallTotals()
    for run in range(5000):
        totals.update(str(run), {"metrics": {"calls": [_row("add", 2)], "sent": 3}})
    totals.update("4999", {"metrics": {"calls": [_row("add", 5)], "sent": 4}})
    assert totals.rows()["client", "add", False][0] == 10_003
    assert totals.total("sent") == 15_001
    for nonsense in ({}, {"metrics": 1}, {"metrics": {"calls": [1, ["client"], _row("add", 2)[:5]]}}):
        totals.update("another", nonsense)
    assert totals.rows()["client", "add", False][0] == 10_003


def _scraped(collector: GroupCollector) -> dict[str, list[Any]]:
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    return {each.name: each.samples for each in text_string_to_metric_families(text)}


def test_a_prometheus_scrape_has_workers_actors_calls_and_bytes() -> None:
    actors = tuple(
        ObservedActor(actor_id=str(n), class_name=f"Class{n}", state="ALIVE", restarts=1) for n in range(300)
    )
    state = GroupState(
        workers=(ObservedWorker(name="a"), ObservedWorker(name="b", state="stopped")), actors=actors
    )
    answers = {"one": {"metrics": {"calls": [_row("Counter/add", 2)], "sent": 3}}}
    found = _scraped(GroupCollector(lambda: (state, answers)))
    assert {each.labels["state"]: each.value for each in found["actorrpc_workers"]} == {
        "alive": 1,
        "stopped": 1,
    }
    kinds = {each.labels["class"]: each.value for each in found["actorrpc_actors"]}
    assert (len(kinds), kinds[OTHER]) == (201, 100)
    calls = found["rpc_client_call_duration_seconds"]
    bounds = [float(each.labels["le"]) for each in calls if each.name.endswith("_bucket")]
    assert bounds == sorted(bounds)
    assert bounds[0] == 1e-5
    (count,) = [each for each in calls if each.name.endswith("_count")]
    assert count.value == 2
    assert count.labels == {"rpc_system_name": "actorrpc", "rpc_method": "Counter/add", "error_type": ""}
    (sent, _) = found["actorrpc_bytes"]
    assert (sent.labels["direction"], sent.value) == ("sent", 3)


@actorrpc.remote
class Counter:
    def add(self) -> int:
        return 1

    def fail(self) -> None:
        raise ValueError("as asked")

    def numbers(self) -> Iterator[int]:
        yield from range(3)


def lookup() -> int:
    """A user's function with the name of an internal function."""
    return 1


@pytest.mark.usefixtures("embedded")
def test_metrics_of_a_cluster_count_calls_errors_and_mailboxes() -> None:
    worker = current_worker()
    assert worker is not None
    numbers = iter(range(1, 1000))

    def state_and_answers() -> tuple[GroupState, dict[str, Any]]:
        question = {"id": next(numbers), "what": PARTS}
        return actorrpc.state(30), {worker.agent.record.incarnation: collect.answer(worker, question)}

    collector = GroupCollector(state_and_answers)

    def calls(method: str) -> dict[str, float]:
        rows = _scraped(collector)["rpc_client_call_duration_seconds"]
        return {
            each.labels["error_type"]: each.value
            for each in rows
            if each.name.endswith("_count") and each.labels["rpc_method"] == method
        }

    counter = Counter.remote()
    actorrpc.get([counter.add.remote() for _ in range(20)])
    with pytest.raises(ValueError, match="as asked"):
        actorrpc.get(counter.fail.remote())
    until(lambda: calls("Counter/add") == {"": 20} and calls("Counter/fail") == {OTHER: 1})
    depth = {each.labels["class"]: each.value for each in _scraped(collector)["actorrpc_mailbox_depth"]}
    assert depth["Counter"] == 0


@pytest.mark.usefixtures("embedded")
def test_internal_calls_of_the_package_have_one_name() -> None:
    counters = [Counter.remote() for _ in range(2)]
    for counter in counters:
        assert actorrpc.get(list(counter.numbers.remote())) == [0, 1, 2]
    located = next(
        each.worker for each in actorrpc.state(30).actors if each.class_name == "Counter" and each.worker
    )
    assert rpc.rpc_sync(located, lookup) == 1
    assert rpc.remote(located, lookup).rpc_sync().bit_length() == 1

    found = set()
    (group,) = find_groups(os.getpid())
    for _, answer in look(group, ["metrics"], 30.0).answers.values():
        assert isinstance(answer, dict)
        found |= {(side, method) for side, method, *_ in answer["metrics"]["calls"]}
    # Check only names of this test: other tests of the module may have called other functions.
    streams = {each for each in found if "numbers" in each[1] or "call of" in each[1]}
    assert streams == {("client", "Counter/numbers"), ("server", "Counter/numbers")}
    assert {
        ("client", "actorrpc"),
        ("server", "actorrpc"),
        ("client", "lookup"),
        ("server", "lookup"),
    } <= found
    assert not {"pull", "register", "_create", "_invoke"} & {method for _, method in found}
