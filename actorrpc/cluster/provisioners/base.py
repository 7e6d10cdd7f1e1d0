"""Engines: who starts the workers of a cluster, says where they can be, watches them, and stops them.

The driver's :class:`~actorrpc.cluster.driver.Cluster` numbers the workers, keeps the list of them and decides where actors
go; it asks one engine for processes. Calls never pass through an engine: workers reach each other over their own
connections. So an engine needs to know very little:

* the embedded engine (``local.py``) forks workers on this machine;
* one on top of a scheduler derives from :class:`LaunchedEngine` and says how a worker is launched and stopped. The process
  that it launches calls :func:`actorrpc.cluster.join.serve_order` with ``order.environment()`` in its environment, and is a
  worker from then on, exactly as one that somebody has started by hand with ``python -m actorrpc.worker --join``.

:class:`LaunchedEngine` is thread-safe. ``_lock`` guards its table; nothing is called under it.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from actorrpc.actors.spec.death_report import DeathReport, ProcessSpec
from actorrpc.errors import ConfigError, PeerDiedError, RpcTimeoutError, ShutdownError, UnknownWorkerError
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerInfo, WorkerRecord

if TYPE_CHECKING:
    from actorrpc.agent.agent import Agent
    from actorrpc.cluster.driver import Reception

__all__ = ["Engine", "LaunchRequest", "LaunchedEngine", "Node"]

_START_S: Final = (
    120.0  # how long a launched worker may take to join, waiting in the scheduler's queue included
)
_STOP_S: Final = 5.0
_KEPT: Final = 1000  # reports of workers that have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine, or what a scheduler takes for one, on which an engine can start workers.

    Attributes:
        host: its name or address, as ``.options(host=...)`` says it.
        num_cpus, num_gpus, resources: what it has in all, used or not.
        labels: what ``.options(labels=...)`` looks for.
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
        name: what it is to be called: the driver has reserved that name for it.
        address: where the driver listens, ``tcp://host:port``.
        spec: what the process is to be: label for its output, ``num_cpus``, ``num_gpus`` (None: the engine's default),
            further environment variables, working directory.
        resources: what it needs beside processors and devices, by the names that the engine knows.
        labels: labels that the machine must have.
        host: the machine that it must be on; None where any will do.
        spread: whether it is to be put as far as possible from those that are there.
        secret: the group's key. Never show it, never put it into an argument of a process: use :meth:`environment`.
    """

    name: str
    address: str
    spec: ProcessSpec
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None
    spread: bool = False
    secret: str = field(default="", repr=False)

    def environment(self) -> dict[str, str]:
        """Return the variables that the worker's process needs, the key among them."""
        return {
            **self.spec.env,
            "ACTORRPC_JOIN": self.address,
            "ACTORRPC_WORKER_NAME": self.name,
            "ACTORRPC_KEY": self.secret,
            "ACTORRPC_KEY_FILE": "",
        }


class Engine(Protocol):
    """Starts and ends worker processes, for the driver. Thread-safe; nothing but :meth:`end` waits.

    Attributes:
        name: what messages call it: ``"local"``, ``"ray"``.
    """

    @property
    def name(self) -> str:
        """What messages call it."""

    def nodes(self) -> list[Node]:
        """Return where workers can be started; empty for an engine that cannot start any."""

    def start(self, order: LaunchRequest, creator: str = "") -> Future[WorkerInfo]:
        """Start a worker; the future completes when it has joined, or fails saying why.

        ``creator`` is the worker that asked for it, and with which it ends; default the driver.
        """

    def register(self, record: WorkerRecord) -> None:
        """Record that a worker has joined that this engine was asked to start.

        Raises:
            ShutdownError: nobody waits for it any more; it is turned away.
        """

    def release(self, worker: str) -> None:
        """Let a worker end by itself, once nothing that lives in it is referenced any more."""

    def leaving(self, worker: str) -> None:
        """Record that a worker has begun to leave by itself."""

    def kill(self, worker: str) -> None:
        """End a worker at once."""

    def report(self, worker: str) -> Future[DeathReport]:
        """Return how a worker ended; completes when it has. Fails with UnknownWorkerError if it is not ours."""

    def owns(self, worker: str) -> bool:
        """Say whether this engine was asked to start the worker."""

    def end(self, graceful: bool, timeout: float) -> None:
        """End all workers. Bounded, in seconds (0: 5 s); idempotent."""

    def abandon(self) -> None:
        """Let go of everything in a forked child of the driver. Takes no lock."""


