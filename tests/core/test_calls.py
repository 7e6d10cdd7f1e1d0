"""Calls by themselves: how a wait for one ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from actorrpc.core.calls import Call
from actorrpc.futures import Future


@pytest.mark.limit(10)
def test_a_wait_ends_with_the_future_and_does_not_spin_until_the_call_is_over() -> None:
    agent = cast(Any, SimpleNamespace(upkeep=SimpleNamespace(corked={}), pool=SimpleNamespace(queue=[])))
    future: Future[int] = Future()
    call = Call(agent, cast(Any, None), 1, "add", float("inf"), 0.0, 1, future)
    future.set_result(3)  # whoever does that ends the call next, as soon as it is let run
    assert call.wait(None)
    assert not call.done
