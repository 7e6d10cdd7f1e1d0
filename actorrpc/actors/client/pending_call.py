"""The futures of calls to actors, and what is kept of a call that may have to be sent later, or again.

A call, as its caller sees it, is in one of four states. Its future's source says which:

================  ==================  =====================================================================================
state             source              it ends, or goes on
================  ==================  =====================================================================================
queued            PendingCall         sent when it is known where its actor is; cancelled; its time is over; its actor is dead
in flight         Call                the answer; cancelled or timed out by the agent; or :meth:`CallQueue.caught` takes it over
                                      where the failure is the actor's (its process died, it has moved) or it may be tried again:
                                      queued if it did not run or has tries left, else awaiting the verdict
awaiting verdict  AwaitingVerdict     the supervisor says what has become of the actor, which is what the call fails with
done              (any)               its value or error is there
================  ==================  =====================================================================================

:class:`ResultFuture` hears of its call's failure before anybody else does, and so is pending until it is done, whatever happens
between. Two steps decide races, each atomic: a future is ended by the thread that claims it (``Future.claim``), and a queued
call is sent, cancelled or expired by the thread that deletes a slot (:meth:`PendingCall.take`). The moves between the states are
made under the lock of the queue.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Final, Protocol

from actorrpc import _time
from actorrpc.actors.host.envelope import GRACE_S
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.results import StoredResult
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.agent.calls import CURRENT, Call
from actorrpc.errors import BackpressureError, CancelledError, RpcTimeoutError, ShutdownError
from actorrpc.futures import Future, InnerFuture, Progress
from actorrpc.transport.signals import uninterruptible

if TYPE_CHECKING:
    from actorrpc.actors.client.call_template import CallTemplate
    from actorrpc.agent.agent import Agent
    from actorrpc.agent.timers import Timer

__all__ = ["AwaitingVerdict", "CallState", "PendingCall", "ResultFuture", "RpcFuture"]

INFINITE: Final = float("inf")
_MARGIN_S: Final = 1.0  # for the way there and back
_UNCHANGING: Final = frozenset({int, float, bool, str, bytes, type(None), complex, ObjectRef})
_ENDED: Final = frozenset({CancelledError, RpcTimeoutError, ShutdownError, BackpressureError})


class CallState(enum.Enum):
    """Where a call to an actor is, as its caller sees it."""

    QUEUED = "queued"
    IN_FLIGHT = "in flight"
    AWAITING_VERDICT = "awaiting verdict"
    DONE = "done"


class QueueOfCalls(Protocol):
    """The queue of an actor as its calls use it: a CallQueue."""

    agent: Agent
    flying: dict[int, ResultFuture]
    barrier: set[int] | None

    def caught(self, future: ResultFuture, error: BaseException) -> bool:
        """See CallQueue.caught."""

    def passed(self, number: int) -> None:
        """See CallQueue.passed."""

    def swept(self) -> None:
        """See CallQueue.swept."""

    def waits_for(self) -> str:
        """See CallQueue.waits_for."""


class RouteOfCall(Protocol):
    """The route that a call takes: a Route. It holds the actor's anchor."""

    @property
    def queue(self) -> QueueOfCalls:
        """The queue of the actor."""