class _Launched:
    """What is known of one worker that was launched."""

    def __init__(self, order: LaunchRequest, creator: str) -> None:
        self.order = order
        self.creator = creator
        self.future: Future[WorkerInfo] = Future()
        self.future.label = f"the start of {order.name!r}"
        self.record: WorkerRecord | None = None
        self.timer: Any = None
        self.doomed = False  # it is stopped, or is to be as soon as it is there
        self.asked: list[Future[DeathReport]] = []


class LaunchedEngine(abc.ABC):
    """An engine on top of something that starts processes elsewhere: three methods are its own.

    Attributes:
        agent: the driver's; set by :meth:`attach` before anything is started.
        num_workers: how many workers it keeps from the start that take several actors each, its pool; 0: it has no pool.
        pool: the names of those that are in its pool now.
    """

    name = "launched"
    agent: Agent
    num_workers = 0

    @property
    def pool(self) -> list[str]:
        """The names of the workers in its pool."""
        return []

    def __init__(self, *, start_timeout: float = _START_S) -> None:
        self._start_s = start_timeout
        self._lock = threading.RLock()
        self._workers: dict[str, _Launched] = {}
        self._ended: dict[str, DeathReport] = {}
        self._closing = False
        self._stopping = False  # all are being stopped
        self._gone = threading.Event()

    # -- what an engine says itself ------------------------------------------------------------------------

    @abc.abstractmethod
    def nodes(self) -> list[Node]:
        """Return where workers can be started."""

    @abc.abstractmethod
    def launch(self, order: LaunchRequest) -> None:
        """Begin to start a worker. Called on a pool thread; may wait some seconds, but not for the worker to join.

        What it raises is why the worker could not be started. Whenever the process has ended, however and whenever,
        :meth:`ended` is to be called.
        """

    @abc.abstractmethod
    def stop(self, worker: str) -> None:
        """Kill a worker's process, or take it out of the queue. Called on a pool thread. Harmless when repeated."""

    def close(self) -> None:  # noqa: B027 (an engine may have nothing to do)
        """Let go of the scheduler: all workers have ended, or were stopped."""

    def lose(self) -> None:  # noqa: B027 (an engine may have nothing to do)
        """Let go of what must not be shared with a forked child of the driver, which this is. Takes no lock."""

    def open(self, reception: Reception, joined: Callable[[], list[WorkerRecord]]) -> None:  # noqa: B027 (an engine may have nothing to do)
        """Start the workers that are to be there from the start, and wait for them. Called once, on the driver's thread.

        Args:
            reception: where they join, and with which key.
            joined: gives the workers that have joined.
        """

    def grow(self, count: int, timeout: float) -> None:
        """Start further workers of its pool, like those that it has, and wait for them; only where there is a pool.

        Args:
            timeout: for all of it, in seconds.

        Raises:
            ConfigError: there is no pool.
            PlacementError: there is no place for them.
            PeerDiedError: one has ended before it had joined.
            RpcTimeoutError: not all have joined in time.
        """
        raise ConfigError(f"engine {self.name!r} has no pool of workers to which {count} could be added")

    # -- what it is told -------------------------------------------------------------------------------------

    def attach(self, agent: Agent) -> None:
        """Take the driver's agent: called once, before anything is started."""
        self.agent = agent
        agent.on_peer_end.append(lambda peer: self._lost(peer.name, peer.cause))

    def ended(self, worker: str, report: DeathReport | None = None) -> None:
        """Record that a worker's process has ended. From any thread; idempotent."""
        with self._lock:
            known = self._workers.pop(worker, None)
            if known is None:
                return
            found = report or DeathReport(worker=worker)
            self._ended[worker] = found
            if len(self._ended) > _KEPT:
                del self._ended[next(iter(self._ended))]
            others = [name for name, each in self._workers.items() if each.creator == worker]
            if not self._workers:
                self._gone.set()
        if known.timer is not None:
            known.timer.cancel()
        self._fail(
            known,
            PeerDiedError(
                f"the worker for {known.order.spec.label!r} could not be started: {found.describe()}",
                maybe_executed=False,
                worker=worker,
            ),
        )
        for future in known.asked:
            future.try_complete(found, self.agent.submit)
        for name in others:
            self.kill(name)

    # -- Engine ------------------------------------------------------------------------------------------------

    def start(self, order: LaunchRequest, creator: str = "") -> Future[WorkerInfo]:
        """See :class:`Engine`."""
        known = _Launched(order, creator or self.agent.name)
        with self._lock:
            closing = self._closing
            if not closing:
                self._workers[order.name] = known
                self._gone.clear()
        if closing:
            self._fail(known, ShutdownError("the cluster is shutting down", maybe_executed=False))
        else:
            late = partial(self.agent.submit, partial(self._not_joined, known))
            known.timer = self.agent.clock.after(self._start_s, late)
            self.agent.submit(partial(self._launch, known))
        return known.future

    def _launch(self, known: _Launched) -> None:
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
        if not self._wants(known):  # it was killed, or all has ended, before there was anything to stop
            self.stop(name)

    def _wants(self, known: _Launched) -> bool:
        """Say whether a worker is still to be started: it was neither given up nor stopped."""
        with self._lock:
            return not self._stopping and self._workers.get(known.order.name) is known and not known.doomed

    def _not_joined(self, known: _Launched) -> None:
        name = known.order.name
        if known.record is not None or self._workers.get(name) is not known:
            return
        self._fail(
            known,
            RpcTimeoutError(
                f"the worker {name!r} that engine {self.name!r} was asked for has not joined within {self._start_s:g} s: "
                f"it may wait for resources, or not reach {known.order.address}",
                maybe_executed=False,
                worker=name,
            ),
        )
        self.kill(name)

    def register(self, record: WorkerRecord) -> None:
        """See :class:`Engine`."""
        with self._lock:
            known = self._workers.get(record.name)
            if known is None or self._closing or (known.record is None and known.future.done()):
                raise ShutdownError(f"nobody waits for {record.name!r} any more", maybe_executed=False)
            known.record = record
        if known.timer is not None:
            known.timer.cancel()
        known.future.try_complete(record.info, self.agent.submit)

    def release(self, worker: str) -> None:  # noqa: B027 (an engine may have nothing to do)
        """See :class:`Engine`; the cluster asks the worker itself, and this has nothing to do."""

    def leaving(self, worker: str) -> None:
        """See :class:`Engine`."""
        self.agent.clock.after(_STOP_S, partial(self.kill, worker))

    def kill(self, worker: str) -> None:
        """See :class:`Engine`."""
        known = self._workers.get(worker)
        if known is not None:
            known.doomed = True
            self.agent.submit(partial(self.stop, worker))

    def report(self, worker: str) -> Future[DeathReport]:
        """See :class:`Engine`."""
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
                UnknownWorkerError(f"{worker!r} is no worker that engine {self.name!r} has started")
            )
            future.acknowledge()
        return future

    def owns(self, worker: str) -> bool:
        """See :class:`Engine`."""
        return worker in self._workers or worker in self._ended

    def end(self, graceful: bool, timeout: float) -> None:
        """See :class:`Engine`. The cluster has asked the workers to leave: this waits, and stops those that stay.

        Ctrl-C ends the wait, or the stop of one of them: all others are stopped before it is raised.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if not self._workers:
                self._gone.set()
        try:
            if graceful:
                self._gone.wait(timeout or _STOP_S)
        finally:
            interrupted: BaseException | None = None
            with self._lock:
                self._stopping = True
            for worker in list(self._workers):
                try:
                    self.stop(worker)
                except Exception as error:
                    self.ended(worker, DeathReport(worker=worker, stderr=(str(error),)))
                except BaseException as error:
                    interrupted = error
            for known in list(self._workers.values()):
                self._fail(known, ShutdownError("the cluster has shut down", maybe_executed=False))
            self.close()
            if interrupted is not None:
                raise interrupted

    def abandon(self) -> None:
        """See :class:`Engine`."""
        self.lose()

    # -- inside ------------------------------------------------------------------------------------------------

    def _lost(self, worker: str, cause: str) -> None:
        """Record that the connection to a worker has ended: its process is stopped, if it is not over already."""
        if worker in self._workers and not self._closing:
            self.agent.clock.after(_STOP_S, partial(self.kill, worker))

    def _fail(self, known: _Launched, error: BaseException) -> None:
        known.future.try_fail(error, self.agent.submit)
        if isinstance(error, ShutdownError):
            known.future.acknowledge()
