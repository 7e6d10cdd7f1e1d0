"""A worker's part of one backward pass: received gradients, the next stratum, and gradients to send. No I/O.

A stratum is a set of messages whose gradients are processed in one call of the engine (see coordinator.py). A gradient may arrive
on any thread, in any order, several times, and before the plan. Strata run one at a time, in order, each on the thread that finds
the stratum ready. The context's lock guards a part, except the fields that one thread at a time uses. No user code
runs under this lock. The *verdict* is the decision, by the worker where the pass began, whether the pass has succeeded. Until the
verdict, sums and results are stored in the part only.

:class:`Sum` returns the same sum to the last bit, in whatever order gradients arrive. It is not thread-safe.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch.autograd.graph import GradientEdge

from actorrpc import _time
from actorrpc.autograd import graph
from actorrpc.autograd.contexts import Context, Node, Receipt, released
from actorrpc.autograd.graph import ReachableGraph, Tensors
from actorrpc.autograd.messages import ROOTS, Contribution, Gradient, Gradients, Stratum, make
from actorrpc.errors import ProtocolError, RpcError, RpcTimeoutError
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerKey

__all__ = ["FINISH", "LocalPass", "Sum", "Terms", "edges_of", "reach_of"]


class Sum:
    """Adds up the gradients of one node in a fixed order, in whatever order they arrive.

    Args:
        order: the keys of the gradients in the order of the addition; the list may grow.

    Attributes:
        total: the sum so far, for each tensor of the node; None for no gradient.
    """

    __slots__ = ("_at", "_held", "_order", "_own", "total")

    def __init__(self, order: list[int]) -> None:
        self._order = order
        self._at = 0
        self._held: dict[int, Tensors] = {}
        self._own: list[bool] = []
        self.total: Tensors = []

    def add(self, key: int, gradients: Tensors) -> bool:
        """Add the gradients of ``key``; return whether the sum is complete."""
        if self._order[self._at] != key:
            self._held[key] = gradients
            return False
        found: Tensors | None = gradients
        while found is not None:
            self._add(found)
            self._at += 1
            if self._at == len(self._order):
                return True
            found = self._held.pop(self._order[self._at], None)
        return False

    def _add(self, gradients: Tensors) -> None:
        total = self.total
        if not total:
            self.total = gradients
            return
        own = self._own = self._own or [False] * len(total)
        for index, each in enumerate(gradients):
            before = total[index]
            if before is None:
                total[index] = each
            elif each is not None:
                # Change a sum in place only if this object made it: other code may refer to the first gradient.
                total[index] = graph.add_to(before, each) if own[index] else graph.add(before, each)
                own[index] = True


_node: Final[Callable[[GradientEdge], Node]] = attrgetter("node")
_variable: Final[Callable[[Node], torch.Tensor]] = attrgetter("variable")

#: The number that stands for the finishing of leaves after the last stratum, in place of a stratum's number.
FINISH: Final = -1


def edges_of(context: Context, message: int) -> tuple[GradientEdge, ...]:
    """Return the edges of the tensors of a message that this worker sent.

    Raises:
        RpcError: this worker sent no such message in this context.
        RuntimeError: an earlier pass has freed the message's graph.
    """
    edges = context.sends.get(message)
    if edges is None:
        raise RpcError(f"Could not find send function: this worker sent no message {message} in {context}")
    if not edges:
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
            "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
            "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
            f"after calling backward. (this worker sent message {message} of the graph in {context})"
        )
    return edges


def reach_of(context: Context, message: int) -> ReachableGraph:
    """Return the nodes to which the gradients of a sent message lead. The result is kept, because graphs do not change.

    Raises:
        RpcError: this worker sent no such message in this context.
        RuntimeError: an earlier pass has freed the message's graph, or the graph leads into another context.
    """
    edges = edges_of(context, message)
    known = context.reaches.get(message)
    if known is None:
        known = context.reaches[message] = graph.reach(edges, context.receipts)
    return known


def _together(reaches: Sequence[ReachableGraph]) -> ReachableGraph:
    receipts = dict.fromkeys(node for each in reaches for node in each.receipts)
    leaves = dict.fromkeys(node for each in reaches for node in each.leaves)
    return ReachableGraph(tuple(receipts), tuple(leaves))


def _grouped() -> bool:
    """Return whether this process is in a process group of torch, so that it may have a DistributedDataParallel.

    DDP's hooks put sums into the ``.grad`` of leaves when the engine has reached the last leaf, so all leaves must be
    finished in the same call of the engine.
    """
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return module is not None and module.is_initialized()


class Terms:
    """The options of a backward pass."""

    __slots__ = ("accumulate", "create_graph", "deadline", "retain_graph", "timeout")

    def __init__(self, retain_graph: bool, create_graph: bool, accumulate: str, timeout: float) -> None:
        self.retain_graph = retain_graph
        self.create_graph = create_graph
        self.accumulate = accumulate
        self.timeout = timeout
        self.deadline = _time.now() + timeout if timeout else None

    def remaining(self) -> float:
        """Return the seconds until the deadline; 0 if the pass has no time-out.

        Raises:
            RpcTimeoutError: the deadline has passed.
        """
        if self.deadline is None:
            return 0.0
        left = self.deadline - _time.now()
        if left <= 0:
            raise RpcTimeoutError(
                f"the backward pass did not end within {self.timeout} s; no gradients were changed. Give backward() "
                f"a longer timeout="
            )
        return left


class _Step:
    """One stratum of a part.

    Attributes:
        messages: message -> the contributions for which the stratum waits, in the order in which they are added up.
        reached: the receipts and leaves at which the gradients of the messages end.
        lacking: how many contributions have not arrived yet.
        retain: whether later strata use nodes of this stratum, so that the engine must keep the graph.
        is_direct: None: the leaves are finished at the end of the part. False: the stratum finishes its leaves itself
            (``graph.run``). True: it does so, and every edge of the messages leads directly to a leaf (``graph.finish``).
    """

    __slots__ = ("is_direct", "lacking", "messages", "reached", "retain")

    def __init__(self, messages: dict[int, tuple[Contribution, ...]], reached: ReachableGraph) -> None:
        self.messages = messages
        self.reached = reached
        self.lacking = sum(map(len, messages.values()))
        self.retain = False
        self.is_direct: bool | None = None


class LocalPass:
    """A worker's part of one backward pass.

    Attributes:
        context: the context of the pass.
        id: the number of the pass, with the rank of the worker where the pass began in the top 16 bits.
        origin: the worker where the pass began, if known.
        terms: the options of the pass; None until the part has begun.
        begun: whether a thread has begun the part, or is about to begin it.
        answer: a future that is completed when this part ends; None if neither a worker nor a thread waits for the end.
        awaited: if the pass began on this worker, the calls to other workers, which are cancelled if this part fails.
        notified: if the pass began on this worker, the workers that get the verdict.
        error: the error with which this part has failed.
        over: whether the verdict has arrived, or this worker has ended the pass without it; then gradients are ignored.
        finished: whether all strata have run and all leaves are finished.
        decided: a future that is completed after the verdict; None if no thread waits for the verdict.
    """

    def __init__(self, context: Context, id: int, origin: WorkerKey | None) -> None:
        self.context = context
        self.id = id
        self.origin = origin
        self.terms: Terms | None = None
        self.begun = False
        self.answer: Future[None] | None = None
        self.awaited: Collection[Future[Any]] = ()
        self.notified: set[WorkerKey] = set()
        self.error: BaseException | None = None
        self.over = False
        self.finished = False
        self.decided: Future[None] | None = None
        self._steps: list[_Step] = []
        self._where: dict[tuple[int, Contribution], _Step] = {}  # the stratum that waits for a gradient
        self._received: dict[tuple[int, Contribution], Gradients] = {}
        self._next = 0
        self._busy = False
        # One thread at a time uses these fields, without the lock: the thread that begins the part, then each thread that runs a
        # stratum, and at last the thread that commits or drops the part.
        self._edges: dict[int, tuple[GradientEdge, ...]] = {}
        self._reaches: dict[int, ReachableGraph] = {}
        self._receipts: dict[Node, Receipt] = {}
        self._leaves: dict[Node, None] = {}  # nodes of the leaves that are finished at the end of the part
        self._order: dict[Node, list[int]] = {}  # the strata that reach a node
        self._sums: dict[Node, Sum] = {}  # for nodes that several strata reach, and for _leaves
        self._results: list[tuple[torch.Tensor, torch.Tensor]] = []  # each leaf once

    def __str__(self) -> str:
        return f"a part of a backward pass of {self.context}"

    # -- beginning: on one thread, without the lock --------------------------------------------------------------

    def root(self, edges: tuple[GradientEdge, ...]) -> ReachableGraph:
        """Add the roots of a pass that begins on this worker. Their gradients arrive as gradients of the message ``ROOTS``.

        Raises:
            RuntimeError: the graph leads into another context.
        """
        self._edges[ROOTS] = edges
        reach = self._reaches[ROOTS] = graph.reach(edges, self.context.receipts)
        return reach

    def begin(self, terms: Terms, strata: Sequence[Stratum]) -> None:
        """Begin the part with its strata.

        Raises:
            RpcError: this worker did not send a message of the strata, or the context was released.
            RuntimeError: the graph of a message was freed.
        """
        context = self.context
        steps: list[_Step] = []
        where: dict[tuple[int, Contribution], _Step] = {}
        ends: set[Node] = set()
        count_of_ends = 0
        for index, (messages,) in enumerate(strata):
            reaches: list[ReachableGraph] = []
            for message in messages:
                if message not in self._edges:
                    self._edges[message] = context.sends.get(message) or edges_of(context, message)
                    self._reaches[message] = context.reaches.get(message) or reach_of(context, message)
                reaches.append(self._reaches[message])
            step = _Step(messages, reaches[0] if len(reaches) == 1 else _together(reaches))
            steps.append(step)
            for message, contributions in messages.items():
                for contribution in contributions:
                    where[message, contribution] = step
            receipts, leaves = step.reached
            ends.update(receipts, leaves)
            count_of_ends += len(receipts) + len(leaves)
            for node in receipts:
                receipt = context.receipts.get(node)
                if receipt is None:
                    raise released(context)
                self._receipts[node] = receipt
                self._order.setdefault(node, []).append(index)
        reaching = [step for step in steps if step.reached.leaves]
        if reaching and not terms.create_graph and (len(reaching) < 2 or not _grouped()):
            self._find_alone(reaching)
        for index, step in enumerate(steps):
            if step.is_direct is None:
                for node in step.reached.leaves:
                    self._leaves[node] = None
                    self._order.setdefault(node, []).append(index)
        # Strata with a common interior node have a common end, because each path from the node ends at a receipt or a leaf.
        if len(ends) < count_of_ends and not (terms.retain_graph or terms.create_graph):
            self._find_shared(steps)
        with context.lock:
            self.terms = terms
            self._steps = steps
            self._where = where
            if self._received:
                early, self._received = self._received, {}
                for (message, contribution), gradients in early.items():
                    self.arrive(contribution.worker, contribution.receipt, message, gradients)

    def _find_alone(self, reaching: Sequence[_Step]) -> None:
        """Mark the strata that finish their leaves themselves, because no other stratum reaches these leaves.

        A stratum of which only some edges lead directly to leaves is not marked: ``graph.run`` would copy the gradients of these
        edges, ``graph.capture`` returns them without a copy.
        """
        first: dict[int, _Step] = {}  # id() of a leaf -> the first stratum that reaches the leaf
        for step in reaching:
            leaves = step.reached.leaves
            edges = direct = 0
            before = len(first)
            for node in leaves:
                first.setdefault(id(node.variable), step).is_direct = None
            own = len(first) - before
            for message, contributions in step.messages.items():
                for node, *_ in self._edges[message]:
                    edges += len(contributions)
                    direct += type(node) is graph.ACCUMULATE
            if own == len(leaves) and (not direct or edges == direct == own):
                step.is_direct = bool(direct)

    def _find_shared(self, steps: Sequence[_Step]) -> None:
        later: set[Node] = set()
        for step in reversed(steps):
            edges = [edge for message in step.messages for edge in self._edges[message]]
            passed = graph.nodes(edges, self.context.receipts)
            step.retain = not passed.isdisjoint(later)
            later |= passed

    # -- under the lock of the context ---------------------------------------------------------------------------

    def arrive(self, sender: WorkerKey, receipt: int, message: int, gradients: Gradients) -> None:
        """Move the gradients of one contribution from the list to the part. Ignore them if the part has begun without their
        contribution, or has got them already."""
        if self.over:
            return
        key = message, make(Contribution, (sender, receipt))
        if self.terms is not None:
            step = self._where.pop(key, None)
            if step is None:
                return
            step.lacking -= 1
        self._received[key] = gradients.copy()
        gradients.clear()

    def claim(self) -> int | None:
        """Return the number of the stratum to run now, or ``FINISH``; None if the part is not ready, runs now, or has ended.

        The calling thread has to run the stratum, and then to call :meth:`release`.
        """
        if self._busy or self.over or self.error is not None or self.terms is None or self.finished:
            return None
        if self._next < len(self._steps):
            if self._steps[self._next].lacking:
                return None
            self._busy = True
            return self._next
        self._busy = True
        return FINISH

    def release(self, index: int, done: bool) -> None:
        """Record that the run of a stratum from :meth:`claim` has ended; ``done`` is false if the run has failed."""
        self._busy = False
        if done and index == FINISH:
            self.finished = True
        elif done:
            self._next += 1
            self.finished = self._next == len(self._steps) and not self._leaves
        if self.over:
            self._forget()

    def waits_for(self, worker: WorkerKey) -> bool:
        """Return whether the part waits for gradients from a worker."""
        return any(contribution.worker == worker for _, contribution in self._where)

    def drop(self) -> None:
        """Discard all gradients and results; if a thread runs a stratum, that thread discards them at the stratum's end."""
        self.over = True
        if not self._busy:
            self._forget()

    def _forget(self) -> None:
        for table in (self._received, self._where, self._edges, self._reaches, self._receipts, self._leaves):
            table.clear()
        self._sums.clear()
        self._order.clear()
        self._steps, self._results = [], []

    # -- by the thread that runs a stratum, without the lock -----------------------------------------------------

    def messages(self, index: int) -> list[int]:
        """Return the sent messages of a stratum."""
        return [message for message in self._steps[index].messages if message != ROOTS]

    def work(self, index: int) -> list[tuple[WorkerKey, Gradient]]:
        """Run a stratum in a call of the engine. Return the gradients that are now complete, each with the worker to send it to.

        Raises:
            Exception: a node or a hook raised it.
        """
        terms = self.terms
        assert terms is not None
        context, step = self.context, self._steps[index]
        nodes, leaves = step.reached
        outputs, gradients = self._given(step)
        retain = terms.retain_graph or terms.create_graph or step.retain
        receipts: list[tuple[Node, int]] = []
        for node in nodes:
            receipts.append((node, self._receipts[node].outputs))
        of_receipts: list[Tensors] = []
        with context.engine:
            if step.is_direct is None:
                of_receipts, of_leaves = graph.capture(
                    outputs, gradients, receipts, leaves, retain_graph=retain, create_graph=terms.create_graph
                )
                for node, gradient in zip(leaves, of_leaves, strict=True):
                    self._add(node, index, [gradient])
            else:
                variables = list(map(_variable, map(_node, outputs) if step.is_direct else leaves))
                if step.is_direct:
                    results = graph.finish(variables, gradients, deadline=terms.deadline)
                else:
                    of_receipts, results = graph.run(
                        outputs, gradients, receipts, variables, retain_graph=retain, deadline=terms.deadline
                    )
                self._results += results
        complete: list[tuple[WorkerKey, Gradient]] = []
        for node, found in zip(nodes, of_receipts, strict=True):
            total = found if len(self._order[node]) == 1 else self._add(node, index, found)
            if total:
                self._sums.pop(node, None)
                to, message, receipt = self._receipts[node].sink
                sent = (context.id, self.id, message, receipt, total, terms.create_graph)
                complete.append((to, make(Gradient, sent)))
        return complete

    def _add(self, node: Node, index: int, gradients: Tensors) -> Tensors | None:
        total = self._sums.get(node)
        if total is None:
            total = self._sums[node] = Sum(self._order[node])
        return total.total if total.add(index, gradients) else None

    def _given(self, step: _Step) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Return the edges of a stratum and their gradients, and remove the gradients from the part."""
        outputs: list[GradientEdge] = []
        gradients: list[torch.Tensor] = []
        for message, contributions in step.messages.items():
            edges = self._edges[message]
            for contribution in contributions:
                given = self._received.pop((message, contribution))
                if len(given) != len(edges):
                    raise ProtocolError(
                        f"message {message} has {len(edges)} tensors that require grad, but {len(given)} gradients were received"
                    )
                for edge, gradient in zip(edges, given, strict=True):
                    if gradient is not None:
                        outputs.append(edge)
                        gradients.append(gradient)
        if torch.cuda.is_initialized():
            graph.place(outputs, gradients)
        return outputs, gradients

    def finish(self) -> None:
        """Finish the leaves that the strata have not finished themselves.

        Raises:
            RpcTimeoutError: another thread uses the ``.grad`` of a leaf.
            Exception: a hook raised it.
        """
        terms = self.terms
        assert terms is not None
        sums: dict[torch.Tensor, torch.Tensor] = {}
        for node in self._leaves:
            gradient = self._sums.pop(node).total[0]
            if gradient is not None:
                # A leaf has two nodes if torch freed its first AccumulateGrad node and made another node.
                leaf = node.variable
                sums[leaf] = graph.add(sums[leaf], gradient) if leaf in sums else gradient
                del gradient
        leaves, box = list(sums), list(sums.values())
        sums.clear()
        if leaves:
            with self.context.engine:
                finished = graph.finish(leaves, box, create_graph=terms.create_graph, deadline=terms.deadline)
            self._results += finished

    # -- the verdict: on one thread, without the lock -------------------------------------------------------------

    def reserve(self) -> graph.Borrowed | None:
        """Return the reservation of the leaves' ``.grad`` for :meth:`commit`; None if the results are for the context."""
        assert self.terms is not None
        return (
            graph.Borrowed([leaf for leaf, _ in self._results]) if self.terms.accumulate == "grad" else None
        )

    def commit(self, grads: list[torch.Tensor | None] | None) -> None:
        """Add the results of this part to ``grads`` (of :meth:`reserve`) or to the context; record which graphs are freed."""
        terms, context = self.terms, self.context
        assert terms is not None
        if grads is not None:
            graph.accumulate(grads, [gradient for _, gradient in self._results])
        else:
            self._add_to_context()
        if not (terms.retain_graph or terms.create_graph):
            with context.lock:
                for message in self._edges:
                    if message in context.sends:
                        context.sends[message] = ()
                        context.reaches.pop(message, None)

    def _add_to_context(self) -> None:
        gradients = self.context.gradients
        present: list[tuple[torch.Tensor, torch.Tensor]] = []
        with self.context.lock:
            for found in self._results:
                if gradients.setdefault(id(found[0]), found) is not found:
                    present.append(found)
        for leaf, gradient in present:
            self._add_to(leaf, gradient)

    def _add_to(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        gradients, lock = self.context.gradients, self.context.lock
        while True:
            before = gradients.get(id(leaf))
            # Add without the lock, because the addition may take long.
            total = gradient if before is None else graph.add(before[1], gradient)
            with lock:
                if gradients.get(id(leaf)) is before:
                    gradients[id(leaf)] = leaf, total
                    return
