"""How a worker process ends: when the driver orders it or has ended; or, after its release, when no other process uses it.

The main thread of a worker waits in :meth:`Member.wait`; all other code runs in other threads. There is no lock: the
decision to leave is an assignment and an event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from actorrpc.agent.agent import Agent
from actorrpc.agent.context import current_worker
from actorrpc.rpc import api
from actorrpc.rpc.refcount.runtime import References

__all__ = ["Member", "leave"]

_FIRST_S: Final = 0.01
_SLOWEST_S: Final = 0.25
_LEAVE_S: Final = 4.0


class Member:
    """This process as a member of a cluster; decides when it ends. Thread-safe.

    Args:
        references: the RRefs of this process and their counts.
        announce: called in a pool thread before this process leaves by itself.

    Attributes:
        agent: the agent of this process.
        graceful: whether this process leaves the group gracefully; False if the driver has ended.
        driver_lost: how the driver died, if this process ends for that reason; otherwise empty.
    """

    def __init__(self, agent: Agent, references: References, announce: Callable[[], None]) -> None:
        self.agent = agent
        self._references = references
        self._announce = announce
        self._over = threading.Event()
        self._looking = False
        self.graceful = True
        self.driver_lost = ""

    def wait(self) -> None:
        """Block until :meth:`leave` is called, in any thread, then leave the group. Interruptible."""
        self._over.wait()
        api.shutdown(self.graceful, _LEAVE_S)

    def leave(self, graceful: bool = True) -> None:
        """Let :meth:`wait` leave the group and return; ``graceful``: whether to leave it gracefully."""
        self.graceful = self.graceful and graceful
        self._over.set()

    def leave_when_idle(self) -> None:
        """End this process as soon as no other process refers to a value in it, and no call runs."""
        if not self._looking:
            self._looking = True
            self._look(_FIRST_S, False)

    def _look(self, pause: float, was_idle: bool) -> None:
        if self._over.is_set() or self.agent.closed_down:
            return
        self._references.collect()
        counts = self._references.table.pending_counts()
        busy = any(peer.running for peer in self.agent.peers())
        idle = not (busy or counts.owners or counts.children)
        if idle and was_idle:
            # Two checks in a row found no use: at the first check, a reference in a message may have been in no table.
            try:
                self._announce()
            finally:
                self.leave()
            return
        pause = _FIRST_S if idle else min(2 * pause, _SLOWEST_S)
        again = partial(self._look, pause, idle)
        self.agent.clock.after(pause, partial(self.agent.submit, again))


def leave(when_idle: bool = False) -> None:
    """End :meth:`Member.wait`, at once or (``when_idle``) when no other process uses this one. Other workers call this by RPC.

    A process that runs its own script, because it has joined by ``init(address=...)``, continues."""
    worker = current_worker()
    if worker is not None and worker.exit_member is not None:
        (worker.exit_member.leave_when_idle if when_idle else worker.exit_member.leave)()
