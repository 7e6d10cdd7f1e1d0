"""The buffer pool: memory is reused only after its last user has released it, and idle memory is freed."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actorrpc.serialization.tensors import TensorSpan
from actorrpc.transport.buffers import (
    SMALL,
    BufferPool,
    copy,
    size_class,
)
from tests.transport.object_stores import Clock, address_of

BIG = 100_000


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    pool = BufferPool(64 << 20)
    yield pool
    pool.close()


def test_a_size_beyond_the_address_space_raises_memory_error(pool: BufferPool) -> None:
    with pytest.raises(MemoryError):
        size_class((1 << 47) + 1)
    for nbytes in (1 << 62, 1 << 47):
        with pytest.raises(MemoryError):
            pool.allocate(nbytes)
    assert pool.stats().lent_bytes == 0
    with pytest.raises(ValueError):
        pool.allocate(-1)


USERS: dict[str, Callable[[memoryview], Any]] = {
    "memoryview": lambda view: view,
    "slice": lambda view: view[10:20],
    "cast": lambda view: view[: BIG // 8 * 8].cast("d")[5:6],
    "read-only": lambda view: view.toreadonly()[1:],
    "memoryview of numpy": lambda view: memoryview(np.frombuffer(view, dtype=np.uint8)[7:9]),
    "numpy": lambda view: np.frombuffer(view, dtype=np.uint8)[3:7],
    "torch": lambda view: torch.frombuffer(view, dtype=torch.uint8)[7:9],
    "torch view": lambda view: torch.frombuffer(view[64:128], dtype=torch.float32).view(4, 4).t()[1:2],
    "torch storage": lambda view: torch.frombuffer(view[64:128], dtype=torch.float32).untyped_storage(),
    "torch over numpy": lambda view: torch.from_numpy(np.asarray(view)),
    "numpy over torch": lambda view: torch.frombuffer(view, dtype=torch.uint8)[5:].numpy()[1:],
    "autograd graph": lambda view: (
        torch.frombuffer(view[:400], dtype=torch.float32).requires_grad_() ** 2
    ).sum(),
    "ctypes": lambda view: (ctypes.c_char * 8).from_buffer(view),
    "dlpack": lambda view: torch.from_dlpack(torch.frombuffer(view, dtype=torch.uint8)[1:]),
}


@pytest.mark.parametrize("kind", USERS)
def test_memory_is_not_reused_while_a_view_array_or_tensor_uses_it(pool: BufferPool, kind: str) -> None:
    view = pool.allocate(BIG)
    address = address_of(view)
    user = USERS[kind](view)
    del view
    gc.collect()
    assert pool.stats().lent_bytes == size_class(BIG)
    other = pool.allocate(BIG)
    assert address_of(other) != address
    del user
    gc.collect()
    again = pool.allocate(BIG)
    assert address_of(again) == address


def test_memory_unused_for_30_seconds_is_freed() -> None:
    clock = Clock()
    pool = BufferPool(1 << 30, clock=clock)
    for nbytes in (256 << 10, 1 << 20, 4 << 20):  # sizes that cannot replace one another
        for _ in range(3):
            pool.allocate(nbytes)
    assert pool.stats().free_bytes == (256 << 10) + (1 << 20) + (4 << 20)
    clock.now += 29
    pool.allocate(1 << 20)
    assert pool.stats().free_bytes == (256 << 10) + (1 << 20) + (4 << 20)
    clock.now += 1
    assert pool.stats().free_bytes == 1 << 20  # it was used again
    clock.now += 1000
    pool.trim()
    assert pool.stats().free_bytes == 0


def test_tensors_stay_valid_after_the_pool_is_closed_or_deleted(pool: BufferPool) -> None:
    tensor = torch.frombuffer(pool.allocate(1 << 20), dtype=torch.float32)
    tensor.fill_(3.0)
    pool.close()
    assert tensor.sum().item() == 3.0 * tensor.numel()
    assert len(pool.allocate(BIG)) == BIG
    other = BufferPool(1 << 20)
    left = torch.frombuffer(other.allocate(1 << 20), dtype=torch.float32)
    left.fill_(4.0)
    del other
    gc.collect()
    assert left.sum().item() == 4.0 * left.numel()


class Witness:
    """An object in an unreachable cycle whose finaliser reads, and may resurrect, its view."""

    def __init__(self, view: memoryview, pool: BufferPool, seen: list[Any], revive: bool) -> None:
        self.view = view
        self.pool = pool
        self.seen = seen
        self.revive = revive
        self.cycle = self

    def __del__(self) -> None:
        taken = [self.pool.allocate(BIG) for _ in range(3)]
        for view in taken:
            view[:] = b"x" * BIG
        self.seen.append(bytes(self.view[:4]))
        if self.revive:
            self.seen.append(self.view)


@pytest.mark.parametrize("revive", [False, True])
def test_memory_is_not_reused_before_the_finalisers_of_an_unreachable_cycle_have_run(
    pool: BufferPool, revive: bool
) -> None:
    view = pool.allocate(BIG)
    view[:4] = b"mine"
    seen: list[Any] = []
    for _ in range(20):  # the collector finalises the objects of a cycle in an unspecified order
        own = pool.allocate(BIG)
        own[:4] = b"mine"
        Witness(own, pool, seen, revive)
        del own
    gc.collect()
    assert [each for each in seen if isinstance(each, bytes)] == [b"mine"] * 20
    revived = [each for each in seen if isinstance(each, memoryview)]
    assert len(revived) == (20 if revive else 0)
    assert all(bytes(each[:4]) == b"mine" for each in revived)
    assert pool.stats().lent_bytes == (21 if revive else 1) * size_class(BIG)
    revived.clear()
    seen.clear()
    gc.collect()
    assert pool.stats().lent_bytes == size_class(BIG)


def test_a_finaliser_that_runs_while_the_pool_is_locked_gets_a_bytearray() -> None:
    clock = Clock()
    pool = BufferPool(64 << 20, clock=clock)
    taken: list[memoryview] = []

    def finaliser() -> None:
        view = pool.allocate(BIG)
        pool.trim()
        pool.stats()
        taken.append(view)

    pool.allocate(BIG)  # returned to the pool by the next allocate(), which reads the clock
    clock.hook = finaliser
    outer = pool.allocate(BIG)
    assert len(outer) == len(taken[0]) == BIG
    assert isinstance(taken[0].obj, bytearray)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(SMALL - 10, 400_000)), max_size=40))
def test_memory_in_use_stays_intact_and_free_memory_stays_bounded(steps: list[tuple[int, int]]) -> None:
    clock = Clock()
    pool = BufferPool(1 << 20, clock=clock)
    live: list[tuple[memoryview, bytes]] = []
    for number, (action, nbytes) in enumerate(steps):
        if action < 5:
            view = pool.allocate(nbytes)
            mark = number.to_bytes(2, "little") * 4
            view[:8] = mark
            view[-8:] = mark
            live.append((view, mark))
            del view
        elif action < 8 and live:
            live.pop(nbytes % len(live))
        elif action == 8:
            clock.now += nbytes % 100
            pool.trim()
        assert all(bytes(view[:8]) == bytes(view[-8:]) == mark for view, mark in live)
        stats = pool.stats()
        large = [view for view, _ in live if len(view) >= SMALL]
        assert sum(map(len, large)) <= stats.lent_bytes
        pool.trim()
        assert pool.stats().free_bytes <= 1 << 20
        del large
    pool.close()


def test_a_large_copy_releases_the_gil() -> None:
    size = 32 << 20
    source, target = bytearray(size), bytearray(size)
    span, address = TensorSpan.of(source), address_of(memoryview(target))
    events: list[str] = []

    def work() -> None:
        events.append("begin")
        copy(address, span)
        events.append("end")

    interval, seen = sys.getswitchinterval(), False
    try:
        sys.setswitchinterval(60.0)  # this thread gets the GIL only if the copy releases it
        for _ in range(100):
            events.clear()
            thread = threading.Thread(target=work)
            thread.start()
            seen = events == ["begin"]
            thread.join(30)
            if seen:
                break
    finally:
        sys.setswitchinterval(interval)
    assert seen
