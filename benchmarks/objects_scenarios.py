"""The scenarios with objects: put them, let actors read them, pass them on, and measure the memory of the host.

As ``actors_scenarios.py``: a session is the driver of one peer's cluster, and the same code runs on all peers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import actors_scenarios as actors
from benchmarks.actors_peers import peer_named
from benchmarks.actors_scenarios import Context
from benchmarks.actors_tiny import Tiny

__all__ = ["SCENARIOS", "Context", "Reader"]

GIVEN_BACK_S = 3.0  # after this time, unused memory was returned to the system


def _made(size: int, kind: str) -> Any:
    tensor = torch.full((size,), 1, dtype=torch.uint8)
    return tensor.numpy() if kind == "numpy" else tensor


def _check(value: Any) -> None:
    if int(value[0]) + int(value[-1]) != 2:
        raise AssertionError("this is not what was put")


def _read(value: Any) -> None:
    """Read all of a value. Word by word: to sum bytes, torch makes a copy that is eight times as large."""
    words = torch.int64 if isinstance(value, torch.Tensor) else np.int64
    value.view(words).sum()


class Reader(Tiny):
    """Makes values, takes them, gets references to them, and keeps the values until :meth:`drop`."""

    def __init__(self, peer: str) -> None:
        self.peer = peer_named(peer)
        self.held: list[Any] = []
        self.own: dict[tuple[int, str], Any] = {}

    def give(self, size: int, kind: str) -> Any:
        """Return a value of ``size`` bytes, and keep it."""
        if (size, kind) not in self.own:
            self.own = {(size, kind): _made(size, kind)}
        return self.own[size, kind]

    def take(self, value: Any) -> int:
        """Take a value, and keep it."""
        _check(value)
        self.held.append(value)
        return 1

    def read(self, refs: Sequence[Any], touch: bool) -> float:
        """Get the values of the references, and keep them; return the seconds that this took.

        Args:
            touch: also read the whole values.
        """
        begin = time.perf_counter()
        values = self.peer.get_all(list(refs))
        if touch:
            for value in values:
                _read(value)
        seconds = time.perf_counter() - begin
        _check(values[0])
        _check(values[-1])
        self.held += values
        return seconds

    def count(self, refs: Sequence[Any]) -> int:
        """Get small values; return their number."""
        return len(self.peer.get_all(list(refs)))

    def drop(self) -> None:
        """Drop all values."""
        self.held.clear()


def _memory() -> float:
    """Return the bytes of the host's memory that processes and shared memory occupy."""
    with open("/proc/meminfo", encoding="ascii") as file:
        rows = {line.partition(":")[0]: int(line.split()[1]) for line in file}
    return float(rows["AnonPages"] + rows["Shmem"]) * 1024


def make(context: Context, *, count: int) -> dict[str, float]:
    """Make readers, if they do not exist yet, and wait until they answer."""
    peer, found = context.peer, context.actors.setdefault("reader", [])
    while len(found) < count:
        found.append(peer.make(Reader, context.name))
    peer.get_all([peer.method(reader, "ping")() for reader in found])
    return {}


def _drop(context: Context) -> None:
    peer = context.peer
    peer.get_all([peer.method(reader, "drop")() for reader in context.actors["reader"]])


