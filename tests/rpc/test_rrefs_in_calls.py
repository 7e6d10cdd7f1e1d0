"""RRefs as arguments: when a call has been answered, has timed out or was cancelled, all RRefs are settled."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from actorrpc import errors, rpc
from actorrpc.rpc import api
from tests.ranks import rpc_group

_gate = threading.Event()


def value(_rref: Any, result: Any) -> Any:
    return result


def fail(_rref: Any) -> None:
    raise LookupError("simulated")


def lock(_rref: Any) -> Any:
    return threading.Lock()  # cannot be sent


def gated(_rref: Any) -> None:
    assert _gate.wait(60)


def open_gate() -> None:
    _gate.set()


def waiting_for() -> int:
    """Return the number of sent RRefs whose arrival is not confirmed."""
    return api.references().table.pending_counts().children


def settled(deadline_s: float = 30.0) -> bool:
    """Wait until the arrival of all sent RRefs is confirmed."""
    for _ in range(int(deadline_s / 0.01)):
        if not waiting_for():
            return True
        threading.Event().wait(0.01)
    return False


def _with_answers() -> None:
    rref = rpc.remote("worker1", str, ("here",))
    assert rref.to_here() == "here"
    for what in (1, None, "text", [1, 2], rref, b"x" * 3_000_000):
        rpc.rpc_sync("worker1", value, (rref, what))
        assert waiting_for() == 0, what
    for function, error in ((fail, LookupError), (lock, errors.SerializationError)):
        with pytest.raises(error):
            rpc.rpc_sync("worker1", function, (rref,))
        assert waiting_for() == 0
    assert rpc.rpc_async("worker1", value, (rref, 7)).wait() == 7
    assert waiting_for() == 0


def _without_answers() -> None:
    rref = rpc.remote("worker2", str, ("here",))
    assert rref.to_here() == "here"
    with pytest.raises(errors.RpcTimeoutError):
        rpc.rpc_sync("worker1", gated, (rref,), timeout=0.5)
    # The function still runs, and its answer will be discarded; this must not keep the sent RRef.
    assert settled()
    future = rpc.rpc_async("worker1", gated, (rref,))
    assert future.cancel()
    assert settled()
    rpc.rpc_sync("worker1", open_gate)


def _calls(rank: int, _: int) -> None:
    if rank == 0:
        _with_answers()
        _without_answers()


def test_answered_timed_out_and_cancelled_calls_keep_no_rrefs() -> None:
    rpc_group(_calls, 3)
