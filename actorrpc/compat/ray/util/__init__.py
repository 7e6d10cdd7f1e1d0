"""``ray.util``: a pool of actors, a queue, placement groups, and other helpers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from actorrpc import actors
from actorrpc.actors import Empty, Full
from actorrpc.cluster.join import own_address
from actorrpc.compat.ray.exceptions import rays_words
from actorrpc.compat.ray.names import missing, module
from actorrpc.compat.ray.object_ref import unwrap
from actorrpc.compat.ray.options import Extras, for_actors
from actorrpc.compat.ray.placement import (
    DoesNotExist,
    Exists,
    In,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    NotIn,
    PlacementGroup,
    PlacementGroupSchedulingStrategy,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from actorrpc.compat.ray.runtime_context import get_runtime_context
from actorrpc.compat.ray.util import state

__all__ = [
    "ActorPool",
    "actor_pool",
    "get_current_placement_group",
    "get_node_ip_address",
    "get_placement_group",
    "list_named_actors",
    "placement_group",
    "placement_group_table",
    "queue",
    "remove_placement_group",
    "scheduling_strategies",
    "state",
]

A = TypeVar("A")
T = TypeVar("T")
V = TypeVar("V")


class _PoolTask:
    """Calls a user's ``fn(actor, value)``, and replaces Ray's ObjectRefs in its result by actorrpc's."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function = function

    def __call__(self, actor: Any, value: Any) -> Any:
        found = self._function(actor, value)
        return list(map(unwrap, found)) if isinstance(found, list) else unwrap(found)


class ActorPool(actors.ActorPool[A], Generic[A]):
    """Distributes tasks to actors. Each actor executes one task at a time. See :class:`actorrpc.ActorPool`.

    Args:
        actors: the handles of the actors.
    """

    def submit(self, fn: Callable[[A, V], Any], value: V) -> None:
        """Call ``fn(actor, value)``, which returns an ObjectRef, when an actor is free: at once, or while a result is awaited."""
        super().submit(_PoolTask(fn) if callable(fn) else fn, value)

    def get_next(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Wait for the next task, in the order in which the tasks were submitted, and return its result."""
        with rays_words:
            return super().get_next(timeout, ignore_if_timedout)

    def get_next_unordered(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Wait for the first task that ends, and return its result."""
        with rays_words:
            return super().get_next_unordered(timeout, ignore_if_timedout)


class Queue(actors.Queue[T], Generic[T]):
    """A first-in, first-out queue, used from any number of processes. See :class:`actorrpc.Queue`.

    Args:
        maxsize: the greatest number of items; 0 or less: no limit.
        actor_options: options of the actor in which the queue lives.
    """

    def __init__(self, maxsize: int = 0, actor_options: Mapping[str, Any] | None = None) -> None:
        options, _ = for_actors(actor_options or {}, Extras())
        super().__init__(maxsize, options)

    def _call(self, name: str, *args: Any) -> actors.ObjectRef[Any]:
        return super()._call(name, *map(unwrap, args))

    def _wait(self, ref: actors.ObjectRef[Any], ticket: tuple[int, int]) -> Any:
        with rays_words:
            return super()._wait(ref, ticket)

    async def _wait_async(self, ref: actors.ObjectRef[Any], ticket: tuple[int, int]) -> Any:
        with rays_words:
            return await super()._wait_async(ref, ticket)

    def __repr__(self) -> str:
        return f"<ray.util.queue.Queue(maxsize={self.maxsize}) in {self.actor!r}>"


def get_node_ip_address() -> str:
    """Return the address of this machine; the loopback address without a network."""
    return own_address()


def list_named_actors(all_namespaces: bool = False) -> list[Any]:
    """Return the names of living actors; with ``all_namespaces``, dicts of name and namespace."""
    own = get_runtime_context().namespace
    named = [each for each in actors.list_actors() if each.name and each.state != "DEAD"]
    if all_namespaces:
        return [{"name": each.name, "namespace": each.namespace} for each in named]
    return [each.name for each in named if each.namespace == own]


actor_pool = module("ray.util.actor_pool", "a pool of actors that share work.", ActorPool)
queue = module("ray.util.queue", "a first-in, first-out queue that lives in an actor.", Empty, Full, Queue)
scheduling_strategies = module(
    "ray.util.scheduling_strategies",
    "objects that say where an actor is placed.",
    DoesNotExist,
    Exists,
    In,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    NotIn,
    PlacementGroupSchedulingStrategy,
)
module(  # the attribute ``ray.util.placement_group`` is the function, as on Ray
    "ray.util.placement_group",
    "bundles of resources that are placed together.",
    PlacementGroup,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
__getattr__ = missing("ray.util", __all__)
