"""Autograd contexts and their table."""

from __future__ import annotations

import pytest

from actorrpc.autograd.contexts import Contexts
from actorrpc.errors import RpcError
from actorrpc.wire.identity import WorkerKey

ME = WorkerKey(3, "life")


def test_ids_of_contexts_and_messages_contain_the_rank_of_their_origin() -> None:
    contexts = Contexts(ME)
    ids = [contexts.create().id for _ in range(3)]
    assert len(set(ids)) == 3
    assert {id >> 48 for id in ids} == {3}
    assert contexts.get(ids[0]).origin == 3
    assert contexts.new_message() >> 48 == 3


def test_unknown_released_and_wrong_ids_raise_errors() -> None:
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


def test_a_late_message_does_not_recreate_a_released_context() -> None:
    contexts = Contexts(ME)
    reached = contexts.reach(9 << 48 | 1)
    assert reached is contexts.reach(9 << 48 | 1)
    assert reached is not None
    assert contexts.release(reached.id) is reached
    assert contexts.reach(reached.id) is None
    assert contexts.release(reached.id) is None
    assert len(contexts.live) == 0
    # Nor does a message that arrives after the release of an unknown context.
    assert contexts.release(5) is None
    assert contexts.reach(5) is None


def test_the_last_10_000_released_contexts_are_remembered() -> None:
    contexts = Contexts(ME)
    for id in range(10_020):
        contexts.release(id)
    assert contexts.reach(19) is not None
    assert contexts.reach(20) is None
