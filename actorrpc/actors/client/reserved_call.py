"""Calls whose arguments are not here yet: each one reserves its place in the mailbox, and is sent when the arguments have come.

The reservation keeps the order of the caller's calls. The worker of the actor cannot run the call before the message has come,
so a call that ends earlier (it is cancelled, its time is over, an argument has failed) has certainly not run.
"""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from actorrpc._exception_text import is_of_handler
from actorrpc.actors.client.pending_call import CallTemplate, PendingCall, ResultFuture
from actorrpc.actors.refs.arguments import pack_arguments
from actorrpc.actors.refs.results import ATOMS
from actorrpc.agent.calls import Call
from actorrpc.futures import Future

if TYPE_CHECKING:
    from actorrpc.actors.client.call_queue import CallQueue

__all__ = ["ReservedCall"]


class ReservedCall:
    """Sends a call when its arguments are here, or ends it when one of them has failed.

    Args:
        future: the call's; its ``PendingCall`` has the other arguments.
        call: has reserved its place.
    """

    __slots__ = ("_call", "_claim", "_context", "_future", "_left", "_queue", "_template")

    def __init__(self, queue: CallQueue, future: ResultFuture, template: CallTemplate, call: Call) -> None:
        self._queue, self._future, self._template, self._call = queue, future, template, call
        self._context = copy_context()
        awaits = dict.fromkeys(call.awaits)
        self._left = [None] * len(awaits)
        self._claim = [None]
        for argument in awaits:
            argument.listen()
            argument.add_waiter(self)

    def ended(self, argument: Future[Any]) -> None:
        """Count an argument that is complete. Runs on the thread that has completed it, and must not hold it up."""
        self._left.pop()
        if self._left and argument.error is None:
            return
        try:
            self._claim.pop()  # one thread sends it: that of the last argument, or of the first that has failed
        except IndexError:
            return
        pending, awaits = self._future._pending, self._call.awaits
        is_quick = (
            pending is not None
            and type(pending.arguments) is tuple
            and all(
                each.completed and each.error is None and type(each.value_or_none) in ATOMS for each in awaits
            )
        )
        if is_quick:
            self._context.run(self._send)  # such arguments run no code of the user's
        else:
            self._queue.agent.submit(lambda: self._context.run(self._send))

    def _send(self) -> None:
        queue, future, call, template = self._queue, self._future, self._call, self._template
        pending = future._pending
        held = None if pending is None else pending.arguments
        if held is None or call.done:
            return
        try:
            args, kwargs, unresolved = pack_arguments(*PendingCall.opened(held))
            mail, label = template.mail_for(unresolved), template.label
            queue.agent.call(
                call.peer, None, args, kwargs, 0.0, future=future, label=label, mail=mail, place=call
            )
            queue.agent.flush()
        except BaseException as error:
            if call.give_back_place():
                queue.ended_unsent(future, error)
            if is_of_handler(error):
                raise
