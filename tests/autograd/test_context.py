"""Contexts and the table of them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from actorrpc.autograd.contexts import Contexts, Receipt
from actorrpc.autograd.messages import Sink
from actorrpc.errors import RpcError
from actorrpc.wire.identity import WorkerKey

ME = WorkerKey(3, "life")


def test_an_id_names_its_origin() -> None:
    contexts = Contexts(ME)
    ids = [contexts.create().id for _ in range(3)]
    assert len(set(ids)) == 3
    assert {id >> 48 for id in ids} == {3}
    assert contexts.get(ids[0]).origin == 3
    assert contexts.new_message() >> 48 == 3


def test_another_life_gives_other_ids() -> None:
    # One in 2**24 that they are equal.
    assert Contexts(ME).create().id != Contexts(WorkerKey(3, "next life")).create().id


def test_what_is_not_known_is_said() -> None:
    contexts = Contexts(ME)
    with pytest.raises(RpcError, match=r"Could not find autograd context with id: 77$"):
        contexts.get(77)
    assert contexts.live.get(77) is None
    for wrong in ("77", 7.0, None, True):
        with pytest.raises(TypeError, match="named by an int"):
            contexts.get(wrong)  # type: ignore[arg-type]
    id = contexts.create().id
    contexts.release(id)
    with pytest.raises(RpcError, match="has been released"):
        contexts.get(id)


def test_a_late_message_does_not_make_it_again() -> None:
    contexts = Contexts(ME)
    reached = contexts.reach(9 << 48 | 1)
    assert reached is contexts.reach(9 << 48 | 1)
    assert reached is not None
    assert contexts.release(reached.id) is reached
    assert contexts.reach(reached.id) is None
    assert contexts.release(reached.id) is None
    assert len(contexts.live) == 0
    # Nor one that comes after a release of what was never known here.
    assert contexts.release(5) is None
    assert contexts.reach(5) is None


def test_the_last_10_000_released_contexts_are_remembered() -> None:
    contexts = Contexts(ME)
    for id in range(10_020):
        contexts.release(id)
    assert contexts.reach(19) is not None
    assert contexts.reach(20) is None


def test_what_is_over_records_nothing() -> None:
    contexts = Contexts(ME)
    context = contexts.create()
    leaf = torch.ones(2, requires_grad=True)
    context.record_send(1, [get_gradient_edge(leaf)])
    context.record_receipt("node", Receipt(Sink(ME, 1, 1), 1))
    assert list(context.sends) == [1]
    contexts.release(context.id)
    context.record_send(2, [get_gradient_edge(leaf)])
    context.record_receipt("other", Receipt(Sink(ME, 2, 2), 1))
    assert list(context.sends) == [1]
    assert list(context.receipts) == ["node"]


def test_many_threads_reach_one_context() -> None:
    contexts = Contexts(ME)
    start = threading.Barrier(8)
    found = []

    def reach() -> None:
        start.wait()
        for id in range(500):
            found.append((id, contexts.reach(id)))

    threads = [threading.Thread(target=reach) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({(id, id_of) for id, id_of in ((id, hash(context)) for id, context in found)}) == 500
    assert len(contexts.all()) == 500
