"""Texts and errors in which a supervisor describes why an actor died, or could not be made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actorrpc._exceptions import CAUSE, TRACEBACK, is_a, line_of, notes_of
from actorrpc.actors.spec.death_report import IN_RESTORE
from actorrpc.errors import (
    ActorDiedError,
    ConfigError,
    PlacementError,
    RemoteError,
    RemoteTraceback,
    UnplacedActorError,
)
from actorrpc.serialization import exceptions

if TYPE_CHECKING:
    from actorrpc.actors.spec.death_report import DeathReport
    from actorrpc.actors.supervision.record import ActorRecord, Incarnation, RestartVerdict

__all__ = ["dead", "not_made", "without_worker"]


def dead(
    actor: ActorRecord,
    text: str,
    report: DeathReport | None,
    cause: BaseException | None,
    verdict: RestartVerdict,
) -> ActorDiedError:
    """Return the error that describes an actor's death.

    Args:
        text: how the actor ended.
        verdict: contains why the actor is not restarted; empty if it was ended on purpose.
    """
    text = f"{actor.title} is dead{f' ({verdict.why_not})' if verdict.why_not else ''}: {text}"
    if verdict.before:
        text += "\n  before that, it had died like this:"
        text += "".join(f"\n    {number}. {each}" for number, each in enumerate(verdict.before, 1))
    kind = UnplacedActorError if is_a(cause, PlacementError) else ActorDiedError
    return kind(
        text,
        worker=actor.worker_name or None,
        actor=actor.title,
        actor_id=actor.descriptor.actor_id,
        report=report,
        cause=cause,
    )


def without_worker(life: Incarnation, report: DeathReport | None, why: str) -> str:
    """Describe the end of an incarnation whose worker has ended.

    Args:
        report: the report on the end of the worker's process.
        why: the known reason for the end of the worker if there is no report; may be empty.
    """
    if life.ended_by_group:
        return life.ended_by_group
    if report is not None:
        text = report.describe()
    else:
        text = f"worker {life.worker_name!r}, where it lived, has ended" + (f": {why}" if why else "")
    if life.drained and not life.killed:
        return f"{life.drained}, and it cannot move: {text}"
    return f"it was killed with kill(): {text}" if life.killed else text


def not_made(error: BaseException, worker: str | None) -> tuple[str, bool]:
    """Return why an incarnation could not be made, and whether this is final: it is not, if no worker was found for it.

    Args:
        error: the answer of the worker, or the error that prevented the request.
        worker: the worker's name; None if there was no worker yet.
    """
    original = exceptions.original(error)
    what = line_of(original)
    if is_a(error, RemoteError) and not is_a(original, ActorDiedError) and worker is not None:
        if CAUSE.__get__(original) is None:
            # Programs that print the error then show the traceback that the worker has sent.
            CAUSE.__set__(original, RemoteTraceback(exceptions.traceback_of(error)))
        where = "restore()" if IN_RESTORE in notes_of(original) else "constructor"
        text, final = f"its {where} raised {what}", True
    elif worker is not None:
        text, final = f"it could not be made on worker {worker!r}: {what}", True
    elif is_a(original, ConfigError):
        text, final = str(original), False
    else:
        text, final = f"no process could be started for it: {what}", False
    TRACEBACK.__set__(original, None)
    return text, final
