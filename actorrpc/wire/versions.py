"""The versions that the workers of a group should share: those of this package, of Python and of torch. Does not import torch.

Functions that are sent by value contain bytecode, so workers need the same minor version of Python. Build labels of torch
(``+cpu``, ``+cu126``) may differ.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from typing import Final

__all__ = ["NAMES", "difference", "here", "to_compare"]

NAMES: Final = ("actorrpc", "Python", "torch")


def here() -> dict[str, str]:
    """Return the versions of this process by name; without torch if it was not imported."""
    modules = {name: getattr(sys.modules.get(name), "__version__", "") for name in ("actorrpc", "torch")}
    found = {"Python": platform.python_version(), **modules}
    return {name: str(found[name]) for name in NAMES if found[name]}


def to_compare(name: str, version: str) -> str:
    """Return the part of a version that should be equal on all workers."""
    return ".".join(version.split(".")[:2]) if name == "Python" else version.partition("+")[0]


def difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Return the versions of a worker that differ from the driver's, as text; empty if none does."""
    return " and ".join(
        f"{name} {theirs.get(name) or 'of an unknown version'} (the driver has {ours[name]})"
        for name in NAMES
        if name in ours and to_compare(name, theirs.get(name, "")) != to_compare(name, ours[name])
    )
