"""Placement groups, as in ``ray.util.placement_group``, and the classes of ``ray.util.scheduling_strategies``.

A group has bundles of resources, which are placed together: each bundle books its resources on one machine or worker. The driver
keeps the table of groups, and ends the actors of a removed group; its cluster books the bundles (``Cluster.reserve``). An actor
or task of a group books the resources in its own options from those of a bundle.

``_lock`` guards the tables. No code that may block is called under it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from actorrpc import actors
from actorrpc._exceptions import say
from actorrpc.agent.calls import CURRENT
from actorrpc.cluster import resources
from actorrpc.compat.ray import cluster
from actorrpc.compat.ray.exceptions import ActorPlacementGroupRemoved, GetTimeoutError
from actorrpc.compat.ray.object_ref import ObjectRef, get
from actorrpc.errors import PlacementError, RpcError
from actorrpc.futures import Future

__all__ = [
    "DoesNotExist",
    "Exists",
    "In",
    "NodeAffinitySchedulingStrategy",
    "NodeLabelSchedulingStrategy",
    "NotIn",
    "PlacementGroup",
    "PlacementGroupSchedulingStrategy",
    "PlacementGroupTimeoutError",
    "current_group",
    "get_current_placement_group",
    "get_placement_group",
    "join",
    "own_bundle",
    "placement_group",
    "placement_group_table",
    "remove_placement_group",
]

_STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class PlacementGroupTimeoutError(GetTimeoutError, PlacementError):
    """A placement group can never be made: no machines have the resources of its bundles."""


@dataclass(frozen=True)
class PlacementGroupID:
    """The id of a placement group."""

    text: str

    def hex(self) -> str:
        """Return the id as text."""
        return self.text

    def binary(self) -> bytes:
        """Return the id as bytes."""
        return bytes.fromhex(self.text)

    def is_nil(self) -> bool:
        """Say whether this is the empty id, which no group has."""
        return not self.text


@dataclass(frozen=True)
class PlacementGroup:
    """A handle of a placement group. The handle can be sent to other workers.

    Attributes:
        id: the id of the group.
        bundle_specs: the resources of the group's bundles.
        name: the name of the group; empty if it has none.
        strategy: how the bundles are distributed to machines; see :func:`placement_group`.
    """

    id: PlacementGroupID
    bundle_specs: list[dict[str, float]] = field(default_factory=list, compare=False)
    name: str = field(default="", compare=False)
    strategy: str = field(default="PACK", compare=False)

    @staticmethod
    def empty() -> PlacementGroup:
        """Return the empty group, which stands for "no group"."""
        return PlacementGroup(PlacementGroupID(""))

    @property
    def is_empty(self) -> bool:
        """Whether this is the empty group."""
        return self.id.is_nil()

    @property
    def bundle_count(self) -> int:
        """How many bundles it has."""
        return len(self.bundle_specs)

    def ready(self) -> ObjectRef[PlacementGroup]:
        """Return an ObjectRef of the group, which completes when all bundles have machines, or fails if that never happens."""
        return ObjectRef(resources.on_driver(_ready, self.id.text))

    def wait(self, timeout_seconds: float = 30) -> bool:
        """Wait until all bundles have their machines; return False at the time-out, or if no machines have such resources."""
        try:
            get(self.ready(), timeout=timeout_seconds)
        except GetTimeoutError:
            return False
        return True

    def check_index(self, index: int) -> None:
        """Check the index of a bundle.

        Raises:
            ValueError: the group has no such bundle.
        """
        if self.is_empty and index != -1:
            raise ValueError("placement_group_bundle_index is for actors and tasks with a placement group")
        if not self.is_empty and not -1 <= index < self.bundle_count:
            raise ValueError(
                f"placement_group_bundle_index must be -1 or below {self.bundle_count}, the number of bundles, not {index}"
            )

    def check_exists(self) -> None:
        """Check that the group has not been removed.

        Raises:
            ActorPlacementGroupRemoved: the group has been removed.
        """
        resources.on_driver(_check_exists, self.id.text)


# -- scheduling strategies -------------------------------------------------------------------------------------------


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


# -- on the driver -------------------------------------------------------------------------------------------------


@dataclass
class _Kept:
    """The driver's record of a group."""

    group: PlacementGroup
    ready: Future[PlacementGroup]
    state: str = "PENDING"
    machines: list[list[str]] = field(default_factory=list)
    members: list[Any] = field(default_factory=list)


