"""``ray.util.scheduling_strategies``: where an actor is to live, as an object."""

from actorrpc.compat.ray.strategies import (
    DoesNotExist,
    Exists,
    In,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    NotIn,
    PlacementGroupSchedulingStrategy,
)

__all__ = [
    "DoesNotExist",
    "Exists",
    "In",
    "NodeAffinitySchedulingStrategy",
    "NodeLabelSchedulingStrategy",
    "NotIn",
    "PlacementGroupSchedulingStrategy",
]
