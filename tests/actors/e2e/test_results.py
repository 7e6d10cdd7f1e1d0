"""Results of actors: where they are kept, how they are passed on, streams, and parts of large tensors."""

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
from tests.actors.e2e.kit import open_gate, pass_gate

pytestmark = pytest.mark.usefixtures("place")


_LARGE = 1 << 18


class Thing:
    """An object of a given size."""

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
    """Makes values and streams and logs the progress of its generators."""

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

    def pids(self, n: int) -> Iterator[int]:
        for _ in range(n):
            yield os.getpid()

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
    """Uses results of other actors."""

    def total(self, tensor: Any, other: Any = None) -> float:
        assert isinstance(tensor, torch.Tensor)
        return float(tensor.sum()) + (0 if other is None else float(other.sum()))

    def total_inside(self, refs: list[Any]) -> float:
        return sum(float(actorrpc.get(ref).sum()) for ref in refs)

    def pass_on(self, refs: list[Any]) -> list[Any]:
        return refs

    def read_later(self, path: str, refs: list[Any]) -> Any:
        pass_gate(path)
        return actorrpc.get(refs[0])

    def yield_later(self, path: str, refs: list[Any]) -> Iterator[Any]:
        pass_gate(path)
        yield from refs


# -- values ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_large_results_keep_the_value_at_their_return() -> None:
    source, sink = Source.remote(), Sink.remote()
    first, second = source.next_state.remote(), source.next_state.remote()
    assert actorrpc.get(sink.total.remote(first, other=second)) == 3 * _LARGE
    assert repr(first).endswith(", complete)")  # only a descriptor is here
    assert actorrpc.get(sink.total_inside.remote([first, second])) == 3 * _LARGE
    assert float(actorrpc.get(first).sum()) == _LARGE
    (back,) = actorrpc.get(sink.pass_on.remote([first]))
    assert back == first
    assert float(actorrpc.get(back).sum()) == _LARGE


def test_changes_of_a_result_are_not_seen_by_other_holders_of_its_reference(
    gates: Callable[[], Path],
) -> None:
    source, sink, streaming, near = Source.remote(), Sink.remote(), Sink.remote(), Sink.remote()
    made, read, yielded = gates(), gates(), gates()
    ref = source.make_later.remote(str(made))
    late = sink.read_later.remote(str(read), [ref])
    items = streaming.yield_later.remote(str(yielded), [ref])
    (came_home,) = actorrpc.get(near.pass_on.remote([ref]))
    open_gate(made)
    actorrpc.wait([came_home])  # the value is ready for all holders
    actorrpc.get(ref).append(9)
    open_gate(read)
    open_gate(yielded)
    (item,) = items.values()
    for each in (late, item, came_home, ref):
        assert actorrpc.get(each) == [1, 2]


@pytest.mark.parametrize("how", ["actor", "task", "stream"])
def test_results_of_num_returns_can_have_any_size_and_type(how: str) -> None:
    source = Source.remote()
    method: Any = {"actor": source.parts, "task": _parts, "stream": source.items}[how]
    for kind, make in _KINDS.items():
        for sizes in _SIZES.values():
            refs = method.options(num_returns=len(sizes)).remote(kind, sizes)
            for ref, size in zip(refs, sizes, strict=True):
                found, wanted = actorrpc.get(ref), make(size)
                assert torch.equal(found, wanted) if kind == "tensor" else found == wanted


def test_results_of_num_returns_share_no_object() -> None:
    first, second = Source.remote().twice.options(num_returns=2).remote()
    actorrpc.get(first).append(3)
    assert actorrpc.get(second) == [1, 2]


# -- streams -----------------------------------------------------------------------------------------------


def test_generator_methods_stream_their_items() -> None:
    source = Source.remote()
    assert list(source.count.remote(100).values()) == list(range(100))
    assert actorrpc.get(list(source.count.remote(5))) == [0, 1, 2, 3, 4]
    assert list(source.ticks.remote(40).values()) == list(range(40))


def test_a_stream_that_is_dropped_before_it_starts_does_not_run(gate: Path) -> None:
    source = Source.remote()
    blocking = source.gated.remote(str(gate))
    stream = source.count.remote(100)
    del stream
    gc.collect()
    open_gate(gate)
    assert list(blocking.values()) == ["first", "go"]
    assert actorrpc.get(source.logged.remote())[-1:] in ([], ["finally"])


