"""A wait for others that takes long says so, once, in the log: what it is, and who has not come yet."""

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
#: a wait that takes longer, in seconds, is said
SOON_S = 1.0


def some(names: Iterable[object]) -> str:
    """Return the first ones of several, in words."""
    texts = [str(each) for each in names]
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


class LongWait:
    """One wait, which begins now. One thread at a time.

    Args:
        who: whose wait it is, as its user calls it: ``scale()``.
        what: returns what is waited for, in words; it is asked where the wait takes long, and may take some milliseconds.
    """

    def __init__(self, who: str, what: Callable[[], str]) -> None:
        self._who = who
        self._what = what
        self._said = False
        self._late_at = _time.now() + SOON_S

    def look(self) -> None:
        """Say it, where it takes long, and was not said before."""
        if not self._said and _time.now() >= self._late_at:
            self._said = True
            _log.warning("%s waits for %s", self._who, self._what())

    def over(self, done: Callable[[], bool]) -> Callable[[], bool]:
        """Return ``done`` for a loop that asks it again and again: the wait is said where it takes long."""

        def is_done() -> bool:
            if done():
                return True
            self.look()
            return False

        return is_done

    def future(self, future: Future[Any], until: float) -> Any:
        """Wait for a future as its ``wait`` does; ``until``: on the monotonic clock, though it waits for 0.1 s at least."""
        if not self._said:
            try:
                return future.wait(max(0.0, min(until, self._late_at) - _time.now()))
            except RpcTimeoutError:
                if future.done():
                    raise
                self.look()
        return future.wait(max(0.1, until - _time.now()))
