"""A worker's part of one backward pass: what has come, what to do next, what is to be sent on. No I/O.

Gradients come in on any thread, in any order, more than once, and before the plan; strata run one at a time, in order,
each by whichever thread finds it ready. So a part is guarded by the lock of its context, except for what only the thread
that runs a stratum uses. No user code runs under that lock.

Nothing that a pass has found counts before its verdict: until then sums and results are in the part only.

:class:`Sum` adds gradients up to the same last bit, in whatever order they come. Not thread-safe.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch.autograd.graph import GradientEdge

from actorrpc import _time
from actorrpc.autograd import graph
from actorrpc.autograd.contexts import Context, Node, Receipt
from actorrpc.autograd.errors import released
from actorrpc.autograd.graph import ReachableGraph, Tensors
from actorrpc.autograd.messages import Contribution, Gradient, Gradients, Stratum, make
from actorrpc.autograd.planner import ROOTS
from actorrpc.errors import ProtocolError, RpcError, RpcTimeoutError
from actorrpc.futures import Future
from actorrpc.wire.identity import WorkerKey

__all__ = ["FINISH", "LocalPass", "Sum", "Terms", "edges_of", "reach_of", "remember"]


class Sum:
    """The gradients that come to one node, added up in a given order, whatever the order in which they come.

    Args:
        order: the keys under which they come; of those that are added later, too.

    Attributes:
        total: the sum of what has been added up, for each tensor of the node; None where there is no gradient.
    """

    __slots__ = ("_at", "_held", "_order", "_own", "total")

    def __init__(self, order: list[int]) -> None:
        self._order = order
        self._at = 0
        self._held: dict[int, Tensors] = {}
        self._own: list[bool] = []
        self.total: Tensors = []

    def add(self, key: int, gradients: Tensors) -> bool:
        """Take what comes under ``key``; say whether all is there."""
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
                # In place only what we have made ourselves: others may know the first gradient.
                total[index] = graph.add_to(before, each) if own[index] else graph.add(before, each)
                own[index] = True


_node: Final[Callable[[GradientEdge], Node]] = attrgetter("node")
_variable: Final[Callable[[Node], torch.Tensor]] = attrgetter("variable")

#: Stands for the finishing of leaves, which comes after the last stratum.
FINISH: Final = -1

_REMEMBERED: Final = 1000  # passes of one context whose end is remembered


def _second_time(what: str) -> RuntimeError:
    """Return torch's error for a graph that has been given up."""
    return RuntimeError(
        "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
        "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
        "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
        f"after calling backward. ({what})"
    )


def edges_of(context: Context, message: int) -> tuple[GradientEdge, ...]:
    """Return the edges of a message that was sent from here.

    Raises:
        RpcError: no such message was sent in this context.
        RuntimeError: an earlier pass has given its graph up.
    """
    edges = context.sends.get(message)
    if edges is None:
        raise RpcError(f"Could not find send function: message {message} was not sent from here in {context}")
    if not edges:
        raise _second_time(f"message {message} was sent from here in {context}")
    return edges


def reach_of(context: Context, message: int) -> ReachableGraph:
    """Return where the gradients of a message that was sent from here lead to; remembered, as graphs do not change.

    Raises:
        RpcError: no such message was sent in this context.
        RuntimeError: an earlier pass has given its graph up, or the graph leads into another context.
    """
    edges = edges_of(context, message)
    known = context.reaches.get(message)
    if known is None:
        known = context.reaches[message] = graph.reach(edges, context.receipts)
    return known


def _together(reaches: Sequence[ReachableGraph]) -> ReachableGraph:
    """Return what one walk would have come to in place of several."""
    receipts = dict.fromkeys(node for each in reaches for node in each.receipts)
    leaves = dict.fromkeys(node for each in reaches for node in each.leaves)
    return ReachableGraph(tuple(receipts), tuple(leaves))


def _grouped() -> bool:
    """Say whether this process is in a process group, and so may have a DistributedDataParallel.

    Its hooks put sums into the ``.grad`` of leaves when the last of them has been reached: that has to be in the same call
    of the engine.
    """
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return module is not None and module.is_initialized()


