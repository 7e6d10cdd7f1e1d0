"""The machines of a running cluster and their resources; :func:`scale` and :func:`drain` change its workers.

The driver keeps the *book*: the resources of each machine, and the bookings of actors. Other processes ask the driver. Names
and keys are as in Ray. Thread-safe. No function holds a lock while it waits; waits are bounded, and can be interrupted.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final, ParamSpec, TypeVar

import psutil

from actorrpc import _time
from actorrpc.actors.context import runtime
from actorrpc.actors.spec.actor_spec import ProcessSpec
from actorrpc.actors.supervision.supervisor import hand_over
from actorrpc.agent.context import current_worker
from actorrpc.agent.peers import Peer
from actorrpc.cluster.driver import Cluster, current_cluster
from actorrpc.cluster.join import own_address, seconds
from actorrpc.cluster.provisioners.base import LaunchedEngine, Node
from actorrpc.cluster.scheduler import ResourceHolder, ResourceTable
from actorrpc.errors import (
    ConfigError,
    PeerDiedError,
    PlacementError,
    RpcError,
    RpcTimeoutError,
    WrongTypeError,
)
from actorrpc.futures import Future
from actorrpc.group.launchers import own_cpus
from actorrpc.group.store import poll, some, wait_until
from actorrpc.rpc import api
from actorrpc.validation import integer

__all__ = [
    "available_resources",
    "cluster_resources",
    "drain",
    "host_of",
    "hosts",
    "id_of",
    "machines",
    "node_id",
    "nodes",
    "on_driver",
    "reserve",
    "scale",
    "totals",
    "unreserve",
]

P = ParamSpec("P")
R = TypeVar("R")
_QUERY_S: Final = 30.0


def on_driver(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function on the driver, which has the book of the resources; return its result. May start the cluster."""
    agent = runtime(start=True).agent
    if agent.record.rank == 0:
        return function(*args, **kwargs)
    found: R = agent.call_sync(agent.peer(0), function, args, dict(kwargs), _QUERY_S)
    return found


def id_of(names: list[str]) -> str:
    """Return the node id of a machine with these names."""
    return hashlib.sha224("/".join(names).encode()).hexdigest()


def _book() -> list[dict[str, Any]]:
    """Return the result of :func:`machines`; in a group without a driver, this machine. Called on rank 0."""
    running = current_cluster()
    if running is None:
        total = {"CPU": float(own_cpus())}
        return [{"names": [socket.gethostname()], "total": total, "free": dict(total), "labels": {}}]
    found = []
    for holder in running.resources():
        total = {name: float(amount) for name, amount in holder.totals.items() if amount or name == "CPU"}
        free = {name: holder.free(name) for name in total}
        found.append({"names": holder.names, "total": total, "free": free, "labels": dict(holder.labels)})
    return found


def reserve(group: str, bundles: list[dict[str, float]], strategy: str) -> Future[list[list[str]]]:
    """Book the bundles of a placement group, as ``Cluster.reserve``; without a cluster, only check them. Called on rank 0."""
    running = current_cluster()
    if running is not None:
        return running.reserve(group, bundles, strategy)
    here = ResourceTable()
    here.nodes = [ResourceHolder.of_node(Node(host=socket.gethostname(), num_cpus=own_cpus()), admits=True)]
    found: Future[list[list[str]]] = Future()
    holders = here.assign(bundles, strategy)
    if holders is None:
        found.set_exception(PlacementError(f"there are (free/all): {here.nodes[0].describe()}"))
    else:
        found.set_result([each.names for each in holders])
    return found


def unreserve(group: str) -> None:
    """Remove a placement group, as ``Cluster.unreserve``. Called on rank 0."""
    running = current_cluster()
    if running is not None:
        running.unreserve(group)


def machines() -> list[dict[str, Any]]:
    """Return the machines of the cluster from the driver's book: names, total resources, free amounts, labels."""
    return on_driver(_book)


