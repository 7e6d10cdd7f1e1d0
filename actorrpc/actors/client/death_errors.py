"""The deaths of an actor that one process has noticed, and the errors of this process's calls to the actor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actorrpc.errors import (
    ActorDiedError,
    ActorUnavailableError,
)
from actorrpc.serialization import exceptions

if TYPE_CHECKING:
    from actorrpc.actors.client.call_template import CallTemplate
    from actorrpc.actors.spec.actor_spec import ActorDescriptor, Restarting

__all__ = ["Fate", "forgotten", "unreachable"]


class Fate:
    """Whether an actor is dead or restarts, as far as this process knows. The lock of the actor's CallQueue guards a Fate.

    Attributes:
        death: the reason why the actor is dead; None if the actor is not known to be dead.
        after: the number of the last incarnation that is known to have ended; -1: none has ended.
    """

    __slots__ = ("_actor_id", "_oldest", "_supervisor", "_title", "_verdict", "after", "death")

    def __init__(self, descriptor: ActorDescriptor) -> None:
        self._title, self._actor_id, self._supervisor = (
            descriptor.title,
            descriptor.actor_id,
            descriptor.supervisor_name,
        )
        self.death: ActorDiedError | None = None
        self.after = -1
        self._verdict: Restarting | None = None
        self._oldest = ""

    def lost(self, epoch: int, oldest: str) -> None:
        """Record the end of an incarnation; ``oldest`` is the label of this process's first call that was not answered then."""
        self.after, self._verdict, self._oldest = epoch, None, oldest

    def decided(self, verdict: Restarting) -> None:
        """Record that the supervisor is about to restart the actor, or to move it."""
        self._verdict = verdict

    @property
    def is_decided(self) -> bool:
        """Whether the supervisor has answered that the actor restarts or moves, since the last incarnation ended."""
        return self._verdict is not None

    @property
    def restarts(self) -> bool:
        """Whether the supervisor has decided to restart the actor. Stays true after the restart."""
        return self._verdict is not None and not self._verdict.moved

    def waits_for(self) -> str:
        """Describe, for messages, the event for which queued calls wait."""
        if self._verdict is not None:
            return f"{self._title} to be restarted ({self._verdict.text})"
        return (
            f"{self._title} to be created"
            if self.after < 0
            else f"the new location of {self._title}, which cannot be reached"
        )

    def died(self, template: CallTemplate | None, maybe_executed: bool | None) -> ActorDiedError:
        """Return a new error for a call to an actor that is dead for good, or, with ``template`` None, for a query about it."""
        death = self.death
        assert death is not None
        if template is None:
            prefix = ""
        elif maybe_executed:
            prefix = f"{template} was not answered, and may have run: "
            if self._oldest and self._oldest != template.label:
                prefix += f"(the oldest call of this process that was not answered is {self._oldest}) "
        else:
            prefix = f"{template} was not executed: "
        return type(death)(
            prefix + str(death.args[0]),
            maybe_executed=maybe_executed,
            worker=death.worker,
            actor=self._title,
            actor_id=death.actor_id,
            method=None if template is None else template.method.name,
            report=death.report,
            cause=death.cause,
        )

    def unavailable(self, template: CallTemplate | None, ran: bool | None, why: str) -> ActorUnavailableError:
        """Return a new error for a call that was not answered because the actor restarts or cannot be reached.

        Args:
            template: the template of the call; None: for a query of the actor's location.
            ran: whether the call may have run; None: unknown.
            why: the state of the actor, for the message.
        """
        verdict = self._verdict
        if verdict is not None:
            why += f": {verdict.text}"
        what = "" if template is None else f"{template} on "
        text = "" if ran is None else "; it may have run" if ran else "; it was not executed"
        return ActorUnavailableError(
            f"{what}{self._title} was not answered{text}, and is not made again: {why}. Call again later, or give "
            "max_task_retries= if it may be made twice",
            maybe_executed=ran,
            actor=self._title,
            actor_id=self._actor_id,
            method=None if template is None else template.method.name,
            report=None if verdict is None else verdict.report,
        )

    def orphaned(self, error: BaseException) -> ActorDiedError:
        """Return the error of an actor whose supervisor's worker has ended, because a supervised actor ends with that worker."""
        return ActorDiedError(
            f"{self._title} is dead, or out of reach for good: worker {self._supervisor!r}, its supervisor, has ended "
            f"({exceptions.original(error)})",
            actor=self._title,
            actor_id=self._actor_id,
            worker=self._supervisor,
        )


def forgotten(actor_id: int, supervisor: str) -> ActorDiedError:
    """Return the error of an actor whose supervisor has no record of it, or has dropped the record."""
    return ActorDiedError(
        f"actor {actor_id:016x} is dead: worker {supervisor!r} has no record of it any more",
        worker=supervisor,
        actor_id=actor_id,
    )


def unreachable(title: str, actor_id: int, worker: str, supervisor: str) -> ActorUnavailableError:
    """Return the error of a call to an actor that its supervisor can reach, but the caller cannot."""
    return ActorUnavailableError(
        f"{title} lives on worker {worker!r}, which can be reached from worker {supervisor!r} but not from the caller's",
        worker=worker,
        actor=title,
        actor_id=actor_id,
    )
