"""Concurrent calls: threads, nesting, callbacks, asyncio, small thread pools, large tensors, back-pressure."""

from __future__ import annotations

import asyncio
import operator
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from actorrpc import rpc
from actorrpc._stacks import top_frame
from actorrpc.agent import threads
from actorrpc.errors import BackpressureError, CancelledError, DeadlockError, RpcError
from tests.actors.e2e.kit import until
from tests.agent.together import in_threads
from tests.ranks import rpc_group

# -- functions called on workers -----------------------------------------------------------------

_gates: dict[str, threading.Event] = {}
_entered: dict[str, threading.Semaphore] = {}
_runs: list[str] = []
_table = threading.Lock()


def _gate(name: str) -> threading.Event:
    with _table:
        return _gates.setdefault(name, threading.Event())


def _count(name: str) -> threading.Semaphore:
    with _table:
        return _entered.setdefault(name, threading.Semaphore(0))


def _hold(name: str, *ballast: Any) -> str:
    """Block in a plain Event, of which the pool is not notified."""
    _runs.append(name)
    _count(name).release()
    _gate(name).wait()
    return name


def _open(name: str) -> None:
    _gate(name).set()


def _await_entered(name: str, times: int) -> None:
    for _ in range(times):
        _count(name).acquire()


def _how_often(name: str) -> int:
    return _runs.count(name)


def _bounce(depth: int, here: str, there: str) -> int:
    if depth == 0:
        return 0
    return 1 + rpc.rpc_sync(there, _bounce, (depth - 1, there, here))


def _forward(to: str, function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def _in(thread: threading.Thread, function: str) -> bool:
    """Return whether a thread is in a function of this name."""
    frame = top_frame(thread.ident)
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False


# -- threads, callbacks, nesting -----------------------------------------------------------------


def _many_threads() -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for i in range(150):
                got = rpc.rpc_sync("worker1", operator.add, (number * 1000, i))
                if got != number * 1000 + i:
                    wrong.append(got)
            futures = [rpc.rpc_async("worker1", operator.mul, (number, i)) for i in range(100)]
            wrong.extend(x for i, f in enumerate(futures) if (x := f.wait()) != number * i)
        except BaseException as error:
            wrong.append(error)

    in_threads(work, [(n,) for n in range(16)])
    assert not wrong, wrong[:5]


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


def _from_asyncio() -> None:
    async def main() -> list[int]:
        one = await rpc.rpc_async("worker1", operator.add, (1, 1))
        many = await asyncio.gather(*(_add(i) for i in range(200)))
        with pytest.raises(ZeroDivisionError):
            await rpc.rpc_async("worker1", operator.truediv, (1, 0))
        return [one, *many]

    async def _add(i: int) -> int:
        result: int = await rpc.rpc_async("worker1", operator.add, (i, 1))
        return result

    assert asyncio.run(main()) == [2, *range(1, 201)]


def _all_threads_blocked() -> None:
    """More calls than the pool has threads block in user code. Control frames and further calls are still served."""
    futures = [rpc.rpc_async("worker1", _hold, ("wall",)) for _ in range(24)]
    rpc.rpc_sync("worker1", _await_entered, ("wall", 24))
    assert rpc.rpc_sync("worker1", operator.add, (1, 1)) == 2
    # Heartbeats are answered (sent every 0.1 s here to a silent peer).
    conn = rpc.api.group().agent.peer("worker1").conn  # type: ignore[attr-defined]
    for _ in range(3):
        heard = conn.last_received
        until(lambda heard=heard: conn.last_received != heard)
    # Cancellations are handled.
    assert futures[0].cancel()
    with pytest.raises(CancelledError):
        futures[0].wait()
    rpc.rpc_sync("worker1", _open, ("wall",))
    assert [f.wait() for f in futures[1:]] == ["wall"] * 23


def _cancel_running() -> None:
    """Nested calls of a cancelled call are cancelled; it can make no further calls."""
    future = rpc.rpc_async("worker1", _record_nested, ("chain",))
    _count("chain").acquire()  # the call runs on worker1, and its nested call here
    assert future.cancel()
    rpc.rpc_sync("worker1", _await_entered, ("chain caught", 1))
    assert rpc.rpc_sync("worker1", _caught) == ["CancelledError", "CancelledError"]
    _open("chain")
    assert not future.cancel()


def _record_nested(name: str) -> None:
    for to in ("worker0", "worker0"):
        try:
            rpc.rpc_sync(to, _hold, (name,))
        except BaseException as error:
            _caught_errors.append(type(error).__name__)
    _count("chain caught").release()


_caught_errors: list[str] = []


def _caught() -> list[str]:
    return _caught_errors


def _scenarios(rank: int, world_size: int) -> None:
    if rank == 0:
        _many_threads()
        _callbacks()
        _from_asyncio()
        _all_threads_blocked()
        _cancel_running()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_calls_from_threads_callbacks_and_asyncio_return_and_blocked_calls_can_be_cancelled(
    transport: str,
) -> None:
    rpc_group(_scenarios, 2, options={"transport": transport, "heartbeat": 0.1})


# -- large tensors in both directions --------------------------------------------------------------


def _exchange(rank: int, world_size: int) -> None:
    there = f"worker{1 - rank}"
    large = torch.full((6 << 20,), float(rank + 1))  # 24 MiB
    assert rpc.rpc_sync(there, operator.add, (1, 1)) == 2
    wrong: list[object] = []

    def work() -> None:
        try:
            futures = [rpc.rpc_async(there, _double, (large,)) for _ in range(3)]
            for future in futures:
                value = future.wait()
                if not torch.equal(value, large * 2):
                    wrong.append(value)
        except BaseException as error:
            wrong.append(error)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for each in workers:
        each.start()
    while any(each.is_alive() for each in workers):
        if rpc.rpc_sync(there, operator.add, (rank, 1)) != rank + 1:  # small calls are not blocked meanwhile
            wrong.append("small")
        workers[0].join(0.01)
        workers[1].join(0.01)
    assert not wrong, wrong[:3]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"lane": False}, {"transport": "tcp"}, {}])
