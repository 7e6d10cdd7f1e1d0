"""What the views are sent, and when looks are taken: no server."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from actorrpc.cli.dashboard import feed as feed_module
from actorrpc.cli.dashboard import payloads
from actorrpc.cli.dashboard.feed import Feed, FeedLook
from actorrpc.cli.views import Picture
from actorrpc.observe import ObservedHolder, ObservedSegment, ObservedWorker
from actorrpc.observe.call_sums import BUCKETS
from tests.dashboard.fakes import FakeGroup, actor_row

pytestmark = [pytest.mark.limit(30)]


def _buckets(**numbers: int) -> list[int]:
    return [numbers.get(f"b{place}", 0) for place in range(len(BUCKETS) + 1)]


def test_the_first_view_names_what_is_wrong_and_whom() -> None:
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


def test_contexts_of_all_workers_are_put_together() -> None:
    group = FakeGroup()
    seen = group.see([])
    rows = [
        {
            "context": "ab",
            "origin": 0,
            "sent": 2,
            "received": {"1": 1},
            "leaves": 3,
            "passes": 1,
            "idle": 4.0,
        },
        {"context": "ac", "origin": 5, "sent": 1, "received": {"5": 7, "x": "wrong"}},
    ]
    (well, answer), _ = seen.answers.values()
    assert isinstance(answer, dict)
    answer["process"] |= {"autograd": {"contexts": 2, "passes": 1}, "contexts": rows}
    found = payloads.now(1, Picture.of(seen), None)["training"]
    assert found["workers"] == [[well.name, 2, 1]]
    assert found["hops"] == [["5", "driver", 7], ["Store-1", "driver", 1]]
    assert [(each["context"], each["origin"], each["messages"]) for each in found["contexts"]] == [
        ("ab", "driver", 2),
        ("ac", "5", 1),
    ]


def test_however_large_a_group_is_the_first_view_is_small() -> None:
    rows = [actor_row(n, class_name=f"Class{n}", mailbox=[{"waiting": 500}]) for n in range(3000)]
    seen = payloads.now(1, Picture.of(FakeGroup(rows).see([])), None)
    assert len(json.dumps(seen)) < 64 << 10
    assert seen["wrong_count"] == 3001


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
        ("nobody", "waiting", 9, 9, 0, []),
    ],
)
def test_some_rows_of_the_actors(
    text: str, sort: str, first: int, most: int, matches: int, shown: list[int]
) -> None:
    picture = Picture.of(FakeGroup([actor_row(n) for n in range(5)]).see([]))
    found = payloads.actors(picture, {f"{2:016x}": 9.0}, text, sort, first, most)
    assert (found["total"], found["matches"]) == (5, matches)
    assert [int(each["id"], 16) for each in found["rows"]] == shown


def test_actors_are_sorted_by_how_long_their_calls_took() -> None:
    rows = [actor_row(n, latest=2, p50=0.001, p99=0.5 if n == 1 else 0.002) for n in range(2)]
    picture = Picture.of(FakeGroup([*rows, actor_row(2)]).see([]))
    found = payloads.actors(picture, {}, "", "p99", 0, 9)["rows"]
    assert [(each["p50"], each["p99"]) for each in found] == [(0.001, 0.5), (0.001, 0.002), (None, None)]


def test_calls_of_the_package_itself_come_last() -> None:
    buckets = [0] * 22
    sums = {
        ("client", "actorrpc", True): (9, 1.0, buckets),
        ("client", "Store/get", False): (1, 1.0, buckets),
    }
    assert [each["method"] for each in payloads.calls(sums, {}, 1.0)] == ["Store/get", "actorrpc"]


def test_what_is_no_number_is_none() -> None:
    rows = [actor_row(1, mailbox=[{"waiting": 1, "oldest": float("inf")}], age=float("nan"))]
    picture = Picture.of(FakeGroup(rows).see([]))
    found = payloads.actors(picture, {}, "", "waiting", 0, 9)
    json.dumps(found, allow_nan=False)
    json.dumps(payloads.now(1, picture, picture), allow_nan=False)


def test_calls_of_the_last_looks() -> None:
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


@pytest.mark.parametrize(
    ("buckets", "share", "found"),
    [
        (_buckets(), 0.5, None),
        (_buckets(b0=2), 0.5, 5e-6),
        (_buckets(b1=1, b2=1), 0.5, BUCKETS[1]),
        ([*_buckets()[:-1], 4], 0.5, BUCKETS[-1]),
    ],
)
def test_percentiles(buckets: list[int], share: float, found: float | None) -> None:
    assert payloads.percentile(buckets, share) == pytest.approx(found)


def test_equal_stacks_are_one() -> None:
    frames = [{"function": "run", "file": "a.py", "line": 3}, {"function": "wait", "file": "b.py", "line": 5}]
    threads = [{"name": f"t{n}", "ident": n, "frames": frames} for n in range(20)]
    found = payloads.stacks(Picture.of(FakeGroup(threads=threads).see([])))
    (fold,) = found["folds"]
    assert (fold["threads"], fold["workers"], len(fold["who"])) == (20, 1, 12)
    assert fold["frames"] == [["wait", "b.py", 5], ["run", "a.py", 3]]
    assert "stopped" in found["silent"][0]


# -- when looks are taken ----------------------------------------------------------------------------------------


def test_all_who_look_share_the_looks_and_nobody_looking_costs_nothing() -> None:
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


def test_looks_end_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorrpc.cli.dashboard.feed._IDLE_S", 0.05)
    group = FakeGroup()

    async def look() -> tuple[int, int]:
        feed = group.feed()
        first = await feed.after(0)
        assert feed._task is not None
        await feed._task  # nobody asks
        asked = len(group.asked)
        # What was seen then is no news now.
        return asked, (await feed.after(0)).number - first.number

    asked, newer = asyncio.run(look())
    assert newer >= asked


def test_looks_go_on_for_those_who_wait_however_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorrpc.cli.dashboard.feed._IDLE_S", 0.0)
    group = FakeGroup()

    async def look() -> list[int]:
        feed = group.feed()
        try:
            return [(await feed.after(number, calls=number > 1)).number for number in (0, 1, 2, 3)]
        finally:
            await feed.close()

    numbers = asyncio.run(look())
    assert numbers == sorted(set(numbers))


def test_workers_count_calls_only_while_somebody_sees_them() -> None:
    group = FakeGroup()

    async def look() -> list[dict[str, Any]]:
        feed = group.feed()
        try:
            await feed.after(0)
            first = await feed.after(1, calls=True)
            return (await feed.after(first.number + 5, calls=True)).calls or []
        finally:
            await feed.close()

    (row,) = asyncio.run(look())
    assert row["method"] == "Store/get"
    assert row["rate"] > 0
    assert "metrics" not in group.asked[0]
    assert "metrics" in group.asked[-1]


def test_a_group_that_has_gone_is_said_and_may_come_again() -> None:
    group = FakeGroup(problem="no group has answered")

    async def look() -> tuple[FeedLook, FeedLook]:
        feed = group.feed()
        try:
            gone = await feed.after(0)
            group.problem = ""
            here = await feed.after(gone.number)
            while here.picture is None:
                here = await feed.after(here.number)
            return gone, here
        finally:
            await feed.close()

    gone, here = asyncio.run(look())
    assert gone.now["problem"] == "no group has answered"
    assert here.now["worker_count"] == 2


@pytest.mark.prints("a look at the group has failed")
def test_a_look_that_fails_for_any_reason_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> dict[str, Any]:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(payloads, "now", fail)
    group = FakeGroup()

    async def look() -> FeedLook:
        feed = group.feed()
        try:
            return await feed.after(1)
        finally:
            await feed.close()

    assert "ZeroDivisionError" in asyncio.run(look()).problem


# -- what a look costs -------------------------------------------------------------------------------------------


def _steps(work: Callable[[], object]) -> int:
    """How many calls of functions, ours or in C, something takes: unlike its time, nothing else has a part in that."""
    steps = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal steps
        steps += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return steps


def test_the_steps_of_a_look_at_actors() -> None:
    few, many = (FakeGroup([actor_row(n) for n in range(number)]).see([]) for number in (100, 200))
    first, second = (
        _steps(lambda seen=seen: payloads.now(1, Picture.of(seen), None)) for seen in (few, many)
    )
    each = (second - first) / 100
    assert each < 60, "of one more actor"


def test_of_many_actors_most_looks_are_at_the_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeGroup([actor_row(n, mailbox=[]) for n in range(500)], is_well=True)
    feed = group.feed()
    monkeypatch.setattr(feed_module, "_CHEAP_S", -1.0)  # each is a costly one
    first = feed._take(1, ["process", "actors", "supervised"], None)
    assert feed._actors_due > time.monotonic() - 1
    second = feed._take(2, ["process"], first)
    assert group.asked == [["process", "actors", "supervised"], ["process"]]
    assert first.picture is not None
    assert second.picture is not None
    assert second.picture.state.actors is first.picture.state.actors
    assert second.picture.state.workers[0].age > first.picture.state.workers[0].age
    for same in ("classes", "actor_count", "wrong_count"):
        assert second.now[same] == first.now[same]
    assert second.actors_at == first.actors_at
    assert [each["actors"] for each in second.now["workers"]] == [
        each["actors"] for each in first.now["workers"]
    ]
    # They cost the less the more actors there are beside the workers.
    third = _steps(lambda: feed._take_one(3, ["process"], second))
    assert third < 1000


def test_where_something_has_happened_to_a_worker_its_actors_are_looked_at() -> None:
    group = FakeGroup([actor_row(1)], is_well=True)
    feed = group.feed()
    first = feed._take(1, ["process", "actors", "supervised"], None)
    group.is_well = False
    second = feed._take(2, ["process"], first)
    assert group.asked[1:] == [["process"], ["process", "actors", "supervised"]]
    assert second.now["wrong_count"] == 1


def test_a_look_is_put_into_words_once_for_all_who_look() -> None:
    look = FeedLook(number=1, picture=None, problem="", now={"text": "é" * 2000})
    assert json.loads(look.body()) == look.now
    assert look.body() is look.body()
    assert gzip.decompress(look.packed()) == look.body()
    assert look.packed() is look.packed()


def test_where_nobody_looks_any_more_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_IDLE_S", 0.0)
    group, rests = FakeGroup(), []

    async def look() -> None:
        feed = Feed(group.see, group.groups, 0.001, rest=lambda: rests.append(len(group.asked)))
        await feed.after(0)
        assert feed._task is not None
        await asyncio.wait([feed._task])

    asyncio.run(look())
    assert rests == [len(group.asked)]


def test_who_comes_while_connections_are_closed_is_shown_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "_IDLE_S", 0.0)
    begun, go_on = threading.Event(), threading.Event()

    def rest() -> None:
        begun.set()
        assert go_on.wait(10)

    async def look() -> tuple[int, int]:
        group = FakeGroup()
        feed = Feed(group.see, group.groups, 0.001, rest=rest)
        first = await feed.after(0)
        assert await asyncio.to_thread(begun.wait, 10)
        coming = asyncio.create_task(feed.after(first.number))
        await asyncio.sleep(0)  # it waits now
        go_on.set()
        second = await asyncio.wait_for(coming, 10)
        await feed.close()
        return first.number, second.number

    first, second = asyncio.run(look())
    assert second == first + 1


def test_who_holds_what() -> None:
    def segment(name: str, nbytes: int, label: str = "") -> ObservedSegment:
        return ObservedSegment(segment=name, label=label, site="here.py:1", bytes=nbytes)

    workers = (
        ObservedWorker(name="a", objects=(segment("1", 10), segment("2", 70, "weights"))),
        ObservedWorker(
            name="b",
            objects=(segment("1", 30, "an image"),),
            holders=(
                ObservedHolder(holder="a", what="actor", references=1),
                ObservedHolder(holder="c", what="Tensor", references=2, bytes=9),
            ),
        ),
    )
    picture: Any = SimpleNamespace(state=SimpleNamespace(workers=workers))
    found = payloads.memory(picture)
    assert [(each["label"], each["bytes"], each["holders"]) for each in found["objects"]] == [
        ("weights", 70, ["a"]),
        ("an image", 30, ["a", "b"]),
    ]
    assert [(each["owner"], each["holder"], each["bytes"]) for each in found["holders"]] == [
        ("b", "c", 9),
        ("b", "a", 0),
    ]
