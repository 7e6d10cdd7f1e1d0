"""A process of a cluster other than the driver: from its fork, or from when it has joined, to its exit.

:func:`main` runs in the main thread of a process that was just forked. It sets the process up (random seeds, variables,
directory), joins the group, and waits for the end. The user's ``__main__`` is not imported here. From :func:`enter` on, forked
processes and processes that joined over the network (``join.py``) do the same. :class:`RemoteDirectory` sends their requests to
the driver.

A worker ends when the driver orders it or has ended; or, after its release, when no other process uses it. The main thread waits
in :meth:`Member.wait`; all other code runs in other threads. There are no locks. A process that has joined by
``init(address=...)`` does not call :meth:`Member.wait`: its script continues, and the process stays a member until the script
shuts RPC down.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import logging
import os
import queue
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NoReturn

import torch

from actorrpc import _time
from actorrpc._exceptions import undo_on_error
from actorrpc._python import clear_exit_functions, end_multiprocessing, run_exit_functions
from actorrpc.actors.host.actor import HostedActor
from actorrpc.actors.host.mailbox import Envelope
from actorrpc.actors.spec.actor_spec import DeathReport, ProcessSpec
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import CURRENT
from actorrpc.agent.context import Worker
from actorrpc.agent.peers import Peer
from actorrpc.cluster import forwarding, logs
from actorrpc.cluster.draining import drain_soon
from actorrpc.cluster.driver import serve
from actorrpc.config import Settings
from actorrpc.errors import PeerDiedError, PlacementError, RpcError, ShutdownError
from actorrpc.futures import WAITING, Future
from actorrpc.group import group
from actorrpc.group.group import Group, MemberDirectory
from actorrpc.group.store import some
from actorrpc.rpc import api, rref
from actorrpc.rpc.refcount.runtime import References
from actorrpc.serialization import exceptions
from actorrpc.wire.identity import WorkerInfo, WorkerRecord
from actorrpc.wire.keys import Key

__all__ = ["Member", "RemoteDirectory", "begin_fork", "enter", "exit_process", "main"]

_log = logging.getLogger("actorrpc.cluster")
_FIRST_S: Final = 0.01
_SLOWEST_S: Final = 0.25
_LEAVE_S: Final = 4.0
_QUERY_S: Final = 30.0
_JOIN_S: Final = 30.0


def main(job: dict[str, Any]) -> NoReturn:
    """Run a worker, and end the process; ``job`` is the fork command with the data for all children (``fork_server.py``)."""
    code = 1
    try:
        # After a crash in C, the last lines of stderr, which the death report contains, show the Python stack.
        if sys.version_info >= (3, 14):
            faulthandler.enable(file=2, all_threads=False, c_stack=False)  # the stack in C would come last
        else:
            faulthandler.enable(file=2, all_threads=False)
        begin_fork()
        HostedActor.on_imported = _freeze
        HostedActor.on_shown = logs.Labels().change
        _work(job)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        exit_process(code)


def begin_fork() -> None:
    """Set up a process that was just forked: its exit functions, and its random seeds."""
    # Drop exit functions that libraries have registered in the parent (they take 50 ms), as multiprocessing does.
    clear_exit_functions()
    atexit.register(logging.shutdown)
    atexit.register(end_multiprocessing)
    _reseed()


def _work(job: dict[str, Any]) -> None:
    torch.set_num_threads(job["threads"])
    directory = RemoteDirectory(WorkerRecord.from_bytes(job["driver"]))
    settings, driver = Settings(**job["settings"]), directory.driver
    in_file = bool(driver.tcp) and settings.log_forward
    forwarding.set_own_place(forwarding.place_of(settings, driver.hostname) if in_file else forwarding.DRIVER)
    entered = group.enter(  # before _dress() sets variables, so that the socket is in the driver's directory
        job["name"],
        job["rank"],
        directory,
        settings=settings,
        key=Key(job["key"]),
    )
    try:
        member = enter(
            entered,
            directory,
            timeout=job["timeout"],
            what=f"a process of an actor ({job['name']!r}) in the embedded cluster",
            namespace=job["namespace"],
            dress=lambda: _dress(job),
        )
    except (PeerDiedError, ShutdownError):
        # The last handle of this process's actor was deleted, or the program ended, before this process had joined.
        return
    try:
        member.wait()
    finally:
        api.shutdown(False)


def _freeze() -> None:
    """Exclude objects that importing the actor's class has made from garbage collection: a full collection would take 0.1 s."""
    gc.collect()
    gc.freeze()


