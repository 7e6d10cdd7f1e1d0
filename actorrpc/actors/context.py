"""The runtime: what the actor layer has in force in this process, in one place.

``startup.py`` fills it when the process joins a group and empties it when it leaves. Rooms find each other here,
so that none has to import the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from actorrpc.agent.context import here
from actorrpc.errors import NotInitializedError

if TYPE_CHECKING:
    from actorrpc.actors.client.route import Routes
    from actorrpc.actors.collectives.member import Members
    from actorrpc.actors.collectives.rendezvous import Generations
    from actorrpc.actors.host.registry import ActorRegistry
    from actorrpc.actors.spec.death_report import Spawner
    from actorrpc.actors.streams.producer import Streams
    from actorrpc.actors.supervision.names import Names
    from actorrpc.actors.supervision.supervisor import Supervisor
    from actorrpc.agent.agent import Agent
    from actorrpc.rpc.refcount.runtime import References

__all__ = ["Runtime", "current", "runtime", "set_autostart", "set_runtime"]


class Runtime:
    """One process's actor layer. Its parts are thread-safe each.

    Attributes:
        agent, references: the calls and references below.
        residents: the actors that live here.
        routes: the ways to the actors that are called from here.
        supervisor: looks after the actors that this process created.
        names: knows actors by name; only that of rank 0 is asked.
        streams: what generator methods here produce.
        meetings, members: the collectives that were made here, and those that actors here are in.
        spawner: starts processes for actors; None where actors go to the group's workers.
    """

    __slots__ = (
        "agent",
        "meetings",
        "members",
        "names",
        "references",
        "residents",
        "routes",
        "spawner",
        "streams",
        "supervisor",
    )

    def __init__(self, agent: Agent, references: References) -> None:
        self.agent = agent
        self.references = references
        self.residents: ActorRegistry
        self.routes: Routes
        self.supervisor: Supervisor
        self.names: Names
        self.streams: Streams
        self.meetings: Generations
        self.members: Members
        self.spawner: Spawner | None = None


_runtime: Runtime | None = None
_autostart: Callable[[], None] | None = None


def set_runtime(runtime: Runtime | None) -> None:
    """Name the runtime in force in this process."""
    global _runtime
    _runtime = runtime


def set_autostart(start: Callable[[], None] | None) -> None:
    """Name what starts the embedded cluster when actors are used before anything runs."""
    global _autostart
    _autostart = start


def current() -> Runtime | None:
    """Return the runtime in force, if there is one."""
    return _runtime if _runtime is not None else _one_of_several()


def _one_of_several() -> Runtime | None:
    several = here()
    return None if several is None else several.actors


def runtime(*, start: bool = False) -> Runtime:
    """Return the runtime in force.

    Args:
        start: start the embedded cluster if nothing runs.

    Raises:
        NotInitializedError: there is none.
    """
    found = _runtime
    if found is None:
        found = _one_of_several()
    if found is not None:
        return found
    if start and _autostart is not None:
        _autostart()
        if _runtime is not None:
            return _runtime
    raise NotInitializedError(
        "no actors can be used in this process yet: call actorrpc.init() (or init_rpc() in every worker of a group) first"
    )
