"""Recording: which autograd context a message belongs to, and what of the graph crosses with it.

A tag travels in the header of each call that is made in a context: ``(context,)``, or ``(context, message, indices)``
where some of the message's tensors require grad; indices count its plain tensors. The sender keeps the edges of these
tensors; at the receiver they become the outputs of one node, which stands for the message. The same goes for answers.
What is kept to be opened later (a snapshot) has a tag that also says who kept it.

The current context is that of the block ``with context()`` that the code is in, or that of the call it was called by.
Both follow coroutines; neither follows into threads that users start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from typing import Any, Final

import torch
from torch.autograd.graph import get_gradient_edge

from actorrpc.autograd.contexts import Context, Contexts, Receipt
from actorrpc.core.calls import CURRENT, Execution
from actorrpc.core.interceptors import TAG
from actorrpc.core.peer import Peer
from actorrpc.errors import ProtocolError
from actorrpc.rpc.fork_messages import WorkerKey

__all__ = ["ANCHOR", "GraphRecorder", "current_context", "enter", "leave", "receive"]

_log = logging.getLogger("actorrpc.autograd")

# The block that the code is in, with the call in which it was entered: other calls that happen to be executed by the
# same thread meanwhile are not in it.
_entered: ContextVar[tuple[int, Execution | None] | None] = ContextVar(
    "actorrpc_autograd_context", default=None
)


def current_context() -> int | None:
    """Return the id of the distributed autograd context in which this code runs, or None."""
    execution = CURRENT.get()
    entered = _entered.get()
    if entered is not None and entered[1] is execution:
        return entered[0]
    if execution is not None and execution.header:
        tag = execution.header.get(TAG)
        if tag:
            return tag[0]  # type: ignore[no-any-return]
    return None


def enter(context: int) -> Token[tuple[int, Execution | None] | None]:
    """Make a context the current one."""
    return _entered.set((context, CURRENT.get()))


def leave(token: Token[tuple[int, Execution | None] | None]) -> None:
    """Make the context current that was so before :func:`enter`."""
    _entered.reset(token)


# -- the node that stands for a message -------------------------------------------------------------------------------


class _Received(torch.autograd.Function):
    """Makes tensors that have arrived the outputs of one node. They are hidden from it in a list, so that they stay the
    same objects, are views of nothing, and may be changed in place."""

    @staticmethod
    def forward(_ctx: Any, _anchor: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(tensors)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> Any:
        raise RuntimeError(
            "this tensor's history leads to another worker, where a local backward() does not go: call "
            "actorrpc.autograd.backward(context_id, [loss]) inside of `with context() as context_id`, or detach() it"
        )


#: The leaf that all these nodes hang from: a walk that gets to it has passed through one.
ANCHOR: Final = torch.empty(0, requires_grad=True)
_apply: Final[Callable[..., tuple[torch.Tensor, ...]]] = _Received.apply


def receive(tensors: Sequence[torch.Tensor]) -> Any:
    """Give tensors that have arrived a history: one node, whose outputs they are; return the node."""
    for each in tensors:
        each.requires_grad_(False)
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        outputs = _apply(ANCHOR, list(tensors))
    else:
        with torch.inference_mode(False), torch.enable_grad():
            outputs = _apply(ANCHOR, list(tensors))
    return outputs[0].grad_fn


class GraphRecorder:
    """Records the messages of one worker in its contexts. Thread-safe."""

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        self._warned = False

    @property
    def live(self) -> bool:
        """Whether there is a context that calls could belong to."""
        return len(self._contexts) > 0

    def sent(self, tensors: Sequence[Any], peer: Peer | None, context: int | None = None) -> Any:
        """Record a message that has been packed; return its tag. See :class:`actorrpc.core.interceptors.Recorder`."""
        id = current_context() if context is None else context
        if id is None:
            if not self._warned:
                self._warn(tensors)
            return None
        found = self._contexts.find(id)
        if found is None:
            return None
        if peer is not None:
            found.joined_by(WorkerKey(peer.rank, peer.record.incarnation))
        indices = [index for index, each in enumerate(tensors) if each.requires_grad]
        if not indices or not torch.is_grad_enabled():
            return None if peer is None else (id,)
        message = self._contexts.new_message()
        found.record_send(message, [get_gradient_edge(tensors[index]) for index in indices])
        if peer is not None:
            return id, message, indices
        me = self._contexts.me
        return id, message, indices, me.rank, me.incarnation

    def _warn(self, tensors: Sequence[Any]) -> None:
        if any(each.requires_grad and each.grad_fn is not None for each in tensors):
            self._warned = True
            _log.warning(
                "a tensor that requires grad was sent outside of a distributed autograd context: it arrives as a leaf, no "
                "gradient will come back. Make the call inside of `with actorrpc.autograd.context()`, or detach() the "
                "tensor. (Said once.)"
            )

    def arrived(self, tag: Any, tensors: list[Any], peer: Peer | None) -> None:
        """Record a message that has been opened. See :class:`actorrpc.core.interceptors.Recorder`."""
        id, message, indices, kept_by = _read(tag, len(tensors))
        context = self._contexts.reach(id)
        wanted = [tensors[index] for index in indices]
        if context is None:
            # It is over: nobody can ask for gradients any more, but the call may matter for what else it does.
            for each in wanted:
                each.requires_grad_(False)
            return
        context.touched = time.monotonic()
        source = kept_by
        if source is None:
            assert peer is not None
            source = WorkerKey(peer.rank, peer.record.incarnation)
        if wanted:
            receipt = Receipt(source, message, self._contexts.new_receipt(), len(wanted))
            context.record_receipt(receive(wanted), receipt)

    def forwarded(self, tag: Any, peer: Peer) -> None:
        """Note that what is kept in a context goes to a worker. See :class:`actorrpc.core.interceptors.Recorder`."""
        context: Context | None = self._contexts.find(tag[0])
        if context is not None:
            context.joined_by(WorkerKey(peer.rank, peer.record.incarnation))


def _read(tag: Any, count: int) -> tuple[int, int, Sequence[int], WorkerKey | None]:
    """Take a tag apart.

    Raises:
        ProtocolError: it makes no sense.
    """
    if isinstance(tag, (list, tuple)) and tag and isinstance(tag[0], int):
        if len(tag) == 1:
            return tag[0], 0, (), None
        if len(tag) in (3, 5):
            message, indices = tag[1:3]
            if (
                isinstance(message, int)
                and isinstance(indices, (list, tuple))
                and all(isinstance(index, int) and 0 <= index < count for index in indices)
                and len(set(indices)) == len(indices)
            ):
                if len(tag) == 3:
                    return tag[0], message, indices, None
                if isinstance(tag[3], int) and isinstance(tag[4], str):
                    return tag[0], message, indices, WorkerKey(tag[3], tag[4])
    raise ProtocolError("the autograd tag of a message cannot be read")
