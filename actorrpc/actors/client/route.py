"""Routes: the caller's side of an actor. Every handle has one; calls go through it.

There are at most two routes to an actor in a process: one that keeps the actor alive (it has the anchor) and one that does not
(for handles got by name). Both share a :class:`~actorrpc.actors.client.call_queue.CallQueue`, which knows where the actor is
and keeps its calls in order.

:meth:`Route.call` is on the path of every call: where the actor is known to live and nothing special was asked for, it
takes no lock and costs a fraction of what sending the call does.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from actorrpc._exception_text import is_of_handler
from actorrpc.actors.client.call_queue import CallQueue
from actorrpc.actors.client.call_template import CallTemplate
from actorrpc.actors.client.pending_call import PendingCall, ResultFuture, RpcFuture
from actorrpc.actors.client.supervisor_client import ask
from actorrpc.actors.refs.arguments import has_refs, pack_arguments
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.spec.actor_spec import Card, HostedActorGoneError, Location
from actorrpc.actors.spec.class_info import MethodInfo
from actorrpc.actors.spec.options import CallOptions
from actorrpc.actors.streams.consumer import Again, ObjectRefGenerator
from actorrpc.actors.streams.spread import spread
from actorrpc.agent.calls import CURRENT
from actorrpc.agent.hooks import profiler, thread_is_profiled
from actorrpc.errors import ActorDiedError, PeerDiedError, PendingCallsLimitExceeded, SerializationError
from actorrpc.futures import INTERRUPTED, Future, InnerFuture, interruption_point
from actorrpc.rpc.profiling import ProfiledSpan
from actorrpc.serialization import exceptions

if TYPE_CHECKING:
    from actorrpc.actors.context import Runtime
    from actorrpc.actors.spec.class_info import ClassInfo
    from actorrpc.agent.peers import Peer
    from actorrpc.rpc.rref import RRef

__all__ = ["Route", "Routes", "shaped"]


def shaped(
    future: Future[Any],
    info: MethodInfo,
    options: CallOptions,
    explain: Callable[..., BaseException | Future[Any]],
    again: Again | None,
    label: object = None,
) -> Any:
    """Return what ``remote`` gives for a call: an ObjectRef, several, none, or a stream.

    Args:
        explain: says what the end of a stream's worker means, as :meth:`Route.explain`.
        again: makes a call again that gives a stream.
    """
    count = options.num_returns
    if count == "streaming" or info.streams:
        translate = partial(explain, info, options)
        stream: ObjectRefGenerator[Any] = ObjectRefGenerator(future, translate=translate, again=again)
        return spread(stream, count) if isinstance(count, int) and count > 1 else stream
    if count == 1:
        return ObjectRef(future, label=label)
    return [ObjectRef(each, label=label) for each in _split(future, count)] if count else None


def _split(future: Future[Any], count: int) -> list[Future[Any]]:
    """Return one future for each value that the call returns."""
    parts: list[Future[Any]] = [InnerFuture() for _ in range(count)]
    for at, part in enumerate(parts):
        part.label = f"value {at} of {future.label}"
        part.source = future

    def done(whole: Future[Any]) -> None:
        error: BaseException | None = None
        values: list[Any] = [None] * count
        try:
            result = whole.value()
            if isinstance(result, (tuple, list)) and len(result) == count:
                values = list(result)
            else:
                shown = len(result) if isinstance(result, (tuple, list)) else f"one {type(result).__name__}"
                error = ValueError(
                    f"{whole.label} was to return {count} values (num_returns), but returned {shown}"
                )
        except BaseException as raised:
            error = raised
        for part, value in zip(parts, values, strict=True):
            if error is None:
                part.try_complete(value)
            else:
                part.follow(parts[0], error)  # one failure: looking at any part will do

    future.add_done_callback(done)
    return parts


def _has_died(error: BaseException) -> bool:
    """Say whether an error of a stream is the end of its actor's process."""
    return type(error) is PeerDiedError or isinstance(error, HostedActorGoneError)


