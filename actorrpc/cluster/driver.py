"""The cluster as its driver sees it: its workers, their resources, and where the next actor is placed.

Supervisors request places for actors from :class:`Cluster`. Its engine starts processes for single actors; workers that have
joined (by hand, from a launcher, or by :func:`~actorrpc.cluster.resources.scale`) hold several actors each.

``_lock`` guards the book, the queued requests and changes of the directory. It is re-entrant, because the garbage collector may
run a finaliser that spawns or releases in the thread that holds it. The engine's own lock may be taken under it, never the other
way round. No user code runs under it, and no code waits for a worker under it.

Other workers call methods of the cluster by RPC, through :func:`serve`; the driver ends workers by :func:`leave`.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from actorrpc import _time
from actorrpc._exceptions import undo_on_error
from actorrpc.actors.spec.actor_spec import DeathReport, ProcessSpec, SharedSlot
from actorrpc.agent.agent import Agent
from actorrpc.agent.context import current_worker
from actorrpc.agent.executor import Deferred
from actorrpc.agent.peers import Peer
from actorrpc.cluster import forwarding, user_code
from actorrpc.cluster.provisioners.base import Engine, LaunchedEngine, LaunchRequest
from actorrpc.cluster.scheduler import Booking, ResourceHolder, ResourceTable, lacking, needs_of, totals_of
from actorrpc.errors import (
    CancelledError,
    ConfigError,
    PeerDiedError,
    PlacementError,
    RpcError,
    ShutdownError,
)
from actorrpc.futures import Future
from actorrpc.group.group import MemberDirectory
from actorrpc.wire import keys, versions
from actorrpc.wire.identity import WorkerInfo, WorkerRecord, check_name, name_part

__all__ = ["VISITOR", "Cluster", "Reception", "current_cluster", "leave", "serve"]

_log = logging.getLogger("actorrpc.cluster")
VISITOR: Final = "joining-"
"""The prefix of the names under which processes request to join; names of workers must not begin with it."""

_RESERVED_S: Final = 60.0  # how long a name is reserved for a process that was admitted
_BUSY_S: Final = 10.0  # how long a request waits for resources that other actors hold, but may soon release
_LEAVE_S: Final = 5.0  # how long a worker may take to leave before it is killed
_LOOK_S: Final = 60.0
_DEATHS: Final = 20  # the latest deaths that are kept for findings
_DIFFERING: Final = 1000  # the most differences of versions that are logged
# Seconds of a shutdown that are kept for Engine.end(); of a shutdown shorter than 2 s, a quarter is kept.
_LAST_S: Final = 0.5
# How long a shutdown waits, at most, for the last lines of workers that have joined.
_OUTPUT_S: Final = 2.0
_AT_LEAST_S: Final = 0.001  # instead of 0, which means the default time-out in Engine.end()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reception:
    """The data that a process gets when it joins.

    Attributes:
        address: where the driver listens, ``tcp://host:port``; empty if other processes cannot join.
        secret: the key, for workers that the engine starts.
        settings, namespace, timeout: the cluster's settings, default namespace, and default time-out of calls, in seconds.
    """

    address: str = ""
    secret: str = ""
    settings: Mapping[str, Any]
    namespace: str
    timeout: float


@dataclass(slots=True, eq=False)
class _SpawnRequest:
    """A request for a place for an actor."""

    spec: ProcessSpec
    creator: str  # as for Cluster.spawn
    future: Future[WorkerInfo]
    timer: Any = None


@dataclass(slots=True, eq=False)
class _GroupRequest:
    """A request for the bundles of a placement group."""

    group: str
    bundles: Sequence[Mapping[str, float]]
    strategy: str
    future: Future[list[list[str]]]


class Cluster:
    """The cluster's workers, and the requests for actors, in the driver. Thread-safe; only ``begin_end`` and ``shut_down`` wait.

    Args:
        agent: the driver's agent.
        directory: the driver's list of workers.
        engine: starts processes.
        reception: the data for processes that join.
        slots_first: whether an actor is placed on an existing worker that has room, rather than in a new process.
        waits: whether a graceful shutdown first waits until the workers that joined by themselves have left.

    Attributes:
        launched: the ranks, in their launch, of all workers that a launcher has started and that have ever joined.
    """

    def __init__(
        self,
        agent: Agent,
        directory: MemberDirectory,
        engine: Engine,
        reception: Reception,
        *,
        slots_first: bool = False,
        waits: bool = False,
    ) -> None:
        self.agent = agent
        self.directory = directory
        self.engine = engine
        self.reception = reception
        self.slots_first = slots_first
        self._lock = threading.RLock()
        self.book = ResourceTable()
        self.launched: set[int] = set()
        self.deaths: deque[tuple[str, float]] = deque(maxlen=_DEATHS)
        # By the name of a process: its specification, and the name of the worker that requested it.
        self._started: dict[str, tuple[ProcessSpec, str]] = {}
        self._reserved: dict[str, float] = {}
        self._differing: set[tuple[str, str]] = set()  # hosts and differences of versions that were logged
        self._requests: list[_SpawnRequest] = []
        self._groups: list[_GroupRequest] = []  # the placement groups that wait for resources
        self._owners: dict[int, str] = {}
        self._count = itertools.count(1)
        self._ranks = itertools.count(1)  # never reused; the driver is 0
        self._waits = waits
        self._end_by = 0.0  # deadline of shut_down() if its time-out is 0
        self._closing = False
        self._gone = threading.Event()  # set when a worker has ended, or when no more of its lines will come
        self.is_local = engine.name == "local"
        engine.attach(agent)
        engine.reception = reception
        engine.on_end = self._process_ended
        agent.on_peer_end.append(self._peer_ended)
        self._outputs = forwarding.Outputs(agent, getattr(engine, "logs", None), self._gone)
        # Ranks of a launcher run the same script and can import its modules, so modules are not sent by value to them.
        if reception.address and not (slots_first and self.is_local):
            user_code.watch()

    @property
    def num_cpus(self) -> float:
        """The CPUs of the engine's largest machine: the number of processes for tasks depends on them."""
        return max((each.num_cpus for each in self.engine.nodes()), default=1.0)

    def resources(self) -> list[ResourceHolder]:
        """Return copies of the holders (machines and workers), with their present resources and bookings."""
        with self._lock:
            self._refresh()
            return [replace(each, bookings=dict(each.bookings)) for each in self.book.all()]

    # -- Spawner -----------------------------------------------------------------------------------------

    def spawn(self, spec: ProcessSpec, creator: str = "") -> Future[WorkerInfo]:
        """Find a place for an actor, in a new process or on an existing worker; the future completes with the worker.

        ``creator`` is the worker that requested the actor (default: the driver). A new process ends when ``creator`` ends.
        """
        if self._has_no_book(spec):
            there: Future[WorkerInfo] = Future()
            self._take_slot(there, spec, 0)
            return there
        if not (spec.books or self.slots_first):  # the engine starts a process at once
            return self.start(spec, creator)
        request = _SpawnRequest(spec, creator, Future())
        request.future.label = f"the placement of {spec.label}"
        with self._lock:
            self._place(request, first=True)
        return request.future

    def start(self, spec: ProcessSpec, creator: str = "") -> Future[WorkerInfo]:
        """Start a process on a machine that the engine chooses; the arguments are as for :meth:`spawn`."""
        label = name_part(spec.label, "_")
        rank = next(self._ranks) if self.is_local else -1
        name = f"{label}-{rank}" if self.is_local else f"{label}-{self.engine.name}-{next(self._count)}"
        self._started[name] = spec, creator or self.agent.name
        order = LaunchRequest(
            name=name,
            rank=rank,
            address=self.reception.address,
            spec=spec,
            resources=spec.resources,
            labels=spec.labels,
            host=spec.host,
            spread=spec.spread,
            secret=self.reception.secret,
        )
        return self.engine.start(order)

    def _place(self, request: _SpawnRequest, first: bool) -> bool:
        """Place a request or fail it, and return True; otherwise queue it, if ``first``, and return False. Under the lock."""
        spec = request.spec
        if self._closing:
            self._fail(request, ShutdownError("the cluster is shutting down", maybe_executed=False))
            return True
        self._refresh()
        holder = self._choose(spec)
        if holder is not None:
            self._slot(request, holder)
            return True
        if spec.bundle is not None and not self._has_group(spec.bundle[0]):
            error = f"{spec.label!r} was not started: its placement group has been removed"
            self._fail(request, PlacementError(error))
            return True
        if first:
            possible = self._is_possible(spec)
            wait = spec.wait_s if spec.wait_s is not None else (_BUSY_S if possible else 0.0)
            if wait <= 0:
                self._fail(request, self._lacking(spec, 0.0))
                return True
            self._requests.append(request)
            first_s = min(wait, _BUSY_S)
            late = partial(self.agent.submit, partial(self._too_late, request, wait, first_s))
            request.timer = self.agent.clock.after(first_s, late)
        return False

    def _is_possible(self, spec: ProcessSpec) -> bool:
        """Say whether a place may become free: the spec's placement group still waits, or a holder has enough total resources.

        Under the lock.
        """
        waits = spec.bundle is not None and any(each.group == spec.bundle[0] for each in self._groups)
        return waits or bool(self.book.candidates(spec))

    def _has_group(self, group: str) -> bool:
        """Say whether a placement group waits for resources or has bundles. Under the lock."""
        return any(each.group == group for each in self._groups) or any(
            each.bundle is not None and each.bundle[0] == group for each in self.book.bundles
        )

    def _choose(self, spec: ProcessSpec) -> ResourceHolder | None:
        """Return the holder that an actor is placed on; None if no holder has room. Under the lock.

        Removes dead workers from the book: when a worker dies, a supervisor may request another place for its actors before
        :meth:`_peer_ended` has removed the worker.
        """
        may_start = spec.worker is not None or self.engine.has_room(spec)
        while True:
            holder = self.book.choose(spec, self.slots_first, may_start)
            if holder is None or holder.starts or self._is_alive(holder.name):
                return holder
            self.book.workers.pop(holder.name, None)

    def _is_alive(self, worker: str) -> bool:
        try:
            return self.agent.peer(worker).state == "alive"
        except RpcError:
            return False

    def _refresh(self) -> None:
        """Read the list of the engine's machines again, and keep their bookings."""
        known = {each.hosts: each for each in self.book.nodes}
        self.book.nodes = self._nodes()
        for holder in self.book.nodes:
            before = known.get(holder.hosts)
            if before is not None:
                holder.bookings = before.bookings

    def _nodes(self) -> list[ResourceHolder]:
        """Return the engine's machines. A scheduler's machines admit all actors: their workers wait in the scheduler's queue."""
        if not self.is_local:
            return [ResourceHolder.of_node(each, admits=False) for each in self.engine.nodes()]
        (here,) = self.engine.nodes()
        taken = [spec for spec, _ in list(self._started.values()) if spec.shared]
        holder = ResourceHolder.of_node(here, self.agent.name, 0, taken, admits=True)
        bind = self.agent.settings.bind
        if bind and self.reception.address:
            holder.hosts |= {bind}
        return [holder]

    def _slot(self, request: _SpawnRequest, holder: ResourceHolder) -> None:
        """Book the resources of ``holder`` for a request, and start a process if the holder is a machine. Under the lock."""
        spec = request.spec
        self._dequeue(request)
        if spec.booking and not spec.shared and (spec.books or not holder.starts):
            holder.bookings[spec.booking] = Booking(needs_of(spec))
            self._owners[spec.booking] = request.creator or self.agent.name
        if spec.worker is not None or not holder.starts:
            self._take_slot(request.future, replace(spec, worker=holder.name), spec.booking)
            return

        def started(done: Future[WorkerInfo]) -> None:
            if done.error is not None:
                self.give_back(spec.booking)
            request.future.follow(done, submit=self.agent.submit)

        self.start(spec, request.creator).add_done_callback(started)

    def _has_no_book(self, spec: ProcessSpec) -> bool:
        """Say whether ``worker=`` names the process of a single actor, which has no resources of its own to book."""
        if spec.worker is None or spec.resources or self.directory.resolve(spec.worker) is None:
            return False
        with self._lock:
            self._refresh()
            return all(each.name != spec.worker for each in self.book.all())

    def _take_slot(self, future: Future[WorkerInfo], spec: ProcessSpec, booking: int) -> None:
        """Complete a future with a place on the worker that ``spec.worker`` names."""
        assert spec.worker is not None
        record = self.directory.resolve(spec.worker)
        if record is not None:
            future.try_complete(SharedSlot(record.name, record.rank, booking), self.agent.submit)
        else:
            error = PeerDiedError(
                f"{spec.label!r} was placed on worker {spec.worker!r}, which has ended: create it again, on another worker",
                maybe_executed=False,
                worker=spec.worker,
            )
            future.try_fail(error, self.agent.submit)

    def _lacking(self, spec: ProcessSpec, waited: float) -> PlacementError:
        text = lacking(spec, self.book)
        holder = None if spec.worker is None else self.book.workers.get(spec.worker)
        if holder is not None and holder.draining:
            return PlacementError(
                f"worker {spec.worker!r} is being drained, so nothing is placed there: {text}. Choose another worker, or wait "
                "for a new worker of this name with options(placement_timeout=seconds)"
            )
        if waited:
            return PlacementError(
                f"nothing became free within {waited:g} s, and no worker with these resources joined: {text}. Kill actors that "
                "you no longer need, or wait longer with options(placement_timeout=seconds)"
            )
        return PlacementError(
            f"there is no place for this: {text}. Ask for less, let a worker with these resources join, or wait for such a "
            "worker with options(placement_timeout=seconds)"
        )

    def _too_late(self, request: _SpawnRequest, wait: float, waited: float) -> None:
        """Fail a request that has waited for ``wait`` seconds; log a warning if it has waited for 10 s and may wait longer."""
        with self._lock:
            if request not in self._requests:
                return
            if wait <= waited:
                self._fail(request, self._lacking(request.spec, wait))
                return
            text = lacking(request.spec, self.book)
            if wait != math.inf:
                late = partial(self.agent.submit, partial(self._too_late, request, wait, wait))
                request.timer = self.agent.clock.after(wait - waited, late)
        _log.warning("an actor or task has waited for resources for %.0f s: %s", waited, text)

    def _try_again(self) -> None:
        if self._requests or self._groups:
            self.agent.submit(self._try_all)

    def _try_all(self) -> None:
        """Place the queued requests for which a holder has room now. On a pool thread."""
        with self._lock:
            self._refresh()
            for group in list(self._groups):
                holders = self.book.assign(group.bundles, group.strategy)
                if holders is not None:
                    self._groups.remove(group)
                    self.book.reserve(group.group, group.bundles, holders)
                    group.future.try_complete([each.names for each in holders], self.agent.submit)
            for request in list(self._requests):
                self._place(request, first=False)

    def reserve(
        self, group: str, bundles: Sequence[Mapping[str, float]], strategy: str
    ) -> Future[list[list[str]]]:
        """Book the bundles of a placement group when there is room for all of them.

        The future completes with the names of the machine or worker of each bundle. It fails with PlacementError if the cluster
        has no such machines or workers, and never completes if :meth:`unreserve` is called before.
        """
        request = _GroupRequest(group, bundles, strategy, Future())
        with self._lock:
            self._refresh()
            if self.book.assign(bundles, strategy, all_free=True) is None:
                there = "; ".join(each.describe() for each in self.book.all())
                request.future.set_exception(PlacementError(f"there are (free/all): {there or 'none'}"))
            else:
                self._groups.append(request)
                self._try_all()
        return request.future

    def unreserve(self, group: str) -> None:
        """Remove a placement group, or its request, and fail the actors and tasks that wait for its bundles. Idempotent."""
        with self._lock:
            self._groups = [each for each in self._groups if each.group != group]
            self.book.release(group)
        self._try_again()

    def give_back(self, booking: int) -> None:
        """Release the booking of an actor, or remove the actor's request if it still waits. Idempotent."""
        with self._lock:
            self._owners.pop(booking, None)
            again = self.book.give_back(booking)
            for request in [each for each in self._requests if each.spec.booking == booking != 0]:
                self._fail(request, CancelledError("the actor has ended", maybe_executed=False))
                request.future.acknowledge()
        if again:
            self._try_again()

    def lend(self, booking: int, change: int) -> None:
        """Count the CPUs of a task as free while the task waits: ``change`` is 1 when the wait begins, and -1 when it ends.

        The changes of a booking are added, because they may arrive in another order. At the end of a wait, the CPUs count as
        booked at once, also if others have booked them meanwhile.
        """
        with self._lock:
            self.book.lend(booking, change)
        if change > 0:
            self._try_again()

    def capacity(self, spec: ProcessSpec) -> Future[int]:
        """Return a future of how many such actors could live at a time if they had the cluster for themselves, at least 1.

        It fails with PlacementError if there is no place for any such actor.
        """
        found: Future[int] = Future()
        with self._lock:
            self._refresh()
            if self._is_possible(spec):
                found.set_result(max(1, self.book.capacity(spec)))
            else:
                found.set_exception(self._lacking(spec, 0.0))
        return found

    def release(self, worker: str) -> None:
        """Ask a process to end when no actor and no value in it is referenced; kill a process that has not joined."""
        if not self.engine.owns(worker):
            return
        if self.directory.resolve(worker) is None:
            self.engine.give_up(worker)
        else:
            self.agent.submit(partial(self._ask_to_leave, worker, True, lambda _: self._end_soon(worker)))

    def kill(self, worker: str) -> None:
        """Kill the process of a worker that the engine has started; ignore other workers."""
        self.engine.kill(worker)

    def report(self, worker: str) -> Future[DeathReport]:
        """Return a future of the report on a process's end. It fails with UnknownWorkerError as ``Engine.report()``."""
        return self.engine.report(worker)

    def owns(self, worker: str) -> bool:
        """Say whether the engine has started the worker."""
        return self.engine.owns(worker)

    def leaving(self, worker: str) -> None:
        """Place nothing more on a worker that has begun to leave by itself. If the engine has started it, kill it after 5 s."""
        self.stop_placing(worker)
        self._end_soon(worker)

    def _end_soon(self, worker: str) -> None:
        self.agent.clock.after(_LEAVE_S, partial(self.kill, worker))

    def check(self, spec: ProcessSpec) -> None:
        """Check, before an actor is created, that a machine or worker could hold it.

        Raises:
            PlacementError: no machine and no worker has the resources, and the actor may not wait (its ``placement_timeout`` is
                0 or not given); or it books nothing, and this machine has less than 1 CPU, as with ``init(num_cpus=0)``.
        """
        is_plain = self.is_local and spec.num_cpus is None and not (spec.books or self.slots_first)
        asks = not spec.wait_s and (spec.is_picky or self.book.workers or (self.is_local and needs_of(spec)))
        if not (is_plain or asks):
            return
        with self._lock:
            self._refresh()
            if is_plain and self.num_cpus < 1:
                raise self._lacking(replace(spec, num_cpus=1.0), 0.0)
            if asks and not self._has_no_book(spec) and not self._is_possible(spec):
                raise self._lacking(spec, 0.0)

    def lookup(self, to: str | int) -> bytes | None:
        """Return the packed record of the worker with a name or rank; None if there is no such worker."""
        record = self.directory.resolve(to)
        return None if record is None else record.to_bytes()

    def listing(self) -> list[bytes]:
        """Return the records of all workers, packed."""
        return [record.to_bytes() for record in self.directory.members()]

    # -- joining --------------------------------------------------------------------------------------------

    def admit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Decide whether a process, which asks under a temporary name, may join; reserve its final name.

        Returns:
            ``{"error": text}``, or the data that the process needs: its rank, the driver's record, the settings and others.
        """
        name = str(request.get("name"))
        try:
            check_name(name)
            if name.startswith(VISITOR):
                raise ConfigError(f"no worker may be called {name!r}")
        except ConfigError as error:
            return {"error": str(error)}
        differs = self._compare(name, request)
        if differs:
            return {"error": differs, "differs": True}
        now = _time.now()
        with self._lock:
            if self._closing:
                return {"error": "the driver is shutting down"}
            known = self.directory.resolve(name)
            if known is not None and not self._is_gone(known):
                return {
                    "error": f"the name {name!r} is taken by worker {known.rank} (pid {known.pid}); choose another one"
                }
            if self._reserved.get(name, 0.0) > now:
                return {
                    "error": f"the name {name!r} is taken by a worker that is joining; choose another one, or, if that worker "
                    f"has failed, try again within {_RESERVED_S:g} s"
                }
            self._reserved = {each: until for each, until in self._reserved.items() if until > now}
            self._reserved[name] = now + _RESERVED_S
        reception = self.reception
        return {
            "rank": next(self._ranks),
            "driver": self.agent.record.to_bytes(),
            "settings": dict(reception.settings),
            "namespace": reception.namespace,
            "timeout": reception.timeout,
            "script": user_code.fingerprint(),
            "directory": user_code.directory(),
        }

    def _compare(self, name: str, request: Mapping[str, Any]) -> str:
        """Compare the versions of a process that asks to join with the driver's. Log a difference, once for each host.

        Returns the reason to refuse the process (setting ``require_same``), or an empty string. Called without the lock: it logs.
        """
        given, host = request.get("versions"), str(request.get("host"))[:255]
        theirs = (
            {each: str(given[each])[:50] for each in versions.NAMES if each in given}
            if isinstance(given, dict)
            else {}
        )
        differs = versions.difference(theirs, versions.here())
        if not differs:
            return ""
        text = f"worker {name!r} on host {host!r} has {differs}"
        if self.agent.settings.require_same:
            _log.warning("%s, and was refused (require_same)", text)
            return f"{text}, and the driver requires the same versions (require_same): install the driver's versions on this host"
        if (host, differs) not in self._differing and len(self._differing) < _DIFFERING:
            self._differing.add((host, differs))
            _log.warning(
                "%s; install the same versions on all hosts, or refuse such workers by require_same=True",
                text,
            )
        return ""

    def _is_gone(self, record: WorkerRecord) -> bool:
        try:
            peer = self.agent.peer(record.name)
        except RpcError:
            return True
        return peer.record.incarnation == record.incarnation and peer.state != "alive"

    def register(self, packed: bytes, facts: Mapping[str, Any] | None = None) -> None:
        """Add a worker that has joined; ``facts`` are its resources and its rank in a launch, None for a forked process.

        Raises:
            ShutdownError: the worker was stopped before it joined, or the cluster is shutting down.
            PeerDiedError: the worker has died since it sent this request.
        """
        record = WorkerRecord.from_bytes(packed)
        owned = self.engine.owns(record.name)
        with self._lock:
            self._reserved.pop(record.name, None)
            if self._closing:
                raise ShutdownError("the cluster is shutting down", maybe_executed=False)
            self.directory.add(record)
            if facts is not None and facts["launch_rank"] is not None:
                self.launched.add(facts["launch_rank"])
            if facts is not None and facts.get("forwards"):
                self._outputs.expect(record)
            if facts is not None and not owned:
                self.book.add_worker(
                    ResourceHolder(
                        name=record.name,
                        rank=record.rank,
                        hosts=frozenset(str(each) for each in facts["hosts"]),
                        totals=facts["totals"],
                        labels=dict(facts["labels"]),
                        scaled=isinstance(self.engine, LaunchedEngine) and record.name in self.engine.pool,
                    )
                )
        # The worker may have ended already, and `_peer_ended()` may have run before the entries above were added.
        if not self._is_alive(record.name):
            with self._lock:
                self._drop(record)
            raise PeerDiedError(
                f"worker {record.name!r} has died while it was joining",
                maybe_executed=False,
                worker=record.name,
            )
        if owned or facts is None:
            with undo_on_error(partial(self._drop, record)):
                self.engine.register(record)
        if facts is not None:
            _log.info("worker %r (rank %d) has joined", record.name, record.rank)
            self._try_again()

    def _peer_ended(self, peer: Peer) -> None:
        if peer.record.is_visitor:
            return
        self._note_death(peer)
        self._drop(peer.record)
        self.agent.clock.after(_LEAVE_S, partial(self._outputs.forget, peer.record))
        owned = self.engine.owns(peer.name)
        if self._closing or (owned and self.is_local):
            return  # the whole cluster ends, or the fork server will report the end of the process
        if owned:
            self._end_soon(peer.name)
        self._end_creations(peer.name)

    def _note_death(self, peer: Peer) -> None:
        """Log the death of a worker that has joined and is not being drained, and keep it for the findings."""
        holder = self.book.workers.get(peer.name)
        is_drained = holder is not None and holder.draining
        has_joined = self.directory.resolve(peer.name) is not None and not self.engine.owns(peer.name)
        if peer.state != "dead" or self._closing or is_drained or not has_joined:
            return
        host = peer.record.hostname or peer.record.host
        text = f"worker {peer.name!r} (pid {peer.record.pid}) on host {host!r} died: {peer.cause or 'its connection ended'}"
        self.deaths.append((text, _time.now()))
        _log.warning("%s", text)

    def _process_ended(self, worker: str, report: DeathReport) -> None:
        """Record that a process of the engine has ended."""
        record = self.directory.resolve(worker)
        if record is not None:
            self._drop(record)
        spec, _ = self._started.pop(worker, (None, ""))
        if spec is not None:
            self.give_back(spec.booking)
        self._end_creations(worker, report.exit_code == 0)
        self._try_again()  # the CUDA devices of the ended process are free now: a queued request may get them

    def _end_creations(self, creator: str, gently: bool = False) -> None:
        """Fail the queued requests of an ended worker, and kill the processes that it requested; ``gently``: ask them first."""
        with self._lock:
            for request in [each for each in self._requests if each.creator == creator]:
                self._fail(request, ShutdownError(f"worker {creator!r} has ended", maybe_executed=False))
        for name in [name for name, (_, by) in self._started.copy().items() if by == creator]:
            if gently:
                self.release(name)  # the process may end by itself; otherwise it is killed after _LEAVE_S
                self._end_soon(name)
            else:
                self.kill(name)

    def _drop(self, ended: WorkerRecord) -> None:
        """Remove an ended worker from the directory and the book, and its socket and group file if it ran on this host.

        Also release the bookings that this worker has requested.
        """
        with self._lock:
            record = self.directory.resolve(ended.name)
            if record is not None and record.incarnation == ended.incarnation:
                self.directory.remove(record)
                self.book.workers.pop(ended.name, None)
                if record.unix_path is not None and record.host == self.agent.record.host:
                    # A killed process leaves its socket and its group file behind.
                    keys.remove_file(record.unix_path)
                    keys.remove_file(keys.group_path(record.unix_path))
            for booking, owner in list(self._owners.items()):
                if owner == ended.name:
                    del self._owners[booking]
                    self.book.give_back(booking)
            self._gone.set()
        self._try_again()

    def joined(self) -> list[WorkerRecord]:
        """Return the records of all workers but the driver, by rank."""
        return [each for each in self.directory.members() if each.name != self.agent.name]

    # -- more and fewer ---------------------------------------------------------------------------------------

    def scaled(self) -> list[str]:
        """Return the names of the engine's workers that take several actors and are not drained, the fullest first."""
        with self._lock:
            found = [each for each in self.book.workers.values() if each.scaled and not each.draining]
        return [each.name for each in sorted(found, key=lambda each: (-len(each.bookings), each.rank))]

    def add_worker(self, spec: ProcessSpec) -> Future[WorkerInfo]:
        """Start a worker that takes several actors; the future completes when actors can be placed on it."""
        future: Future[WorkerInfo] = Future()

        def started(done: Future[WorkerInfo]) -> None:
            worker = done.value_or_none
            record = None if worker is None else self.directory.resolve(worker.name)
            if record is not None:
                node = self._nodes()[0] if self.is_local else None
                own: frozenset[str] = frozenset() if node is None else node.hosts
                labels = {**({} if node is None else node.labels), **spec.labels}
                with self._lock:
                    self.book.workers[record.name] = ResourceHolder(
                        name=record.name,
                        rank=record.rank,
                        hosts=own | frozenset(host for host, _ in record.tcp),
                        totals=totals_of(spec.num_cpus or 0.0, spec.num_gpus or 0.0, {}),
                        labels=labels,
                        scaled=True,
                    )
                self._try_again()
            future.follow(done, submit=self.agent.submit)

        start = (self.spawn if self.is_local else self.start)(
            replace(spec, labels={}, own=True, shared=self.is_local)
        )
        future.label = start.label
        start.add_done_callback(started)
        return future

    def stop_placing(self, worker: str) -> None:
        """Place no more actors on a worker."""
        with self._lock:
            holder = self.book.workers.get(worker)
            if holder is not None:
                holder.draining = True

    # -- ends --------------------------------------------------------------------------------------------------

    def _ask_to_leave(
        self, worker: str, when_idle: bool, failed: Callable[[Future[bool]], object] = lambda _: None
    ) -> None:
        """Ask a worker to leave, at once or ``when_idle``; call ``failed`` if the request fails. Runs on the pool."""
        asked: Future[bool] = Future()

        def answered(done: Future[bool]) -> None:
            if done.error is not None:
                done.acknowledge()
                failed(done)

        asked.add_done_callback(answered)
        try:
            self.agent.call(self.agent.peer(worker), leave, (when_idle,), {}, _LEAVE_S, future=asked)
            self.agent.flush()
        except RpcError as error:
            asked.try_fail(error)

    def begin_end(self, graceful: bool) -> None:
        """Set the deadline of :meth:`shut_down`. If ``graceful`` and ``waits``, first wait for the launched ranks to leave."""
        if graceful and self._waits:
            self._wait(
                lambda: all(self.engine.owns(each.name) for each in self.joined()), self.agent.leave_by
            )
        self._end_by = _time.now() + _LEAVE_S

    def _is_alone(self) -> bool:
        records = self.directory.records
        return len(records) <= 2 * (self.agent.name in records)  # each record by name and by rank

    def _wait(self, done: Callable[[], bool], until: float) -> None:
        """Wait until ``done()`` returns True, at most until ``until``. Calls ``done`` when ``_gone`` is set. Interruptible."""
        while (left := until - _time.now()) > 0:
            self._gone.clear()
            if done():
                return
            self._gone.wait(min(left, _LOOK_S))

    def shut_down(self, graceful: bool, timeout: float) -> None:
        """End all processes that the engine has started. Bounded; idempotent.

        Args:
            graceful: first ask all workers to leave, including workers that joined by themselves.
            timeout: how long all workers together may take, in seconds; 0: until 5 s after :meth:`begin_end`, at least 0.5 s.
        """
        if self._closing:
            return
        # Ending the actors may have used most of the 5 s. Processes whose actors have ended leave within _LAST_S.
        seconds = timeout or (max(_LAST_S, self._end_by - _time.now()) if self._end_by else _LEAVE_S)
        until = _time.now() + seconds
        interrupted = True
        try:
            with self._lock:
                self._closing = True
                names = [each.name for each in self.joined()]
                for request in self._requests.copy():
                    self._fail(request, ShutdownError("the cluster is shutting down", maybe_executed=False))
            if graceful:
                for name in names:
                    self.agent.submit(partial(self._ask_to_leave, name, False))
                self._wait(self._is_alone, until - min(_LAST_S, seconds / 4))
                # The forwarders of workers that have left send their last lines. A forwarder that was killed sends none.
                self._wait(
                    lambda: self._outputs.have_ended,
                    min(until - min(_LAST_S, seconds / 4), _time.now() + _OUTPUT_S),
                )
            interrupted = False
        finally:
            user_code.unwatch()
            # After Ctrl-C, do not wait.
            self.engine.end(graceful and not interrupted, max(_AT_LEAST_S, until - _time.now()))

    def abandon(self) -> None:
        """Close the engine's descriptors in a forked child of the driver. Takes no lock."""
        self.engine.abandon()

    def _dequeue(self, request: _SpawnRequest) -> None:
        """Remove a request, which may be queued, from the queue. Under the lock."""
        if request in self._requests:
            self._requests.remove(request)
        if request.timer is not None:
            request.timer.cancel()

    def _fail(self, request: _SpawnRequest, error: BaseException) -> None:
        """Fail a request, queued or not. Under the lock."""
        self._dequeue(request)
        request.future.try_fail(error, self.agent.submit)
        if isinstance(error, ShutdownError):
            request.future.acknowledge()


