"""Checks of a group's device maps when a worker joins, with torch's error messages. Pure computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from actorrpc.errors import ConfigError
from actorrpc.wire.identity import WorkerRecord

__all__ = ["check"]


def check(
    records: Iterable[WorkerRecord], find: Callable[[str], WorkerRecord | None], *, fixed: bool
) -> None:
    """Check the device maps of some workers against the devices of the workers.

    Args:
        records: the workers whose maps are checked.
        find: returns the record of a worker by name, or None.
        fixed: whether all workers of the group are known, so that a map to an unknown worker is an error.

    Raises:
        ConfigError: devices are listed twice, do not exist or are not allowed by the options; or a map names an unknown worker.
    """
    # Sorted by rank, so that all workers report the same error if there are several errors.
    for record in sorted(records, key=lambda each: each.rank):
        where = f"Node {record.name} has"
        if len(set(record.devices)) != len(record.devices):
            raise ConfigError(f"{where} duplicated devices: {', '.join(record.devices)}")
        if wrong := _absent(record.devices, record):
            raise ConfigError(f"{where} devices with invalid indices: {wrong}")
        for name in dict.fromkeys(route[0] for route in record.device_maps):
            target = find(name)
            if target is None:
                if fixed:
                    raise ConfigError(
                        f"{where} invalid target node names in its device maps: there is no worker {name!r}"
                    )
                continue
            forth = {here: there for worker, here, there in record.device_maps if worker == name}
            if len(set(forth.values())) != len(forth):
                raise ConfigError(f"{where} duplicated target devices in its device map for {name}: {forth}")
            for owner, side, devices in (
                (record, "source", list(forth)),
                (target, "target", [*forth.values()]),
            ):
                what = f"{side} devices"
                suffix = f"in its device map for {name}"
                if owner.devices:
                    unexpected = [each for each in devices if each not in owner.devices]
                    if unexpected:
                        raise ConfigError(
                            f"{where} unexpected {what} {suffix}: {unexpected[0]} is none of the devices that the options of "
                            f"{owner.name} allow ({', '.join(owner.devices)})"
                        )
                elif wrong := _absent(devices, owner):
                    raise ConfigError(f"{where} {what} with invalid indices {suffix}: {wrong}")


def _absent(devices: Iterable[str], owner: WorkerRecord) -> str:
    """Describe the first CUDA device in ``devices`` that ``owner`` does not have; empty if it has all of them."""
    for device in devices:
        kind, _, index = device.partition(":")
        if kind == "cuda" and int(index or 0) >= owner.cuda_devices:
            return f"{device}, but {owner.name} sees {owner.cuda_devices} CUDA devices"
    return ""
