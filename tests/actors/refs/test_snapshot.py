"""Snapshots of values: references and sending."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from actorrpc import rpc
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.errors import ProtocolError
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
