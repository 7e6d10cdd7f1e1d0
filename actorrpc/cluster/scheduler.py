"""Placement: the resources of the workers and machines of a cluster, their bookings, and which of them suits an actor.

:class:`ResourceTable` is the driver's book; :class:`Devices` assigns one machine's CUDA devices to its processes. An actor starts
when its resources are free. Later, nothing stops it from using more, and nothing is reserved in the device driver. Not
thread-safe: the cluster's lock guards the table, and the embedded engine's lock the devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from actorrpc.actors.spec.actor_spec import ProcessSpec
from actorrpc.cluster.provisioners.base import Node
from actorrpc.errors import ConfigError
from actorrpc.group.gpus import visible_gpus

__all__ = ["Booking", "Devices", "ResourceHolder", "ResourceTable", "lacking", "needs_of", "totals_of"]

_SLACK: Final = 1e-6
_SHOWN: Final = 8


def needs_of(spec: ProcessSpec) -> dict[str, float]:
    """Return the amounts that an actor books, by the names ``CPU``, ``GPU`` and the names of ``resources``."""
    needs = {name: float(amount) for name, amount in spec.resources.items() if amount}
    if spec.num_cpus:
        needs["CPU"] = float(spec.num_cpus)
    if spec.num_gpus:
        needs["GPU"] = float(spec.num_gpus)
    return needs


def totals_of(num_cpus: float, num_gpus: float, resources: Mapping[str, float]) -> dict[str, float]:
    """Return the total resources of a worker, by the names of :func:`needs_of`."""
    return {**resources, "CPU": float(num_cpus), "GPU": float(num_gpus)}


@dataclass(slots=True)
class Booking:
    """The amounts that an actor has booked, by resource; ``lent``: its CPUs are not counted if this is above 0."""

    amounts: Mapping[str, float]
    lent: int = 0


@dataclass(slots=True)
class ResourceHolder:
    """A worker that takes several actors, or a machine on which an engine starts processes.

    Attributes:
        name: the worker's name, which ``worker=`` matches; for the driver's machine, the driver's name; otherwise empty.
        hosts: the names and addresses that ``host=`` matches.
        totals: its total resources.
        admits: whether an actor waits here until its resources are free; if not, its worker waits in the engine's scheduler.
        bookings: the bookings of actors, by number, and of bundles, by group and number.
        bundle: the group and number, if this is a bundle of a placement group: a part of another holder for actors of the group.
        starts: whether this holder is a machine of an engine, where each actor gets a process.
        scaled: whether this holder is a worker that the engine has started for several actors.
        draining: whether no more actors are placed on this holder.
    """

    name: str
    rank: int
    hosts: frozenset[str]
    totals: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    starts: bool = False
    scaled: bool = False
    draining: bool = False
    bundle: tuple[str, int] | None = None
    admits: bool = True
    bookings: dict[int | tuple[str, int], Booking] = field(default_factory=dict)

    @classmethod
    def of_node(
        cls, node: Node, name: str = "", rank: int = -1, taken: Iterable[ProcessSpec] = (), *, admits: bool
    ) -> ResourceHolder:
        """Return the holder for an engine's machine; ``taken``: processes whose resources are not among its total resources."""
        totals = totals_of(node.num_cpus, node.num_gpus, node.resources)
        for spec in taken:
            for resource, amount in needs_of(spec).items():
                totals[resource] -= amount
        return cls(
            name=name,
            rank=rank,
            hosts=frozenset({node.host}),
            totals=totals,
            labels=node.labels,
            starts=True,
            admits=admits,
        )

    @property
    def names(self) -> list[str]:
        """The names of which ``resources.id_of`` makes the node id of this holder."""
        return sorted(self.hosts) + ([] if self.starts else [self.name])

    def free(self, name: str) -> float:
        """Return the free amount of a resource."""
        counted = (each for each in self.bookings.values() if name != "CPU" or each.lent <= 0)
        used = sum(each.amounts.get(name, 0.0) for each in counted)
        return max(0.0, self.totals.get(name, 0.0) - used)

    def suits(self, spec: ProcessSpec) -> bool:
        """Say whether this holder could take an actor if all its resources were free."""
        if spec.own and not self.starts:
            return False
        if spec.worker is not None and spec.worker != self.name:
            return False
        if spec.host is not None and spec.host not in self.hosts:
            return False
        if any(self.labels.get(name) != value for name, value in spec.labels.items()):
            return False
        return all(self.totals.get(name, 0.0) + _SLACK >= amount for name, amount in needs_of(spec).items())

    def has_room(self, spec: ProcessSpec) -> bool:
        """Say whether this holder has the free resources for an actor now."""
        return not self.admits or all(
            self.free(name) + _SLACK >= amount for name, amount in needs_of(spec).items()
        )

    def describe(self, needed: Collection[str] = ()) -> str:
        """Describe this holder, for messages: the resources that it has, and those of ``needed`` that it lacks."""
        totals = {**self.totals, **{name: 0.0 for name in needed if name not in self.totals}}
        what = [
            f"{name} {self.free(name):g}/{total:g}"
            for name, total in totals.items()
            if total or name in needed
        ]
        labels = [f"{name}={value}" for name, value in self.labels.items()]
        part = "" if self.bundle is None else f"bundle {self.bundle[1]}: "
        who = part + ("new processes on " if self.starts else f"{self.name!r} on ")
        rest = "; ".join([", ".join(what), *labels])
        return f"{who}{'/'.join(sorted(self.hosts))} ({rest or 'nothing'})" + (
            " leaving" if self.draining else ""
        )


