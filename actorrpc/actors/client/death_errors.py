"""The errors of calls whose actor has died or is away: each call gets one of its own, which says what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actorrpc.errors import (
    ActorDiedError,
    ActorUnavailableError,
)
from actorrpc.serialization import exceptions

if TYPE_CHECKING:
    from actorrpc.actors.client.call_template import CallTemplate
    from actorrpc.actors.spec.death_report import Restarting

__all__ = [
    "died",
    "forgotten",
    "orphaned",
    "unavailable",
    "unreachable",
]

#: a note on what restore() has raised, which tells it from what the constructor has raised


def died(
    title: str, death: ActorDiedError, template: CallTemplate | None, maybe_executed: bool | None, oldest: str
) -> ActorDiedError:
    """Return the error of a call, or of a question where ``template`` is None, to an actor that is dead for good.

    Args:
        oldest: the first call of this process that it had not answered, as far as that is known.
    """
    if template is None:
        prefix = ""
    elif maybe_executed:
        prefix = f"the call of {template.label} was not answered, and may have run: "
        if oldest and oldest != template.label:
            prefix += f"(the oldest call of this process that was not answered is {oldest}) "
    else:
        prefix = f"the call of {template.label} was not executed: "
    return type(death)(
        prefix + str(death.args[0]),
        maybe_executed=maybe_executed,
        worker=death.worker,
        actor=title,
        actor_id=death.actor_id,
        method=None if template is None else template.method.name,
        report=death.report,
        cause=death.cause,
    )


def unavailable(
    title: str,
    actor_id: int,
    verdict: Restarting | None,
    template: CallTemplate | None,
    ran: bool | None,
    why: str,
) -> ActorUnavailableError:
    """Return the error of a call that an actor's death cut short which comes back to life, or is out of reach."""
    if verdict is not None:
        why += f": {verdict.text}"
    what = "" if template is None else f"the call of {template.label} on "
    text = "" if ran is None else "; it may have run" if ran else "; it was not executed"
    return ActorUnavailableError(
        f"{what}{title} was not answered{text}, and is not made again: {why}. Call again later, or give "
        "max_task_retries= if it may be made twice",
        maybe_executed=ran,
        actor=title,
        actor_id=actor_id,
        method=None if template is None else template.method.name,
        report=None if verdict is None else verdict.report,
    )


def forgotten(actor_id: int, supervisor: str) -> ActorDiedError:
    """Return the death of an actor of which its supervisor knows nothing (any more)."""
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


def orphaned(title: str, actor_id: int, supervisor: str, error: BaseException) -> ActorDiedError:
    """Return the death of an actor whose supervisor cannot be asked: owned actors end with their creator."""
    return ActorDiedError(
        f"{title} is dead, or out of reach for good: worker {supervisor!r}, which looked after it, is gone "
        f"({exceptions.original(error)})",
        actor=title,
        actor_id=actor_id,
        worker=supervisor,
    )
