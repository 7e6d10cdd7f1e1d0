"""What happens where the system has no memory left for a message, or no thread."""

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
from actorrpc.wire import frames, integrity
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


def test_a_message_without_memory_for_it_is_refused_and_the_next_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with agents(2, lane=False) as (one, other):
        to = one.peer(other.name)
        large = _ones(8 * _MIB)
        take = other.buffers.take
        monkeypatch.setattr(other.buffers, "take", _no_memory)
        for _ in range(2):
            with pytest.raises(LimitError, match="8 MiB, in worker 'a1'") as refused:
                one.ask(to, _size, (large,), {}, 20.0)
            assert refused.value.maybe_executed is False
            assert one.ask(to, _size, (_ones(3),), {}, 20.0) == 3
        monkeypatch.setattr(other.buffers, "take", take)
        assert one.ask(to, _size, (large,), {}, 20.0) == 8 * _MIB
        until(lambda: not to.conn.assemblies)  # what was refused may still be on its way
        del refused


def test_a_result_without_memory_for_it_fails_the_call_and_not_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with agents(2, lane=False) as (one, other):
        to = one.peer(other.name)
        take = one.buffers.take
        monkeypatch.setattr(one.buffers, "take", _no_memory)
        with pytest.raises(LimitError, match="the result of the call of _ones on 'a1', of 8 MiB") as refused:
            one.ask(to, _ones, (8 * _MIB,), {}, 20.0)
        assert refused.value.maybe_executed is True
        monkeypatch.setattr(one.buffers, "take", take)
        assert one.ask(to, _ones, (8 * _MIB,), {}, 20.0).numel() == 8 * _MIB
        until(lambda: not to.conn.assemblies)  # what was refused may still be on its way
        del refused


def _length(data: bytes) -> int:
    return len(data)


def _large(size: int) -> bytes:
    return bytes(size)


def _numbers(count: int) -> list[int]:
    return list(range(count))  # nothing in it is large enough to travel beside the message


def _no_large_bytes(given: Any = b"") -> bytes:
    if len(memoryview(given)) > 40_000:
        raise MemoryError
    return bytes(given)


def test_a_small_message_without_memory_for_it_fails_its_call_and_not_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with agents(2) as (one, other):
        to = one.peer(other.name)
        assert one.ask(to, _length, (b"",), {}, 20.0) == 0
        conn = to.conn
        with monkeypatch.context() as patch:
            patch.setattr(frames, "bytes", _no_large_bytes, raising=False)
            patch.setattr(integrity, "bytes", _no_large_bytes, raising=False)
            for _ in range(2):
                with pytest.raises(
                    LimitError, match=r"its arguments, of 50\d\d\d bytes, in worker 'a1'"
                ) as no:
                    one.ask(to, _length, (b"x" * 50_000,), {}, 20.0)
                assert no.value.maybe_executed is False
                with pytest.raises(
                    LimitError, match=r"the result of the call of _large on 'a1', of 50\d\d\d bytes"
                ) as no:
                    one.ask(to, _large, (50_000,), {}, 20.0)
                assert no.value.maybe_executed is True
            assert one.ask(to, _length, (b"x" * 3,), {}, 20.0) == 3
        assert one.ask(to, _length, (b"x" * 50_000,), {}, 20.0) == 50_000
        assert to.conn is conn
        del no


def test_a_small_message_with_a_header_and_shared_memory_gives_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with agents(2) as (one, other):
        to = one.peer(other.name)
        given = (_ones(8 * _MIB), b"x" * 50_000)
        assert one.ask(to, len, (given,), {}, 20.0) == 2
        with monkeypatch.context() as patch:
            patch.setattr(frames, "bytes", _no_large_bytes, raising=False)
            for _ in range(8):
                with pytest.raises(LimitError, match=r"its arguments, of 50\d\d\d bytes, in worker"):
                    one.ask(to, len, (given,), {}, 20.0)
        if to.conn.lane.lender is None:
            pytest.skip("these connections have no shared memory")
        assert one.ask(to, len, (given,), {}, 20.0) == 2
        assert to.conn.lane.lender.stats().segments <= 4  # what was refused has come back


@pytest.mark.prints("the connection to a[01] was closed: no memory to read a message of")
def test_a_connection_that_ends_for_want_of_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    untouched, full = connection.untouched, threading.Event()

    def allocate(size: int) -> Any:
        if full.is_set():
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return untouched(size)

    monkeypatch.setattr(connection, "untouched", allocate)
    with agents(2) as (one, other):
        to = one.peer(other.name)
        assert one.ask(to, _length, (b"",), {}, 20.0) == 0
        full.set()
        with pytest.raises(PeerDiedError, match=r"no memory to read a message of \d{6} bytes: "):
            one.ask(to, _numbers, (200_000,), {}, 20.0)


@pytest.mark.prints("an error cannot be sent to 'a0': MemoryError")
def test_an_error_that_cannot_be_packed_still_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(2) as (one, other):
        to = one.peer(other.name)
        monkeypatch.setattr(exceptions, "dump", _no_memory)
        with pytest.raises(LimitError, match="worker 'a1' cannot send the outcome of the call") as raised:
            one.ask(to, int, ("x",), {}, 20.0)
        assert raised.value.maybe_executed is True
        with pytest.raises(LimitError, match="worker 'a0' cannot send the outcome of the call"):
            one.ask(one.self_peer, int, ("x",), {}, 20.0)
        del raised


def test_shared_memory_that_cannot_be_mapped_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = shared_memory.reserve

    def refuse(*given: Any, **named: Any) -> Any:
        if threading.current_thread() is threading.main_thread():  # of the worker that sends
            return reserve(*given, **named)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with agents(2) as (one, other):
        to = one.peer(other.name)
        if not one.ask(to, _size, (_ones(8 * _MIB),), {}, 20.0) or to.conn.lane.lender is None:
            pytest.skip("these connections have no shared memory")
        monkeypatch.setattr(shared_memory, "reserve", refuse)
        for _ in range(2):
            with pytest.raises(LimitError, match="MiB of shared memory cannot be mapped here"):
                one.ask(to, _size, (_ones(64 * _MIB),), {}, 20.0)
        monkeypatch.setattr(shared_memory, "reserve", reserve)
        assert one.ask(to, _size, (_ones(64 * _MIB),), {}, 20.0) == 64 * _MIB


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits = {resource.RLIMIT_NPROC: 4321, resource.RLIMIT_AS: 7 << 30}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (set_limits[which], set_limits[which]))
    for text in (_limits.explain_threads(), _limits.explain_fork(BlockingIOError(errno.EAGAIN, "try again"))):
        assert "RLIMIT_NPROC (ulimit -u) is 4321" in text
        assert "RLIMIT_AS (ulimit -v) is 7168 MiB" in text
    assert "RLIMIT_AS (ulimit -v) is 7168 MiB, of which " in _limits.explain_memory()


def test_threads_that_cannot_be_had_are_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_time, "start", refuse)
    clock = Clock()
    with pytest.raises(LimitError, match="cannot start another thread"):
        clock.start()
    clock.close()  # there is nothing to wait for
    pool = Pool(clock=clock, execute=print, refuse=print, max_threads=8, starvation_s=1.0)
    with pytest.raises(LimitError, match="cannot start another thread"):
        pool.start(3)
    assert pool.close() == []
