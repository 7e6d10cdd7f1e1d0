"""Streams: order, how far producers run ahead, errors, and every way in which they end early."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import actorrpc
from actorrpc import errors, rpc
from actorrpc.actors.context import Runtime, current
from actorrpc.actors.host.actor import HostedActor
from actorrpc.actors.host.envelope import Envelope
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.refs.wait import as_completed, get, wait
from actorrpc.actors.streams import consumer as consumer_module
from actorrpc.actors.streams import producer as producer_module
from actorrpc.actors.streams.consumer import ObjectRefGenerator
from actorrpc.actors.streams.producer import StreamTicket, aproduce, charge_of, close_stream, produce, pull
from actorrpc.agent.executor import Deferred
from actorrpc.flight_recorder import NOTED
from actorrpc.futures import Future, Progress
from actorrpc.serialization import codec
from actorrpc.testing import InProcessCluster
from actorrpc.wire.frames import STOP
from tests.actors.bare import alone, bare, begin, ended, here
from tests.ranks import rpc_group

_TINY = 0.05  # a time-out that is meant to pass


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """A group of this process alone."""
    with alone() as made:
        yield made


class _Log:
    """What generators have done, for those who wait for it."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self.lines: list[Any] = []

    def add(self, line: Any) -> None:
        with self._change:
            self.lines.append(line)
            self._change.notify_all()

    def wait_for(self, line: Any) -> None:
        with self._change:
            self._change.wait_for(lambda: line in self.lines)

    def take(self) -> list[Any]:
        with self._change:
            found, self.lines = self.lines, []
            return found


_log = _Log()


@pytest.fixture(autouse=True)
def _fresh_log() -> Iterator[None]:
    _log.take()
    yield
    _log.take()


def _until_empty(runtime: Runtime) -> None:
    """Return when it is known that no stream is wanted any more: a close may be on its way."""
    while len(runtime.streams):
        threading.Event().wait(0.001)


def count(n: int) -> Generator[int, None, None]:
    yield from range(n)


def logged(n: int) -> Generator[int, None, None]:
    """Say what is produced, and how it ends."""
    try:
        for number in range(n):
            _log.add(number)
            yield number
    except GeneratorExit:
        _log.add("closed")
        raise
    finally:
        _log.add("finally")


def failing(n: int) -> Generator[int, None, None]:
    yield from range(n)
    raise LookupError(f"after {n}")


# -- taking --------------------------------------------------------------------------------------------------


def test_references_come_complete(runtime: Runtime) -> None:
    refs = list(here(count, 4, 10))
    assert all(type(ref) is ObjectRef and ref.done() for ref in refs)
    assert get(refs) == list(range(10))
    assert repr(refs[3]) == "ObjectRef(item 3 of count, complete)"
    assert ended() == [None]
    assert len(runtime.streams) == 0


def test_values_come_as_they_are(runtime: Runtime) -> None:
    assert list(here(count, 2, 5).values()) == [0, 1, 2, 3, 4]
    assert list(here(count, 2, 0).values()) == []


def test_it_can_be_iterated_over_in_asyncio(runtime: Runtime) -> None:
    async def main() -> tuple[list[int], list[int]]:
        values = [value async for value in here(count, 3, 20).values()]
        refs = [await ref async for ref in here(count, 3, 20)]
        return values, refs

    assert asyncio.run(main()) == (list(range(20)), list(range(20)))


@pytest.mark.limit(120)
def test_consumers_see_what_generators_yield(runtime: Runtime) -> None:
    @given(
        items=st.lists(
            st.one_of(
                st.integers(),
                st.none(),
                st.text(max_size=5),
                st.binary(max_size=5),
                st.tuples(st.integers(), st.booleans()),
                st.integers(1, 3).map(lambda n: "x" * (n * 400_000)),
            ),
            max_size=30,
        ),
        limit=st.integers(1, 20),
        fails=st.booleans(),
        wants=st.none() | st.integers(0, 30),
    )
    @settings(max_examples=80)
    def examples(items: list[Any], limit: int, fails: bool, wants: int | None) -> None:
        _one_example(items, limit, fails, wants)
        _until_empty(runtime)

    examples()


