"""What the workers ask of the driver, by RPC: who is there, and processes for the actors that they create.

These functions run on the driver. Thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorrpc.actors.spec.death_report import ProcessSpec
from actorrpc.agent.context import current_worker
from actorrpc.agent.executor import Later
from actorrpc.cluster.driver import Cluster
from actorrpc.errors import ShutdownError
from actorrpc.wire.identity import WorkerRecord

__all__ = [
    "admit",
    "check",
    "current",
    "give_back",
    "kill",
    "leaving",
    "listing",
    "lookup",
    "register",
    "release",
    "report",
    "spawn",
]


def current() -> Cluster | None:
    """Return the cluster of which this process is the driver, if it is one."""
    worker = current_worker()
    return None if worker is None else worker.cluster


def _here() -> Cluster:
    cluster = current()
    if cluster is None:
        raise ShutdownError("the driver of the cluster has shut down", maybe_executed=False)
    return cluster


def lookup(to: str | int) -> bytes | None:
    """Return the record of a worker, packed."""
    record = _here().directory.resolve(to)
    return None if record is None else record.to_bytes()


def listing() -> list[bytes]:
    """Return the records of all workers, packed."""
    return [record.to_bytes() for record in _here().directory.members()]


def admit(request: Mapping[str, Any]) -> dict[str, Any]:
    """Say whether one may join the cluster; see ``Cluster.admit``."""
    cluster = current()
    if cluster is None:
        return {
            "error": "this worker drives no cluster: name the address of the process that has called actorrpc.init()"
        }
    return cluster.admit(request)


def register(record: bytes, facts: Mapping[str, Any] | None = None) -> None:
    """Say that a worker has joined; ``facts`` where it has come by itself."""
    _here().register(WorkerRecord.from_bytes(record), facts)


def give_back(booking: int) -> None:
    """Give back what an actor has booked."""
    if (cluster := current()) is not None:
        cluster.give_back(booking)


def leaving(worker: str) -> None:
    """Say that a process has begun to leave by itself."""
    if (cluster := current()) is not None:
        cluster.leaving(worker)


def check(spec: ProcessSpec) -> None:
    """Look whether there can be a place for an actor that another worker makes."""
    _here().check(spec)


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
