"""Streams of generator methods: iteration, backpressure, errors, early ends, retries and deadlocks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc.actors.streams import stalls
from tests.actors.e2e.kit import open_gate, pass_gate, until
from tests.migration.rows import row

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]


class _Counting:
    """Counts the items that its generators have made, and the generators that have ended."""

    def __init__(self) -> None:
        self.made = 0
        self.closed = 0

    def seen(self) -> tuple[int, int]:
        return self.made, self.closed


@actorrpc.remote
class Producer(_Counting):
    def numbers(self, count: int) -> Any:
        try:
            for n in range(count):
                self.made = n + 1
                yield n
        finally:
            self.closed += 1

    def breaks(self, after: int) -> Any:
        yield from range(after)
        raise ValueError("in mid-stream")

    def blocks(self, path: str) -> Any:
        yield 0
        pass_gate(path)

    def of_refs(self, other: Any, count: int) -> Any:
        for n in range(count):
            yield actorrpc.get(other.add.remote(n, 1))

    def back(self, other: Any, me: Any) -> list[int]:
        """Read a stream of another actor, which calls this actor for each item."""
        return [actorrpc.get(ref) for ref in other.of_refs.remote(me, 40)]

    def add(self, a: int, b: int) -> int:
        return a + b


@actorrpc.remote
class AsyncProducer(_Counting):
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


both = pytest.mark.parametrize("cls", [Producer, AsyncProducer])


@both
def test_streams_are_iterated_with_for_and_async_for(cls: Any) -> None:
    actor = cls.remote()
    assert [actorrpc.get(ref) for ref in actor.numbers.remote(200)] == list(range(200))
    assert [actorrpc.get(ref) for ref in actor.numbers.remote(0)] == []

    async def read() -> list[int]:
        return [await ref async for ref in actor.numbers.remote(200)]

    assert asyncio.run(read()) == list(range(200))


@both
def test_an_error_of_a_generator_is_raised_after_its_items(cls: Any) -> None:
    actor = cls.remote()
    stream = actor.breaks.remote(50)
    assert [actorrpc.get(next(stream)) for _ in range(50)] == list(range(50))
    with pytest.raises(ValueError, match="in mid-stream"):
        actorrpc.get(next(stream))
    assert [actorrpc.get(ref) for ref in actor.numbers.remote(3)] == [0, 1, 2]


@row("Pipe()", "from-multiprocessing")
@row("Channel.open()", "from-monarch")
def test_max_buffered_items_limits_how_far_a_generator_runs_ahead() -> None:
    actor, other = AsyncProducer.remote(), Producer.options(max_concurrency=2).remote()
    for each in (actor, other):
        stream = each.numbers.options(max_buffered_items=5).remote(1000)
        assert actorrpc.get(next(stream)) == 0
        for _ in range(20):
            made, _closed = actorrpc.get(each.seen.remote())
        assert made <= 1 + 5 + 2
        assert [actorrpc.get(ref) for ref in stream] == list(range(1, 1000))


@both
def test_closing_leaving_or_dropping_a_stream_closes_its_generator(cls: Any) -> None:
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


def test_a_generator_can_call_the_actor_that_reads_it() -> None:
    a, b = Producer.remote(), Producer.remote()
    assert actorrpc.get(a.back.remote(b, a)) == [n + 1 for n in range(40)]


def test_a_stream_fails_if_its_actor_is_killed() -> None:
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
class Failing:
    """Its streams fail before their first item, a given number of times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.calls = 0

    def plain(self) -> Any:
        self.calls += 1
        if self.calls <= self.times:
            raise ValueError(f"call {self.calls}")
        yield from range(6)

    def count(self) -> int:
        return self.calls


def _values(stream: Any) -> list[Any]:
    found: list[Any] = []
    try:
        found.extend(stream.values())
    except ValueError as error:
        found.append(str(error))
    return found


def test_a_stream_that_fails_before_its_first_item_is_retried() -> None:
    actor = Failing.remote(2)
    retried = actor.plain.options(max_task_retries=3, retry_exceptions=True)
    assert _values(retried.remote()) == [0, 1, 2, 3, 4, 5]
    assert actorrpc.get(actor.count.remote()) == 3
    for options in ({"max_task_retries": 1, "retry_exceptions": True}, {"max_task_retries": 9}):
        actor = Failing.remote(2)
        assert "call" in _values(actor.plain.options(**options).remote())[0]
    actor = Failing.remote(2)
    other = actor.plain.options(max_task_retries=3, retry_exceptions=[KeyError])
    assert _values(other.remote()) == ["call 1"]


