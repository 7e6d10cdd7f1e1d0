"""Packing of notices and messages, and expiry of unused contexts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import actorrpc.autograd as dist_autograd
from actorrpc import rpc
from actorrpc.autograd.api import contexts
from actorrpc.autograd.messages import (
    Contribution,
    Discover,
    Gradient,
    Run,
    Settle,
    Stratum,
)
from actorrpc.autograd.transport import fields_of, message_of, unpack_notice
from actorrpc.errors import ProtocolError
from actorrpc.wire.identity import WorkerKey
from tests.ranks import rpc_group

_ME, _YOU = WorkerKey(0, "one"), WorkerKey(1, "two")
_STRATA = [
    Stratum({3: (Contribution(_ME, 1), Contribution(_YOU, 4)), 5: (Contribution(_ME, 2),)}),
    Stratum({7: (Contribution(_YOU, 9),)}),
]


@pytest.mark.parametrize(
    "message",
    [
        Discover(5, [1, 2]),
        Settle(5, 6),
        Gradient(5, 6, 3, 1, [None], True),
        Run(5, 6, _STRATA, True, False, "grad", 1.5, [Gradient(5, 6, 3, 1, [None, None])]),
        Run(5, 6, [], False, True, "context", 0.0, []),
    ],
)
def test_messages_are_unpacked_as_they_were_packed(message: Any) -> None:
    kind, *fields = fields_of(message)
    assert message_of(kind, tuple(fields)) == message


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x05", b"\x92\x01\x02", b"\x91\xa1a", b"\x93\x01\x02\xa1c"])
def test_malformed_notices_raise_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="notice of distributed autograd"):
        unpack_notice(body)


def _count() -> int:
    return len(contexts().live)


def _idle(rank: int, _: int) -> None:
    if rank:
        return
    with dist_autograd.context():
        rpc.rpc_sync("worker1", torch.neg, (torch.ones(1, requires_grad=True),))
        pause = threading.Event()
        found: list[int] = []
        # Called in a separate thread: a call within the context would keep the context alive.
        asking = threading.Thread(target=lambda: found.append(_until_none(pause)))
        asking.start()
        asking.join()
        assert found == [0]
        assert _count() == 1  # a context does not expire at its origin


def _until_none(pause: threading.Event) -> int:
    while count := rpc.rpc_sync("worker1", _count):
        pause.wait(0.01)
    return count


def test_an_unused_context_is_released_after_context_ttl() -> None:
    rpc_group(_idle, 2, env={"ACTORRPC_CONTEXT_TTL": "0.2"})
