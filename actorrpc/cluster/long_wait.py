"""Logs a wait for other workers that takes long, once: what is waited for, and which workers are missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

from actorrpc import _time
from actorrpc.errors import RpcTimeoutError
from actorrpc.futures import Future

__all__ = ["LongWait", "some"]

_log = logging.getLogger("actorrpc.cluster")
_SHOWN: Final = 10
#: A wait that takes longer than this, in seconds, is logged.
SOON_S = 1.0


def some(names: Iterable[object]) -> str:
    """Return the first few of several names as text."""
    texts = [str(each) for each in names]
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


class LongWait:
    """One wait, which begins when the object is made. Not thread-safe.

    Args:
        who: the name, for the user, of the waiting function: ``scale()``.
        what: returns what is waited for, as text; only called if the wait takes long, and may take some milliseconds.
    """

    def __init__(self, who: str, what: Callable[[], str]) -> None:
        self._who = who
        self._what = what
        self._said = False
        self._late_at = _time.now() + SOON_S

    def look(self) -> None:
        """Log the wait if it takes long and was not logged before."""
        if not self._said and _time.now() >= self._late_at:
            self._said = True
            _log.warning("%s waits for %s", self._who, self._what())

    def over(self, done: Callable[[], bool]) -> Callable[[], bool]:
        """Wrap ``done``, which a loop calls repeatedly, so that a long wait is logged."""

        def is_done() -> bool:
            if done():
                return True
            self.look()
            return False

        return is_done

    def future(self, future: Future[Any], until: float) -> Any:
        """Wait for a future like its ``wait`` until ``until`` on the monotonic clock, but at least 0.1 s."""
        if not self._said:
            try:
                return future.wait(max(0.0, min(until, self._late_at) - _time.now()))
            except RpcTimeoutError:
                if future.done():
                    raise
                self.look()
        return future.wait(max(0.1, until - _time.now()))
