"""The errors of calls whose actor has died or is away: each call gets one of its own, which says what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from actorrpc.core import exceptions
from actorrpc.core.exception_parts import CAUSE, TRACEBACK, is_a
from actorrpc.core.exception_text import line_of, notes_of
from actorrpc.errors import (
    ActorDiedError,
    ActorUnavailableError,
    PlacementError,
    RemoteError,
    RemoteTraceback,
    UnplacedActorError,
)

if TYPE_CHECKING:
    from actorrpc.actors.fates import Restarting
    from actorrpc.actors.plans import Plan
    from actorrpc.actors.processes import DeathReport
    from actorrpc.actors.supervised import Supervised, Verdict

__all__ = [
    "IN_RESTORE",
    "dead",
    "died",
    "forgotten",
    "not_made",
    "orphaned",
    "unavailable",
    "unreachable",
    "without_worker",
]

#: a note on what restore() has raised, which tells it from what the constructor has raised
IN_RESTORE: Final = (
    "raised by restore(), which was given what checkpoint() of the former incarnation had returned"
)


def dead(
    actor: Supervised,
    text: str,
    report: DeathReport | None,
    cause: BaseException | None,
    verdict: Verdict,
) -> ActorDiedError:
    """Return the death of an actor, as it is known where it was looked after.

    Args:
        text: how it ended.
        verdict: why there is no further incarnation, where somebody could have wished for one.
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
        actor_id=actor.card.actor_id,
        report=report,
        cause=cause,
    )


def died(
    title: str, death: ActorDiedError, plan: Plan | None, maybe_executed: bool | None, oldest: str
) -> ActorDiedError:
    """Return the error of a call, or of a question where ``plan`` is None, to an actor that is dead for good.

    Args:
        oldest: the first call of this process that it had not answered, as far as that is known.
    """
    if plan is None:
        prefix = ""
    elif maybe_executed:
        prefix = f"the call of {plan.label} was not answered, and may have run: "
        if oldest and oldest != plan.label:
            prefix += f"(the oldest call of this process that was not answered is {oldest}) "
    else:
        prefix = f"the call of {plan.label} was not executed: "
    return type(death)(
        prefix + str(death.args[0]),
        maybe_executed=maybe_executed,
        worker=death.worker,
        actor=title,
        actor_id=death.actor_id,
        method=None if plan is None else plan.method.name,
        report=death.report,
        cause=death.cause,
    )


def unavailable(
    title: str, actor_id: int, verdict: Restarting | None, plan: Plan | None, ran: bool | None, why: str
) -> ActorUnavailableError:
    """Return the error of a call that an actor's death cut short which comes back to life, or is out of reach."""
    if verdict is not None:
        why += f": {verdict.text}"
    what = "" if plan is None else f"the call of {plan.label} on "
    text = "" if ran is None else "; it may have run" if ran else "; it was not executed"
    return ActorUnavailableError(
        f"{what}{title} was not answered{text}, and is not made again: {why}. Call again later, or give "
        "max_task_retries= if it may be made twice",
        maybe_executed=ran,
        actor=title,
        actor_id=actor_id,
        method=None if plan is None else plan.method.name,
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


def without_worker(actor: Supervised, report: DeathReport | None, why: str) -> str:
    """Say how an incarnation has ended whose worker has.

    Args:
        report: what is known of its process's end.
        why: what else is known of why the worker ended; may be empty.
    """
    if actor.doomed:
        return actor.doomed
    if report is not None:
        text = report.describe()
    else:
        text = f"worker {actor.worker_name!r}, where it lived, has ended" + (f": {why}" if why else "")
    if actor.drained and not actor.killed:
        return f"{actor.drained}, and it does not move: {text}"
    return f"it was killed with kill(): {text}" if actor.killed else text


def not_made(error: BaseException, worker: str | None) -> tuple[str, bool]:
    """Say why an incarnation could not be made, and whether that is final: it is, but where only the place was missing.

    Args:
        error: what the worker has answered, or kept it from being asked.
        worker: its name; None where there was none yet.
    """
    original = exceptions.original(error)
    what = line_of(original)
    if is_a(error, RemoteError) and not is_a(original, ActorDiedError) and worker is not None:
        if CAUSE.__get__(original) is None:
            CAUSE.__set__(original, RemoteTraceback(exceptions.traceback_of(error)))  # for those who print it
        where = "restore()" if IN_RESTORE in notes_of(original) else "constructor"
        text, final = f"its {where} raised {what}", True
    elif worker is not None:
        text, final = f"it could not be made on worker {worker!r}: {what}", True
    elif is_a(original, PlacementError):
        text, final = str(original), False
    else:
        text, final = f"no process could be started for it: {what}", False
    TRACEBACK.__set__(original, None)
    return text, final
