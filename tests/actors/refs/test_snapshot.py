"""Snapshots: what they copy, what they hold, and how they travel."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from actorrpc import rpc
from actorrpc.actors.context import runtime
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.snapshot import LARGE, Snapshot
from actorrpc.errors import ProtocolError, SerializationError
from actorrpc.rpc import rref as rrefs
from actorrpc.serialization import codec
from actorrpc.serialization.local_refs import LocalReferences
from tests.actors.bare import alone
from tests.ranks import rpc_group


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone."""
    with alone():
        yield


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


@pytest.mark.parametrize(
    "obj",
    [
        *(None, 1, 2.5, "text", b"bytes", (1, [2, {"three": 4}])),
        *("x" * 100_000, b"y" * 100_000, bytearray(b"z" * 100_000)),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_plain_objects_come_back_equal(obj: object) -> None:
    assert Snapshot.of(obj).open() == obj
    assert Snapshot.of(obj).open_once() == obj


def test_later_changes_are_not_seen() -> None:
    tensor, array, items = torch.arange(50_000.0), np.arange(50_000), [1]
    small = torch.ones(3)
    snapshot = Snapshot.of((tensor, array, items, small))
    tensor.zero_()
    array[:] = 0
    items.append(2)
    small.zero_()
    opened = snapshot.open()
    assert torch.equal(opened[0], torch.arange(50_000.0))
    assert np.array_equal(opened[1], np.arange(50_000))
    assert opened[2] == [1]
    assert torch.equal(opened[3], torch.ones(3))


@pytest.mark.parametrize("size", [3, 50_000])
def test_openings_share_no_memory(size: int) -> None:
    snapshot = Snapshot.of(torch.ones(size))
    first, second = snapshot.open(), snapshot.open()
    first.zero_()
    assert torch.equal(second, torch.ones(size))
    assert torch.equal(snapshot.open(), torch.ones(size))


def test_tensors_that_shared_memory_share_it_again() -> None:
    base = torch.arange(20_000.0)
    whole, part = Snapshot.of((base, base[100:200])).open()
    whole[100] = -1
    assert part[0] == -1


def test_opening_once_uses_it_up() -> None:
    snapshot = Snapshot.of(torch.ones(50_000))
    assert torch.equal(snapshot.open_once(), torch.ones(50_000))
    for use in (snapshot.open, snapshot.open_once, lambda: pickle.dumps(snapshot, 5)):
        with pytest.raises(RuntimeError, match="by open_once"):
            use()


def test_definitions_are_in_it() -> None:
    class Local:
        def value(self) -> int:
            return 7

    offset = 3
    snapshot = Snapshot.of((Local(), lambda x: x + offset), remote_main=False)
    made, function = snapshot.open()
    assert type(made) is Local
    assert made.value() == 7
    assert function(4) == 7
    assert snapshot.open()[1](5) == 8


def test_its_size_counts_everything() -> None:
    assert Snapshot.of(1).nbytes < 100
    assert 400_000 < Snapshot.of(torch.zeros(100_000)).nbytes < 401_000
    assert 100_000 < Snapshot.of("x" * 100_000).nbytes < 101_000


def test_what_cannot_be_copied_is_refused_at_once() -> None:
    with pytest.raises(SerializationError, match=r"key .deep. .*index 1"):
        Snapshot.of({"deep": [1, threading.Lock()]})


def test_references_are_held(group: None) -> None:
    rref = rpc.RRef("value")
    ref = ObjectRef.of(5)
    snapshot = Snapshot.of({"a": rref, "b": [ref, rref]})
    opened = snapshot.open()
    assert opened["a"] is rref
    assert opened["b"] == [ref, rref]
    assert opened["b"][0] is ref


def test_the_place_of_a_reference_means_nothing_elsewhere(group: None) -> None:
    body = codec.encode(rpc.RRef(1), context=LocalReferences()).body
    with pytest.raises(ProtocolError, match="missing"):
        codec.decode(body, definitions=None)


def test_pickled_by_python_it_stands_by_itself() -> None:
    snapshot = pickle.loads(pickle.dumps(Snapshot.of((torch.ones(5000), Point(3))), 5))
    tensor, point = snapshot.open()
    assert torch.equal(tensor, torch.ones(5000))
    assert point.x == 3


# -- on the wire ---------------------------------------------------------------------------------------------


def test_its_memory_leaves_the_pickle() -> None:
    encoded = codec.encode(Snapshot.of((torch.zeros(100_000), "x" * 5000)))
    assert len(encoded.body) < 500
    assert sorted(span.nbytes for span in encoded.spans)[-1] == 400_000


def _double(snapshot: Snapshot) -> Snapshot:
    value = snapshot.open_once()
    value["tensor"] *= 2
    assert value["rref"].to_here() == "here"
    return Snapshot.of(value)


def _travels(rank: int, world_size: int) -> None:
    if rank:
        return
    value = {"tensor": torch.ones(100_000), "rref": rpc.RRef("here"), "f": lambda x: x + 1}
    snapshot = Snapshot.of(value)
    for _ in range(2):  # sending it does not use it up
        back = rpc.rpc_sync(1, _double, (snapshot,)).open()
        assert torch.equal(back["tensor"], torch.full((100_000,), 2.0))
        assert back["rref"] == value["rref"]
        assert back["f"](1) == 2
    passed_on = rpc.rpc_sync(1, _same, (snapshot,))
    assert torch.equal(rpc.rpc_sync(1, _same, (passed_on,)).open()["tensor"], torch.ones(100_000))


def _same(snapshot: Snapshot) -> Snapshot:
    return snapshot


def test_it_travels_with_what_it_holds() -> None:
    rpc_group(_travels, 2)


def _from_another_main(rank: int, world_size: int) -> Any:
    if rank:
        return None
    main: Any = sys.modules["__main__"]

    class Config:
        pass

    Config.__module__ = "__main__"
    Config.__qualname__ = "Config"
    main.Config = Config
    snapshot = Snapshot.of(Config)
    assert snapshot.open() is Config
    peer = rrefs.runtime().agent.peer(1)
    peer.same_main = False
    return rpc.rpc_sync(1, _name_of, (snapshot,))


def _name_of(snapshot: Snapshot) -> str:
    return str(snapshot.open().__name__)


def test_workers_with_another_main_module_get_its_classes_by_value() -> None:
    assert rpc_group(_from_another_main, 2)[0] == "Config"


def test_what_is_shared_while_it_is_opened_is_opened_as_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread opens it from the same memory."""
    snapshot = Snapshot.of(np.ones(LARGE, np.uint8))  # outside of a group: on the heap, as what was fetched
    (memory,) = snapshot._buffers or ()
    of, shared = codec.TensorSpan.of, [snapshot]

    def shared_meanwhile(buffer: memoryview) -> Any:
        monkeypatch.setattr(codec.TensorSpan, "of", of)
        shared.pop().share(runtime().agent)
        return of(buffer)

    monkeypatch.setattr(codec.TensorSpan, "of", shared_meanwhile)  # the first step of the copy
    with alone():
        opened = snapshot.open()
        assert snapshot.stored is not None
        opened[:] = 0
        assert set(memory) == {1}
        assert set(snapshot.open()) == {1}
        del snapshot, opened
