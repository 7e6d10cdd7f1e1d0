"""The scenarios that a session runs on request of the driver: one function for each measurement with actors.

A session is a process that is the driver of one peer's cluster. The same code runs on all peers: it sees only
``context.peer``. Functions return plain dictionaries of numbers.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.actors_peers import Actorrpc, Peer, peer_named
from benchmarks.actors_tensors import Holder
from benchmarks.actors_tiny import Caller, Kept, Tiny, cpu_seconds, pin_process
from benchmarks.series import percentile

__all__ = ["SCENARIOS", "Context"]

MIB = 1 << 20


@dataclass(slots=True)
class Context:
    """One session."""

    name: str = ""
    peer: Any = None  # a Peer
    actors: dict[str, list[Any]] = field(default_factory=dict)

    def one(self, what: str) -> Any:
        """Return the first actor of a kind that was made before."""
        return self.actors[what][0]


def _private_kib(pid: int) -> float:
    """Return the private memory of a process, which it shares with no other process."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return sum(float(line.split()[1]) for line in file if line.startswith("Private_"))


def _proportional_kib(pid: int) -> float:
    """Return a process's memory, pages that n processes share counted as 1/n."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return next(float(line.split()[1]) for line in file if line.startswith("Pss:"))


def _descendants() -> Iterator[int]:
    """Yield all descendants of this process."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(name))
    pending = [os.getpid()]
    while pending:
        for child in parents.get(pending.pop(), ()):
            pending.append(child)
            yield child


@contextmanager
def _quiet_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# -- the session's life -------------------------------------------------------------------------------


def start(context: Context, *, peer: str, scratch: str) -> dict[str, float]:
    """Import the peer, then start its cluster and its first actor; ``init`` is the time until ``init()`` returns."""
    context.name = peer
    found: Peer = peer_named(peer)
    context.peer = found
    begin = time.perf_counter()
    found.start(scratch)
    started = time.perf_counter()
    context.actors["first"] = [found.make(Tiny)]
    found.get(found.method(context.one("first"), "ping")())
    answered = time.perf_counter()
    return {"init": (started - begin) * 1e3, "first": (answered - begin) * 1e3}


def shutdown(context: Context) -> dict[str, float]:
    """End the cluster."""
    context.actors.clear()
    if context.peer is not None:
        context.peer.stop()
    return {}


def make(context: Context, *, what: str, count: int) -> dict[str, float]:
    """Make actors of a kind, if they are not there yet, and wait until they answer."""
    peer, found = context.peer, context.actors.setdefault(what, [])
    kinds: dict[str, tuple[type, tuple[Any, ...]]] = {
        "tiny": (Tiny, ()),
        "caller": (Caller, (context.name,)),
        "holder": (Holder, ()),
    }
    cls, args = kinds[what]
    while len(found) < count:
        found.append(peer.make(cls, *args))
    peer.get_all([peer.method(actor, "ping")() for actor in found])
    return {}


def end(context: Context, *, what: str) -> dict[str, float]:
    """End the actors of a kind."""
    context.peer.end(context.actors.pop(what, []))
    return {}


def place(context: Context, *, driver: list[int], actors: dict[str, list[int]]) -> dict[str, float]:
    """Pin this process, and the processes of the actors of these kinds."""
    peer = context.peer
    pin_process(driver)
    for what, cpus in actors.items():
        peer.get_all([peer.method(actor, "pin")(cpus) for actor in context.actors[what]])
    return {}


# -- calls ------------------------------------------------------------------------------------------------


