"""Information in messages about where they lead to is validated."""

from __future__ import annotations

from typing import Any

import pytest

from actorrpc.autograd.contexts import Context
from actorrpc.autograd.recorder import record_news
from actorrpc.errors import ProtocolError
from actorrpc.wire.identity import WorkerKey

A, B, C = (WorkerKey(rank, f"life of {rank}") for rank in range(3))
ID = 7


def number(worker: WorkerKey, count: int) -> int:
    return worker.rank << 48 | count


@pytest.mark.parametrize(
    "news",
    [
        [1],
        [1, 2],
        ["a", []],
        [number(C, 1), []],
        [number(B, 1), [5]],
        [number(B, 1), ["a", "b"]],
        [1, [], 5],
        {1: 2},
    ],
)
def test_malformed_reachability_information_raises_protocol_error(news: Any) -> None:
    context = Context(ID)
    with pytest.raises(ProtocolError, match="cannot be read"):
        record_news(context, A, B, news)
    assert not context.sinks
