"""Results of real actors: where they stay, how they are handed over, and what streams."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc.agent.context import current_worker
from actorrpc.futures import collect_all
from tests.actors.e2e.kit import open_gate, pass_gate, until

pytestmark = pytest.mark.usefixtures("place")

_LARGE = 1 << 18


class Thing:
    """An object with much in it."""

    def __init__(self, nbytes: int) -> None:
        self.content = bytearray(nbytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and self.content == other.content

    __hash__ = None  # type: ignore[assignment]


_KINDS: dict[str, Callable[[int], Any]] = {
    "tensor": lambda nbytes: torch.ones(nbytes // 4),
    "list": lambda nbytes: list(range(nbytes // 4)),
    "dict": lambda nbytes: dict.fromkeys(range(nbytes // 8), True),
    "bytes": bytes,
    "object": Thing,
}
_KIB = 1 << 10
_SIZES = {
    "small": [100] * 8,
    "small, but large together": [50 * _KIB] * 8,
    "large": [600 * _KIB] * 2,
    "mixed": [100, 50 * _KIB, 100 * _KIB, 600 * _KIB],
}


@actorrpc.remote
def _parts(kind: str, sizes: list[int]) -> list[Any]:
    return [_KINDS[kind](size) for size in sizes]


@actorrpc.remote
class Source:
    """Makes values and streams, and remembers what became of them."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.buffer = torch.zeros(_LARGE)

    def count(self, n: int) -> Iterator[int]:
        try:
            for number in range(n):
                self.log.append(number)
                yield number
        finally:
            self.log.append("finally")

    async def ticks(self, n: int) -> AsyncIterator[int]:
        for number in range(n):
            await asyncio.sleep(0)
            yield number

    def failing(self) -> Iterator[int]:
        yield 1
        raise LookupError("in mid-stream")

    def pids(self, n: int) -> Iterator[int]:
        for _ in range(n):
            yield os.getpid()

    def leaving(self) -> Iterator[int]:
        yield 1
        actorrpc.exit_actor()

    def asking(self, asked: Any, n: int) -> Iterator[Any]:
        for number in range(n):
            yield actorrpc.get(asked.double.remote(number))

    def gated(self, path: str) -> Iterator[str]:
        yield "first"
        yield pass_gate(path)

    def next_state(self) -> torch.Tensor:
        self.buffer += 1
        return self.buffer

    def logged(self) -> list[Any]:
        return self.log

    def make_later(self, path: str) -> list[int]:
        pass_gate(path)
        return [1, 2]

    def parts(self, kind: str, sizes: list[int]) -> list[Any]:
        return [_KINDS[kind](size) for size in sizes]

    def items(self, kind: str, sizes: list[int]) -> Iterator[Any]:
        yield from self.parts(kind, sizes)

    def twice(self) -> tuple[list[int], list[int]]:
        same = [1, 2]
        return same, same


@actorrpc.remote
class Sink:
    """Takes what others have made."""

    def total(self, tensor: Any, other: Any = None) -> float:
        assert isinstance(tensor, torch.Tensor)
        return float(tensor.sum()) + (0 if other is None else float(other.sum()))

    def total_inside(self, refs: list[Any]) -> float:
        return sum(float(actorrpc.get(ref).sum()) for ref in refs)

    def pass_on(self, refs: list[Any]) -> list[Any]:
        return refs

    def take(self, source: Any, n: int) -> list[int]:
        return list(source.count.remote(n).values())

    def double(self, number: int) -> int:
        return 2 * number

    def take_asking(self, source: Any, me: Any, n: int) -> list[int]:
        return list(source.asking.remote(me, n).values())

    def slow(self, path: str, number: int) -> int:
        pass_gate(path)
        return number

    def read_later(self, path: str, refs: list[Any]) -> Any:
        pass_gate(path)
        return actorrpc.get(refs[0])

    def yield_later(self, path: str, refs: list[Any]) -> Iterator[Any]:
        pass_gate(path)
        yield from refs


# -- values ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_large_results_are_handed_over_as_they_were() -> None:
    source, sink = Source.remote(), Sink.remote()
    first, second = source.next_state.remote(), source.next_state.remote()
    assert actorrpc.get(sink.total.remote(first, other=second)) == 3 * _LARGE
    assert repr(first).endswith(", complete)")  # it is here: a descriptor
    assert actorrpc.get(sink.total_inside.remote([first, second])) == 3 * _LARGE
    assert float(actorrpc.get(first).sum()) == _LARGE
    (back,) = actorrpc.get(sink.pass_on.remote([first]))
    assert back == first
    assert float(actorrpc.get(back).sum()) == _LARGE


