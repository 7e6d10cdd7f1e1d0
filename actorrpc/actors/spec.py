"""What workers tell each other of an actor: how to make it, where it is, and how handles travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actorrpc.errors import RpcError
from actorrpc.rpc.fork_messages import WorkerKey

if TYPE_CHECKING:
    from actorrpc.actors.methods import ClassInfo
    from actorrpc.actors.options import ActorOptions
    from actorrpc.actors.snapshot import Snapshot
    from actorrpc.rpc.rref import RRef

__all__ = ["ActorSpec", "Card", "Location", "ResidentGoneError"]


class ResidentGoneError(RpcError):
    """The actor does not live in that worker (any more). Never reaches users: routes ask the supervisor."""

    maybe_executed = False

    def __init__(self, resident_id: int, why: str = "") -> None:
        super().__init__(resident_id, why)
        self.resident_id = resident_id
        self.why = why

    def __str__(self) -> str:
        return f"there is no actor {self.resident_id:016x} here{': ' if self.why else ''}{self.why}"


@dataclass(frozen=True, slots=True)
class Location:
    """Where an actor is in one of its incarnations."""

    worker: WorkerKey
    worker_name: str
    resident_id: int
    epoch: int
    pid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """An actor's visiting card: what a handle travels as.

    Attributes:
        supervisor: the worker that looks after it, and its name.
        anchor: the RRef that keeps the actor alive; None in weak handles.
        location: where it was when the card was written, if it was alive.
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

    @property
    def title(self) -> str:
        """How messages name the actor."""
        return (
            f"{self.info.name}({self.name!r})"
            if self.name
            else f"{self.info.name}#{self.actor_id & 0xFFFF:04x}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpec:
    """Everything a worker needs to bring an actor to life.

    Attributes:
        resident_id: names this incarnation.
        epoch: counts incarnations, from 0.
        cls, arguments: Snapshots of the class and of ``(args, kwargs)`` of its constructor; None when it has been made.
        state: Snapshot of what ``checkpoint()`` returned last; None for a first life.
        card: the actor's card without an anchor: what ``current_actor()`` gives inside.
        alone: the process has been started for this actor and ends with it.
    """

    actor_id: int
    resident_id: int
    epoch: int
    cls: Snapshot | None
    arguments: Snapshot | None
    info: ClassInfo
    options: ActorOptions
    card: Card
    state: Snapshot | None = None
    alone: bool = False
