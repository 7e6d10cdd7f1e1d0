"""That RRefs have arrived is said with the answer of the call that brought them, or by itself where none comes soon."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from actorrpc import errors, rpc
from actorrpc.agent.hooks import RECEIPT
from actorrpc.futures import Future
from actorrpc.rpc import api
from tests.ranks import rpc_group

_gate = threading.Event()
_notices: list[str] = []


def value(_rref: Any, what: Any) -> Any:
    return what


def fail(_rref: Any) -> None:
    raise LookupError("simulated")


def lock(_rref: Any) -> Any:
    return threading.Lock()  # which cannot travel


def gated(_rref: Any) -> None:
    assert _gate.wait(60)


def later(_rref: Any) -> Any:
    future: Any = Future()
    threading.Thread(target=lambda: future.set_result(5)).start()
    return future


def open_gate() -> None:
    _gate.set()


def listen() -> None:
    """Take note of the notices that this worker sends from now on."""
    agent = api.references().agent
    send = agent.notify

    def notify(peer: Any, name: str, body: bytes, **options: Any) -> bool:
        _notices.append(name)
        return send(peer, name, body, **options)

    agent.notify = notify  # type: ignore[method-assign]


def said() -> list[str]:
    found, _notices[:] = list(_notices), []
    return found


def waiting_for() -> int:
    """Return how many RRefs that were passed on from here are not known to have arrived."""
    return api.references().table.pending_counts().children


def settled(deadline_s: float = 30.0) -> bool:
    """Wait until all are."""
    for _ in range(int(deadline_s / 0.01)):
        if not waiting_for():
            return True
        threading.Event().wait(0.01)
    return False


def _with_answers(rank: int, _: int) -> None:
    if rank:
        return
    rref = rpc.remote("worker1", str, ("here",))
    assert rref.to_here() == "here"
    rpc.rpc_sync("worker1", listen)
    for what in (1, None, "text", [1, 2], rref, b"x" * 3_000_000):
        rpc.rpc_sync("worker1", value, (rref, what))
        assert waiting_for() == 0, what
    for function, error in ((fail, LookupError), (lock, errors.SerializationError)):
        with pytest.raises(error):
            rpc.rpc_sync("worker1", function, (rref,))
        assert waiting_for() == 0
    assert rpc.rpc_async("worker1", value, (rref, 7)).wait() == 7
    assert waiting_for() == 0
    assert RECEIPT not in rpc.rpc_sync("worker1", said)


def test_the_answer_says_that_rrefs_have_arrived() -> None:
    rpc_group(_with_answers, 2)


def _without_answers(rank: int, _: int) -> None:
    if rank:
        return
    rref = rpc.remote("worker1", str, ("here",))
    assert rref.to_here() == "here"
    with pytest.raises(errors.RpcTimeoutError):
        rpc.rpc_sync("worker1", gated, (rref,), timeout=0.5)
    # It runs on, and its answer will not be wanted; that must not keep what was passed on.
    assert settled()
    future = rpc.rpc_async("worker1", gated, (rref,))
    assert future.cancel()
    assert settled()
    rpc.rpc_sync("worker1", open_gate)


def test_where_no_answer_is_wanted_any_more_it_is_said_at_once() -> None:
    rpc_group(_without_answers, 2)


@rpc.functions.async_execution
def complete_later(_rref: Any) -> Any:
    return later(_rref)


def _async_execution(rank: int, _: int) -> None:
    if rank:
        return
    rref = rpc.remote("worker1", str, ("here",))
    assert rpc.rpc_sync("worker1", complete_later, (rref,)) == 5
    assert waiting_for() == 0


def test_answers_of_async_execution_functions_say_it_too() -> None:
    rpc_group(_async_execution, 2)
