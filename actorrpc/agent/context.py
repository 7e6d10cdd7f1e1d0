"""Several workers in one process, for tests: which of them code acts for, where the process itself is none.

In a process that is one worker nobody asks: every floor knows what is in force by itself, and comes here only where
nothing is. :mod:`actorrpc.testing` puts in what tells by the thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["WorkerContext", "here", "set_here"]


class WorkerContext:
    """One of several workers of this process: what the floors have in force for it, each its own.

    Attributes:
        state: that of ``rpc/api.py``.
        references: its RRefs.
        actors: its actor layer.
    """

    __slots__ = ("actors", "references", "state")

    def __init__(self) -> None:
        self.state: Any = None
        self.references: Any = None
        self.actors: Any = None


_find: Callable[[], WorkerContext | None] | None = None


def set_here(find: Callable[[], WorkerContext | None] | None) -> None:
    """Name what tells which worker the calling thread acts for; None: this process is one worker, or none."""
    global _find
    _find = find


def here() -> WorkerContext | None:
    """Return the worker that the calling thread acts for, where this process has several."""
    find = _find
    return None if find is None else find()
