"""Snapshots of values: contents, references, and sending."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

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
    """A group of one worker."""
    with alone():
        yield


def test_a_snapshot_contains_local_definitions() -> None:
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


def test_a_snapshot_of_an_unpicklable_value_raises_at_once() -> None:
    with pytest.raises(SerializationError, match=r"key .deep. .*index 1"):
        Snapshot.of({"deep": [1, threading.Lock()]})


def test_a_snapshot_keeps_its_references(group: None) -> None:
    rref = rpc.RRef("value")
    ref = ObjectRef.of(5)
    snapshot = Snapshot.of({"a": rref, "b": [ref, rref]})
    opened = snapshot.open()
    assert opened["a"] is rref
    assert opened["b"] == [ref, rref]
    assert opened["b"][0] is ref


def test_a_snapshot_cannot_be_decoded_without_its_references(group: None) -> None:
    body = codec.encode(rpc.RRef(1), context=LocalReferences()).body
    with pytest.raises(ProtocolError, match="missing"):
        codec.decode(body, definitions=None)


# -- sending -------------------------------------------------------------------------------------------------


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


def test_classes_of_main_are_sent_by_value_to_workers_with_another_main_module() -> None:
    assert rpc_group(_from_another_main, 2)[0] == "Config"


def test_a_snapshot_that_is_shared_while_it_is_opened_gives_a_separate_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread shares and opens the memory at the same time."""
    snapshot = Snapshot.of(np.ones(LARGE, np.uint8))  # outside a group: on the heap, like a fetched value
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
