"""Descriptions of actors, of their processes and of their deaths, which workers, supervisors and spawners of processes exchange.

A higher package (the embedded cluster) puts a :class:`Spawner` into the runtime; packages of actors only use these types.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

from actorrpc._exceptions import say
from actorrpc.errors import RpcError
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerInfo, WorkerKey

if TYPE_CHECKING:
    from actorrpc.actors.refs.snapshot import Snapshot
    from actorrpc.actors.spec.class_info import ClassInfo
    from actorrpc.actors.spec.options import ActorOptions
    from actorrpc.rpc.rref import RRef

__all__ = [
    "IN_RESTORE",
    "ActorDescriptor",
    "ActorExit",
    "ActorSpec",
    "ActorState",
    "DeathReport",
    "HostedActorGoneError",
    "Location",
    "ProcessSpec",
    "Restarting",
    "SharedSlot",
    "Spawner",
    "exit_text",
]

_code_of: Final[Callable[[SystemExit], Any]] = SystemExit.__dict__[
    "code"
].__get__  # a subclass may hide the attribute


class ActorExit(BaseException):
    """Raised by ``exit_actor()`` in a method. The executor of the actor catches it, and ends the actor without a restart.

    Not an Exception, so that ``except Exception`` in a method does not catch it.
    """


def exit_text(exit: SystemExit) -> str:
    """Return the reason of an actor's end by ``sys.exit()``. Unlike after ``exit_actor()``, the actor may be restarted."""
    code = _code_of(exit)
    return f"sys.exit({'' if code is None else say(code, repr)[:80]}) was called in it"


class HostedActorGoneError(RpcError):
    """The actor does not live on the called worker now. Internal: the caller's route then asks the supervisor."""

    maybe_executed = False

    def __init__(self, instance_id: int, why: str = "") -> None:
        super().__init__(instance_id, why)
        self.instance_id = instance_id
        self.why = why

    def __str__(self) -> str:
        return f"there is no actor {self.instance_id:016x} here{': ' if self.why else ''}{self.why}"


@dataclass(frozen=True, slots=True)
class Location:
    """Where an actor lives in one of its incarnations."""

    worker: WorkerKey
    worker_name: str
    instance_id: int
    epoch: int
    pid: int = 0


def _restore(made: Any, state: tuple[Any, ...]) -> None:
    for name, value in zip(made.__slots__, state, strict=True):
        object.__setattr__(made, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorDescriptor:
    """The description of an actor. A handle is sent in this form.

    Attributes:
        supervisor, supervisor_name: the worker that supervises the actor.
        anchor: the RRef that keeps the actor alive; None in weak handles.
        location: where the actor lived when the descriptor was made, if it was alive.
    """

    actor_id: int
    info: ClassInfo
    supervisor: WorkerKey
    supervisor_name: str
    name: str | None = None
    namespace: str = ""
    anchor: RRef[Any] | None = None
    location: Location | None = None
    options: ActorOptions | None = None

    def __getstate__(self) -> tuple[Any, ...]:
        return _card_state(self)

    __setstate__ = _restore

    def held_by(self, anchor: RRef[Any]) -> ActorDescriptor:
        """Return this descriptor with an anchor, for a handle that keeps the actor alive."""
        made = object.__new__(ActorDescriptor)
        _restore(made, _card_state(self))
        object.__setattr__(made, "anchor", anchor)
        return made

    @property
    def title(self) -> str:
        """The actor's name in messages."""
        return (
            f"{self.info.name}({self.name!r})"
            if self.name
            else f"{self.info.name}#{self.actor_id & 0xFFFF:04x}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpec:
    """Everything that a worker needs to make an actor.

    Attributes:
        instance_id: identifies this incarnation.
        epoch: the number of the incarnation, from 0.
        cls, arguments: Snapshots of the class and of ``(args, kwargs)`` of its constructor. Both are None after the actor
            was made; ``arguments`` is also None if the constructor gets none.
        state: Snapshot of the last result of ``checkpoint()``; None if there is none, or after the actor was made.
        descriptor: the actor's descriptor without an anchor, for ``current_actor()``.
        alone: the process was started for this actor and ends with it.
    """

    actor_id: int
    instance_id: int
    epoch: int
    cls: Snapshot | None
    arguments: Snapshot | None
    info: ClassInfo
    options: ActorOptions
    descriptor: ActorDescriptor
    state: Snapshot | None = None
    alone: bool = False

    def __getstate__(self) -> tuple[Any, ...]:
        return _spec_state(self)

    __setstate__ = _restore

    def forget(self) -> None:
        """Release the data that is only needed to make the actor, after it was made."""
        for name in ("cls", "arguments", "state"):
            object.__setattr__(self, name, None)


# dataclasses' own __getstate__ would inspect every field, for every handle and every actor that is made.
_card_state: Final[Callable[[ActorDescriptor], tuple[Any, ...]]] = attrgetter(*ActorDescriptor.__slots__)
_spec_state: Final[Callable[[ActorSpec], tuple[Any, ...]]] = attrgetter(*ActorSpec.__slots__)


# -- processes, and how actors die -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process to be started as a worker of the group.

    Attributes:
        label: the actor's class, which marks the output of the process and is part of its worker name.
        num_cpus: how many CPUs it books, and how many threads torch uses in it; None: it books none and has one thread.
        num_gpus: how many devices it sees and books; None: it sees all devices, and books none.
        env: environment variables, which override the driver's.
        working_dir: its working directory; None for the driver's directory.
        host, labels, resources, spread: see :class:`~actorrpc.actors.spec.options.ActorOptions`; for its placement.
        wait_s: how many seconds it may wait for a worker that has the resources; None: see ``ActorOptions.placement_timeout``.
        booking: the number of its booking; 0 if it books no resources.
        own: whether it must be a process of its own, not a slot in a shared worker.
        worker: the name of the worker on which the slot must be; None: any worker.
        bundle: the placement group, and the number of the bundle in the group (-1: any), whose resources it uses.
        shared: whether it is started as a worker for several actors: its machine then has fewer resources for other actors.
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
    worker: str | None = None
    bundle: tuple[str, int] | None = None
    shared: bool = False

    @property
    def is_picky(self) -> bool:
        """Whether it restricts its placement by more than the numbers of CPUs and devices."""
        return bool(
            self.host
            or self.labels
            or self.resources
            or self.spread
            or self.worker is not None
            or self.bundle
        )

    @property
    def books(self) -> bool:
        """Whether it has a booking, also in a process of its own."""
        return bool(self.is_picky or self.num_cpus or self.num_gpus)


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

    def lend(self, booking: int, change: int) -> None:
        """Record that a task has begun (1) or ended (-1) to wait: its CPUs are not counted while it waits."""

    def capacity(self, spec: ProcessSpec) -> Future[int]:
        """Return a future of how many such actors could live at a time; it fails with PlacementError if there is no place."""

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
        dead_for: seconds since its death; 0 if it is not dead.
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
    dead_for: float = field(default=0.0, compare=False)
    detached: bool = False
    supervisor: str = ""
    instance_id: int = 0
    pending: int = -1
