"""Descriptions of an actor that workers send each other, and the errors with which an actor ends itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from actorrpc._exceptions import say
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
