"""Calls when the system refuses memory for a message or a new thread: they fail with LimitError, and later calls work."""

from __future__ import annotations

import errno
import resource
import threading
from typing import Any

import pytest
import torch

from actorrpc import _limits, _time
from actorrpc.agent.threads import Pool
from actorrpc.agent.timers import Clock
from actorrpc.errors import LimitError, PeerDiedError
from actorrpc.serialization import exceptions
from actorrpc.transport import connection, shared_memory
from actorrpc.wire import frames
from tests.actors.e2e.kit import until
from tests.agent.agents import agents

pytestmark = pytest.mark.limit(30)

_MIB = 1 << 20


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel()


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


def _no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError


def test_a_call_without_memory_for_its_large_result_raises_limit_error_and_later_calls_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with agents(2, lane=False) as (one, other):
        to = one.peer(other.name)
        with monkeypatch.context() as patch:
            patch.setattr(one.buffers, "allocate", _no_memory)
            with pytest.raises(
                LimitError, match="the result of the call of _ones on 'a1', of 8 MiB"
            ) as refused:
                one.call_sync(to, _ones, (8 * _MIB,), {}, 20.0)
        assert refused.value.maybe_executed is True
        assert one.call_sync(to, _ones, (8 * _MIB,), {}, 20.0).numel() == 8 * _MIB
        until(lambda: not to.conn.assemblies)  # the refused message may still be arriving
        del refused


def _length(data: bytes) -> int:
    return len(data)


def _large(size: int) -> bytes:
    return bytes(size)


def _numbers(count: int) -> list[int]:
    return list(range(count))  # no element is large enough to be sent as a separate buffer


def _no_large_bytes(given: Any = b"") -> bytes:
    if len(memoryview(given)) > 40_000:
        raise MemoryError
    return bytes(given)


def test_a_call_without_memory_for_a_50_kb_message_raises_limit_error_and_keeps_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with agents(2) as (one, other):
        to = one.peer(other.name)
        assert one.call_sync(to, _length, (b"",), {}, 20.0) == 0
        conn = to.conn
        with monkeypatch.context() as patch:
            patch.setattr(frames, "bytes", _no_large_bytes, raising=False)
            for _ in range(2):
                with pytest.raises(
                    LimitError, match=r"its arguments, of 50\d\d\d bytes, in worker 'a1'"
                ) as no:
                    one.call_sync(to, _length, (b"x" * 50_000,), {}, 20.0)
                assert no.value.maybe_executed is False
                with pytest.raises(
                    LimitError, match=r"the result of the call of _large on 'a1', of 50\d\d\d bytes"
                ) as no:
                    one.call_sync(to, _large, (50_000,), {}, 20.0)
                assert no.value.maybe_executed is True
            assert one.call_sync(to, _length, (b"x" * 3,), {}, 20.0) == 3
        assert one.call_sync(to, _length, (b"x" * 50_000,), {}, 20.0) == 50_000
        assert to.conn is conn
        del no


@pytest.mark.prints("the connection to a[01] was closed: no memory to read a message of")
def test_a_connection_closed_for_want_of_memory_names_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    untouched, full = connection.untouched, threading.Event()

    def allocate(size: int) -> Any:
        if full.is_set():
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return untouched(size)

    monkeypatch.setattr(connection, "untouched", allocate)
    with agents(2) as (one, other):
        to = one.peer(other.name)
        assert one.call_sync(to, _length, (b"",), {}, 20.0) == 0
        full.set()
        with pytest.raises(PeerDiedError, match=r"no memory to read a message of \d{6} bytes: "):
            one.call_sync(to, _numbers, (200_000,), {}, 20.0)


@pytest.mark.prints("an error cannot be sent to 'a0': MemoryError")
def test_a_call_whose_error_cannot_be_serialized_raises_limit_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(2) as (one, other):
        to = one.peer(other.name)
        monkeypatch.setattr(exceptions, "dump", _no_memory)
        with pytest.raises(LimitError, match="worker 'a1' cannot send the outcome of the call") as raised:
            one.call_sync(to, int, ("x",), {}, 20.0)
        assert raised.value.maybe_executed is True
        with pytest.raises(LimitError, match="worker 'a0' cannot send the outcome of the call"):
            one.call_sync(one.self_peer, int, ("x",), {}, 20.0)
        del raised


def test_mapping_shared_memory_is_tried_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = shared_memory.reserve

    def refuse(*given: Any, **named: Any) -> Any:
        if threading.current_thread() is threading.main_thread():  # the sending worker's thread
            return reserve(*given, **named)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with agents(2) as (one, other):
        to = one.peer(other.name)
        if not one.call_sync(to, _size, (_ones(8 * _MIB),), {}, 20.0) or to.conn.lane.lender is None:
            pytest.skip("these connections have no shared memory")
        with monkeypatch.context() as patch:
            patch.setattr(shared_memory, "reserve", refuse)
            for _ in range(2):
                with pytest.raises(LimitError, match="MiB of shared memory cannot be mapped here"):
                    one.call_sync(to, _size, (_ones(64 * _MIB),), {}, 20.0)
        assert one.call_sync(to, _size, (_ones(64 * _MIB),), {}, 20.0) == 64 * _MIB


def test_messages_about_threads_forks_and_memory_name_the_resource_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_limits = {resource.RLIMIT_NPROC: 4321, resource.RLIMIT_AS: 7 << 30}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (set_limits[which], set_limits[which]))
    for text in (_limits.explain_threads(), _limits.explain_fork(BlockingIOError(errno.EAGAIN, "try again"))):
        assert "RLIMIT_NPROC (ulimit -u) is 4321" in text
        assert "RLIMIT_AS (ulimit -v) is 7168 MiB" in text
    assert "RLIMIT_AS (ulimit -v) is 7168 MiB, of which " in _limits.explain_memory()


def test_clock_and_pool_raise_limit_error_at_start_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_time, "start", refuse)
    clock = Clock()
    with pytest.raises(LimitError, match="cannot start another thread"):
        clock.start()
    clock.close()  # returns at once: no thread was started
    pool = Pool(clock=clock, execute=print, refuse=print, max_threads=8, starvation_s=1.0)
    with pytest.raises(LimitError, match="cannot start another thread"):
        pool.start(3)
    assert pool.close() == []
