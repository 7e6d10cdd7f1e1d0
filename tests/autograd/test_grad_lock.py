"""``Borrowed``: exclusive use of the ``.grad`` of leaves."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from actorrpc.autograd.graph import Borrowed
from actorrpc.errors import RpcTimeoutError
from tests.agent.together import in_threads


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def test_borrowed_leaves_have_no_grad_and_get_it_back() -> None:
    a, b = leaf(), leaf()
    kept = a.grad = torch.full((2,), 7.0)
    with Borrowed([a, b]):
        assert a.grad is None
        assert b.grad is None
        a.grad = b.grad = torch.zeros(2)
    with pytest.raises(ValueError, match="mine"), Borrowed([a]):
        raise ValueError("mine")
    assert a.grad is kept
    assert b.grad is None


def test_a_second_borrower_of_a_leaf_waits_or_times_out() -> None:
    a, b, c = leaf(), leaf(), leaf()
    taken, release, order = threading.Event(), threading.Event(), []

    def first() -> None:
        with Borrowed([a, b]):
            taken.set()
            release.wait()
            order.append("first")

    def second() -> None:
        with Borrowed([b, c]):
            order.append("second")

    threads = [threading.Thread(target=first)]
    threads[0].start()
    taken.wait()
    threads.append(threading.Thread(target=second))
    threads[1].start()
    with Borrowed([c]):  # a waiting borrower does not hold any of its leaves yet
        order.append("other")
    with pytest.raises(RpcTimeoutError, match="did not end in time"), Borrowed([b], time.monotonic()):
        pass
    release.set()
    for thread in threads:
        thread.join()
    assert order == ["other", "first", "second"]


def test_borrowing_in_opposite_orders_does_not_deadlock() -> None:
    leaves = [leaf() for _ in range(6)]
    start = threading.Barrier(4)
    counts = dict.fromkeys(range(6), 0)

    def use(seed: int) -> None:
        start.wait()
        for n in range(300):
            mine = [(seed + k * (n % 5 + 1)) % 6 for k in range(3)]
            with Borrowed([leaves[k] for k in dict.fromkeys(mine)]):
                for k in set(mine):
                    counts[k] += 1  # unprotected: exclusive use of the leaf protects the count

    in_threads(use, [(seed,) for seed in range(4)])
    assert sum(counts.values()) == sum(
        len({(seed + k * (n % 5 + 1)) % 6 for k in range(3)}) for seed in range(4) for n in range(300)
    )