class ResultFuture(InnerFuture[Any]):
    """The result of a call of an actor's method. Thread-safe, as every Future.

    A route makes it, and says then whose it is: a constructor of its own would be one more step of every call.
    """

    __slots__ = ("_number", "_pending", "_route", "_template")

    # Holds the anchor, so that the actor lives as long as the call is under way. Nothing is held after that.
    _route: RouteOfCall | None
    _template: CallTemplate | None
    _pending: PendingCall | None
    _number: int

    @property
    def state(self) -> CallState:
        """Where the call is in this moment; other threads may change it at any time, but for DONE."""
        source = self.source
        if self._done:
            return CallState.DONE
        if isinstance(source, PendingCall):
            return CallState.QUEUED
        return CallState.AWAITING_VERDICT if isinstance(source, AwaitingVerdict) else CallState.IN_FLIGHT

    @uninterruptible
    def conclude(
        self, value: Any, error: BaseException | None, submit: Callable[..., Any] | None = None
    ) -> None:
        route = self._route
        source = self.source
        if type(source) is Call and source.stopping and (error is None or isinstance(error, CancelledError)):
            # It may have come to its end before; and its caller counts on its being cancelled, and knows.
            value, error = None, source.was_cancelled(True, error)
        if route is not None:
            queue = route.queue
            if error is not None and queue.caught(self, error):
                return
            pending = self._pending
            if pending is not None and pending.may_have_run and type(error) in _ENDED:
                error.maybe_executed = True  # type: ignore[union-attr]  # in an earlier try
            template = self._template
            if template is not None:
                # A value that could have been kept remembers how it came: what becomes of it decides about the next.
                if type(value) is StoredResult:
                    value.policy = template
                if not template.inlines and type(value) is not Snapshot:
                    self._template = None
            if pending is not None:
                pending.forget()
            self._route = self._pending = None
            queue.flying.pop(self._number, None)
            if queue.barrier is not None:
                queue.passed(self._number)
        Future.conclude(self, value, error, submit)

    def cancel(self) -> bool:
        """Give the call up; False if it was over.

        A coroutine that runs is cancelled, and may clean up for a while: the call is over when that is. Other calls are
        over at once.
        """
        pending = self._pending
        if pending is not None:
            # Before it is looked for: the thread that finds its actor dead may have it in its hands, where nobody can end it.
            # That thread makes it pending again, and looks here afterwards.
            pending.tries = 0
            pending.unwanted = True
        template, call = self._template, self.source
        if template is None or template.method.kind != "async" or type(call) is not Call:
            return Future.cancel(self) or (pending is not None and not self._done)
        return call.stop(GRACE_S + _MARGIN_S) or (pending is not None and not self._done)

    def end(self, error: BaseException, submit: Callable[..., Any] | None = None) -> bool:
        """Fail a call that is not in flight; False if it has ended, or if another thread is ending it."""
        if not self.claim():
            return False
        pending, self._route, self._template, self._pending = self._pending, None, None, None
        if pending is not None:
            pending.forget()
        Future.conclude(self, None, error, submit)
        return True


class RpcFuture(ResultFuture):
    """What ``rpc_async`` of an actor's RRef gives: torch's functions take it, too."""

    __slots__ = ()

    torch_has_outcome = True


