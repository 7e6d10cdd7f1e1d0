"""The data of the views, and when the feed takes looks, without a server."""

from __future__ import annotations

import asyncio
import json

import pytest

from actorrpc.cli.dashboard import payloads
from actorrpc.cli.dashboard.feed import Feed, FeedLook
from actorrpc.cli.views import Picture
from actorrpc.observe.assemble import Silent
from actorrpc.observe.call_sums import BUCKETS
from actorrpc.observe.outside import GroupLook
from tests.dashboard.fakes import FakeGroup, actor_row

pytestmark = [pytest.mark.limit(30)]


def _buckets(**numbers: int) -> list[int]:
    return [numbers.get(f"b{place}", 0) for place in range(len(BUCKETS) + 1)]


def test_the_first_view_shows_workers_classes_and_findings() -> None:
    group = FakeGroup([actor_row(1), actor_row(2)])
    first = Picture.of(group.see([]))
    seen = payloads.now(7, Picture.of(group.see([])), first)
    assert (seen["number"], seen["worker_count"], seen["actor_count"]) == (7, 2, 2)
    assert [(each["name"], each["state"], each["cpu"]) for each in seen["workers"]] == [
        ("driver", "alive", 50.0),
        ("Store-1", "stopped", None),
    ]
    (finding,) = [each for each in seen["findings"] if each["kind"] == "worker"]
    assert finding["wrong"]
    assert "stopped" in finding["what"]
    assert seen["wrong_count"] == 1
    assert [(each["name"], each["waiting"]) for each in seen["classes"]] == [("Store", 3)]


def test_the_first_view_stays_below_64_kib_for_3000_actors() -> None:
    rows = [actor_row(n, class_name=f"Class{n}", mailbox=[{"waiting": 500}]) for n in range(3000)]
    seen = payloads.now(1, Picture.of(FakeGroup(rows).see([])), None)
    assert len(json.dumps(seen)) < 64 << 10
    assert seen["wrong_count"] == 3001


def test_the_training_view_sums_autograd_contexts_over_all_workers() -> None:
    seen = FakeGroup(is_well=True).see([])
    numbers = {"sent": 2, "leaves": 3, "passes": 1, "idle": 4.0}
    row = {"context": "ab", "origin": 0, "received": {"0": 3}, **numbers}
    for _, answer in seen.answers.values():
        assert not isinstance(answer, Silent)
        answer["process"] |= {"autograd": {"contexts": 1, "passes": 1}, "contexts": [row]}
    found = payloads.now(1, Picture.of(seen), None)["training"]
    assert found["workers"] == [["driver", 1, 1], ["Store-1", 1, 1]]
    assert sorted(found["hops"]) == [["driver", "Store-1", 3], ["driver", "driver", 3]]
    (context,) = found["contexts"]
    assert [context[name] for name in ("origin", "workers", "messages", "idle")] == ["driver", 2, 4, 4.0]


def test_a_look_at_the_workers_alone_keeps_the_actors_of_the_previous_view() -> None:
    group = FakeGroup([actor_row(1), actor_row(2)], is_well=True)
    first = Picture.of(group.see([]))
    second = first.with_workers(group.see(["process"]))
    assert second is not None
    shown = payloads.now(1, first, None)
    found = payloads.now(2, second, first, shown)
    assert (found["actor_count"], found["classes"]) == (2, shown["classes"])


def test_the_memory_view_lists_the_holders_of_each_object_with_the_largest_object_first() -> None:
    seen = FakeGroup(is_well=True).see([])
    held = [[("1", 10, ""), ("2", 70, "weights")], [("1", 30, "an image")]]
    for (_, answer), objects in zip(seen.answers.values(), held, strict=True):
        assert not isinstance(answer, Silent)
        rows = [{"segment": name, "label": label, "bytes": nbytes} for name, nbytes, label in objects]
        answer["process"]["objects"] = rows
    found = payloads.memory(Picture.of(seen))["objects"]
    shown = [(each["label"], each["bytes"], each["holders"]) for each in found]
    assert shown == [("weights", 70, ["driver"]), ("an image", 30, ["driver", "Store-1"])]