_lock = threading.RLock()
_groups: dict[str, _Kept] = {}
_of_cluster: list[str] = []  # contains the identity of the cluster to which `_groups` belong


def _of_this_cluster() -> dict[str, _Kept]:
    """Return the groups of the present cluster. The caller holds the lock."""
    if _of_cluster != [cluster.identity()]:
        _groups.clear()
        _of_cluster[:] = [cluster.identity()]
    return _groups


def _kept(group_id: str) -> _Kept:
    with _lock:
        found = _of_this_cluster().get(group_id)
    if found is None:
        raise ValueError(f"there is no placement group {group_id!r} in this cluster")
    return found


def _create(group: PlacementGroup) -> None:
    kept = _Kept(group, Future())
    kept.ready.label = f"the placement group {group.name or group.id.text}"
    kept.ready.acknowledge()

    def booked(done: Future[list[list[str]]]) -> None:
        done.acknowledge()
        with _lock:
            if kept.state != "PENDING":
                return
            kept.state = "INFEASIBLE" if done.error is not None else "CREATED"
            kept.machines = done.value_or_none or []
        if done.error is None:
            kept.ready.try_complete(group)
        else:
            text = (
                f"the placement group of {group.bundle_specs} ({group.strategy}) cannot be made: {done.error}"
            )
            kept.ready.try_fail(PlacementGroupTimeoutError(text))

    resources.reserve(group.id.text, group.bundle_specs, group.strategy).add_done_callback(booked)
    # Only now other threads can find the group: removing it before reserve() would not release its bundles.
    with _lock:
        _of_this_cluster()[group.id.text] = kept


def _ready(group_id: str) -> actors.ObjectRef[PlacementGroup]:
    kept = _kept(group_id)
    if kept.state == "REMOVED":
        raise _removed(kept.group)
    return actors.ObjectRef(kept.ready, label=str(kept.ready.label))


def _removed(group: PlacementGroup) -> ActorPlacementGroupRemoved:
    return ActorPlacementGroupRemoved(f"the placement group {group.name or group.id.text} has been removed")


def _check_exists(group_id: str) -> None:
    kept = _kept(group_id)
    if kept.state == "REMOVED":
        raise _removed(kept.group)


def _join(group_id: str, member: Any) -> None:
    with _lock:
        kept = _kept(group_id)
        removed = kept.state == "REMOVED"
        if not removed:
            kept.members.append(member)
    if removed:
        actors.kill(member)


def join(group: PlacementGroup, member: Any) -> None:
    """Add an actor to a group, so that the actor is killed when the group is removed.

    Args:
        member: a handle that does not keep the actor alive.
    """
    resources.on_driver(_join, group.id.text, member)


def _remove(group_id: str) -> None:
    with _lock:
        kept = _of_this_cluster().get(group_id)
        if kept is None or kept.state == "REMOVED":
            return
        pending = kept.state == "PENDING"
        kept.state = "REMOVED"
        members, kept.members = kept.members, []
    if pending:
        kept.ready.set_exception(_removed(kept.group))
    for member in members:
        try:
            actors.kill(member)
        except RpcError:  # it has ended
            pass
    resources.unreserve(group_id)


def _find(name: str, group_id: str) -> PlacementGroup | None:
    with _lock:
        for kept in _of_this_cluster().values():
            if kept.state != "REMOVED" and (
                kept.group.id.text == group_id if group_id else kept.group.name == name
            ):
                return kept.group
    return None


