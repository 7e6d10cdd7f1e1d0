"""The cluster as its driver sees it: who is in it, what they have, and where the next actor goes.

:class:`Cluster` is the driver's ``Spawner``. Processes of their own it gets from its engine; workers that have joined
(by hand, from a launcher, or from :meth:`Cluster.scale`) take actors beside each other.

``_lock`` guards the tables and the book. It is re-entrant, because the collector may run a finaliser that spawns or
releases on the thread that has it. The engine's own lock may be taken under it, never the other way round; no user code
runs under it, and nobody waits.

:class:`Directory` is the driver's list of who is in the cluster. Thread-safe; its ``_lock`` guards all of it and is a leaf,
re-entrant as the collector may run a finaliser on the thread that has it.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from actorrpc import _time
from actorrpc.actors.spec.death_report import DeathReport, ProcessSpec, SharedSlot
from actorrpc.agent.agent import Agent
from actorrpc.agent.peers import Peer
from actorrpc.cluster import user_code
from actorrpc.cluster.exit import leave, leave_when_idle
from actorrpc.cluster.provisioners.base import Engine, LaunchedEngine, LaunchRequest
from actorrpc.cluster.scheduler import ResourceHolder, ResourceTable, lacking, needs_of, totals_of
from actorrpc.errors import ConfigError, PeerDiedError, PlacementError, RpcError, ShutdownError
from actorrpc.futures import Future
from actorrpc.transport.signals import uninterruptible
from actorrpc.wire import keys
from actorrpc.wire.identity import MAX_NAME, WorkerInfo, WorkerRecord, check_name

__all__ = ["VISITOR", "Cluster", "Directory", "Reception"]


class Directory:
    """The workers of the cluster by name and rank. Ranks grow and are never given twice."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._names: dict[str, WorkerRecord] = {}
        self._ranks: dict[int, WorkerRecord] = {}
        self._next = 1  # the driver is 0

    def new_rank(self) -> int:
        """Return a rank that nobody has had."""
        with self._lock:
            rank = self._next
            self._next += 1
            return rank

    def add(self, record: WorkerRecord) -> None:
        """Put a worker on the list."""
        with self._lock:
            self._names[record.name] = record
            self._ranks[record.rank] = record

    def remove(self, name: str) -> None:
        """Take a worker off the list."""
        with self._lock:
            record = self._names.pop(name, None)
            if record is not None:
                self._ranks.pop(record.rank, None)

    def resolve(self, to: str | int) -> WorkerRecord | None:
        """Return the record of a worker by name or rank; None if there is none."""
        with self._lock:
            return self._names.get(to) if isinstance(to, str) else self._ranks.get(to)

    def members(self) -> list[WorkerRecord]:
        """Return the records of all workers."""
        with self._lock:
            return list(self._names.values())

    def leave(self) -> None:
        """Do nothing: the list ends with the driver."""

    def close(self) -> None:
        """Do nothing: the list ends with the driver."""

    def release(self) -> None:
        """Do nothing: the list ends with the driver."""


_log = logging.getLogger("actorrpc.cluster")
VISITOR: Final = "joining-"
"""What the name of a process begins with that asks whether it may join: no worker may be called that."""

_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_:-]+", re.ASCII)
_RESERVED_S: Final = 60.0  # how long a name is kept for one who has been admitted
_BUSY_S: Final = 10.0  # how long an actor waits for what others have at present: they may be ending
_LEAVE_S: Final = 5.0
_LAST_S: Final = (
    0.5  # what those that the engine has started get of an end, at most, however long others took
)
_AT_LEAST_S: Final = 0.001  # an engine takes 0 for its own default


@dataclass(frozen=True, slots=True, kw_only=True)
class Reception:
    """What those are told who join.

    Attributes:
        address: where the driver listens, ``tcp://host:port``; empty where nobody can join.
        secret: the key, for workers that the engine starts.
        settings, namespace, timeout: as for the processes of the driver's own.
    """

    address: str = ""
    secret: str = ""
    settings: Mapping[str, Any]
    namespace: str
    timeout: float