@pytest.mark.parametrize(
    ("text", "sort", "first", "most", "matches", "shown"),
    [
        ("", "waiting", 0, 2, 5, [4, 3]),
        ("", "waiting", 3, 9, 5, [1, 0]),
        ("", "oldest", 0, 2, 5, [4, 3]),
        ("", "done", 0, 1, 5, [4]),
        ("", "rate", 0, 1, 5, [2]),
        ("", "title", 0, 2, 5, [0, 1]),
        ("#0003", "waiting", 0, 9, 1, [3]),
        ("DRIVER", "title", 4, 9, 5, [4]),
        ("stranger", "waiting", 9, 9, 0, []),
    ],
)
def test_actors_are_filtered_sorted_and_paged(
    text: str, sort: str, first: int, most: int, matches: int, shown: list[int]
) -> None:
    picture = Picture.of(FakeGroup([actor_row(n) for n in range(5)]).see([]))
    found = payloads.actors(picture, {f"{2:016x}": 9.0}, text, sort, first, most)
    assert (found["total"], found["matches"]) == (5, matches)
    assert [int(each["id"], 16) for each in found["rows"]] == shown


def test_actors_are_sorted_by_percentiles_of_their_call_times() -> None:
    rows = [actor_row(n, latest=2, p50=0.001, p99=0.5 if n == 1 else 0.002) for n in range(2)]
    picture = Picture.of(FakeGroup([*rows, actor_row(2)]).see([]))
    found = payloads.actors(picture, {}, "", "p99", 0, 9)["rows"]
    assert [(each["p50"], each["p99"]) for each in found] == [(0.001, 0.5), (0.001, 0.002), (None, None)]


def test_rates_and_percentiles_of_calls_cover_the_time_since_an_earlier_query() -> None:
    before = {("server", "Store/get", False): (100, 1.0, _buckets(b0=100))}
    sums = {
        ("server", "Store/get", False): (110, 1.0, _buckets(b0=100, b3=10)),
        ("server", "Store/get", True): (5, 1.0, _buckets(b3=5)),
        ("client", "add", False): (0, 0.0, _buckets()),
    }
    get, add = payloads.calls(sums, before, 5.0)
    assert (get["method"], get["rate"], get["count"], get["failed"]) == ("Store/get", 3.0, 115, 5)
    assert BUCKETS[2] <= get["p50"] < get["p99"] <= BUCKETS[3]
    assert (add["method"], add["rate"], add["p50"]) == ("add", 0.0, None)


def test_equal_stacks_are_folded() -> None:
    frames = [{"function": "run", "file": "a.py", "line": 3}, {"function": "wait", "file": "b.py", "line": 5}]
    threads = [{"name": f"t{n}", "ident": n, "frames": frames} for n in range(20)]
    found = payloads.stacks(Picture.of(FakeGroup(threads=threads).see([])))
    (fold,) = found["folds"]
    assert (fold["threads"], fold["workers"], len(fold["who"])) == (20, 1, 12)
    assert fold["frames"] == [["wait", "b.py", 5], ["run", "a.py", 3]]
    assert "stopped" in found["silent"][0]


# -- looks of the feed ----------------------------------------------------------------------------------------


def test_clients_share_queries_of_the_group_and_without_clients_none_is_made() -> None:
    group = FakeGroup()

    async def look() -> list[FeedLook]:
        feed = group.feed()
        await asyncio.sleep(0)
        assert group.asked == []
        try:
            return list(await asyncio.gather(*[feed.after(2) for _ in range(10)]))
        finally:
            await feed.close()

    looks = asyncio.run(look())
    assert {each.number for each in looks} == {3}
    assert len(group.asked) in (3, 4)
    assert all("metrics" not in each for each in group.asked)


def test_an_unreachable_group_is_reported_until_it_answers_again() -> None:
    group = FakeGroup(problem="no group has answered")

    async def look() -> tuple[FeedLook, FeedLook]:
        feed = group.feed()
        try:
            unreachable = await feed.after(0)
            group.problem = ""
            reachable = await feed.after(unreachable.number)
            while reachable.picture is None:
                reachable = await feed.after(reachable.number)
            return unreachable, reachable
        finally:
            await feed.close()

    unreachable, reachable = asyncio.run(look())
    assert unreachable.now["problem"] == "no group has answered"
    assert reachable.now["worker_count"] == 2


@pytest.mark.prints("the group could not be queried")
def test_a_failed_query_of_the_group_ends_the_wait_of_clients_with_a_problem() -> None:
    def fail(parts: list[str], begin: dict[str, int] | None = None) -> GroupLook:
        raise ZeroDivisionError("by zero")

    async def look() -> FeedLook:
        feed = Feed(fail, FakeGroup().groups, 0.01)
        try:
            return await feed.after(1)
        finally:
            await feed.close()

    assert "ZeroDivisionError" in asyncio.run(look()).problem
