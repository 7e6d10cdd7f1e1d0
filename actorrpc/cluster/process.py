"""What the driver knows of one worker process."""

from __future__ import annotations

from typing import Any

from actorrpc.actors.processes import DeathReport, ProcessSpec
from actorrpc.cluster.launcher import ForkServer
from actorrpc.cluster.logs import Output
from actorrpc.core.identity import WorkerInfo, WorkerRecord
from actorrpc.errors import PeerDiedError, RpcError
from actorrpc.futures import Future

__all__ = ["Process"]


class Process:
    """One process, from the wish for it to its end. Guarded by its cluster's lock.

    Attributes:
        creator: the worker that asked for it.
        future: completes when it has joined.
        pipes: the reading ends of its output, until the logs have them.
        doomed: it is to be killed as soon as it is there.
        over: it has ended; its report is still to come.
        asked: who waits for the report.
    """

    def __init__(self, id: int, name: str, rank: int, spec: ProcessSpec, creator: str) -> None:
        self.id = id
        self.name = name
        self.rank = rank
        self.spec = spec
        self.creator = creator
        self.future: Future[WorkerInfo] = Future()
        self.future.label = f"the start of a process for {spec.label}"
        self.message: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        self.pipes: tuple[int, int] | None = None
        self.server: ForkServer | None = None
        self.output: Output | None = None
        self.pid = 0
        self.begun = 0.0
        self.record: WorkerRecord | None = None
        self.timer: Any = None
        self.doomed = False
        self.over = False
        self.report: DeathReport | None = None
        self.asked: list[Future[DeathReport]] = []

    def killed(self) -> RpcError:
        """Return the error of a start that a kill has ended."""
        return PeerDiedError(
            f"{self.future.label}: it was killed before it had joined",
            maybe_executed=False,
            worker=self.name,
        )

    def not_started(self, why: str) -> RpcError:
        """Return the error of a start that has failed."""
        return PeerDiedError(
            f"the process for {self.spec.label!r} could not be started: {why}",
            maybe_executed=False,
            worker=self.name,
        )
