"""Groups under load: many workers, many calls in flight, slow consumers, many RRefs, too few processors.

Sizes are large if ACTORRPC_NIGHTLY is 1, and small otherwise. The tests assert that every call returns the right answer and that
no resource grows without bound; times are only recorded (`figures.note`).
"""

from __future__ import annotations

import ctypes
import operator
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from actorrpc import rpc
from actorrpc.futures import Future
from tests.actors.e2e.kit import until
from tests.faults.figures import NIGHTLY, Taken, note
from tests.faults.hosts import Signals
from tests.ranks import rpc_group

_LIMIT = 1800 if NIGHTLY else 60
nightly = pytest.mark.limit(_LIMIT)

# 8 threads of the pool, the clock, the main thread, and threads of the test.
_KEPT = 14

_gate: Future[int] = Future()


def _agent() -> Any:
    return rpc.api.group().agent  # type: ignore[attr-defined]


def _taken() -> Taken:
    """Measure this process after temporary threads of the pool have ended."""
    until(lambda: threading.active_count() <= _KEPT)
    return Taken.now()


@rpc.functions.async_execution
def _held(number: int) -> Future[int]:
    """Complete when the gate is opened, without a waiting thread."""
    return _gate.then(lambda gate: number + gate.wait())


def _open_gate() -> None:
    _gate.set_result(1)


def _running() -> int:
    return sum(len(peer.running) for peer in _agent().peers())


def _in_flight(rank: int, world_size: int, calls: int) -> dict[str, Any] | None:
    if rank:
        return None
    begun = time.monotonic()
    futures = [rpc.rpc_async("worker1", _held, (n,), timeout=0) for n in range(calls)]
    until(lambda: rpc.rpc_sync("worker1", _running) >= calls)
    arrived = time.monotonic()
    full = Taken.now()
    for worker in ("worker1", "worker2"):  # the worker and other workers still answer calls
        assert rpc.rpc_sync(worker, operator.add, (1, 1)) == 2
    rpc.rpc_sync("worker1", _open_gate, timeout=0)
    assert all(future.wait() == n + 1 for n, future in enumerate(futures))
    assert not _agent().peer("worker1").pending
    return {"arrived_s": round(arrived - begun, 2), "s": round(time.monotonic() - begun, 2), "full": full}


@nightly
def test_many_calls_in_flight_to_one_worker_end() -> None:
    calls = 100_000 if NIGHTLY else 10_000
    found = rpc_group(_in_flight, 3, calls, timeout=_LIMIT - 10)[0]
    note("calls in flight", {"calls": calls, **found})


def _consume(signals: Signals, data: Any) -> int:
    signals.wait("consume")
    return len(data)