def _reseed() -> None:
    """Reseed random number generators: a fork would continue the sequence of its parent."""
    random.seed()
    torch.default_generator.seed()
    numpy_random: Any = sys.modules.get("numpy.random")  # not imported by numpy 2 before its first use
    if numpy_random is not None:
        numpy_random.seed()


def _dress(job: dict[str, Any]) -> None:
    for name in job["unset"]:
        os.environ.pop(name, None)
    os.environ.update(job["set"])
    sys.path[:] = job["path"]
    sys.argv[:] = job["arguments"]
    if job["directory"] is not None:
        os.chdir(job["directory"])


def exit_process(code: int) -> NoReturn:
    """End the process as an interpreter would, but without finalising its modules.

    Finalising is slow, and a thread that is still in C++ at that time (in a method that has not returned) would abort
    the whole process.
    """
    try:
        run_exit_functions()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit(code)


class Member:
    """The membership of this process in a cluster: tells the thread in :meth:`wait` when to leave. Thread-safe.

    Args:
        references: the RRefs of this process and their counts.
        directory: sends requests to the driver.

    Attributes:
        agent: the agent of this process.
        graceful: whether :meth:`wait` leaves the group gracefully; False if the driver has ended.
        waits: whether a thread has called :meth:`wait`: this process does not run its own script.
        drained: whether the driver has drained this worker.
        driver_lost: how and when the driver died; empty if it has not died, or if this process was told to leave before.
    """

    def __init__(self, agent: Agent, references: References, directory: RemoteDirectory) -> None:
        self.agent = agent
        self._references = references
        self._directory = directory
        self._over = False
        self._looking = False
        # Not an Event: a signal handler that has interrupted wait() can call put(), but Event.set() would block.
        self._tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.graceful = True
        self.waits = False
        self.drained = False
        self.driver_lost = ""

    def wait(self) -> None:
        """Block until another thread calls :meth:`leave`, then leave the group. Interruptible."""
        self.waits = True
        while not self._over:
            self._tasks.get()()
        api.shutdown(self.graceful, _LEAVE_S)

    def drain(self, grace: float) -> None:
        """Let the driver drain this worker; leave after ``grace`` seconds in any case. Returns at once; for signal handlers."""

        def begin() -> None:
            self.agent.clock.after(grace, partial(self.give_up, f"after its {grace:g} s of grace"))
            self._directory.request_drain(grace)

        self._tasks.put(begin)

    def give_up(self, when: str) -> None:
        """Leave, and log a warning with the calls that are abandoned, if any. Returns at once; for signal handlers."""

        def abandon() -> None:
            running = [each for peer in self.agent.peers() for each in list(peer.running.values())]
            calls = Counter(each.title for each in running if isinstance(each, Envelope))
            if calls:
                _log.warning(
                    "worker %r leaves %s, and abandons calls: %s",
                    self.agent.name,
                    when,
                    some(f"{number} of {title}" for title, number in calls.most_common()),
                )
            self.leave()

        self._tasks.put(abandon)

    def leave(self, graceful: bool = True) -> None:
        """Wake the thread in :meth:`wait`, which then leaves the group. Has no effect if no thread calls :meth:`wait`.

        Args:
            graceful: whether to leave gracefully. If any call has passed False, the process does not leave gracefully.
        """
        self.graceful = self.graceful and graceful
        self._over = True
        self._tasks.put(bool)

    def leave_driver(self, driver: Peer) -> None:
        """Leave because the driver has left or has died."""
        if driver.state == "dead" and not self._over:
            silent = _time.now() - driver.failure_detector.last_received
            self.driver_lost = driver.cause or "it died"
            if silent < float("inf"):
                when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - silent))
                self.driver_lost += f" (last message at {when}, {silent:.1f} s earlier)"
        self.leave(False)

    def leave_when_idle(self) -> None:
        """Call :meth:`leave` as soon as no other process refers to a value in this process, and no call runs here."""
        if not self._looking:
            self._looking = True
            self._look(_FIRST_S, False)

    def _look(self, pause: float, was_idle: bool) -> None:
        if self._over or self.agent.closed_down:
            return
        self._references.collect()
        counts = self._references.table.pending_counts()
        busy = any(peer.running for peer in self.agent.peers())
        idle = not (busy or counts.owners or counts.children)
        if idle and was_idle:
            # Two checks in a row found no reference and no call. One check is not enough: while a message carries a
            # reference from one worker to another, no table may have the reference.
            try:
                self._directory.announce_leaving()
            finally:
                self.leave()
            return
        pause = _FIRST_S if idle else min(2 * pause, _SLOWEST_S)
        again = partial(self._look, pause, idle)
        self.agent.clock.after(pause, partial(self.agent.submit, again))