@actorrpc.remote
class ExitsOnce:
    def once(self, path: str) -> Any:
        if not os.path.exists(path):
            with open(path, "w"):
                sys.exit(3)
        yield "again"


def test_a_stream_is_retried_if_its_process_dies_before_the_first_item(tmp_path: Path) -> None:
    stream = ExitsOnce.options(max_restarts=1).remote().once.options(max_task_retries=1)
    assert list(stream.remote(str(tmp_path / "path")).values()) == ["again"]


def test_wait_returns_streams_whose_next_item_is_ready(gate: Path) -> None:
    actor = Producer.remote()
    blocked, stream = actor.blocks.remote(str(gate)), count.remote(2)
    found: list[int] = []
    assert actorrpc.get(next(blocked)) == 0
    left: list[Any] = [blocked, stream, actorrpc.put(7)]
    assert actorrpc.wait(left, num_returns=2)[0] == left[1:]
    while stream in left:
        assert actorrpc.wait([blocked, stream])[0] == [stream]
        assert stream.next_ready()
        try:
            found.append(actorrpc.get(next(stream)))
        except StopIteration:
            left.remove(stream)
    assert found == [0, 1]
    assert not blocked.next_ready()
    assert actorrpc.wait([blocked], timeout=0) == ([], [blocked])
    open_gate(gate)
    assert actorrpc.wait([blocked])[0] == [blocked]


@row("a generator with num_returns=3", "from-ray")
def test_num_returns_takes_the_first_items_of_a_generator() -> None:
    actor = Producer.remote()
    assert actorrpc.get(actor.numbers.options(num_returns=3).remote(3)) == [0, 1, 2]
    assert actorrpc.get(count.options(num_returns=2).remote(2)) == [0, 1]
    first, second = actor.numbers.options(num_returns=2).remote(1 << 30)
    assert actorrpc.get(actor.add.remote(first, second)) == 1  # the generator is closed and its actor is free
    given, missing = actor.breaks.options(num_returns=2).remote(1)
    assert actorrpc.get(given) == 0
    with pytest.raises(ValueError, match="in mid-stream"):
        actorrpc.get(missing)
    given, missing, last = count.options(num_returns=3).remote(1)
    assert actorrpc.get(given) == 0
    for each in (missing, last):
        with pytest.raises(ValueError, match=r"must yield 3 values \(num_returns\), but yielded 1"):
            actorrpc.get(each)


# -- deadlocks -----------------------------------------------------------------------------------------------------


@actorrpc.remote
class Reader:
    def between(self, other: Any) -> list[int]:
        """Call the producing actor for each of its items."""
        stream = other.numbers.options(backpressure=2).remote(40)
        return [actorrpc.get(other.add.remote(actorrpc.get(ref), 1)) for ref in stream]

    def own(self, me: Any) -> list[int]:
        return list(me.numbers.options(backpressure=2).remote(40).values())

    def numbers(self, count: int) -> Any:
        yield from range(count)


def test_a_reader_can_call_the_producing_actor_while_its_stream_is_buffered() -> None:
    actor = Producer.remote()
    assert [actorrpc.get(actor.add.remote(n, 1)) for n in actor.numbers.remote(300).values()] == list(
        range(1, 301)
    )
    two = actor.numbers.remote(300).values(), actor.numbers.remote(300).values()
    assert list(zip(*two, strict=True)) == [(n, n) for n in range(300)]
    stream = actor.numbers.remote(300)
    assert actorrpc.get(actor.add.remote(1, 1)) == 2
    assert actorrpc.get(stream.completed()) is None
    assert list(stream.values()) == list(range(300))


def test_waiting_for_a_call_behind_ones_own_paused_stream_raises_deadlock_error() -> None:
    actor = Producer.remote()
    values = actor.numbers.options(backpressure=2).remote(40).values()
    assert next(values) == 0
    with pytest.raises(
        actorrpc.DeadlockError, match=r"add\(\) can never run: .*numbers\(\) \(pauses .*MainThread .*add"
    ):
        actorrpc.get(actor.add.remote(1, 1))
    assert list(values) == list(range(1, 40))
    assert actorrpc.get(actor.add.remote(1, 1)) == 2


def _zipped(actor: Any, count: int = 2) -> Any:
    with contextlib.ExitStack() as streams:
        made = [actor.numbers.options(backpressure=2).remote(40) for _ in range(count)]
        for each in made:
            streams.callback(each.close)
        return list(zip(*(each.values() for each in made), strict=True))


