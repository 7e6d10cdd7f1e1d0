"""Nested calls cancelled or timed out at random moments: each runs at most once, and ``maybe_executed`` of its error is true."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from actorrpc import rpc
from actorrpc.errors import CancelledError, RpcTimeoutError
from tests.layers import rest_is_slow
from tests.ranks import rpc_group

_ran: list[int] = []  # on worker2: numbers of executed calls
_ends: dict[
    int, bool | None
] = {}  # on worker1: maybe_executed of each nested call's error; None without an error


def _note(number: int, _data: Any) -> None:
    _ran.append(number)


def _call_note(number: int, size: int, timeout: float) -> None:
    data = torch.zeros(size, dtype=torch.uint8) if size else None
    try:
        rpc.rpc_sync("worker2", _note, (number, data), timeout=timeout)
        _ends[number] = None
    except (CancelledError, RpcTimeoutError) as error:
        _ends[number] = error.maybe_executed


def _ran_and_ends() -> tuple[list[int], dict[int, bool | None]]:
    return _ran, _ends


def _seconds_of_a_call(size: int) -> float:
    begun = time.perf_counter()
    rpc.rpc_sync("worker1", _call_note, (-1, size, 0.0))
    return time.perf_counter() - begun


def _moments(count: int, within: float) -> Iterator[tuple[int, float]]:
    rng = random.Random(count)
    return ((number, rng.random() * within) for number in range(count))


def _cancel(count: int, size: int, within: float) -> None:
    pause = threading.Event()
    for number, moment in _moments(count, within):
        outer = rpc.rpc_async("worker1", _call_note, (number, size, 0.0), timeout=0)
        pause.wait(moment)
        outer.cancel()


def _time_out(count: int, size: int, within: float) -> None:
    calls = [
        rpc.rpc_async("worker1", _call_note, (number, size, moment + 1e-6), timeout=0)
        for number, moment in _moments(count, within)
    ]
    for call in calls:
        call.wait()


def _until_nothing_runs() -> None:
    """Wait until no call starts or ends for 0.3 s: cancelled calls may still arrive."""
    pause = threading.Event()
    before: Any = None
    while True:
        now = [rpc.rpc_sync(worker, _ran_and_ends) for worker in ("worker1", "worker2")]
        if now == before:
            return
        before = now
        pause.wait(0.3)


def _give_up(rank: int, _size: int, way: str, count: int, size: int) -> None:
    if rank != 0:
        return
    within = 1.3 * min(_seconds_of_a_call(size) for _ in range(5))
    (_cancel if way == "cancelled" else _time_out)(count, size, within)
    _until_nothing_runs()
    ran = rpc.rpc_sync("worker2", _ran_and_ends)[0]
    ends = rpc.rpc_sync("worker1", _ran_and_ends)[1]
    executed = [number for number in ran if number >= 0]
    assert len(executed) == len(set(executed))
    assert len(ends) > count // 4  # the other calls were cancelled before they made their nested call
    assert [
        number for number, maybe_executed in ends.items() if maybe_executed is False and number in executed
    ] == []


_MIB = 1 << 20


@pytest.mark.parametrize(
    ("transport", "way", "count", "size"),
    rest_is_slow(
        [
            ("unix", "cancelled", 60, 4 * _MIB),
            *(
                (transport, way, 2000, size)
                for transport in ("unix", "tcp")
                for way in ("cancelled", "timed out")
                for size in (0, 4 << 10, 4 * _MIB)
            ),
            *((transport, "cancelled", 50, 100 * _MIB) for transport in ("unix", "tcp")),
        ]
    ),
)
@pytest.mark.limit(200)
def test_maybe_executed_is_never_false_for_a_nested_call_that_ran(
    transport: str, way: str, count: int, size: int
) -> None:
    rpc_group(_give_up, 3, way, count, size, options={"transport": transport}, timeout=180)