def _timed(call: Callable[[], Any], calls: int, used: Callable[[], float]) -> dict[str, float]:
    for _ in range(calls // 5):
        call()
    clock, times = time.perf_counter_ns, []
    with _quiet_collector():
        before = used()
        for _ in range(calls):
            begin = clock()
            call()
            times.append(clock() - begin)
        cpu = used() - before
    times.sort()
    return {
        "p50": percentile(times, 0.5) / 1e3,
        "p99": percentile(times, 0.99) / 1e3,
        "cpu": cpu / calls * 1e6,
    }


def roundtrip(context: Context, *, calls: int) -> dict[str, float]:
    """Time single calls without arguments."""
    peer, actor = context.peer, context.one("tiny")
    get, ping, used = peer.get, peer.method(actor, "ping"), peer.method(actor, "used")
    return _timed(lambda: get(ping()), calls, lambda: cpu_seconds() + get(used()))


def _answer() -> int:
    return 1


def core_roundtrip(context: Context, *, calls: int) -> dict[str, float]:
    """Time the core's ``rpc_sync`` to the worker in which the same actor lives (actorrpc only)."""
    assert isinstance(context.peer, Actorrpc)
    peer, actor = context.peer, context.one("tiny")
    pid = peer.get(actor.pid.remote())
    worker = next(row.worker for row in peer.package.list_actors() if row.pid == pid)
    rpc_sync = peer.package.rpc_sync
    return _timed(
        lambda: rpc_sync(worker, _answer), calls, lambda: cpu_seconds() + rpc_sync(worker, cpu_seconds)
    )


def proxy_roundtrip(context: Context, *, calls: int) -> dict[str, float]:
    """Time the same call written as torch writes it: ``handle.rpc_sync().ping()`` (actorrpc only)."""
    actor = context.one("tiny")
    get, used = context.peer.get, context.peer.method(actor, "used")
    return _timed(lambda: actor.rpc_sync().ping(), calls, lambda: cpu_seconds() + get(used()))


def pipelined(context: Context, *, windows: int, window: int) -> dict[str, float]:
    """Make many calls, then wait for all of them."""
    peer, actor = context.peer, context.one("tiny")
    ping, get_all, get, used = peer.method(actor, "ping"), peer.get_all, peer.get, peer.method(actor, "used")
    get_all([ping() for _ in range(window)])
    with _quiet_collector():
        before, begin = cpu_seconds() + get(used()), time.perf_counter()
        for _ in range(windows):
            get_all([ping() for _ in range(window)])
        seconds = time.perf_counter() - begin
        cpu = cpu_seconds() + get(used()) - before
    calls = windows * window
    return {"rate": calls / seconds, "cpu": cpu / calls * 1e6}


def together(context: Context, *, seconds: float, window: int) -> dict[str, float]:
    """Have each caller call a callee of its own, all at the same time."""
    peer = context.peer
    start_at = time.monotonic() + 0.3
    answers = peer.get_all(
        [
            peer.method(caller, "drive")(callee, start_at, seconds, window)
            for caller, callee in zip(context.actors["caller"], context.actors["tiny"], strict=False)
        ]
    )
    return {"rate": sum(calls / elapsed for calls, elapsed in answers)}


def fan(context: Context, *, members: int, rounds: int) -> dict[str, float]:
    """Call many actors at once and gather their answers, again and again."""
    peer = context.peer
    pings = [peer.method(actor, "ping") for actor in context.actors["tiny"][:members]]
    get_all = peer.get_all

    def everyone() -> None:
        get_all([ping() for ping in pings])

    found = _timed(everyone, rounds, cpu_seconds)
    return {"p50": found["p50"], "p99": found["p99"], "rate": members / found["p50"] * 1e6}


# -- tensors ----------------------------------------------------------------------------------------------


def tensor(context: Context, *, size: int, direction: str, kind: str, repeats: int) -> dict[str, float]:
    """Move tensors: as an argument, as a result, or from one actor to another without passing here; GB/s."""
    peer = context.peer
    first, second = context.actors["holder"][:2]
    give, take, take_there = (
        peer.method(first, "give"), peer.method(first, "take"), peer.method(second, "take"),
    )  # fmt: skip
    mine = torch.full((size,), 1, dtype=torch.uint8)
    sent = mine.numpy() if kind == "numpy" else mine

    def move() -> None:
        if direction == "argument":
            found = peer.get(take(sent))
        elif direction == "result":
            got = peer.get(give(size, kind))
            found = int(got[0]) + int(got[-1])
        else:
            found = peer.get(take_there(give(size, kind)))
        assert found == 2

    move()
    move()
    begin = time.perf_counter()
    for _ in range(repeats):
        move()
    seconds = time.perf_counter() - begin
    return {"rate": repeats * size / seconds / 1e9}


def forget(context: Context) -> dict[str, float]:
    """Make all holders drop their tensors."""
    peer = context.peer
    peer.get_all([peer.method(actor, "forget")() for actor in context.actors["holder"]])
    return {}


# -- many actors --------------------------------------------------------------------------------------------


def create(context: Context, *, count: int, torch_too: bool) -> dict[str, float]:
    """Time new actor processes from the first ``remote()`` until all have answered; measure their memory, and end them."""
    peer = context.peer
    begin = time.perf_counter()
    actors = [peer.make(Holder if torch_too else Tiny) for _ in range(count)]
    pids = peer.get_all([peer.method(actor, "pid")() for actor in actors])
    seconds = time.perf_counter() - begin
    pings = [peer.method(actor, "ping") for actor in actors]
    for _ in range(20):
        peer.get_all([ping() for ping in pings])
    begin = time.perf_counter()
    for _ in range(20):
        peer.get_all([ping() for ping in pings])
    gather = (time.perf_counter() - begin) / 20
    private = sorted(_private_kib(pid) for pid in pids)
    total = sum(_proportional_kib(pid) for pid in pids)
    del pings
    peer.end(actors)
    del actors
    deadline = time.monotonic() + 30.0
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        if time.monotonic() > deadline:
            raise RuntimeError("processes of actors that were killed live on")
        time.sleep(0.02)
    return {
        "time": seconds * 1e3,
        "private": private[len(private) // 2] / 1024,
        "pss": total / 1024,
        "gather": gather * 1e3,
    }


def crowd(context: Context, *, count: int) -> dict[str, float]:
    """Make many actors in one worker, call each, and measure their memory (actorrpc only)."""
    assert isinstance(context.peer, Actorrpc)
    peer = context.peer
    tiny = peer.actor_class(Tiny)
    host = tiny.remote()
    pid = peer.get(host.pid.remote())
    guests = tiny.options(worker=host)
    peer.get([guests.remote().ping.remote() for _ in range(20)])
    before = _private_kib(pid)
    begin = time.perf_counter()
    actors = [guests.remote() for _ in range(count)]
    peer.get([actor.ping.remote() for actor in actors])
    made = time.perf_counter()
    rounds = max(1, 10_000 // count)  # as many calls for any count: the collector's work is shared among them
    for _ in range(rounds):
        peer.get([actor.ping.remote() for actor in actors])
    called = time.perf_counter()
    after = _private_kib(pid)
    del actors
    peer.end([host])
    return {
        "time": (made - begin) * 1e3,
        "each": (made - begin) / count * 1e6,
        "rate": rounds * count / (called - made),
        "weight": (after - before) / count,
    }


def checkpoints(context: Context, *, kept: bool, windows: int, window: int) -> dict[str, float]:
    """Time pipelined calls of an actor whose class has ``checkpoint()``, or of one whose class has none (actorrpc only)."""
    assert isinstance(context.peer, Actorrpc)
    peer, name = context.peer, "kept" if kept else "tiny"
    actors = context.actors.setdefault(name, [])
    if not actors:
        actors.append(peer.actor_class(Kept if kept else Tiny).options(max_restarts=1).remote())
    ping = actors[0].ping.remote
    peer.get([ping() for _ in range(window)])
    with _quiet_collector():
        begin = time.perf_counter()
        for _ in range(windows):
            peer.get([ping() for _ in range(window)])
        seconds = time.perf_counter() - begin
    return {"time": seconds / windows * 1e3}


def overhead(context: Context) -> dict[str, float]:
    """Measure the memory of all processes of the cluster but the driver and its actors (call it while there is one actor)."""
    actor = context.peer.get(context.peer.method(context.one("first"), "pid")())
    pids = [pid for pid in _descendants() if pid != actor]
    total = 0.0
    for pid in pids:
        try:
            total += _proportional_kib(pid)
        except OSError:
            continue
    return {"pss": total / 1024, "count": len(pids)}


SCENARIOS: dict[str, Callable[..., dict[str, float]]] = {
    function.__name__: function
    for function in (
        start, shutdown, make, end, place, roundtrip, core_roundtrip, proxy_roundtrip, pipelined, together, fan,
        tensor, forget, create, crowd, checkpoints, overhead,
    )
}  # fmt: skip