def enter(
    group: Group,
    directory: RemoteDirectory,
    *,
    timeout: float,
    what: str,
    namespace: str,
    facts: dict[str, Any] | None = None,
    dress: Callable[[], None] = lambda: None,
    limit: float = _JOIN_S,
) -> Member:
    """Make this process a member of the group, and tell the driver that it has joined.

    Args:
        timeout: the default time-out of calls, in seconds.
        what: describes this process, for messages.
        facts: the resources, labels and host names of this worker; None for a process that the driver has forked.
        dress: called when the sockets exist, before any call is served.
        limit: how long the driver may take to answer, in seconds.

    Raises:
        RpcError: the driver refuses this worker, or does not answer. Then this process is in no group.
        RuntimeError: this process is already in a group.
    """
    agent = group.agent
    directory.attach(agent)
    members: list[Member] = []

    def ready(worker: Worker) -> None:
        member = worker.exit_member = Member(agent, worker.references, directory)
        members.append(member)

        def ended(peer: Peer) -> None:
            if peer.name == directory.driver.name:
                member.leave_driver(peer)

        agent.on_peer_end.append(ended)
        if worker.actors is not None:
            worker.actors.spawner = directory

    def stop(graceful: bool, _seconds: float) -> None:
        if graceful:
            references = rref.runtime()
            references.carry_out(references.table.delete_all_users())
        for member in members:  # if user code has called shutdown(), wake the main thread, too
            member.leave(graceful)

    with undo_on_error(group.close):  # api.install() fails if this process is in another group
        dress()
        api.install(lambda: group, timeout, what, namespace=namespace, ready=ready, stop=stop)
    with undo_on_error(partial(api.shutdown, False)):
        directory.register(facts, limit)
    return members[0]


@contextlib.contextmanager
def _detached() -> Iterator[None]:
    """Separate the requests of the ``with`` block from the call that this thread runs.

    The end of the call does not cancel the requests, because other threads also use their answers. And a wait for an answer does
    not count as a wait of the call, so the actor runs no nested calls meanwhile.
    """
    token = CURRENT.set(None)
    runner, WAITING.runner = WAITING.runner, None
    try:
        yield
    finally:
        WAITING.runner = runner
        CURRENT.reset(token)


