"""More and fewer workers while the program runs: :func:`scale` and :func:`drain`, on the driver.

Nothing here holds a lock while it waits; all waits are bounded by the caller's time-out and can be interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from actorrpc import moments
from actorrpc.actors.handover import hand_over
from actorrpc.actors.processes import ProcessSpec
from actorrpc.cluster import serving
from actorrpc.cluster.driver import Cluster
from actorrpc.cluster.engine import LaunchedEngine
from actorrpc.core.agent import Agent
from actorrpc.core.peer import Peer
from actorrpc.errors import ConfigError, PeerDiedError, RpcError, RpcTimeoutError, WrongTypeError
from actorrpc.futures import Future
from actorrpc.rpc import api

__all__ = ["drain", "scale"]

_SCALE_S: Final = 120.0
_DRAIN_S: Final = 60.0
_LOOK_S: Final = 0.02


def _cluster(what: str) -> Cluster:
    found = serving.current()
    if found is None:
        raise ConfigError(
            f"{what} is for the driver of a cluster, the process that has called actorrpc.init(); this is "
            f"{api.what() or 'no worker'}"
        )
    return found


def scale(
    count: int,
    *,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    labels: Mapping[str, str] | None = None,
    timeout: float = _SCALE_S,
) -> list[str]:
    """Have as many workers as this that take several actors each, started by the cluster's engine; returns their names.

    Further ones are started, or the emptiest are drained. Workers that joined by themselves do not count, nor do the
    processes that actors have to themselves. Only on the driver; thread-safe, but meant for one thread.

    Args:
        count: how many there are to be.
        num_cpus, num_gpus, labels: what each new one has; default one processor. Workers of an engine's pool
            (``init("ray", num_workers=...)``) all have what that says.
        timeout: for all of it, in seconds.

    Raises:
        ConfigError: this is not the driver, or the engine cannot start what is asked for.
        PlacementError: the engine has no place for so many.
        RpcTimeoutError: not all were there in time; those that came stay.
        PeerDiedError: one could not be started.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise WrongTypeError(f"scale() takes a number of workers of at least 0, not {count!r}")
    cluster = _cluster("scale()")
    until = moments.now() + _seconds(timeout)
    engine = cluster.engine
    pooled = isinstance(engine, LaunchedEngine) and engine.num_workers > 0
    if pooled and (num_cpus is not None or num_gpus is not None or labels):
        raise ConfigError(
            f"the workers of engine {engine.name!r} are all alike: leave num_cpus=, num_gpus= and labels= to init()"
        )
    there = cluster.scaled()
    for name in there[count:]:
        drain(name, timeout=max(0.1, until - moments.now()))
    if pooled and count > len(there):
        engine.grow(count - len(there), max(0.1, until - moments.now()))  # type: ignore[attr-defined]
        return cluster.scaled()
    cpus = 1 if num_cpus is None else num_cpus
    spec = ProcessSpec(label="worker", num_cpus=cpus, num_gpus=num_gpus, labels=labels or {})
    started = [cluster.add_worker(spec) for _ in range(count - len(there))]
    for future in started:
        future.wait(max(0.1, until - moments.now()))
    return cluster.scaled()


def drain(worker: Any, timeout: float = _DRAIN_S) -> None:
    """Have a worker leave without losing what it does: nothing new is placed there, its calls finish, its actors move.

    Actors whose class has ``checkpoint()`` and ``restore(state)`` begin again elsewhere with their state, and their handles go
    on working. Others end with the worker, when their calls are finished: they begin anew elsewhere if ``max_restarts`` says so
    (those that ``worker=`` has put there cannot), or are dead, with an ActorDiedError that names the drained worker. Those in
    supervision groups are restarted by their groups, with their last checkpoint, or their groups give up. Values that
    RRefs refer to do not move. Only on the driver.

    Args:
        worker: its name, rank or WorkerInfo.
        timeout: for all of it, in seconds. What has not ended by then goes on, and nothing new is placed there.

    Raises:
        ConfigError: this is not the driver, or it was told to drain itself.
        UnknownWorkerError: there is no such worker.
        RpcTimeoutError: it has not finished in time; the message says what it does.
    """
    cluster = _cluster("drain()")
    until = moments.now() + _seconds(timeout)
    agent = cluster.agent
    peer = agent.peer(worker)
    if peer.is_self:
        raise ConfigError("drain() is for other workers: the driver leaves with actorrpc.shutdown()")
    if peer.state != "alive":
        return
    cluster.stop_placing(peer.name)

    def left() -> float:
        return max(0.1, until - moments.now())

    why = f"its worker {peer.name!r} is drained"
    asked: list[Future[Any]] = []
    for record in cluster.directory.members():
        future: Future[Any] = Future()
        future.add_done_callback(Future.acknowledge)
        try:
            other = agent.peer(record.name)
            agent.call(other, hand_over, (peer.rank, peer.record.incarnation, why), {}, left(), future=future)
        except RpcError:
            continue  # it is gone, and its actors with it
        asked.append(future)
    agent.flush()
    late = RpcTimeoutError(
        f"drain of {peer.name!r}: its calls have not finished within {timeout:g} s; nothing new is placed there. "
        "Call drain() again to go on waiting",
        worker=peer.name,
    )
    for future in asked:
        try:
            future.wait(left())
        except RpcTimeoutError:
            raise late from None
        except RpcError:
            pass  # who looked after them is gone
    try:
        while _runs(agent, peer, left()) > 1:  # this very call is one
            if moments.now() >= until:
                raise late
            time.sleep(_LOOK_S)
        cluster.let_go(peer.name)
        while peer.state == "alive":
            if moments.now() >= until:
                raise late
            time.sleep(_LOOK_S)
    except PeerDiedError:
        return
    except RpcTimeoutError:  # of that question: it has no thread left to answer with, or is out of reach
        raise late from None


def _runs(agent: Agent, peer: Peer, limit: float) -> int:
    return int(agent.call(peer, running, (), {}, limit).result())


def running() -> int:
    """Return how many calls run or wait on this worker, this one included."""
    return sum(len(peer.running) for peer in api.group().agent.peers())


def _seconds(timeout: Any) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise WrongTypeError(f"timeout must be a number of seconds > 0, not {timeout!r}")
    return float(timeout)