class ResourceTable:
    """All holders of a cluster. Not thread-safe."""

    def __init__(self) -> None:
        self.nodes: list[ResourceHolder] = []
        self.workers: dict[str, ResourceHolder] = {}
        self.bundles: list[ResourceHolder] = []

    def all(self) -> list[ResourceHolder]:
        """Return all holders, machines first."""
        return [*self.nodes, *self.workers.values()]

    def add_worker(self, worker: ResourceHolder) -> None:
        """Add a worker. If a worker of its name has ended, book the bundles that were on it, as far as there is room."""
        self.workers[worker.name] = worker
        for each in self.bundles:
            if (each.name, each.hosts) == (worker.name, worker.hosts) and each.bundle is not None:
                if all(worker.free(name) + _SLACK >= amount for name, amount in each.totals.items()):
                    worker.bookings[each.bundle] = Booking(each.totals)

    def candidates(self, spec: ProcessSpec) -> list[ResourceHolder]:
        """Return the holders, or the bundles of the actor's placement group, that suit an actor."""
        holders = [each for each in self.all() if not each.draining]
        if spec.bundle is not None:
            group, number = spec.bundle
            booked = {key for each in holders for key in each.bookings}
            holders = [
                each
                for each in self.bundles
                if each.bundle in booked and each.bundle[0] == group and number in (-1, each.bundle[1])
            ]
        return [each for each in holders if each.suits(spec)]

    def assign(
        self, bundles: Sequence[Mapping[str, float]], strategy: str, *, all_free: bool = False
    ) -> list[ResourceHolder] | None:
        """Return a holder for each bundle of a placement group; None if there is no room for all of them.

        Args:
            strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
            all_free: ignore the present bookings.
        """
        room = [
            (each, {name: total if all_free else each.free(name) for name, total in each.totals.items()})
            for each in self.all()
            if not each.draining
        ]
        if strategy == "STRICT_PACK":
            whole: dict[str, float] = {}
            for bundle in bundles:
                _add(whole, bundle, 1)
            found = next((each for each, free in room if _fits(whole, free)), None)
            return None if found is None else [found] * len(bundles)
        chosen: list[int] = []
        for bundle in bundles:
            fitting = [index for index, (_, free) in enumerate(room) if _fits(bundle, free)]
            new = [index for index in fitting if index not in chosen]
            if strategy == "STRICT_SPREAD":
                fitting = new
            elif strategy == "SPREAD":
                fitting = new or fitting
            else:
                fitting = [index for index in fitting if index in chosen] or fitting
            if not fitting:
                return None
            chosen.append(fitting[0])
            _add(room[fitting[0]][1], bundle, -1)
        return [room[index][0] for index in chosen]

    def reserve(
        self, group: str, bundles: Sequence[Mapping[str, float]], holders: list[ResourceHolder]
    ) -> None:
        """Book the bundles of a group on their holders; from now on, actors of the group can use them."""
        for number, (bundle, holder) in enumerate(zip(bundles, holders, strict=True)):
            holder.bookings[group, number] = Booking(bundle)
            part = replace(holder, totals=bundle, bookings={}, bundle=(group, number), scaled=False)
            self.bundles.append(part)

    def release(self, group: str) -> None:
        """Remove the bundles of a group."""
        self.bundles = [each for each in self.bundles if each.bundle is None or each.bundle[0] != group]
        for each in self.all():
            for key in [key for key in each.bookings if isinstance(key, tuple) and key[0] == group]:
                del each.bookings[key]

    def choose(self, spec: ProcessSpec, slots_first: bool, may_start: bool = True) -> ResourceHolder | None:
        """Return the holder for an actor; None if no holder has room.

        Args:
            slots_first: prefer existing workers to new processes.
            may_start: whether the engine can start a process now; if not, machines are left out.
        """
        found = [
            each for each in self.candidates(spec) if each.has_room(spec) and (may_start or not each.starts)
        ]
        if not found:
            return None
        if spec.spread:
            return min(found, key=lambda each: (len(each.bookings), each.starts, each.rank))
        return min(found, key=lambda each: (each.starts == slots_first, len(each.bookings), each.rank))

    def capacity(self, spec: ProcessSpec) -> int:
        """Return how many such actors could live at a time if all resources were free; ``spec`` must book something."""
        needs = needs_of(spec)
        return sum(
            int(min(each.totals[name] / amount for name, amount in needs.items()) + _SLACK)
            for each in self.candidates(spec)
        )

    def lend(self, booking: int, change: int) -> None:
        """Add a number to :attr:`Booking.lent` of a booking, if it exists."""
        for each in (*self.all(), *self.bundles):
            if booking in each.bookings:
                each.bookings[booking].lent += change

    def give_back(self, booking: int) -> bool:
        """Remove the booking of an actor; return whether there was one."""
        return any(each.bookings.pop(booking, None) is not None for each in (*self.all(), *self.bundles))


