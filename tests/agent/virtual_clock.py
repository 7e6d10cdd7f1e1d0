"""A clock whose time passes only when a test advances it."""

from __future__ import annotations

import heapq

from actorrpc.agent.timers import Clock


class VirtualClock(Clock):
    """A clock whose time stands still until :meth:`advance`, which runs due timers on the caller's thread."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def start(self) -> None:
        """Do nothing, because this clock has no thread."""

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass, and run each timer that becomes due, in order."""
        until = self._now + seconds
        while self._heap and self._heap[0][0] <= until:
            due, _, timer = heapq.heappop(self._heap)
            self._now = max(self._now, due)
            run, timer.run = timer.run, None
            if run is not None:
                run()
        self._now = until
