"""Where an actor is, as one process knows it, and the order of the calls that this process makes to it.

While an actor is being made, restarted or looked for, its calls wait in the queue, with their arguments as of
the call; they leave in the order in which they were made, before any newer call. When an actor is found to be gone,
its supervisor is asked once: at first what has become of it (which decides about the calls that may have run), then
where it lives again. Calls that certainly did not run, and those that may be made again, go back to their places in
the queue; nothing is sent before all calls to the former incarnation are accounted for.

``_lock`` guards everything here but ``flying`` and the tables of templates, whose single steps are atomic. Nothing is
called out under it but ``agent.submit`` and the clock, which only queue. It is re-entrant, because the collector may
run a finaliser that makes a call to this very actor at any allocation.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actorrpc._exception_text import is_a, is_of_handler, say
from actorrpc.actors.client import death_errors
from actorrpc.actors.client.call_template import CallTemplate
from actorrpc.actors.client.pending_call import INFINITE, AwaitingVerdict, PendingCall, ResultFuture
from actorrpc.actors.client.reserved_call import ReservedCall
from actorrpc.actors.client.supervisor_client import ask, peer_of
from actorrpc.actors.refs.arguments import awaited, pack_arguments
from actorrpc.actors.spec.actor_spec import Card, HostedActorGoneError, Location
from actorrpc.actors.spec.death_report import Restarting
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

_BARRIER_S: Final = 1.0  # how long new calls wait for the answers of a former incarnation
_CROWD: Final = 64  # more calls than that wait: callers are held up while the queue is being sent
_HOLD_UP_S: Final = 1.0
_INLINED: Final = 8  # calls under way whose large results may come with the reply
# Errors of a called method that say that it was not, or must not be, made to the end: never a reason to try again.
_FINAL: Final = (CancelledError, CheckpointError, DeadlockError, RpcTimeoutError, ShutdownError)


class CallQueue:
    """One process's calls to one actor. Thread-safe.

    Attributes:
        flying: the calls that are on the way, by number.
        templates, kept_templates: how calls are made now, by method (without and with ``refs``); empty unless new calls may be
            sent at once.
        barrier: numbers of calls to a former incarnation that are not accounted for yet.
        death: why the actor is dead, if it is known to be.
        max_pending: the limit of ``max_pending_calls``, or -1.
        restarts: the actor may come to life again, or elsewhere.
    """

    def __init__(self, runtime: Runtime, card: Card) -> None:
        self.runtime = runtime
        self.agent = runtime.agent
        self.send = runtime.agent.call
        self.actor_id = card.actor_id
        self.title = card.title
        self.prefix = card.info.prefix  # of what messages call a method
        self.supervisor = card.supervisor
        self.supervisor_name = card.supervisor_name
        self.options = card.options
        self.max_pending = -1 if card.options is None else card.options.max_pending_calls
        # What keeps its state may also be handed over to another worker, whatever its options say.
        self.restarts = card.options is not None and (
            card.options.max_restarts != 0 or card.info.has_checkpoint
        )
        self.next_number = itertools.count().__next__
        self.flying: dict[int, ResultFuture] = {}
        self.templates: dict[str, CallTemplate] = {}
        self.kept_templates: dict[str, CallTemplate] = {}
        self.barrier: set[int] | None = None
        self.death: ActorDiedError | None = None
        self.location = card.location
        self._peer: Peer | None = None
        self._hint = card.location is not None  # not looked at yet: that may ask the rendezvous store
        self._lock = threading.RLock()
        self._unplaced: dict[tuple[str, bool], CallTemplate] = {}
        self._queue: list[tuple[int, ResultFuture]] = []
        self._stale = 0  # entries of the queue that are over
        self._failing: list[AwaitingVerdict] = []
        self._waiters: list[Future[Location]] = []
        self._ready = False
        self._asking = False
        self._draining = False
        self._drained: Future[None] | None = None
        self._after = -1  # the last incarnation that is known to be gone
        self._verdict: Restarting | None = None
        self._oldest = ""

    @property
    def pending(self) -> int:
        """How many calls are under way, or wait."""
        return len(self.flying) + len(self._queue) - self._stale + len(self._failing)

    def waits_for(self) -> str:
        """Say, for messages, what the calls in the queue wait for."""
        if self._verdict is None and self._after < 0:
            return f"{self.title} to be created"
        if self._verdict is None:
            return f"news of {self.title}, which cannot be reached"
        return f"{self.title} to be restarted ({self._verdict.text})"

    # -- calls on their way out ------------------------------------------------------------------------

    def template_for(self, method: MethodInfo, options: CallOptions, refs: bool) -> CallTemplate:
        """Return how to make a call now; where ``peer`` is None, it has to wait."""
        if self._hint:
            self._take_hint()
        if not self._ready and self.supervisor == self.runtime.references.me:
            self._ask_here()
        with self._lock:
            ready, location, peer = self._ready, self.location, self._peer
            templates = self.kept_templates if refs else self.templates
        name = method.name
        if not ready:
            unplaced = self._unplaced.get((name, refs))
            if unplaced is None or unplaced.options is not options:
                unplaced = self._unplaced[name, refs] = CallTemplate(self, method, options, refs, None, None)
            return unplaced
        template = templates.get(name)
        if template is None or template.options is not options:
            # If the actor is lost meanwhile, this is a table that nobody looks at any more.
            template = templates[name] = CallTemplate(self, method, options, refs, location, peer)
        return template

    def whereabouts(self) -> tuple[Location | None, Peer | None]:
        """Return where the actor lives, as far as that is known."""
        with self._lock:
            return self.location, self._peer

    def _take_hint(self) -> None:
        location = self.location
        peer: Peer | None = None
        if location is not None:
            try:
                peer = peer_of(self.agent, location.worker)
            except RpcError:  # then its supervisor knows more
                pass
        with self._lock:
            if not self._hint:
                return
            self._hint = False
            if peer is None:
                self.location = None
            else:
                self._peer = peer
                self._ready = True

    def launch(
        self,
        future: ResultFuture,
        template: CallTemplate,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seconds: float,
        unresolved: bool,
    ) -> None:
        """Send a call at once, or reserve its place if arguments are still to come.

        Args:
            unresolved: there are ObjectRefs among the arguments.

        Raises: what ``agent.call`` does, but for PeerDiedError.
        """
        flying, pending = self.flying, future._pending
        flying[future._number] = future
        awaits: Sequence[Future[Any]] = ()
        # Many large results at a time would fill this process: then they are kept after all.
        mail = template.mail if not template.inlines or len(flying) < _INLINED else template.kept_mail
        try:
            if unresolved or (pending is not None and pending.place is not None):
                awaits = awaited(args, kwargs)
                if awaits and pending is None:
                    held = PendingCall.hold(args, kwargs)
                    pending = PendingCall(future, held, unresolved, seconds, template.tries)
                place = None if pending is None else pending.place
                mail = template.mail_for(unresolved and not awaits, place)
            call = self.send(
                template.peer,
                None,
                args,
                kwargs,
                seconds,
                future,
                None,
                template.label,
                mail,
                None,
                awaits,
            )
        except LostArgumentError as error:
            self.ended_unsent(future, error)
        except PeerDiedError:
            self.bounced(future)
        except BaseException:
            self.dropped(future)
            raise
        else:
            if awaits:
                ReservedCall(self, future, template, call)

    def ended_unsent(self, future: ResultFuture, error: BaseException) -> None:
        """End a call that could not be sent."""
        self.flying.pop(future._number, None)
        pending = future._pending
        if (
            pending is not None
            and pending.may_have_run
            and isinstance(error, (CancelledError, LostArgumentError))
        ):
            error.maybe_executed = True  # in an earlier try
        future.end(error.with_traceback(None), self.agent.submit)
        if self.barrier is not None:
            self.passed(future._number)

    def dropped(self, future: ResultFuture) -> None:
        """Forget a call that could not be made; its caller gets the error."""
        self.flying.pop(future._number, None)
        future._route = None
        if self.barrier is not None:
            self.passed(future._number)

    def bounced(self, future: ResultFuture) -> None:
        """Take back a call that was not sent, because its worker is dead."""
        # Where the end of the worker has found the call already, that tells us (``caught``).
        if future.claim():
            template = future._template
            assert template is not None
            # The queue sends it when the actor lives again, or puts this into words.
            future.label = f"the call of {template.label}"
            self._take_back(future, template, ran=False, lost=True)

    def enqueue(
        self,
        future: ResultFuture,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seconds: float,
        unresolved: bool,
    ) -> None:
        """Let a call wait until it is known where the actor is.

        Raises:
            SerializationError: an argument cannot be sent.
        """
        template = future._template
        assert template is not None
        future.label = f"the call of {template.label}"
        if self.death is not None:
            future.end(self.died(template, maybe_executed=False), None)
            return
        held = PendingCall.hold(args, kwargs)
        future.source = pending = PendingCall(future, held, unresolved, seconds, template.tries)
        self._arm(pending)
        crowd: Future[None] | None = None
        with self._lock:
            death = self.death
            refused = death is None and template.impatient and self._restarting
            if death is None and not refused:
                pending.rest()
                heapq.heappush(self._queue, (future._number, future))
                if self._peer is None:
                    self._ask_soon()
                elif self._draining:
                    if len(self._queue) > _CROWD:
                        crowd = self._drained = self._drained or Future()
                else:
                    self._go()
        if pending.unwanted:
            pending.cancel()  # the call that it is nested in was cancelled before it was in the queue
        if death is not None:
            future.end(self.died(template, maybe_executed=False), self.agent.submit)
        elif refused:
            future.end(self.unavailable(template, pending.may_have_run), self.agent.submit)
        elif crowd is not None and asyncio._get_running_loop() is None:
            # One thread sends the queue, and would never catch up with many that add to it.
            try:
                crowd.wait(_HOLD_UP_S)
            except RpcError:
                pass

    @property
    def _restarting(self) -> bool:
        """Whether the actor is known to be dead and to be restarted, and not yet to live again; the lock is held."""
        verdict = self._verdict
        return verdict is not None and not verdict.moved and self._peer is None

    def _arm(self, pending: PendingCall) -> None:
        if pending.deadline != INFINITE and pending.timer is None:
            submit = self.agent.submit
            pending.timer = self.agent.clock.at(pending.deadline, lambda: submit(pending.expire))

    def swept(self) -> None:
        """Record that a call in the queue is over."""
        with self._lock:
            self._stale += 1
            if self._stale > 32 and self._stale > len(self._queue) // 2:
                self._queue = [entry for entry in self._queue if not entry[1].completed]
                heapq.heapify(self._queue)
                self._stale = 0

    # -- calls that come back ----------------------------------------------------------------------------

    def caught(self, future: ResultFuture, error: BaseException) -> bool:
        """Take over a call that has failed, if that is the actor's failure or it may be made again.

        The caller has claimed the future, and stops when this returns True. Quick, and calls no user code.
        """
        template = future._template
        if template is None:
            return False
        kind = type(error)
        if kind is PeerDiedError:
            ran, lost = error.maybe_executed is not False, True  # type: ignore[attr-defined]
        elif isinstance(error, HostedActorGoneError):
            ran, lost = getattr(exceptions.original(error), "maybe_executed", False) is not False, True
        elif (
            template.retried
            and template.tries
            and future._pending is not None
            and self.is_retried(template.retried, error)
        ):
            if future._pending.tries == 0:
                return False
            ran, lost = True, False
        else:
            return False
        self._take_back(future, template, ran, lost)
        return True

    @staticmethod
    def is_retried(retried: bool | tuple[type[BaseException], ...], error: BaseException) -> bool:
        """Say whether what a method has raised is a reason to call it again, where ``retry_exceptions`` is ``retried``."""
        if not isinstance(error, RemoteError) or isinstance(error, (*_FINAL, HostedActorGoneError)):
            return False
        return retried is True or (retried is not False and is_a(error, retried))

    def _take_back(self, future: ResultFuture, template: CallTemplate, ran: bool, lost: bool) -> None:
        """Put a call, whose future is claimed, back into the queue or among those that wait for the verdict."""
        pending = future._pending
        again = False
        if pending is not None:
            if not lost and (pending.place is None or pending.place[1] != template.epoch):
                call: Any = future.source
                pending.place = call.id, template.epoch
            if ran:
                pending.may_have_run = True
                if pending.tries:
                    again = True
                    if pending.tries > 0:
                        pending.tries -= 1
            else:
                again = True
        number = future._number
        with self._lock:
            # It is pending again, and may be ended by anybody who claims it: before it has a source that says so.
            future.disclaim()
            self.flying.pop(number, None)
            if lost:
                self._lost(template.epoch, number, template.label)
            if self.barrier is not None:
                self.passed(number)
            if again and pending is not None and self.death is None:
                future.source = pending
                pending.rest()
                heapq.heappush(self._queue, (number, future))
                self._arm(pending)
                if not lost:
                    self._hold_back()
                if self._peer is None:
                    self._ask_soon()  # the last answer may have come before this call was taken back
                else:
                    self._go()
            else:
                again = False
                ran = ran or (pending is not None and pending.may_have_run)
                future.source = awaiting = AwaitingVerdict(future, template, ran, self.agent.submit)
                self._failing.append(awaiting)
                if not self._asking or self._verdict is not None:
                    self.agent.submit(self._fail)
            source = future.source
        if pending is not None and pending.unwanted and source is not None:
            source.cancel()  # the thread that has cancelled it found neither the call nor what it is now

    def _hold_back(self) -> None:
        """Let new calls queue; the lock is held."""
        self._ready = False
        self.templates, self.kept_templates = {}, {}

    def doomed(self) -> None:
        """Record that somebody here has killed the actor: no further call goes to the incarnation that lived."""
        with self._lock:
            location = self.location
            if location is not None:
                self._hint = False
                self._lost(location.epoch, 1 << 63, "")

    def is_gone(self, epoch: int) -> bool:
        """Say whether an incarnation of the actor is known to have ended, or to be about to."""
        return epoch <= self._after

    def _lost(self, epoch: int, number: int, label: str) -> None:
        """Record that an incarnation is gone; the lock is held."""
        location = self.location
        if self.death is not None or location is None or location.epoch > epoch:
            return  # known already
        self._hold_back()
        self.location = self._peer = None
        self._after = epoch
        self._verdict = None
        flying: dict[int, ResultFuture] = {
            each: future
            for each, future in list(self.flying.items())
            if future._template is not None and future._template.epoch <= epoch
        }
        self._oldest = label
        if flying:
            first = min(flying)
            oldest = flying[first]._template
            if first < number and oldest is not None:
                self._oldest = oldest.label
            self.barrier = set(flying)
            lift, submit = partial(self._lift, epoch), self.agent.submit
            self.agent.clock.after(_BARRIER_S, lambda: submit(lift))
        self._ask_soon()

    def passed(self, number: int) -> None:
        """Record that a call to a former incarnation is accounted for."""
        with self._lock:
            barrier = self.barrier
            if barrier is not None:
                barrier.discard(number)
                if not barrier:
                    self.barrier = None
                    self._go()

    def _lift(self, epoch: int) -> None:
        """Wait no longer for calls to a former incarnation: one of them may go on there for hours."""
        with self._lock:
            if self.barrier is not None and self._after == epoch:
                self.barrier = None
                self._go()

    # -- sending the queue ---------------------------------------------------------------------------------

    def _go(self) -> None:
        """Begin to send the queue, if it is time; the lock is held."""
        if self._peer is None or self.barrier is not None or self._draining:
            return
        if self._queue:
            self._draining = True
            self._hold_back()
            self.agent.submit(self._drain)
        else:
            self._ready = True

    def _drain(self) -> None:
        """Send the queue, in order; on a pool thread, one at a time."""
        while True:
            with self._lock:
                location, peer = self.location, self._peer
                if not self._queue or location is None or peer is None or self.barrier is not None:
                    self._draining = False
                    self._ready = peer is not None and self.barrier is None
                    drained, self._drained = self._drained, None
                    break
                future = heapq.heappop(self._queue)[1]
                pending = future._pending
                free = pending is not None and pending.take()
                if not free:
                    self._stale = max(0, self._stale - 1)
            if free and pending is not None:
                pending.context.run(self._resend, future, pending, location, peer)
        if drained is not None:
            drained.set_result(None)

    def _resend(self, future: ResultFuture, pending: PendingCall, location: Location, peer: Peer) -> None:
        unplaced = future._template
        assert unplaced is not None
        try:
            if pending.unwanted:
                pending.rest()
                pending.cancel()
                return
            seconds = 0.0
            if pending.deadline != INFINITE:
                seconds = pending.deadline - self.agent.clock.now()
                if seconds <= 0:
                    pending.rest()
                    pending.expire()
                    return
            timer, pending.timer = pending.timer, None
            if timer is not None:
                timer.cancel()
            args, kwargs, unresolved = *PendingCall.opened(pending.arguments), pending.unresolved
            if unresolved:
                args, kwargs, unresolved = pack_arguments(args, kwargs)
            template = future._template = unplaced.at(self, location, peer)
            self.launch(future, template, args, kwargs, seconds, unresolved)
        except BaseException as error:
            self.ended_unsent(future, error)
            if is_of_handler(error):
                raise
            return
        if pending.unwanted:  # it was cancelled between leaving the queue and being sent
            future.cancel()

    # -- asking the supervisor -------------------------------------------------------------------------------

    def located(self) -> Future[Location]:
        """Return a future for where the actor lives."""
        answer: Future[Location] = Future()
        answer.label = f"the location of {self.title}"
        if self.location is None and self.supervisor == self.runtime.references.me:
            self._ask_here()
        with self._lock:
            death, location = self.death, self.location
            if death is None and location is None:
                self._waiters.append(answer)
                self._ask_soon()
        if death is not None:
            answer.set_exception(self.died(None, maybe_executed=None))
        elif location is not None:
            answer.set_result(location)
        return answer

    def _ask_here(self) -> None:
        """Ask the supervisor, which is in this process: no thread has to be woken for that."""
        with self._lock:
            asks = not self._asking and self._peer is None and self.death is None
            self._asking = self._asking or asks
        if asks:
            self._ask(False)

    def _ask_soon(self) -> None:
        """Have the supervisor asked; the lock is held."""
        if not self._asking:
            self._asking = True
            self.agent.submit(partial(self._ask, False))

    def _ask(self, wait: bool) -> None:
        asked = ask(
            self.runtime,
            self.supervisor,
            "locate",
            self.actor_id,
            self._after,
            wait,
        )
        asked.add_done_callback(self._answered)

    def _answered(self, done: Future[Any]) -> None:
        done.acknowledge()
        error, value = done.error, done.value_or_none
        if error is None:
            if isinstance(value, Location):
                self._arrived(value)
            else:
                with self._lock:
                    self._verdict = value
                    self._turn_away()
                self._fail()
                self._ask(True)
            return
        original = exceptions.original(error)
        if is_a(original, ActorDiedError):
            self._die(original)
        elif type(error) is PeerDiedError or isinstance(error, UnknownWorkerError):
            self._die(self.orphaned(error))
        elif isinstance(error, (ShutdownError, NotInitializedError)):
            # This process ends as well, or this actor does: nobody need look at what that ends.
            self._give_up(lambda template, ran: error, known=True)
        else:
            self._give_up(
                lambda template, ran: self.unavailable(template, ran, f"its supervisor says: {say(original)}")
            )

    def _arrived(self, location: Location) -> None:
        peer: Peer | None
        try:
            peer = peer_of(self.agent, location.worker)
        except RpcError:
            peer = None
        with self._lock:
            self._asking = False
            if self.death is not None:
                return
            if peer is None:  # gone again: those that wait for a location hear of that, too
                self._after = max(self._after, location.epoch)
                if self._queue or self._waiters or self._failing:
                    self._ask_soon()
                return
            # Those of the former incarnation: queued calls are sent from here on, and may fail in a moment.
            failing, self._failing = self._failing, []
            self.location, self._peer = location, peer
            waiters, self._waiters = self._waiters, []
            self._go()
        self._end(failing)
        for waiter in waiters:
            waiter.set_result(location)

    def orphaned(self, error: BaseException) -> ActorDiedError:
        """Return the death of an actor whose supervisor cannot be asked."""
        return death_errors.orphaned(self.title, self.actor_id, self.supervisor_name, error)

    # -- the ends of calls ------------------------------------------------------------------------------------

    def _fail(self) -> None:
        """End the calls that cannot be made again, as it is known now what has become of the actor."""
        with self._lock:
            failing, self._failing = self._failing, []
        self._end(failing)

    def _end(self, failing: list[AwaitingVerdict]) -> None:
        dead = self.death is not None
        for awaiting in failing:
            template, ran = awaiting.template, awaiting.ran
            awaiting.end(
                self.died(template, maybe_executed=ran) if dead else self.unavailable(template, ran, "")
            )

    def _turn_away(self) -> None:
        """Take those calls out of the queue that do not wait for a restart, to be failed; the lock is held."""
        if not self._restarting:
            return
        kept = []
        for entry in self._queue:
            _, future = entry
            template, pending = future._template, future._pending
            if template is None or pending is None or not template.impatient or not pending.take():
                kept.append(entry)
                continue
            future.source = awaiting = AwaitingVerdict(
                future, template, pending.may_have_run, self.agent.submit
            )
            self._failing.append(awaiting)
        heapq.heapify(kept)
        self._queue = kept

    def _die(self, death: ActorDiedError) -> None:
        self._give_up(lambda template, ran: self.died(template, maybe_executed=ran), death)

    def _give_up(
        self,
        error_of: Callable[[CallTemplate | None, bool | None], BaseException],
        death: ActorDiedError | None = None,
        known: bool = False,
    ) -> None:
        """End every call that waits; ``known``: none is reported where nobody looks at its error."""
        with self._lock:
            self._asking = False
            if death is not None:
                self.death = death
                self._hold_back()
                self.location = self._peer = None
                self.barrier = None
            queue, self._queue = self._queue, []
            self._stale = 0
            failing, self._failing = self._failing, []
            waiters, self._waiters = self._waiters, []
        submit = self.agent.submit
        for awaiting in failing:
            awaiting.end(error_of(awaiting.template, awaiting.ran))
        for _, future in sorted(queue):
            pending, template_ = future._pending, future._template
            if pending is not None and pending.take():
                future.end(error_of(template_, pending.may_have_run), submit)
                if known:
                    future.acknowledge()
        for waiter in waiters:
            waiter.set_exception(error_of(None, None))

    def close(self) -> None:
        """End every call that waits, with ShutdownError."""
        self._give_up(
            lambda template, ran: ShutdownError(
                f"{self.title if template is None else f'the call of {template.label}'}: this worker shut down",
                maybe_executed=ran,
                worker=self.agent.name,
            )
        )

    def died(self, template: CallTemplate | None, *, maybe_executed: bool | None) -> ActorDiedError:
        """Return a fresh error that says how the actor died, and what became of a call."""
        assert self.death is not None
        return death_errors.died(self.title, self.death, template, maybe_executed, self._oldest)

    def unavailable(
        self, template: CallTemplate | None, ran: bool | None, why: str = ""
    ) -> ActorUnavailableError:
        """Return the error of a call that is not made again; ``why``: by default what the supervisor has said."""
        if not why:
            why = "it is being restarted" if self.location is None else "it has been restarted"
        return death_errors.unavailable(self.title, self.actor_id, self._verdict, template, ran, why)
