"""The machines of a running cluster and their resources; :func:`scale` changes the number of its workers.

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
from actorrpc.agent.context import current_worker
from actorrpc.cluster.draining import drain, driven_cluster
from actorrpc.cluster.driver import current_cluster
from actorrpc.cluster.join import own_address, seconds
from actorrpc.cluster.provisioners.base import LaunchedEngine, Node
from actorrpc.cluster.scheduler import ResourceHolder, ResourceTable
from actorrpc.errors import ConfigError, PlacementError, WrongTypeError
from actorrpc.futures import Future
from actorrpc.group.launchers import own_cpus
from actorrpc.group.store import remaining, some, wait_until
from actorrpc.validation import integer
from actorrpc.wire.identity import addresses_of_hosts

__all__ = [
    "available_resources",
    "cluster_resources",
    "host_of",
    "id_of",
    "machines",
    "node_id",
    "nodes",
    "on_driver",
    "reserve",
    "scale",
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
        total, here = {"CPU": float(own_cpus())}, socket.gethostname()
        own = {"names": [here], "host": here, "address": own_address()}
        return [{**own, "total": total, "free": dict(total), "labels": {}}]
    found = []
    addresses = addresses_of_hosts(running.directory.members())
    for holder in running.resources():
        total = {name: float(amount) for name, amount in holder.totals.items() if amount or name == "CPU"}
        free = {name: holder.free(name) for name in total}
        row = {"names": holder.names, "total": total, "free": free, "labels": dict(holder.labels)}
        record = running.directory.resolve(holder.name) if holder.name else None
        if record is None:  # a machine of another engine, which has given its name or address
            found.append({**row, "host": holder.names[0], "address": holder.names[0]})
        else:
            found.append(
                {**row, "host": record.hostname, "address": addresses.get(record.host) or own_address()}
            )
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
    """Return the machines of the cluster from the driver's book: name and address of the host, further names, total resources,
    free amounts, labels.
    """
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
    found = []
    for each in machines():
        address = each["address"]
        found.append(
            {
                "NodeID": id_of(each["names"]),
                "Alive": True,
                "alive": True,
                "NodeManagerAddress": address,
                "NodeManagerHostname": each["host"],
                "NodeName": address,
                "Resources": {**each["total"], f"node:{address}": 1.0},
                "Labels": each["labels"],
            }
        )
    return found


def _sum(amounts: str) -> dict[str, float]:
    """Return the sum of the amounts ``"total"`` or ``"free"`` of all machines, and ``node:ADDRESS`` of each machine."""
    rows = machines()
    found: dict[str, float] = {}
    for row in rows:
        for name, amount in row[amounts].items():
            found[name] = found.get(name, 0.0) + amount
    return found | {f"node:{row['address']}": 1.0 for row in rows}


def cluster_resources() -> dict[str, float]:
    """Return the total resources of all machines, by name: ``"CPU"``, ``"GPU"``, and custom names.

    ``"memory"`` is bytes of this machine. As in Ray, ``"node:ADDRESS"`` is 1.0 for the address of each machine.
    Waits and raises as :func:`nodes`. Thread-safe.
    """
    return {**_sum("total"), "memory": float(psutil.virtual_memory().total)}


def available_resources() -> dict[str, float]:
    """Return the amounts of :func:`cluster_resources` that actors do not use. Names with nothing free are missing.

    Waits and raises as :func:`nodes`. Thread-safe.
    """
    found = {name: amount for name, amount in _sum("free").items() if amount}
    return {**found, "memory": float(psutil.virtual_memory().available)}


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
    cluster = driven_cluster("scale()")
    until = _time.now() + seconds(timeout)
    engine = cluster.engine
    pooled = isinstance(engine, LaunchedEngine) and engine.num_workers > 0
    if pooled and (num_cpus is not None or num_gpus is not None or labels):
        raise ConfigError(
            f"the workers of engine {engine.name!r} are all alike: leave num_cpus=, num_gpus= and labels= to init()"
        )
    there = cluster.scaled()
    for name in there[count:]:
        drain(name, timeout=remaining(until))
    if pooled and count > len(there):
        engine.grow(count - len(there), remaining(until))  # type: ignore[attr-defined]
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
        future.wait(remaining(until))
    return cluster.scaled()
