"""Enables the debugger of a worker while the worker is in its group.

``breakpoint()`` in a call then holds the call. Outside of calls (in the driver, in a rank's own code), it works as before, except
in a process whose standard input is closed or /dev/null, where it holds the calling thread. If PYTHONBREAKPOINT is set,
``breakpoint()`` always works as before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from actorrpc.agent.calls import CURRENT
from actorrpc.agent.context import Worker, current_worker, workers_here
from actorrpc.debugger.debugger import Debugger
from actorrpc.debugger.protocol import PUT_OFF, REQUEST
from actorrpc.rpc import api

__all__ = ["start"]


def start(worker: Worker) -> Callable[[bool], None]:
    """Register the handlers of the debugger, and replace ``sys.breakpointhook``; return a function that undoes this."""
    agent = worker.agent
    made = worker.debugger = Debugger(worker)
    agent.on_notice[REQUEST] = made.asked
    agent.on_notice[PUT_OFF] = made.put_off_there
    agent.inbox.prompt |= {REQUEST, PUT_OFF}
    agent.on_peer_end.append(made.on_peer_end)
    agent.on_failure = made.failed
    previous = sys.breakpointhook
    if getattr(previous, "func", None) is not _breakpoint:
        sys.breakpointhook = partial(_breakpoint, previous)

    def shut_down(_graceful: bool) -> None:
        worker.debugger = agent.on_failure = None
        hook = sys.breakpointhook
        if isinstance(hook, partial) and hook.func is _breakpoint:
            if not any(each.debugger is not None for each in workers_here()):
                sys.breakpointhook = hook.args[0]

    return shut_down


def _breakpoint(previous: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    worker, execution = current_worker(), CURRENT.get()
    debugger = None if worker is None else worker.debugger
    if (
        debugger is None
        or os.environ.get("PYTHONBREAKPOINT")
        or (execution is None and not _has_no_terminal())
    ):
        return previous(*args, **kwargs)
    debugger.breakpoint(sys._getframe(1), execution)
    return None


def _has_no_terminal() -> bool:
    """Return whether standard input is /dev/null or closed, as in a worker that another process has started."""
    try:
        return os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev
    except OSError:
        return True


api.on_start.append(start)
