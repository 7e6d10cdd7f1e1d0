"""Where actors are to live, as objects: what ``ray.util.scheduling_strategies`` has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actorrpc.compat.ray.placement import PlacementGroup

__all__ = [
    "DoesNotExist",
    "Exists",
    "In",
    "NodeAffinitySchedulingStrategy",
    "NodeLabelSchedulingStrategy",
    "NotIn",
    "PlacementGroupSchedulingStrategy",
]


@dataclass(frozen=True)
class PlacementGroupSchedulingStrategy:
    """In a placement group.

    Attributes:
        placement_group: what ``placement_group()`` has returned; None for none.
        placement_group_bundle_index: in which of its bundles; -1: any.
        placement_group_capture_child_tasks: whether what it makes is in the group, too.
    """

    placement_group: PlacementGroup | None
    placement_group_bundle_index: int = -1
    placement_group_capture_child_tasks: bool | None = None


@dataclass(frozen=True)
class NodeAffinitySchedulingStrategy:
    """On a node.

    Attributes:
        node_id: ``"NodeID"`` in ``ray.nodes()``.
        soft: run on another node if this node does not exist.
    """

    node_id: str
    soft: bool
    _spill_on_unavailable: bool = False
    _fail_on_unavailable: bool = False


class In:
    """One of ``values``."""

    def __init__(self, *values: str) -> None:
        self.values = list(values)


class NotIn:
    """Any value except ``values``."""

    def __init__(self, *values: str) -> None:
        self.values = list(values)


class Exists:
    """Any value."""


class DoesNotExist:
    """No value."""


@dataclass(frozen=True)
class NodeLabelSchedulingStrategy:
    """On a node with certain labels.

    Attributes:
        hard: what they must be, by name.
        soft: what they should be; ignored.
    """

    hard: dict[str, Any] | None = None
    soft: dict[str, Any] | None = None
