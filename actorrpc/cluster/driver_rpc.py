"""What the workers ask of the driver, by RPC: :func:`ask` carries all of it. It runs on the driver. Thread-safe."""

from __future__ import annotations

from typing import Any, Final

from actorrpc.agent.context import current_worker
from actorrpc.agent.executor import Deferred
from actorrpc.cluster.driver import Cluster
from actorrpc.errors import ShutdownError
from actorrpc.futures import Future

__all__ = ["ask", "current"]

#: the methods of :class:`~actorrpc.cluster.driver.Cluster` that are for other workers
_ASKED: Final = frozenset(
    {
        *("admit", "register", "leaving", "lookup", "listing"),
        *("check", "spawn", "release", "kill", "report", "give_back"),
    }
)


def current() -> Cluster | None:
    """Return the cluster of which this process is the driver, if it is one."""
    worker = current_worker()
    return None if worker is None else worker.cluster


def ask(method: str, *arguments: Any) -> Any:
    """Call a method of this driver's cluster, and answer with what it returns, or with what the returned future gives.

    Raises:
        ShutdownError: this worker is no driver, or its cluster has ended.
        AttributeError: there is no such method for other workers.
    """
    cluster = current()
    if cluster is None:
        raise ShutdownError(
            "this worker drives no cluster, or that has been shut down: name the address of the process that has called "
            "actorrpc.init()",
            maybe_executed=False,
        )
    if method not in _ASKED:
        raise AttributeError(f"other workers cannot call Cluster.{method}")
    found = getattr(cluster, method)(*arguments)
    return Deferred(found) if isinstance(found, Future) else found
