"""Descriptors: a worker in contact with many needs more of them than most systems allow a process at first.

A connection takes two, and the usual soft limit is 1 024, however much the hard one allows: the worker that all others ask at
the end of a group of 600 would be out of them. Only who comes near it has it raised. Any thread; no lock: it only grows.
"""

from __future__ import annotations

import logging
import resource
from typing import Final

__all__ = ["make_room"]

_log = logging.getLogger("actorrpc.links")
_NEAR: Final = 0.75


def make_room(fd: int) -> None:
    """Raise the soft limit of this process's descriptors if ``fd``, which is new, is near it: twofold, or to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or fd < _NEAR * soft or soft == hard:
        return
    wanted = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # what happens then, happened before
        _log.warning("%d descriptors are open, and the limit of %d cannot be raised: %s", fd, soft, error)
