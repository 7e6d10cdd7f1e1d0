"""Decides when a dead actor is restarted. Pure computation: the caller passes the time, and carries out the decision.

Restarts are counted in a sliding window. The first restart in a row is immediate. Each further restart waits, at first
``backoff_s`` and then twice as long each time, up to :data:`MAX_BACKOFF_S` (or ``backoff_s``, if it is longer). A row ends when
the actor has lived longer than :data:`QUIET_S` and than the last wait. Waits are shortened at random, by up to the fraction
:data:`JITTER`, so that actors that died together do not restart at the same moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["JITTER", "MAX_BACKOFF_S", "QUIET_S", "RestartPolicy"]

MAX_BACKOFF_S: Final = 10.0
QUIET_S: Final = 10.0
JITTER: Final = 0.5
_LISTED: Final = 10  # greatest number of causes in a message
_CUT: Final = 200  # greatest length of a cause, in characters


class RestartPolicy:
    """Decides on one actor's restarts. Not thread-safe.

    Args:
        limit: how many restarts within the window; -1: no limit; 0: none.
        window_s: the length of the window in seconds; None: the whole life of the actor.
        backoff_s: the wait before the second restart in a row, in seconds.
        draw: returns numbers from 0 to 1, by which waits are shortened; None: they are not shortened.
    """

    def __init__(
        self,
        limit: int = 0,
        window_s: float | None = None,
        backoff_s: float = 0.1,
        draw: Callable[[], float] | None = None,
    ) -> None:
        self.limit = limit
        self.window_s = window_s
        #: The number of restarts.
        self.count = 0
        self._backoff = backoff_s
        self._draw = draw
        self._causes: deque[tuple[float, str]] = deque(maxlen=_LISTED)
        self._times: deque[float] = deque()
        self._in_row = 0
        self._last_wait = 0.0
        self._lived_since: float | None = None

    def note_alive(self, now: float) -> None:
        """Record that the actor lives (again)."""
        self._lived_since = now

    def next(self, now: float, why: str = "") -> float | None:
        """Return in how many seconds an actor that has died at ``now`` is restarted; None: never.

        If a number is returned, a restart is counted.

        Args:
            why: how the actor died, for :meth:`causes`; only the first line is kept.
        """
        if why:
            self._causes.append((now, why.partition("\n")[0][:_CUT]))
        lived, self._lived_since = self._lived_since, None
        if self.limit == 0:
            return None
        if self.limit > 0:
            if self.window_s is None:
                if self.count >= self.limit:
                    return None
            else:
                while self._times and self._times[0] <= now - self.window_s:
                    self._times.popleft()
                if len(self._times) >= self.limit:
                    return None
                self._times.append(now)
        if lived is not None and now - lived > max(QUIET_S, self._last_wait):
            self._in_row = 0
        wait = 0.0
        if self._in_row:
            # The exponent is bounded, because 2.0 ** 1024 raises OverflowError.
            wait = min(self._backoff * 2.0 ** min(self._in_row - 1, 60), max(MAX_BACKOFF_S, self._backoff))
            if self._draw is not None:
                wait *= 1.0 - JITTER * self._draw()
        self._in_row += 1
        self._last_wait = wait
        self.count += 1
        return wait

    def why_not(self) -> str:
        """Say, for a message, why there is no further restart."""
        if self.limit == 0:
            return "not restarted: max_restarts is 0"
        within = "" if self.window_s is None else f" within {self.window_s:g} s"
        times = "once" if self.limit == 1 else f"{self.limit} times"
        return f"not restarted again: it was restarted {times}{within}, and max_restarts is {self.limit}"

    def causes(self) -> list[str]:
        """Return the last causes of death, oldest first: within the window before the last death, at most ten."""
        if not self._causes:
            return []
        since = -1.0 if self.window_s is None else self._causes[-1][0] - self.window_s
        return [why for at, why in self._causes if at > since]