# -- requests by RPC -----------------------------------------------------------------------------------------

#: The methods of :class:`Cluster` that other workers may call.
_QUERIES: Final = frozenset(
    {
        *("admit", "register", "leaving", "lookup", "listing"),
        *("check", "capacity", "spawn", "release", "kill", "report", "give_back", "lend"),
    }
)


def current_cluster() -> Cluster | None:
    """Return the cluster whose driver is this process, or None."""
    worker = current_worker()
    return None if worker is None else worker.cluster


def serve(method: str, *arguments: Any) -> Any:
    """Call a method of this driver's cluster, and answer with its result, or with the value of the returned future.

    Raises:
        ShutdownError: this worker is not a driver, or its cluster has ended.
        AttributeError: there is no such method for other workers.
    """
    cluster = current_cluster()
    if cluster is None:
        raise ShutdownError(
            "this worker drives no cluster, or the cluster was shut down: use the address of the process that has called "
            "actorrpc.init()",
            maybe_executed=False,
        )
    if method not in _QUERIES:
        raise AttributeError(f"other workers cannot call Cluster.{method}")
    found = getattr(cluster, method)(*arguments)
    return Deferred(found) if isinstance(found, Future) else found


def leave(when_idle: bool = False, drained: bool = False) -> bool:
    """End this worker's process. The driver calls this function by RPC on the worker.

    Has no effect on the driver, and on a process that has joined by ``init(address=...)`` and runs its own script: the process
    stays a member.

    Args:
        when_idle: end the process when no other process uses it; otherwise now.
        drained: end the process even if it was started with ``--retry``, and so would wait for another driver.

    Returns:
        whether the process ends.
    """
    worker = current_worker()
    if worker is None or worker.exit_member is None:
        return False
    member = worker.exit_member
    member.drained = member.drained or drained
    (member.leave_when_idle if when_idle else member.leave)()
    return bool(member.waits)
