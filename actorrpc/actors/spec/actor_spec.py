"""What workers tell each other of an actor: how to make it, where it is, how handles travel; how it ends itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from actorrpc._exception_text import say
from actorrpc.errors import RpcError
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.actors.refs.snapshot import Snapshot
    from actorrpc.actors.spec.class_info import ClassInfo
    from actorrpc.actors.spec.options import ActorOptions
    from actorrpc.rpc.rref import RRef

__all__ = ["ActorDescriptor", "ActorExit", "ActorSpec", "HostedActorGoneError", "Location", "exit_text"]

_code_of: Final[Callable[[SystemExit], Any]] = SystemExit.__dict__[
    "code"
].__get__  # a user's class may hide it


class ActorExit(BaseException):
    """Raised by ``exit_actor()`` in a method: the actor catches it and ends the actor without a restart.

    Not an Exception, so that the ``except Exception`` of a method lets it pass.
    """


def exit_text(exit: SystemExit) -> str:
    """Say that an actor has ended because of ``sys.exit()``: unlike with ``exit_actor()``, it may be made again."""
    code = _code_of(exit)
    return f"sys.exit({'' if code is None else say(code, repr)[:80]}) was called in it"


class HostedActorGoneError(RpcError):
    """The actor does not live in that worker (any more). Never reaches users: routes ask the supervisor."""

    maybe_executed = False

    def __init__(self, instance_id: int, why: str = "") -> None:
        super().__init__(instance_id, why)
        self.instance_id = instance_id
        self.why = why

    def __str__(self) -> str:
        return f"there is no actor {self.instance_id:016x} here{': ' if self.why else ''}{self.why}"


@dataclass(frozen=True, slots=True)
class Location:
    """Where an actor is in one of its incarnations."""

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
    """The description of an actor that a handle travels as.

    Attributes:
        supervisor: the worker that looks after it, and its name.
        anchor: the RRef that keeps the actor alive; None in weak handles.
        location: where it was when the descriptor was written, if it was alive.
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
        """Return the descriptor of a handle that keeps the actor alive."""
        made = object.__new__(ActorDescriptor)
        _restore(made, _card_state(self))
        object.__setattr__(made, "anchor", anchor)
        return made

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
        instance_id: names this incarnation.
        epoch: counts incarnations, from 0.
        cls, arguments: Snapshots of the class and of ``(args, kwargs)`` of its constructor; None when it has been made, or where
            it takes none.
        state: Snapshot of what ``checkpoint()`` returned last; None for a first life.
        descriptor: the actor's descriptor without an anchor: what ``current_actor()`` gives inside.
        alone: the process has been started for this actor and ends with it.
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
        """Let go of what only the making of the actor needs. For the worker that has made it."""
        for name in ("cls", "arguments", "state"):
            object.__setattr__(self, name, None)


# What dataclasses do themselves takes a look at every field, for every handle and every actor that is made.
_card_state: Final[Callable[[ActorDescriptor], tuple[Any, ...]]] = attrgetter(*ActorDescriptor.__slots__)
_spec_state: Final[Callable[[ActorSpec], tuple[Any, ...]]] = attrgetter(*ActorSpec.__slots__)