class Terms:
    """What the caller of ``backward`` has asked for."""

    __slots__ = ("accumulate", "create_graph", "deadline", "retain_graph", "timeout")

    def __init__(self, retain_graph: bool, create_graph: bool, accumulate: str, timeout: float) -> None:
        self.retain_graph = retain_graph
        self.create_graph = create_graph
        self.accumulate = accumulate
        self.timeout = timeout
        self.deadline = _time.now() + timeout if timeout else None

    def left(self) -> float:
        """Return the seconds that are left, 0 for no bound.

        Raises:
            RpcTimeoutError: none are.
        """
        if self.deadline is None:
            return 0.0
        left = self.deadline - _time.now()
        if left <= 0:
            raise RpcTimeoutError(
                f"the backward pass was not over within {self.timeout} s; no gradients were changed. Give backward() "
                f"a longer timeout="
            )
        return left


class LocalPass:
    """A worker's part of one backward pass.

    Attributes:
        context: what it is a pass of.
        id: its number, with the rank of the worker where it began in the top 16 bits.
        origin: the worker where it began, where that is known.
        terms: what was asked for; None until the part has begun.
        begun: somebody has begun it, or is about to.
        answer: completed when this part comes to its end.
        awaited: where the pass begins here, what was asked of others: cancelled if this part fails.
        told: where the pass begins here, the workers that get the verdict.
        error: what ended this part.
        over: the verdict is here, or the pass was given up: what comes now is ignored.
        finished: all strata and leaves are done.
        decided: completed after the verdict, if anybody waits for it.
    """

    def __init__(self, context: Context, id: int, origin: WorkerKey | None) -> None:
        self.context = context
        self.id = id
        self.origin = origin
        self.terms: Terms | None = None
        self.begun = False
        self.answer: Future[None] | None = None
        self.awaited: Collection[Future[Any]] = ()
        self.told: set[WorkerKey] = set()
        self.error: BaseException | None = None
        self.over = False
        self.finished = False
        self.decided: Future[None] | None = None
        self._strata: list[Stratum] = []
        self._retained: set[int] = set()  # strata that must leave the graph to later ones
        self._where: dict[tuple[int, Contribution], int] = {}  # the stratum that waits for a gradient
        self._lacking: list[int] = []  # for each stratum, how many gradients it waits for
        self._arrived: dict[tuple[int, Contribution], Gradients] = {}
        self._next = 0
        self._busy = False
        # Used only by the thread that begins the part, and then by the one that is busy.
        self._edges: dict[int, tuple[GradientEdge, ...]] = {}
        self._reaches: dict[int, ReachableGraph] = {}
        self._ways: list[ReachableGraph] = []  # of each stratum
        self._receipts: dict[Node, Receipt] = {}
        self._leaves: dict[Node, None] = {}  # those that are still to be finished
        self._order: dict[Node, list[int]] = {}  # the strata that reach a node
        self._sums: dict[Node, Sum] = {}  # of nodes that several reach
        self._results: list[tuple[torch.Tensor, torch.Tensor]] = []  # each leaf once
        self._whole: dict[int, bool] = {}  # see _alone

    def __str__(self) -> str:
        return f"a part of a backward pass of {self.context}"

    # -- beginning: on one thread, without the lock --------------------------------------------------------------

    def root(self, edges: tuple[GradientEdge, ...]) -> ReachableGraph:
        """Take in the roots, where the pass begins here; their gradients arrive as those of message ``ROOTS``.

        Raises:
            RuntimeError: the graph leads into another context.
        """
        self._edges[ROOTS] = edges
        reach = self._reaches[ROOTS] = graph.reach(edges, self.context.receipts)
        return reach

    def begin(self, terms: Terms, strata: Sequence[Stratum]) -> None:
        """Take in the plan.

        Raises:
            RpcError: a message was not sent from here, or the context is over.
            RuntimeError: the graph of a message was given up.
        """
        context = self.context
        where: dict[tuple[int, Contribution], int] = {}
        lacking: list[int] = []
        reaching: dict[int, Sequence[Node]] = {}
        ends: set[Node] = set()
        count_of_ends = 0
        for index, stratum in enumerate(strata):
            count = 0
            reaches: list[ReachableGraph] = []
            for message, contributions in stratum.messages.items():
                if message not in self._edges:
                    self._edges[message] = context.sends.get(message) or edges_of(context, message)
                    self._reaches[message] = context.reaches.get(message) or reach_of(context, message)
                reaches.append(self._reaches[message])
                count += len(contributions)
                for contribution in contributions:
                    where[message, contribution] = index
            lacking.append(count)
            receipts, leaves = reached = reaches[0] if len(reaches) == 1 else _together(reaches)
            self._ways.append(reached)
            ends.update(receipts, leaves)
            count_of_ends += len(receipts) + len(leaves)
            for node in receipts:
                receipt = context.receipts.get(node)
                if receipt is None:
                    raise released(context)
                self._receipts[node] = receipt
                self._order.setdefault(node, []).append(index)
            if leaves:
                reaching[index] = leaves
        if reaching:
            if not terms.create_graph and (len(reaching) < 2 or not _grouped()):
                self._whole = self._alone(strata, reaching)
            for index, left in reaching.items():
                if index not in self._whole:
                    for node in left:
                        self._leaves[node] = None
                        self._order.setdefault(node, []).append(index)
        retained: set[int] = set()
        # What two of them pass through would lead both to the same ends.
        if len(ends) < count_of_ends and not (terms.retain_graph or terms.create_graph):
            retained = self._shared(strata)
        with context.lock:
            self.terms = terms
            self._strata = list(strata)
            self._retained = retained
            self._where = where
            self._lacking = lacking
            if self._arrived:
                early, self._arrived = self._arrived, {}
                for (message, contribution), gradients in early.items():
                    self.arrive(contribution.worker, contribution.receipt, message, gradients)

    def _alone(self, strata: Sequence[Stratum], reaching: Mapping[int, Sequence[Node]]) -> dict[int, bool]:
        """Return the strata that finish their leaves themselves, because no other reaches these: whether all of their
        gradients are sent to leaves.

        Where some are, and others not, the engine would copy those that are: a capture hands them on as they are.
        """
        found: dict[int, bool] = {}
        first: dict[int, int] = {}  # stratum, of each leaf
        for index, leaves in reaching.items():
            edges = direct = 0
            before = len(first)
            for node in leaves:
                found.pop(first.setdefault(id(node.variable), index), None)
            own = len(first) - before
            for message, contributions in strata[index].messages.items():
                for node, *_ in self._edges[message]:
                    edges += len(contributions)
                    direct += type(node) is graph.ACCUMULATE
            if own == len(leaves) and (not direct or edges == direct == own):
                found[index] = bool(direct)
        return found

    def _shared(self, strata: Sequence[Stratum]) -> set[int]:
        """Return the strata that pass through nodes that later ones pass through as well."""
        shared: set[int] = set()
        later: set[Node] = set()
        for index in range(len(strata) - 1, -1, -1):
            edges = [edge for message in strata[index].messages for edge in self._edges[message]]
            passed = graph.nodes(edges, self.context.receipts)
            if not passed.isdisjoint(later):
                shared.add(index)
            later |= passed
        return shared

    # -- under the lock of the context ---------------------------------------------------------------------------

    def arrive(self, sender: WorkerKey, receipt: int, message: int, gradients: Gradients) -> None:
        """Take in a gradient, out of the list. One that has come before, or that nobody waits for, changes nothing."""
        if self.over:
            return
        key = message, make(Contribution, (sender, receipt))
        if self.terms is not None:
            index = self._where.pop(key, None)
            if index is None:
                return
            self._lacking[index] -= 1
        self._arrived[key] = gradients.copy()
        gradients.clear()

    def take(self) -> int | None:
        """Return the number of the stratum to be run now, or ``FINISH``; None if there is none, or a thread is busy.

        The thread that gets one runs it and then calls :meth:`put`.
        """
        if self._busy or self.over or self.error is not None or self.terms is None or self.finished:
            return None
        if self._next < len(self._strata):
            if self._lacking[self._next]:
                return None
            self._busy = True
            return self._next
        self._busy = True
        return FINISH

    def put(self, index: int, done: bool) -> None:
        """Give back what :meth:`take` gave: ``done``, or not, if it has failed."""
        self._busy = False
        if done and index == FINISH:
            self.finished = True
        elif done:
            self._next += 1
            self.finished = self._next == len(self._strata) and not self._leaves
        if self.over:
            self._forget()

    def waits_for(self, worker: WorkerKey) -> bool:
        """Say whether gradients are to come from a worker."""
        return any(contribution.worker == worker for _, contribution in self._where)

    def drop(self) -> None:
        """Forget what has come and what was found; a thread that is busy does it when it has come to its end."""
        self.over = True
        if not self._busy:
            self._forget()

    def _forget(self) -> None:
        for table in (self._arrived, self._where, self._edges, self._reaches, self._receipts, self._leaves):
            table.clear()
        self._sums.clear()
        self._order.clear()
        self._ways, self._results = [], []

    # -- by the thread that is busy, without the lock ------------------------------------------------------------

    def messages(self, index: int) -> list[int]:
        """Return the messages that were sent from here whose gradients a stratum works off."""
        return [message for message in self._strata[index].messages if message != ROOTS]

    def work(self, index: int) -> list[tuple[WorkerKey, Gradient]]:
        """Work off a stratum in a call of the engine. Returns the gradients that are complete now, and whom they are for.

        Raises:
            Exception: what a node or a hook raised.
        """
        terms = self.terms
        assert terms is not None
        context, whole = self.context, self._whole.get(index)
        nodes, leaves = self._ways[index]
        outputs, gradients = self._given(self._strata[index])
        retain = terms.retain_graph or terms.create_graph or index in self._retained
        receipts: list[tuple[Node, int]] = []
        for node in nodes:
            receipts.append((node, self._receipts[node].outputs))
        of_receipts: list[Tensors] = []
        with context.engine:
            if whole is None:
                of_receipts, of_leaves = graph.capture(
                    outputs, gradients, receipts, leaves, retain_graph=retain, create_graph=terms.create_graph
                )
                for node, gradient in zip(leaves, of_leaves, strict=True):
                    self._add(node, index, [gradient])
            else:
                variables = list(map(_variable, map(_node, outputs) if whole else leaves))
                if whole:
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
        """Add what a stratum has found for a node; return the sum once it is complete."""
        total = self._sums.get(node)
        if total is None:
            total = self._sums[node] = Sum(self._order[node])
        return total.total if total.add(index, gradients) else None

    def _given(self, stratum: Stratum) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Take the gradients that have come for a stratum."""
        outputs: list[GradientEdge] = []
        gradients: list[torch.Tensor] = []
        for message, contributions in stratum.messages.items():
            edges = self._edges[message]
            for contribution in contributions:
                given = self._arrived.pop((message, contribution))
                if len(given) != len(edges):
                    raise ProtocolError(
                        f"message {message} has {len(edges)} gradients, but {len(given)} came"
                    )
                for edge, gradient in zip(edges, given, strict=True):
                    if gradient is not None:
                        outputs.append(edge)
                        gradients.append(gradient)
        if torch.cuda._initialized:
            graph.place(outputs, gradients)
        return outputs, gradients

    def finish(self) -> None:
        """Finish all leaves that this part has reached.

        Raises:
            RpcTimeoutError: somebody else uses the ``.grad`` of one.
            Exception: what a hook raised.
        """
        terms = self.terms
        assert terms is not None
        sums: dict[torch.Tensor, torch.Tensor] = {}
        for node in self._leaves:
            gradient = self._sums.pop(node).total[0]
            if gradient is not None:
                # A leaf whose node was made anew meanwhile has two.
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

    def commit(self) -> None:
        """Make what this part has found count."""
        terms, context = self.terms, self.context
        assert terms is not None
        if terms.accumulate == "grad":
            graph.accumulate(self._results)
        else:
            self._deposit()
        if not (terms.retain_graph or terms.create_graph):
            with context.lock:
                for message in self._edges:
                    if message in context.sends:
                        context.sends[message] = ()
                        context.reaches.pop(message, None)

    def _deposit(self) -> None:
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
            # Not under the lock: it may be long.
            total = gradient if before is None else graph.add(before[1], gradient)
            with lock:
                if gradients.get(id(leaf)) is before:
                    gradients[id(leaf)] = leaf, total
                    return


def remember(context: Context, id: int) -> None:
    """Note, under the lock of the context, that a pass is over."""
    context.ended[id] = None
    while len(context.ended) > _REMEMBERED:
        context.ended.popitem(last=False)