def test_what_one_taker_changes_others_do_not_see() -> None:
    source, sink = Source.remote(), Sink.remote()
    ref = source.next_state.remote()
    actorrpc.get(ref).zero_()
    assert actorrpc.get(sink.total.remote(ref)) == _LARGE


def test_pending_results_are_promised(gate: Path) -> None:
    slow, sink = Sink.remote(), Sink.remote()
    pending = slow.slow.remote(str(gate), 21)
    result = sink.double.remote(pending)
    assert actorrpc.wait([result], timeout=0) == ([], [result])
    open_gate(gate)
    assert actorrpc.get(result) == 42


def test_what_the_caller_changes_those_who_got_the_pending_result_do_not_see(
    gates: Callable[[], Path],
) -> None:
    source, sink, streaming, near = Source.remote(), Sink.remote(), Sink.remote(), Sink.remote()
    made, read, yielded = gates(), gates(), gates()
    ref = source.make_later.remote(str(made))
    late = sink.read_later.remote(str(read), [ref])
    items = streaming.yield_later.remote(str(yielded), [ref])
    (came_home,) = actorrpc.get(near.pass_on.remote([ref]))
    open_gate(made)
    actorrpc.wait([came_home])  # the value is there for all that have the reference
    actorrpc.get(ref).append(9)
    open_gate(read)
    open_gate(yielded)
    (item,) = items.values()
    for each in (late, item, came_home, ref):
        assert actorrpc.get(each) == [1, 2]


@pytest.mark.parametrize("how", ["actor", "task", "stream"])
def test_parts_of_a_result_may_have_any_size(how: str) -> None:
    source = Source.remote()
    method: Any = {"actor": source.parts, "task": _parts, "stream": source.items}[how]
    for kind, make in _KINDS.items():
        for sizes in _SIZES.values():
            refs = method.options(num_returns=len(sizes)).remote(kind, sizes)
            for ref, size in zip(refs, sizes, strict=True):
                found, wanted = actorrpc.get(ref), make(size)
                assert torch.equal(found, wanted) if kind == "tensor" else found == wanted


def test_parts_of_a_result_share_no_object() -> None:
    first, second = Source.remote().twice.options(num_returns=2).remote()
    actorrpc.get(first).append(3)
    assert actorrpc.get(second) == [1, 2]


def test_arguments_that_failed_fail_the_call() -> None:
    source, sink = Source.remote(), Sink.remote()
    bad = next(iter(source.failing.options(num_returns="streaming").remote()))
    assert actorrpc.get(bad) == 1
    failing = sink.total.remote("no tensor")
    with pytest.raises(AssertionError):
        actorrpc.get(sink.double.remote(failing))
    with pytest.raises(AssertionError):
        actorrpc.get(failing)


def test_put_values_go_to_actors() -> None:
    sink = Sink.remote()
    tensor = torch.ones(_LARGE)
    ref = actorrpc.put(tensor)
    tensor.zero_()
    assert actorrpc.get(sink.total.remote(ref)) == _LARGE
    assert actorrpc.get([sink.total_inside.remote([ref]), sink.double.remote(actorrpc.put(4))]) == [_LARGE, 8]


def test_values_outlive_handles() -> None:
    ref = Source.remote().next_state.remote()
    gc.collect()
    assert float(actorrpc.get(ref).sum()) == _LARGE


# -- streams -----------------------------------------------------------------------------------------------


def test_generators_stream() -> None:
    source = Source.remote()
    assert list(source.count.remote(100).values()) == list(range(100))
    assert actorrpc.get(list(source.count.remote(5))) == [0, 1, 2, 3, 4]
    assert list(source.ticks.remote(40).values()) == list(range(40))


def test_they_stream_into_asyncio() -> None:
    source = Source.remote()

    async def main() -> list[int]:
        return [value async for value in source.ticks.remote(40).values()]

    assert asyncio.run(main()) == list(range(40))


def test_they_stream_into_actors() -> None:
    assert actorrpc.get(Sink.remote().take.remote(Source.remote(), 50)) == list(range(50))


@pytest.mark.prints(r"waits \(get\(\) and the like\) on the actor's event loop")
def test_generators_may_call_whoever_consumes_them() -> None:
    sink = Sink.remote()
    assert actorrpc.get(sink.take_asking.remote(Source.remote(), sink, 20)) == [2 * n for n in range(20)]


