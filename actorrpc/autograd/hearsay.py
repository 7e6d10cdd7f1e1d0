"""Where messages lead to, told along with the messages.

A backward pass has to know which messages the gradients of a message lead to on the worker that sent it. It could ask
when it begins, one round trip for each hop; so each message says where it leads to, and what its receiver may not know yet
of the messages that it leads to. What is not told (graphs that are large, results that are kept to be opened later) is
asked for by the pass that wants to know.

In a tag this is a flat list: a message, what it leads to (message and receipt, in turns), the next message, and so on.
The worker of a message is in its upper bits; the lives of workers other than these two come at the end. All of it runs
under ``Context.lock``, for microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from actorrpc.autograd import graph
from actorrpc.autograd.contexts import Context
from actorrpc.autograd.messages import Sink
from actorrpc.errors import ProtocolError
from actorrpc.rpc.fork_messages import WorkerKey

__all__ = ["hear", "tell"]

_NODES: Final = 250  # graphs of more nodes are not walked before a pass needs it
_NEWS: Final = 100  # so many messages are told of at most
_RANK_BITS: Final = 48


def tell(context: Context, me: WorkerKey, message: int, peer: WorkerKey) -> list[Any]:
    """Return what ``peer`` is to hear along with a message of ours that has been recorded."""
    with context.lock:
        edges = context.sends.get(message)
        if edges is None:
            return []
        found = graph.reach_if_small(edges, context.receipts, _NODES)
        if found is None:
            return []
        context.reaches[message] = found
        receipts = [context.receipts[node] for node in found.receipts]
        context.sinks[me, message] = tuple(
            [Sink(each.worker, each.message, each.number) for each in receipts]
        )
        told = context.told.setdefault(peer, set())
        news: list[Any] = []
        lives: dict[int, str] = {}
        left = [(me, message)]
        while left and len(news) < 2 * _NEWS:
            send = left.pop()
            worker, number = send
            sinks = context.sinks.get(send)
            if sinks is None or worker == peer or number in told:
                continue
            told.add(number)
            leads_to: list[int] = []
            for sink in sinks:
                leads_to += (sink.message, sink.receipt)
                left.append((sink.worker, sink.message))
                for each in (worker, sink.worker):
                    if each not in (me, peer):
                        lives[each.rank] = each.incarnation
            news += (number, leads_to)
    if lives:
        news.append(list(lives.items()))
    return news


def hear(context: Context, me: WorkerKey, sender: WorkerKey, news: Sequence[Any]) -> None:
    """Take note of what a message tells.

    Raises:
        ProtocolError: it makes no sense.
    """
    if not news:
        return
    try:
        found = _read(me, sender, news)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError("what a message says of where it leads to cannot be read") from error
    with context.lock:
        for send, sinks in found.items():
            context.sinks.setdefault(send, sinks)


def _read(
    me: WorkerKey, sender: WorkerKey, news: Sequence[Any]
) -> dict[tuple[WorkerKey, int], tuple[Sink, ...]]:
    lives = {me.rank: me, sender.rank: sender}
    if len(news) % 2:
        for rank, incarnation in news[-1]:
            lives.setdefault(rank, WorkerKey(rank, incarnation))
    found: dict[tuple[WorkerKey, int], tuple[Sink, ...]] = {}
    for index in range(0, len(news) - 1, 2):
        message, leads_to = news[index], news[index + 1]
        pairs = zip(leads_to[::2], leads_to[1::2], strict=True)
        sinks = tuple([Sink(lives[to >> _RANK_BITS], to, receipt) for to, receipt in pairs])
        found[lives[message >> _RANK_BITS], message] = sinks
    return found
