"""``ray.util``: a pool of actors, a queue, placement groups, and other helpers."""

from __future__ import annotations

from typing import Any

from actorrpc import actors
from actorrpc.cluster.join import own_address
from actorrpc.compat.ray.names import missing
from actorrpc.compat.ray.placement import (
    get_current_placement_group,
    get_placement_group,
    placement_group_table,
    remove_placement_group,
)
from actorrpc.compat.ray.runtime_context import get_runtime_context
from actorrpc.compat.ray.util import actor_pool, queue, scheduling_strategies, state
from actorrpc.compat.ray.util.actor_pool import ActorPool

# Imported after the module of the same name, so that `ray.util.placement_group` is the function.
from actorrpc.compat.ray.util.placement_group import placement_group

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


__getattr__ = missing("ray.util", __all__)
