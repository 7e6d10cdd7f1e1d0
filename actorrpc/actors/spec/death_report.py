"""How actors die: the types that supervisors, callers and spawners of processes exchange.

A higher package (the embedded cluster) puts a :class:`Spawner` into the runtime; packages of actors only use these types.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerInfo

__all__ = ["IN_RESTORE", "ActorState", "DeathReport", "ProcessSpec", "Restarting", "SharedSlot", "Spawner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process to be started as a worker of the group.

    Attributes:
        label: the actor's class, which marks the output of the process and is part of its worker name.
        num_cpus: how many threads torch may use in it; None means one.
        num_gpus: how many devices it sees; None: all devices, without reserving any.
        env: environment variables, which override the driver's.
        working_dir: its working directory; None for the driver's directory.
        host, labels, resources, spread: see :class:`~actorrpc.actors.spec.options.ActorOptions`; for its placement.
        wait_s: how many seconds it may wait for a worker that has the resources; None: see ``ActorOptions.placement_timeout``.
        booking: the number of its booking; 0 if it books no resources.
        own: whether it must be a process of its own, not a slot in a shared worker.
        rank: the rank of the worker on which the slot must be; None: any worker.
    """

    label: str
    num_cpus: float | None = None
    num_gpus: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str | None = None
    host: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    spread: bool = False
    wait_s: float | None = None
    booking: int = 0
    own: bool = False
    rank: int | None = None

    @property
    def is_picky(self) -> bool:
        """Whether it restricts its placement by more than the numbers of processors and devices."""
        return bool(self.host or self.labels or self.resources or self.spread or self.rank is not None)


@dataclass(frozen=True, slots=True, repr=False)
class SharedSlot(WorkerInfo):
    """A place in a worker that several actors share. A spawner may return it instead of a new process.

    Attributes:
        booking: the number with which :meth:`Spawner.give_back` returns it.
    """

    booking: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathReport:
    """The known facts about the end of a process.

    Attributes:
        exit_code: its exit status; None if a signal ended it, or if it is unknown.
        signal: the number of the signal that ended it.
        stderr: the last lines that it wrote to its standard error.
        peak_memory: the most memory that it used, in bytes; 0 if unknown.
        uptime: how long it lived, in seconds; 0 if unknown.
    """

    worker: str
    pid: int = 0
    exit_code: int | None = None
    signal: int | None = None
    stderr: tuple[str, ...] = ()
    peak_memory: int = 0
    uptime: float = 0.0

    def describe(self) -> str:
        """Return a line that describes the process's end, followed by the last lines of standard error if there are any."""
        who = f"the process of worker {self.worker!r}" + (f" (pid {self.pid})" if self.pid else "")
        if self.signal is not None:
            try:
                how = f"was ended by {signals.Signals(self.signal).name}"
            except ValueError:
                how = f"was ended by signal {self.signal}"
            if self.signal == signals.SIGKILL:
                how += " (kill -9, or out of memory)"
        elif self.exit_code is not None:
            how = f"exited with code {self.exit_code}"
        else:
            how = "ended"
        facts = []
        if self.uptime:
            facts.append(f"up {self.uptime:.1f} s")
        if self.peak_memory:
            facts.append(f"peak memory {self.peak_memory / (1 << 20):.0f} MB")
        text = f"{who} {how}" + (f" ({', '.join(facts)})" if facts else "")
        if self.stderr:
            text += "; its last lines on stderr:\n    " + "\n    ".join(self.stderr)
        return text


class Spawner(Protocol):
    """Starts and ends worker processes. Thread-safe; nothing in it blocks."""

    def spawn(self, spec: ProcessSpec) -> Future[WorkerInfo]:
        """Start a process; the future completes when it has joined the group, or fails with the reason.

        If an existing worker is a better place, the future's value is a :class:`SharedSlot` in that worker.
        """

    def give_back(self, booking: int) -> None:
        """Free the resources, or the slot, of a booking. Idempotent."""

    def release(self, worker: str) -> None:
        """Let a process end when no object that lives in it is referenced any longer."""

    def kill(self, worker: str) -> None:
        """End a process at once (SIGKILL)."""

    def report(self, worker: str) -> Future[DeathReport]:
        """Return a future of the report on a process's end; it fails with UnknownWorkerError for a process of another spawner."""

    def owns(self, worker: str) -> bool:
        """Say whether this spawner has started the worker."""


# A note on an error of restore(), by which the supervisor distinguishes it from an error of the constructor.
IN_RESTORE: Final = (
    "raised by restore(), which got the value that checkpoint() of the former incarnation had returned"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarting:
    """The answer of a supervisor that an actor's incarnation has ended, and that another incarnation will be made.

    Attributes:
        text: how the incarnation ended, in words.
        report: the report on the end of its process; None if there is none.
        moved: whether the actor has not died, but moves to another worker.
    """

    text: str
    report: DeathReport | None = None
    moved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorState:
    """The state of an actor according to its supervisor: a row of ``list_actors()``.

    Attributes:
        state: ``"PENDING_CREATION"``, ``"ALIVE"``, ``"RESTARTING"``, ``"ENDING"`` or ``"DEAD"`` (Ray's words, except for
            ENDING: its last handle was freed, and its last calls are running).
        worker: the name of the worker where it lives or is being made, or has lived before its restart; empty if it is dead.
        restarts: how often it was restarted.
        death_cause: why it is dead, or how it died last; empty if it has never died.
        supervisor: the name of the worker that supervises it.
        instance_id: the number of its present incarnation; 0 if there is none.
        pending: how many calls wait in its mailbox; -1 if unknown.
    """

    actor_id: int
    class_name: str
    name: str | None
    namespace: str
    state: str
    worker: str = ""
    pid: int = 0
    restarts: int = 0
    death_cause: str = ""
    detached: bool = False
    supervisor: str = ""
    instance_id: int = 0
    pending: int = -1
