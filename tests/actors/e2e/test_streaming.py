"""Generator methods: as iterators, with back-pressure, errors in mid-stream and early ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc.actors import ref_generator
from tests.actors.e2e.kit import open_gate, pass_gate, until

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]


@actorrpc.remote
class Producer:
    def __init__(self) -> None:
        self.made = 0
        self.closed = 0

    def numbers(self, count: int) -> Any:
        try:
            for n in range(count):
                self.made = n + 1
                yield n
        finally:
            self.closed += 1

    def tensors(self, count: int, size: int) -> Any:
        for n in range(count):
            yield torch.full((size,), n)

    def breaks(self, after: int) -> Any:
        yield from range(after)
        raise ValueError("in mid-stream")

    def blocks(self, path: str) -> Any:
        yield 0
        pass_gate(path)

    def of_refs(self, other: Any, count: int) -> Any:
        for n in range(count):
            yield actorrpc.get(other.add.remote(n, 1))

    def relay(self, other: Any, count: int) -> Any:
        for ref in other.numbers.remote(count):
            yield actorrpc.get(ref) * 10

    def back(self, other: Any, me: Any) -> list[int]:
        """A stream of another actor that calls this one for each item."""
        return [actorrpc.get(ref) for ref in other.of_refs.remote(me, 40)]

    def add(self, a: int, b: int) -> int:
        return a + b

    def seen(self) -> tuple[int, int]:
        return self.made, self.closed

    def total(self, stream: Any) -> int:
        return sum(actorrpc.get(ref) for ref in stream)


@actorrpc.remote
class AsyncProducer:
    def __init__(self) -> None:
        self.made = 0
        self.closed = 0

    async def numbers(self, count: int) -> Any:
        try:
            for n in range(count):
                self.made = n + 1
                yield n
                if n % 7 == 0:
                    await asyncio.sleep(0)
        finally:
            self.closed += 1

    async def breaks(self, after: int) -> Any:
        for n in range(after):
            yield n
        raise ValueError("in mid-stream")

    async def relay(self, other: Any, count: int) -> Any:
        async for ref in other.numbers.remote(count):
            yield await ref * 10

    async def seen(self) -> tuple[int, int]:
        return self.made, self.closed


both = pytest.mark.parametrize("cls", [Producer, AsyncProducer])


@both
def test_for_and_async_for(cls: Any) -> None:
    actor = cls.remote()
    assert [actorrpc.get(ref) for ref in actor.numbers.remote(200)] == list(range(200))
    assert [actorrpc.get(ref) for ref in actor.numbers.remote(0)] == []

    async def read() -> list[int]:
        return [await ref async for ref in actor.numbers.remote(200)]

    assert asyncio.run(read()) == list(range(200))


@both
def test_errors_come_in_their_place(cls: Any) -> None:
    actor = cls.remote()
    stream = actor.breaks.remote(50)
    assert [actorrpc.get(next(stream)) for _ in range(50)] == list(range(50))
    with pytest.raises(ValueError, match="in mid-stream"):
        actorrpc.get(next(stream))
    assert [actorrpc.get(ref) for ref in actor.numbers.remote(3)] == [0, 1, 2]


def test_back_pressure() -> None:
    actor, other = AsyncProducer.remote(), Producer.options(max_concurrency=2).remote()
    for each in (actor, other):
        stream = each.numbers.options(max_buffered_items=5).remote(1000)
        assert actorrpc.get(next(stream)) == 0
        for _ in range(20):
            made, _closed = actorrpc.get(each.seen.remote())
        assert made <= 1 + 5 + 2
        assert [actorrpc.get(ref) for ref in stream] == list(range(1, 1000))


@both
def test_early_ends(cls: Any) -> None:
    actor = cls.remote()
    for n, how in enumerate(["close", "break", "drop"]):
        stream = actor.numbers.options(backpressure=16).remote(1_000_000)
        assert actorrpc.get(next(stream)) == 0
        if how == "close":
            stream.close()
        elif how == "break":
            for ref in stream:
                if actorrpc.get(ref) == 30:
                    break
        del stream
        gc.collect()
        until(lambda n=n: actorrpc.get(actor.seen.remote())[1] == n + 1)
    assert actorrpc.get(actor.seen.remote())[0] < 1000


def test_streams_of_tensors() -> None:
    actor = Producer.remote()
    for size in (10, 100_000):
        found = [actorrpc.get(ref) for ref in actor.tensors.remote(12, size)]
        assert [int(each[0]) for each in found] == list(range(12))
        assert all(each.numel() == size for each in found)


def test_streams_of_streams() -> None:
    a, b = Producer.remote(), AsyncProducer.remote()
    expected = [n * 10 for n in range(50)]
    assert [actorrpc.get(ref) for ref in a.relay.remote(b, 50)] == expected
    assert [actorrpc.get(ref) for ref in b.relay.remote(a, 50)] == expected


def test_a_stream_whose_producer_calls_its_reader() -> None:
    a, b = Producer.remote(), Producer.remote()
    assert actorrpc.get(a.back.remote(b, a)) == [n + 1 for n in range(40)]


def test_many_streams_at_a_time() -> None:
    actor = AsyncProducer.remote()
    streams = [actor.numbers.remote(60) for _ in range(20)]
    found: list[list[int]] = [[] for _ in streams]
    for _ in range(60):
        for each, stream in zip(found, streams, strict=True):
            each.append(actorrpc.get(next(stream)))
    assert found == [list(range(60))] * 20
    for stream in streams:
        with pytest.raises(StopIteration):
            next(stream)


def test_the_producer_dies_in_mid_stream() -> None:
    actor = Producer.remote()
    stream = actor.numbers.remote(10_000_000)
    assert actorrpc.get(next(stream)) == 0
    actorrpc.kill(actor)
    with pytest.raises((actorrpc.ActorDiedError, actorrpc.PeerDiedError)):
        list(stream.values())


@actorrpc.remote
def count(to: int) -> Any:
    yield from range(to)


@actorrpc.remote
async def count_async(to: int) -> Any:
    for n in range(to):
        yield n


@actorrpc.remote
class Failing:
    """Its streams fail as often as it has been told, after so many items."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.calls = 0

    def plain(self, after: int) -> Any:
        self.calls += 1
        yield from range(after)
        if self.calls <= self.times:
            raise ValueError(f"call {self.calls}")
        yield from range(after, 6)

    @actorrpc.method(retry_exceptions=[ValueError], max_task_retries=-1)
    def repeatable(self, after: int) -> Any:
        yield from self.plain(after)

    @actorrpc.method(retry_exceptions=True, max_task_retries=-1)
    async def asynchronous(self, after: int) -> Any:
        for each in self.plain(after):
            yield each

    def count(self) -> int:
        return self.calls