def _in_asyncio(actor: Any) -> Any:
    async def main() -> list[int]:
        with actor.numbers.options(backpressure=2).remote(40) as stream:
            return [await actor.add.remote(await ref, 1) async for ref in stream]

    return asyncio.run(main())


_DEADLOCKS = {
    "zip": _zipped,
    "asyncio": _in_asyncio,
    "actor": lambda actor: actorrpc.get(Reader.remote().between.remote(actor)),
}


@pytest.mark.slow
@pytest.mark.limit(60)
@pytest.mark.parametrize("how", _DEADLOCKS)
def test_a_deadlock_through_a_paused_stream_is_found(how: str) -> None:
    actor = Producer.remote()
    with pytest.raises(actorrpc.DeadlockError, match=r"pauses until its reader .*wait for each other"):
        _DEADLOCKS[how](actor)
    assert actorrpc.get(actor.add.remote(1, 1)) == 2


@pytest.mark.slow
@pytest.mark.limit(60)
@pytest.mark.parametrize("cls", [Producer, AsyncProducer])
def test_a_deadlock_is_found_if_paused_streams_use_all_of_max_concurrency(cls: Any) -> None:
    actor = cls.options(max_concurrency=2).remote()
    assert _zipped(actor, 2) == [(n, n) for n in range(40)]
    with pytest.raises(actorrpc.DeadlockError, match=r"numbers\(\) can never run"):
        _zipped(actor, 3)


@pytest.mark.slow
@pytest.mark.limit(60)
def test_a_deadlock_is_found_if_a_method_reads_a_stream_of_its_own_actor() -> None:
    reader = Reader.remote()
    with pytest.raises(actorrpc.DeadlockError, match="can never go on"):
        actorrpc.get(reader.own.remote(reader))
    assert list(reader.numbers.remote(3).values()) == [0, 1, 2]


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time for which other threads of this process may still begin to read a stream."""
    monkeypatch.setattr(stalls, "PATIENCE_S", 2.0)


@pytest.mark.slow
@pytest.mark.limit(60)
@pytest.mark.usefixtures("short_patience")  # threads of earlier tests may have read streams
def test_waiting_for_the_end_of_ones_own_paused_stream_raises_deadlock_error() -> None:
    actor = Producer.remote()
    stream = actor.numbers.options(backpressure=2).remote(40)
    with pytest.raises(actorrpc.DeadlockError, match=r"the end of .* can never come"):
        actorrpc.get(stream.completed())
    with pytest.raises(actorrpc.DeadlockError):
        actorrpc.wait([stream.completed()])[0][0].future().wait()
    assert list(stream.values()) == list(range(40))
    assert actorrpc.get(stream.completed()) is None


@pytest.mark.slow
@pytest.mark.limit(60)
@pytest.mark.parametrize("took", [False, True], ids=["handed on", "reads"])
def test_a_stream_that_another_thread_reads_slowly_is_not_a_deadlock(took: bool) -> None:
    begun, found = threading.Event(), []
    actor = Producer.remote()
    stream = actor.numbers.options(backpressure=2).remote(40)

    def read() -> None:
        if took:
            found.append(actorrpc.get(next(stream)))
        begun.set()
        time.sleep(3.0)  # the deadlock search runs several times
        found.extend(stream.values())

    thread = threading.Thread(target=read)
    thread.start()
    begun.wait()
    assert actorrpc.get(actor.add.remote(1, 1)) == 2
    thread.join()
    assert found == list(range(40))


@pytest.mark.slow
@pytest.mark.limit(60)
@pytest.mark.usefixtures("short_patience")
def test_a_paused_stream_without_a_reader_is_reported_as_a_deadlock_after_a_delay() -> None:
    over = threading.Event()
    idle = threading.Thread(target=over.wait)
    try:
        actor = Producer.remote()
        stream = actor.numbers.options(backpressure=2).remote(40)
        idle.start()
        with pytest.raises(actorrpc.DeadlockError, match="add"):
            actorrpc.get(actor.add.remote(1, 1))
        stream.close()
    finally:
        over.set()
        idle.join()


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize("options", [{}, {"backpressure": 1}], ids=["bytes", "items"])
def test_an_async_actor_can_have_thousands_of_open_streams(options: dict[str, Any]) -> None:
    actor = AsyncProducer.remote()
    streams = [actor.numbers.options(**options).remote(3).values() for _ in range(5000)]
    streams.reverse()
    assert [next(each) for each in streams] == [0] * 5000
    assert [list(each) for each in streams] == [[1, 2]] * 5000
