"""Routes: the caller's side of an actor. Every handle has a route, which makes the handle's calls.

A process has at most two routes to an actor: one with the anchor, which keeps the actor alive, and one without (for handles
from :func:`actorrpc.get_actor`). Both share a :class:`~actorrpc.actors.client.call_queue.CallQueue`, which records the location
of the actor and keeps the order of calls.

:meth:`Route.call` is on the path of every call. If the actor's location is known and the call has no special options, the method
takes no lock before it sends the call, and its cost is small compared with sending.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from actorrpc._exceptions import is_of_handler, undo_on_error
from actorrpc._torch import profiler, thread_is_profiled
from actorrpc.actors.client.call_queue import CallQueue
from actorrpc.actors.client.call_template import CallTemplate
from actorrpc.actors.client.pending_call import PendingCall, ResultFuture, RpcFuture, pack_arguments
from actorrpc.actors.client.supervisor_client import query
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.spec.actor_spec import ActorDescriptor, HostedActorGoneError
from actorrpc.actors.spec.class_info import MethodInfo
from actorrpc.actors.spec.options import CallOptions
from actorrpc.actors.streams.consumer import Again, ObjectRefGenerator
from actorrpc.actors.streams.spread import spread
from actorrpc.agent.calls import CURRENT
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
    """Return the result of ``remote``: an ObjectRef, a list of ObjectRefs, None, or an ObjectRefGenerator (a stream).

    Args:
        explain: returns the error to raise if the worker of the stream ends; see :meth:`Route.explain`.
        again: repeats the call if its stream has failed before the first item; see :meth:`Route.again`.
        label: the name of the result in messages; by default the label of ``future``.
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
    """Return one future for each of the ``count`` values that the call returns as a tuple or list."""
    parts: list[Future[Any]] = [InnerFuture() for _ in range(count)]
    for at, part in enumerate(parts):
        part.label = f"value {at} of {future.label}"
        part.source = future

    def check(whole: Future[Any]) -> Sequence[Any]:
        result = whole.value()
        if isinstance(result, (tuple, list)) and len(result) == count:
            return result
        shown = len(result) if isinstance(result, (tuple, list)) else f"one {type(result).__name__}"
        raise ValueError(f"{whole.label} must return {count} values (num_returns), but returned {shown}")

    def done(checked: Future[Sequence[Any]]) -> None:
        for at, part in enumerate(parts):
            if checked.error is None:
                part.try_complete(checked.value()[at])
            else:
                part.follow(checked)  # retrieving the error from one part marks it as seen for all

    future.then(check).add_done_callback(done)
    return parts


def _packed(
    future: ResultFuture, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool] | None:
    """Like :func:`pack_arguments`, but if an ObjectRef has failed, fail ``future`` with the same error and return None."""
    try:
        return pack_arguments(args, kwargs)
    except BaseException as error:
        future.fail_unsent(error)
        if is_of_handler(error):
            future.acknowledge()  # the caller does not get the future, so its error cannot be retrieved
            raise
        return None