def nodes() -> list[dict[str, Any]]:
    """Return a list of dicts, one for each machine or worker that takes several actors. The keys are some of Ray's:

    ``"NodeID"``, ``"Alive"``, ``"NodeManagerAddress"``, ``"NodeManagerHostname"``, ``"Resources"`` (amounts by name: ``"CPU"``,
    ``"GPU"`` and custom names) and ``"Labels"``. In an :func:`actorrpc.init_rpc` group, the only entry is the machine of rank 0.
    Other processes ask the driver, and wait at most 30 s. Starts the embedded cluster if this process is in no group.
    Thread-safe.

    Raises:
        PeerDiedError, RpcTimeoutError: the driver has died, or has not answered in time.
    """
    here = socket.gethostname()
    found = []
    for each in machines():
        address = own_address() if here in each["names"] else each["names"][0]
        found.append(
            {
                "NodeID": id_of(each["names"]),
                "Alive": True,
                "alive": True,
                "NodeManagerAddress": address,
                "NodeManagerHostname": each["names"][0],
                "NodeName": address,
                "Resources": {**each["total"], f"node:{address}": 1.0},
                "Labels": each["labels"],
            }
        )
    return found


def _sum(parts: list[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            found[name] = found.get(name, 0.0) + amount
    return found


def cluster_resources() -> dict[str, float]:
    """Return the total resources of all machines, by name: ``"CPU"``, ``"GPU"``, and custom names.

    ``"memory"`` is bytes of this machine. Waits and raises as :func:`nodes`. Thread-safe.
    """
    found = _sum([each["total"] for each in machines()])
    found["memory"] = float(psutil.virtual_memory().total)
    found[f"node:{own_address()}"] = 1.0
    return found


def available_resources() -> dict[str, float]:
    """Return the amounts of :func:`cluster_resources` that actors do not use. Names with nothing free are missing.

    Waits and raises as :func:`nodes`. Thread-safe.
    """
    found = {name: amount for name, amount in _sum([each["free"] for each in machines()]).items() if amount}
    found["memory"] = float(psutil.virtual_memory().available)
    found[f"node:{own_address()}"] = 1.0
    return found


def totals() -> list[dict[str, float]]:
    """Return the total resources of each machine."""
    return [each["total"] for each in machines()]


def hosts() -> list[str]:
    """Return a name of each machine."""
    return [each["names"][0] for each in machines()]


def host_of(wanted: str) -> str | None:
    """Return a name of the machine with this node id; None if there is none."""
    for each in machines():
        if id_of(each["names"]) == wanted:
            return str(each["names"][0])
    return None


def node_id() -> str:
    """Return the id of the node that this process is on; if the driver does not list it, the id of the first node."""
    found = machines()
    here = socket.gethostname()
    own = current_worker()
    name = "" if own is None else own.agent.name
    for known_as in (name, here):
        for each in found:
            if known_as in each["names"]:
                return id_of(each["names"])
    return id_of(found[0]["names"]) if found else id_of([here])


# -- more and fewer workers ------------------------------------------------------------------------------

_SCALE_S: Final = 120.0
_DRAIN_S: Final = 60.0
_LOOK_S: Final = 0.02


def _cluster(what: str) -> Cluster:
    found = current_cluster()
    if found is None:
        raise ConfigError(
            f"{what} is for the driver of a cluster, the process that has called actorrpc.init(); this process is "
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
    """Adjust the number of workers that take several actors each and are started by the cluster's engine; return their names.

    Further workers are started, or the emptiest workers are drained. Workers that joined by themselves do not count, nor do
    processes of single actors. Only on the driver; thread-safe, but intended for one thread.

    Args:
        count: the new number of workers.
        num_cpus, num_gpus, labels: the resources of each new worker; default one CPU. The embedded engine takes them from
            this machine's. Workers of an engine's pool (``init("ray", num_workers=...)``) all have the pool's resources.
        timeout: for the whole operation, in seconds.

    Raises:
        ConfigError: this is not the driver, or the engine cannot start such workers.
        PlacementError: there is no place for so many workers; those that have been started stay.
        RpcTimeoutError: not all new workers joined in time (the workers that have joined stay), or a drain took too long.
        PeerDiedError: a worker could not be started.
    """
    integer("count", count, least=0, right="a number of workers of at least 0", error=WrongTypeError)
    cluster = _cluster("scale()")
    until = _time.now() + seconds(timeout)
    engine = cluster.engine
    pooled = isinstance(engine, LaunchedEngine) and engine.num_workers > 0
    if pooled and (num_cpus is not None or num_gpus is not None or labels):
        raise ConfigError(
            f"the workers of engine {engine.name!r} are all alike: leave num_cpus=, num_gpus= and labels= to init()"
        )
    there = cluster.scaled()
    for name in there[count:]:
        drain(name, timeout=_remaining(until))
    if pooled and count > len(there):
        engine.grow(count - len(there), _remaining(until))  # type: ignore[attr-defined]
        return cluster.scaled()
    cpus = 1 if num_cpus is None else num_cpus
    spec = ProcessSpec(label="worker", num_cpus=cpus, num_gpus=num_gpus, labels=labels or {})
    started = [cluster.add_worker(spec) for _ in range(count - len(there))]
    for future in started:
        future.add_done_callback(Future.acknowledge)
    wait_until(
        lambda: any(each.error for each in started) or all(each.done() for each in started),
        until,
        f"scale({count})",
        lambda: some(each.label for each in started if not each.done()),
    )
    for future in sorted(started, key=lambda each: each.error is None):
        future.wait(_remaining(until))
    return cluster.scaled()


def drain(worker: Any, timeout: float = _DRAIN_S) -> None:
    """Make a worker leave without losing its work: nothing new is placed there, its calls finish, its actors move.

    Actors whose class has ``checkpoint()`` and ``restore(state)`` restart elsewhere with their state, and their handles stay
    valid. Other actors end with the worker, after their calls: they restart elsewhere according to ``max_restarts``
    (except actors that were placed by ``worker=``), or are dead, with an ActorDiedError that names the drained worker. Actors in
    supervision groups are restarted by their groups, with their last checkpoint, or their groups give up. Values of
    RRefs do not move. Only on the driver.

    Args:
        worker: the worker's name, rank or WorkerInfo.
        timeout: for the whole operation, in seconds. After it, unfinished calls continue, and still nothing new is placed there.

    Raises:
        ConfigError: this process is not the driver, or ``worker`` is the driver itself.
        UnknownWorkerError: there is no such worker.
        RpcTimeoutError: calls have not finished, or actors have not moved, in time; call this again to continue waiting.
    """
    cluster = _cluster("drain()")
    until = _time.now() + seconds(timeout)
    agent = cluster.agent
    peer = agent.peer(worker)
    if peer.is_self:
        raise ConfigError("drain() is for other workers: the driver leaves with actorrpc.shutdown()")
    if peer.state != "alive":
        return
    cluster.stop_placing(peer.name)
    try:
        _hand_over(cluster, peer, until)
        # The query running() counts itself as one running call.
        ended = poll(
            lambda: int(agent.call_sync(peer, running, (), {}, _remaining(until))) <= 1, until, _LOOK_S
        )
        if ended:
            cluster.let_go(peer.name)
            ended = poll(lambda: peer.state != "alive", until, _LOOK_S)
    except PeerDiedError:
        return
    except RpcTimeoutError:  # not all actors have moved in time, or the worker has no thread for running()
        ended = False
    if not ended:
        raise RpcTimeoutError(
            f"drain of {peer.name!r}: its calls have not finished within {timeout:g} s; nothing new is placed there. "
            "Call drain() again to continue waiting",
            worker=peer.name,
        )


def _remaining(until: float) -> float:
    return max(0.1, until - _time.now())


def _hand_over(cluster: Cluster, peer: Peer, until: float) -> None:
    """Let the supervisors on all workers move their actors away from the worker ``peer``, and wait for them.

    Raises:
        RpcTimeoutError: some supervisors have not moved all actors in time.
    """
    agent = cluster.agent
    why = f"its worker {peer.name!r} is drained"
    asked: list[Future[Any]] = []
    for record in cluster.directory.members():
        future: Future[Any] = Future()
        future.add_done_callback(Future.acknowledge)
        arguments = (peer.record.rank, peer.record.incarnation, why)
        try:
            agent.call(agent.peer(record.name), hand_over, arguments, {}, _remaining(until), future=future)
        except RpcError:
            continue  # this worker has ended, and the actors that it supervised with it
        asked.append(future)
    agent.flush()
    for future in asked:
        try:
            future.wait(_remaining(until))
        except RpcTimeoutError:
            raise
        except RpcError:
            pass  # the asked worker has ended, and the actors that it supervised with it


def running() -> int:
    """Return how many calls run or wait on this worker, including this one."""
    return sum(len(peer.running) for peer in api.group().agent.peers())