@dataclass(slots=True, eq=False)
class _Wish:
    """An actor that waits for a place."""

    spec: ProcessSpec
    creator: str
    future: Future[WorkerInfo]
    timer: Any = None


class Cluster:
    """The driver's part in a cluster. Thread-safe; only :meth:`end` waits.

    Args:
        agent: the driver's.
        directory: the list of workers that it answers for.
        engine: starts processes.
        reception: what those are told who join.
        nodes: the machines of the engine, as they are booked.
        slots_first: actors that do not say where go to workers that are there, rather than into new processes.
    """

    def __init__(
        self,
        agent: Agent,
        directory: Directory,
        engine: Engine,
        reception: Reception,
        *,
        nodes: Callable[[], list[ResourceHolder]],
        slots_first: bool = False,
    ) -> None:
        self.agent = agent
        self.directory = directory
        self.engine = engine
        self.reception = reception
        self._nodes = nodes
        self.slots_first = slots_first
        self._lock = threading.RLock()
        self.book = ResourceTable()
        self._joined: dict[str, WorkerRecord] = {}
        self._reserved: dict[str, float] = {}
        self._scaled: set[str] = set()
        self._wishes: list[_Wish] = []
        self._owners: dict[int, str] = {}
        self._count = 0
        self._closing = False
        self._gone = threading.Event()
        self.on_arrival: list[Callable[[], None]] = []
        agent.on_peer_end.append(self._peer_ended)
        if reception.address and not (slots_first and self._is_local):  # a launcher's ranks have the script
            user_code.watch()

    @property
    def num_cpus(self) -> float:
        """How many processors there are for new processes: what tasks go by."""
        return float(getattr(self.engine, "num_cpus", 0.0)) or max(
            (each.totals["CPU"] for each in self._nodes()), default=1.0
        )

    def resources(self) -> list[ResourceHolder]:
        """Return what machines and workers have, and what of it is booked, as it is now: a copy."""
        with self._lock:
            self._refresh()
            return [replace(each, bookings=dict(each.bookings)) for each in self.book.all()]

    # -- Spawner -----------------------------------------------------------------------------------------

    def spawn(self, spec: ProcessSpec, creator: str = "") -> Future[WorkerInfo]:
        """Find a place for an actor: a process of its own, or a slot in a worker that is there.

        ``creator`` is the worker that asked for it, and with which it ends; default the driver.
        """
        if spec.rank is not None and not spec.resources and not self._keeps(spec.rank):
            there: Future[WorkerInfo] = Future()
            self._take_slot(there, spec, spec.rank, 0)
            return there
        plain = self._is_plain(spec)
        simple = not self.book.workers and not spec.is_picky and not spec.wait_s and self._is_local
        if plain or (simple and self._is_possible(spec)):
            return self._start(spec, creator)
        wish = _Wish(spec, creator or self.agent.name, Future())
        wish.future.label = f"the placement of {spec.label}"
        with self._lock:
            self._place(wish, first=True)
        return wish.future

    def _is_plain(self, spec: ProcessSpec) -> bool:
        """Say whether an actor gets a process of its own without a place being looked for."""
        return not spec.is_picky and not needs_of(spec) and not self.slots_first

    @property
    def _is_local(self) -> bool:
        return self.engine.name == "local"

    def _start(self, spec: ProcessSpec, creator: str) -> Future[WorkerInfo]:
        if self._is_local:
            return self.engine.start(LaunchRequest(name="", address="", spec=spec), creator)
        with self._lock:
            self._count += 1
            label = _NOT_IN_NAMES.sub("_", spec.label)[: MAX_NAME - 24] or "worker"
            name = f"{label}-{self.engine.name}-{self._count}"
        order = LaunchRequest(
            name=name,
            address=self.reception.address,
            spec=spec,
            resources=spec.resources,
            labels=spec.labels,
            host=spec.host,
            spread=spec.spread,
            secret=self.reception.secret,
        )
        return self.engine.start(order, creator)

    def _place(self, wish: _Wish, first: bool) -> bool:
        """Find a place for a wish, or have it wait, or fail it; say whether it is settled. Under the lock."""
        spec = wish.spec
        if self._closing:
            self._fail(wish, ShutdownError("the cluster is shutting down", maybe_executed=False))
            return True
        self._refresh()
        holder = self._choose(spec)
        if holder is not None:
            self._slot(wish, holder)
            return True
        if first:
            possible = bool(self.book.candidates(spec))
            wait = spec.wait_s if spec.wait_s is not None else (_BUSY_S if possible else 0.0)
            if wait <= 0:
                self._fail(wish, self._lacking(spec, 0.0))
                return True
            self._wishes.append(wish)
            late = partial(self.agent.submit, partial(self._too_late, wish, wait))
            wish.timer = self.agent.clock.after(wait, late)
        return False

    def _choose(self, spec: ProcessSpec) -> ResourceHolder | None:
        """Return who is to hold this. Under the lock.

        Not a worker that is known to be dead: those who look after its actors may hear of its end before this cluster does,
        and ask at once where else they can go.
        """
        while True:
            holder = self.book.choose(spec, self.slots_first)
            if holder is None or holder.starts or self._is_alive(holder.name):
                return holder
            self.book.workers.pop(holder.name, None)

    def _is_alive(self, worker: str) -> bool:
        try:
            return self.agent.peer(worker).state == "alive"
        except RpcError:
            return False

    def _refresh(self) -> None:
        """Take up the machines of the engine as they are now; what is booked stays booked."""
        known = {each.hosts: each for each in self.book.nodes}
        self.book.nodes = []
        for node in self._nodes():
            before = known.get(node.hosts)
            if before is not None:
                node.bookings = before.bookings
            self.book.nodes.append(node)

    def _slot(self, wish: _Wish, holder: ResourceHolder) -> None:
        """Give a wish its place. Under the lock."""
        spec = wish.spec
        if wish in self._wishes:
            self._wishes.remove(wish)
        if wish.timer is not None:
            wish.timer.cancel()
        if spec.booking and (spec.is_picky or not holder.starts):
            holder.bookings[spec.booking] = needs_of(spec)
            self._owners[spec.booking] = wish.creator
        if spec.rank is not None or not holder.starts:
            self._take_slot(wish.future, spec, holder.rank, spec.booking)
            return

        def started(done: Future[WorkerInfo]) -> None:
            if done.error is not None:
                self.give_back(spec.booking)
            wish.future.follow(done, submit=self.agent.submit)

        self._start(spec, wish.creator).add_done_callback(started)

    def _keeps(self, rank: int) -> bool:
        """Say whether books are kept of a worker: not of a process that an actor has to itself."""
        with self._lock:
            self._refresh()
            return any(each.rank == rank for each in self.book.all())

    def _take_slot(self, future: Future[WorkerInfo], spec: ProcessSpec, rank: int, booking: int) -> None:
        record = self.directory.resolve(rank)
        if record is not None:
            future.try_complete(SharedSlot(record.name, rank, booking), self.agent.submit)
        else:
            error = PeerDiedError(
                f"{spec.label!r} was to be put into worker {rank}, which has ended: create it again, elsewhere",
                maybe_executed=False,
                worker=str(rank),
            )
            future.try_fail(error, self.agent.submit)

    def _lacking(self, spec: ProcessSpec, waited: float) -> PlacementError:
        text = lacking(spec, self.book)
        if waited:
            return PlacementError(
                f"nothing became free within {waited:g} s, and nobody joined who has it: {text}"
            )
        return PlacementError(
            f"there is no place for this: {text}. Ask for less, let a worker join that has it, or wait for one with "
            "options(placement_timeout=seconds)"
        )

    def _too_late(self, wish: _Wish, waited: float) -> None:
        with self._lock:
            if wish in self._wishes:
                self._wishes.remove(wish)
                self._fail(wish, self._lacking(wish.spec, waited))

    def _try_all(self) -> None:
        """Look whether there is a place for those that wait. On a pool thread."""
        with self._lock:
            for wish in list(self._wishes):
                self._place(wish, first=False)

    def give_back(self, booking: int) -> None:
        """Give back what an actor has booked. Harmless when repeated."""
        with self._lock:
            self._owners.pop(booking, None)
            again = self.book.give_back(booking) and bool(self._wishes)
        if again:
            self.agent.submit(self._try_all)

    def release(self, worker: str) -> None:
        """Let a process end by itself, once nothing that lives in it is referenced any more."""
        if worker in self._joined and self.engine.owns(worker):
            self.agent.submit(partial(self._ask, worker, leave_when_idle))
        self.engine.release(worker)

    def kill(self, worker: str) -> None:
        """End a process at once, and what it has started. Workers that joined by themselves are not ours to kill."""
        self.engine.kill(worker)

    def report(self, worker: str) -> Future[DeathReport]:
        """Return how a process ended; completes when it has. Fails with UnknownWorkerError if it is not ours."""
        return self.engine.report(worker)

    def owns(self, worker: str) -> bool:
        """Say whether the engine has started the worker."""
        return self.engine.owns(worker)

    def leaving(self, worker: str) -> None:
        """Record that a worker has begun to leave by itself."""
        with self._lock:
            holder = self.book.workers.get(worker)
            if holder is not None:
                holder.draining = True
        self.engine.leaving(worker)

    def check(self, spec: ProcessSpec) -> None:
        """Look, before anything is made, whether there can be a place for an actor.

        Raises:
            PlacementError: nobody has what it needs, and it does not want to wait for one who has.
        """
        if spec.num_cpus is None and spec.rank is None and self._is_local and self._is_plain(spec):
            # It books no processor, and its process uses one: the engine would refuse it later.
            counted = replace(spec, num_cpus=1.0)
            with self._lock:
                self._refresh()
                if not any(each.suits(counted) for each in self.book.nodes):
                    raise self._lacking(counted, 0.0)
        asks = spec.is_picky or self.book.workers or (self._is_local and needs_of(spec))
        if spec.wait_s or not asks:
            return
        with self._lock:
            if spec.rank is not None and not spec.resources and not self._keeps(spec.rank):
                return
            if not self._is_possible(spec):
                raise self._lacking(spec, 0.0)

    def _is_possible(self, spec: ProcessSpec) -> bool:
        """Say whether anybody could ever hold this."""
        with self._lock:
            self._refresh()
            return bool(self.book.candidates(spec))

    # -- those who join --------------------------------------------------------------------------------------

    def admit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Say whether a process may join that asks under another name, and tell it what it needs to know.

        Returns:
            ``{"error": text}``, or its rank, the driver's record, and the settings.
        """
        name = str(request.get("name"))
        try:
            check_name(name)
            if name.startswith(VISITOR):
                raise ConfigError(f"no worker may be called {name!r}")
        except ConfigError as error:
            return {"error": str(error)}
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
                    "error": f"the name {name!r} is taken by one that is joining just now; choose another one, or, if that "
                    f"has failed, try again within {_RESERVED_S:g} s"
                }
            self._reserved = {each: until for each, until in self._reserved.items() if until > now}
            self._reserved[name] = now + _RESERVED_S
        reception = self.reception
        return {
            "rank": self.directory.new_rank(),
            "driver": self.agent.record.to_bytes(),
            "settings": dict(reception.settings),
            "namespace": reception.namespace,
            "timeout": reception.timeout,
            "script": user_code.fingerprint(),
            "directory": user_code.directory(),
        }

    def _is_gone(self, record: WorkerRecord) -> bool:
        try:
            peer = self.agent.peer(record.name)
        except RpcError:
            return True
        return peer.record.incarnation == record.incarnation and peer.state != "alive"

    def register(self, record: WorkerRecord, facts: Mapping[str, Any] | None = None) -> None:
        """Take up a worker that has come: a process of the engine, or (with ``facts``) one that has joined.

        Raises:
            ShutdownError: nobody waits for it any more.
            PeerDiedError: it has died since it asked.
        """
        if facts is None:
            self.engine.register(record)
            return
        with self._lock:
            self._reserved.pop(record.name, None)
            if self._closing:
                raise ShutdownError("the cluster is shutting down", maybe_executed=False)
            owned = self.engine.owns(record.name)
            self._joined[record.name] = record
            self.directory.add(record)
            if not owned:
                self.book.workers[record.name] = ResourceHolder(
                    name=record.name,
                    rank=record.rank,
                    hosts=frozenset(str(each) for each in facts["hosts"]),
                    totals=totals_of(facts["num_cpus"], facts["num_gpus"], facts["resources"]),
                    labels=dict(facts["labels"]),
                )
                if isinstance(self.engine, LaunchedEngine) and record.name in self.engine.pool:
                    self._scaled.add(record.name)  # the engine has started it, for any number of actors
        if not self._is_alive(record.name):  # that was told before there was anything to take off the lists
            with self._lock:
                self._drop(record)
            raise PeerDiedError(
                f"worker {record.name!r} has died while it was joining",
                maybe_executed=False,
                worker=record.name,
            )
        if owned:
            self.engine.register(record)
        _log.info("worker %r (rank %d) has joined", record.name, record.rank)
        self.agent.submit(self._try_all)
        for tell in self.on_arrival:
            self.agent.submit(tell)

    def _peer_ended(self, peer: Peer) -> None:
        if peer.record.is_visitor:
            self.agent.peer_table.forget(peer)
            return
        with self._lock:
            if peer.name in self._scaled:
                self._scaled.discard(peer.name)
                self.book.workers.pop(peer.name, None)
            record = self._drop(peer.record)
            for booking, owner in list(self._owners.items()):
                if owner == peer.name:  # nobody looks after it any more
                    del self._owners[booking]
                    self.book.give_back(booking)
            waiting = bool(self._wishes)
        if record is not None:
            if record.unix_path is not None and record.host == self.agent.record.host:
                keys.remove_file(record.unix_path)  # it may have been killed
            forsaken = getattr(self.engine, "forsaken", None)
            if forsaken is not None and not self._closing:
                forsaken(peer.name)
        if waiting:
            self.agent.submit(self._try_all)

    def _drop(self, ended: WorkerRecord) -> WorkerRecord | None:
        """Take a worker that has joined off the lists; return what was known of it. Under the lock."""
        record = self._joined.get(ended.name)
        if record is not None and record.incarnation == ended.incarnation:
            del self._joined[ended.name]
            self.directory.remove(ended.name)
            self.book.workers.pop(ended.name, None)
        if not self._joined:
            self._gone.set()
        return record

    def joined(self) -> list[WorkerRecord]:
        """Return the workers that have joined, by rank."""
        with self._lock:
            return sorted(self._joined.values(), key=lambda each: each.rank)

    # -- more and fewer ---------------------------------------------------------------------------------------

    def scaled(self) -> list[str]:
        """Return the workers that take several actors and were started by the engine, the fullest first."""
        with self._lock:
            found = [self.book.workers[name] for name in self._scaled if name in self.book.workers]
        found = [each for each in found if not each.draining]
        return [each.name for each in sorted(found, key=lambda each: (-len(each.bookings), each.rank))]

    def add_worker(self, spec: ProcessSpec) -> Future[WorkerInfo]:
        """Start a worker that takes several actors; the future completes when it is there, and can be used."""
        future: Future[WorkerInfo] = Future()

        def started(done: Future[WorkerInfo]) -> None:
            worker = done.value_or_none
            record = None if worker is None else self.directory.resolve(worker.name)
            if record is not None:
                node = next(iter(self._nodes()), None)
                with self._lock:
                    known = self._joined.get(record.name)
                    own = node.hosts if node is not None and known is None else frozenset()
                    labels = {**(node.labels if node is not None and known is None else {}), **spec.labels}
                    self._scaled.add(record.name)
                    self.book.workers[record.name] = ResourceHolder(
                        name=record.name,
                        rank=record.rank,
                        hosts=own | frozenset(host for host, _ in record.tcp),
                        totals=totals_of(spec.num_cpus or 0.0, spec.num_gpus or 0.0, {}),
                        labels=labels,
                    )
                self.agent.submit(self._try_all)
            future.follow(done, submit=self.agent.submit)

        start = self._start(replace(spec, labels={}), self.agent.name)
        future.label = start.label
        start.add_done_callback(started)
        return future

    def stop_placing(self, worker: str) -> None:
        """Place nothing on a worker any more."""
        with self._lock:
            holder = self.book.workers.get(worker)
            if holder is not None:
                holder.draining = True

    # -- ends --------------------------------------------------------------------------------------------------

    def _ask(self, worker: str, what: Callable[[], None]) -> None:
        """Ask a worker that has joined to leave. Runs on the pool."""
        asked: Future[None] = Future()
        asked.add_done_callback(Future.acknowledge)
        try:
            self.agent.call(self.agent.peer(worker), what, (), {}, _LEAVE_S, future=asked)
            self.agent.flush()
        except RpcError as error:
            asked.try_fail(error)

    def let_go(self, worker: str) -> None:
        """Ask a worker to leave now."""
        self.agent.submit(partial(self._ask, worker, leave))

    def wait_for_others(self, graceful: bool) -> None:
        """Wait, at a graceful end, until all who have joined have left, or its time is over. Interruptible."""
        while graceful and self._joined and (left := self.agent.leave_by - _time.now()) > 0:
            self._gone.clear()
            if self._joined:
                self._gone.wait(min(_LEAVE_S, left))

    def end(self, graceful: bool, timeout: float) -> None:
        """End all that belongs to the cluster. Bounded; idempotent.

        Args:
            graceful: ask the workers first.
            timeout: how long they may take, those that have joined and those that the engine has started together, in
                seconds; 0 for 5 s.
        """
        seconds = timeout or _LEAVE_S
        until = _time.now() + seconds
        names = self._begin_end()
        if names is None:
            return
        try:
            if graceful and names:
                for name in names:
                    self.let_go(name)
                self._gone.wait(seconds - min(_LAST_S, seconds / 4))
        except BaseException:  # after Ctrl-C nobody wants to wait
            graceful = False
            raise
        finally:
            user_code.unwatch()
            self.engine.end(graceful, max(_AT_LEAST_S, until - _time.now()))

    @uninterruptible
    def _begin_end(self) -> list[str] | None:
        """Place no more; return who has joined, or None where the end has begun before. From here on, Ctrl-C leaves nothing."""
        with self._lock:
            if self._closing:
                return None
            self._closing = True
            wishes, self._wishes = self._wishes, []
            names = list(self._joined)
            if not names:
                self._gone.set()
            else:
                self._gone.clear()
        for wish in wishes:
            if wish.timer is not None:
                wish.timer.cancel()
            self._fail(wish, ShutdownError("the cluster is shutting down", maybe_executed=False))
        return names

    def abandon(self) -> None:
        """Let go of everything in a forked child of the driver. Takes no lock."""
        self.engine.abandon()

    def _fail(self, wish: _Wish, error: BaseException) -> None:
        wish.future.try_fail(error, self.agent.submit)
        if isinstance(error, ShutdownError):
            wish.future.acknowledge()
