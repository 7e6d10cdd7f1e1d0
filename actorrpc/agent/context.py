"""Which worker code acts for: the process's, or, where a test has several in one process, the thread's.

A process is one worker, or none. :class:`~actorrpc.testing.InProcessCluster` makes several: each thread that one of them starts
acts for it, and any thread for the one that it names (:func:`begin_acting`); all others act for the first.
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
    "acting_worker",
    "add_several",
    "begin_acting",
    "current_worker",
    "end_acting",
    "end_several",
    "here",
    "on_fork",
    "process_worker",
    "set_worker",
    "workers_here",
]


class Worker:
    """What is in force for one worker. Each floor puts in its own part when the worker joins a group.

    Attributes:
        agent: its agent.
        group: its membership in a group.
        references: its RRefs.
        autograd: its autograd contexts, and its part in backward passes.
        actors: its actor layer.
        cluster: the cluster of which it is the driver.
        leaver: ends its process when the driver says so.
        observer: asks the other workers how they are, and answers them.
        timeout: the default time-out of its calls, in seconds; 0 means none.
        what: what it is, in words for messages.
        namespace: where its actors look for names, if they say none.
        ends: what ends the floors above, the last one first; see ``rpc.api.on_start``.
        stop: ends what has started it; called with whether the end is graceful, and the seconds that are left.
        in_force: it has joined, and has not begun to leave.
    """

    __slots__ = (
        "actors",
        "agent",
        "autograd",
        "cluster",
        "debugger",
        "ends",
        "group",
        "in_force",
        "leaver",
        "namespace",
        "observer",
        "references",
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
        self.ends: list[Callable[[bool], None]] = []
        self.stop: Callable[[bool, float], None] | None = None
        self.group: Any = None
        self.references: Any = None
        self.autograd: Any = None
        self.actors: Any = None
        self.cluster: Any = None
        self.leaver: Any = None
        self.observer: Any = None
        self.debugger: Any = None


class _ProcessWorker:
    """Where the process's worker stands, so that the path of every call finds it without a call."""

    __slots__ = ("worker",)

    def __init__(self) -> None:
        #: the worker that this process is; None where it is none, or has several
        self.worker: Worker | None = None


here: Final = _ProcessWorker()
_members: list[Worker] = []  # where there are several: those, in the order in which they were made

#: Called in a forked child with each worker that its parent is, and that is no longer in force.
on_fork: list[Callable[[Worker], None]] = []


def current_worker() -> Worker | None:
    """Return the worker that the calling thread acts for."""
    return here.worker if not _members else acting_worker() or _members[0]


def process_worker() -> Worker | None:
    """Return the worker that this process is; None where it is none, or has several."""
    return here.worker


def workers_here() -> tuple[Worker, ...]:
    """Return all workers that this process is."""
    return tuple(_members) if here.worker is None else (here.worker,)


def set_worker(worker: Worker | None) -> None:
    """Name the worker that this process is, or say that it is none any more. Does nothing where it has several."""
    if not _members:
        here.worker = worker


# -- several in one process ----------------------------------------------------------------------


def add_several(worker: Worker) -> None:
    """Note a worker that this process is besides others. Threads act for different ones; for the first where they say nothing."""
    here.worker = None
    _members.append(worker)


def end_several() -> None:
    """End what the first :func:`add_several` began."""
    here.worker = None
    _members.clear()


def begin_acting(worker: Worker) -> None:
    """Have the calling thread (or asyncio task), and the threads of ours that it starts, act for a worker."""
    ACTING.set((*ACTING.get(), worker))


def end_acting(worker: Worker) -> None:
    """Take back the last :func:`begin_acting` for a worker in this thread (or task); blocks may end out of order.

    Raises:
        RuntimeError: there is none, it was in another thread.
    """
    acting = ACTING.get()
    for at in reversed(range(len(acting))):
        if acting[at] is worker:
            ACTING.set(acting[:at] + acting[at + 1 :])
            return
    raise RuntimeError(
        f"the block for worker {worker.agent.name!r} ends on another thread, or in another task, than it began"
    )


def acting_worker() -> Worker | None:
    """Return the worker that the calling thread has said it acts for."""
    acting = ACTING.get()
    return acting[-1] if acting else None


def _after_fork() -> None:
    workers = workers_here()
    end_several()
    for worker in workers:
        for end in on_fork:
            end(worker)


os.register_at_fork(after_in_child=_after_fork)