class PendingCall(Progress):
    """All that is needed to send a call, as of the moment when it was made. It is its future's source while it waits.

    Attributes:
        arguments: ``(args, kwargs)``, a Snapshot of that, or None where the call can be sent only once.
        unresolved: there are ObjectRefs at top level that the actor's side has to fetch.
        deadline: on the monotonic clock; what is nested in a call inherits that call's.
        tries: how often it may be made again where it may have run; -1: for ever.
        may_have_run: an earlier try may have.
        unwanted: it was cancelled while another thread had it; that thread ends it.
        place: the number of the call, and the incarnation of its actor, when it was first made there: a repetition goes to the
            place of the original, which others of its caller may wait for.
        context: what the caller's context variables were.
    """

    __slots__ = (
        "_free",
        "arguments",
        "context",
        "deadline",
        "future",
        "may_have_run",
        "place",
        "seconds",
        "timer",
        "tries",
        "unresolved",
        "unwanted",
    )

    def __init__(
        self, future: ResultFuture, arguments: Any, unresolved: bool, seconds: float, tries: int
    ) -> None:
        self.future: ResultFuture | None = future
        self.arguments = arguments
        self.unresolved = unresolved
        self.seconds = seconds
        self.tries = tries
        self.may_have_run = False
        self.place: tuple[int, int] | None = None
        self.unwanted = False
        self.timer: Timer | None = None
        current = CURRENT.get()
        given_up = None if current is None else current.given_up
        route = future._route
        if current is None and route is not None:
            route.queue.agent.next_chain()  # stores in the context which caller this call is made for
        self.context: Context = copy_context()
        now = _time.now() if route is None else route.queue.agent.clock.now()
        deadline = now + seconds if seconds else INFINITE
        self.deadline = deadline if current is None else min(deadline, current.deadline)
        future._pending = self
        if current is not None:
            current.add_nested(self)
            self.unwanted = current.cancelled or current.given_up is not given_up

    @staticmethod
    def hold(args: tuple[Any, ...], kwargs: dict[str, Any], *, cheaply: bool = False) -> Any:
        """Return what :attr:`arguments` is to be; with ``cheaply`` None, where that takes a copy.

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
        # Opened here, and only here.
        return None if cheaply else Snapshot.of((args, kwargs), remote_main=True)

    @staticmethod
    def opened(held: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that :meth:`hold` has kept, to be sent."""
        if type(held) is tuple:
            return held
        # open() leaves the snapshot as it is, so that the call can be sent from it again.
        opened: tuple[tuple[Any, ...], dict[str, Any]] = held.open()
        return opened

    # -- who may do what with a call that waits --------------------------------------------------------

    def rest(self) -> None:
        """Let it wait: it may be sent, cancelled and expire from now on."""
        self._free = None

    def take(self) -> bool:
        """Win the right to send a waiting call, or to end it; exactly one caller does."""
        try:
            del self._free
        except AttributeError:
            return False
        return True

    def forget(self) -> None:
        """Let go of everything: the call is over."""
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.cancel()
        self.future = None
        self.arguments = None
        execution = self.context.get(CURRENT)
        if execution is not None:
            execution.nested.pop(self, None)

    @property
    def done(self) -> bool:
        """Whether the call is over."""
        return self.future is None

    # -- as a future's source -----------------------------------------------------------------------------

    def drive(self, _deadline: float | None) -> None:
        """Send the gathered messages. The waiting thread then sleeps until the call ends."""
        future = self.future
        route = None if future is None else future._route
        if route is not None:
            route.queue.agent.flush()

    def cancel(self, stop: bool = True, late: bool = False) -> bool:
        """End the call, wherever it is; False if it is over. ``stop``, ``late``: see :meth:`Call.cancel`."""
        future = self.future
        if future is None:
            return False
        execution = self.context.get(CURRENT)
        late = late or (execution is not None and execution.late)  # also for a thread that finds it unwanted
        # Set first: a thread that is sending the call, or is putting it back into the queue, reads `unwanted` afterwards.
        self.unwanted = True
        if not self.take():
            source = future.source
            if isinstance(source, Call):
                return source.cancel(stop, late)
            return not future.done() if source is self or source is None else source.cancel()
        if late:
            return self._end(self._timed_out())
        template = future._template
        what = template.label if template is not None else "the call"
        return self._end(
            CancelledError(
                f"the call of {what} was cancelled by its caller before it was sent",
                maybe_executed=self.may_have_run,
            )
        )

    def expire(self) -> None:
        """End the call, which has not been sent, because its time is over."""
        if self.future is not None and self.take():
            self._end(self._timed_out())

    def _timed_out(self) -> RpcTimeoutError:
        future = self.future
        assert future is not None
        template, route = future._template, future._route
        what = template.label if template is not None else "a call"
        where = route.queue.waits_for() if route is not None else "the actor"
        bound = f"{self.seconds:g} s" if self.seconds else "what was left of the call that made it"
        return RpcTimeoutError(
            f"the call of {what} timed out ({bound}) while it waited for {where}; "
            + ("an earlier try may have run" if self.may_have_run else "it was not sent"),
            maybe_executed=self.may_have_run,
        )

    def _end(self, error: BaseException) -> bool:
        future = self.future
        route = None if future is None else future._route
        if future is None or route is None:
            return False
        queue = route.queue
        ended = future.end(error, queue.agent.submit)
        queue.swept()
        return ended


class AwaitingVerdict(Progress):
    """The source of a future whose call has failed, while it is not known yet what has become of the actor."""

    __slots__ = ("future", "ran", "submit", "template")

    def __init__(
        self,
        future: ResultFuture,
        template: CallTemplate,
        ran: bool,
        submit: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self.future = future
        self.template = template
        self.ran = ran
        self.submit = submit

    def end(self, error: BaseException) -> bool:
        """End the call; False if it is over."""
        return self.future.end(error, self.submit)

    def cancel(self) -> bool:
        """End the call; False if it is over."""
        return self.end(
            CancelledError(
                f"the call of {self.template.label} was cancelled by its caller after its actor had died",
                maybe_executed=self.ran,
            )
        )
