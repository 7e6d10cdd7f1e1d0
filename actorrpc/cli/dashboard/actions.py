"""The actions of the page with ``--allow-actions``: kill and restart actors, drain workers. The target is looked up first."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Final

from actorrpc.cli.views import Picture
from actorrpc.errors import ConfigError, RpcError
from actorrpc.observe.visitor import Target, Visit

if TYPE_CHECKING:
    from actorrpc.cli.dashboard.feed import See
    from actorrpc.observe.outside import GroupLook

__all__ = ["act", "request_of"]

_log = logging.getLogger("actorrpc.cli")
_PATIENCE_S: Final = 5.0
_ACTIONS: Final = ("kill", "restart", "drain")
_PARTS: Final = ["process", "actors", "supervised"]


def request_of(body: bytes) -> tuple[str, str]:
    """Return the action of a request, and the actor or worker that it names.

    Raises:
        ConfigError: the request cannot be understood.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if (
        not isinstance(found, dict)
        or found.get("do") not in _ACTIONS
        or not isinstance(found.get("whom"), str)
    ):
        raise ConfigError("there is no such action")
    return found["do"], found["whom"]


def act(see: See, what: str, whom: str) -> str:
    """Apply an action to an actor, by its id, or to a worker, by its name; return a sentence about the result. Blocks.

    Raises:
        ConfigError: there is no such actor or worker, or the action does not apply to it.
        RpcError, OSError: the worker that must run the action cannot be reached, or refuses it.
    """
    seen = see(_PARTS)
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
    visit = Visit(_target(seen, by), time.monotonic() + _PATIENCE_S, acts=True)
    try:
        problem = visit.act(what, whom, time.monotonic() + _PATIENCE_S)
    finally:
        visit.close()
    if problem:
        raise RpcError(problem)
    _log.info("from the page: %s %s", what, whom)
    return said


def _target(seen: GroupLook, name: str) -> Target:
    for record, _ in seen.answers.values():
        if record.name == name:
            return seen.target(record)
    raise ConfigError(f"worker {name!r}, which must run this action, was not found")
