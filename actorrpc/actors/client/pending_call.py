"""The futures of calls to actors, and the state of calls that may have to be sent later, or again.

A call, as its caller sees it, is in one of four states. The source of its future tells which:

================  ==================  =====================================================================================
state             source              how the state ends
================  ==================  =====================================================================================
queued            PendingCall         the actor's worker is known: the call is sent; or the call is cancelled or times out; or the
                                      actor dies
in flight         Call                the answer arrives; or the agent cancels or times out the call; or the actor fails or moves;
                                      or an exception is retried: :meth:`CallQueue.caught` queues the call again if it did not
                                      run or may be retried, and otherwise lets it await the verdict
awaiting verdict  AwaitingVerdict     the supervisor answers that the actor is dead or restarts: the call fails with
                                      ActorDiedError or ActorUnavailableError; or the call is cancelled
done              (any)               the future has a value or an error
================  ==================  =====================================================================================

:class:`ResultFuture` handles the failure of its call before its waiters are notified, and so stays pending until the call is
done. Two atomic steps decide races: the thread that claims a future (``Future.claim``) ends it, and the thread that deletes the
slot ``_free`` of a queued call (:meth:`PendingCall.claim`) sends, cancels or expires it.
"""

from __future__ import annotations

from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from actorrpc._exceptions import is_of_handler
from actorrpc.actors.host.mailbox import GRACE_S
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.shared import SharedTensor
from actorrpc.actors.refs.snapshot import ATOMS, Snapshot, StoredResult
from actorrpc.actors.refs.wait import cover
from actorrpc.agent.calls import CURRENT, Call
from actorrpc.errors import (
    BackpressureError,
    CancelledError,
    PeerDiedError,
    RpcTimeoutError,
    ShutdownError,
)
from actorrpc.futures import Future, InnerFuture, Progress
from actorrpc.transport.signals import uninterruptible

if TYPE_CHECKING:
    from collections.abc import Callable

    from actorrpc.actors.client.call_template import CallTemplate
    from actorrpc.actors.client.supervisor_client import Fate
    from actorrpc.agent.agent import Agent
    from actorrpc.agent.timers import Timer

__all__ = [
    "AwaitingVerdict",
    "PendingCall",
    "ReservedCall",
    "ResultFuture",
    "RpcFuture",
    "awaited",
    "pack_arguments",
]

INFINITE: Final = float("inf")
_MARGIN_S: Final = 1.0  # for the round trip of a cancellation and its answer
_UNCHANGING: Final = frozenset({int, float, bool, str, bytes, type(None), complex, ObjectRef})
_RESOLVED_THERE: Final = (SharedTensor, StoredResult)  # values that the worker of the actor opens or fetches
_ENDED: Final = frozenset({CancelledError, RpcTimeoutError, ShutdownError, BackpressureError})


# -- ObjectRefs among the arguments ---------------------------------------------------------------------------

# Top-level arguments that are ObjectRefs are replaced before the method runs. The caller sends the small results that it has, and
# waits for the results of its own calls. The worker of the actor fetches all other results (host/executor.py `resolve`).


