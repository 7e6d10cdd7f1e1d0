"""What the workers ask of the driver, by RPC: who is there, and processes for the actors that they create.

These functions run on the driver, where :func:`set_cluster` has named the cluster. Thread-safe.
"""

from __future__ import annotations

from actorrpc.actors.processes import ProcessSpec
from actorrpc.cluster.processes import LocalCluster
from actorrpc.core.execution import Later
from actorrpc.core.identity import WorkerRecord
from actorrpc.errors import ShutdownError

__all__ = [
    "current",
    "kill",
    "leaving",
    "listing",
    "lookup",
    "register",
    "release",
    "report",
    "set_cluster",
    "spawn",
]

_cluster: LocalCluster | None = None


def set_cluster(cluster: LocalCluster | None) -> None:
    """Name the cluster of which this process is the driver."""
    global _cluster
    _cluster = cluster


def current() -> LocalCluster | None:
    """Return the cluster of which this process is the driver, if it is one."""
    return _cluster


def _here() -> LocalCluster:
    if _cluster is None:
        raise ShutdownError("the driver of the cluster has shut down", maybe_executed=False)
    return _cluster


def lookup(to: str | int) -> bytes | None:
    """Return the record of a worker, packed."""
    record = _here().directory.resolve(to)
    return None if record is None else record.to_bytes()


def listing() -> list[bytes]:
    """Return the records of all workers, packed."""
    return [record.to_bytes() for record in _here().directory.members()]


def register(record: bytes) -> None:
    """Say that a process has joined."""
    _here().register(WorkerRecord.from_bytes(record))


def leaving(worker: str) -> None:
    """Say that a process has begun to leave by itself."""
    if _cluster is not None:
        _cluster.leaving(worker)


def spawn(spec: ProcessSpec, creator: str) -> Later:
    """Start a process for another worker."""
    return Later(_here().spawn(spec, creator))


def release(worker: str) -> None:
    """Release a process."""
    _here().release(worker)


def kill(worker: str) -> None:
    """Kill a process."""
    _here().kill(worker)


def report(worker: str) -> Later:
    """Report how a process ended."""
    return Later(_here().report(worker))