def _one_example(items: list[Any], limit: int, fails: bool, wants: int | None) -> None:
    most = taken = 0

    def generate() -> Iterator[Any]:
        nonlocal most
        for produced, item in enumerate(items, 1):
            most = max(most, produced - taken)
            yield item
        if fails:
            raise LookupError("at the end")

    _made.append(generate)
    found: list[Any] = []
    error: BaseException | None = None
    with here(_next_made, limit) as stream:
        values = stream.values()
        while wants is None or taken < wants:
            # Counted before it is asked for: the producer may hear of it before this thread goes on.
            taken += 1
            try:
                found.append(next(values))
            except StopIteration:
                break
            except LookupError as caught:
                error = caught
    assert ended() == [None]
    assert found == items[:wants]
    assert (error is not None) == (fails and (wants is None or wants > len(items)))
    assert most <= limit


_made: list[Callable[[], Any]] = []


def _next_made() -> Any:
    return _made.pop()()


def test_items_are_taken_as_they_are_when_yielded(runtime: Runtime) -> None:
    def reuse() -> Iterator[torch.Tensor]:
        buffer = torch.zeros(50_000)
        for _ in range(4):
            buffer += 1
            yield buffer

    _made.append(reuse)
    tensors = list(here(_next_made, 4).values())
    assert [float(each[0]) for each in tensors] == [1, 2, 3, 4]
    tensors[0].zero_()
    assert float(tensors[1].sum()) == 100_000


def test_large_items_come_a_few_at_a_time(runtime: Runtime) -> None:
    def large() -> Iterator[bytes]:
        for n in range(6):
            yield bytes([n]) * 600_000

    _made.append(large)
    assert [each[0] for each in here(_next_made, 6).values()] == [0, 1, 2, 3, 4, 5]


def test_several_threads_take_from_one_stream(runtime: Runtime) -> None:
    stream = here(count, 5, 400)
    found: list[int] = []

    def take() -> None:
        found.extend(stream.values())

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(400))


def test_what_is_no_generator(runtime: Runtime) -> None:
    future: Future[Any] = Future()
    future.set_result(5)
    stream: ObjectRefGenerator[Any] = ObjectRefGenerator(future, label="f")
    with pytest.raises(TypeError, match="f did not return a generator but a int"):
        next(stream.values())
    with pytest.raises(StopIteration):
        next(stream)


def test_a_call_that_fails(runtime: Runtime) -> None:
    future: Future[Any] = Future()
    stream: ObjectRefGenerator[Any] = ObjectRefGenerator(future, label="f")
    end = stream.completed()
    future.set_exception(ValueError("before anything"))
    (ref,) = stream
    for waits in (lambda: get(ref), lambda: get(end), lambda: get(stream.completed())):
        with pytest.raises(ValueError, match="before anything"):
            waits()


# -- together with other results -------------------------------------------------------------------------------


def test_get_gives_all_that_were_not_taken(runtime: Runtime) -> None:
    stream = here(count, 2, 20)
    assert get(next(stream)) == 0
    ref: ObjectRef[Any] = ObjectRef.of("x")
    assert get([ref, stream, [here(count, 0, 0), ref]]) == ["x", list(range(1, 20)), [[], "x"]]
    assert get(stream) == []
    assert stream.is_finished()
    assert ended() == [None, None]
    stream = here(count, 0, 3)
    stream.close()
    with pytest.raises(errors.CancelledError, match="was closed before its end"):
        get(stream)
    ended()