def pack_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the arguments, with values in place of the ObjectRefs whose values this process has outside of shared memory.

    Returns:
        The arguments, and whether they still contain ObjectRefs, which the actor's worker resolves.

    Raises:
        BaseException: the error of one of the ObjectRefs. The call is not sent, and fails with this error. As with ``get``,
            the failures of other ObjectRefs are not logged.
    """
    left = False

    def packed(each: Any) -> Any:
        nonlocal left
        if type(each) is not ObjectRef:
            return each
        future = each._future
        if future is not None and future.completed:
            value = future.wait()
            template = getattr(future, "template", None)
            if type(value) is Snapshot:
                if value.stored is None:
                    return value.open()
            elif type(value) not in _RESOLVED_THERE:
                # The value came with a reply, and is now sent on: large results of the next calls should stay on their worker.
                if template is not None:
                    template.leave_results()
                return each._value(value)
        left = True
        return each

    try:
        return (
            tuple([packed(each) for each in args]),
            {name: packed(each) for name, each in kwargs.items()},
            left,
        )
    except BaseException:
        cover([*args, *kwargs.values()])
        raise


def awaited(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Future[Any]]:
    """Return the pending futures of ObjectRefs among the arguments; an ObjectRef of another worker may have no future yet."""
    futures = [each._future for each in (*args, *kwargs.values()) if type(each) is ObjectRef]
    return [each for each in futures if each is not None and not each.done()]


# -- calls ----------------------------------------------------------------------------------------------------


class _QueueOfCalls(Protocol):
    """The attributes and methods of a CallQueue that its calls use."""

    agent: Agent
    fate: Fate
    in_flight: dict[int, ResultFuture]
    barrier: set[int] | None

    def next_number(self) -> int: ...
    def caught(self, future: ResultFuture, error: BaseException) -> bool: ...
    def passed(self, number: int) -> None: ...
    def remove_ended(self, number: int) -> None: ...
    def is_gone(self, epoch: int) -> bool: ...
    def bounced(self, future: ResultFuture) -> None: ...
    def ended_unsent(self, future: ResultFuture, error: BaseException) -> None: ...


class _RouteOfCall(Protocol):
    """The attributes of a Route that calls use. A Route keeps the actor alive."""

    @property
    def queue(self) -> _QueueOfCalls: ...


class ResultFuture(InnerFuture[Any]):
    """The result of a call of an actor's method. Thread-safe, like every Future.

    Attributes:
        number: the number of the call among all calls that this process makes to the actor.
        route: keeps the actor alive until the call has ended; then None.
        template: the call's template; None after the call, unless the use of its result decides how later results are sent.
        pending: contains the arguments, to send the call later or again; None if that is not necessary.
    """

    __slots__ = ("number", "pending", "route", "template")

    def __init__(self, route: _RouteOfCall, template: CallTemplate) -> None:
        Future.__init__(self)
        self.label = template
        self.number = route.queue.next_number()
        self.route: _RouteOfCall | None = route
        self.template: CallTemplate | None = template
        self.pending: PendingCall | None = None

    @uninterruptible
    def conclude(
        self, value: Any, error: BaseException | None, submit: Callable[..., Any] | None = None
    ) -> None:
        route = self.route
        source = self.source
        if type(source) is Call and source.stopping and (error is None or isinstance(error, CancelledError)):
            # The method may have returned before the cancellation reached it. cancel() has returned True, so drop the result.
            value, error = None, source.was_cancelled(True, error)
        if route is not None:
            queue = route.queue
            if error is not None and queue.caught(self, error):
                return
            pending = self.pending
            if pending is not None and pending.may_have_run and type(error) in _ENDED:
                error.maybe_executed = True  # type: ignore[union-attr]  # in an earlier try
            template = self.template
            if template is not None:
                # The value refers to the template, because the use of the value decides how the next large results are sent.
                if type(value) is StoredResult:
                    value.policy = template
                if not template.inlines and type(value) is not Snapshot:
                    self.template = None
            if pending is not None:
                pending.forget()
            self.route = self.pending = None
            queue.in_flight.pop(self.number, None)
            if queue.barrier is not None:
                queue.passed(self.number)
        Future.conclude(self, value, error, submit)

    def cancel(self) -> bool:
        """Cancel the call; False if it has ended.

        If the call runs as a coroutine, the coroutine is cancelled, and may clean up; the call ends with the coroutine. All other
        calls end at once.
        """
        pending = self.pending
        if pending is not None:
            # Set both attributes before reading the source. If another thread is queueing the call again after the actor's
            # death, this thread may find no source to cancel; the other thread then reads `unwanted`, and cancels the call.
            pending.tries = 0
            pending.unwanted = True
        template, call = self.template, self.source
        if template is None or template.method.kind != "async" or type(call) is not Call:
            return Future.cancel(self) or (pending is not None and not self.completed)
        return call.stop(GRACE_S + _MARGIN_S) or (pending is not None and not self.completed)

    def fail_unsent(self, error: BaseException) -> bool:
        """Fail a call that is not in flight; return False if it has ended or another thread is ending it."""
        if not self.claim():
            return False
        route, pending = self.route, self.pending
        self.route = self.template = self.pending = None
        if pending is not None:
            pending.forget()
        Future.conclude(self, None, error, None if route is None else route.queue.agent.submit)
        return True


class RpcFuture(ResultFuture):
    """The result of a call without ``refs``, as of ``rpc_async``. torch's functions for futures can read its value."""

    __slots__ = ()

    torch_has_outcome = True


