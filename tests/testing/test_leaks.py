"""find_leaks(): RRefs and sockets that a worker still holds."""

from __future__ import annotations

import operator
import socket
from pathlib import Path
from typing import Any

import pytest

from actorrpc import rpc
from actorrpc.testing import leaks
from tests.ranks import rpc_group

_kept: list[Any] = []


def _keep(rref: Any) -> None:
    _kept.append(rref)


def _forget() -> None:
    _kept.clear()


def references(rank: int, world_size: int) -> None:
    if rank:
        return
    assert rpc.rpc_sync("worker1", operator.add, (1, 2)) == 3
    before = leaks.LeakSnapshot.capture(whole_session=False)
    rref = rpc.remote("worker1", operator.add, (1, 2))
    assert rref.to_here() == 3
    rpc.rpc_sync("worker1", _keep, (rpc.RRef(7),))
    found = leaks.find_leaks(before)
    rrefs = [each for each in found.others if "RRef" in each]
    assert rrefs == [
        "RRef of a value of another worker (1 of them)",
        "value of this worker that other workers have an RRef to (1 of them)",
    ]
    assert "RRef of a value" in str(found)
    del rref
    rpc.rpc_sync("worker1", _forget)
    assert not any("RRef" in each for each in leaks.settle(before, 2.0).others)


@pytest.mark.slow
def test_held_rrefs_are_reported_until_they_are_released() -> None:
    rpc_group(references, 2)


def test_a_leaked_socket_is_described_with_its_address_and_owner(tmp_path: Path) -> None:
    before = leaks.LeakSnapshot.capture(whole_session=False)
    path = str(tmp_path / "door")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        found = str(leaks.find_leaks(before))
    assert "descriptor of socket:" in found
    assert f"laddr={path}" in found