def _values(stream: Any) -> list[Any]:
    found: list[Any] = []
    try:
        found.extend(stream.values())
    except ValueError as error:
        found.append(str(error))
    return found


def test_streams_that_fail_are_made_again() -> None:
    actor = Failing.remote(2)
    retried = actor.plain.options(max_task_retries=3, retry_exceptions=True)
    assert _values(retried.remote(0)) == [0, 1, 2, 3, 4, 5]
    assert actorrpc.get(actor.count.remote()) == 3
    for options in ({"max_task_retries": 1, "retry_exceptions": True}, {"max_task_retries": 9}):
        actor = Failing.remote(2)
        assert "call" in _values(actor.plain.options(**options).remote(0))[0]
    actor = Failing.remote(2)
    other = actor.plain.options(max_task_retries=3, retry_exceptions=[KeyError])
    assert _values(other.remote(0)) == ["call 1"]


def test_streams_that_have_given_something_are_made_again_where_their_method_says_so() -> None:
    actor = Failing.remote(1)
    retried = actor.plain.options(max_task_retries=3, retry_exceptions=True)
    assert _values(retried.remote(2)) == [0, 1, "call 1"]
    for name, after in (("repeatable", 4), ("asynchronous", 5)):
        actor = Failing.remote(3)
        assert _values(getattr(actor, name).remote(after)) == [0, 1, 2, 3, 4, 5]
        assert actorrpc.get(actor.count.remote()) == 4


def test_tasks_stream_too() -> None:
    assert [actorrpc.get(ref) for ref in count.remote(50)] == list(range(50))
    assert [actorrpc.get(ref) for ref in count_async.remote(50)] == list(range(50))


def test_an_item_that_is_here_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, gate: Path) -> None:
    """Whoever waits for an item gets it, even if the next ones are asked for in this very moment."""
    consumer, here = ref_generator._Consumer, threading.get_ident()
    waiting, asked, taken = threading.Event(), threading.Event(), threading.Event()
    pull, pulled, drive = consumer._pull, consumer._pulled, consumer.drive
    late: list[bool] = []

    # The pool takes the first item up, and is still at it when this thread looks what there is to wait for.
    def comes(self: Any, step: Any) -> None:
        waiting.wait(10)
        pulled(self, step)

    def pulls(self: Any) -> None:
        pull(self)
        if self._items and threading.get_ident() != here and not asked.is_set():
            asked.set()
            late.append(not taken.wait(5))

    def drives(self: Any, deadline: float | None) -> None:
        if self._ticket is not None:
            waiting.set()
            asked.wait(10)
        drive(self, deadline)

    monkeypatch.setattr(consumer, "_pulled", comes)
    monkeypatch.setattr(consumer, "_pull", pulls)
    monkeypatch.setattr(consumer, "drive", drives)
    actor = Producer.remote()
    items = iter(actor.blocks.remote(str(gate)))
    assert actorrpc.get(next(items)) == 0
    taken.set()
    open_gate(gate)
    assert list(items) == []
    until(lambda: late)
    assert late == [False]