def _slow_consumer(
    rank: int, world_size: int, kind: str, window: int, directory: Path
) -> dict[str, Any] | None:
    if rank:
        return None
    signals = Signals(directory)
    size = 1 << 20
    count = 8 * window // size
    for each in ("worker1", "worker2"):
        rpc.rpc_sync(each, operator.add, (1, 1))
    peer = _agent().peer("worker1")
    data: Any = bytes(size) if kind == "bytes" else torch.zeros(size, dtype=torch.uint8)
    before = Taken.now()
    futures: list[Any] = []
    sender = threading.Thread(
        target=lambda: futures.extend(
            [rpc.rpc_async("worker1", _consume, (signals, data), timeout=0) for _ in range(count)]
        )
    )
    sender.start()
    until(lambda: peer.window.waiting)  # the sender is blocked
    slowed = Taken.now()
    charged = peer.window.charged
    assert charged <= window + 2 * size
    assert len(peer.pending) < count
    # Calls to another worker are not slowed, however much data they send.
    for n in range(500):
        assert rpc.rpc_sync("worker2", operator.add, (n, 1)) == n + 1
    for _ in range(2 * window // size):
        assert rpc.rpc_sync("worker2", len, (data,)) == size
    assert peer.window.waiting
    assert len(peer.pending) < count
    signals.say("consume")
    sender.join()
    assert [each.wait() for each in futures] == [size] * count
    until(lambda: peer.window.charged == 0)
    futures.clear()
    return {
        "sent_mb": count,
        "before": before,
        "slowed": slowed,
        "charged_mb": charged >> 20,
        "after": _taken(),
    }


@pytest.mark.prints("the call of _consume has been blocked for")  # on a slow machine
@nightly
@pytest.mark.parametrize("kind", ["bytes", "tensors", "tensors over TCP"])
def test_a_slow_consumer_blocks_its_sender_and_no_other_calls(kind: str, tmp_path: Path) -> None:
    window = (64 if NIGHTLY else 16) << 20
    options = {"window": window, "max_threads": 8, "transport": "tcp" if "TCP" in kind else "auto"}
    found = rpc_group(_slow_consumer, 3, kind, window, tmp_path, options=options, timeout=_LIMIT - 10)[0]
    note("slow consumer", {"kind": kind, "window_mb": window >> 20, **found})
    # Unread data exists at most twice, packed and in the kernel; never all of the calls' data.
    assert found["slowed"].rss_mb - found["before"].rss_mb < 2.5 * (window >> 20) + 32


class Thing:
    """A value for RRefs, whose instances are counted."""

    living = 0

    def __init__(self, number: int) -> None:
        Thing.living += 1
        self.number = number

    def __del__(self) -> None:
        Thing.living -= 1

    def get(self) -> int:
        return self.number


def _number(rref: rpc.RRef) -> int:
    return int(rref.rpc_sync().get())


def _references() -> tuple[int, dict[str, int], Taken]:
    table = rpc.api.references().table  # type: ignore[attr-defined]
    return Thing.living, table.debug_info(), Taken.now()


def _is_idle() -> bool:
    living, counts, _ = _references()
    return not living and not any(counts.values())


def _make_and_drop(rank: int, world_size: int, total: int) -> dict[str, Any] | None:
    if rank:
        return None
    batch = 1000
    rows: list[tuple[int, Any, Any]] = []
    begun = time.monotonic()
    for done in range(0, total, batch):
        rrefs = [rpc.remote("worker1", Thing, (done + n,)) for n in range(batch)]
        shared = [rpc.rpc_async("worker2", _number, (each,)) for each in rrefs[::100]]
        assert [each.wait() for each in shared] == list(range(done, done + batch, 100))
        del rrefs, shared
        if done + batch in (total // 2, total):
            until(lambda: all(rpc.rpc_sync(f"worker{n}", _is_idle) for n in range(3)))
            rows.append((done + batch, _taken(), rpc.rpc_sync("worker1", _taken)))
    return {"took_s": round(time.monotonic() - begun, 2), "rows": rows}


@nightly
def test_created_and_dropped_rrefs_leave_nothing_behind() -> None:
    total = 1_000_000 if NIGHTLY else 20_000  # the first half fills the tables of recently freed RRefs
    found = rpc_group(_make_and_drop, 3, total, timeout=_LIMIT - 10)[0]
    (some, maker_before, owner_before), (all_of_them, maker_after, owner_after) = found["rows"]
    note(
        "RRefs made and dropped",
        {
            "rrefs": total,
            "took_s": found["took_s"],
            f"maker_after_{some}": maker_before,
            f"maker_after_{all_of_them}": maker_after,
            f"owner_after_{some}": owner_before,
            f"owner_after_{all_of_them}": owner_after,
        },
    )
    for before, after in ((maker_before, maker_after), (owner_before, owner_after)):
        assert after.descriptors <= before.descriptors + 2
        # The tables of recently freed RRefs are full.
        assert after.objects <= before.objects + total // 100
        assert after.rss_mb - before.rss_mb < 16


@contextmanager
def _burners(count: int) -> Iterator[None]:
    """Run busy processes."""
    burning: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            burning.append(subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]))
        yield
    finally:
        for each in burning:
            each.kill()
            each.wait()


def _busy(rank: int, world_size: int, seconds: float) -> dict[str, Any]:
    others = [f"worker{n}" for n in range(world_size) if n != rank]
    calls, slowest = 0, 0.0
    until = time.monotonic() + seconds
    tensor = torch.ones(300_000)
    while time.monotonic() < until:
        begun = time.monotonic()
        futures = [rpc.rpc_async(each, torch.neg, (tensor,)) for each in others]
        assert all(torch.equal(each.wait(), -tensor) for each in futures)
        futures = [rpc.rpc_async(each, operator.add, (calls, 1)) for each in others]
        assert [each.wait() for each in futures] == [calls + 1] * len(others)
        slowest = max(slowest, time.monotonic() - begun)
        calls += 2 * len(others)
    assert all(peer.state == "alive" for peer in _agent().peers())
    return {"calls": calls, "slowest_s": round(slowest, 3)}


def _call_a_busy_worker(rank: int, world_size: int, directory: Path) -> None:
    """Make a first call to a worker that holds the GIL in C code for longer than the handshake time-out."""
    signals = Signals(directory)
    if rank == 0:
        object.__setattr__(_agent().settings, "handshake_timeout", 0.3)
        signals.wait("busy")
        assert rpc.rpc_sync("worker1", operator.add, (1, 1)) == 2
        signals.say("called")
    else:
        signals.say("busy")
        ctypes.PyDLL(None).usleep(900_000)
        signals.wait("called")


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_worker_too_busy_for_a_handshake_is_not_declared_dead(tmp_path: Path, transport: str) -> None:
    rpc_group(_call_a_busy_worker, 2, tmp_path, options={"transport": transport})


@nightly
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_no_worker_is_declared_dead_on_an_oversubscribed_machine(transport: str) -> None:
    minutes = float(os.environ.get("ACTORRPC_SOAK_MINUTES", "10")) / 2
    seconds = 60 * minutes if NIGHTLY else 4.0
    burners = 2 * len(os.sched_getaffinity(0))
    with _burners(burners):
        found = rpc_group(_busy, 4, seconds, options={"transport": transport}, timeout=seconds + 50)
    note(
        "oversubscribed",
        {
            "transport": transport,
            "burners": burners,
            "workers": 4,
            "seconds": seconds,
            "calls": sum(each["calls"] for each in found),
            "slowest_round_s": max(each["slowest_s"] for each in found),
        },
    )
