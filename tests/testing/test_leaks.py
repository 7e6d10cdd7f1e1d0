"""find_leaks(): RRefs and sockets that a worker still holds."""

from __future__ import annotations

import contextlib
import operator
import os
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
    before = leaks.LeakSnapshot.take(whole_session=False)
    rref = rpc.remote("worker1", operator.add, (1, 2))
    assert rref.to_here() == 3
    rpc.rpc_sync("worker1", _keep, (rpc.RRef(7),))
    found = leaks.find_leaks(before)
    assert found.holdings[:2] == [  # a pending call of worker1's shutdown may follow
        "RRef of a value of another worker (1 of them)",
        "value of this worker that others have an RRef to (1 of them)",
    ]
    assert "RRef of a value" in str(found)
    del rref
    rpc.rpc_sync("worker1", _forget)
    assert not any("RRef" in each for each in leaks.settle(before, 2.0).holdings)


@pytest.mark.slow
def test_held_rrefs_are_reported_until_they_are_released() -> None:
    rpc_group(references, 2)


class _Owner:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock


def test_a_leaked_socket_is_described_with_its_address_and_owner(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        before = leaks.LeakSnapshot.take(whole_session=False)
        path = str(tmp_path / "door")
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen()
        owner = _Owner(stack.enter_context(socket.socket(socket.AF_UNIX)))
        owner.sock.connect(path)
        number = listener.accept()[0].detach()
        stack.callback(os.close, number)
        os.write(number, b"unread")
        found = str(leaks.find_leaks(before))
    me = f"of process {os.getpid()}"
    assert f"(AF_UNIX, SOCK_STREAM, at {path!r}, listening, {me}; socket in " in found
    assert f"(AF_UNIX, SOCK_STREAM, at '', peer {path!r}, 6 bytes unread, {me}; socket in " in found
    assert "_Owner" in found
    assert f"at {path!r}, peer '', 0 bytes unread, {me}; no socket object has it)" in found