def test_large_tensors_sent_in_both_directions_at_once_do_not_deadlock(options: dict[str, Any]) -> None:
    rpc_group(_exchange, 2, options=options)


# -- small pools -----------------------------------------------------------------------------------


def _small_pool(rank: int, world_size: int, max_threads: int) -> None:
    threads._STUCK_S = 0.5  # type: ignore[misc]
    if rank:
        return
    # As deep as the pools allow: each level but the last blocks a thread, and one thread always reads.
    deepest = 2 * (max_threads - 1)
    assert rpc.rpc_sync("worker1", _bounce, (deepest - 1, "worker1", "worker0")) == deepest - 1
    for _ in range(2):
        with pytest.raises(
            DeadlockError, match=r"^'worker[01]' did not execute the call: all \d threads are blocked"
        ) as caught:
            rpc.rpc_sync("worker1", _bounce, (200, "worker1", "worker0"))
        assert isinstance(caught.value, RpcError)
        # Calls work again afterwards.
        assert [rpc.rpc_sync("worker1", operator.add, (i, 1)) for i in range(20)] == list(range(1, 21))
    # Calls to this worker: each level blocks a thread of the same pool.
    with pytest.raises(DeadlockError):
        rpc.rpc_sync("worker0", _bounce, (200, "worker0", "worker0"))
    futures = [rpc.rpc_async("worker1", operator.add, (i, 1)) for i in range(200)]
    assert [f.wait() for f in futures] == list(range(1, 201))


@pytest.mark.slow
@pytest.mark.parametrize("max_threads", [2, 3, 4])
def test_nested_calls_deeper_than_the_thread_pools_raise_deadlock_error(max_threads: int) -> None:
    rpc_group(_small_pool, 2, max_threads, options={"max_threads": max_threads})


def _fifo_gate(path: str, name: str) -> None:
    """Open a gate when the other end of a FIFO is opened and closed, because no thread of the pool is free."""
    with open(path, "rb") as file:
        file.read()
    _open(name)


