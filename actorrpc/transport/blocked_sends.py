"""Threads that wait because a peer does not take what is sent to it: since when, and a log line where that takes long."""

from __future__ import annotations

import logging
from typing import Final

from actorrpc import _time

__all__ = ["SILENT_S", "BlockedSends"]

_log = logging.getLogger("actorrpc.calls")
SILENT_S: Final = 2.0
"""A wait that takes longer is logged."""
_QUIET_S: Final = 60.0  # at least so long passes between two such log lines


class BlockedSends:
    """The waits of one kind for one peer.

    Attributes:
        since: since when threads have waited without a break; None while no thread waits. A lock of the owner guards it.
    """

    __slots__ = ("_quiet_until", "since")

    def __init__(self) -> None:
        self.since: float | None = None
        self._quiet_until = 0.0

    def is_due(self, since: float) -> bool:
        """Say whether a wait that has lasted since then is to be logged now. The next ones are then not, for a while."""
        now = _time.now()
        if now < since + SILENT_S or now < self._quiet_until:
            return False
        self._quiet_until = now + _QUIET_S
        return True

    @staticmethod
    def log(what: str, why: str) -> None:
        """Log that a thread has waited for :data:`SILENT_S` to send something. The caller holds no lock."""
        _log.warning("%s has been blocked for %.0f s: %s", what, SILENT_S, why)
