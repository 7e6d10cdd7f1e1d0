"""Placement groups, as in ``ray.util.placement_group``: bundles of resources that are placed together.

A bundle lists resources and gets a machine that has them. The driver keeps the table of groups: it assigns machines to the
bundles by the group's strategy, lets a group wait while the other groups leave no room for it, and ends the actors of a removed
group. An actor of a group is made on the machine of its bundle, and books there the resources in its own options.

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
from actorrpc.cluster import resources
from actorrpc.compat.ray import cluster
from actorrpc.compat.ray.exceptions import ActorPlacementGroupRemoved, GetTimeoutError
from actorrpc.compat.ray.object_ref import ObjectRef, get
from actorrpc.errors import PlacementError, RpcError
from actorrpc.futures import Future

__all__ = [
    "VARIABLE",
    "PlacementGroup",
    "PlacementGroupTimeoutError",
    "current_group",
    "get_current_placement_group",
    "get_placement_group",
    "join",
    "placement_group",
    "placement_group_table",
    "remove_placement_group",
]

VARIABLE: Final = "ACTORRPC_RAY_GROUP"
_STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_SLACK: Final = 1e-6


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
        return ObjectRef(cluster.on_driver(_ready, self.id.text))

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

    def host_for(self, index: int) -> str | None:
        """Return the machine of a bundle (-1: the first bundle); None if there is one machine, or the group is empty or waits.

        Raises:
            ActorPlacementGroupRemoved: the group has been removed.
        """
        return None if self.is_empty else cluster.on_driver(_host_for, self.id.text, index)


# -- on the driver -------------------------------------------------------------------------------------------------


@dataclass
class _Kept:
    """The driver's record of a group."""

    group: PlacementGroup
    ready: Future[PlacementGroup]
    state: str = "PENDING"
    hosts: list[str] = field(default_factory=list)
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


