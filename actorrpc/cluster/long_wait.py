"""Logs a long wait for other workers, once: its purpose, and which workers are missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from actorrpc import _time
from actorrpc.group.store import poll

__all__ = ["some", "wait_until"]

_log = logging.getLogger("actorrpc.cluster")
_SHOWN: Final = 10
#: A wait that takes longer than this, in seconds, is logged.
SOON_S = 1.0


def some(names: Iterable[object]) -> str:
    """Return the first 10 names as text, and how many more there are."""
    texts = [str(each) for each in names]
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def wait_until(
    done: Callable[[], bool], deadline: float, who: str, what: Callable[[], str], slowest: float = 0.05
) -> bool:
    """Call ``done`` repeatedly until it returns True, or until ``deadline``; return its last result.

    Args:
        who: the name, for the user, of the waiting function: ``scale()``.
        what: returns the description of the awaited event; only called if the wait is long, and may take some milliseconds.
        slowest: the longest pause between two calls of ``done``, in seconds.
    """
    late_at: float | None = _time.now() + SOON_S

    def is_done() -> bool:
        nonlocal late_at
        if done():
            return True
        if late_at is not None and _time.now() >= late_at:
            late_at = None
            _log.warning("%s waits for %s", who, what())
        return False

    return poll(is_done, deadline, slowest)
