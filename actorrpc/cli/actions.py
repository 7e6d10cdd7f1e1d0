"""Actions that change a job: kill or restart an actor, drain a worker. The page and ``actorrpc drain`` use them."""

from __future__ import annotations

import time
from typing import Final

from actorrpc.cli.views import Picture
from actorrpc.errors import ConfigError, RpcError
from actorrpc.observe.outside import GroupLook
from actorrpc.observe.visitor import Visit

__all__ = ["PARTS", "act"]

PARTS: Final = ("process", "actors", "supervised")
"""The parts of the state that :func:`act` needs."""

_ACT_S: Final = 5.0  # how long connecting to the worker that runs an action may take, and how long its answer


def act(seen: GroupLook, what: str, whom: str, seconds: float = 0.0) -> str:
    """Apply an action to an actor, by its id, or to a worker, by its name; return a sentence about the result. Blocks.

    Args:
        seen: the state of the group, with :data:`PARTS`.
        what: ``"kill"``, ``"restart"`` or ``"drain"``.
        seconds: the time-out of a drain; 0 for the default.

    Raises:
        ConfigError: there is no such actor or worker, or the action does not apply to it.
        RpcError, OSError: the worker that must run the action cannot be reached, or refuses it.
    """
    picture = Picture.of(seen)
    if what == "drain":
        worker = picture.state.worker(whom)
        if worker is None or worker.rank == 0:
            raise ConfigError(f"there is no worker {whom!r} that could be drained")
        by = next((each.name for each in picture.state.workers if each.rank == 0), "")
        said = (
            f"worker {whom} is drained: nothing new is placed there, and it leaves when its calls have ended"
        )
    else:
        actor = next((each for each in picture.state.actors if each.actor_id == whom), None)
        if actor is None or actor.state == "DEAD":
            raise ConfigError("that actor is dead or does not exist")
        if what == "restart" and actor.max_restarts == 0:
            raise ConfigError(f"{actor.title} cannot be restarted: its max_restarts is 0")
        by = actor.supervisor
        said = f"{actor.title} " + ("is killed" if what == "kill" else "begins anew")
    record = next((record for record, _ in seen.answers.values() if record.name == by), None)
    if record is None:
        raise ConfigError(f"worker {by!r}, which must run this action, was not found")
    visit = Visit(seen.target(record), time.monotonic() + _ACT_S, acts=True)
    try:
        problem = visit.act(what, whom, time.monotonic() + _ACT_S, seconds)
    finally:
        visit.close()
    if problem:
        raise RpcError(problem)
    return said
