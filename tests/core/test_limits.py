"""What happens where the system has no memory left for a message, or no thread."""

from __future__ import annotations

import errno
import resource
import threading
from typing import Any

import pytest
import torch

from actorrpc.core import limits, tensor_lane
from actorrpc.core.clock import Clock
from actorrpc.core.threads import Pool
from actorrpc.errors import LimitError
from tests.core.agents import agents

pytestmark = pytest.mark.limit(30)

_MIB = 1 << 20


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel()


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


def _no_memory(*_: Any) -> Any:
    raise MemoryError


def test_a_message_without_memory_for_it_is_refused_and_the_next_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with agents(2, lane=False) as (one, other):
        to = one.peer(other.name)
        large = _ones(8 * _MIB)
        take = other.buffers.take
        monkeypatch.setattr(other.buffers, "take", _no_memory)
        for _ in range(2):
            with pytest.raises(LimitError, match="8 MiB, find no memory in worker 'a1'") as refused:
                one.call(to, _size, (large,), {}, 20.0).result()
            assert refused.value.maybe_executed is False
            assert one.call(to, _size, (_ones(3),), {}, 20.0).result() == 3
        monkeypatch.setattr(other.buffers, "take", take)
        assert one.call(to, _size, (large,), {}, 20.0).result() == 8 * _MIB
        assert not to.conn.assemblies
        del refused


def test_a_result_without_memory_for_it_fails_the_call_and_not_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with agents(2, lane=False) as (one, other):
        to = one.peer(other.name)
        take = one.buffers.take
        monkeypatch.setattr(one.buffers, "take", _no_memory)
        with pytest.raises(LimitError, match="the result of the call of _ones on 'a1', of 8 MiB") as refused:
            one.call(to, _ones, (8 * _MIB,), {}, 20.0).result()
        assert refused.value.maybe_executed is True
        monkeypatch.setattr(one.buffers, "take", take)
        assert one.call(to, _ones, (8 * _MIB,), {}, 20.0).result().numel() == 8 * _MIB
        assert not to.conn.assemblies
        del refused


def test_shared_memory_that_cannot_be_mapped_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with agents(2) as (one, other):
        to = one.peer(other.name)
        if not one.call(to, _size, (_ones(8 * _MIB),), {}, 20.0).result() or to.conn.lender is None:
            pytest.skip("these connections have no shared memory")
        reserve = tensor_lane.reserve
        mapped = tensor_lane.Borrower._map

        def without(self: Any, *args: Any) -> Any:
            monkeypatch.setattr(tensor_lane, "reserve", refuse)
            try:
                return mapped(self, *args)
            finally:
                monkeypatch.setattr(tensor_lane, "reserve", reserve)

        monkeypatch.setattr(tensor_lane.Borrower, "_map", without)
        for _ in range(2):
            with pytest.raises(LimitError, match="MiB of shared memory cannot be mapped here"):
                one.call(to, _size, (_ones(64 * _MIB),), {}, 20.0).result()
        monkeypatch.setattr(tensor_lane.Borrower, "_map", mapped)
        assert one.call(to, _size, (_ones(64 * _MIB),), {}, 20.0).result() == 64 * _MIB


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits = {resource.RLIMIT_NPROC: 4321, resource.RLIMIT_AS: 7 << 30}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (set_limits[which], set_limits[which]))
    for text in (limits.explain_threads(), limits.explain_fork(BlockingIOError(errno.EAGAIN, "try again"))):
        assert "RLIMIT_NPROC (ulimit -u) is 4321" in text
        assert "RLIMIT_AS (ulimit -v) is 7168 MiB" in text
    assert "RLIMIT_AS (ulimit -v) is 7168 MiB, of which " in limits.explain_memory()


def test_threads_that_cannot_be_had_are_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, "_start_new_thread", refuse)
    clock = Clock()
    with pytest.raises(LimitError, match="cannot start another thread"):
        clock.start()
    clock.close()  # there is nothing to wait for
    pool = Pool(clock=clock, execute=print, refuse=print, max_threads=8, starvation_s=1.0)
    with pytest.raises(LimitError, match="cannot start another thread"):
        pool.start(3)
    assert pool.close() == []
