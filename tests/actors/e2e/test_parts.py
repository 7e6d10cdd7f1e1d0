"""Parts of a large tensor, in every way that a value travels: the receiver finds no byte that was not sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import actorrpc

pytestmark = pytest.mark.usefixtures("place")

SECRET, USED = 0xAA, 0x11
Parts = dict[str, torch.Tensor]


def large() -> tuple[torch.Tensor, Parts]:
    """Return a large tensor, and some rows and columns of it."""
    base = torch.full((256, 1 << 14), SECRET, dtype=torch.uint8)
    rows = {f"row {n}": base[n] for n in range(0, 256, 8)}
    columns = {"left": base[:, 100:130], "overlapping": base[:, 120:150], "right": base[:, 5000:5010]}
    for part in (*rows.values(), *columns.values()):
        part.fill_(USED)
    return base, rows | columns


def unsent(parts: Parts) -> list[str]:
    """Return the names of parts in whose memory more was found than what was sent."""
    found = []
    for name, t in parts.items():
        memory = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
        if bool(memory.eq(SECRET).any()):
            found.append(name)
    return found


@actorrpc.remote
class Worker:
    """Receives parts, and sends parts of its own."""

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


@pytest.mark.parametrize("way", [_arguments, _results, _stream, _put])
def test_the_receiver_of_parts_finds_nothing_else(way: Callable[[Any], None]) -> None:
    way(Worker.remote())


def test_the_senders_tensor_stays_as_it_is() -> None:
    base, _ = large()
    before = base.clone()
    near = {"a": base[0, :3000], "b": base[0, 4000:9000], "c": base[:, 100:130]}
    assert actorrpc.get(Worker.remote().look.remote(near)) == []
    assert torch.equal(base, before)