def _fits(need: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(free.get(name, 0.0) + _SLACK >= amount for name, amount in need.items())


def _taken(free: Mapping[str, float], need: Mapping[str, float]) -> dict[str, float]:
    return {**free, **{name: free.get(name, 0.0) - amount for name, amount in need.items()}}


def _assign(
    bundles: Sequence[Mapping[str, float]], strategy: str, machines: Mapping[str, Mapping[str, float]]
) -> list[str] | None:
    """Return a machine for each bundle; None if there is no room for all of them."""
    free = {name: dict(each) for name, each in machines.items()}
    chosen: list[str] = []
    for bundle in bundles:
        candidates = [name for name in free if _fits(bundle, free[name])]
        unused = [name for name in candidates if name not in chosen]
        if strategy == "STRICT_SPREAD":
            candidates = unused
        elif strategy == "SPREAD":
            candidates = unused or candidates
        elif strategy == "STRICT_PACK" and chosen:
            candidates = [name for name in candidates if name == chosen[0]]
        else:
            candidates = [name for name in candidates if name in chosen] or candidates
        if not candidates:
            return _elsewhere(bundles, strategy, machines, chosen)
        chosen.append(candidates[0])
        free[candidates[0]] = _taken(free[candidates[0]], bundle)
    return chosen


def _elsewhere(
    bundles: Sequence[Mapping[str, float]],
    strategy: str,
    machines: Mapping[str, Mapping[str, float]],
    chosen: Sequence[str],
) -> list[str] | None:
    """If all bundles must be on one machine, and it is not ``chosen[0]``, try the other machines; None if no machine fits."""
    if strategy != "STRICT_PACK" or not chosen:
        return None
    rest = {name: each for name, each in machines.items() if name != chosen[0]}
    return _assign(bundles, strategy, rest)


def _create(group: PlacementGroup) -> None:
    kept = _Kept(group, Future())
    kept.ready.label = f"the placement group {group.name or group.id.text}"
    kept.ready.acknowledge()
    with _lock:
        _of_this_cluster()[group.id.text] = kept
    machines = resources.machines()
    whole = {each["names"][0]: each["total"] for each in machines}
    if _assign(group.bundle_specs, group.strategy, whole) is None:
        kept.state = "INFEASIBLE"
        kept.ready.set_exception(
            PlacementGroupTimeoutError(
                f"the placement group of {group.bundle_specs} ({group.strategy}) cannot be made: the machines have {whole}"
            )
        )
        return
    _place_all(whole)


def _place_all(whole: Mapping[str, Mapping[str, float]]) -> None:
    """Assign machines to the waiting groups for which there is room, in the order in which the groups were made."""
    made = []
    with _lock:
        groups = list(_of_this_cluster().values())
        free = {name: dict(each) for name, each in whole.items()}
        for kept in groups:
            if kept.state == "CREATED":
                for host, bundle in zip(kept.hosts, kept.group.bundle_specs, strict=True):
                    free[host] = _taken(free.get(host, {}), bundle)
        for kept in groups:
            if kept.state != "PENDING":
                continue
            found = _assign(kept.group.bundle_specs, kept.group.strategy, free)
            if found is None:
                continue
            kept.hosts, kept.state = found, "CREATED"
            made.append(kept)
            for host, bundle in zip(found, kept.group.bundle_specs, strict=True):
                free[host] = _taken(free[host], bundle)
    for kept in made:
        kept.ready.set_result(kept.group)


def _ready(group_id: str) -> actors.ObjectRef[PlacementGroup]:
    kept = _kept(group_id)
    if kept.state == "REMOVED":
        raise _removed(kept.group)
    return actors.ObjectRef(kept.ready, label=str(kept.ready.label))


def _removed(group: PlacementGroup) -> ActorPlacementGroupRemoved:
    return ActorPlacementGroupRemoved(f"the placement group {group.name or group.id.text} has been removed")


def _host_for(group_id: str, index: int) -> str | None:
    kept = _kept(group_id)
    if kept.state == "REMOVED":
        raise _removed(kept.group)
    machines = cluster.hosts()
    if len(machines) < 2 or not kept.hosts:
        return None
    return kept.hosts[max(index, 0)]


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
    cluster.on_driver(_join, group.id.text, member)


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
    _place_all({each["names"][0]: each["total"] for each in resources.machines()})


def _find(name: str, group_id: str) -> PlacementGroup | None:
    with _lock:
        for kept in _of_this_cluster().values():
            if kept.state != "REMOVED" and (
                kept.group.id.text == group_id if group_id else kept.group.name == name
            ):
                return kept.group
    return None


def _rows() -> dict[str, dict[str, Any]]:
    ids = {each["names"][0]: resources.id_of(each["names"]) for each in resources.machines()}
    with _lock:
        return {
            kept.group.id.text: {
                "placement_group_id": kept.group.id.text,
                "name": kept.group.name,
                "bundles": dict(enumerate(kept.group.bundle_specs)),
                "bundles_to_node_id": {at: ids.get(host, host) for at, host in enumerate(kept.hosts)},
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
    cluster.on_driver(_create, made)
    return made


def remove_placement_group(placement_group: PlacementGroup) -> None:
    """Release a group's machines, and end its actors. Idempotent."""
    cluster.on_driver(_remove, placement_group.id.text)


def get_placement_group(placement_group_name: str) -> PlacementGroup:
    """Return the group of that name.

    Raises:
        ValueError: there is no such group.
    """
    if not placement_group_name:
        raise ValueError("get_placement_group() takes the name of a group")
    found = cluster.on_driver(_find, placement_group_name, "")
    if found is None:
        raise ValueError(f"there is no placement group {placement_group_name!r}")
    return found


def placement_group_table(placement_group: PlacementGroup | None = None) -> dict[str, Any]:
    """Return the row of a group (empty if there is no such group), or the rows of all groups by their ids."""
    rows = cluster.on_driver(_rows)
    return rows if placement_group is None else rows.get(placement_group.id.text, {})


def get_current_placement_group() -> PlacementGroup | None:
    """Return the group in which this code runs; None if there is none."""
    group_id = os.environ.get(VARIABLE, "").partition(":")[0]
    return cluster.on_driver(_find, "", group_id) if group_id else None


def current_group() -> PlacementGroup | None:
    """Return the group to which actors and tasks that this process starts belong by default; None if there is none."""
    return get_current_placement_group() if os.environ.get(VARIABLE, "").endswith(":1") else None