def _full_pool(rank: int, world_size: int, directory: str) -> None:
    """The only thread for calls of worker1 is blocked."""
    threads._STUCK_S = 1e9  # type: ignore[misc]
    fifo = os.path.join(directory, "gate")
    if rank == 1:
        _fifo_gate(fifo, "full")
        return
    if rank:
        return
    agent = rpc.api.group().agent  # type: ignore[attr-defined]
    first = rpc.rpc_async("worker1", _hold, ("full",))
    peer = agent.peer("worker1")
    # Calls that are cancelled, or time out, in the queue of worker1 never run.
    cancelled = [rpc.rpc_async("worker1", _hold, ("cancelled",)) for _ in range(5)]
    for each in cancelled:
        assert each.cancel()
    until(lambda: len(peer.pending) == 1)
    late = rpc.rpc_async("worker1", _hold, ("late",), timeout=0.05)
    with pytest.raises(TimeoutError, match="timed out") as caught:
        late.wait()
    assert caught.value.maybe_executed  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        rpc.rpc_sync("worker1", _hold, ("late",), timeout=0.05)

    # Back-pressure: the window is 1 MiB, and each call takes a quarter of it.
    ballast = torch.zeros(64 << 10)
    held = [rpc.rpc_async("worker1", operator.mul, (ballast, 1), timeout=0) for _ in range(4)]
    assert peer.window.full
    with pytest.raises(BackpressureError, match="ACTORRPC_WINDOW") as full:
        rpc.rpc_async("worker1", operator.mul, (ballast, 1), timeout=0.1)
    assert full.value.maybe_executed is False
    with pytest.raises(BackpressureError):
        rpc.rpc_sync("worker1", operator.mul, (ballast, 1), timeout=0.1)
    # The last admitted call may exceed the limit slightly.
    assert peer.window.charged <= peer.window.limit + ballast.nbytes // 2
    # Other workers are not affected, and a nested call never waits for the window.
    assert torch.equal(rpc.rpc_sync("worker2", operator.mul, (ballast, 1)), ballast)
    rpc.rpc_sync("worker0", _send_from_inside, (ballast,))
    # A caller without a time-out waits until there is room.
    waiting = threading.Thread(
        target=lambda: held.append(rpc.rpc_async("worker1", operator.mul, (ballast, 1), timeout=0))
    )
    waiting.start()
    until(lambda: _in(waiting, "wait_for_room"))
    assert len(held) == 4
    with open(fifo, "wb"):
        pass
    assert first.wait() == "full"
    waiting.join()
    for future in held:
        assert torch.equal(future.wait(), ballast)
    until(lambda: not peer.window.charged)
    assert rpc.rpc_sync("worker1", _how_often, ("cancelled",)) == 0
    assert rpc.rpc_sync("worker1", _how_often, ("late",)) == 0


def _send_from_inside(ballast: torch.Tensor) -> None:
    rpc.rpc_async("worker1", operator.mul, (ballast, 1), timeout=0)


@pytest.mark.slow
@pytest.mark.parametrize("lane", [True, False])
def test_a_full_send_window_blocks_callers_and_queued_calls_can_be_cancelled(
    tmp_path: Path, lane: bool
) -> None:
    os.mkfifo(tmp_path / "gate")
    options = {"max_threads": 2, "window": 1 << 20, "lane": lane}
    rpc_group(_full_pool, 3, str(tmp_path), options=options)


def _busy(rank: int, world_size: int) -> None:
    """Make nested calls through all other workers, from several threads."""
    names = [f"worker{i}" for i in range(world_size)]
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            for i in range(40):
                to, via = names[(rank + i + seed) % world_size], names[(rank + 2 * i) % world_size]
                if rpc.rpc_sync(via, _forward, (to, operator.add, i, seed)) != i + seed:
                    wrong.append(i)
        except BaseException as error:
            wrong.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    begun = time.monotonic()
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert not wrong, (wrong[:3], time.monotonic() - begun)


def test_four_workers_call_each_other_from_several_threads() -> None:
    rpc_group(_busy, 4)
