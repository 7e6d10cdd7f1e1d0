"""The flight recorder: caller and callee each keep one record of a call, with its times."""

from __future__ import annotations

import gc
import operator
import threading
from typing import Any

import pytest
import torch

from actorrpc.agent.agent import Agent
from actorrpc.errors import CancelledError, RemoteError, RpcTimeoutError
from actorrpc.flight_recorder import CALLED, EXECUTED, FlightRecorder
from actorrpc.futures import Future
from tests.agent.agents import agents

_gate = threading.Event()


def _raise() -> None:
    raise ValueError("as asked")


def _wait() -> None:
    _gate.wait(20)


class _Callable:
    """A callable whose ``__qualname__`` must not be read."""

    def __getattr__(self, name: str) -> Any:
        if name == "__qualname__":
            raise RuntimeError("__qualname__ must not be read")
        raise AttributeError(name)

    def __call__(self) -> int:
        return 1

    def __reduce__(self) -> Any:
        return _Callable, ()


def _call_async(agent: Agent, to: str, function: Any, *args: Any, timeout: float = 0.0) -> Future[Any]:
    future: Future[Any] = Future()
    agent.call(agent.peer(to), function, args, {}, timeout, future=future)
    agent.flush()
    return future


def _records(agent: Agent, kind: int) -> list[tuple[Any, ...]]:
    assert agent.flight_recorder is not None
    return [each for each in agent.flight_recorder.since(0, 1000) if each[1] == kind]


def _labels(agent: Agent) -> list[tuple[str, bool, bool]]:
    return [(row[7], row[9], row[10]) for row in _records(agent, CALLED)]


def test_caller_and_callee_each_record_every_call() -> None:
    with agents(2) as (a, b):
        assert a.call_sync(a.peer("a1"), operator.add, (1, 1), {}, 20) == 2
        assert _call_async(a, "a1", operator.add, 1, 1).result(20) == 2
        assert a.call_sync(a.peer("a0"), operator.add, (1, 1), {}, 20) == 2
        ones = torch.ones(1 << 18)
        assert a.call_sync(a.peer("a1"), operator.neg, (ones,), {}, 20).sum() == -(1 << 18)
        with pytest.raises(RemoteError, match="as asked"):
            a.call_sync(a.peer("a1"), _raise, (), {}, 20)
        with pytest.raises(RemoteError, match="as asked"):
            _call_async(a, "a1", _raise).result(20)
        assert a.call_sync(a.peer("a1"), _Callable(), (), {}, 20, label="it") == 1
        assert _labels(a) == [
            ("add", False, True),
            ("add", False, False),
            ("add", False, True),
            ("neg", False, True),
            ("_raise", True, True),
            ("_raise", True, False),
            ("it", False, True),
        ]
        executed = _records(b, EXECUTED)
        assert [(row[8], row[10]) for row in executed] == [
            ("add", False),
            ("add", False),
            ("neg", False),
            ("_raise", True),
            ("_raise", True),
            ("_Callable", False),
        ]
        assert len(_records(a, EXECUTED)) == 1
        calls = {(row[5], row[4]): row for row in _records(a, CALLED)}
        for _, _, arrived, begun, ended, id, caller, *_ in executed:
            made, answered = calls["a1", id][2:4]
            assert caller == "a0"
            assert made <= arrived <= begun <= ended
            assert made < answered  # the caller may read the answer before the callee writes its record
        assert calls["a1", executed[2][5]][11] > 1 << 20


@pytest.mark.prints("threads of 'a1' are still in user code")
def test_timed_out_and_cancelled_calls_are_recorded() -> None:
    _gate.clear()
    with agents(2) as (a, _):
        late = _call_async(a, "a1", _wait, timeout=0.05)
        with pytest.raises(RpcTimeoutError):
            late.result(20)
        given_up = _call_async(a, "a1", _wait)
        assert given_up.cancel()
        with pytest.raises(CancelledError):
            given_up.result(20)
        assert _labels(a) == [("_wait", True, False)] * 2
        _gate.set()


def test_recorder_false_turns_the_flight_recorder_off() -> None:
    with agents(2, recorder=False) as (a, b):
        assert a.call_sync(a.peer("a1"), operator.add, (1, 1), {}, 20) == 2
        assert a.flight_recorder is None
        assert b.flight_recorder is None


def test_a_full_recorder_keeps_the_newest_records() -> None:
    recorder = FlightRecorder(128)
    assert (recorder.total, recorder.since(0, 10)) == (0, [])
    for number in range(250):
        recorder.noted(float(number), "restart", f"actor {number}")
    assert recorder.total == 250
    rows = recorder.since(0, 1000)
    assert [(row[0], row[2], row[5]) for row in rows] == [
        (n, float(n), f"actor {n}") for n in range(122, 250)
    ]
    assert [row[0] for row in recorder.since(160, 5)] == [160, 161, 162, 163, 164]
    assert [row[0] for row in recorder.since(248, 5)] == [248, 249]
    assert recorder.since(250, 5) == []


def test_records_have_the_right_names_after_1000_distinct_names() -> None:
    recorder = FlightRecorder(8)
    for number in range(1000):
        recorder.noted(0.0, f"kind {number % 3}", f"actor {number}")
        rows = recorder.since(0, 8)
        assert [(row[4], row[5]) for row in rows] == [
            (f"kind {row[0] % 3}", f"actor {row[0]}") for row in rows
        ]


def test_a_recorded_call_adds_no_object_to_the_garbage_collector() -> None:
    with agents(2) as (a, b):
        peer = a.peer("a1")
        a.call_sync(peer, operator.add, (1, 1), {}, 20)
        gc.collect()
        gc.disable()
        try:
            a.call_sync(peer, operator.add, (1, 1), {}, 20)
            before = gc.get_count()[0]
            for _ in range(10_000):
                a.call_sync(peer, operator.add, (1, 1), {}, 20)
            added = gc.get_count()[0] - before
        finally:
            gc.enable()
        assert a.flight_recorder is not None
        assert b.flight_recorder is not None
        assert a.flight_recorder.total + b.flight_recorder.total >= 20_000
        assert added < 1000  # tuples of records: 20 000
