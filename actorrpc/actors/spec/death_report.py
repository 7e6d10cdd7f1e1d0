"""How actors die, in the words that supervisors, callers and those who start processes use between each other.

A :class:`Spawner` is put into the runtime by a floor above (the embedded cluster); actors only know these words.
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
        label: what its output is marked with, and part of its worker name: the actor's class.
        num_cpus: how many threads torch may use in it; None leaves one.
        num_gpus: how many devices it sees; None hides none and reserves none.
        env: environment variables, over those of the driver.
        working_dir: where it runs; None for the driver's directory.
        host, labels, resources, spread: see :class:`~actorrpc.actors.spec.options.ActorOptions`; for where it is placed.
        wait_s: how long it may wait for a worker that has what it needs.
        booking: names what is booked for it; 0 where nothing is to be.
        own: it must be a process of its own, and no slot in a worker that others share.
        rank: the worker where it has to be; None where any will do.
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
        """Whether it says more of where it is to be than how many processors and devices it needs."""
        return bool(self.host or self.labels or self.resources or self.spread or self.rank is not None)


@dataclass(frozen=True, slots=True, repr=False)
class SharedSlot(WorkerInfo):
    """A place in a worker that others share: what a spawner gives instead of a process of its own.

    Attributes:
        booking: gives it back, with :meth:`Spawner.give_back`.
    """

    booking: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathReport:
    """What is known of a process that has ended.

    Attributes:
        exit_code: what it returned; None where a signal ended it, or where nobody knows.
        signal: the number of the signal that ended it.
        stderr: the last lines that it wrote to its standard error.
        peak_memory: the most memory it ever used, in bytes; 0 where unknown.
        uptime: how long it lived, in seconds; 0 where unknown.
    """

    worker: str
    pid: int = 0
    exit_code: int | None = None
    signal: int | None = None
    stderr: tuple[str, ...] = ()
    peak_memory: int = 0
    uptime: float = 0.0

    def describe(self) -> str:
        """Return it in words: one line, and behind it the last lines of standard error where there are any."""
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
        """Start a process; the future completes when it has joined the group, or fails saying why.

        Where it is better placed in a worker that is there already, the future gives a :class:`SharedSlot` in that.
        """

    def give_back(self, booking: int) -> None:
        """Give a slot back. Harmless when repeated."""

    def release(self, worker: str) -> None:
        """Let a process end by itself, once nothing that lives in it is referenced any more."""

    def kill(self, worker: str) -> None:
        """End a process at once (SIGKILL)."""

    def report(self, worker: str) -> Future[DeathReport]:
        """Return how a process ended; completes when it has. Fails with UnknownWorkerError if it is not ours."""

    def owns(self, worker: str) -> bool:
        """Say whether this spawner has started the worker."""


# The note of an error of restore(), from which its supervisor knows that it was not the constructor's.
IN_RESTORE: Final = (
    "raised by restore(), which was given what checkpoint() of the former incarnation had returned"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarting:
    """The actor's incarnation is gone, and another one is being made.

    Attributes:
        text: how it ended, in words.
        report: what is known of the end of its process.
        moved: it has not died, but is handed over to another worker.
    """

    text: str
    report: DeathReport | None = None
    moved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorState:
    """An actor, as its supervisor knows it: a row of ``list_actors()``.

    Attributes:
        state: ``"PENDING_CREATION"``, ``"ALIVE"``, ``"RESTARTING"``, ``"ENDING"`` or ``"DEAD"`` (Ray's words, but for
            ENDING: its last handle is gone and its last calls are running).
        worker: the name of the worker where it lives; empty where there is none.
        restarts: how often it has been made again.
        death_cause: why it is dead, or how it died last; empty if it has not.
        supervisor: the name of the worker that looks after it.
        instance_id: of its present incarnation.
        pending: how many calls wait there; -1 where nobody has asked.
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
