"""Points: named moments in the life of a worker that are not messages, at which tests have it die, stop or fail.

In a process without such a test it costs a look at one name of this module; none of these points is on the path of a call.
The points of messages need no code here: those who want them stand at the agent's gate (``core.gates``) and wrap
executions and handlers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

__all__ = ["POINTS", "reach", "watch"]

POINTS: Final[Mapping[str, str]] = {
    "join.listening": "a worker has opened its sockets and is about to meet the others",
    "join.met": "a worker knows the others, and they know it; it serves no call yet",
    "shutdown.called": "a worker of a fixed group is about to wait until all have called shutdown",
    "shutdown.together": "all have called it: nobody works any more",
    "shutdown.let_go": "a worker has let go of its references, and is about to wait until all have",
    "shutdown.settled": "all have let go of theirs",
    "shutdown.closing": "a worker is about to close its connections, at any kind of end",
    "shutdown.closed": "it has closed them, and is to be forgotten by the others",
    "actor.making": "an actor's worker is about to run its constructor, for the first time or again",
    "actor.restoring": "the constructor of a restarted actor has run; restore() comes next",
    "actor.made": "an actor is made, but nobody knows yet",
    "actor.checkpointing": "an actor is about to be asked for its checkpoint, before its answer leaves",
    "actor.checkpointed": "the supervisor has the checkpoint; the answer has not been sent yet",
    "actor.ending": "an actor has ended; on_stop() comes next",
}
"""Every point that is no message's, and when it is reached."""

_watcher: Callable[[str, str], None] | None = None


def watch(watcher: Callable[[str, str], None] | None) -> None:
    """Have ``watcher(point, worker)`` called at every point from now on; None: nobody. It may raise."""
    global _watcher
    _watcher = watcher


def reach(point: str, worker: str = "") -> None:
    """Be at a point. ``worker``: who is, where the process has no agent yet."""
    if _watcher is not None:
        _watcher(point, worker)