class Route:
    """The way to one actor. Thread-safe. The actor lives at least as long as a route with an anchor.

    Attributes:
        anchor: the RRef that keeps the actor alive, or None.
        actor_id: the actor's, for ever.
        queue: this process's calls of the actor.
        title: what messages call the actor.
        info: what is known of its class.
    """

    __slots__ = ("__weakref__", "_card", "actor_id", "anchor", "info", "queue", "title")

    def __init__(self, queue: CallQueue, card: Card) -> None:
        self.queue = queue
        self._card = card
        self.anchor: RRef[Any] | None = card.anchor
        self.actor_id = card.actor_id
        self.info: ClassInfo = card.info
        self.title = card.title

    @property
    def card(self) -> Card:
        """What a handle travels as: the actor's card, with its present location as far as it is known."""
        location, card = self.queue.location, self._card
        if card.location is not location:
            card = self._card = replace(card, location=location)
        return card

    @property
    def pending(self) -> int:
        """How many calls of this process are under way, or wait."""
        return self.queue.pending

    # -- calling -----------------------------------------------------------------------------------------

    def call(
        self,
        method: MethodInfo,
        options: CallOptions,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        refs: bool,
        timeout: float | None = None,
    ) -> ResultFuture:
        """Call a method. The arguments are taken as they are now.

        Args:
            options: how; the same object for equal calls, which are the faster for it.
            refs: a large result may stay with the actor: the future's value is then a ``StoredResult``.
            timeout: seconds; None: that of the options, and if that is None, none for ``refs`` and the group's for
                others; 0: none.

        Returns:
            A future, which fails with ActorDiedError or ActorUnavailableError where the actor does not answer.

        Raises:
            SerializationError, LimitError: an argument cannot be sent.
            PendingCallsLimitExceeded: more calls wait than ``max_pending_calls`` allows.
            BackpressureError, ShutdownError, CancelledError: nothing was sent.
        """
        if INTERRUPTED:
            interruption_point()
        queue = self.queue
        template = (queue.kept_templates if refs else queue.templates).get(method.name)
        if template is None or template.options is not options:
            queue.agent.check_process()
            template = queue.template_for(method, options, refs)
        if 0 <= queue.max_pending <= queue.pending:
            raise self._too_many(template)
        future = (ResultFuture if refs else RpcFuture)(self, template)
        seconds = template.seconds if timeout is None else timeout
        unresolved = False
        span = self._span(template, future) if profiler._is_profiler_enabled or thread_is_profiled() else None
        try:
            if ObjectRef in map(type, args) or (kwargs and has_refs(args, kwargs)):
                try:
                    args, kwargs, unresolved = pack_arguments(args, kwargs)
                except BaseException as error:
                    future.end(error)
                    if is_of_handler(error):
                        future.acknowledge()  # nobody gets it
                        raise
                    return future
            if template.peer is None:
                queue.enqueue(future, args, kwargs, seconds, unresolved)
            else:
                if template.tries or template.returns:
                    held = PendingCall.hold(args, kwargs, cheaply=not template.tries)
                    if held is not None:
                        PendingCall(future, held, unresolved, seconds)
                queue.launch(future, template, args, kwargs, seconds, unresolved)
        except BaseException as error:
            if template.peer is not None:
                queue.dropped(future)
            if span is not None:
                span.close()
            queue.agent.check_process()  # in a fork, that is what is wrong
            if isinstance(error, SerializationError):
                method.signature.name_argument(error)
            raise
        return future

    def _span(self, template: CallTemplate, future: ResultFuture) -> ProfiledSpan:
        # Where the actor lives may not be known, and change before the call gets there: its name says it for the profile.
        span = ProfiledSpan(f"actor#{template.label}({self.queue.agent.name} -> {self.title})")
        future.add_done_callback(lambda _: span.close())
        return span

    def _too_many(self, template: CallTemplate) -> PendingCallsLimitExceeded:
        queue = self.queue
        return PendingCallsLimitExceeded(
            f"{template.label}: {queue.pending} calls of this process wait for {self.title} already, as many as "
            f"max_pending_calls={queue.max_pending} allows; this one was not made. Wait for results first, or give a "
            "higher limit",
            maybe_executed=False,
            actor=self.title,
            actor_id=self.actor_id,
            method=template.method.name,
        )

    def keep(
        self,
        method: MethodInfo,
        options: CallOptions,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None = None,
    ) -> RRef[Any]:
        """Call a method whose result stays with the actor; return an RRef to it at once.

        The call is never repeated, as the RRef names the worker where the actor lives now. Waits while the actor is being made or
        restarted.

        Args: as of :meth:`call`.

        Raises: as :meth:`call`, and ActorDiedError or RpcTimeoutError where the actor does not live in time.
        """
        if INTERRUPTED:
            interruption_point()
        queue = self.queue
        template = queue.template_for(method, options, False)
        seconds = template.seconds if timeout is None else timeout
        if template.peer is None:
            self.located().wait(seconds or None)
            location, peer = queue.whereabouts()
            if location is None or peer is None:
                raise queue.unavailable(template, False)
            template = template.at(queue, location, peer)
        args, kwargs, unresolved = pack_arguments(args, kwargs)
        future = RpcFuture(self, template)
        queue.flying[future.number] = future
        references, mail = queue.runtime.references, template.mail_for(unresolved)
        try:
            return references.create(  # type: ignore[no-any-return]
                template.peer, None, args, kwargs, seconds, template.label, mail=mail, future=future
            )
        except BaseException as error:
            queue.dropped(future)
            if isinstance(error, SerializationError):
                method.signature.name_argument(error)
            raise

    def again(
        self, method: MethodInfo, options: CallOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[BaseException, int], Future[Any] | None] | None:
        """Return what makes a call again whose stream has failed with an error, after so many items; None: nobody is to.

        It is made again, after an exception that is a reason for that or the death of its process, as long as it has given
        nothing; later only where the method itself says that its exceptions are a reason, since what it gives is then made
        a second time.

        Raises:
            SerializationError: an argument cannot be sent.
        """
        left = options.max_task_retries
        streams = method.streams or options.num_returns == "streaming"
        if not left or not streams:
            return None
        held = PendingCall.hold(args, kwargs)
        tries = itertools.count() if left < 0 else iter(range(left))
        queue = self.queue

        def again(error: BaseException, given: int) -> Future[Any] | None:
            if given and not method.given.get("retry_exceptions"):
                return None
            retried = _has_died(error) or queue.is_retried(options.retry_exceptions, error)
            if not retried or next(tries, None) is None:
                return None
            args, kwargs = PendingCall.opened(held)
            return self.call(method, options, args, kwargs, refs=True)

        return again

    def explain(
        self, method: MethodInfo, options: CallOptions, error: BaseException, peer: Peer | None
    ) -> BaseException | Future[Any]:
        """Say what it means that a stream of the actor has broken off with an error.

        Args:
            peer: the worker that it came from.

        Returns:
            The error to raise, or a future that fails with it when it is known what has become of the actor.
        """
        queue = self.queue
        template = queue.template_for(method, options, False)
        location, there = queue.whereabouts()
        if template.peer is None and location is not None and there is not None:
            # Its queue is being sent, and a call made now would wait for that.
            template = template.at(queue, location, there)
        if type(error) is PeerDiedError:
            # Not by the state of its worker: a connection may be known to be broken before the worker is known to be dead.
            lives = there is not None and (
                peer is None or there.record.incarnation != peer.record.incarnation
            )
        elif isinstance(error, HostedActorGoneError):
            gone = exceptions.original(error)
            former = getattr(gone, "instance_id", None)
            lives = location is not None and former is not None and location.instance_id != former
        else:
            return error
        if lives:  # again
            return queue.unavailable(template, True)
        future = RpcFuture(self, template)
        queue.flying[future.number] = future
        future.label = f"the stream of {template.label}"
        future.try_fail(error)
        return future

    # -- where and whether it is --------------------------------------------------------------------------

    def located(self) -> Future[Location]:
        """Return a future for where the actor lives: complete when it has been constructed (again).

        It fails with ActorDiedError if the actor is dead, with the constructor's error as ``cause`` where that is why.
        """
        return self.queue.located()

    @property
    def location(self) -> Location | None:
        """Where the actor lives, if that is known here."""
        return self.queue.location

    def alive(self) -> Future[bool]:
        """Return a future that says whether the actor lives, or is being made or restarted, as its supervisor knows it."""
        answer: Future[bool] = Future()
        answer.label = f"whether {self.title} is alive"

        def ready(done: Future[Any]) -> None:
            done.acknowledge()
            # A supervisor that is gone takes its actors along.
            answer.set_result(done.error is None and bool(done.value_or_none))

        self._ask("alive").add_done_callback(ready)
        return answer

    def kill(self, no_restart: bool = True) -> Future[None]:
        """End the actor at once; calls that this process makes when the future is complete do not reach it any more.

        Idempotent. The future fails with PeerDiedError if the actor's supervisor is gone.
        """
        killed: Future[None] = Future()
        killed.label = f"kill() of {self.title}"

        def ready(done: Future[Any]) -> None:
            done.acknowledge()
            if done.error is None:
                self.queue.doomed()
                killed.set_result(None)
            else:
                killed.set_exception(done.error)

        self._ask("kill", no_restart).add_done_callback(ready)
        return killed

    def watch(self) -> Future[ActorDiedError]:
        """Return a future that completes, with the error as its value, when the actor is dead for good.

        Each such future completes exactly once, also where the actor is dead already.
        """
        answer: Future[ActorDiedError] = Future()
        answer.label = f"the end of {self.title}"
        queue = self.queue

        def ready(done: Future[Any]) -> None:
            done.acknowledge()
            if done.error is None:
                answer.follow(done)
            else:
                answer.set_result(queue.fate.orphaned(done.error))

        # It outlives the call that it is asked for in.
        token = CURRENT.set(None)
        try:
            asked = self._ask("watch")
        finally:
            CURRENT.reset(token)
        asked.add_done_callback(ready)
        return answer

    def _ask(self, what: str, *args: Any) -> Future[Any]:
        queue = self.queue
        return ask(queue.runtime, queue.card.supervisor, what, self.actor_id, *args)

    def __repr__(self) -> str:
        return f"<{'Route' if self.anchor is not None else 'Weak route'} to {self.title}>"


class Routes:
    """The routes of one process. Thread-safe.

    ``_lock`` guards both tables; it is re-entrant, as the collector may run there. The tables hold nothing alive.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.RLock()
        self._lines: weakref.WeakValueDictionary[int, CallQueue] = weakref.WeakValueDictionary()
        self._routes: weakref.WeakValueDictionary[tuple[int, bool], Route] = weakref.WeakValueDictionary()

    def of(self, card: Card) -> Route:
        """Return the route to the actor of a card: the one with an anchor if the card has one."""
        key = (card.actor_id, card.anchor is not None)
        route = self._routes.get(key)
        if route is not None:
            return route
        with self._lock:
            queue = self._lines.get(card.actor_id)
            if queue is None:
                queue = self._lines[card.actor_id] = CallQueue(self._runtime, card)
            route = self._routes.get(key)
            if route is None:
                route = self._routes[key] = Route(queue, card)
        return route

    def close(self) -> None:
        """Fail every call that waits, with ShutdownError: this process leaves the group."""
        for queue in list(self._lines.values()):
            queue.close()
