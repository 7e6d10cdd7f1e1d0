"""What becomes of actors: words that supervisors and callers use between each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from actorrpc.actors.processes import DeathReport

__all__ = ["IN_RESTORE", "ActorState", "Restarting"]

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
        resident_id: of its present incarnation.
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
    resident_id: int = 0
    pending: int = -1
