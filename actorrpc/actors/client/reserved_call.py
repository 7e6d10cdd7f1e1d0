"""Calls with pending arguments: such a call reserves its place in the mailbox, and is sent when its arguments are complete.

The reservation keeps the order of the caller's calls. The actor cannot run the call before the message has arrived. Therefore a
call that is cancelled, times out or loses an argument before that has certainly not run.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from actorrpc._exception_text import is_of_handler
from actorrpc.actors.client.pending_call import PendingCall, ResultFuture
from actorrpc.actors.refs.arguments import pack_arguments
from actorrpc.actors.refs.results import ATOMS
from actorrpc.agent.calls import Call
from actorrpc.errors import PeerDiedError
from actorrpc.futures import Future

if TYPE_CHECKING:
    from actorrpc.actors.client.call_template import CallTemplate
    from actorrpc.agent.agent import Agent

__all__ = ["ReservedCall"]


class ReservingQueue(Protocol):
    """The queue that has reserved the place: a CallQueue."""

    agent: Agent

    def is_gone(self, epoch: int) -> bool:
        """See CallQueue.is_gone."""

    def bounced(self, future: ResultFuture) -> None:
        """See CallQueue.bounced."""

    def ended_unsent(self, future: ResultFuture, error: BaseException) -> None:
        """See CallQueue.ended_unsent."""


class ReservedCall:
    """Sends a call when its arguments are complete, or ends it when one of them fails. Any thread may complete an argument.

    Args:
        future: the future of the call. Its ``PendingCall`` holds the other arguments.
        call: the call, which has reserved its place.
    """

    __slots__ = ("_call", "_free", "_future", "_left", "_queue", "_template")

    def __init__(
        self, queue: ReservingQueue, future: ResultFuture, template: CallTemplate, call: Call
    ) -> None:
        self._queue, self._future, self._template, self._call = queue, future, template, call
        awaits = call.awaits if len(call.awaits) == 1 else dict.fromkeys(call.awaits)
        self._left = [None] * len(awaits)
        self._free = None
        for argument in awaits:
            argument.listen()
            argument.add_waiter(self)

    def ended(self, argument: Future[Any]) -> None:
        """Count a completed argument. Runs on the thread that completed the argument, and must not block."""
        self._left.pop()
        if self._left and argument.error is None:
            return
        try:
            # Exactly one thread sends the call: it completed the last argument, or failed one first.
            del self._free
        except AttributeError:
            return
        pending, awaits = self._future._pending, self._call.awaits
        if pending is None:  # the call has ended
            return
        context = pending.context.copy()  # the context itself is in use where the queue is being sent
        is_quick = type(pending.arguments) is tuple and all(
            each.completed and each.error is None and type(each.value_or_none) in ATOMS for each in awaits
        )
        if is_quick:
            context.run(self._send)  # sending such arguments runs no user code
        else:
            self._queue.agent.submit(partial(context.run, self._send))

    def _send(self) -> None:
        queue, future, call, template = self._queue, self._future, self._call, self._template
        pending = future._pending
        held = None if pending is None else pending.arguments
        if held is None or call.done:
            return
        if queue.is_gone(template.epoch):
            self._take_back()
            return
        try:
            args, kwargs, unresolved = pack_arguments(*PendingCall.opened(held))
            mail, label = template.mail_for(unresolved), template.label
            queue.agent.call(
                call.peer, None, args, kwargs, 0.0, future=future, label=label, mail=mail, place=call
            )
        except PeerDiedError:
            # The connection of its reservation has ended. The thread that then ends the peer may not have found the call yet.
            self._take_back()
        except BaseException as error:
            if call.give_back_place():
                if type(error) is PeerDiedError:
                    queue.bounced(future)
                else:
                    queue.ended_unsent(future, error)
            if is_of_handler(error):
                raise

    def _take_back(self) -> None:
        """Have the queue send the call again, or end it: the actor is not where the place was reserved."""
        if self._call.give_back_place():
            self._queue.bounced(self._future)
