"""The worker that the running code acts for.

A process is one worker, or none. In tests, :class:`~actorrpc.testing.InProcessCluster` creates several workers in one process: a
thread that a worker starts acts for that worker, any thread may choose a worker (:func:`begin_acting`), and all other threads act
for the first one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from actorrpc.agent.daemon_threads import ACTING

if TYPE_CHECKING:
    from actorrpc.agent.agent import Agent

__all__ = [
    "Worker",
    "add_several",
    "begin_acting",
    "current_worker",
    "end_acting",
    "end_several",
    "here",
    "on_fork",
    "set_worker",
    "workers_here",
]


class Worker:
    """The parts of one worker. Each package sets its own part when the worker joins a group.

    Attributes:
        agent: its agent.
        group: its membership in a group.
        references: its RRefs.
        autograd: its autograd contexts, and its part in backward passes.
        actors: its actor layer.
        cluster: the cluster of which it is the driver.
        debugger: holds its executions for ``actorrpc debug``; None if it has none.
        exit_member: in a process of a cluster other than the driver, the object that ends the process; otherwise None.
        observer: answers the state queries of other workers, and sends its own.
        timeout: the default time-out of its calls, in seconds; 0 means none.
        what: describes the kind of worker, for messages.
        namespace: where its actors look up names by default.
        shutdown_hooks: functions that end the parts of higher packages, called in reverse order; see ``rpc.api.on_start``.
        stop: a function that shuts down the worker; it is called with whether the shutdown is graceful, and the seconds left.
        in_force: whether it has joined the group and has not begun to leave.
    """

    __slots__ = (
        "actors",
        "agent",
        "autograd",
        "cluster",
        "debugger",
        "exit_member",
        "group",
        "in_force",
        "namespace",
        "observer",
        "references",
        "shutdown_hooks",
        "stop",
        "timeout",
        "what",
    )

    def __init__(self, agent: Agent, timeout: float = 0.0, what: str = "", namespace: str = "") -> None:
        self.agent = agent
        self.timeout = timeout
        self.what = what
        self.namespace = namespace
        self.in_force = False
        self.shutdown_hooks: list[Callable[[bool], None]] = []
        self.stop: Callable[[bool, float], None] | None = None
        self.group: Any = None
        self.references: Any = None
        self.autograd: Any = None
        self.actors: Any = None
        self.cluster: Any = None
        self.exit_member: Any = None
        self.observer: Any = None
        self.debugger: Any = None


class _ProcessWorker:
    """Stores the process's worker in an attribute, so that code that makes calls reads it without a function call.

    Attributes:
        worker: the process's worker; None if the process has none or several.
    """

    __slots__ = ("worker",)

    worker: Worker | None


here: Final = _ProcessWorker()
here.worker = None
_members: list[Worker] = []  # if the process has several workers: all of them, in the order of creation

#: Called in a forked child with each worker of the parent.
on_fork: list[Callable[[Worker], None]] = []


def current_worker() -> Worker | None:
    """Return the worker that the calling thread acts for."""
    if not _members:
        return here.worker
    acting = ACTING.get()
    return acting[-1] if acting else _members[0]


def workers_here() -> tuple[Worker, ...]:
    """Return all workers of this process."""
    return tuple(_members) if here.worker is None else (here.worker,)


def set_worker(worker: Worker | None) -> None:
    """Set the worker of this process; None: it has none. Does nothing in a process with several workers."""
    if not _members:
        here.worker = worker


# -- several in one process ----------------------------------------------------------------------


def add_several(worker: Worker) -> None:
    """Add a worker to a process with several workers."""
    here.worker = None
    _members.append(worker)


def end_several() -> None:
    """Remove all workers that :func:`add_several` has added."""
    here.worker = None
    _members.clear()


def begin_acting(worker: Worker) -> None:
    """Make the calling thread (or asyncio task), and the threads of this package that it starts, act for a worker."""
    ACTING.set((*ACTING.get(), worker))


def end_acting(worker: Worker) -> None:
    """Undo the last :func:`begin_acting` for a worker in this thread (or task). Calls for several workers may interleave.

    Raises:
        RuntimeError: this thread does not act for the worker.
    """
    acting = ACTING.get()
    for at in reversed(range(len(acting))):
        if acting[at] is worker:
            ACTING.set(acting[:at] + acting[at + 1 :])
            return
    raise RuntimeError(
        f"the block for worker {worker.agent.name!r} ends on another thread, or in another task, than it began"
    )


def _after_fork() -> None:
    workers = workers_here()
    end_several()
    for worker in workers:
        for end in on_fork:
            end(worker)


os.register_at_fork(after_in_child=_after_fork)
