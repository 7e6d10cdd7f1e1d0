"""Concurrent calls: callbacks, nesting, small thread pools, large tensors, back-pressure."""

from __future__ import annotations

import operator
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from actorrpc import rpc
from actorrpc.errors import BackpressureError, CancelledError, DeadlockError, RpcError
from actorrpc.testing import InProcessCluster
from tests.migration.rows import row
from tests.ranks import rpc_group

_gates: dict[str, threading.Event] = {}
_entered: dict[str, threading.Semaphore] = {}
_table = threading.Lock()


def _gate(name: str) -> threading.Event:
    with _table:
        return _gates.setdefault(name, threading.Event())


def _count(name: str) -> threading.Semaphore:
    with _table:
        return _entered.setdefault(name, threading.Semaphore(0))


def _hold(name: str, *ballast: Any) -> str:
    """Block in a plain Event, of which the pool is not notified."""
    _count(name).release()
    _gate(name).wait()
    return name


def _open(name: str) -> None:
    _gate(name).set()


def _await_entered(name: str, times: int) -> None:
    for _ in range(times):
        _count(name).acquire()


def _bounce(depth: int, here: str, there: str) -> int:
    if depth == 0:
        return 0
    return 1 + rpc.rpc_sync(there, _bounce, (depth - 1, there, here))


def _forward(to: str, function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def _callbacks() -> None:
    done = threading.Event()
    got: list[Any] = []

    def calls(future: Any) -> None:
        got.append(future.value())
        got.append(rpc.rpc_sync("worker1", operator.add, (future.value(), 1)))
        done.set()

    rpc.rpc_async("worker1", operator.add, (1, 2)).add_done_callback(calls)
    done.wait()
    assert got == [3, 4]

    # A callback may wait for a call whose answer arrived in the same batch.
    for i in range(20):
        finished = threading.Event()
        first, second = [rpc.rpc_async("worker1", _hold, (f"pair{i}",)) for _ in range(2)]
        first.add_done_callback(lambda _, s=second, f=finished: (s.wait(), f.set()))  # type: ignore[misc]
        rpc.rpc_sync("worker1", _open, (f"pair{i}",))
        finished.wait()

    # A callback may wait for an action of the thread that waited for the future.
    released = threading.Event()
    after = threading.Event()
    future = rpc.rpc_async("worker1", _hold, ("next",))  # does not end before the callback is added
    future.add_done_callback(lambda _: (released.wait(), after.set()))
    rpc.rpc_sync("worker1", _open, ("next",))
    assert future.wait() == "next"
    released.set()
    after.wait()

    chained = rpc.rpc_async("worker1", operator.add, (1, 1)).then(
        lambda f: rpc.rpc_sync("worker1", operator.mul, (f.value(), 10))
    )
    assert chained.wait() == 20


def _all_threads_blocked() -> None:
    """More calls than the pool has threads block in user code. Cancellations and further calls are still served."""
    futures = [rpc.rpc_async("worker1", _hold, ("wall",)) for _ in range(24)]
    rpc.rpc_sync("worker1", _await_entered, ("wall", 24))
    assert rpc.rpc_sync("worker1", operator.add, (1, 1)) == 2
    # Cancellations are handled.
    assert futures[0].cancel()
    with pytest.raises(CancelledError):
        futures[0].wait()
    rpc.rpc_sync("worker1", _open, ("wall",))
    assert [f.wait() for f in futures[1:]] == ["wall"] * 23


def _scenarios(rank: int, world_size: int) -> None:
    if rank == 0:
        _callbacks()
        _all_threads_blocked()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_callbacks_can_wait_for_calls_and_calls_run_although_all_threads_are_blocked(transport: str) -> None:
    rpc_group(_scenarios, 2, options={"transport": transport})


def _exchange(rank: int, world_size: int) -> None:
    there = f"worker{1 - rank}"
    large = torch.full((6 << 20,), float(rank + 1))  # 24 MiB
    assert rpc.rpc_sync(there, operator.add, (1, 1)) == 2

    def work() -> None:
        futures = [rpc.rpc_async(there, _double, (large,)) for _ in range(3)]
        assert all(torch.equal(future.wait(), large * 2) for future in futures)

    with ThreadPoolExecutor() as pool:
        workers = [pool.submit(work) for _ in range(2)]
        while not all(each.done() for each in workers):
            assert (
                rpc.rpc_sync(there, operator.add, (rank, 1)) == rank + 1
            )  # small calls are not blocked meanwhile
            threading.Event().wait(0.01)
    for each in workers:
        each.result()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"lane": False}, {"transport": "tcp"}, {}])
def test_large_tensors_sent_in_both_directions_at_once_do_not_deadlock(options: dict[str, Any]) -> None:
    rpc_group(_exchange, 2, options=options)


def _small_pool(rank: int, world_size: int, max_threads: int) -> None:
    if rank:
        return
    # As deep as the pools allow: each level but the last blocks a thread, and one thread always reads.
    deepest = 2 * (max_threads - 1)
    assert rpc.rpc_sync("worker1", _bounce, (deepest - 1, "worker1", "worker0")) == deepest - 1
    with pytest.raises(
        DeadlockError, match=r"^'worker[01]' did not execute the call: all \d threads are blocked"
    ) as caught:
        rpc.rpc_sync("worker1", _bounce, (200, "worker1", "worker0"))
    assert isinstance(caught.value, RpcError)
    # Calls to this worker: each level blocks a thread of the same pool.
    with pytest.raises(DeadlockError):
        rpc.rpc_sync("worker0", _bounce, (200, "worker0", "worker0"))
    futures = [rpc.rpc_async("worker1", operator.add, (i, 1)) for i in range(200)]
    assert [f.wait() for f in futures] == list(range(1, 201))


@pytest.mark.slow
@pytest.mark.parametrize("max_threads", [2, 4])
def test_nested_calls_deeper_than_the_thread_pools_raise_deadlock_error(max_threads: int) -> None:
    rpc_group(_small_pool, 2, max_threads, options={"max_threads": max_threads})


def _send_from_inside(ballast: torch.Tensor) -> None:
    rpc.rpc_async("worker1", operator.mul, (ballast, 1), timeout=0)


@row("a slow consumer", "from-torch-rpc")
def test_a_nested_call_does_not_wait_for_a_full_window() -> None:
    with InProcessCluster(2, clock="real", window=1 << 20, max_threads=2):
        ballast = torch.zeros(64 << 10)  # a quarter of the window, which limits calls that have not started
        held = [rpc.rpc_async("worker1", _hold, ("window", ballast), timeout=0) for _ in range(5)]
        with pytest.raises(BackpressureError, match="ACTORRPC_WINDOW") as refused:
            rpc.rpc_async("worker1", operator.mul, (ballast, 1), timeout=0.05)
        assert refused.value.maybe_executed is False
        rpc.rpc_sync("worker0", _send_from_inside, (ballast,))
        _open("window")
        assert [each.wait() for each in held] == ["window"] * 5
        del _gates["window"]


def _busy(rank: int, world_size: int) -> None:
    """Make nested calls through all other workers, from several threads."""
    names = [f"worker{i}" for i in range(world_size)]

    def work(seed: int) -> None:
        for i in range(40):
            to, via = names[(rank + i + seed) % world_size], names[(rank + 2 * i) % world_size]
            assert rpc.rpc_sync(via, _forward, (to, operator.add, i, seed)) == i + seed

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, range(3)))  # raises the errors of the threads


def test_four_workers_call_each_other_from_several_threads() -> None:
    rpc_group(_busy, 4)
