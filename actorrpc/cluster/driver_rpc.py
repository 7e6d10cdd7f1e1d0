"""Requests of workers to the driver, by RPC: :func:`serve`, which runs on the driver. Thread-safe."""

from __future__ import annotations

from typing import Any, Final

from actorrpc.agent.context import current_worker
from actorrpc.agent.executor import Deferred
from actorrpc.cluster.driver import Cluster
from actorrpc.errors import ShutdownError
from actorrpc.futures import Future

__all__ = ["current", "serve"]

#: The methods of :class:`~actorrpc.cluster.driver.Cluster` that other workers may call.
_QUERIES: Final = frozenset(
    {
        *("admit", "register", "leaving", "lookup", "listing"),
        *("check", "spawn", "release", "kill", "report", "give_back"),
    }
)


def current() -> Cluster | None:
    """Return the cluster whose driver is this process, or None."""
    worker = current_worker()
    return None if worker is None else worker.cluster


def serve(method: str, *arguments: Any) -> Any:
    """Call a method of this driver's cluster, and answer with its result, or with the value of the returned future.

    Raises:
        ShutdownError: this worker is not a driver, or its cluster has ended.
        AttributeError: there is no such method for other workers.
    """
    cluster = current()
    if cluster is None:
        raise ShutdownError(
            "this worker drives no cluster, or the cluster was shut down: use the address of the process that has called "
            "actorrpc.init()",
            maybe_executed=False,
        )
    if method not in _QUERIES:
        raise AttributeError(f"other workers cannot call Cluster.{method}")
    found = getattr(cluster, method)(*arguments)
    return Deferred(found) if isinstance(found, Future) else found
