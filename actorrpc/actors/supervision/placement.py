"""Placement: on which workers actors are made, and why such a worker has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actorrpc.actors.client.supervisor_client import CREATE_S, peer_of
from actorrpc.actors.spec.actor_spec import DeathReport, ProcessSpec, SharedSlot
from actorrpc.actors.spec.options import NEW_PROCESS
from actorrpc.agent.calls import CURRENT
from actorrpc.agent.peers import Peer
from actorrpc.errors import ConfigError, PeerDiedError, RpcError, UnknownWorkerError
from actorrpc.futures import Future
from actorrpc.transport.stream import OPEN
from actorrpc.wire.identity import WorkerInfo, WorkerKey

if TYPE_CHECKING:
    from actorrpc.actors.context import Runtime
    from actorrpc.actors.spec.actor_spec import Spawner
    from actorrpc.actors.spec.options import ActorOptions

__all__ = ["Placements"]

_REPORT_S: Final = 1.0  # how long a death report may take
_AGAIN_S: Final = 60.0  # how long a restart waits for a place by default: a host may be restarting


class Placements:
    """The workers and processes where the actors of one supervisor live. Thread-safe.

    ``_lock`` guards ``_turn`` alone.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._agent = runtime.agent
        self._lock = threading.RLock()
        self._turn = 0
        self._booked: set[int] = set()  # incarnations with bookings; changed by single, atomic steps
        self.draining: set[WorkerKey] = set()  # workers that are drained; changed by single, atomic steps

    def place(self, options: ActorOptions, label: str = "an actor") -> Any:
        """Return where an actor should live.

        None: in a new process; ``"turn"``: on the next worker in turn; a WorkerKey; a route: on the worker of that other actor.

        Raises:
            UnknownWorkerError, PeerDiedError, ConfigError: the actor cannot live where the options say.
            PlacementError: no worker has the resources; only raised if this process knows that without a request to the driver.
        """
        wanted = options.worker
        if wanted is None or wanted == NEW_PROCESS:
            if self._runtime.spawner is not None:
                self._check(self.spawn_request(label, options, 0, None))
                return None
            if options.host or options.labels or options.resources:
                raise ConfigError(
                    "host=, labels= and resources= need a cluster (actorrpc.init()): in an init_rpc group, "
                    "name a worker with worker="
                )
            if wanted is None:
                return "turn"
            raise ConfigError(
                f"worker={NEW_PROCESS!r} needs the embedded cluster (actorrpc.init()): in an init_rpc group actors live "
                "on its workers; name a worker, or leave worker= out to use all workers in turn"
            )
        if getattr(type(wanted), "_is_actor_handle", False):
            return object.__getattribute__(wanted, "__dict__")["_actorrpc_route"]
        try:
            peer = self._agent.peer(wanted)
            peer.check_alive("an actor cannot be made there")
        except (UnknownWorkerError, PeerDiedError):
            if self._runtime.spawner is None or not (options.placement_timeout and isinstance(wanted, str)):
                raise
            return None  # the request of spawn_request() waits until a worker of this name joins
        if options.resources and self._runtime.spawner is None:
            raise ConfigError("resources= needs a cluster (actorrpc.init())")
        place = peer.key
        if self._runtime.spawner is not None:
            self._check(self.spawn_request(label, options, 0, place))
        return place

    def _check(self, request: ProcessSpec | None) -> None:
        check = getattr(self._runtime.spawner, "check", None)
        if request is not None and check is not None:
            check(request)

    def spawn_request(
        self, label: str, options: ActorOptions, booking: int, place: Any, again: bool = False
    ) -> ProcessSpec | None:
        """Return the spawner's request to find a place, or to book resources of ``place``; None if neither is needed.

        If ``place`` is a worker that is drained, the spawner refuses the request, or lets it wait.

        Args:
            again: the actor has lived before. Its request waits until there is a place, also by default.
        """
        own = options.worker == NEW_PROCESS or bool(options.env or options.working_dir)
        worker = options.worker if isinstance(options.worker, str) and not own else None
        if place is not None:
            asks = options.num_cpus or options.num_gpus or options.resources or place in self.draining
            if not isinstance(place, WorkerKey) or not asks:
                return None
            worker = peer_of(self._agent, place).name
        wait_s = options.placement_timeout
        if again and wait_s is None:
            wait_s = _AGAIN_S
        return ProcessSpec(
            label=label,
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            env=options.env or {},
            working_dir=options.working_dir,
            host=options.host,
            labels=options.labels or {},
            resources=options.resources or {},
            spread=options.spread,
            bundle=options.bundle and options.bundle[:2],
            wait_s=wait_s,
            booking=booking,
            own=own and worker is None,
            worker=worker,
        )

    def note_requested(self, request: ProcessSpec) -> None:
        """Record that an incarnation has, or waits for, the booking of a request."""
        if request.books:
            self._booked.add(request.booking)

    def note_placed(self, instance_id: int, worker: WorkerInfo) -> str | None:
        """Record which worker the spawner has chosen; return its name if the actor is alone in its process, else None."""
        if isinstance(worker, SharedSlot):
            self._booked.add(instance_id)
            return None
        return worker.name

    def departed(self, instance_id: int) -> None:
        """Return the booking of an incarnation, if there is a booking or a request, to the spawner. Idempotent."""
        if instance_id in self._booked:
            self._booked.discard(instance_id)
            self._runtime.spawner.give_back(instance_id)

    def near(self, place: Any) -> Peer | None:
        """Return the worker of a place if this thread can order an actor there; None if a pool thread has to do it."""
        agent = self._agent
        if (
            place is None
            or place == "turn"
            or CURRENT.get() is not None
            or agent.hooks.active
            or agent.recorder.live
        ):
            return None
        location = None if type(place) is WorkerKey else place.queue.location
        worker = place if location is None else location.worker
        if type(worker) is not WorkerKey:
            return None  # the location of the other actor is not known yet
        try:
            peer = peer_of(agent, worker)
        except RpcError:
            return None
        conn = peer.conn
        return (
            peer
            if peer.is_self or (conn is not None and conn.state is OPEN and not peer.window.full)
            else None
        )

    def for_others(self, place: Any, options: ActorOptions) -> ActorOptions:
        """Return the options with the result of :meth:`place` as ``worker=``, in a form that other workers understand.

        If the place is the route of another actor, waits until that actor is made.

        Raises:
            RpcError: the other actor is dead, or cannot be made.
        """
        if isinstance(place, WorkerKey):
            return replace(options, worker=place.rank)
        if place in (None, "turn"):
            return options
        return replace(options, worker=place.queue.located().wait(CREATE_S).worker.rank)

    def next_worker(self) -> Peer:
        """Return the next living worker in turn, this worker excepted; this worker if there is no other."""
        agent = self._agent
        others = sorted(
            (each for each in agent.members() if each.incarnation != agent.record.incarnation),
            key=lambda each: each.rank,
        )
        for _ in others:
            with self._lock:
                turn = self._turn
                self._turn += 1
            try:
                peer = agent.peer(others[turn % len(others)].rank)
            except RpcError:
                continue
            if peer.state == "alive":
                return peer
        return agent.self_peer

    def is_gone(self, place: Any) -> bool:
        """Say whether a place is the WorkerKey of a worker that has ended."""
        if not isinstance(place, WorkerKey):
            return False
        try:
            return peer_of(self._agent, place).state != "alive"
        except RpcError:
            return True

    def cause(self, key: WorkerKey | None) -> str:
        """Return why a worker ended; empty if that is not known."""
        try:
            return "" if key is None else peer_of(self._agent, key).cause
        except RpcError:
            return ""

    def report(self, worker: str, go: Callable[[DeathReport | None], None]) -> None:
        """Call ``go``, in a pool thread, with the report on a process's end, or with None after at most a second."""
        spawner: Spawner | None = self._runtime.spawner
        submit = self._agent.submit
        if spawner is None or not spawner.owns(worker):
            submit(partial(go, None))
            return
        once = [go]

        def answer(report: DeathReport | None) -> None:
            try:
                run = once.pop()
            except IndexError:
                return
            submit(partial(run, report))

        def ready(done: Future[DeathReport]) -> None:
            done.acknowledge()
            answer(done.value_or_none)

        spawner.report(worker).add_done_callback(ready)
        self._agent.clock.after(_REPORT_S, partial(answer, None))