class RemoteDirectory(MemberDirectory):
    """The driver's list of workers, and the :class:`~actorrpc.actors.spec.actor_spec.Spawner`, for a worker process.

    Queries the driver by RPC. Records that :meth:`resolve` has returned are cached until the workers end. Thread-safe. Spawner
    methods other than :meth:`check` do not block.

    Attributes:
        driver: the driver's record.
        joined: whether this process has joined by itself; False if the driver has forked it.
    """

    def __init__(self, driver: WorkerRecord, *, joined: bool = False) -> None:
        super().__init__()
        self.driver = driver
        self.joined = joined
        self.add(driver)
        self._agent: Agent | None = None

    def attach(self, agent: Agent) -> None:
        """Send requests through this agent from now on."""
        self._agent = agent
        self.add(agent.record)
        agent.on_peer_end.append(self._ended)

    def _ended(self, peer: Peer) -> None:
        if peer.name != self.driver.name:
            self.remove(peer.record)

    @property
    def _own(self) -> Agent:
        assert self._agent is not None
        return self._agent

    def _query(self, method: str, *arguments: Any, limit: float = _QUERY_S) -> Any:
        """Call a method of the driver's cluster, and wait for the answer."""
        with _detached():
            peer = self._own.peer(self.driver.name)
            return self._own.call_sync(peer, serve, (method, *arguments), {}, limit)

    def _request(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the driver's cluster; return a future of the answer."""
        return self._call(serve, method, *arguments)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function on the driver; return a future of the answer."""
        future: Future[Any] = Future()
        try:
            with _detached():
                peer = self._own.peer(self.driver.name)
                self._own.call(peer, function, arguments, {}, 0.0, future=future)
                self._own.flush()
        except RpcError as error:
            future.try_fail(error)
        return future

    def _tell(self, method: str, *arguments: Any) -> None:
        # A failure means that the driver has ended, and all its processes with it.
        self._request(method, *arguments).add_done_callback(Future.acknowledge)

    # -- membership ------------------------------------------------------------------------------------------

    def register(self, facts: dict[str, Any] | None, limit: float) -> None:
        """Tell the driver that this worker has joined.

        Args:
            facts: the resources, labels and host names of this worker; None for a process that the driver has forked.
            limit: how long the driver may take to answer, in seconds.

        Raises:
            RpcError: the driver refuses this worker, or does not answer.
        """
        self._query("register", self._own.record.to_bytes(), facts, limit=limit)

    def announce_leaving(self) -> None:
        """Tell the driver that this worker begins to leave by itself."""
        # If the query fails, the driver has ended or is very busy. This process ends in any case.
        with contextlib.suppress(RpcError):
            self._query("leaving", self._own.name, limit=_LEAVE_S)

    def request_drain(self, grace: float) -> None:
        """Ask the driver to drain this worker within ``grace`` seconds. Does not block."""
        self._call(drain_soon, self._own.name, grace).add_done_callback(Future.acknowledge)

    def resolve(self, to: str | int) -> WorkerRecord | None:
        """Return the record of a worker by name or rank; None if there is none.

        Raises:
            RpcError: the driver does not answer.
        """
        found = super().resolve(to)
        if found is None and self._agent is not None:
            packed = self._query("lookup", to)
            if packed is not None:
                found = WorkerRecord.from_bytes(packed)
                self.add(found)
        return found

    def members(self) -> list[WorkerRecord]:
        """Return the records of all workers.

        Raises:
            RpcError: the driver does not answer.
        """
        return [WorkerRecord.from_bytes(packed) for packed in self._query("listing")]

    # -- Spawner -----------------------------------------------------------------------------------------------

    def spawn(self, spec: ProcessSpec) -> Future[WorkerInfo]:
        """Request a place for an actor, as ``Cluster.spawn``; the future completes with the worker, or fails with the reason."""
        return self._request("spawn", spec, self._own.name)

    def check(self, spec: ProcessSpec) -> None:
        """Ask the driver whether a machine or worker could hold an actor that requests a place or resources.

        Raises:
            PlacementError: no machine and no worker could hold the actor.
        """
        if spec.wait_s or not spec.books:
            return
        try:
            self._request("check", spec).wait(_QUERY_S)
        except PlacementError as error:
            raise exceptions.original(error) from None
        except RpcError:  # the driver has ended or is too busy: creating the actor will report problems
            pass

    def release(self, worker: str) -> None:
        """Ask a process, through the driver, to end as soon as no value and no actor in it is referenced."""
        self._tell("release", worker)

    def kill(self, worker: str) -> None:
        """Kill the process of a worker, if the engine has started it."""
        self._tell("kill", worker)

    def give_back(self, booking: int) -> None:
        """Release the booking of an actor."""
        self._tell("give_back", booking)

    def lend(self, booking: int, change: int) -> None:
        """Count the CPUs of a task as free while it waits, as ``Cluster.lend``."""
        self._tell("lend", booking, change)

    def capacity(self, spec: ProcessSpec) -> Future[int]:
        """Ask the driver how many such actors could live at a time, as ``Cluster.capacity``."""
        return self._request("capacity", spec)

    def report(self, worker: str) -> Future[DeathReport]:
        """Return a future of the report on a process's end."""
        return self._request("report", worker)

    def owns(self, worker: str) -> bool:
        """Return True for all workers but the driver: this process does not know which workers the engine has started."""
        return worker != self.driver.name
