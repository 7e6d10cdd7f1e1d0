"""Autograd contexts: one worker's record of one distributed forward pass, and the table of these records.

A context is made on its origin by ``with context()``, and on other workers by the first message that names it.
It ends on all workers when the origin leaves the block. Its id stays in the list of released contexts, so that late
messages do not make it again.

Locks: ``Contexts._lock`` guards the tables of contexts; ``Context.lock`` guards the fields of a context. Both are held for
microseconds, never nested, and re-entrant, because the garbage collector may run a finaliser that sends a message at any
allocation. ``Context.engine`` is held during calls of the autograd engine, which run user code: it is taken before
``Context.lock``, never under it.
"""

from __future__ import annotations

import itertools
import os
from _thread import RLock
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from actorrpc import _time
from actorrpc.autograd.messages import Sink
from actorrpc.errors import RpcError
from actorrpc.rpc.refcount.tables import Recent
from actorrpc.wire.identity import WorkerKey

if TYPE_CHECKING:
    from actorrpc.autograd.graph import ReachableGraph
    from actorrpc.autograd.local_pass import LocalPass

__all__ = ["Context", "Contexts", "Node", "Receipt"]

_RANK_BITS: Final = 48
_CONTEXTS: Final = 10_000  # how many ids of released contexts are kept
_PASSES: Final = 1000  # how many ids of ended passes of one context are kept

#: A node of torch's autograd graph. The nodes have no common class.
Node = Any


class Receipt(NamedTuple):
    """The record of a received message whose tensors require grad: the receiver of its gradient.

    Attributes:
        sink: the sender, the sender's number of the message, and this worker's number of the receipt. A message that is opened
            several times (a kept result) has several receipts.
        outputs: how many of its tensors require grad: the receiving node has as many outputs.
    """

    sink: Sink
    outputs: int


class Context:
    """One distributed forward pass, as this worker knows it. Thread-safe.

    Attributes:
        id: its number, with the rank of its origin in the top 16 bits.
        lock: guards all that follows.
        engine: held during one call of the autograd engine.
        sends: the sent messages with tensors that require grad: the edge of each such tensor, in order. Empty
            after a backward pass that has freed the graph.
        receipts: the received messages with such tensors, by the node that stands for the message.
        peers: the workers that were sent a message of this context.
        gradients: the results of backward passes for the leaves of this worker: leaf and gradient, by the leaf's ``id()``,
            because torch computes hashes of tensors in Python.
        passes: the backward passes that are under way here, or wait for the verdict of their origin.
        ended: the numbers of ended passes, whose late messages are ignored.
        reaches: the ends of the graphs of ``sends``, computed when they are needed.
        sinks: for each message, the receipts to which its gradients lead; from the news in messages of other workers, and from
            discoveries of passes.
        sent_sinks: for each worker, the numbers of the messages whose sinks were sent to it.
        maker: the worker that made it, if known; a later incarnation of a worker may have the same rank.
        touched: when it was last used, on the monotonic clock.
        released: it has ended, and records no more messages.
    """

    def __init__(self, id: int) -> None:
        self.id = id
        self.lock = RLock()
        self.engine = RLock()
        self.sends: dict[int, tuple[GradientEdge, ...]] = {}
        self.receipts: dict[Node, Receipt] = {}
        self.peers: set[WorkerKey] = set()
        self.gradients: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.passes: dict[int, LocalPass] = {}
        self.ended: Recent[int, None] = Recent(_PASSES)
        self.reaches: dict[int, ReachableGraph] = {}
        self.sinks: dict[tuple[WorkerKey, int], Sequence[Sink]] = {}
        self.sent_sinks: dict[WorkerKey, set[int]] = {}
        self.maker: WorkerKey | None = None
        self.touched = _time.now()
        self.released = False

    @property
    def origin(self) -> int:
        """The rank of the worker that made it."""
        return self.id >> _RANK_BITS

    def record_send(self, message: int, edges: Sequence[GradientEdge]) -> None:
        """Record that a message with tensors that require grad is sent."""
        with self.lock:
            if not self.released:
                self.sends[message] = tuple(edges)

    def record_receipt(self, node: Node, receipt: Receipt) -> None:
        """Record a received message with tensors that require grad; ``node`` has these tensors as its outputs."""
        with self.lock:
            if not self.released:
                self.receipts[node] = receipt

    def joined_by(self, peer: WorkerKey) -> None:
        """Record that a message of this context was sent to a worker."""
        with self.lock:
            self.peers.add(peer)

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        return f"autograd context {self.id} of worker {self.origin}"


class Contexts:
    """The contexts of one worker. Thread-safe.

    Args:
        me: this worker.
    """

    def __init__(self, me: WorkerKey) -> None:
        self.me = me
        self._lock = RLock()
        #: contexts by their id; changed under the lock, read without it
        self.live: dict[int, Context] = {}
        self._released: Recent[int, None] = Recent(_CONTEXTS)
        # A restarted worker must not use ids that its earlier incarnation has used; the low bits are the count.
        first = int.from_bytes(os.urandom(3), "big") << 20
        self._ids = itertools.count((me.rank & 0xFFFF) << _RANK_BITS | first)
        #: returns a number for a new message
        self.new_message: Callable[[], int] = itertools.count((me.rank & 0xFFFF) << _RANK_BITS | 1).__next__
        #: returns a number for a new receipt
        self.new_receipt: Callable[[], int] = itertools.count(1).__next__

    def create(self) -> Context:
        """Make a context whose origin is this worker."""
        context = Context(next(self._ids))
        with self._lock:
            self.live[context.id] = context
        return context

    def get(self, id: int) -> Context:
        """Return a context that this worker knows of.

        Raises:
            TypeError: ``id`` is not an int.
            RpcError: there is none: it was released, or this worker has received no message of it.
        """
        if isinstance(id, bool) or not isinstance(id, int):
            raise TypeError(
                f"a context is named by an int, the value of `with context() as id`, not by {id!r}"
            )
        context = self.live.get(id)
        if context is None:
            over = ": it has been released" if id in self._released else ""
            raise RpcError(f"Could not find autograd context with id: {id}{over}")
        return context

    def is_over(self, id: int) -> bool:
        """Return whether a context was released here; False if it is unknown."""
        return id in self._released

    def reach(self, id: int) -> Context | None:
        """Return the context that a message names; create it if it is new on this worker; None if it was released."""
        context = self.live.get(id)
        if context is None:
            with self._lock:
                if id in self._released:
                    return None
                context = self.live.get(id)
                if context is None:
                    context = self.live[id] = Context(id)
        return context

    def release(self, id: int) -> Context | None:
        """Remove a context, and return it; None if there is none.

        The caller ends the passes of the context and notifies the peers of the context.
        """
        with self._lock:
            context = self.live.pop(id, None)
            self._released.put(id, None)
        if context is not None:
            with context.lock:
                context.released = True
        return context

    def all(self) -> list[Context]:
        """Return all contexts that this worker knows of."""
        return list(self.live.values())
