"""Which CUDA devices this process sees, without opening CUDA."""

from __future__ import annotations

import os

import torch

__all__ = ["visible_gpus"]


def visible_gpus(count: int | None = None) -> list[str]:
    """Return the names of the CUDA devices that this process sees, in the order of their numbers.

    The names are the first ``count`` entries of ``CUDA_VISIBLE_DEVICES``, by default all. If the variable is not set, the names
    are the numbers from 0 to ``count - 1``, by default the numbers of all devices.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(torch.cuda.device_count() if count is None else count)]
    names: list[str] = []
    for name in map(str.strip, visible.split(",")):
        if not (name[:1].isdigit() or name.startswith(("GPU-", "MIG-"))):
            break  # CUDA ignores the names from the first invalid name on
        if name in names:
            return []  # as CUDA does
        names.append(name)
    return names[:count]