def sized(n: int, size: int) -> Generator[torch.Tensor, None, None]:
    for number in range(n):
        _log.add(number)
        yield torch.full((size // 4,), float(number))


def test_get_does_not_stop_at_what_may_be_produced_ahead(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (consumer_module, producer_module):
        monkeypatch.setattr(module, "WINDOW_BYTES", 1 << 16)
    stream = here(sized, 2, 40, 1 << 14)
    _log.wait_for(1)
    assert [each[0].item() for each in get(stream)] == list(range(40))
    assert ended() == [None]


_release = threading.Event()


def held(first: int, n: int = 0) -> Generator[int, None, None]:
    """Give the first ones, and others when the test releases it."""
    yield from range(first)
    assert _release.wait(20)
    yield from range(first, n)


def test_what_get_did_not_give_can_be_taken(runtime: Runtime) -> None:
    _release.clear()
    stream = here(held, 0, 3)
    for _ in range(2):
        with pytest.raises(errors.RpcTimeoutError, match="the end of held was not complete within"):
            get([stream, ObjectRef.of(1)], timeout=_TINY)
    assert get(next(stream)) == 0
    _release.set()
    assert get(stream) == [1, 2]
    broken = here(failing, 0, 2)
    with pytest.raises(LookupError, match="after 2"):
        get(broken)
    assert get([next(broken), next(broken)]) == [0, 1]
    with pytest.raises(LookupError, match="after 2"):
        get(next(broken))
    ended()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_as_completed_gives_the_items_of_streams(runtime: Runtime, asynchronous: bool) -> None:
    one, other = here(count, 1, 5), here(count, 0, 3)
    late: Future[Any] = Future()
    ref: ObjectRef[Any] = ObjectRef(late)

    def seen(found: list[Any], each: Any) -> None:
        found.append(each if each is ref else get(each))
        if len(found) == 8:
            late.set_result("late")

    async def gathered() -> list[Any]:
        found: list[Any] = []
        async for each in as_completed([ref, one, other]):
            seen(found, each)
        return found

    if asynchronous:
        found = asyncio.run(gathered())
    else:
        found = []
        for each in as_completed([ref, one, other]):
            seen(found, each)
    assert found.pop() is ref
    assert sorted(found) == sorted([*range(5), *range(3)])
    assert [each for each in found if each > 2] == [3, 4]
    assert ended() == [None, None]


def test_as_completed_takes_no_more_than_it_gives(runtime: Runtime) -> None:
    stream = here(logged, 1, 100)
    first = next(as_completed([stream]))
    assert get(first) == 0
    assert get(next(stream)) == 1  # the iterator is gone, and has taken one
    assert len([line for line in _log.take() if type(line) is int]) < 10
    completed = as_completed([stream])
    del stream
    assert get(next(completed)) == 2
    del completed  # and nobody has the stream
    _log.wait_for("closed")
    ended()


def test_as_completed_raises_what_a_stream_raises_in_its_place(runtime: Runtime) -> None:
    *given, last = list(as_completed([here(failing, 0, 2)]))
    assert get(given) == [0, 1]
    with pytest.raises(LookupError, match="after 2"):
        get(last)
    ended()


def test_an_item_that_another_reader_takes_from_as_completed(runtime: Runtime) -> None:
    _release.clear()
    stream = here(held, 0, 1, 2)
    completed = as_completed([stream], timeout=_TINY)
    assert wait([stream])[0] == [stream]
    assert get(next(stream)) == 0
    with pytest.raises(errors.RpcTimeoutError):
        next(completed)
    _release.set()
    assert get(list(as_completed([stream]))) == [1]
    ended()


def test_next_ready_waits_for_the_next_item(runtime: Runtime) -> None:
    _release.clear()
    stream = here(held, 0, 0, 1)
    assert not stream.next_ready()
    assert not stream.next_ready(timeout=_TINY)
    _release.set()
    assert stream.next_ready(timeout=None)
    assert get(next(stream)) == 0
    assert stream.next_ready(20)  # the end
    assert list(stream) == []
    with pytest.raises(errors.ConfigError):
        stream.next_ready(-1)
    ended()


# -- how far it runs ahead -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_producers_wait_for_their_consumers(runtime: Runtime, limit: int) -> None:
    ticket = begin(logged, limit, 50)
    producer = runtime.streams.get(ticket.stream)
    _until_it_pauses(runtime, ticket)  # the log is written before the item is in the window
    waits = producer.room()
    assert waits is not None
    assert _log.lines == list(range(limit))
    assert pull(ticket.stream, 0) == (list(range(limit)), None)
    assert not waits.done()  # sent is not taken
    later = pull(ticket.stream, 1)
    assert type(later) is Deferred
    assert later.future.wait() == ([limit], None)
    assert _log.lines == list(range(limit + 1))
    close_stream(ticket.stream)
    close_stream(ticket.stream)
    assert ended() == [None]
    assert _log.lines[-2:] == ["closed", "finally"]


def test_the_flight_recorder_has_the_pauses_and_the_end(runtime: Runtime) -> None:
    flight_recorder = runtime.agent.flight_recorder
    assert flight_recorder is not None
    first = flight_recorder.total
    ticket = begin(logged, 1, 50)
    _until_it_pauses(runtime, ticket)
    close_stream(ticket.stream)
    assert ended() == [None]
    kinds = [tuple(each[4:6]) for each in flight_recorder.since(first, 100) if each[1] == NOTED]
    name = f"{ticket.stream:x}"
    assert sorted(kinds) == [("pause", f"of stream {name}"), ("stream", f"{name} closed after 1 items")]


def test_the_flight_recorder_counts_the_items_of_a_stream(runtime: Runtime) -> None:
    flight_recorder = runtime.agent.flight_recorder
    assert flight_recorder is not None
    first = flight_recorder.total
    ticket = begin(logged, 0, 3)
    assert ended() == [None]
    kinds = [tuple(each[4:6]) for each in flight_recorder.since(first, 100) if each[1] == NOTED]
    assert kinds == [("stream", f"{ticket.stream:x} of 3 items")]
    close_stream(ticket.stream)
    assert len(flight_recorder.since(first, 100)) == 1


def test_nothing_is_produced_beyond_the_limit(runtime: Runtime) -> None:
    stream = here(logged, 1, 10)
    values = stream.values()
    for number in range(4):
        assert next(values) == number
        _log.wait_for(number + 1)  # while this one is in hand, the next one is made
        assert max(_log.lines) == number + 1
    stream.close()
    assert ended() == [None]


def _held(runtime: Runtime, ticket: StreamTicket) -> tuple[int, int]:
    return runtime.streams.get(ticket.stream).ahead


def _until_it_pauses(runtime: Runtime, ticket: StreamTicket) -> None:
    while not runtime.streams.get(ticket.stream).pause:
        threading.Event().wait(0.001)


def test_bytes_bound_it_where_no_number_does(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_module, "WINDOW_BYTES", 1000)
    ticket = begin(logged, 0, 50)
    _until_it_pauses(runtime, ticket)
    assert _held(runtime, ticket) == (8, 8 * 128)  # the eighth item is the one that goes beyond
    assert pull(ticket.stream, 0) == (list(range(8)), None)
    assert _held(runtime, ticket) == (8, 8 * 128)  # sent is not taken
    later = pull(ticket.stream, 3)
    assert later.future.wait()[0] == [8]
    _until_it_pauses(runtime, ticket)
    assert _held(runtime, ticket) == (8, 8 * 128)
    producer = runtime.streams.get(ticket.stream)
    close_stream(ticket.stream)
    assert producer.ahead == (0, 0)
    assert ended() == [None]


def test_items_count_what_they_take(runtime: Runtime) -> None:
    assert [charge_of(each) for each in (1, None, "a" * 50)] == [128] * 3
    assert charge_of("a" * 4000) > 4000
    assert charge_of(1 << 80_000) > 10_000
    assert charge_of(Snapshot.of(torch.zeros(1000))) > 4000
    assert charge_of(Snapshot.of((1, 2))) >= 400


@pytest.mark.parametrize("limit", [0, 3])
def test_items_larger_than_the_window_come_one_by_one(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(producer_module, "WINDOW_BYTES", 1000)
    monkeypatch.setattr(consumer_module, "WINDOW_BYTES", 1000)

    def large() -> Iterator[bytes]:
        for n in range(6):
            _log.add(n)
            yield bytes([n]) * 5000

    _made.append(large)
    stream = here(_next_made, limit)
    values = stream.values()
    for n in range(6):
        assert next(values) == bytes([n]) * 5000
        assert len(_log.lines) <= n + 3  # the one in hand, the next one, and the one that is being made
        assert stream._consumer._charge <= 5500
    assert list(values) == []
    assert stream._consumer._charge == 0
    assert ended() == [None]


def test_what_lies_here_counts_until_it_is_taken(runtime: Runtime) -> None:
    stream = here(count, 0, 1000)
    end = stream.completed()
    assert get(end) is None
    consumer = stream._consumer
    assert consumer._charge == 1000 * 128
    assert list(stream.values()) == list(range(1000))
    assert consumer._charge == 0
    again = here(count, 0, 1000)
    assert next(again.values()) == 0
    again.close()
    assert again._consumer._charge == 0
    assert ended() == [None, None]


def test_time_is_up_and_the_stream_goes_on(runtime: Runtime) -> None:
    gate = threading.Event()

    def slow() -> Iterator[int]:
        yield 1
        gate.wait()
        yield 2

    _made.append(slow)
    stream = here(_next_made, 4)
    assert get(stream.next(timeout=10)) == 1
    with pytest.raises(errors.RpcTimeoutError, match=r"item 1 of _next_made was not there within 0.05 s"):
        stream.next(timeout=_TINY)
    assert not stream.is_finished()
    gate.set()
    assert get(stream.next()) == 2
    with pytest.raises(StopIteration):
        stream.next()
    assert stream.is_finished()
    assert "over" in repr(stream)


# -- errors --------------------------------------------------------------------------------------------------


def test_an_error_comes_in_its_place(runtime: Runtime) -> None:
    refs = list(here(failing, 2, 3))
    assert get(refs[:3]) == [0, 1, 2]
    assert len(refs) == 4
    with pytest.raises(LookupError, match="after 3") as caught:
        get(refs[3])
    assert isinstance(caught.value, errors.RemoteError)
    assert "in failing" in caught.value.traceback
    assert "/actors/streams.py" not in caught.value.traceback
    values = here(failing, 2, 1).values()
    assert next(values) == 0
    with pytest.raises(LookupError, match="after 1"):
        next(values)
    with pytest.raises(StopIteration):
        next(values)
    assert ended() == [None, None]


def test_items_that_cannot_be_sent_end_the_stream(runtime: Runtime) -> None:
    def bad() -> Iterator[Any]:
        yield 1
        try:
            yield {"lock": threading.Lock()}
        finally:
            _log.add("finally")

    _made.append(bad)
    values = here(_next_made, 4).values()
    assert next(values) == 1
    with pytest.raises(errors.SerializationError, match="lock"):
        next(values)
    assert ended() == [None]
    assert _log.take() == ["finally"]


def _load(text: str) -> Any:
    raise ValueError(text)


class _Unloadable:
    def __reduce__(self) -> Any:
        return _load, ("cannot be rebuilt",)


def test_items_that_cannot_be_opened_fail_alone(runtime: Runtime) -> None:
    def bad() -> Iterator[Any]:
        yield 1
        yield _Unloadable()
        yield 3

    _made.append(bad)
    first, second, third = here(_next_made, 4)
    assert get([first, third]) == [1, 3]
    with pytest.raises(errors.SerializationError, match="cannot be rebuilt"):
        get(second)


def test_what_is_no_exception_is_raised_on_both_sides(runtime: Runtime) -> None:
    def leave() -> Iterator[int]:
        yield 1
        raise SystemExit(3)

    _made.append(leave)
    first, second = here(_next_made, 4)
    assert get(first) == 1
    with pytest.raises(errors.RemoteError, match="SystemExit: 3"):
        get(second)
    (error,) = ended()
    assert isinstance(error, SystemExit)


@pytest.mark.prints(r"a generator raised while it was closed.*LookupError: while closing$")
def test_a_generator_that_fails_when_it_is_closed(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    def stubborn() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            raise LookupError("while closing")

    _made.append(stubborn)
    stream = here(_next_made, 1)
    assert get(next(stream)) == 1
    stream.close()
    assert ended() == [None]
    assert "raised while it was closed" in caplog.text


# -- early ends ----------------------------------------------------------------------------------------------


def test_close_runs_the_generators_finally(runtime: Runtime) -> None:
    stream = here(logged, 2, 100)
    assert get(next(stream)) == 0
    end = stream.completed()
    stream.close()
    stream.close()
    assert ended() == [None]
    assert _log.take()[-2:] == ["closed", "finally"]
    with pytest.raises(StopIteration):
        next(stream)
    with pytest.raises(errors.CancelledError, match="closed before its end"):
        get(end)
    assert stream.is_finished()
    assert len(runtime.streams) == 0


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_dropping_it_closes_it(runtime: Runtime, taken: int) -> None:
    stream = here(logged, 2, 100)
    values = stream.values()
    for number in range(taken):
        assert next(values) == number
    del stream
    if not taken:
        _log.wait_for(0)
    del values
    gc.collect()
    assert ended() == [None]
    assert _log.take()[-2:] == ["closed", "finally"]


def test_dropping_it_before_the_call_has_begun(runtime: Runtime) -> None:
    future: Future[Any] = Future()
    stream: ObjectRefGenerator[Any] = ObjectRefGenerator(future, label="f")
    cancelled = threading.Event()
    future.add_done_callback(lambda _: cancelled.set())
    del stream
    gc.collect()
    assert cancelled.wait(10)
    assert future.cancelled()


def test_closed_while_the_call_is_answered(runtime: Runtime) -> None:
    class Source(Progress):
        """A call that is over too soon to be cancelled."""

    future: Future[Any] = Future()
    future.source = Source()
    stream: ObjectRefGenerator[Any] = ObjectRefGenerator(future, label="f")
    stream.close()
    future.set_result(begin(logged, 2, 100))
    assert ended() == [None]
    assert len(runtime.streams) == 0


def test_closing_wakes_whoever_waits(runtime: Runtime) -> None:
    future: Future[Any] = Future()
    stream: ObjectRefGenerator[Any] = ObjectRefGenerator(future, label="f")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(list(stream)))
    thread.start()
    while stream._consumer._arrival is None:
        threading.Event().wait(0.001)
    stream.close()
    thread.join()
    assert found == [[]]


def test_an_end_is_told_once_it_is_known(runtime: Runtime) -> None:
    stream = here(count, 4, 3)
    assert len(list(stream)) == 3
    end = stream.completed()
    assert get(end) is None
    stream.close()
    assert get(end) is None


def test_shutdown_ends_producers_and_consumers() -> None:
    with alone() as made:
        stream = here(logged, 2, 100)
        assert get(next(stream)) == 0
        made.streams.close()
        (error,) = ended()
        assert isinstance(error, errors.ShutdownError)
        assert _log.take()[-2:] == ["closed", "finally"]
        with pytest.raises(errors.RpcError):
            list(stream.values())
        ticket = begin(logged, 2, 100)
        assert isinstance(ended()[0], errors.ShutdownError)
        with pytest.raises(errors.ShutdownError):
            pull(ticket.stream, 0)


def test_errors_of_the_producers_worker_are_translated(runtime: Runtime) -> None:
    def translated(how: Callable[..., Any]) -> BaseException:
        stream: ObjectRefGenerator[Any] = ObjectRefGenerator(
            rpc.rpc_async(0, _nowhere), label="f", translate=how
        )
        (ref,) = stream
        error = ref.future().exception()
        assert error is not None
        return error

    def late(error: BaseException, peer: Any) -> Future[Any]:
        future: Future[Any] = Future()
        threading.Thread(target=lambda: future.set_exception(LookupError("later"))).start()
        return future

    def wrong(error: BaseException, peer: Any) -> BaseException:
        raise ZeroDivisionError

    assert (
        str(translated(lambda error, peer: LookupError(f"means {type(error).__name__}"))) == "means RpcError"
    )
    assert str(translated(late)) == "later"
    assert type(translated(wrong)) is ZeroDivisionError


def _nowhere() -> StreamTicket:
    runtime = current()
    assert runtime is not None
    return StreamTicket(runtime.streams.me, 1, 4)


def test_it_cannot_travel(runtime: Runtime) -> None:
    stream = here(count, 4, 3)
    for send in (codec.dumps, copy.copy, lambda each: rpc.rpc_sync(0, str, (each,))):
        with pytest.raises(errors.SerializationError, match="take its items here"):
            send(stream)
    assert len(list(stream)) == 3


# -- async generators ----------------------------------------------------------------------------------------


async def _ticks(n: int) -> AsyncIterator[int]:
    try:
        for number in range(n):
            await asyncio.sleep(0)
            _log.add(number)
            yield number
    finally:
        _log.add("finally")


async def _until(true: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not come true")


def test_async_generators(runtime: Runtime) -> None:
    async def main() -> Any:
        producers = [runtime.streams.open(2) for _ in range(2)]
        producer_module: list[ObjectRefGenerator[int]] = []
        for producer in producers:
            future: Future[Any] = Future()
            future.set_result(producer.ticket())
            producer_module.append(ObjectRefGenerator(future, label="ticks"))
        tasks = [asyncio.create_task(aproduce(_ticks(50), producer)) for producer in producers]  # type: ignore[arg-type]
        values = [value async for value in producer_module[0].values()]
        first = await anext(aiter(producer_module[1].values()))
        producer_module[1].close()
        await asyncio.gather(*tasks)
        return values, first

    assert asyncio.run(main()) == (list(range(50)), 0)
    assert _log.take().count("finally") == 2
    assert len(runtime.streams) == 0


def test_async_generators_that_fail_and_are_cancelled(runtime: Runtime) -> None:
    async def bad() -> AsyncIterator[int]:
        yield 1
        raise LookupError("async")

    async def main() -> None:
        producer = runtime.streams.open(2)
        await aproduce(bad(), producer)  # type: ignore[arg-type]
        items, end = pull(producer.stream, 0)
        assert items == [1]
        assert end
        cancelled = runtime.streams.open(2)
        task = asyncio.create_task(aproduce(_ticks(50), cancelled))  # type: ignore[arg-type]
        await _until(lambda: cancelled.room() is not None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        future: Future[Any] = Future()
        future.set_result(cancelled.ticket())
        values = ObjectRefGenerator(future, label="ticks").values()
        assert [await anext(values), await anext(values)] == [0, 1]
        with pytest.raises(errors.CancelledError, match="cancelled"):
            await anext(values)
        closed = runtime.streams.open(2)
        runtime.streams.close()
        with pytest.raises(errors.ShutdownError):
            await aproduce(_ticks(50), closed)  # type: ignore[arg-type]

    asyncio.run(main())


def test_closing_cancels_what_an_async_generator_awaits(runtime: Runtime) -> None:
    async def endless() -> AsyncIterator[int]:
        yield 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            _log.add("cancelled")
            raise
        finally:
            _log.add("finally")

    async def main() -> None:
        for how in ("close", "cancel"):
            producer = runtime.streams.open(4)
            task = asyncio.create_task(aproduce(endless(), producer))  # type: ignore[arg-type]
            await _until(lambda: len(producer._items) == 1)  # noqa: B023
            if how == "close":
                await asyncio.to_thread(producer.close)
                await task
            else:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                producer.close()
            assert _log.take() == ["cancelled", "finally"]

    asyncio.run(main())
    assert len(runtime.streams) == 0


def test_streams_are_closed_with_their_calls(runtime: Runtime) -> None:
    peer = runtime.agent.self_peer
    late, soon, over = (runtime.streams.open(2, peer) for _ in range(3))
    late.serves(1 << 40)
    assert peer.running[1 << 40] is late
    peer.on_cancel(1 << 40, STOP, runtime.agent.submit)
    while not late.closed:
        threading.Event().wait(0.001)
    peer.on_cancel(2 << 40, STOP, runtime.agent.submit)
    soon.serves(2 << 40)
    assert soon.closed
    over.close()
    over.serves(3 << 40)
    _until_empty(runtime)
    assert not [call for call in peer.running if call >= 1 << 40]


def test_owners_abort_their_streams(runtime: Runtime) -> None:
    owner = object()
    producers = [runtime.streams.open(2, owner=each) for each in (owner, owner, None)]
    for producer in producers:
        producer.put(1)
    waits = pull(producers[1].stream, 0)
    assert waits == ([1], None)
    later = pull(producers[1].stream, 1)
    runtime.streams.abort(owner, LookupError("the owner ended"))
    assert [producer.closed for producer in producers] == [True, True, False]
    items, end = pull(producers[0].stream, 0)
    assert items == [1]
    assert b"the owner ended" in end
    assert later.future.wait()[0] == []
    produce(logged(3), producers[0])
    assert _log.take() == []
    producers[2].close()
    assert len(runtime.streams) == 0


# -- between workers -----------------------------------------------------------------------------------------


def _streaming(rank: int, world_size: int) -> Any:
    with bare():
        if rank:
            _over.wait()
            assert ended() == [None, None, None]
            return _log.take().count("finally")
        values = list(here(count, 8, 1000, to=1).values())
        stream = here(logged, 3, 1000, to=1)
        some = [next(stream.values()) for _ in range(5)]
        stream.close()
        tensors = list(here(_tensors, 4, 6, to=1).values())
        rpc.rpc_sync(1, _set_over)
        return values == list(range(1000)), some, [float(each.sum()) for each in tensors]


_over = threading.Event()


def _set_over() -> None:
    _over.set()


def _tensors(n: int) -> Iterator[torch.Tensor]:
    for number in range(n):
        yield torch.full((100_000,), float(number))


@pytest.mark.limit(60)
def test_streams_between_workers() -> None:
    (right, some, sums), finals = rpc_group(_streaming, 2)
    assert right
    assert some == [0, 1, 2, 3, 4]
    assert sums == [n * 100_000.0 for n in range(6)]
    assert finals == 1


def _die() -> None:
    os._exit(0)


def _deaths(rank: int, world_size: int) -> Any:
    """Worker 1 produces for 0 and 2; 2 dies, then 1."""
    with bare() as runtime:
        if rank == 1:
            # The stream of the one that dies ends with it; the other one ends when this worker does.
            _log.wait_for("finally")
            _over.set()
            threading.Event().wait()
        if rank == 2:
            stream = here(logged, 2, 1000, to=1)
            next(stream)
            rpc.rpc_sync(0, _set_over)
            threading.Event().wait()
        _over.wait()
        stream = here(count, 2, 1000, to=1)
        got = [next(stream.values()) for _ in range(3)]
        with pytest.raises(errors.PeerDiedError):
            rpc.rpc_sync(2, _die)
        rpc.rpc_sync(1, _over_there)
        with pytest.raises(errors.PeerDiedError):
            rpc.rpc_sync(1, _die)
        *_, last = stream
        with pytest.raises(errors.PeerDiedError):
            get(last)
        assert len(runtime.streams) == 0
        return got


def _over_there() -> None:
    _over.wait()


@pytest.mark.limit(60)
def test_both_ends_may_die() -> None:
    assert rpc_group(_deaths, 3, may_die=[1, 2])[0] == [0, 1, 2]


def test_closing_and_taking_race(runtime: Runtime) -> None:
    for round_number in range(30):
        stream = here(count, 3, 100)
        found: list[int] = []

        def take(stream: Any = stream, found: list[int] = found) -> None:
            found.extend(stream.values())

        taker = threading.Thread(target=take)
        taker.start()
        for _ in range(round_number % 7):
            stream.is_finished()
        stream.close()
        taker.join()
        assert found == list(range(len(found)))
        assert ended() == [None]
        _until_empty(runtime)


def test_a_producer_of_a_dead_consumer_is_closed_from_the_start(runtime: Runtime) -> None:
    peer = runtime.agent.self_peer
    before, peer.state = peer.state, "dead"
    try:
        producer = runtime.streams.open(4, peer)
    finally:
        peer.state = before
    assert producer.closed
    produce(logged(3), producer)
    assert _log.take() == []


_gates: list[threading.Event] = []
_values: weakref.WeakSet[Value] = weakref.WeakSet()


class Value:
    """Something that an item of a stream refers to."""

    def __init__(self) -> None:
        _values.add(self)


class HeldUp:
    """An argument that is opened when the test says so."""

    def __reduce__(self) -> Any:
        return _open_later, ()


def _open_later() -> None:
    opening, may_open = _gates
    opening.set()
    assert may_open.wait(20)


class Giver:
    async def give(self, held_up: None) -> AsyncIterator[rpc.RRef[Value]]:
        yield rpc.RRef(Value())
        _log.add("gave")
        await asyncio.sleep(60)

    async def count(self) -> int:
        return len(_values)


@pytest.mark.limit(60)
@pytest.mark.parametrize(
    "cancellation", ["behind the first item", "before the ticket", "until its coroutine has ended"]
)
def test_a_call_that_is_cancelled_as_it_becomes_a_stream_leaves_no_items(
    cancellation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker finds the call, not yet the stream, when it is told of the cancellation."""
    opening, may_open = _gates[:] = threading.Event(), threading.Event()
    cancel = Envelope.cancel

    cancel_in_mailbox = HostedActor.cancel

    def cancel_later(entry: Envelope, *given: bool) -> None:
        if cancellation != "before the ticket":
            may_open.set()
            _log.wait_for("gave")
        cancel(entry, *given)
        may_open.set()

    def cancel_and_wait(hosted: HostedActor, entry: Envelope, *given: bool) -> None:
        cancel_in_mailbox(hosted, entry, *given)
        while entry.task is not None:
            threading.Event().wait(0.001)

    with InProcessCluster(2, clock="real"):
        giver: Any = actorrpc.remote(Giver).options(worker="worker1").remote()
        assert actorrpc.get(giver.count.remote(), timeout=20) == 0
        monkeypatch.setattr(Envelope, "cancel", cancel_later)
        if cancellation == "until its coroutine has ended":
            monkeypatch.setattr(HostedActor, "cancel", cancel_and_wait)
        stream = giver.give.remote(HeldUp())
        assert opening.wait(20)
        stream.close()
        assert may_open.wait(20)
        while actorrpc.get(giver.count.remote(), timeout=20):
            threading.Event().wait(0.005)
        del giver, stream
