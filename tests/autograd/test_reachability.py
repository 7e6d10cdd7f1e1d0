"""What messages say of where they lead to."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import torch

from actorrpc.autograd import recorder
from actorrpc.autograd.contexts import Context, Receipt
from actorrpc.autograd.graph import edge_of, receive
from actorrpc.autograd.messages import Sink
from actorrpc.autograd.recorder import hear
from actorrpc.errors import ProtocolError
from actorrpc.wire.identity import WorkerKey

A, B, C = (WorkerKey(rank, f"life of {rank}") for rank in range(3))
ID = 7


def number(worker: WorkerKey, count: int) -> int:
    return worker.rank << 48 | count


def send(context: Context, me: WorkerKey, count: int, tensor: torch.Tensor) -> int:
    message = number(me, count)
    context.record_send(message, [edge_of(tensor)])
    return message


def arrive(context: Context, worker: WorkerKey, message: int, receipt: int) -> torch.Tensor:
    tensor = torch.ones(2)
    context.record_receipt(receive([tensor]), Receipt(Sink(worker, message, receipt), 1))
    return tensor


def tell(context: Context, me: WorkerKey, message: int, peer: WorkerKey) -> list[Any]:
    return recorder.tell(context, me, message, context.sends[message], peer)


def over_the_wire(news: list[Any]) -> list[Any]:
    return msgpack.unpackb(msgpack.packb(news))  # type: ignore[no-any-return]


def test_a_message_says_where_it_leads_to() -> None:
    here, there = Context(ID), Context(ID)
    x = arrive(here, A, number(A, 1), 5)
    message = send(here, B, 1, x * 2)
    hear(there, A, B, over_the_wire(tell(here, B, message, A)))
    assert there.sinks == {(B, message): [Sink(A, number(A, 1), 5)]}
    assert message in here.reaches  # a pass need not walk again


def test_and_what_is_not_known_of_what_it_leads_to() -> None:
    # C -> B -> A: A hears of C's message from B, which has heard of it from C.
    at_c, at_b, at_a = Context(ID), Context(ID), Context(ID)
    from_c = send(at_c, C, 1, torch.ones(2, requires_grad=True) * 2)
    hear(at_b, B, C, over_the_wire(tell(at_c, C, from_c, B)))
    from_b = send(at_b, B, 1, arrive(at_b, C, from_c, 3) * 2)
    hear(at_a, A, B, over_the_wire(tell(at_b, B, from_b, A)))
    assert at_a.sinks == {(B, from_b): [Sink(C, from_c, 3)], (C, from_c): []}


def test_everything_is_told_once() -> None:
    at_b = Context(ID)
    x = arrive(at_b, C, number(C, 1), 3)
    at_b.sinks[C, number(C, 1)] = ()
    first = send(at_b, B, 1, x * 2)
    second = send(at_b, B, 2, x * 3)
    assert tell(at_b, B, first, A)[::2][:2] == [first, number(C, 1)]
    assert number(C, 1) not in tell(at_b, B, second, A)[::2]
    # Somebody else has not heard of it; and C knows its own.
    assert number(C, 1) in tell(at_b, B, send(at_b, B, 3, x * 4), WorkerKey(9, "another"))[::2]
    assert tell(at_b, B, send(at_b, B, 4, x * 5), C) == [number(B, 4), [number(C, 1), 3]]


def test_large_graphs_and_foreign_ones_are_left_to_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(ID)
    x = arrive(context, A, number(A, 1), 5)
    for _ in range(recorder._NODES + 1):
        x = x * 1.0
    assert tell(context, B, send(context, B, 1, x), A) == []
    other = Context(ID + 1)
    stranger = arrive(other, A, number(A, 1), 5)
    assert tell(context, B, send(context, B, 2, stranger * 2), A) == []
    assert not context.sinks


def test_nothing_is_told_of_a_context_that_is_over() -> None:
    context = Context(ID)
    message = send(context, B, 1, torch.ones(2, requires_grad=True) * 2)
    edges = context.sends[message]
    context.released = True
    context.sends.clear()
    assert recorder.tell(context, B, message, edges, A) == []
    assert not context.sends
    assert not context.sinks


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
def test_what_makes_no_sense(news: Any) -> None:
    context = Context(ID)
    with pytest.raises(ProtocolError, match="cannot be read"):
        hear(context, A, B, news)
    assert not context.sinks
