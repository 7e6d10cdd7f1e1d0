"""Records to which autograd context a message belongs, and which of its tensors stay connected to the graph.

The header of each call that is made in a context has a tag: ``(context,)``, or ``(context, message, indices, news)`` if some of
the message's tensors require grad. ``message`` is the message's number; ``indices`` are the positions of these tensors among the
message's plain tensors; ``news`` is described below. The sender keeps the edges of these tensors; at the receiver, the tensors
become the outputs of one node, which stands for the message. Answers have such tags, too. A snapshot (an ObjectRef's value) is
opened later, and has the tag ``(context, message, indices, rank, incarnation)``, which ends with the worker that keeps it.

The current context is the context of the ``with context()`` block in which the code runs, or else the context of the call that
is executed. Coroutines inherit it; threads that users start do not.

**News: the paths of gradients.** To plan a backward pass, the worker where it begins needs to know, for each message, to which
earlier messages its gradients lead on its sender. Queries at the start of a pass would cost one round trip for each hop. So each
message reports to which messages its own gradients and the gradients of these earlier messages lead, unless its sender has
reported that to the receiver before. When a pass begins, it queries
the remaining messages: messages with large graphs, and snapshots.

In a tag, news is a flat list: a message, a list of the messages to which it leads with their receipts, the next message, and so
on. The rank of a message's sender is in the upper bits of the message's number; the last item of the list has the incarnations of
workers other than sender and receiver. News is collected under ``Context.lock``, which takes microseconds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar, Token
from typing import Any, Final

import torch
from torch.autograd.graph import GradientEdge

from actorrpc import _time
from actorrpc.agent.calls import CURRENT, Execution
from actorrpc.agent.hooks import Recorder
from actorrpc.agent.peers import Peer
from actorrpc.autograd import graph
from actorrpc.autograd.contexts import Context, Contexts, Receipt
from actorrpc.autograd.graph import edge_of, receive
from actorrpc.autograd.messages import Sink, make
from actorrpc.errors import ProtocolError
from actorrpc.wire.identity import WorkerKey

__all__ = ["GraphRecorder", "current_context", "enter", "news_for", "record_news", "restore"]

_NODES: Final = 250  # a graph of more nodes is only walked if a pass needs it, not when the message is sent
_NEWS: Final = 100  # the most messages about which one message has news
_RANK_BITS: Final = 48


def news_for(
    context: Context, me: WorkerKey, message: int, edges: tuple[GradientEdge, ...], peer: WorkerKey
) -> list[Any]:
    """Record a message that is sent to ``peer``; return the news (see above) for its tag: empty if the graph is large."""
    news: list[Any] = []
    lives: dict[int, str] = {}
    with context.lock:
        if context.released:
            return news
        context.sends[message] = edges
        found = graph.reach_if_small(edges, context.receipts, _NODES)
        if found is None:
            return news
        context.reaches[message] = found
        sinks: list[Sink] = []
        for node in found.receipts:
            sinks.append(context.receipts[node].sink)
        context.sinks[me, message] = sinks
        sent_sinks = context.sent_sinks.get(peer)
        if sent_sinks is None:
            sent_sinks = context.sent_sinks[peer] = set()
        left = [(me, message)]
        while left and len(news) < 2 * _NEWS:
            send = left.pop()
            worker, number = send
            leads = context.sinks.get(send)
            if leads is None or worker == peer or number in sent_sinks:
                continue
            sent_sinks.add(number)
            leads_to: list[int] = []
            for of, to, receipt in leads:
                leads_to += (to, receipt)
                left.append((of, to))
                for each in (worker, of):
                    if each not in (me, peer):
                        lives[each.rank] = each.incarnation
            news += (number, leads_to)
    if lives:
        news.append(list(lives.items()))
    return news


def record_news(context: Context, me: WorkerKey, sender: WorkerKey, news: Sequence[Any]) -> None:
    """Record the news in the tag of a received message.

    Raises:
        ProtocolError: the news cannot be read.
    """
    if not news:
        return
    try:
        found = _read_news(me, sender, news)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError("the news in the autograd tag of a message cannot be read") from error
    with context.lock:
        for send, sinks in found:
            context.sinks.setdefault(send, sinks)


def _read_news(
    me: WorkerKey, sender: WorkerKey, news: Sequence[Any]
) -> list[tuple[tuple[WorkerKey, int], list[Sink]]]:
    lives = {me.rank: me, sender.rank: sender}
    if len(news) % 2:
        for rank, incarnation in news[-1]:
            lives.setdefault(rank, WorkerKey(rank, incarnation))
    found: list[tuple[tuple[WorkerKey, int], list[Sink]]] = []
    for index in range(0, len(news) - 1, 2):
        message, leads_to = news[index], news[index + 1]
        sinks: list[Sink] = []
        for to, receipt in zip(leads_to[::2], leads_to[1::2], strict=True):
            sinks.append(make(Sink, (lives[to >> _RANK_BITS], to, receipt)))
        found.append(((lives[message >> _RANK_BITS], message), sinks))
    return found


_log = logging.getLogger("actorrpc.autograd")

# The context of the current ``with context()`` block, and the execution in which the block was entered. Other calls that the same
# thread executes while it waits in the block do not belong to the block.
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
        tag = execution.header.get("tag")
        if tag:
            return tag[0]  # type: ignore[no-any-return]
    return None


def enter(context: int) -> Token[tuple[int, Execution | None] | None]:
    """Make this context the current context; return the argument for :func:`restore`."""
    return _entered.set((context, CURRENT.get()))


def restore(token: Token[tuple[int, Execution | None] | None]) -> None:
    """Restore the context that was current before :func:`enter`."""
    _entered.reset(token)


class GraphRecorder(Recorder):
    """Records the messages of one worker in its contexts. Thread-safe."""

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        self.live: dict[int, Context] = contexts.live
        self._warned = False

    def sent(self, tensors: Sequence[Any], peer: Peer | None, context: int | None = None) -> Any:
        """Record a message that has been packed; return its tag. See :class:`actorrpc.agent.hooks.Recorder`."""
        id = current_context() if context is None else context
        if id is None:
            # No warning inside of an execution: for an answer, only the caller knows whether it needs the tensors' history.
            if not self._warned and CURRENT.get() is None and torch.is_grad_enabled():
                self._warn(tensors)
            return None
        found = self.live.get(id)
        if found is None:
            return None
        to = None
        if peer is not None:
            to = peer.key
            found.touched = _time.now()
            if to not in found.peers:
                found.joined_by(to)
        indices: list[int] = []
        edges: list[GradientEdge] = []
        if tensors and torch.is_grad_enabled():
            for index, each in enumerate(tensors):
                if each.requires_grad:
                    indices.append(index)
                    edges.append(edge_of(each))
        if not indices:
            return None if to is None else (id,)
        message, me = self._contexts.new_message(), self._contexts.me
        if to is not None:
            return id, message, indices, news_for(found, me, message, tuple(edges), to)
        found.record_send(message, edges)
        return id, message, indices, me.rank, me.incarnation

    def _warn(self, tensors: Sequence[Any]) -> None:
        if any(each.requires_grad and each.grad_fn is not None for each in tensors):
            self._warned = True
            _log.warning(
                "a tensor that requires grad was sent outside of a distributed autograd context: it arrives as a leaf, and no "
                "gradient will be sent back. Make the call inside of `with actorrpc.autograd.context()`, or detach() the "
                "tensor. (Logged once.)"
            )

    def received(self, tag: Any, tensors: list[Any], peer: Peer | None) -> None:
        """Record a message that has been opened. See :class:`actorrpc.agent.hooks.Recorder`."""
        id, message, indices, source, news = _read(tag, len(tensors))
        context = self.live.get(id) or self._contexts.reach(id)
        wanted: list[Any] = []
        for index in indices:
            wanted.append(tensors[index])
        if context is None:
            # The context was released, so no backward pass will need these tensors. The call runs nevertheless.
            for each in wanted:
                each.requires_grad_(False)
            return
        context.touched = _time.now()
        if wanted:
            if source is None:
                assert peer is not None
                source = peer.key
                record_news(context, self._contexts.me, source, news)
            sink = make(Sink, (source, message, self._contexts.new_receipt()))
            context.record_receipt(receive(wanted), make(Receipt, (sink, len(wanted))))

    def forwarded(self, tag: Any, peer: Peer) -> None:
        """Record that a snapshot, which has a tag already, is sent to a worker. See :class:`actorrpc.agent.hooks.Recorder`."""
        context = self.live.get(tag[0])
        if context is not None:
            context.touched = _time.now()
            context.joined_by(peer.key)


def _read(tag: Any, count: int) -> tuple[int, int, Sequence[int], WorkerKey | None, Sequence[Any]]:
    """Return from the tag of a message with ``count`` tensors: context, message, indices, worker that keeps the snapshot, news.

    Raises:
        ProtocolError: the tag is not valid.
    """
    indices: Sequence[int]
    try:
        if len(tag) == 1:
            (id,) = tag
            message, indices, kept_by, news = 0, (), None, ()
        elif len(tag) == 4:
            id, message, indices, news = tag
            kept_by = None
        else:
            id, message, indices, rank, incarnation = tag
            kept_by, news = WorkerKey(rank, incarnation), ()
            if type(rank) is not int or type(incarnation) is not str:
                raise ValueError
        if type(id) is not int or type(message) is not int or len(indices) != len(set(indices)):
            raise ValueError
        for index in indices:
            if type(index) is not int or not 0 <= index < count:
                raise ValueError
    except (TypeError, ValueError) as error:
        raise ProtocolError("the autograd tag of a message cannot be read") from error
    return id, message, indices, kept_by, news
