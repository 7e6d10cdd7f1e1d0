"""Results of actors: where they are kept, how they are passed on, streams, and parts of large tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
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
    """Makes values and streams."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(_LARGE)

    def next_state(self) -> torch.Tensor:
        self.buffer += 1
        return self.buffer

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


_SECRET, _USED = 0xAA, 0x11
Parts = dict[str, torch.Tensor]


def _make_parts() -> tuple[Parts, Parts]:
    """Return some rows and some columns of a large tensor, whose other elements are secret."""
    base = torch.full((256, 1 << 14), _SECRET, dtype=torch.uint8)
    rows = {f"row {n}": base[n] for n in range(0, 256, 8)}
    columns = {"left": base[:, 100:130], "overlapping": base[:, 120:150], "right": base[:, 5000:5010]}
    for part in (*rows.values(), *columns.values()):
        part.fill_(_USED)
    return rows, columns


def _unsent(parts: Parts) -> list[str]:
    """Return the names of parts whose memory contains bytes that were not sent."""
    memories = {
        name: torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()) for name, t in parts.items()
    }
    return [name for name, memory in memories.items() if bool(memory.eq(_SECRET).any())]


@actorrpc.remote
class Viewer:
    """Receives and sends parts of tensors."""

    def look(self, parts: Parts) -> list[str]:
        return _unsent(parts)

    def give(self, which: int) -> Parts:
        return _make_parts()[which]

    def stream(self, which: int) -> Iterator[Parts]:
        yield _make_parts()[which]


@pytest.mark.parametrize("which", [0, 1], ids=["rows", "columns"])
def test_the_receiver_of_a_view_gets_no_other_bytes_of_its_tensor(which: int) -> None:
    viewer, parts = Viewer.remote(), _make_parts()
    put = actorrpc.put(parts[which])
    for sent in (parts[which], parts[0] | parts[1], put):
        assert actorrpc.get(viewer.look.remote(sent)) == []
    results = actorrpc.get([viewer.give.remote(which), put, next(viewer.stream.remote(which))])
    for found in results:
        assert _unsent(found) == []
        assert all(bool(part.eq(_USED).all()) for part in found.values())
        if which:  # overlapping views share memory
            found["left"][:, 20:] = 7
            assert bool(found["overlapping"][:, :10].eq(7).all())
    assert all(bool(part.eq(_USED).all()) for part in parts[which].values())