def memcpy(context: Context, *, size: int, repeats: int) -> dict[str, float]:
    """Copy ``size`` bytes in this process, into memory that was used before; GB/s."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begin)
    return {"rate": size / statistics.median(times) / 1e9}


def put(
    context: Context, *, size: int, kind: str, repeats: int, pause: float = GIVEN_BACK_S
) -> dict[str, float]:
    """Put a value into fresh memory, then repeatedly into the memory of the value before; GB/s."""
    package, value = context.peer.package, _made(size, kind)
    time.sleep(pause)
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        ref = package.put(value)
        times.append(time.perf_counter() - begin)
        del ref
    return {"fresh": size / times[0] / 1e9, "rate": size / statistics.median(times[1:]) / 1e9}


def get(
    context: Context, *, size: int, kind: str, readers: int, touch: bool, pause: float = GIVEN_BACK_S
) -> dict[str, float]:
    """Let actors get one value at the same time. Returns the time until all have it, the time of one get, and the memory."""
    peer, value = context.peer, _made(size, kind)
    actors_ = context.actors["reader"][:readers]
    reads = [peer.method(reader, "read") for reader in actors_]
    time.sleep(pause)
    before = _memory()
    ref = peer.package.put(value)
    begin = time.perf_counter()
    first = peer.get(reads[0]([ref], touch))
    took = [first, *peer.get_all([read([ref], touch) for read in reads[1:]])]
    seconds = time.perf_counter() - begin
    memory = _memory() - before
    _drop(context)
    return {
        "time": seconds * 1e3,
        "next": statistics.median(took[1:] or took) * 1e3,
        "memory": memory / size,
    }


def hand_over(context: Context, *, size: int, kind: str, repeats: int) -> dict[str, float]:
    """Let one actor make values, and another actor take them; the driver passes references. GB/s."""
    peer = context.peer
    first, second = context.actors["reader"][:2]
    give, take, drop = peer.method(first, "give"), peer.method(second, "take"), peer.method(second, "drop")
    times, alone = [], []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        made = give(size, kind)
        peer.package.wait([made], fetch_local=False)
        is_made = time.perf_counter()
        peer.get(take(made))
        end = time.perf_counter()
        times.append(end - begin)
        alone.append(end - is_made)
        del made
        peer.get(drop())
    return {
        "rate": size / statistics.median(times[1:]) / 1e9,
        "handed": statistics.median(alone[1:]) * 1e3,
    }


def pieces(context: Context, *, size: int, kind: str, count: int) -> dict[str, float]:
    """Put many values of one size, and have an actor get all of them."""
    peer, value = context.peer, _made(size, kind)
    begin = time.perf_counter()
    refs = [peer.package.put(value) for _ in range(count)]
    made = time.perf_counter()
    peer.get(peer.method(context.actors["reader"][0], "read")(refs, False))
    read = time.perf_counter()
    _drop(context)
    return {"put_all": (made - begin) * 1e3, "get_all": (read - made) * 1e3}


def small(context: Context, *, count: int) -> dict[str, float]:
    """Put many small values, get them here, and have an actor get a tenth of them."""
    peer = context.peer
    begin = time.perf_counter()
    refs = [peer.package.put((number, "small")) for number in range(count)]
    made = time.perf_counter()
    values = peer.get_all(refs)
    got = time.perf_counter()
    if values[-1] != (count - 1, "small"):
        raise AssertionError("this is not what was put")
    count_there = peer.method(context.actors["reader"][0], "count")
    part = refs[: count // 10]
    if peer.get(count_there(part)) != len(part):
        raise AssertionError("not all have come")
    sent = time.perf_counter()
    return {
        "put_all": (made - begin) * 1e3,
        "get_all": (got - made) * 1e3,
        "there": (sent - got) / len(part) * 1e6,
    }


def weights(
    context: Context, *, size: int, kind: str, readers: int, pause: float = GIVEN_BACK_S
) -> dict[str, float]:
    """Give weights to actors that keep them: put them once, and call each with the reference."""
    peer, value = context.peer, _made(size, kind)
    takes = [peer.method(reader, "take") for reader in context.actors["reader"][:readers]]
    time.sleep(pause)
    before = _memory()
    begin = time.perf_counter()
    ref = peer.package.put(value)
    peer.get_all([take(ref) for take in takes])
    seconds = time.perf_counter() - begin
    memory = _memory() - before
    _drop(context)
    return {"time": seconds * 1e3, "memory": memory / size}


SCENARIOS: dict[str, Callable[..., dict[str, float]]] = {
    **{name: actors.SCENARIOS[name] for name in ("start", "shutdown", "end", "place")},
    **{
        function.__name__: function
        for function in (make, memcpy, put, get, hand_over, pieces, small, weights)
    },
}