def test_a_stream_ends_with_the_process_of_its_actor(place: str) -> None:
    if place != "embedded":
        pytest.skip("it would end a worker of the group")
    source = Source.options(max_restarts=1).remote()
    values = source.pids.options(max_buffered_items=2).remote(100).values()
    os.kill(next(values), signal.SIGKILL)
    with pytest.raises(actorrpc.ActorUnavailableError):
        list(values)
    assert len(list(source.pids.remote(3))) == 3


def test_replies_of_several_workers_are_read_by_the_waiting_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every kind of wait reads the replies itself. The clock, which reads unattended connections after a delay, is disabled."""
    sources = [Source.remote() for _ in range(3)]
    actorrpc.get([actorrpc.ready(each) for each in sources])
    here = current_worker()
    assert here is not None
    monkeypatch.setattr(
        here.agent.scheduler, "expected", SimpleNamespace(active=True)
    )  # a clock that never reads

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


# -- parts of a large tensor: the receiver gets no byte that was not sent ------------------------------------

SECRET, USED = 0xAA, 0x11
Parts = dict[str, torch.Tensor]


def large() -> tuple[torch.Tensor, Parts]:
    """Return a large tensor and some of its rows and columns."""
    base = torch.full((256, 1 << 14), SECRET, dtype=torch.uint8)
    rows = {f"row {n}": base[n] for n in range(0, 256, 8)}
    columns = {"left": base[:, 100:130], "overlapping": base[:, 120:150], "right": base[:, 5000:5010]}
    for part in (*rows.values(), *columns.values()):
        part.fill_(USED)
    return base, rows | columns


def unsent(parts: Parts) -> list[str]:
    """Return the names of parts whose memory contains bytes that were not sent."""
    found = []
    for name, t in parts.items():
        memory = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
        if bool(memory.eq(SECRET).any()):
            found.append(name)
    return found


@actorrpc.remote
class Worker:
    """Receives and sends parts of tensors."""

    def look(self, parts: Parts) -> list[str]:
        return unsent(parts)

    def rows(self) -> Parts:
        return {name: t for name, t in large()[1].items() if name.startswith("row")}

    def columns(self) -> Parts:
        return {name: t for name, t in large()[1].items() if not name.startswith("row")}

    def stream(self) -> Iterator[Parts]:
        yield self.rows()
        yield self.columns()


def _arguments(worker: Any) -> None:
    _, parts = large()
    for sent in (parts, {"row": parts["row 8"], "other": parts["row 24"]}):
        assert actorrpc.get(worker.look.remote(sent)) == []
    columns = {name: parts[name] for name in ("left", "overlapping", "right")}
    assert actorrpc.get(worker.look.remote(columns)) == []


def _results(worker: Any) -> None:
    for ref in (worker.rows.remote(), worker.columns.remote()):
        check(actorrpc.get(ref))


def _stream(worker: Any) -> None:
    for ref in worker.stream.remote():
        check(actorrpc.get(ref))


def _put(worker: Any) -> None:
    _, parts = large()
    rows = actorrpc.put({name: t for name, t in parts.items() if name.startswith("row")})
    columns = actorrpc.put({name: t for name, t in parts.items() if not name.startswith("row")})
    for ref in (rows, columns):
        assert actorrpc.get(worker.look.remote(ref)) == []
        check(actorrpc.get(ref))


def check(parts: Parts) -> None:
    assert unsent(parts) == []
    assert all(bool(t.eq(USED).all()) for t in parts.values())
    if "left" in parts:
        parts["left"][:, 20:] = 7
        assert bool(parts["overlapping"][:, :10].eq(7).all())


def test_the_receiver_of_a_view_gets_no_other_bytes_of_its_tensor() -> None:
    worker = Worker.remote()
    for way in (_arguments, _results, _stream, _put):
        way(worker)


def test_sending_views_does_not_change_the_tensor() -> None:
    base, _ = large()
    before = base.clone()
    near = {"a": base[0, :3000], "b": base[0, 4000:9000], "c": base[:, 100:130]}
    assert actorrpc.get(Worker.remote().look.remote(near)) == []
    assert torch.equal(base, before)
