"""Autograd contexts: one worker's record of one distributed forward pass, and the table of these records.

A context is made on its *origin* by ``with context()``, and on each other worker by the first message that has the context's id.
When the block ends on the origin, all workers release the context. Each worker keeps the id in a list of released contexts, so
that late messages do not make the context again.

Locks: ``Contexts._lock`` guards the tables of contexts; ``Context.lock`` guards the fields of a context. Both are held for
microseconds, never nested, and re-entrant, because the garbage collector may run a finaliser that sends a message at any
allocation. ``Context.engine`` is held during calls of the autograd engine, which run user code: it is taken before
``Context.lock``, never under it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from threading import RLock
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

__all__ = ["Context", "Contexts", "Node", "Receipt", "released"]

_RANK_BITS: Final = 48
_CONTEXTS: Final = 10_000  # ids of released contexts that a worker keeps
_PASSES: Final = 1000  # ids of ended passes that a context keeps

#: A node of torch's autograd graph. The nodes have no common class.
Node = Any


class Receipt(NamedTuple):
    """The record of a received message with tensors that require grad.

    Attributes:
        sink: the sender of the message, the message's number, and this worker's number of the receipt. A message that is opened
            several times (a kept result) has several receipts.
        outputs: how many tensors of the message require grad, which is the number of outputs of the message's node.
    """

    sink: Sink
    outputs: int


class Context:
    """This worker's record of one distributed forward pass. Thread-safe.

    Attributes:
        id: the context's number, with the rank of its origin in the top 16 bits.
        lock: guards the tables below.
        engine: a lock that is held during one call of the autograd engine.
        sends: number of a sent message with tensors that require grad -> the edges of these tensors, in order; no
            edges after a backward pass has freed the graph.
        receipts: node that stands for a received message -> the message's receipt.
        peers: the workers to which this worker has sent a message of this context.
        gradients: ``id()`` of a leaf of this worker -> the leaf, and the sum of its gradients of all passes. The key is not the
            leaf, because torch computes hashes of tensors in Python.
        passes: the number of a backward pass -> this worker's part of it, until the pass is committed or discarded.
        ended: the numbers of ended passes, whose late messages are ignored.
        reaches: message of ``sends`` -> the receipts and leaves at which its gradients end on this worker, once computed.
        sinks: message of any worker -> the receipts to which its gradients lead. Other workers report these receipts in their
            messages of the forward pass (see recorder.py), or when a pass queries them.
        sent_sinks: worker -> the numbers of the messages whose sinks were sent to the worker.
        maker: the worker that made the context, if known. The id has only its rank, which a later incarnation may have, too.
        touched: when the context was last used, on the monotonic clock.
        released: whether the context was released; then it records no more messages.
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
        """The rank of the worker that made the context."""
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
        # The random bits keep a restarted worker from using an id of its earlier incarnation. The low 20 bits are a count.
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
            RpcError: the context was released, or this worker has received no message of the context.
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
        """Return whether this worker has released a context; False if the context is unknown."""
        return id in self._released

    def reach(self, id: int) -> Context | None:
        """Return the context with the id in a message. Create it if it is new on this worker; return None if it was released."""
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
        """Remove a context, and return it; None if this worker does not have the context.

        The caller has to end the passes of the context and to notify the context's peers.
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


def released(context: Context) -> RpcError:
    """Return the error for a released context."""
    return RpcError(f"{context} was released: its `with` block has ended")
