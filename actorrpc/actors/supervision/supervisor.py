"""The supervisor: makes the actors that this process creates, restarts them, records why they died, and ends them.

It only reacts to events: calls, answers of workers, ends of workers. Callbacks of futures and timers continue operations that
take time. Threads only block while they connect to a worker, register a name or a detached actor, or close the supervisor. Events
of an incarnation that is not the present one are stale and are ignored.

``lock`` guards the table, every :class:`ActorRecord` in it, and their supervision groups (``groups.py``). No foreign code is
called under it. It is re-entrant, because the garbage collector may run while it is held. ``LifetimeToken.__del__`` only appends
to ``_dropped``, whose single operations are atomic.
"""

from __future__ import annotations

import itertools
import random
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actorrpc._exceptions import is_a
from actorrpc.actors.client.route import Route
from actorrpc.actors.client.supervisor_client import (
    call_quietly,
    forgotten,
    peer_of,
    request_detached,
    unreachable,
)
from actorrpc.actors.context import current
from actorrpc.actors.host import registry
from actorrpc.actors.host.checkpoints import LAST
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.spec.actor_spec import (
    ActorDescriptor,
    ActorState,
    DeathReport,
    HostedActorGoneError,
    Location,
    Restarting,
)
from actorrpc.actors.supervision.groups import Action, perform
from actorrpc.actors.supervision.placement import Placements
from actorrpc.actors.supervision.record import (
    ActorRecord,
    Incarnation,
    LifetimeToken,
    RestartVerdict,
    new_id,
    why_not_made,
)
from actorrpc.agent.calls import MailHeader
from actorrpc.agent.executor import Deferred
from actorrpc.agent.peers import Peer
from actorrpc.errors import ActorDiedError, PeerDiedError, PlacementError, RpcError, ShutdownError
from actorrpc.futures import Future, collect_all
from actorrpc.rpc.rref import RRef
from actorrpc.serialization import exceptions
from actorrpc.serialization.by_value import look_again
from actorrpc.transport.signals import uninterruptible
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.actors.client.route import Routes
    from actorrpc.actors.context import Runtime
    from actorrpc.actors.spec.class_info import ClassInfo
    from actorrpc.actors.spec.options import ActorOptions
    from actorrpc.actors.supervision.names import Names

__all__ = ["Supervisor", "hand_over"]

_AGAIN_S: Final = 0.1  # time until another place is requested, if the worker of the chosen place has ended
_END_S: Final = 5.0  # how many seconds actors may take to end when this process leaves


