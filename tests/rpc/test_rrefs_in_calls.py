"""RRefs in calls to their owner go without messages of their own; calls to others leave nothing behind either."""

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


def test_nothing_is_under_way_when_the_owner_has_answered() -> None:
    rpc_group(_with_answers, 2)


def _without_answers(rank: int, _: int) -> None:
    if rank:
        return
    rref = rpc.remote("worker2", str, ("here",))
    assert rref.to_here() == "here"
    with pytest.raises(errors.RpcTimeoutError):
        rpc.rpc_sync("worker1", gated, (rref,), timeout=0.5)
    # It runs on, and its answer will not be wanted; that must not keep what was passed on.
    assert settled()
    future = rpc.rpc_async("worker1", gated, (rref,))
    assert future.cancel()
    assert settled()
    rpc.rpc_sync("worker1", open_gate)


def test_a_call_that_is_given_up_keeps_nothing_of_a_third_worker() -> None:
    rpc_group(_without_answers, 3)


_events: list[str] = []


class Mortal:
    """Says when it is gone."""

    def __del__(self) -> None:
        _events.append("gone")


def gone() -> int:
    return len(_events)


def gated_value(rref: Any) -> str:
    assert _gate.wait(60)
    return type(rref.local_value()).__name__


def holders() -> tuple[int, int]:
    """Return how many RRefs of others, and how many holders of its own, this worker knows of."""
    found = api.references().table.debug_info()
    return found["num_users"], found["num_forks"]


def _to_the_owner(rank: int, _: int) -> None:
    if rank:
        return
    rref = rpc.remote("worker1", Mortal)
    assert rpc.rpc_sync("worker1", value, (rref, 1)) == 1  # its creation may still be under way
    while not rref.confirmed_by_owner():
        threading.Event().wait(0.005)
    before = rpc.rpc_sync("worker1", holders)
    assert before == (0, 1)
    listen()
    rpc.rpc_sync("worker1", listen)
    for _ in range(3):
        assert rpc.rpc_sync("worker1", value, (rref, 1)) == 1
    assert rpc.rpc_sync("worker1", value, ({"in": [rref]}, 2)) == 2
    assert rpc.rpc_sync("worker1", holders) == before
    assert waiting_for() == 0
    assert not said()
    assert RECEIPT not in rpc.rpc_sync("worker1", said)
    # The last RRef goes while the call is under way that carries it.
    future = rpc.rpc_async("worker1", gated_value, (rref,))
    del rref
    api.references().collect()
    assert rpc.rpc_sync("worker1", gone) == 0
    rpc.rpc_sync("worker1", open_gate)
    assert future.wait() == "Mortal"
    del future
    while not rpc.rpc_sync("worker1", gone):
        threading.Event().wait(0.01)


def test_an_rref_goes_to_its_owner_without_a_message_of_its_own() -> None:
    rpc_group(_to_the_owner, 2)


@rpc.functions.async_execution
def complete_later(_rref: Any) -> Any:
    return later(_rref)


def _async_execution(rank: int, _: int) -> None:
    if rank:
        return
    rref = rpc.remote("worker1", str, ("here",))
    assert rpc.rpc_sync("worker1", complete_later, (rref,)) == 5
    assert waiting_for() == 0


def test_so_it_is_with_async_execution_functions() -> None:
    rpc_group(_async_execution, 2)
