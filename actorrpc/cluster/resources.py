"""The resources of the machines of a cluster, and their free amounts.

The driver keeps the *book*: the resources of each machine, and the bookings of actors. Other processes ask the driver. In an
embedded cluster, the machine's processors are shared, not booked: their use is the sum of the requests of living processes. Names
and keys are as in Ray. Thread-safe.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import psutil

from actorrpc.actors.context import runtime
from actorrpc.agent.context import current_worker
from actorrpc.cluster.driver import current_cluster
from actorrpc.cluster.join import own_address

__all__ = [
    "available_resources",
    "cluster_resources",
    "host_of",
    "hosts",
    "id_of",
    "machines",
    "node_id",
    "nodes",
    "on_driver",
    "totals",
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
        total = {"CPU": float(os.cpu_count() or 1)}
        return [{"names": [socket.gethostname()], "total": total, "free": dict(total), "labels": {}}]
    found = []
    for holder in running.resources():
        total = {name: float(amount) for name, amount in holder.totals.items() if amount or name == "CPU"}
        free = {name: holder.free(name) for name in total}
        names = sorted(holder.hosts) + ([holder.name] if holder.name else [])
        found.append({"names": names, "total": total, "free": free, "labels": dict(holder.labels)})
    return found


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