@actorrpc.remote
class Counter:
    """Has no async method, so that two of its methods may run at a time."""

    def __init__(self) -> None:
        self.log: list[int] = []

    def count(self, n: int) -> Iterator[int]:
        for number in range(n):
            self.log.append(number)
            yield number

    def logged(self) -> list[int]:
        return self.log


def test_producers_do_not_run_away() -> None:
    source = Counter.options(max_concurrency=2).remote()
    stream = source.count.options(max_buffered_items=3).remote(100)
    values = stream.values()
    assert [next(values), next(values)] == [0, 1]
    until(lambda: len(actorrpc.get(source.logged.remote())) >= 5)
    assert actorrpc.get(source.logged.remote()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("how", ["close", "drop", "cancel"])
def test_streams_end_early(how: str) -> None:
    source = Source.remote()
    stream = source.count.options(max_buffered_items=2).remote(100)
    assert actorrpc.get(next(stream)) == 0
    if how == "close":
        stream.close()
    elif how == "cancel":
        actorrpc.cancel(stream)
    del stream
    gc.collect()
    until(lambda: actorrpc.get(source.logged.remote())[-1] == "finally")  # on its loop, beside other calls


def test_dropped_before_they_begin(gate: Path) -> None:
    source = Source.remote()
    blocking = source.gated.remote(str(gate))
    stream = source.count.remote(100)
    del stream
    gc.collect()
    open_gate(gate)
    assert list(blocking.values()) == ["first", "go"]
    assert actorrpc.get(source.logged.remote())[-1:] in ([], ["finally"])


def test_errors_in_mid_stream() -> None:
    values = Source.remote().failing.remote().values()
    assert next(values) == 1
    with pytest.raises(LookupError, match="in mid-stream") as caught:
        next(values)
    assert isinstance(caught.value, actorrpc.RemoteError)
    with pytest.raises(StopIteration):
        next(values)


def test_an_actor_that_leaves_in_mid_stream() -> None:
    first, second = Source.remote().leaving.remote()
    assert actorrpc.get(first) == 1
    with pytest.raises(actorrpc.ActorDiedError, match="exit_actor"):
        actorrpc.get(second)


def test_an_actor_that_is_killed_in_mid_stream() -> None:
    source = Source.remote()
    stream = source.count.options(max_buffered_items=2).remote(100)
    assert actorrpc.get(next(stream)) == 0
    actorrpc.kill(source)
    *_, last = stream
    with pytest.raises(actorrpc.ActorDiedError, match="killed"):
        actorrpc.get(last)


def test_a_process_that_dies_in_mid_stream(place: str) -> None:
    if place != "embedded":
        pytest.skip("it would take a worker of the group along")
    source = Source.remote()
    values = source.pids.options(max_buffered_items=2).remote(100).values()
    os.kill(next(values), signal.SIGKILL)
    with pytest.raises(actorrpc.ActorDiedError, match="SIGKILL"):
        list(values)


def test_a_stream_is_not_taken_up_again_after_a_restart(place: str) -> None:
    if place != "embedded":
        pytest.skip("it would take a worker of the group along")
    source = Source.options(max_restarts=1).remote()
    values = source.pids.options(max_buffered_items=2).remote(100).values()
    os.kill(next(values), signal.SIGKILL)
    with pytest.raises(actorrpc.ActorUnavailableError):
        list(values)
    assert len(list(source.pids.remote(3))) == 3


def test_a_stream_keeps_its_actor() -> None:
    stream = Source.remote().count.remote(50)
    gc.collect()
    assert list(stream.values()) == list(range(50))


def test_replies_of_several_workers_are_read_as_soon_as_somebody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock listens after a while to what nobody reads: without it, nothing may be missing but the time."""
    sources = [Source.remote() for _ in range(3)]
    actorrpc.get([actorrpc.ready(each) for each in sources])
    here = current_worker()
    assert here is not None
    monkeypatch.setattr(
        here.agent.scheduler, "expected", SimpleNamespace(active=True)
    )  # and never does anything

    def asked() -> list[actorrpc.ObjectRef[list[Any]]]:
        return [each.logged.remote() for each in sources]

    async def gathered() -> list[list[Any]]:
        return await asyncio.gather(*asked())

    answers: list[list[Any]] = [[], [], []]
    assert actorrpc.get(asked()) == answers
    assert len(actorrpc.wait(asked(), num_returns=3)[0]) == 3
    assert actorrpc.get(list(actorrpc.as_completed(asked()))) == answers
    assert asyncio.run(gathered()) == answers
    assert not concurrent.futures.wait([each.future() for each in asked()]).not_done
    assert [each.value() for each in collect_all([each.future() for each in asked()]).wait()] == answers
