"""The location of an actor, as far as one process knows it, and the order of the calls of this process to the actor.

While an actor is being made, restarted or located, its calls wait in the queue, with their arguments as they were at the call.
They are sent in the order in which they were made, before any newer call. When an actor has ended, this process queries the
actor's supervisor whether the actor restarts, which decides the error of calls that cannot be repeated, and then where the
actor lives again. Calls that did not run, and calls that may be repeated, return to their places in the queue. The queue is
sent when the outcome of all calls to the former incarnation is known, or after one second.

``_lock`` guards the attributes of a CallQueue, except ``in_flight`` and the tables of templates, whose operations
are atomic. Of the agent, only ``submit`` and the clock are called under the lock; they call no user code. The lock is
re-entrant, because the garbage collector may run a finaliser that calls this actor at any allocation.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actorrpc._exceptions import is_a, is_of_handler, say
from actorrpc._python import running_loop
from actorrpc.actors.client.call_template import CallTemplate, Place
from actorrpc.actors.client.pending_call import (
    INFINITE,
    AwaitingVerdict,
    PendingCall,
    ReservedCall,
    ResultFuture,
    awaited,
    pack_arguments,
)
from actorrpc.actors.client.supervisor_client import Fate, peer_of, query
from actorrpc.actors.spec.actor_spec import ActorDescriptor, HostedActorGoneError, Location
from actorrpc.agent.calls import Call
from actorrpc.errors import (
    ActorDiedError,
    ActorUnavailableError,
    CancelledError,
    CheckpointError,
    DeadlockError,
    LostArgumentError,
    NotInitializedError,
    PeerDiedError,
    RemoteError,
    RpcError,
    RpcTimeoutError,
    ShutdownError,
    UnknownWorkerError,
)
from actorrpc.futures import Future
from actorrpc.serialization import exceptions

if TYPE_CHECKING:
    from actorrpc.actors.context import Runtime
    from actorrpc.actors.spec.class_info import MethodInfo
    from actorrpc.actors.spec.options import CallOptions
    from actorrpc.agent.peers import Peer

__all__ = ["CallQueue"]

_BARRIER_S: Final = 1.0  # how long, at most, the queue waits for the outcome of calls to a former incarnation
_CROWD: Final = 64  # if more calls wait while the queue is being sent, a thread that queues a call is blocked
_HOLD_UP_S: Final = 1.0  # how long, at most, a thread that queues a call is blocked
_INLINED: Final = 8  # with fewer calls in flight, replies may contain large results
# A call that failed with an error of these classes is not repeated, even if `retry_exceptions` names the class.
_FINAL: Final = (CancelledError, CheckpointError, DeadlockError, RpcTimeoutError, ShutdownError)


class _WaitingCalls:
    """The calls that wait in a CallQueue, by their numbers. The lock of the CallQueue guards this object."""

    __slots__ = ("_calls", "_order")

    def __init__(self) -> None:
        self._calls: dict[int, PendingCall] = {}
        self._order: list[int] = []  # a heap; may contain numbers of calls that are no longer in `_calls`

    def __len__(self) -> int:
        return len(self._calls)

    def push(self, number: int, pending: PendingCall) -> None:
        self._calls[number] = pending
        heapq.heappush(self._order, number)

    def discard(self, number: int) -> None:
        self._calls.pop(number, None)

    def pop(self) -> PendingCall | None:
        """Remove, claim and return the first call, which the caller must send or end; None if no call waits."""
        while self._order:
            pending = self._calls.pop(heapq.heappop(self._order), None)
            if pending is not None and pending.claim():
                return pending
        return None

    def remove(self, *, impatient: bool = False) -> list[PendingCall]:
        """Remove, claim and return all calls, or only calls with ``template.impatient``, in order; the caller must end them."""
        removed = []
        for number, pending in sorted(self._calls.items()):
            template = pending.template
            if template is not None and (template.impatient or not impatient) and pending.claim():
                removed.append(pending)
                del self._calls[number]
        return removed


class CallQueue:
    """One process's calls to one actor. Thread-safe.

    Attributes:
        descriptor: the actor's descriptor, which does not keep the actor alive.
        in_flight: the calls that were sent and not answered, by number.
        templates, kept_templates: call templates by method name, for calls without and with ``refs`` (see :meth:`Route.call`).
            Both are empty while new calls must be queued.
        barrier: numbers of the calls to a former incarnation for whose outcome the queue waits; None: it waits for none.
        fate: whether the actor is dead or restarts, and why.
        place: the actor's location, and the worker there; None while this process does not know both.
        max_pending: the option ``max_pending_calls`` of the actor; -1: no limit.
    """

    def __init__(self, runtime: Runtime, descriptor: ActorDescriptor) -> None:
        self.runtime = runtime
        self.agent = runtime.agent
        self.descriptor = replace(descriptor, anchor=None, location=None)
        self.max_pending = -1 if descriptor.options is None else descriptor.options.max_pending_calls
        self.next_number = itertools.count().__next__
        self.in_flight: dict[int, ResultFuture] = {}
        self.templates: dict[str, CallTemplate] = {}
        self.kept_templates: dict[str, CallTemplate] = {}
        self.barrier: set[int] | None = None
        self.fate = Fate(descriptor)
        self.place: Place | None = None
        self._hint = descriptor.location  # the handle's location, until _take_hint() uses it
        self._unreached: Place | None = None  # the last place, if no connection could be made to it
        self._lock = threading.RLock()
        self._unplaced: dict[tuple[str, bool], CallTemplate] = {}
        self._waiting = _WaitingCalls()
        self._failing: list[AwaitingVerdict] = []
        self._waiters: list[Future[Location]] = []
        self._locating = False
        self._draining = False
        self._drained: Future[None] | None = None

    @property
    def pending(self) -> int:
        """How many calls are in flight, queued, or await the verdict."""
        return len(self.in_flight) + len(self._waiting) + len(self._failing)

    # -- new calls -------------------------------------------------------------------------------------

    @property
    def location(self) -> Location | None:
        """Where the actor lives, if this process knows it."""
        # Read in this order, because _take_hint() sets `place` before it drops the hint.
        hint, place = self._hint, self.place
        return hint if place is None else place[0]

    def template_for(self, method: MethodInfo, options: CallOptions, refs: bool) -> CallTemplate:
        """Return the template of a call that is made now. If the template's ``peer`` is None, the call must be queued.

        Args:
            refs: see :meth:`Route.call`.
        """
        if self._hint is not None:
            self._take_hint(self._hint)
        if self.place is None:
            self._locate_here()
        with self._lock:
            place = self.place
            ready = place is not None and self.barrier is None and not self._draining
            templates = self.kept_templates if refs else self.templates
        name = method.name
        if not ready:
            unplaced = self._unplaced.get((name, refs))
            if unplaced is None or unplaced.options is not options:
                unplaced = self._unplaced[name, refs] = CallTemplate(self, method, options, refs)
            return unplaced
        template = templates.get(name)
        if template is None or template.options is not options:
            # If the actor has ended meanwhile, `templates` is a table that is no longer used.
            template = templates[name] = CallTemplate(self, method, options, refs, place)
        return template

    def _take_hint(self, hint: Location) -> None:
        try:
            place = hint, peer_of(self.agent, hint.worker)
        except RpcError:  # the location is out of date; _locate() queries the supervisor later
            place = None
        with self._lock:
            if self._hint is hint:
                self.place = place
                self._hint = None

    def launch(
        self,
        future: ResultFuture,
        template: CallTemplate,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seconds: float,
        unresolved: bool,
    ) -> None:
        """Send a call at once; if results among the arguments are pending, reserve the call's place in the actor's mailbox.

        Args:
            unresolved: there are ObjectRefs among the arguments.

        Raises: as ``agent.call``, except PeerDiedError. After an error, the call is still in :attr:`in_flight`.
        """
        in_flight, pending = self.in_flight, future.pending
        in_flight[future.number] = future
        awaits: Sequence[Future[Any]] = ()
        # Many large results at a time would fill the memory of this process, so they stay on the actors' workers.
        mail = template.mail if not template.inlines or len(in_flight) < _INLINED else template.kept_mail
        try:
            if unresolved or (pending is not None and pending.place is not None):
                awaits = awaited(args, kwargs)
                if awaits and pending is None:
                    pending = PendingCall(future, PendingCall.hold(args, kwargs), unresolved, seconds)
                place = None if pending is None else pending.place
                mail = template.mail_for(unresolved and not awaits, place)
            call = Call(self.agent, template.peer, None, seconds, future, template.label, None, mail, awaits)
            self.agent.send(call, None, args, kwargs)
            if awaits:
                ReservedCall(self, future, template, call)
        except LostArgumentError as error:
            self.ended_unsent(future, error)
        except PeerDiedError:  # the worker is dead or out of reach
            self.bounced(future)

    def ended_unsent(self, future: ResultFuture, error: BaseException) -> None:
        """Fail a call with ``error``, because it could not be sent."""
        pending = future.pending
        if (
            pending is not None
            and pending.may_have_run
            and isinstance(error, (CancelledError, LostArgumentError))
        ):
            error.maybe_executed = True  # in an earlier try
        future.fail_unsent(error.with_traceback(None))
        self.passed(future.number)

    def dropped(self, future: ResultFuture) -> None:
        """Remove a call that could not be made. Its caller raises the error and returns no future."""
        future.route = None
        self.passed(future.number)

    def bounced(self, future: ResultFuture) -> None:
        """Take back a call that did not run because its worker is dead: queue the call again, or let it await the verdict."""
        # If the claim fails, the thread that marks the peer as dead has claimed the call, and calls caught().
        if future.claim():
            assert future.template is not None
            future.label = future.template
            self._take_back(future, future.template, ran=False, lost=True)

    def enqueue(
        self,
        future: ResultFuture,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seconds: float,
        unresolved: bool,
    ) -> None:
        """Queue a call until this process knows where the actor lives; fail it if the actor is dead. May block for a second.

        Raises:
            SerializationError: an argument cannot be sent.
        """
        template = future.template
        assert template is not None
        pending = PendingCall(future, PendingCall.hold(args, kwargs), unresolved, seconds)
        crowd: Future[None] | None = None
        with self._lock:
            ended = self.fate.death is not None or (template.impatient and self._restarting)
            if not ended:
                self._put(pending)
                if self._draining and len(self._waiting) > _CROWD:
                    crowd = self._drained = self._drained or Future()
        if ended:
            future.fail_unsent(self._error_of(template, False))
        elif pending.unwanted:
            pending.cancel()  # the call that makes this call was cancelled before this call was queued
        elif crowd is not None and running_loop() is None:
            # One thread sends the queue. A caller that queues calls faster must wait for that thread.
            try:
                crowd.wait(_HOLD_UP_S)
            except RpcError:
                pass

    @property
    def _restarting(self) -> bool:
        """Whether the actor restarts, and its new location is not known yet. The lock is held."""
        return self.place is None and self.fate.restarts

    def _put(self, pending: PendingCall) -> None:
        """Queue a call, and send the queue if that is possible; the lock is held."""
        future = pending.future
        if future is None:
            return
        pending.rest()
        self._waiting.push(future.number, pending)
        if self.place is None:
            self._locate_soon()  # the supervisor's last answer may have arrived before this call was queued
        else:
            self._send_waiting()

    def remove_ended(self, number: int) -> None:
        """Remove a call that has ended from the queue, if it is there."""
        with self._lock:
            self._waiting.discard(number)

    # -- calls that return to the queue ------------------------------------------------------------------

    def caught(self, future: ResultFuture, error: BaseException) -> bool:
        """Take over a failed call if its actor has failed or the call may be repeated; return whether it was taken over.

        The calling thread has claimed the future. This method is quick, and calls no user code.
        """
        template = future.template
        if template is None:
            return False
        ran, lost = True, False
        if type(error) is PeerDiedError:
            ran, lost = error.maybe_executed is not False, True
        elif isinstance(error, HostedActorGoneError):
            ran, lost = getattr(exceptions.original(error), "maybe_executed", False) is not False, True
        elif (
            not template.retried
            or not template.tries
            or future.pending is None
            or future.pending.tries == 0
            or not self.is_retried(template.retried, error)
        ):
            return False
        self._take_back(future, template, ran, lost)
        return True

    @staticmethod
    def is_retried(retried: bool | tuple[type[BaseException], ...], error: BaseException) -> bool:
        """Return whether a call with ``retry_exceptions=retried`` may be repeated after its method raised ``error``."""
        if not isinstance(error, RemoteError) or isinstance(error, (*_FINAL, HostedActorGoneError)):
            return False
        return retried is True or (retried is not False and is_a(error, retried))

    def _take_back(self, future: ResultFuture, template: CallTemplate, ran: bool, lost: bool) -> None:
        """Queue a failed call again, or let it await the verdict. ``ran``: it may have run; ``lost``: the actor has ended."""
        pending = future.pending
        if pending is not None and not lost and (pending.place is None or pending.place[1] != template.epoch):
            call: Any = future.source
            pending.place = call.id, template.epoch
        with self._lock:
            # After disclaim(), any thread may claim the future and end it, even before it has a new source.
            future.disclaim()
            self.passed(future.number)
            if lost:
                self._lost(template.epoch, future.number, template.label)
            if pending is not None and pending.failed(ran) and self.fate.death is None:
                self._put(pending)
            else:
                ran = ran or (pending is not None and pending.may_have_run)
                self._failing.append(AwaitingVerdict(future, ran))
                if not self._locating or self.fate.verdict is not None:
                    self.agent.submit(self._fail)
            source = future.source
        if pending is not None and pending.unwanted and source is not None:
            source.cancel()  # a thread that called cancel() meanwhile found neither the former source nor the new one

    def _hold_back(self) -> None:
        """Make all new calls go into the queue; the lock is held."""
        self.templates, self.kept_templates = {}, {}

    def mark_killed(self) -> None:
        """Record that this process has killed the actor, so that no more calls are sent to the present incarnation."""
        with self._lock:
            location = self.location
            if location is not None:
                self._lost(location.epoch, 1 << 63, "")

    def is_gone(self, epoch: int) -> bool:
        """Return whether the incarnation ``epoch`` of the actor has ended, or was killed, as far as this process knows."""
        return epoch <= self.fate.after

    def _lost(self, epoch: int, number: int, label: str) -> None:
        """Record the end of incarnation ``epoch``, which did not answer call ``number``, named ``label``. The lock is held."""
        location = self.location
        if self.fate.death is not None or location is None or location.epoch > epoch:
            return  # known already
        self._hold_back()
        place = self.place
        self._unreached = place if place is not None and place[1].out_of_reach else None
        self.place = self._hint = None
        templates = {each: future.template for each, future in self.in_flight.copy().items()}
        in_flight = {
            each: found for each, found in templates.items() if found is not None and found.epoch <= epoch
        }
        if in_flight:
            first = min(in_flight)
            if first < number:
                label = in_flight[first].label
            self.barrier = set(in_flight)
            lift, submit = partial(self._lift, epoch), self.agent.submit
            self.agent.clock.after(_BARRIER_S, lambda: submit(lift))
        self.fate.lost(epoch, label)
        self._locate_soon()

    def passed(self, number: int) -> None:
        """Record that a call is no longer in flight, and remove it from the barrier."""
        self.in_flight.pop(number, None)
        if self.barrier is None:
            return
        with self._lock:
            barrier = self.barrier
            if barrier is not None:
                barrier.discard(number)
                if not barrier:
                    self.barrier = None
                    self._send_waiting()

    def _lift(self, epoch: int) -> None:
        """Stop waiting for the outcome of calls to the former incarnation ``epoch``, which may still run for hours."""
        with self._lock:
            if self.barrier is not None and self.fate.after == epoch:
                self.barrier = None
                self._send_waiting()

    # -- sending the queue ---------------------------------------------------------------------------------

    def _send_waiting(self) -> None:
        """Let a pool thread send the queue, if a call waits and can be sent; the lock is held."""
        if self._waiting and self.place is not None and self.barrier is None and not self._draining:
            self._draining = True
            self._hold_back()
            self.agent.submit(self._drain)

    def _drain(self) -> None:
        """Send the queue in order. Runs in one pool thread at a time."""
        while True:
            with self._lock:
                place = self.place
                if place is None or self.barrier is not None or (pending := self._waiting.pop()) is None:
                    self._draining = False
                    drained, self._drained = self._drained, None
                    break
            pending.context.run(self._resend, pending, place)
        if drained is not None:
            drained.set_result(None)

    def _resend(self, pending: PendingCall, place: Place) -> None:
        future, unplaced = pending.future, pending.template
        assert future is not None
        assert unplaced is not None
        try:
            left = pending.deadline - self.agent.clock.now()
            if pending.unwanted or left <= 0:
                pending.rest()
                pending.cancel(late=not pending.unwanted)
                return
            pending.stop_timer()
            args, kwargs, unresolved = *PendingCall.opened(pending.arguments), pending.unresolved
            if unresolved:
                args, kwargs, unresolved = pack_arguments(args, kwargs)
            template = future.template = unplaced.at(self, place)
            self.launch(future, template, args, kwargs, left if left < INFINITE else 0.0, unresolved)
        except BaseException as error:
            self.ended_unsent(future, error)
            if is_of_handler(error):
                raise
            return
        if pending.unwanted:  # the call was cancelled after it had left the queue and before it was sent
            future.cancel()

    # -- queries to the supervisor ---------------------------------------------------------------------------

    def located(self) -> Future[Location]:
        """Return a future of the actor's location, which completes when the constructor has returned, also after a restart.

        The future fails with ActorDiedError if the actor is dead; an error of the constructor is the ``cause``.
        """
        answer: Future[Location] = Future()
        answer.label = f"the location of {self.descriptor.title}"
        if self.location is None:
            self._locate_here()
        with self._lock:
            death, location = self.fate.death, self.location
            if death is None and location is None:
                self._waiters.append(answer)
                self._locate_soon()
        if death is not None:
            answer.set_exception(self.fate.died(None, None))
        elif location is not None:
            answer.set_result(location)
        return answer

    def _locate_here(self) -> None:
        """Query the supervisor in this thread if it is in this process, which saves waking a pool thread."""
        if self.descriptor.supervisor != self.runtime.references.me:
            return
        with self._lock:
            if self._locating or self.place is not None or self.fate.death is not None:
                return
            self._locating = True
        self._locate(False)

    def _locate_soon(self) -> None:
        """Let a pool thread query the supervisor for the actor's location; the lock is held."""
        if not self._locating:
            self._locating = True
            self.agent.submit(partial(self._locate, False))

    def _locate(self, wait: bool) -> None:
        descriptor = self.descriptor
        # If the worker is out of reach, the supervisor has had enough time already to notice that it is dead.
        patience = _BARRIER_S if self._unreached is not None else self.agent.settings.reach_timeout
        asked = query(
            self.runtime,
            descriptor.supervisor,
            "locate",
            descriptor.actor_id,
            self.fate.after,
            wait,
            patience,
        )
        asked.add_done_callback(self._answered)

    def _answered(self, done: Future[Any]) -> None:
        done.acknowledge()
        error: Any = done.error
        value: Any = done.value_or_none
        if error is None:
            if isinstance(value, Location):
                self._on_location(value)
                return
            with self._lock:
                self.fate.verdict = value
                if self._restarting:
                    for pending in self._waiting.remove(impatient=True):
                        if pending.future is not None:
                            self._failing.append(AwaitingVerdict(pending.future, pending.may_have_run))
            self._fail()
            self._locate(True)
            return
        original = exceptions.original(error)
        if is_a(original, ActorDiedError):
            self._give_up(self._error_of, original)
        elif type(error) is PeerDiedError or isinstance(error, UnknownWorkerError):
            self._give_up(self._error_of, self.fate.orphaned(error))
        elif isinstance(error, (ShutdownError, NotInitializedError)):
            # This process leaves the group, so the failures of its calls are expected.
            self._give_up(lambda template, ran: error, known=True)
        else:
            why = f"its supervisor says: {say(original)}"
            if is_a(original, ActorUnavailableError):
                why = self._still_there() or why
            self._give_up(lambda template, ran: self.fate.unavailable(template, ran, why))

    def _still_there(self) -> str:
        """Undo :meth:`_lost` if the actor's worker is only out of reach: later calls try again. Return why, or nothing."""
        with self._lock:
            place, self._unreached = self._unreached, None
            if place is None or place[1].state != "alive":
                return ""
            self.place, self.fate.after = place, place[0].epoch - 1
            return f"{place[1].out_of_reach}, but is alive for its supervisor"

    def _on_location(self, location: Location) -> None:
        peer: Peer | None
        try:
            peer = peer_of(self.agent, location.worker)
        except RpcError:
            peer = None
        with self._lock:
            self._locating = False
            if self.fate.death is not None:
                return
            if peer is None:  # the new incarnation has ended, too
                self.fate.after = max(self.fate.after, location.epoch)
                if self._waiting or self._waiters or self._failing:
                    self._locate_soon()
                return
            # Take `_failing` before _send_waiting(), after which calls to the new incarnation may fail and be added to it.
            failing, self._failing = self._failing, []
            self.place, self._hint = (location, peer), None
            waiters, self._waiters = self._waiters, []
            self._send_waiting()
        self._fail_all(failing, self._error_of)
        for waiter in waiters:
            waiter.set_result(location)

    # -- ending calls -----------------------------------------------------------------------------------------

    def _fail(self) -> None:
        """End the calls that await the supervisor's verdict, after the verdict has arrived."""
        with self._lock:
            failing, self._failing = self._failing, []
        self._fail_all(failing, self._error_of)

    @staticmethod
    def _fail_all(
        failing: list[AwaitingVerdict], error_of: Callable[[CallTemplate | None, bool], BaseException]
    ) -> None:
        for awaiting in failing:
            awaiting.future.fail_unsent(error_of(awaiting.future.template, awaiting.ran))

    def _give_up(
        self,
        error_of: Callable[[CallTemplate | None, bool | None], BaseException],
        death: ActorDiedError | None = None,
        known: bool = False,
    ) -> None:
        """Fail every waiting call and query of the location. ``death``: the actor is dead. ``known``: do not log the failures."""
        with self._lock:
            self._locating = False
            if death is not None:
                self.fate.death = death
                self._hold_back()
                self.place = self._hint = None
                self.barrier = None
            waiting = self._waiting.remove()
            failing, self._failing = self._failing, []
            waiters, self._waiters = self._waiters, []
        self._fail_all(failing, error_of)
        for pending in waiting:
            future = pending.future
            if future is not None:
                future.fail_unsent(error_of(future.template, pending.may_have_run))
                if known:
                    future.acknowledge()
        for waiter in waiters:
            waiter.set_exception(error_of(None, None))

    def close(self) -> None:
        """End every waiting call with ShutdownError."""
        self._give_up(
            lambda template, ran: ShutdownError(
                f"{template or self.descriptor.title}: this worker shut down",
                maybe_executed=ran,
                worker=self.agent.name,
            )
        )

    def _error_of(self, template: CallTemplate | None, ran: bool | None) -> BaseException:
        """Return the error of a call that is not repeated after the actor has died, restarted or moved."""
        return self.unavailable(template, ran) if self.fate.death is None else self.fate.died(template, ran)

    def unavailable(self, template: CallTemplate | None, ran: bool | None) -> ActorUnavailableError:
        """Return the error of a call that is not repeated although the actor is not dead for good."""
        why = "it is being restarted" if self.location is None else "it has been restarted"
        return self.fate.unavailable(template, ran, why)