class Supervisor:
    """Supervises the actors that this process created; the supervisor of rank 0 also supervises detached actors. Thread-safe.

    Args:
        draw: returns random numbers from 0 to 1, which shorten the waits before restarts.
        remembered: of how many dead actors the record is kept.

    Attributes:
        places: the workers and processes where its actors live.
    """

    def __init__(
        self, runtime: Runtime, draw: Callable[[], float] = random.random, *, remembered: int = 10_000
    ) -> None:
        self.draw = draw
        self._remembered = remembered
        self._runtime = runtime
        self._names: Names = runtime.names
        self._routes: Routes = runtime.routes
        self._agent = runtime.agent
        self._key = WorkerKey(runtime.agent.record.rank, runtime.agent.record.incarnation)
        self.lock = threading.RLock()
        self._actors: dict[int, ActorRecord] = {}
        self._dead: OrderedDict[int, ActorRecord] = OrderedDict()
        self._dropped: deque[int] = deque()
        self.places = Placements(runtime)
        self._closed = False
        #: The last result of _prepared(), with its options, because many actors are made with the same options object.
        self._options: tuple[weakref.ref[ActorOptions], ActorOptions, ActorOptions] | None = None
        self._agent.on_peer_end.append(self._peer_ended)

    # -- making -----------------------------------------------------------------------------------------

    def create(
        self,
        cls: object,
        info: ClassInfo,
        options: ActorOptions,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> ActorDescriptor:
        """Begin to make an actor; does not wait for its constructor. The class and the arguments are pickled before this returns.

        A name, and a detached actor, are registered with rank 0 before this returns.

        Returns:
            The actor's descriptor, with an anchor, which keeps the actor alive. There is no anchor for a detached actor, and for
            an existing actor that has the name (with ``get_if_exists``).

        Raises:
            NameTakenError: another actor has the name.
            SerializationError: the class or an argument cannot be sent.
            UnknownWorkerError, PeerDiedError, ConfigError, PlacementError: it cannot live there: see :meth:`Placements.place`.
            ShutdownError: this process is leaving the group.
        """
        agent = self._agent
        agent.check_process()
        place = self.places.place(options, info.name)
        options, shown = self._prepared(options)
        look_again()
        snapshot = Snapshot.of(cls)
        arguments = Snapshot.of((args, kwargs)) if args or kwargs else None
        actor_id = new_id()
        if options.lifetime != "detached" or agent.record.rank == 0:
            return self._adopt(actor_id, snapshot, arguments, info, options, shown, place)
        options = self.places.for_others(place, options)
        return request_detached(agent, actor_id, snapshot, arguments, info, options)

    def adopt(
        self,
        actor_id: int,
        cls: Snapshot,
        arguments: Snapshot | None,
        info: ClassInfo,
        options: ActorOptions,
    ) -> ActorDescriptor:
        """Like :meth:`create`, for a detached actor that another process requests."""
        options, shown = self._prepared(options)
        return self._adopt(actor_id, cls, arguments, info, options, shown, self.places.place(options))

    def _prepared(self, options: ActorOptions) -> tuple[ActorOptions, ActorOptions]:
        """Return the options of an actor with its namespace, and the options that are sent with every handle."""
        found = self._options
        if found is None or found[0]() is not options:
            named = options
            if named.namespace is None:
                named = replace(named, namespace=self._names.namespace)
            # Options that only the supervisor needs are not sent.
            shown = replace(named, worker=None, env=None, working_dir=None)
            if getattr(type(options.worker), "_is_actor_handle", False):
                if options.lifetime == "detached":  # for_others() converts the place for rank 0 later
                    return named, shown
                # The place was read from the handle before. Drop the handle, which would keep the other actor alive.
                named = replace(named, worker=None)
            found = self._options = weakref.ref(options), named, shown
        return found[1], found[2]

    def _adopt(
        self,
        actor_id: int,
        cls: Snapshot,
        arguments: Snapshot | None,
        info: ClassInfo,
        options: ActorOptions,
        shown: ActorOptions,
        place: Any,
    ) -> ActorDescriptor:
        if self._closed:
            raise ShutdownError(
                f"worker {self._agent.name!r} is shutting down: no actor {info.name} is made",
                maybe_executed=False,
            )
        descriptor = ActorDescriptor(
            actor_id=actor_id,
            info=info,
            supervisor=self._key,
            supervisor_name=self._agent.name,
            name=options.name,
            namespace=options.namespace or "",
            options=shown,
        )
        if descriptor.name is not None:
            known = self._names.register(descriptor, get_if_exists=options.get_if_exists)
            if known is not None:
                return known
        actor = ActorRecord(descriptor, cls, arguments, shown, place, self.draw)
        actor.options = options if place is None else shown
        return self._enter(actor)

    @uninterruptible
    def _enter(self, actor: ActorRecord) -> ActorDescriptor:
        descriptor, actor_id = actor.descriptor, actor.descriptor.actor_id
        with self.lock:
            self._actors[actor_id] = actor
        if actor.options.lifetime != "detached":
            descriptor = descriptor.held_by(RRef(LifetimeToken(self.drop, actor_id)))
        near = self.places.near(actor.place)
        if near is not None:
            # Begin in this thread, so that the messages for many actors are sent together, and wake no pool thread for each.
            self.begin(actor, near)
        else:
            self._agent.submit(partial(self.begin, actor))
        return descriptor

    def begin(self, actor: ActorRecord, near: Peer | None = None) -> None:
        """Order the next incarnation, unless it is being made or has to wait. May block, unless ``near`` is given.

        Args:
            near: the worker where the incarnation is made; the order is sent soon, together with other messages.
        """
        with self.lock:
            if self._closed or not actor.is_due:
                return
            life = actor.last_life = Incarnation(new_id())
            place, options = actor.place, actor.options
        spawner = self._runtime.spawner
        try:
            request = None
            if spawner is not None:
                label = actor.descriptor.info.name
                request = self.places.spawn_request(label, options, life.id, place, again=actor.epoch > 0)
            if request is not None:
                self.places.note_requested(request)
                self._then(spawner.spawn(request), self._moved_in, actor, life)
            elif near is not None:
                self._construct(actor, life, near, flushes=False)
            elif isinstance(place, WorkerKey):
                self._construct(actor, life, peer_of(self._agent, place))
            elif place == "turn":
                self._construct(actor, life, self.places.next_worker())
            else:
                self._then(place.queue.located(), self._move_in_with, actor, life)
        except Exception as error:
            self._not_made(actor, life, error)

    def _then(
        self, found: Future[Any], step: Callable[..., None], actor: ActorRecord, life: Incarnation
    ) -> None:
        """Run ``step`` with the value of a future on a pool thread: connecting to the incarnation's worker may block."""

        def go() -> None:
            if found.error is not None:
                self._not_made(actor, life, found.error)
                return
            try:
                step(actor, life, found.value_or_none)
            except Exception as error:
                self._not_made(actor, life, error)

        found.add_done_callback(Future.acknowledge)
        found.add_done_callback(lambda _: self._agent.submit(go))

    def _move_in_with(self, actor: ActorRecord, life: Incarnation, neighbour: Location) -> None:
        self._construct(actor, life, peer_of(self._agent, neighbour.worker))

    def _moved_in(self, actor: ActorRecord, life: Incarnation, worker: Any) -> None:
        process = self.places.note_placed(life.id, worker)
        peer = self._agent.peer(worker.name)
        if process is None and isinstance(actor.options.worker, str) and actor.place is None:
            actor.place = peer.key  # the worker for which the actor has waited has joined
        if not self._construct(actor, life, peer, process):  # its end was ordered
            self._runtime.spawner.give_back(
                life.id
            )  # again: the first time, the place may not have been booked yet
            self.places.departed(life.id)
            if process is not None:
                self._runtime.spawner.kill(process)

    def _construct(
        self,
        actor: ActorRecord,
        life: Incarnation,
        peer: Peer,
        process: str | None = None,
        *,
        flushes: bool = True,
    ) -> bool:
        """Order a worker to make an incarnation; return False if its end was ordered, or if it is postponed."""
        with self.lock:
            if actor.life is not life or actor.phase == "dead" or life.killed or life.ended_by_group:
                return False
            gone = process is None and peer.state != "alive" and actor.postpone(life, self._agent.clock.now())
            if not gone:
                life.worker = peer.key
                life.worker_name = peer.name
                life.process = process
                spec = actor.spec(life)
        if gone:
            self._agent.clock.after(_AGAIN_S, partial(self._agent.submit, partial(self.begin, actor)))
            return False
        future: Future[Any] = Future()
        future.add_done_callback(partial(self._constructed, actor, life))
        try:
            self._agent.call(
                peer,
                None,
                (spec,),
                {},
                0,
                future=future,
                label=f"{spec.info.name}()",
                mail=MailHeader({"mailbox": life.id, "creates": True}),
            )
            if flushes:
                self._agent.flush()
        except RpcError as error:
            future.try_fail(error)
        return True

    def _constructed(self, actor: ActorRecord, life: Incarnation, done: Future[Any]) -> None:
        done.acknowledge()
        error = done.error
        if error is not None:
            if type(error) is PeerDiedError:
                self.places.report(life.worker_name, partial(self._worker_died, actor, life))
            elif isinstance(error, HostedActorGoneError):
                self.ended(actor, life, f"it was ended while it was being made: {error}")
            elif not isinstance(error, ShutdownError):
                self._not_made(actor, life, error)
            return
        with self.lock:
            if actor.life is not life or actor.phase not in ("starting", "restarting"):
                return
            answer = done.value_or_none
            now, flight_recorder = self._agent.clock.now(), self._agent.flight_recorder
            if flight_recorder is not None and actor.phase == "restarting":
                flight_recorder.noted(now, "restart", actor.descriptor.title)
            actor.note_alive(life, answer if isinstance(answer, int) else 0, now)
            # With ``worker=handle``, the place is the route of that handle's actor. Replace it by a route that does not keep that
            # actor alive.
            if isinstance(actor.place, Route):
                actor.place = self._routes.of(replace(actor.place.descriptor, anchor=None))
            answers = actor.pop_answered()
            orphaned = actor.orphaned
            actions = actor.family.made(actor) if actor.family is not None else []
        for future, found in answers:
            future.try_complete(found)
        perform(actions)
        if orphaned:
            self._end_gently(actor)

    # -- ends -------------------------------------------------------------------------------------------

    def _not_made(self, actor: ActorRecord, life: Incarnation, error: BaseException) -> None:
        """Record that an incarnation could not be made, and decide whether another attempt follows or the actor is dead."""
        original = exceptions.original(error)
        if is_a(original, ActorDiedError) and (life.killed or life.ended_by_group):
            return  # the thread that has ended the incarnation calls ended()
        text, final = why_not_made(error, None if life.worker is None else life.worker_name)
        if is_a(original, PlacementError) and actor.epoch and actor.options.max_restarts != -1:
            final = True  # it has waited for a place: further attempts would use up its restarts without having run
        elif actor.family is not None and actor.epoch:
            # The group will restart the actor, as often as its limit allows, unless the worker of its place has ended.
            final = bool(self._bound(actor)) or is_a(original, ActorDiedError)
        elif not final:
            final = not actor.options.movable and (actor.epoch == 0 or actor.place is not None)
        self.ended(actor, life, text, cause=original, final=final)

    def _bound(self, actor: ActorRecord) -> str:
        """Return why an actor cannot be restarted, if the worker that is its place has ended; empty if it can be restarted.

        If the actor may move to another worker, its place is changed to ``"turn"``.
        """
        if not self.places.is_gone(actor.place):
            return ""
        if not actor.options.movable:
            return "worker= has put it there"
        # The actor must not move to this worker.
        if self.places.next_worker().is_self:
            return "no other worker is left"
        actor.place = "turn"
        return ""

    def _living_on(self, key: WorkerKey) -> list[tuple[ActorRecord, Incarnation]]:
        """Return the actors that live, or are being made, on a worker; the lock is held."""
        lives = [(each, each.life) for each in self._actors.values()]
        return [(actor, life) for actor, life in lives if life is not None and life.worker == key]

    def _peer_ended(self, peer: Peer) -> None:
        """Process the deaths of the actors on a worker that has ended."""
        self.places.draining.discard(peer.key)
        with self.lock:
            lost = self._living_on(peer.key)
        if lost:

            def go(report: DeathReport | None) -> None:
                for actor, life in lost:
                    self._worker_died(actor, life, report)

            self.places.report(peer.name, go)

    def _worker_died(self, actor: ActorRecord, life: Incarnation, report: DeathReport | None) -> None:
        text = life.end_of_worker(report, self.places.cause(life.worker))
        self.ended(actor, life, text, report=report)

    def ended(
        self,
        actor: ActorRecord,
        life: Incarnation,
        text: str,
        *,
        report: DeathReport | None = None,
        cause: BaseException | None = None,
        final: bool = False,
        wanted: bool = False,
    ) -> None:
        """Record the end of an incarnation, and order another incarnation or mark the actor dead.

        Args:
            final: no incarnation follows.
            wanted: the actor ended itself with ``exit_actor()``.
        """
        bound = self._bound(actor)
        with self.lock:
            if actor.life is not life or actor.phase == "dead":
                return
            life.over = True
            verdict = RestartVerdict()
            actions: list[Action] = []
            family = actor.family
            lost = not (wanted or actor.orphaned or self._closed)
            if lost and not final:
                verdict = actor.verdict(life, self._agent.clock.now(), text, bound)
            process = life.process
            if verdict.again:
                actor.lose(Restarting(text=text, report=report, moved=life.moving))
                answers = actor.pop_answered()
                if family is not None:
                    actions = family.died(actor, text)
        self.places.departed(life.id)
        if process is not None and report is None:
            self._runtime.spawner.release(process)
        if not verdict.again:
            self.mark_dead(actor, text, report=report, cause=cause, verdict=verdict, lost=lost)
            return
        for future, found in answers:
            future.try_complete(found)
        perform(actions)
        if family is not None:
            return
        begin = partial(self._agent.submit, partial(self.begin, actor))
        if verdict.wait_s > 0:
            self._agent.clock.after(verdict.wait_s, begin)
        else:
            begin()

    def mark_dead(
        self,
        actor: ActorRecord,
        text: str,
        *,
        report: DeathReport | None = None,
        cause: BaseException | None = None,
        verdict: RestartVerdict | None = None,
        lost: bool = False,
    ) -> None:
        """Record that an actor is dead for good. Idempotent.

        Args:
            verdict: contains why the actor is not restarted.
            lost: the actor has died, or cannot be made: it was not ended on purpose.
        """
        descriptor = actor.descriptor
        with self.lock:
            if actor.phase == "dead":
                return
            death = actor.death = actor.death_error(text, report, cause, verdict or RestartVerdict())
            actor.phase = "dead"
            family, actions = actor.family, []
            if family is not None and not self._closed:
                actions = family.lost(actor, death, cause) if lost else family.departed(actor)
            actor.forget()
            life = actor.last_life
            waiters, actor.waiters = actor.waiters, []
            watchers, actor.watchers = actor.watchers, []
            self._actors.pop(descriptor.actor_id, None)
            self._dead[descriptor.actor_id] = actor
            while len(self._dead) > self._remembered:
                self._dead.popitem(last=False)
        if descriptor.name is not None and not self._agent.closed_down:
            self._names.unregister(descriptor.name, descriptor.namespace, descriptor.actor_id)
        if life is not None:
            self.places.departed(life.id)
        for _, _, future in waiters:
            future.try_fail(death)
        for watcher in watchers:
            watcher.try_complete(death)
        perform(actions)

    def drop(self, actor_id: int) -> None:
        """Record that an actor's last handle was freed. Called from a ``__del__``, so it takes no lock."""
        self._dropped.append(actor_id)
        if not self._agent.closed_down:
            submit = self._agent.submit
            self._agent.clock.call_soon(lambda: submit(self._sweep))

    def _sweep(self) -> None:
        while self._dropped:
            try:
                actor_id = self._dropped.popleft()
            except IndexError:
                return
            with self.lock:
                actor = self._actors.get(actor_id)
                if actor is None:
                    continue
                actor.orphaned = True
                alive = actor.phase == "alive"
                waits = actor.phase == "restarting" and actor.life is None
            if alive:
                self._end_gently(actor)
            elif waits:
                self.mark_dead(actor, "its last handle is gone")
            # Otherwise the actor is being made; _constructed() will end it.

    def _end_gently(self, actor: ActorRecord) -> None:
        """Let an actor run the calls in its mailbox, and end it then."""
        with self.lock:
            life = actor.life
            if actor.phase != "alive" or life is None:
                return
            actor.phase = "ending"
        why = "its last handle is gone"
        self.end_there(life, "drain", why).add_done_callback(lambda _: self.ended(actor, life, why))

    def end_there(self, life: Incarnation, how: str, why: str) -> Future[Any]:
        """End an incarnation on its worker (``how`` and the future: HostedActor.stop). The future fails if the worker ends."""
        agent, worker = self._agent, life.worker
        assert worker is not None
        return call_quietly(agent, lambda: peer_of(agent, worker), registry.stop, (life.id, how, why))

    def kill(self, actor_id: int, no_restart: bool = True) -> Future[None]:
        """Order the end of an actor at once, and return a completed future. Does nothing to a dead actor."""
        done: Future[None] = Future()
        with self.lock:
            actor = self._actors.get(actor_id)
            life = None if actor is None else actor.life
            if life is not None:
                life.killed = True
                process, worker = life.process, life.worker
        why = "it was killed with kill()"
        if actor is not None and no_restart:
            self.mark_dead(actor, why)
        if actor is not None and life is not None:
            if process is not None:
                self._runtime.spawner.kill(process)  # _peer_ended() processes the end of the process
            elif worker is not None:
                self.end_there(life, "now", why).add_done_callback(lambda _: self.ended(actor, life, why))
            elif not no_restart:  # its process is starting; _moved_in() ends it later
                self._agent.submit(partial(self.ended, actor, life, why))
        done.set_result(None)
        return done

    @property
    def is_drained(self) -> bool:
        """Whether the driver drains this worker."""
        return self._key in self.places.draining

    def hand_over(self, key: WorkerKey, why: str) -> tuple[list[Future[None]], int]:
        """Let the actors on a worker that leaves move to other workers, with their state: see :func:`hand_over`.

        Returns:
            For each moving actor, a future that completes when it has ended there, and its next incarnation was ordered; and the
            number of actors that can move when they have been made.
        """
        unmade = 0
        self.places.draining.add(key)
        elsewhere = None if self._runtime.spawner is not None else "turn"
        leaving: list[tuple[ActorRecord, Incarnation]] = []
        with self.lock:
            for actor, life in self._living_on(key):
                can_move = actor.descriptor.info.has_checkpoint and actor.family is None
                if actor.phase != "alive" or not can_move:
                    life.drained = why
                    unmade += can_move and actor.phase in ("starting", "restarting")
                    continue
                life.moving = True
                if isinstance(actor.place, WorkerKey):
                    actor.place = elsewhere
                leaving.append((actor, life))
        over: list[Future[None]] = []
        for actor, life in leaving:
            moved: Future[None] = Future()
            ended = self.end_there(life, "move", why)
            ended.add_done_callback(partial(self._moved, actor, life, why, moved))
            over.append(moved)
        return over, unmade

    def _moved(
        self, actor: ActorRecord, life: Incarnation, why: str, moved: Future[None], done: Future[Any]
    ) -> None:
        done.acknowledge()
        state = done.value_or_none
        if isinstance(state, Snapshot):
            with self.lock:
                if actor.life is life:
                    actor.keep(actor.epoch, LAST, state)
        self.ended(actor, life, why)
        moved.set_result(None)

    # -- queries and events of other workers ---------------------------------------------------------------

    def locate(self, actor_id: int, after: int = -1, wait: bool = True, patience: float = 0.0) -> Future[Any]:
        """Return a future of an actor's location.

        Args:
            after: the last incarnation whose end the querying worker knows; -1: none.
            wait: True: the future completes when the actor lives. False: if the actor will be restarted, the future completes
                before, with :class:`Restarting`.
            patience: how many seconds this worker may take to notice the end of incarnation ``after``.

        The future fails with ActorDiedError if the actor is dead; with ActorUnavailableError if this worker still considers
        incarnation ``after`` alive after ``patience``.
        """
        future: Future[Any] = Future()
        future.label = "the location of an actor"
        future.cover()
        with self.lock:
            actor = self._actors.get(actor_id)
            found: Location | Restarting | None = None
            if actor is not None:
                found = actor.answer(after, wait)
                if found is None:
                    actor.waiters.append((after, wait, future))
        if actor is None:
            future.try_fail(self.death_of(actor_id))
        elif found is not None:
            future.try_complete(found)
        elif after >= 0 and actor.epoch <= after:
            unseen, submit = partial(self._unseen, actor, after), self._agent.submit
            self._agent.clock.after(patience, lambda: submit(unseen))
        return future

    def _unseen(self, actor: ActorRecord, after: int) -> None:
        """Fail queries about an actor that other workers cannot reach, and that this worker still considers alive."""
        with self.lock:
            if actor.epoch > after:
                return
            late = [entry for entry in actor.waiters if entry[0] >= after]
            actor.waiters = [entry for entry in actor.waiters if entry[0] < after]
        for _, _, future in late:
            error = unreachable(actor.title, actor.descriptor.actor_id, actor.worker_name, self._agent.name)
            future.try_fail(error)

    def death_of(self, actor_id: int) -> ActorDiedError:
        """Return the error that describes an actor's death; if the record was deleted, an error that says so."""
        with self.lock:
            actor = self._dead.get(actor_id)
        death = actor.death if actor is not None else None
        return death or forgotten(actor_id, self._agent.name)

    def watch(self, actor_id: int) -> Future[ActorDiedError]:
        """Return a future that completes when an actor is dead for good; its value is the error that describes the death."""
        future: Future[ActorDiedError] = Future()
        future.label = "the end of an actor"
        with self.lock:
            actor = self._actors.get(actor_id)
            if actor is not None:
                actor.watchers.append(future)
        if actor is None:
            future.try_complete(self.death_of(actor_id))
        return future

    def known(self, actor_id: int) -> ActorRecord | None:
        """Return the record of an actor that is not dead; the lock is held."""
        return self._actors.get(actor_id)

    def alive(self, actor_id: int) -> Future[bool]:
        """Return a completed future that says whether an actor lives, or is being made or restarted."""
        future: Future[bool] = Future()
        with self.lock:
            found = actor_id in self._actors
        future.set_result(found)
        return future

    def ends(self, actor_id: int) -> Future[bool]:
        """Return a future: False, at once, if the actor is not about to end; otherwise True, as soon as the actor is dead."""
        # Process the handles that were just freed.
        self._runtime.references.collect()
        self._sweep()
        over: Future[bool] = Future()
        over.label = "the end of an actor"
        with self.lock:
            actor = self._actors.get(actor_id)
            stays = actor is not None and not actor.orphaned
        if stays:
            over.set_result(False)
        else:
            self.watch(actor_id).add_done_callback(lambda _: over.set_result(True))
        return over

    def note_ended(self, actor_id: int, epoch: int, kind: str, text: str) -> None:
        """Record that an actor has ended by itself.

        Args:
            kind: ``"exit"`` (by exit_actor()) is final; after any other kind, the actor may be restarted.
        """
        with self.lock:
            actor = self._actors.get(actor_id)
            if actor is None or actor.epoch != epoch:
                return
            life = actor.life
        if life is not None:
            self.ended(actor, life, text, final=kind == "exit", wanted=kind == "exit")

    def note_checkpoint(self, actor_id: int, epoch: int, number: int, state: Snapshot) -> bool:
        """Store the state for the actor's next incarnation; return False if ``epoch`` is not the present incarnation."""
        with self.lock:
            actor = self._actors.get(actor_id)
            return actor is not None and actor.keep(epoch, number, state)

    def states(self) -> list[ActorState]:
        """Return the states of this supervisor's actors, dead actors last."""
        with self.lock:
            return [each.row(self._agent.name) for each in (*self._actors.values(), *self._dead.values())]

    def page(self, first: int, most: int, dead: int) -> tuple[list[ActorState], bool]:
        """Return a part of :meth:`states`, with the latest deaths first, and whether there is more.

        Args:
            first: how many states to skip; then at most ``most`` states are returned.
            dead: how many of the dead actors are included.
        """
        with self.lock:
            ended = itertools.islice(reversed(self._dead.values()), dead)
            found = list(
                itertools.islice(itertools.chain(self._actors.values(), ended), first, first + most + 1)
            )
            return [each.row(self._agent.name) for each in found[:most]], len(found) > most

    def close(self, graceful: bool = True, patience: float = _END_S) -> None:
        """End all actors at once; wait for them: ``patience`` s, bounded to 0.25 to 5 s; 0.25 s if not ``graceful``."""
        with self.lock:
            self._closed = True
            actors = list(self._actors.values())
            living = [one.life for one in actors if one.life is not None and one.life.worker is not None]
            processes = [life.process for life in living]
        why = f"worker {self._agent.name!r}, its supervisor, has shut down"
        over = [self.end_there(life, "now", why) for life in living]
        if over:
            try:
                collect_all(over).wait(max(0.25, min(_END_S, patience)) if graceful else 0.25)
            except RpcError:
                pass
        for process in processes:
            if process is not None:
                self._runtime.spawner.release(process)
        for family in {each.family.root() for each in actors if each.family is not None}:
            family.close(None)
        for actor in actors:
            self.mark_dead(actor, why)


def hand_over(rank: int, incarnation: str, why: str) -> Any:
    """Move the actors that this process supervises from a worker that leaves to other workers.

    An actor with ``checkpoint()`` and ``restore()`` finishes the calls in its mailbox, and moves with its state. Its old worker
    refuses later calls, whose callers then ask the supervisor where the actor lives: handles stay valid. Actors that are being
    made, that have no ``checkpoint()``, or that are in a supervision group, stay; their later death errors contain ``why``. The
    answer is sent when all moving actors have ended on the worker, and their next incarnations were ordered. It is the number of
    actors that have moved, or can move when they have been made. Called by RPC on each worker.
    """
    found = current()
    if found is None:
        return 0
    supervisor: Supervisor = found.supervisor
    over, unmade = supervisor.hand_over(WorkerKey(rank, incarnation), why)
    return Deferred(collect_all(over).then(lambda _: len(over) + unmade)) if over else unmade
