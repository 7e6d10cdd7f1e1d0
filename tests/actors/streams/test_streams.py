"""Streams: order of items, back-pressure, errors, and early ends by either side."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
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
from actorrpc.actors.context import Runtime
from actorrpc.actors.host.actor import HostedActor
from actorrpc.actors.host.mailbox import Envelope
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.wait import as_completed, get, wait
from actorrpc.actors.streams import consumer as consumer_module
from actorrpc.actors.streams import producer as producer_module
from actorrpc.actors.streams.consumer import ObjectRefGenerator
from actorrpc.actors.streams.producer import aproduce, pull
from actorrpc.actors.streams.spread import spread
from actorrpc.futures import Future, Progress
from actorrpc.serialization import codec
from actorrpc.testing import InProcessCluster
from tests.actors.bare import alone, bare, join_generators, open_stream, start_generator
from tests.migration.rows import row
from tests.ranks import rpc_group

_TINY = 0.05  # a timeout that is expected to expire


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """A group of one worker."""
    with alone() as made:
        yield made


class _Log:
    """A log of generators on which tests can wait."""

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
    """Wait until this worker has no open stream; a close message may still be in flight."""
    while len(runtime.streams):
        threading.Event().wait(0.001)


def count(n: int) -> Generator[int, None, None]:
    yield from range(n)


def logged(n: int) -> Generator[int, None, None]:
    """Log the items that are produced, and the end."""
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


# -- reading -------------------------------------------------------------------------------------------------


@pytest.mark.limit(120)
def test_a_stream_gives_the_items_and_the_error_of_its_generator(runtime: Runtime) -> None:
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
    with open_stream(_next_made, limit) as stream:
        values = stream.values()
        while wants is None or taken < wants:
            # Counted before the request: the producer may receive the request before this thread continues.
            taken += 1
            try:
                found.append(next(values))
            except StopIteration:
                break
            except LookupError as caught:
                error = caught
    assert join_generators() == [None]
    assert found == items[:wants]
    assert (error is not None) == (fails and (wants is None or wants > len(items)))
    assert most <= limit


_made: list[Callable[[], Any]] = []


def _next_made() -> Any:
    return _made.pop()()


def test_a_streaming_call_that_returns_no_generator_raises_type_error(runtime: Runtime) -> None:
    future: Future[Any] = Future()
    future.set_result(5)
    stream: ObjectRefGenerator[Any] = ObjectRefGenerator(future, label="f")
    with pytest.raises(TypeError, match="f did not return a generator but a int"):
        next(stream.values())
    with pytest.raises(StopIteration):
        next(stream)


# -- get, wait and as_completed --------------------------------------------------------------------------------


@row("get(generator), and generators in as_completed", "from-ray")
def test_get_returns_all_remaining_items_of_a_stream(runtime: Runtime) -> None:
    stream = open_stream(count, 2, 20)
    assert get(next(stream)) == 0
    ref: ObjectRef[Any] = ObjectRef.of("x")
    assert get([ref, stream, [open_stream(count, 0, 0), ref]]) == ["x", list(range(1, 20)), [[], "x"]]
    assert get(stream) == []
    assert stream.is_finished()
    assert join_generators() == [None, None]
    stream = open_stream(count, 0, 3)
    stream.close()
    with pytest.raises(errors.CancelledError, match="was closed before its end"):
        get(stream)
    join_generators()


def sized(n: int, size: int) -> Generator[torch.Tensor, None, None]:
    for number in range(n):
        _log.add(number)
        yield torch.full((size // 4,), float(number))


def test_get_of_a_stream_is_not_limited_by_back_pressure(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (consumer_module, producer_module):
        monkeypatch.setattr(module, "WINDOW_BYTES", 1 << 16)
    stream = open_stream(sized, 2, 40, 1 << 14)
    _log.wait_for(1)
    assert [each[0].item() for each in get(stream)] == list(range(40))
    assert join_generators() == [None]


_release = threading.Event()


def held(first: int, n: int = 0) -> Generator[int, None, None]:
    """Yield the first numbers, and the others after the test has set ``_release``."""
    yield from range(first)
    assert _release.wait(20)
    yield from range(first, n)


def test_items_can_be_read_after_get_timed_out_or_failed(runtime: Runtime) -> None:
    _release.clear()
    stream = open_stream(held, 0, 3)
    for _ in range(2):
        with pytest.raises(errors.RpcTimeoutError, match="the end of held was not complete within"):
            get([stream, ObjectRef.of(1)], timeout=_TINY)
    assert get(next(stream)) == 0
    _release.set()
    assert get(stream) == [1, 2]
    broken = open_stream(failing, 0, 2)
    with pytest.raises(LookupError, match="after 2"):
        get(broken)
    assert get([next(broken), next(broken)]) == [0, 1]
    with pytest.raises(LookupError, match="after 2"):
        get(next(broken))
    join_generators()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@row("get(generator), and generators in as_completed", "from-ray")
def test_as_completed_yields_the_items_of_streams(runtime: Runtime, asynchronous: bool) -> None:
    one, other = open_stream(count, 1, 5), open_stream(count, 0, 3)
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
    assert join_generators() == [None, None]


def test_as_completed_skips_an_item_that_another_reader_has_taken(runtime: Runtime) -> None:
    _release.clear()
    stream = open_stream(held, 0, 1, 2)
    completed = as_completed([stream], timeout=_TINY)
    assert wait([stream])[0] == [stream]
    assert get(next(stream)) == 0
    with pytest.raises(errors.RpcTimeoutError):
        next(completed)
    _release.set()
    assert get(list(as_completed([stream]))) == [1]
    join_generators()


def test_next_ready_waits_for_the_next_item(runtime: Runtime) -> None:
    _release.clear()
    stream = open_stream(held, 0, 0, 1)
    assert not stream.next_ready()
    assert not stream.next_ready(timeout=_TINY)
    _release.set()
    assert stream.next_ready(timeout=None)
    assert get(next(stream)) == 0
    assert stream.next_ready(20)  # the end
    assert list(stream) == []
    with pytest.raises(errors.ConfigError):
        stream.next_ready(-1)
    join_generators()


# -- errors --------------------------------------------------------------------------------------------------


def _load(text: str) -> Any:
    raise ValueError(text)


class _Unloadable:
    def __reduce__(self) -> Any:
        return _load, ("cannot be rebuilt",)


def test_an_item_that_cannot_be_unpickled_fails_alone(runtime: Runtime) -> None:
    def bad() -> Iterator[Any]:
        yield 1
        yield _Unloadable()
        yield 3

    _made.append(bad)
    first, second, third = open_stream(_next_made, 4)
    assert get([first, third]) == [1, 3]
    with pytest.raises(errors.SerializationError, match="cannot be rebuilt"):
        get(second)


@pytest.mark.prints(r"a generator raised while it was being closed.*LookupError: while closing$")
def test_an_error_of_a_generator_that_is_closed_is_logged(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    def stubborn() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            raise LookupError("while closing")

    _made.append(stubborn)
    stream = open_stream(_next_made, 1)
    assert get(next(stream)) == 1
    stream.close()
    assert join_generators() == [None]
    assert "raised while it was being closed" in caplog.text


# -- num_returns -----------------------------------------------------------------------------------------------


def test_cancelling_one_of_several_results_cancels_the_others(runtime: Runtime) -> None:
    _release.clear()
    first, second, third = spread(open_stream(held, 0, 1, 3), 3)
    assert get(first) == 0
    assert third.cancel()
    _release.set()
    for each in (second, third):
        with pytest.raises(errors.CancelledError, match="held was cancelled"):
            get(each)
    assert not second.cancel()
    join_generators()
    _until_empty(runtime)


@pytest.mark.prints("failing has yielded 2 values .*, and then raised LookupError")
def test_an_error_of_a_generator_after_its_last_result_is_logged(runtime: Runtime) -> None:
    assert get(spread(open_stream(failing, 0, 2), 2)) == [0, 1]
    join_generators()


# -- early ends ----------------------------------------------------------------------------------------------


def test_a_stream_that_is_closed_before_its_call_is_answered_closes_its_generator(runtime: Runtime) -> None:
    class Source(Progress):
        """A call that ends before it can be cancelled."""

    future: Future[Any] = Future()
    future.source = Source()
    stream: ObjectRefGenerator[Any] = ObjectRefGenerator(future, label="f")
    stream.close()
    future.set_result(start_generator(logged, 2, 100))
    assert join_generators() == [None]
    assert len(runtime.streams) == 0


def test_shutdown_closes_generators_and_fails_their_readers() -> None:
    with alone() as made:
        stream = open_stream(logged, 2, 100)
        assert get(next(stream)) == 0
        made.streams.close()
        (error,) = join_generators()
        assert isinstance(error, errors.ShutdownError)
        assert _log.take()[-2:] == ["closed", "finally"]
        with pytest.raises(errors.RpcError):
            list(stream.values())
        ticket = start_generator(logged, 2, 100)
        assert isinstance(join_generators()[0], errors.ShutdownError)
        with pytest.raises(errors.ShutdownError):
            pull(ticket.stream, 0)


def _same(error: BaseException) -> BaseException:
    return error


def test_a_stream_cannot_be_pickled_or_copied(runtime: Runtime) -> None:
    stream = open_stream(count, 4, 3)
    for send in (codec.dumps, copy.copy, lambda each: rpc.rpc_sync(0, str, (each,))):
        with pytest.raises(errors.SerializationError, match="take the items here"):
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
    raise AssertionError("the condition never became true")


def test_async_generators_deliver_errors_cancellation_and_shutdown(runtime: Runtime) -> None:
    async def bad() -> AsyncIterator[int]:
        yield 1
        raise LookupError("async")

    async def main() -> None:
        producer = runtime.streams.open(2)
        await aproduce(bad(), producer, _same)  # type: ignore[arg-type]
        items, end = pull(producer.stream, 0)
        assert items == [1]
        assert end
        cancelled = runtime.streams.open(2)
        task = asyncio.create_task(aproduce(_ticks(50), cancelled, _same))  # type: ignore[arg-type]
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
            await aproduce(_ticks(50), closed, _same)  # type: ignore[arg-type]

    asyncio.run(main())


def test_closing_a_stream_cancels_the_await_of_its_async_generator(runtime: Runtime) -> None:
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
            task = asyncio.create_task(aproduce(endless(), producer, _same))  # type: ignore[arg-type]
            await _until(lambda: producer.ahead[0] == 1)  # noqa: B023
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


# -- between workers -----------------------------------------------------------------------------------------


_over = threading.Event()


def _set_over() -> None:
    _over.set()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _deaths(rank: int, world_size: int) -> Any:
    """Worker 1 produces for workers 0 and 2. Worker 2 dies, then worker 1."""
    with bare() as runtime:
        if rank == 1:
            # The stream of worker 2 ends with worker 2, the other stream when this worker dies.
            _log.wait_for("finally")
            _over.set()
            threading.Event().wait()
        if rank == 2:
            stream = open_stream(logged, 2, 1000, to=1)
            next(stream)
            rpc.rpc_sync(0, _set_over)
            threading.Event().wait()
        _over.wait()
        stream = open_stream(count, 2, 1000, to=1)
        got = [next(stream.values()) for _ in range(3)]
        with pytest.raises(errors.PeerDiedError):
            rpc.rpc_sync(2, _die)
        rpc.rpc_sync(1, _wait_until_over)
        with pytest.raises(errors.PeerDiedError):
            rpc.rpc_sync(1, _die)
        *_, last = stream
        with pytest.raises(errors.PeerDiedError):
            get(last)
        assert len(runtime.streams) == 0
        return got


def _wait_until_over() -> None:
    _over.wait()


@pytest.mark.limit(60)
def test_a_stream_ends_if_its_reader_or_its_producer_dies() -> None:
    assert rpc_group(_deaths, 3, may_die=[1, 2])[0] == [0, 1, 2]


_gates: list[threading.Event] = []
_values: weakref.WeakSet[Value] = weakref.WeakSet()


class Value:
    """A value to which an item of a stream refers."""

    def __init__(self) -> None:
        _values.add(self)


class HeldUp:
    """An argument whose unpickling waits for the test."""

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
    """When the cancellation arrives, the worker still finds the call but not yet the stream."""
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