def _fits(need: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(free.get(name, 0.0) + _SLACK >= amount for name, amount in need.items())


def _add(total: dict[str, float], amounts: Mapping[str, float], sign: int) -> None:
    for name, amount in amounts.items():
        total[name] = total.get(name, 0.0) + sign * amount


def lacking(spec: ProcessSpec, book: ResourceTable) -> str:
    """Describe what an actor needs, and what the holders in ``book`` have."""
    needs = needs_of(spec)
    wishes = [f"{name} {amount:g}" for name, amount in needs.items()]
    if spec.worker is not None:
        wishes.append(f"worker {spec.worker!r}")
    if spec.bundle is not None:
        wishes.append("a bundle of its placement group")
    wishes += [f"label {name}={value}" for name, value in spec.labels.items()]
    if spec.host is not None:
        wishes.append(f"host {spec.host!r}")
    own = (
        []
        if spec.bundle is None
        else [each for each in book.bundles if each.bundle and each.bundle[0] == spec.bundle[0]]
    )
    there = [each.describe(needs) for each in own or book.all()]
    more = f", and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
    return (
        f"{spec.label!r} needs {', '.join(wishes) or 'a worker'}; there are (free/all): "
        f"{'; '.join(there[:_SHOWN]) or 'none'}{more}"
    )


class Devices:
    """The CUDA devices of this machine, counted on first use, and the workers that they are assigned to.

    A worker gets whole devices for itself, or a share of one device.

    Args:
        limit: how many devices may be assigned; None: all that are visible to this process.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._held: dict[str, dict[str, float]] = {}

    @cached_property
    def _free(self) -> dict[str, float]:
        return dict.fromkeys(visible_gpus(self._limit), 1.0)

    @property
    def total(self) -> int:
        """How many devices can be assigned, free or not."""
        return len(self._free)

    def allocate(self, holder: str, num_gpus: float) -> list[str] | None:
        """Assign devices to the worker ``holder``; return the devices' names, or None if not enough are free now.

        Raises:
            ConfigError: this machine has fewer devices, or the number is neither whole nor a share between 0 and 1.
        """
        if num_gpus < 0 or (num_gpus > 1 and num_gpus != int(num_gpus)):
            raise ConfigError(
                f"num_gpus={num_gpus} cannot be given to a process: use a whole number of devices, or a share of a "
                "device (between 0 and 1)"
            )
        if num_gpus > self.total:
            raise ConfigError(
                f"num_gpus={num_gpus:g} was asked for {holder!r}, but this cluster has {self.total} CUDA devices. "
                "Ask for less, or check CUDA_VISIBLE_DEVICES and init(num_gpus=...)"
            )
        if num_gpus == 0:
            return []
        names = self._fitting(num_gpus)
        if names is None:
            return None
        share = min(num_gpus, 1.0)
        for name in names:
            self._free[name] -= share
        self._held[holder] = dict.fromkeys(names, share)
        return names

    def _fitting(self, num_gpus: float) -> list[str] | None:
        """Return the fullest devices with enough room, so that whole devices stay free; None if there are too few."""
        count = max(1, int(num_gpus))
        fitting = sorted(
            (free, name) for name, free in self._free.items() if free >= min(num_gpus, 1.0) - _SLACK
        )
        return None if len(fitting) < count else [name for _, name in fitting[:count]]

    def has_room(self, num_gpus: float) -> bool:
        """Say whether :meth:`allocate` would find enough free devices now."""
        return num_gpus == 0 or self._fitting(num_gpus) is not None

    def give_back(self, holder: str) -> None:
        """Release the devices of a worker, if it has any."""
        for name, share in self._held.pop(holder, {}).items():
            self._free[name] = min(1.0, self._free[name] + share)