class Route:
    """Makes the calls and queries of this process to one actor. A route with an anchor keeps the actor alive. Thread-safe.

    Attributes:
        anchor: the RRef that keeps the actor alive, or None.
        queue: this process's calls to the actor.
        title: the name of the actor in messages.
        info: describes the actor's class.
    """

    __slots__ = ("__weakref__", "_descriptor", "actor_id", "anchor", "info", "queue", "title")

    def __init__(self, queue: CallQueue, descriptor: ActorDescriptor) -> None:
        self.queue = queue
        self._descriptor = descriptor
        self.anchor: RRef[Any] | None = descriptor.anchor
        self.actor_id = descriptor.actor_id
        self.info: ClassInfo = descriptor.info
        self.title = descriptor.title

    @property
    def descriptor(self) -> ActorDescriptor:
        """The actor's descriptor, with its present location if this process knows it. Handles are sent as descriptors."""
        location, descriptor = self.queue.location, self._descriptor
        if descriptor.location is not location:
            descriptor = self._descriptor = replace(descriptor, location=location)
        return descriptor

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
        """Call a method with the arguments as they are now.

        Args:
            options: the options of the call. Calls with the same options object share a template, and are faster.
            refs: a large result may stay on the actor's worker: the future's value is then a Snapshot or a ``StoredResult``.
            timeout: seconds; 0: no time-out; None: as in the options, or else the group's default (with ``refs``: no time-out).

        Returns:
            A future, which fails with ActorDiedError or ActorUnavailableError if the actor does not answer.

        Raises:
            SerializationError, LimitError: an argument cannot be sent.
            PendingCallsLimitExceeded, BackpressureError, ShutdownError, CancelledError: the call was not sent.
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
            if ObjectRef in map(type, args) or (kwargs and ObjectRef in map(type, kwargs.values())):
                packed = _packed(future, args, kwargs)
                if packed is None:
                    return future
                args, kwargs, unresolved = packed
            if template.peer is None:
                queue.enqueue(future, args, kwargs, seconds, unresolved)
            else:
                if template.tries or template.survives_restart:
                    held = PendingCall.hold(args, kwargs, cheaply=not template.tries)
                    if held is not None:
                        PendingCall(future, held, unresolved, seconds)
                queue.launch(future, template, args, kwargs, seconds, unresolved)
        except BaseException as error:
            if template.peer is not None:
                queue.dropped(future)
            if span is not None:
                span.close()
            queue.agent.check_process()  # in a forked process, this raises the error that explains the fork
            if isinstance(error, SerializationError):
                method.signature.name_argument(error)
            raise
        return future

    def _span(self, template: CallTemplate, future: ResultFuture) -> ProfiledSpan:
        # The profile names the actor, not its worker, because the worker may be unknown, and may change before the call is sent.
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
        """Call a method whose result stays on the actor's worker; return an RRef to the result at once.

        The call is never repeated, because the RRef names the worker where the actor lives now. Blocks while the actor is being
        made or restarted: RpcTimeoutError if that takes too long, ActorDiedError if the actor dies. Otherwise as :meth:`call`.
        """
        if INTERRUPTED:
            interruption_point()
        queue = self.queue
        template = queue.template_for(method, options, False)
        seconds = template.seconds if timeout is None else timeout
        if template.peer is None:
            queue.located().wait(seconds or None)
            place = queue.place
            if place is None:
                raise queue.unavailable(template, False)
            template = template.at(queue, place)
        args, kwargs, unresolved = pack_arguments(args, kwargs)
        future = RpcFuture(self, template)
        queue.in_flight[future.number] = future
        references, mail = queue.runtime.references, template.mail_for(unresolved)
        try:
            with undo_on_error(partial(queue.dropped, future)):
                return references.create(  # type: ignore[no-any-return]
                    template.peer, None, args, kwargs, seconds, template.label, mail=mail, future=future
                )
        except SerializationError as error:
            method.signature.name_argument(error)
            raise

    def again(
        self, method: MethodInfo, options: CallOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Again | None:
        """Return a function that repeats a call whose stream failed before the first item; None without streams or retries.

        The function gets the error of the stream. It returns the future of a new call if the actor or its process has ended, or
        ``retry_exceptions`` names the error; otherwise, or if no retry is left, None.

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

        def again(error: BaseException) -> Future[Any] | None:
            has_died = type(error) is PeerDiedError or isinstance(error, HostedActorGoneError)
            retried = has_died or queue.is_retried(options.retry_exceptions, error)
            if not retried or next(tries, None) is None:
                return None
            args, kwargs = PendingCall.opened(held)
            return self.call(method, options, args, kwargs, refs=True)

        return again

    def explain(
        self, method: MethodInfo, options: CallOptions, error: BaseException, peer: Peer | None
    ) -> BaseException | Future[Any]:
        """Return the error to raise to the reader of a stream that failed with ``error``.

        Args:
            peer: the worker that sends the stream; None if it is unknown.

        Returns:
            The error, or a future that fails with it when it is known whether the actor is dead or restarts.
        """
        queue = self.queue
        template = queue.template_for(method, options, False)
        place = queue.place
        if template.peer is None and place is not None:
            # The queue is being sent or has a barrier, so template_for() has returned a template for queued calls.
            template = template.at(queue, place)
        if type(error) is PeerDiedError:
            # Compare the incarnations of workers. `peer.state` may still be "alive" after the connection has broken.
            lives = place is not None and (
                peer is None or place[1].record.incarnation != peer.record.incarnation
            )
        elif isinstance(error, HostedActorGoneError):
            gone = exceptions.original(error)
            former = getattr(gone, "instance_id", None)
            lives = place is not None and former is not None and place[0].instance_id != former
        else:
            return error
        if lives:  # a newer incarnation
            return queue.unavailable(template, True)
        future = RpcFuture(self, template)
        queue.in_flight[future.number] = future
        future.label = f"the stream of {template.label}"
        future.try_fail(error)
        return future

    # -- queries to the supervisor --------------------------------------------------------------------------

    def alive(self) -> Future[bool]:
        """Return a future of a bool: whether the actor lives, or is being made or restarted, according to its supervisor."""
        # If the supervisor's worker has ended, so has the actor.
        answer = self._query("alive").then(lambda done: done.error is None and bool(done.value_or_none))
        answer.label = f"whether {self.title} is alive"
        return answer

    def kill(self, no_restart: bool = True) -> Future[None]:
        """End the actor at once. After the future is complete, calls of this process do not reach the killed incarnation.

        Idempotent. The future fails with PeerDiedError if the worker of the actor's supervisor has ended.
        """

        def killed_there(done: Future[Any]) -> None:
            done.value()
            self.queue.mark_killed()

        killed = self._query("kill", no_restart).then(killed_there)
        killed.label = f"kill() of {self.title}"
        return killed

    def watch(self) -> Future[ActorDiedError]:
        """Return a future that completes, with an ActorDiedError as its value, when the actor is dead for good.

        If the actor is already dead, the future completes as soon as the supervisor has answered.
        """
        fate = self.queue.fate
        token = CURRENT.set(None)  # the query must outlive the call in which it is made
        try:
            asked = self._query("watch")
        finally:
            CURRENT.reset(token)
        answer = asked.then(lambda done: done.value() if done.error is None else fate.orphaned(done.error))
        answer.label = f"the end of {self.title}"
        return answer

    def _query(self, what: str, *args: Any) -> Future[Any]:
        queue = self.queue
        return query(queue.runtime, queue.descriptor.supervisor, what, self.actor_id, *args)

    def __repr__(self) -> str:
        return f"<{'Route' if self.anchor is not None else 'Weak route'} to {self.title}>"


class Routes:
    """The routes of one process. Thread-safe.

    ``_lock`` guards changes of both tables. It is re-entrant, because the garbage collector may run a finaliser that makes a
    route while the lock is held. The tables have weak references to routes and queues.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.RLock()
        self._lines: weakref.WeakValueDictionary[int, CallQueue] = weakref.WeakValueDictionary()
        self._routes: weakref.WeakValueDictionary[tuple[int, bool], Route] = weakref.WeakValueDictionary()

    def of(self, descriptor: ActorDescriptor) -> Route:
        """Return the route to the actor of a descriptor. If the descriptor has an anchor, the route keeps the actor alive."""
        key = (descriptor.actor_id, descriptor.anchor is not None)
        route = self._routes.get(key)
        if route is not None:
            return route
        with self._lock:
            queue = self._lines.get(descriptor.actor_id)
            if queue is None:
                queue = self._lines[descriptor.actor_id] = CallQueue(self._runtime, descriptor)
            route = self._routes.get(key)
            if route is None:
                route = self._routes[key] = Route(queue, descriptor)
        return route

    def close(self) -> None:
        """Fail every waiting call with ShutdownError, because this process leaves the group."""
        for queue in list(self._lines.values()):
            queue.close()
