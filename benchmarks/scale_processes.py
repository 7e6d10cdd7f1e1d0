"""A group of real processes on this machine: the resources of each, and the frames that they send, stage by stage.

The processes are forked from a server that has imported torch and actorrpc, and get their orders over a pipe each. Frames
are counted where they arrive, by a wrapper around ``FrameReader.fed`` that only these processes have; operations of the store
likewise. The frames go over Unix sockets (one host): TCP between hosts adds acknowledgements.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import operator
import os
import statistics
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

import actorrpc
from actorrpc import autograd, rpc
from actorrpc.group.rendezvous import Rendezvous
from actorrpc.wire import frames
from benchmarks import idle

__all__ = ["Workers", "measure", "measure_cluster"]

_KINDS: Final = {
    getattr(frames, name): name.lower()
    for name in ("REQUEST", "REPLY", "FAILURE", "INTRO", "PING", "PONG", "GOODBYE", "NOTICE", "DEFINITION")
}
_WAIT_S: Final = 300.0
_SETTLE_S: Final = 0.4  # for notices that leave in batches

_arrived: Counter[str] = Counter()
_asked: Counter[str] = Counter()


# -- in the workers ----------------------------------------------------------------------------------


def _count() -> None:
    fed, ask = frames.FrameReader.fed, Rendezvous._store_op

    def counted_fed(self: frames.FrameReader, count: int) -> list[frames.Frame]:
        found = fed(self, count)
        _arrived.update(_KINDS.get(frame.kind, "other") for frame in found)
        return found

    def counted_store_op(self: Rendezvous, operation: str, *arguments: Any) -> Any:
        _asked["check" if operation == "check" else "other"] += 1
        return ask(self, operation, *arguments)

    frames.FrameReader.fed = counted_fed  # type: ignore[method-assign]
    Rendezvous._store_op = counted_store_op  # type: ignore[method-assign, assignment]


def _init(rank: int, world_size: int, method: str) -> float:
    torch.set_num_threads(1)
    begun = time.monotonic()
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.RpcBackendOptions(init_method=method, rpc_timeout=120.0),
    )
    return time.monotonic() - begun


def _look(rank: int, world_size: int) -> dict[str, Any]:
    """Return the resources and counters of this process."""
    memory = {"Rss": 0, "Pss": 0}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name in memory:
            memory[name] = int(rest.split()[0])
    agent: Any = actorrpc.rpc.api.group().agent if rpc.api.is_initialized() else None
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "connections": 0 if agent is None else len(agent.connector.connections()),
        "peers": 0 if agent is None else len(agent.peers()),
        "threads": threading.active_count(),
        "rss_kb": memory["Rss"],
        "pss_kb": memory["Pss"],
        "frames": dict(_arrived),
        "store": dict(_asked),
    }


def _call(rank: int, world_size: int, others: int) -> float:
    """Call the next ``others`` ranks, each once, all at the same time."""
    begun = time.monotonic()
    futures = [
        rpc.rpc_async(f"worker{(rank + n) % world_size}", operator.add, (rank, n))
        for n in range(1, others + 1)
    ]
    assert [each.wait() for each in futures] == [rank + n for n in range(1, others + 1)]
    return time.monotonic() - begun


def _number() -> int:
    return 7


def _value(reference: Any) -> int:
    return int(reference.to_here())


def _share(rank: int, world_size: int, owner: int, user: int) -> None:
    """Make a value at one worker and send a reference to another, which fetches it; then release the reference."""
    reference = rpc.remote(owner, _number)
    assert reference.to_here() == 7
    assert rpc.rpc_sync(user, _value, (reference,)) == 7
    del reference


def _backward(rank: int, world_size: int) -> None:
    """Run one backward pass with every other worker: a call to each, and the gradients back."""
    with autograd.context() as context:
        leaf = torch.ones(4, requires_grad=True)
        calls = [rpc.rpc_async(other, torch.mul, (leaf, other)) for other in range(1, world_size)]
        parts = [call.wait() for call in calls]
        autograd.backward(context, [sum(part.sum() for part in parts)])
        assert autograd.get_gradients(context)[leaf][0].item() == sum(range(1, world_size))


def _ignore(*_: Any) -> None:
    pass


def _watch(rank: int, world_size: int) -> None:
    """Watch changes of members; return when this worker is connected to all others."""
    actorrpc.on_member_change(_ignore)
    agent: Any = rpc.api.group().agent
    _until(lambda: sum(peer.conn is not None for peer in agent.peers()) >= world_size - 1)


def _until(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("it has not come about")
        time.sleep(0.01)


def _drive(rank: int, world_size: int, count: int) -> dict[str, Any]:
    """Run the driver of a cluster that ``count`` workers join one after the other, and drain one of them."""

    def took(before: Counter[str]) -> dict[str, int]:
        time.sleep(_SETTLE_S)
        return _but_heartbeats(Counter(_arrived) - before)

    actorrpc.init(listen="tcp://127.0.0.1:0", num_cpus=count)
    try:
        before = Counter(_arrived)
        actorrpc.scale(count)
        found: dict[str, Any] = {"workers": count, "joins": took(before)}
        found |= {
            name: value for name, value in _look(0, 1).items() if name in ("descriptors", "connections")
        }
        before = Counter(_arrived)
        actorrpc.drain(next(each.name for each in actorrpc.workers() if each.rank))
        found["drain"] = took(before)
        return found
    finally:
        actorrpc.shutdown()


def _shutdown(rank: int, world_size: int) -> float:
    begun = time.monotonic()
    rpc.shutdown()
    return time.monotonic() - begun


def _live(rank: int, world_size: int, pipe: Connection) -> None:
    _count()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, function(rank, world_size, *arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)


# -- here ----------------------------------------------------------------------------------------------


class Workers:
    """The worker processes. Not thread-safe; used in a ``with`` block, at whose end remaining processes are killed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Workers:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.scale_processes"])
        for rank in range(self.count):
            here, there = context.Pipe()
            process = context.Process(target=_live, args=(rank, self.count, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        self.all(_look)  # wait until all have started and imported all modules
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [process.pid for process in self._processes]

    def all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run ``function(rank, world_size, *arguments)`` in all at the same time; return the results by rank."""
        return self._run(range(self.count), function, *arguments)

    def one(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function in one process."""
        return self._run([rank], function, *arguments)[0]

    def _run(self, ranks: Any, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for rank in ranks:
            self._pipes[rank].send((function, arguments))
        until = time.monotonic() + _WAIT_S
        found = []
        for rank in ranks:
            if not self._pipes[rank].poll(max(0.0, until - time.monotonic())):
                raise TimeoutError(f"worker{rank} has not answered")
            fine, answer = self._pipes[rank].recv()
            if not fine:
                raise RuntimeError(f"worker{rank}:\n{answer}")
            found.append(answer)
        return found

    @contextlib.contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Count the frames, except heartbeats, that arrive at any worker during the block and shortly after."""
        counted: dict[str, int] = {}
        before = self._frames()
        yield counted
        time.sleep(_SETTLE_S)
        counted.update(_but_heartbeats(self._frames() - before))

    def _frames(self) -> Counter[str]:
        return sum((Counter(each["frames"]) for each in self.all(_look)), Counter())


def _but_heartbeats(counted: Counter[str]) -> dict[str, int]:
    return {kind: number for kind, number in sorted(counted.items()) if kind not in ("ping", "pong")}


def _summary(looks: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("descriptors", "connections", "peers", "threads", "rss_kb", "pss_kb"):
        values = [each[name] for each in looks]
        found[f"{name}_median"], found[f"{name}_most"] = statistics.median(values), max(values)
        found[f"{name}_of_rank_0"] = values[0]
    return found


def _rest(workers: Workers, seconds: float) -> dict[str, float]:
    """Let all workers idle for some seconds; return their activity per worker and second."""
    looks = workers.all(_look)
    before, begun = idle.sample(workers.pids), time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - begun
    rest = idle.difference(before, idle.sample(workers.pids), took)
    pings = [
        (b["frames"].get("ping", 0) - a["frames"].get("ping", 0)) / took
        for a, b in zip(looks, workers.all(_look), strict=True)
    ]
    return {
        "cpu_us_per_s": rest["cpu_idle"] / workers.count,
        "wakes_per_s": rest["wakes"] / workers.count,
        "pings_per_s": sum(pings) / workers.count,
    }


def measure_cluster(count: int) -> dict[str, Any]:
    """Let ``count`` workers join a cluster, and drain one of them; return the frames that its driver received."""
    with Workers(1) as workers:
        found: dict[str, Any] = workers.one(0, _drive, count)
    return found


def measure(count: int, method: str, *, neighbours: int = 4, rest_s: float = 6.0) -> dict[str, Any]:
    """Start ``count`` workers, run each stage once, and return the counts.

    Args:
        method: where they meet, as ``init_method``.
        neighbours: how many others each worker calls at first.
        rest_s: how long the workers idle after each stage, in seconds; 0: not at all.
    """
    found: dict[str, Any] = {"workers": count}
    begun = time.monotonic()
    with Workers(count) as workers:
        found["processes_s"] = time.monotonic() - begun
        before = _summary(workers.all(_look))
        found["before"] = before
        begun = time.monotonic()
        took = workers.all(_init, method)
        found["init_s"] = {"all": time.monotonic() - begun, "median": statistics.median(took)}
        looks = workers.all(_look)
        found["store"] = {
            "operations_mean": sum(sum(each["store"].values()) for each in looks) / count,
            "but_checks": sum(each["store"]["other"] for each in looks),
        }

        def stage(name: str, counted: dict[str, int] | None = None, **more: float) -> None:
            row: dict[str, Any] = {**_summary(workers.all(_look)), **more}
            if counted is not None:
                row["frames"] = counted
            if rest_s:
                row["rest"] = _rest(workers, rest_s)
            found[name] = row

        stage("idle")
        if count > 1:
            with workers.counting() as counted:
                workers.one(0, _watch)
            stage("watched by rank 0", counted)
        if count > 2:
            with workers.counting() as counted:
                workers.one(0, _share, 1, 2)
            found["reference"] = {"frames": counted}
        if count > neighbours + 1:
            with workers.counting() as counted:
                took = workers.all(_call, neighbours)
            stage("neighbours", counted, took_s=max(took))
        if count > 1:
            with workers.counting() as counted:
                took = workers.all(_call, count - 1)
            stage("all to all", counted, took_s=max(took))
            with workers.counting() as counted:
                workers.one(0, _backward)
            found["backward"] = {"frames": counted}
        before_end = workers._frames()
        found["shutdown_s"] = max(workers.all(_shutdown))
        ended = workers._frames() - before_end
        found["shutdown"] = {"frames": _but_heartbeats(ended)}
    return found
