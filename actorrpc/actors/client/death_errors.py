"""What one process knows about the deaths of an actor, and the errors of its calls: each call gets an error of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actorrpc.errors import (
    ActorDiedError,
    ActorUnavailableError,
)
from actorrpc.serialization import exceptions

if TYPE_CHECKING:
    from actorrpc.actors.client.call_template import CallTemplate
    from actorrpc.actors.spec.actor_spec import ActorDescriptor
    from actorrpc.actors.spec.death_report import Restarting

__all__ = ["Fate", "forgotten", "unreachable"]


class Fate:
    """Whether an actor is dead or restarts, according to its supervisor and its calls. The queue's lock guards it.

    Attributes:
        death: why the actor is dead, if it is known to be.
        after: the last incarnation that is known to be gone; -1: none.
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
        """Record the end of an incarnation; ``oldest`` names this process's first call that it did not answer."""
        self.after, self._verdict, self._oldest = epoch, None, oldest

    def decided(self, verdict: Restarting) -> None:
        """Record that the supervisor is about to restart the actor, or to move it."""
        self._verdict = verdict

    @property
    def is_decided(self) -> bool:
        """Whether the supervisor has said what becomes of the actor since its last incarnation was lost."""
        return self._verdict is not None

    @property
    def restarts(self) -> bool:
        """Whether the actor is known to be dead and to be restarted; true also when it lives again."""
        return self._verdict is not None and not self._verdict.moved

    def waits_for(self) -> str:
        """Say, for messages, what calls wait for that cannot be sent."""
        if self._verdict is not None:
            return f"{self._title} to be restarted ({self._verdict.text})"
        return (
            f"{self._title} to be created"
            if self.after < 0
            else f"news of {self._title}, which cannot be reached"
        )

    def died(self, template: CallTemplate | None, maybe_executed: bool | None) -> ActorDiedError:
        """Return the error of a call, or of a question where ``template`` is None, to an actor that is dead for good."""
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
        """Return the error of a call that an actor's death cut short which comes back to life, or is out of reach."""
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
        """Return the death of an actor whose supervisor cannot be asked: owned actors end with their creator."""
        return ActorDiedError(
            f"{self._title} is dead, or out of reach for good: worker {self._supervisor!r}, which looked after it, is gone "
            f"({exceptions.original(error)})",
            actor=self._title,
            actor_id=self._actor_id,
            worker=self._supervisor,
        )


def forgotten(actor_id: int, supervisor: str) -> ActorDiedError:
    """Return the death of an actor that its supervisor does not know, or no longer knows."""
    return ActorDiedError(
        f"actor {actor_id:016x} is dead: worker {supervisor!r} does not know it any more",
        worker=supervisor,
        actor_id=actor_id,
    )


def unreachable(title: str, actor_id: int, worker: str, supervisor: str) -> ActorUnavailableError:
    """Return the error of a call to an actor that its supervisor can reach, and the caller cannot."""
    return ActorUnavailableError(
        f"{title} lives on worker {worker!r}, which can be reached from worker {supervisor!r} but not from the caller's",
        worker=worker,
        actor=title,
        actor_id=actor_id,
    )
