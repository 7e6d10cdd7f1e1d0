"""The classes of ``ray.util.scheduling_strategies``, which say where an actor is placed."""

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
    """Place the actor in a placement group.

    Attributes:
        placement_group: the return value of ``placement_group()``; None for no group.
        placement_group_bundle_index: the index of the bundle; -1: any.
        placement_group_capture_child_tasks: whether actors and tasks that the actor starts are in the group, too.
    """

    placement_group: PlacementGroup | None
    placement_group_bundle_index: int = -1
    placement_group_capture_child_tasks: bool | None = None


@dataclass(frozen=True)
class NodeAffinitySchedulingStrategy:
    """Place the actor on a node.

    Attributes:
        node_id: ``"NodeID"`` in ``ray.nodes()``.
        soft: run on another node if this node does not exist.
    """

    node_id: str
    soft: bool
    _spill_on_unavailable: bool = False
    _fail_on_unavailable: bool = False


class In:
    """The label has one of ``values``."""

    def __init__(self, *values: str) -> None:
        self.values = list(values)


class NotIn:
    """The label has any value except ``values``."""

    def __init__(self, *values: str) -> None:
        self.values = list(values)


class Exists:
    """The label exists, with any value."""


class DoesNotExist:
    """The label does not exist."""


@dataclass(frozen=True)
class NodeLabelSchedulingStrategy:
    """Place the actor on a node with certain labels.

    Attributes:
        hard: name of a label -> the condition that the label must meet.
        soft: conditions that the labels should meet; ignored.
    """

    hard: dict[str, Any] | None = None
    soft: dict[str, Any] | None = None
