"""The assignment of this machine's accelerators (CUDA devices) to processes.

Devices are counted on first use. A share of less than one device is possible; whole devices are
exclusive. Pure bookkeeping: nothing is reserved in the device driver. Not thread-safe: the caller holds a lock.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Final

import torch

from actorrpc.errors import ConfigError

__all__ = ["Devices"]

_EPSILON: Final = 1e-6


class Devices:
    """The devices of this machine, and the workers that they are assigned to.

    Args:
        limit: how many devices may be assigned; None: all that are visible to this process.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._held: dict[str, dict[str, float]] = {}

    def _names(self) -> list[str]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            names = [name.strip() for name in visible.split(",")]
            if "-1" in names:  # CUDA ignores the names from -1 on
                names = names[: names.index("-1")]
            names = [name for name in names if name]
            return names if self._limit is None else names[: self._limit]
        count = torch.cuda.device_count() if self._limit is None else self._limit
        return [str(number) for number in range(count)]

    @cached_property
    def _free(self) -> dict[str, float]:
        return dict.fromkeys(self._names(), 1.0)

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
            (free, name) for name, free in self._free.items() if free >= min(num_gpus, 1.0) - _EPSILON
        )
        return None if len(fitting) < count else [name for _, name in fitting[:count]]

    def has_room(self, num_gpus: float) -> bool:
        """Say whether :meth:`allocate` would find enough free devices now."""
        return num_gpus == 0 or self._fitting(num_gpus) is not None

    def give_back(self, holder: str) -> None:
        """Release the devices of a worker, if it has any."""
        for name, share in self._held.pop(holder, {}).items():
            self._free[name] = min(1.0, self._free[name] + share)
