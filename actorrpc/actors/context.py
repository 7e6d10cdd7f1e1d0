"""The runtime: the parts of the actor layer that are in force in this process.

``api.py`` makes it when the process joins a group, and removes it when the process leaves. A package gets the parts of higher
packages from it, and so need not import these packages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actorrpc.agent.context import current_worker
from actorrpc.errors import NotInitializedError

if TYPE_CHECKING:
    from actorrpc.agent.agent import Agent
    from actorrpc.rpc.refcount.runtime import References

__all__ = ["Runtime", "current", "runtime", "set_autostart"]


class Runtime:
    """One process's actor layer. Each part is thread-safe.

    The parts have no types here, because this module would then import every package of actors. Code that uses a part
    annotates it: ``streams: Streams = runtime().streams``.

    Attributes:
        agent, references: the agent and the RRefs of this worker.
        registry: the actors that live in this process.
        routes: the routes to the actors that this process calls.
        supervisor: supervises the actors that this process created.
        names: the access to the table of named actors, which rank 0 has.
        streams: the streams of generators that are produced or read in this process.
        host_copies: the values that this process has fetched, or is fetching, from other workers.
        offers: the tensors of this process that transports offer to readers.
        generations, members: the collectives that this process made, and its actors that are members of collectives.
        task_pools: the runners, which are actors, to which this process sends the calls of its remote functions.
        spawner: the Spawner, which starts processes for actors; None if actors are placed on the group's workers.
    """

    __slots__ = (
        "agent",
        "generations",
        "host_copies",
        "members",
        "names",
        "offers",
        "references",
        "registry",
        "routes",
        "spawner",
        "streams",
        "supervisor",
        "task_pools",
    )

    def __init__(self, agent: Agent, references: References) -> None:
        self.agent = agent
        self.references = references
        self.registry: Any
        self.routes: Any
        self.supervisor: Any
        self.names: Any
        self.streams: Any
        self.host_copies: Any
        self.offers: Any
        self.generations: Any
        self.members: Any
        self.spawner: Any = None
        self.task_pools: Any


_autostart: Callable[[], None] | None = None


def set_autostart(start: Callable[[], None] | None) -> Callable[[], None] | None:
    """Set the function that starts the embedded cluster when actors are used in no group; return the former function."""
    global _autostart
    before, _autostart = _autostart, start
    return before


def current() -> Runtime | None:
    """Return the runtime in force; None if this process is in no group."""
    worker = current_worker()
    return None if worker is None else worker.actors


def runtime(*, start: bool = False) -> Runtime:
    """Return the runtime in force.

    Args:
        start: start the embedded cluster if this process is in no group.

    Raises:
        NotInitializedError: this process has no runtime.
    """
    found = current()
    if found is None and start and _autostart is not None:
        _autostart()
        found = current()
    if found is None:
        raise NotInitializedError(
            "no actors can be used in this process yet: call actorrpc.init() (or init_rpc() in every worker of a group) first"
        )
    return found