class PendingCall(Progress):
    """A call with its arguments as they were when it was made. It is the source of its future while the call is queued.

    Attributes:
        future: the future of the call; None after the call has ended.
        arguments: ``(args, kwargs)`` or a Snapshot of them; None after the call has ended.
        unresolved: top-level arguments are ObjectRefs whose values the actor's worker has to fetch.
        seconds: the call's time-out; 0: none.
        deadline: by the agent's clock; a nested call ends at the latest with the deadline of the call that makes it.
        tries: how often the call may be sent again after a try that may have run; -1: without limit.
        may_have_run: an earlier try may have run.
        unwanted: the call was cancelled. If another thread is sending the call meanwhile, that thread ends the call.
        place: the id of the first failed try in an incarnation that lives, and that incarnation; None: no such try. A repetition
            takes the place of this try in the incarnation's mailbox, because later calls of the caller may wait for this place.
        context: the caller's context variables.
    """

    __slots__ = (
        "_free",
        "_timer",
        "arguments",
        "context",
        "deadline",
        "future",
        "may_have_run",
        "place",
        "seconds",
        "tries",
        "unresolved",
        "unwanted",
    )

    def __init__(self, future: ResultFuture, arguments: Any, unresolved: bool, seconds: float) -> None:
        assert future.route is not None
        assert future.template is not None
        agent = future.route.queue.agent
        self.future: ResultFuture | None = future
        self.arguments = arguments
        self.unresolved = unresolved
        self.seconds = seconds
        self.tries = future.template.tries
        self.may_have_run = False
        self.place: tuple[int, int] | None = None
        self.unwanted = False
        self._timer: Timer | None = None
        current = CURRENT.get()
        given_up = None if current is None else current.given_up
        if current is None:
            # If the threads of this process are numbered (ActorRegistry.number_threads), this stores the number of this thread in
            # the context. The context is copied below, and the call is sent in the copy, so it keeps its order with other calls.
            agent.next_chain()
        self.context: Context = copy_context()
        deadline = agent.clock.now() + seconds if seconds else INFINITE
        self.deadline = deadline if current is None else min(deadline, current.deadline)
        future.pending = self
        if current is not None:
            current.add_nested(self)
            self.unwanted = current.cancelled or current.given_up is not given_up

    @staticmethod
    def hold(args: tuple[Any, ...], kwargs: dict[str, Any], *, cheaply: bool = False) -> Any:
        """Return the value of :attr:`arguments`; with ``cheaply``, return None if the arguments would have to be copied.

        Raises:
            SerializationError: an argument cannot be sent.
        """
        for each in args:
            if type(each) not in _UNCHANGING:
                break
        else:
            for each in kwargs.values():
                if type(each) not in _UNCHANGING:
                    break
            else:
                return args, dict(kwargs) if kwargs else kwargs
        return None if cheaply else Snapshot.of((args, kwargs), remote_main=True)

    @staticmethod
    def opened(held: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that :meth:`hold` kept. The call can be sent again afterwards."""
        return held if type(held) is tuple else held.open()

    @property
    def template(self) -> CallTemplate | None:
        """The template of the call; None after the call has ended."""
        future = self.future
        return None if future is None else future.template

    # -- claiming a queued call --------------------------------------------------------

    def rest(self) -> None:
        """Mark the call as waiting: from now on, one thread may claim the call, and send, cancel or expire it."""
        future = self.future
        if future is None or future.route is None:
            return
        future.source = self
        agent = future.route.queue.agent
        if self.deadline != INFINITE and self._timer is None:
            self._timer = agent.clock.at(self.deadline, lambda: agent.submit(self.expire))
        self._free = None

    def claim(self) -> bool:
        """Claim the right to send or to end a waiting call; exactly one caller gets True."""
        try:
            del self._free
        except AttributeError:
            return False
        return True

    def failed(self, ran: bool) -> bool:
        """Record a failed try, which may have run if ``ran``; return whether the call may be sent again."""
        if not ran:
            return True
        self.may_have_run = True
        if self.tries > 0:
            self.tries -= 1
            return True
        return self.tries < 0

    def stop_timer(self) -> None:
        """Cancel the timer of the deadline, because the call has ended, or is sent now with a time-out of the agent."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def forget(self) -> None:
        """Drop the arguments and the future: the call has ended."""
        self.stop_timer()
        self.future = None
        self.arguments = None
        execution = self.context.get(CURRENT)
        if execution is not None:
            execution.nested.pop(self, None)

    @property
    def done(self) -> bool:
        """Whether the call has ended."""
        return self.future is None

    # -- the source of a future -----------------------------------------------------------------------------

    def drive(self, _deadline: float | None) -> None:
        """Send the delayed messages, and return. The thread that waits for the call then sleeps until the call ends."""
        future = self.future
        route = None if future is None else future.route
        if route is not None:
            route.queue.agent.flush()

    def cancel(self, stop: bool = True, late: bool = False) -> bool:
        """End the call in any state; False if it has ended. ``stop``, ``late``: see :meth:`Call.cancel`."""
        future = self.future
        if future is None:
            return False
        execution = self.context.get(CURRENT)
        # Callers that have read `unwanted` pass late=False even if the call that made this call has timed out: check that here.
        late = late or (execution is not None and execution.late)
        # Set first: a thread that is sending the call, or is putting it back into the queue, reads `unwanted` afterwards.
        self.unwanted = True
        if not self.claim():
            source = future.source
            if isinstance(source, Call):
                return source.cancel(stop, late)
            return not future.done() if source is self or source is None else source.cancel()
        return self._end_claimed(late)

    def expire(self) -> None:
        """End the call, if it has not been sent, because its deadline has passed."""
        if self.claim():
            self._end_claimed(late=True)

    def _end_claimed(self, late: bool) -> bool:
        """End the call, which this thread has claimed, with a time-out (``late``) or as cancelled."""
        future = self.future
        if future is None or future.template is None or future.route is None:
            return False
        what, queue, ran = future.template.label, future.route.queue, self.may_have_run
        error: CancelledError | RpcTimeoutError
        if late:
            bound = f"{self.seconds:g} s" if self.seconds else "the remaining time of the call that made it"
            error = RpcTimeoutError(
                f"the call of {what} timed out ({bound}) while it waited for {queue.fate.waits_for()}; "
                + ("an earlier try may have run" if ran else "it was not sent"),
                maybe_executed=ran,
            )
        else:
            error = CancelledError(
                f"the call of {what} was cancelled by its caller before it was sent", maybe_executed=ran
            )
        ended = future.fail_unsent(error)
        queue.remove_ended(future.number)
        return ended


class AwaitingVerdict(Progress):
    """The source of a future whose call has failed, until the supervisor says whether the actor is dead or restarts.

    Attributes:
        future: the future of the call.
        ran: the call may have run.
    """

    __slots__ = ("future", "ran")

    def __init__(self, future: ResultFuture, ran: bool) -> None:
        self.future = future
        self.ran = ran
        future.source = self

    def cancel(self) -> bool:
        """End the call; False if it has ended."""
        template = self.future.template
        return template is not None and self.future.fail_unsent(
            CancelledError(
                f"the call of {template.label} was cancelled by its caller after its actor had died",
                maybe_executed=self.ran,
            )
        )


class ReservedCall:
    """Sends a call when its arguments are complete, or ends it when an argument fails. Any thread may complete an argument.

    A message has reserved the call's place in the mailbox, which keeps the order of the caller's calls. The actor cannot run the
    call before a second message brings the arguments. Therefore a call that ends before this second message has not run.

    Args:
        future: the future of the call. Its ``pending`` holds all arguments.
        call: the agent's Call, which is sent twice: in the first and in the second message.
    """

    __slots__ = ("_call", "_free", "_future", "_queue", "_remaining", "_template")

    def __init__(
        self, queue: _QueueOfCalls, future: ResultFuture, template: CallTemplate, call: Call
    ) -> None:
        self._queue, self._future, self._template, self._call = queue, future, template, call
        awaits = call.awaits if len(call.awaits) == 1 else dict.fromkeys(call.awaits)
        self._remaining = [None] * len(awaits)
        self._free = None
        for argument in awaits:
            argument.listen()
            argument.add_waiter(self.ended)

    def ended(self, argument: Future[Any]) -> None:
        """Count a completed argument. Runs in the constructor, or on the thread that completes the argument; must not block."""
        self._remaining.pop()
        if self._remaining and argument.error is None:
            return
        try:
            # Only one thread passes this line: it has completed the last argument, or was the first to fail an argument.
            del self._free
        except AttributeError:
            return
        pending, awaits = self._future.pending, self._call.awaits
        if pending is None:  # the call has ended
            return
        context = pending.context.copy()  # _drain() may be running in the original context, in another thread
        is_quick = type(pending.arguments) is tuple and all(
            each.completed and each.error is None and type(each.value_or_none) in ATOMS for each in awaits
        )
        if is_quick:
            context.run(self._send)  # sending arguments of these classes runs no user code
        else:
            self._queue.agent.submit(partial(context.run, self._send))

    def _send(self) -> None:
        queue, future, call, template = self._queue, self._future, self._call, self._template
        pending = future.pending
        held = None if pending is None else pending.arguments
        if held is None or call.done:
            return
        if queue.is_gone(template.epoch):
            if call.give_back_place():
                queue.bounced(future)
            return
        try:
            args, kwargs, unresolved = pack_arguments(*PendingCall.opened(held))
            call.mail = template.mail_for(unresolved)
            queue.agent.send(call, None, args, kwargs)
        except BaseException as error:
            if call.give_back_place():
                if isinstance(error, PeerDiedError):
                    # The connection with the reservation is broken. The thread that marks the peer as dead fails the peer's
                    # calls, but may not have reached this call: bounced() queues the call unless that thread has claimed it.
                    queue.bounced(future)
                else:
                    queue.ended_unsent(future, error)
            if is_of_handler(error):
                raise
