"""Places of modules: a worker and one of its devices, in torch's way to write them. Pure."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.remote_device import _remote_device

from actorrpc.core.identity import WorkerInfo
from actorrpc.errors import ConfigError, WrongTypeError

__all__ = ["device_of", "place_of"]


def place_of(remote_device: Any) -> tuple[str | int | None, str]:
    """Return the worker (a name, a rank, or None for this one) and the device that are meant.

    Args:
        remote_device: ``"worker/device"``, ``"worker"``, ``"rank:1/device"``, ``"rank:1"``, ``"device"`` (of this worker);
            a ``torch.device`` of this worker; a WorkerInfo or a rank. The device is ``cpu`` unless one is named.

    Raises:
        WrongTypeError: it is none of these.
        ConfigError: it cannot be read, or torch knows no such device.
    """
    if isinstance(remote_device, WorkerInfo):
        return remote_device.name, "cpu"
    if isinstance(remote_device, int) and not isinstance(remote_device, bool):
        return remote_device, "cpu"
    if isinstance(remote_device, (torch.device, _remote_device)):
        remote_device = str(remote_device)
    if not isinstance(remote_device, str):
        raise WrongTypeError(
            f"Invalid type for remote_device: {type(remote_device)}; a place is a str such as 'worker1/cpu'"
        )
    worker, slash, device = remote_device.partition("/")
    if "/" in device or (slash and not worker):
        raise _unreadable(remote_device)
    if not slash:
        if _is_device(worker):
            return None, worker
        device = "cpu"
    if not worker:
        raise _unreadable(remote_device)
    device = device_of(device)
    kind, colon, rank = worker.partition(":")
    if kind != "rank" or not colon:
        return worker, device
    if not (rank.isascii() and rank.isdigit()):
        raise _unreadable(remote_device)
    return int(rank), device


def device_of(device: Any) -> str:
    """Return torch's name of a device.

    Raises:
        ConfigError: torch knows no such device.
    """
    try:
        return str(torch.device(device))
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{str(error).strip()} (given as the device {device!r})") from None


def _unreadable(remote_device: str) -> ConfigError:
    return ConfigError(
        f"Could not parse remote_device: {remote_device}. The valid format is '<workername>/<device>' or "
        "'rank:<rank>/<device>' or '<device>'"
    )


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True
