"""Provisioners: they start the workers of a cluster, watch them, and stop them.

The driver's :class:`~actorrpc.cluster.driver.Cluster` names the workers, keeps their list and decides where actors are
placed; it requests processes from one engine. Calls never pass through an engine: workers reach each other over their own
connections. An engine is a subclass of :class:`Engine` with four functions: it lists the machines where workers can be
started (:meth:`Engine.nodes`), starts a worker (:meth:`Engine.launch`), stops it (:meth:`Engine.stop`), and reports that its
process has ended (by calling :meth:`Engine.ended`). The base class keeps the table of started workers.

* the embedded engine (``local.py``) forks workers on this machine;
* an engine on top of a scheduler derives from :class:`LaunchedEngine`. The process that it launches calls
  :func:`actorrpc.cluster.join.serve_order` with ``order.environment()`` in its environment, and is a worker from then on,
  exactly like a worker that was started by hand with ``python -m actorrpc.worker --join``.

Engines are thread-safe. ``Engine._lock`` guards the table of started workers. It is re-entrant, because the garbage collector
may run a finaliser that starts or kills a worker in the thread that holds it. No user code runs under it, and no code waits under
it for a worker.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actorrpc.actors.spec.actor_spec import DeathReport, ProcessSpec
from actorrpc.errors import (
    ConfigError,
    PeerDiedError,
    RpcError,
    RpcTimeoutError,
    ShutdownError,
    UnknownWorkerError,
)
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerInfo, WorkerRecord

if TYPE_CHECKING:
    from actorrpc.agent.agent import Agent
    from actorrpc.cluster.driver import Reception

__all__ = ["Engine", "LaunchRequest", "LaunchedEngine", "Node", "StartedWorker", "not_started"]

_START_S: Final = (
    120.0  # how long a launched worker may take to join, including the wait in the scheduler's queue
)
_STOP_S: Final = 5.0
_KEPT: Final = 1000  # greatest number of death reports that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine, or a unit that a scheduler treats like a machine, on which an engine can start workers.

    Attributes:
        host: the machine's name or address, which ``.options(host=...)`` matches.
        num_cpus, num_gpus, resources: its total resources, used or not.
        labels: its labels, which ``.options(labels=...)`` matches.
    """

    host: str
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One worker to be started.

    Attributes:
        name: the worker's name, which the driver has chosen.
        rank: the worker's rank; -1 if the driver assigns it when the worker joins.
        address: where the driver listens, ``tcp://host:port``.
        spec: label for its output, ``num_cpus``, ``num_gpus`` (None: the engine's default), further environment variables,
            working directory.
        resources: the resources that the worker needs besides processors and devices, by the engine's names.
        labels: labels that the machine must have.
        host: the machine where the worker must run; None for any machine.
        spread: whether the engine should prefer machines with few workers.
        secret: the group's key. Never show it, and never put it into an argument of a process: use :meth:`environment`.
    """

    name: str
    rank: int = -1
    address: str
    spec: ProcessSpec
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None
    spread: bool = False
    secret: str = field(default="", repr=False)

    def environment(self) -> dict[str, str]:
        """Return the environment variables that the worker's process needs, including the key."""
        return {
            **self.spec.env,
            "ACTORRPC_JOIN": self.address,
            "ACTORRPC_WORKER_NAME": self.name,
            "ACTORRPC_KEY": self.secret,
            "ACTORRPC_KEY_FILE": "",
        }


class StartedWorker:
    """A worker from its request to the end of its process. Guarded by its engine's lock.

    Attributes:
        future: completes when the worker has joined, or fails with the reason why it has not.
        timer: abandons the worker if it has not joined in time.
        joined: whether the worker has joined.
        killed: whether the worker was stopped, or will be stopped as soon as its process exists.
        asked: the futures that :meth:`Engine.report` has returned for this worker.
    """

    def __init__(self, order: LaunchRequest) -> None:
        self.order = order
        self.future: Future[WorkerInfo] = Future()
        self.future.label = f"the start of {order.name!r}"
        self.timer: Any = None
        self.joined = False
        self.killed = False
        self.asked: list[Future[DeathReport]] = []


def not_started(known: StartedWorker, why: str) -> RpcError:
    """Return the error of a worker that could not be started."""
    return PeerDiedError(
        f"the process for {known.order.spec.label!r} could not be started: {why}",
        maybe_executed=False,
        worker=known.order.name,
    )


class Engine(abc.ABC):
    """Starts and ends worker processes, for the driver. Thread-safe; only ``open``, ``end`` and ``grow`` wait for workers.

    Attributes:
        name: its name in messages: ``"local"``, ``"ray"``.
        agent: the driver's agent; set by :meth:`attach` before any worker is started.
        reception: the data that workers need to join; set by the cluster before any worker is started.
        on_end: called with the name of an ended worker and its death report, before the futures of :meth:`report` complete.
    """

    name = "engine"
    agent: Agent
    reception: Reception
    _entry: type[StartedWorker] = StartedWorker

    def __init__(self, *, start_timeout: float = _START_S) -> None:
        self._start_s = start_timeout
        self._lock = threading.RLock()
        self._workers: dict[str, StartedWorker] = {}
        self._ended: dict[str, DeathReport] = {}
        self._closing = False
        self._stopping = False  # all workers are being stopped
        self._gone = threading.Event()
        self.on_end: Callable[[str, DeathReport], object] = lambda _worker, _report: None

    # -- implemented by engines ------------------------------------------------------------------------

    @abc.abstractmethod
    def nodes(self) -> list[Node]:
        """Return the machines where workers can be started; empty for an engine that cannot start any."""

    @abc.abstractmethod
    def launch(self, order: LaunchRequest) -> None:
        """Begin to start a worker; does not wait for it to join.

        Raises an exception if the worker could not be started. When the process ends, for whatever reason, the engine must call
        :meth:`ended`.
        """

    @abc.abstractmethod
    def stop(self, worker: str) -> None:
        """Kill a worker's process, or remove the worker from the scheduler's queue. Called in any thread. Idempotent."""

    def has_room(self, spec: ProcessSpec) -> bool:
        """Say whether a process can be started now. If not, the cluster asks again when a process has ended."""
        return True

    def close(self) -> None:  # noqa: B027 (an engine may have nothing to do)
        """Disconnect from the scheduler, after all workers have ended or were stopped."""

    def abandon(self) -> None:  # noqa: B027 (an engine may have nothing to do)
        """Close descriptors that a forked child of the driver must not share; called in that child. Takes no lock."""

    def open(self, reception: Reception, joined: Callable[[], list[WorkerRecord]]) -> None:  # noqa: B027 (an engine may have nothing to do)
        """Start the first workers, and wait until they have joined. Called once, by ``init()``.

        Args:
            reception: the address and the key with which the workers join.
            joined: returns the workers that have joined.
        """

    # -- events -------------------------------------------------------------------------------------

    def attach(self, agent: Agent) -> None:
        """Set the driver's agent. Called once, before any worker is started."""
        self.agent = agent

    def ended(self, worker: str, report: DeathReport | None = None) -> None:
        """Record that a worker's process has ended. Thread-safe; idempotent."""
        with self._lock:
            known = self._workers.pop(worker, None)
            if known is None:
                return
            found = report or DeathReport(worker=worker)
            self._ended[worker] = found
            if len(self._ended) > _KEPT:
                del self._ended[next(iter(self._ended))]
            if not self._workers:
                self._gone.set()
            if known.timer is not None:
                known.timer.cancel()
            asked, known.asked = known.asked, []
        self.on_end(worker, found)
        self._fail(
            known,
            not_started(known, "it was killed before it had joined" if known.killed else found.describe()),
        )
        for future in asked:
            future.try_complete(found, self.agent.submit)

    # -- for the cluster ---------------------------------------------------------------------------------------

    def start(self, order: LaunchRequest) -> Future[WorkerInfo]:
        """Start a worker; the future completes when it has joined, or fails with the reason."""
        known = self._entry(order)
        with self._lock:
            closing = self._closing
            if not closing:
                self._workers[order.name] = known
                self._gone.clear()
                self._expect(known, self._start_s)
        if closing:
            self._fail(known, ShutdownError("the cluster is shutting down", maybe_executed=False))
        else:
            self._begin(known)
        return known.future

    def _begin(self, known: StartedWorker) -> None:
        name = known.order.name
        if not self._wants(known):
            if self._stopping:
                self._fail(known, ShutdownError("the cluster has shut down", maybe_executed=False))
            self.ended(name)
            return
        try:
            self.launch(known.order)
        except Exception as error:
            self._fail(known, error)
            self.ended(name)
            return
        if not self._wants(known):  # kill() or end() ran during launch(), and had no process to stop
            self.stop(name)

    def _wants(self, known: StartedWorker) -> bool:
        """Say whether a worker should still be started: it was neither abandoned nor stopped."""
        with self._lock:
            return not self._stopping and self._workers.get(known.order.name) is known and not known.killed

    def _expect(self, known: StartedWorker, seconds: float) -> None:
        """Abandon a worker if it has not joined within ``seconds``. Under the lock."""
        if known.timer is not None:
            known.timer.cancel()
        late = partial(self.agent.submit, partial(self._not_joined, known, seconds))
        known.timer = self.agent.clock.after(seconds, late)

    def _not_joined(self, known: StartedWorker, seconds: float) -> None:
        if not known.joined and self._workers.get(known.order.name) is known:
            self._fail(known, self._late(known, seconds))
            self.kill(known.order.name)

    def _late(self, known: StartedWorker, seconds: float) -> RpcError:
        """Return the error of a worker that has not joined within ``seconds``."""
        return RpcTimeoutError(
            f"the worker {known.order.name!r} that engine {self.name!r} was asked for has not joined within {seconds:g} s: "
            f"it may wait for resources, or cannot reach {known.order.address}",
            maybe_executed=False,
            worker=known.order.name,
        )

    def register(self, record: WorkerRecord) -> None:
        """Record that a worker which this engine has started has joined.

        Raises:
            ShutdownError: the worker was abandoned before it joined; the worker must leave.
        """
        with self._lock:
            known = self._workers.get(record.name)
            if known is None or self._closing or known.killed or (not known.joined and known.future.done()):
                raise ShutdownError(f"the driver no longer waits for {record.name!r}", maybe_executed=False)
            known.joined = True
            if known.timer is not None:
                known.timer.cancel()
        known.future.try_complete(record.info, self.agent.submit)

    def kill(self, worker: str) -> None:
        """Kill a worker that this engine has started, by :meth:`stop` in a pool thread; ignore other workers."""
        known = self._workers.get(worker)
        if known is not None:
            known.killed = True
            self.agent.submit(partial(self.stop, worker))

    def give_up(self, worker: str) -> None:
        """Kill a worker that has not joined; ignore a worker that has joined, because it may be about to exit by itself."""
        known = self._workers.get(worker)
        if known is not None and not known.joined:
            self.kill(worker)

    def report(self, worker: str) -> Future[DeathReport]:
        """Return a future of the report on a worker's end; it fails with UnknownWorkerError if this engine has no such worker."""
        future: Future[DeathReport] = Future()
        future.label = f"the death report of {worker!r}"
        with self._lock:
            known, found = self._workers.get(worker), self._ended.get(worker)
            if known is not None:
                known.asked.append(future)
                return future
        if found is not None:
            future.set_result(found)
        else:
            future.set_exception(
                UnknownWorkerError(f"{worker!r} is not a worker that engine {self.name!r} has started")
            )
            future.acknowledge()
        return future

    def owns(self, worker: str) -> bool:
        """Say whether this engine has started the worker; False for ended workers whose report was discarded."""
        return worker in self._workers or worker in self._ended

    def end(self, graceful: bool, timeout: float) -> None:
        """End all workers; with ``graceful``, wait first, at most ``timeout`` seconds (0: 5 s), until they have left. Idempotent.

        Before a graceful end, the cluster has asked the workers to leave. Workers that have not left are stopped. Ctrl-C ends the
        wait, or the stop of one worker; the other workers are still stopped before KeyboardInterrupt is raised.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if not self._workers:
                self._gone.set()
        try:
            if graceful:
                for known in [each for each in list(self._workers.values()) if not each.joined]:
                    self._fail(known, ShutdownError("the cluster is shutting down", maybe_executed=False))
                    self.kill(known.order.name)
                self._gone.wait(timeout or _STOP_S)
        finally:
            with self._lock:
                self._stopping = True
            with contextlib.ExitStack() as stack:  # runs all callbacks even if one of them raises
                stack.callback(self.close)
                for known in list(self._workers.values()):
                    error = ShutdownError("the cluster has shut down", maybe_executed=False)
                    stack.callback(self._fail, known, error)
                for worker in reversed(list(self._workers)):
                    stack.callback(self._stop_last, worker)

    def _stop_last(self, worker: str) -> None:
        try:
            self.stop(worker)
        except Exception as error:
            self.ended(worker, DeathReport(worker=worker, stderr=(str(error),)))

    def _fail(self, known: StartedWorker, error: BaseException) -> None:
        known.future.try_fail(error, self.agent.submit)
        if isinstance(error, ShutdownError):
            known.future.acknowledge()


class LaunchedEngine(Engine):
    """An engine on top of a scheduler that starts processes on other machines.

    Subclasses implement :meth:`nodes`, :meth:`launch` and :meth:`stop`. :meth:`launch` runs in a pool thread and may block for
    some seconds.

    Attributes:
        num_workers: how many workers :meth:`open` starts for the pool, whose workers take several actors each; 0: no pool.
    """

    name = "launched"
    num_workers = 0

    @property
    def pool(self) -> list[str]:
        """The names of the present workers of the pool."""
        return []

    def grow(self, count: int, timeout: float) -> None:
        """Add workers to the pool, with the resources of the present workers, and wait until they have joined.

        Args:
            timeout: for the whole operation, in seconds.

        Raises:
            ConfigError: there is no pool.
            PlacementError: the scheduler has no place for the new workers.
            PeerDiedError: a new worker has ended before it joined.
            RpcTimeoutError: not all new workers have joined in time.
        """
        raise ConfigError(f"engine {self.name!r} has no pool of workers to which {count} could be added")

    def _begin(self, known: StartedWorker) -> None:
        self.agent.submit(partial(super()._begin, known))