def _rows() -> dict[str, dict[str, Any]]:
    with _lock:
        return {
            kept.group.id.text: {
                "placement_group_id": kept.group.id.text,
                "name": kept.group.name,
                "bundles": dict(enumerate(kept.group.bundle_specs)),
                "bundles_to_node_id": {at: resources.id_of(each) for at, each in enumerate(kept.machines)},
                "strategy": kept.group.strategy,
                "state": "PENDING" if kept.state == "INFEASIBLE" else kept.state,
            }
            for kept in _of_this_cluster().values()
        }


# -- anywhere ------------------------------------------------------------------------------------------------------


def placement_group(
    bundles: Sequence[Mapping[str, float]],
    strategy: str = "PACK",
    name: str = "",
    lifetime: str | None = None,
    **_ignored: Any,
) -> PlacementGroup:
    """Make a group, which gets a machine for each bundle as soon as there is room; returns at once.

    Args:
        bundles: the resources of each bundle, like ``{"CPU": 1}``.
        strategy: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` or ``"STRICT_SPREAD"``.
        name: the name for :func:`get_placement_group`.
        lifetime: None or ``"detached"``, without effect: all groups end with the cluster.

    Raises:
        ValueError: an argument is not valid.
    """
    if not isinstance(bundles, (list, tuple)) or not bundles:
        raise ValueError("placement_group() takes a list of bundles that is not empty, like [{'CPU': 1}]")
    for bundle in bundles:
        if not isinstance(bundle, Mapping) or not any(bundle.values()):
            raise ValueError(f"a bundle is a dict of amounts, not all of them 0, and not {say(bundle, repr)}")
        if any(not isinstance(amount, (int, float)) or amount < 0 for amount in bundle.values()):
            raise ValueError(f"the amounts of a bundle are numbers of at least 0: {say(bundle, repr)}")
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(_STRATEGIES)}, not {say(strategy, repr)}")
    if lifetime not in (None, "detached"):
        raise ValueError(f"lifetime must be None or 'detached', not {say(lifetime, repr)}")
    specs = [{key: float(amount) for key, amount in bundle.items() if amount} for bundle in bundles]
    made = PlacementGroup(PlacementGroupID(os.urandom(18).hex()), specs, name, strategy)
    resources.on_driver(_create, made)
    return made


def remove_placement_group(placement_group: PlacementGroup) -> None:
    """Release a group's machines, and end its actors. Idempotent."""
    resources.on_driver(_remove, placement_group.id.text)


def get_placement_group(placement_group_name: str) -> PlacementGroup:
    """Return the group of that name.

    Raises:
        ValueError: there is no such group.
    """
    if not placement_group_name:
        raise ValueError("get_placement_group() takes the name of a group")
    found = resources.on_driver(_find, placement_group_name, "")
    if found is None:
        raise ValueError(f"there is no placement group {placement_group_name!r}")
    return found


def placement_group_table(placement_group: PlacementGroup | None = None) -> dict[str, Any]:
    """Return the row of a group (empty if there is no such group), or the rows of all groups by their ids."""
    rows = resources.on_driver(_rows)
    return rows if placement_group is None else rows.get(placement_group.id.text, {})


def own_bundle() -> tuple[str, int, bool] | None:
    """Return the option ``bundle`` of the actor, or of the process for tasks, that runs this code."""
    execution = CURRENT.get()
    hosted = None if execution is None else execution.actor
    options = None if hosted is None or hosted.spec is None else hosted.spec.descriptor.options
    return None if options is None else options.bundle


def get_current_placement_group() -> PlacementGroup | None:
    """Return the group of the actor or task that runs this code; None if there is none."""
    bundle = own_bundle()
    return resources.on_driver(_find, "", bundle[0]) if bundle is not None else None


def current_group() -> PlacementGroup | None:
    """Return the group to which actors and tasks that this code starts belong by default; None if there is none."""
    bundle = own_bundle()
    return get_current_placement_group() if bundle is not None and bundle[2] else None
