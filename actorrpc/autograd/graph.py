"""Operations on torch's autograd graph: walks, gradients without side effects, and the finishing of leaves.

A pass runs on a worker in parts. Each part is one call of the engine that *captures* the gradients of received messages and
of leaves. Hooks of leaves must see the whole gradient, once. Therefore they are silent during captures, and a last call
*finishes* the leaves: it puts the sums into their ``.grad`` as a local backward pass would, with hooks of every kind,
including hooks in C++ (DDP's). If only one part reaches the leaves, which is the common case, that part *runs* as a local
pass does, and finishes them.

All functions run on the calling thread, with user code (hooks, custom Functions), and hold no lock.

The ``.grad`` of a leaf has one user at a time. The engine runs hooks of a leaf only while it puts a gradient into ``.grad``,
and a local optimizer reads gradients from ``.grad``: both borrow the slot, and its content is put back afterwards.

A received message is one node of torch's graph; the outputs of the node are the tensors that require grad. A backward pass
sends the gradients that arrive at the node to the worker that sent the message.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from actorrpc import _time
from actorrpc.autograd.contexts import Node, Receipt
from actorrpc.autograd.messages import make
from actorrpc.errors import RpcTimeoutError
from actorrpc.transport.signals import checkpoint, pending_here, uninterruptible

__all__ = [
    "ACCUMULATE",
    "ANCHOR",
    "Borrowed",
    "ReachableGraph",
    "RecvFunction",
    "Tensors",
    "accumulate",
    "add",
    "add_to",
    "capture",
    "edge_of",
    "finish",
    "nodes",
    "place",
    "reach",
    "reach_if_small",
    "receive",
    "run",
]

_SLICE_S: Final = 0.1  # of a wait: signal handlers that were put off come after it

# Guards what follows; held for microseconds. Re-entrant: the collector may run under it.
_lock = threading.RLock()
_changed = threading.Condition(_lock)
_taken: set[int] = set()  # ids of borrowed leaves; each Borrowed keeps its leaves alive
_waiting: list[Borrowed] = []


@uninterruptible
class Borrowed:
    """Has the ``.grad`` of leaves for itself in a ``with`` block, empty; afterwards it is what it was.

    All leaves are taken at once, so that two users of overlapping sets cannot wait for each other. The block gets a list of
    the contents of the slots, in order; at its end, the entries of the list are put into the slots.

    Args:
        leaves: the tensors; each once.
        deadline: on the monotonic clock; None waits for as long as other threads use them.

    Raises:
        RpcTimeoutError: other threads did not give them back in time. No leaf was taken.
    """

    __slots__ = ("_before", "_deadline", "_ids", "_leaves")

    def __init__(self, leaves: Iterable[torch.Tensor], deadline: float | None = None) -> None:
        self._leaves = list(leaves)
        self._ids = set(map(id, self._leaves))
        self._deadline = deadline
        self._before: list[torch.Tensor | None] = []

    def __enter__(self) -> list[torch.Tensor | None]:
        with _lock:
            free = self._ids.isdisjoint(_taken)
            if free:
                _taken.update(self._ids)
        while not free:
            checkpoint()
            free = self._take()
        for leaf in self._leaves:
            self._before.append(leaf.grad)
            leaf.grad = None
        return self._before

    def _take(self) -> bool:
        """Take the leaves; False: a signal handler is to run first."""
        with _lock:
            while not self._ids.isdisjoint(_taken):
                left = _SLICE_S if self._deadline is None else self._deadline - _time.now()
                if left <= 0:
                    raise RpcTimeoutError(
                        "another backward pass, or an optimizer, at work on the same parameters on this worker, did not end "
                        "in time; nothing was changed. Run one after the other, or give a longer timeout="
                    )
                if pending_here():
                    return False
                _waiting.append(self)
                try:
                    _changed.wait(min(_time.patience(left), _SLICE_S))
                finally:
                    _waiting.remove(self)
            _taken.update(self._ids)
        return True

    def __exit__(self, *_: object) -> None:
        try:
            for leaf, grad in zip(self._leaves, self._before, strict=True):
                leaf.grad = grad
        finally:
            with _lock:
                _taken.difference_update(self._ids)
                if _waiting:
                    _changed.notify_all()


class RecvFunction(torch.autograd.Function):
    """Makes tensors that have arrived the outputs of one node. They are hidden from it in a list, so that they stay the
    same objects, are views of nothing, and may be changed in place.

    A backward pass puts a list into the node's attribute ``box`` before it runs the engine, and finds the gradients there.
    """

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        ctx.box = None
        ctx.materialize_grads = False
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        box = ctx.box
        if box is None:
            raise RuntimeError(
                "this tensor's history leads to another worker, where a local backward() does not go: call "
                "actorrpc.autograd.backward(context_id, [loss]) inside of `with context() as context_id`, or detach() it"
            )
        box += gradients
        return None, None


_IN_PYTHON: Final[Any] = torch._C._FunctionBase

#: The leaf that all these nodes hang from: a walk that gets to it has passed through one.
ANCHOR: Final = torch.empty(0, requires_grad=True)
# What Function.apply calls at last, without its questions about torch.func, which never sees these tensors.
_apply: Final[Callable[..., tuple[torch.Tensor, ...]]] = super(torch.autograd.Function, RecvFunction).apply


def receive(tensors: Sequence[torch.Tensor]) -> Any:
    """Give tensors that have arrived a history: one node, whose outputs they are; return the node."""
    for each in tensors:
        each.requires_grad_(False)
    if torch.is_grad_enabled():  # not so in inference mode
        outputs = _apply(ANCHOR, list(tensors))
    else:
        with torch.inference_mode(False), torch.enable_grad():
            outputs = _apply(ANCHOR, list(tensors))
    return outputs[0].grad_fn


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Return where the gradient of a tensor goes, as torch's ``get_gradient_edge`` does; grad mode is on.

    That takes a view of what nodes written in Python give (:class:`RecvFunction` is one), to keep these alive: sparse tensors
    have none.
    """
    node: Any = tensor.grad_fn
    if node is not None and not isinstance(node, _IN_PYTHON):
        return make(GradientEdge, (node, tensor.output_nr, None))
    if tensor.layout is not torch.strided:
        token: Any = tensor.clone().grad_fn
        node, index = token.next_functions[0]
        return make(GradientEdge, (node, index, token))
    token = tensor.view_as(tensor).grad_fn
    if node is None:
        return make(GradientEdge, (token.next_functions[0][0], 0, None))
    return make(GradientEdge, (node, tensor.output_nr, token))


#: Gradients of some tensors, in order; None for no gradient.
Tensors = list["torch.Tensor | None"]

# What torch.autograd.backward and grad call at last, without the half of the time that they spend before it.
_run: Final[Callable[..., tuple[torch.Tensor | None, ...]]] = Variable._execution_engine.run_backward
#: The class of the nodes that stand for leaves.
ACCUMULATE: Final[Any] = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)


# -- where edges lead -------------------------------------------------------------------------------------------------


class ReachableGraph(NamedTuple):
    """What a backward pass comes to from some edges: each node once, in the order of the walk.

    Attributes:
        receipts: the nodes that stand for received messages.
        leaves: the AccumulateGrad nodes of leaves.
    """

    receipts: tuple[Node, ...]
    leaves: tuple[Node, ...]


def reach(
    edges: Sequence[GradientEdge], receipts: Mapping[Node, Receipt], seen: set[Node] | None = None
) -> ReachableGraph:
    """Walk from edges to where their gradients end on this worker.

    Args:
        receipts: the nodes at which this context was entered.
        seen: takes the nodes that the walk comes to.

    Raises:
        RuntimeError: the walk came to a tensor that was received in another context.
    """
    found = reach_if_small(edges, receipts, 1 << 62, set() if seen is None else seen)
    if found is None:
        raise RuntimeError(
            "a tensor that takes part in the backward pass was received in another context: detach() it, or call backward() "
            "with the id of the context in which it was received"
        )
    return found


def reach_if_small(
    edges: Sequence[GradientEdge], receipts: Mapping[Node, Receipt], most: int, seen: set[Node] | None = None
) -> ReachableGraph | None:
    """Walk as :func:`reach` does; None if the walk has more than ``most`` nodes, or leads into another context."""
    # Nodes themselves are kept, never their id(): a node that nothing refers to in Python is a new object next time.
    seen = set() if seen is None else seen
    found: list[Node] = []
    leaves: list[Node] = []
    stack: list[Node] = []
    for node, *_ in reversed(edges):
        stack.append(node)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        if len(seen) >= most:
            return None
        seen.add(node)
        following = node.next_functions
        if not following:
            if type(node) is ACCUMULATE:
                if node.variable is ANCHOR:
                    return None
                leaves.append(node)
        elif node in receipts:
            found.append(node)
        else:
            for after, _ in following:
                if after is not None and after not in seen:
                    stack.append(after)
    return make(ReachableGraph, (tuple(found), tuple(leaves)))


def nodes(edges: Sequence[GradientEdge], receipts: Mapping[Node, Receipt]) -> set[Node]:
    """Return the nodes that a backward pass from some edges executes: those before where the gradients end."""
    seen: set[Node] = set()
    found = reach(edges, receipts, seen)
    return seen.difference(found.receipts, found.leaves)


# -- captures ---------------------------------------------------------------------------------------------------------


# Whether hooks of leaves are silent, for one thread and the engine's threads that work for it. This is one of torch's
# thread-local objects, which the engine copies to its device threads: hooks of leaves that are not on the CPU run there. The
# object is removed when it is not used, if torch has a function for that, because torch frees it too late at a thread's end.
_SILENCE: Final = "actorrpc.silence"
_has: Final[Callable[[str], bool]] = torch._C._is_key_in_tls
_get: Final[Callable[[str], bool]] = torch._C._get_obj_in_tls
_put: Final[Callable[[str, bool], None]] = torch._C._stash_obj_in_tls
_remove: Final[Callable[[str], None] | None] = getattr(torch._C, "_remove_obj_from_tls", None)


def _silence(on: bool) -> bool:
    """Switch the silence of this thread on or off; return whether it was on."""
    before = _has(_SILENCE) and _get(_SILENCE)
    if before != on:
        if on or _remove is None:
            _put(_SILENCE, on)
        else:
            _remove(_SILENCE)
    return before


class _Hook:
    """A user's hook of a leaf that is silent during captures. It replaces the hook in torch's table, so that the hook's handle
    removes it. Its copies and pickles are the hook itself."""

    __slots__ = ("hook",)

    def __init__(self, hook: Callable[[torch.Tensor], Any]) -> None:
        self.hook = hook

    def __call__(self, gradient: torch.Tensor) -> Any:
        if _has(_SILENCE) and _get(_SILENCE):
            return None
        return self.hook(gradient)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "hook"), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.hook, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.hook,)


def _itself(hook: Any) -> Any:
    return hook


def _hush(leaves: Sequence[Node]) -> None:
    for node in leaves:
        hooks = node.variable._backward_hooks
        if hooks:
            for key, hook in list(hooks.items()):
                if type(hook) is not _Hook:
                    hooks[key] = _Hook(hook)


def capture(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor],
    receipts: Sequence[tuple[Node, int]],
    leaves: Sequence[Node],
    *,
    retain_graph: bool,
    create_graph: bool,
) -> tuple[list[Tensors], Tensors]:
    """Run the engine once and return the gradients of received messages and of leaves, without executing their nodes.

    Hooks of interior tensors run, hooks of leaves do not.

    Args:
        outputs: the edges to begin at; the gradients of a repeated edge are added up in this order.
        gradients: for each of ``outputs``.
        receipts: nodes that stand for received messages, and how many outputs each of them has.
        leaves: AccumulateGrad nodes.

    Raises:
        Exception: a node or a hook raised it.
    """
    if not outputs or not (receipts or leaves):
        return [[None] * count for _, count in receipts], [None] * len(leaves)
    inputs: list[GradientEdge] = []
    for node, count in receipts:
        for index in range(count):
            inputs.append(make(GradientEdge, (node, index, None)))
    for node in leaves:
        inputs.append(make(GradientEdge, (node, 0, None)))
    if leaves:
        _hush(leaves)
        before = _silence(True)  # a hook of an interior tensor may have led here from another capture
    try:
        captured = _run(
            tuple(outputs), tuple(gradients), retain_graph, create_graph, tuple(inputs), True, False
        )
    finally:
        if leaves:
            _silence(before)
    at = 0
    of_receipts: list[Tensors] = []
    for _, count in receipts:
        of_receipts.append(list(captured[at : at + count]))
        at += count
    return of_receipts, list(captured[at:])


def place(edges: Sequence[GradientEdge], gradients: list[torch.Tensor]) -> None:
    """Move gradients to the devices of their tensors: a message may have led from a GPU to a CPU, or back."""
    for index, edge in enumerate(edges):
        gradients[index] = gradients[index].to(edge.node._input_metadata[edge.output_nr].device)


# -- sums -------------------------------------------------------------------------------------------------------------


def add(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two gradients, in new memory: sparse if both are."""
    if one.layout is not torch.strided and other.layout is torch.strided:
        one, other = other, one  # torch adds sparse to dense, but not dense to sparse
    if one.requires_grad or other.requires_grad:
        with torch.enable_grad():  # whatever the caller of backward() has set
            return one + other
    return one + other


def add_to(total: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Add to a sum in place if it can hold the result; return the sum. No other code may refer to ``total``."""
    if total.layout is not torch.strided or total.requires_grad or other.requires_grad:
        return add(total, other)
    return total.add_(other)


def accumulate(gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Add gradients to the ``.grad`` of leaves, each of which is there once, as a local backward pass does: in place where
    it would."""
    with Borrowed([leaf for leaf, _ in gradients]) as grads:
        for index, (_, gradient) in enumerate(gradients):
            before = grads[index]
            grads[index] = gradient if before is None else add_to(before, gradient)


# -- the whole at once -------------------------------------------------------------------------------------------------


def run(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor],
    receipts: Sequence[tuple[Node, int]],
    leaves: Sequence[torch.Tensor],
    *,
    retain_graph: bool,
    deadline: float | None = None,
) -> tuple[list[Tensors], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Run the engine once; return the gradients of received messages, and the leaves with their gradients.

    Hooks of all kinds run. ``.grad`` is unchanged when this returns. No two results share memory.

    Args:
        outputs, gradients, receipts: as for :func:`capture`.
        leaves: all leaves that can be reached; each once.
        deadline: until when to wait for other users of the ``.grad`` of these leaves; monotonic, None for no bound.

    Raises:
        RpcTimeoutError: other threads did not give the leaves back in time.
        Exception: a node or a hook raised it.
    """
    if not outputs:
        return [[None] * count for _, count in receipts], []
    boxes: list[Tensors] = []
    for node, _ in receipts:
        box: Tensors = []
        node.box = box
        boxes.append(box)
    silent = _silence(False) if _has(_SILENCE) else False
    try:
        with Borrowed(leaves, deadline):
            _run(tuple(outputs), tuple(gradients), retain_graph, False, (), True, True)
            found: Tensors = list(map(_grad, leaves))
            _unshare(found)
    finally:
        if silent:
            _silence(silent)
        for node, _ in receipts:
            node.box = None
    for box, (_, count) in zip(boxes, receipts, strict=True):
        if not box:  # the engine did not reach it
            box += [None] * count
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for leaf, gradient in zip(leaves, found, strict=True):
        if gradient is not None:
            results.append((leaf, gradient))
    return boxes, results


# -- finishing leaves -------------------------------------------------------------------------------------------------


class _Feed(torch.autograd.Function):
    """A node whose inputs are leaves, and whose backward gives them the gradients in a box.

    The box is emptied, so that only the engine refers to the gradients. Then they become ``.grad`` without a copy, as in a
    local backward pass.
    """

    @staticmethod
    def forward(ctx: Any, box: list[torch.Tensor], *_leaves: torch.Tensor) -> torch.Tensor:
        ctx.box = box
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        box = ctx.box
        gradients = (None, *box)
        box.clear()
        return gradients


_feed: Final[Callable[..., torch.Tensor]] = _Feed.apply
_one: Final = torch.ones(())


_use_count: Final[Callable[[int], int]] = torch._C._storage_Use_Count
_some: Final = torch.empty(1)
_grad: Final[Callable[[torch.Tensor], torch.Tensor | None]] = attrgetter("grad")
_ALONE: Final = _use_count(_some.untyped_storage()._cdata)


def _unshare(gradients: Tensors | list[torch.Tensor]) -> None:
    """Copy, in the list, the gradients whose memory other tensors have as well.

    The engine copies a gradient only if other code refers to the tensor itself: views of one gradient (of the operands of a
    sum, say) would become the ``.grad`` of several leaves.
    """
    for index, gradient in enumerate(gradients):
        if gradient is not None and gradient.layout is torch.strided:
            if _use_count(gradient.untyped_storage()._cdata) > _ALONE:
                gradients[index] = gradient.clone()


def finish(
    leaves: Sequence[torch.Tensor],
    box: list[torch.Tensor],
    *,
    create_graph: bool = False,
    deadline: float | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run the hooks of leaves on their whole gradients; return the leaves with their gradients after that.

    ``.grad`` is unchanged when this returns. The result omits leaves that have ceased to require grad, and leaves whose gradient
    a hook has removed. No two results share memory.

    Args:
        leaves: each once.
        box: the gradient of each; empty afterwards. A gradient without other references is not copied.
        create_graph: the gradients have a history. Then only tensor hooks run.
        deadline: as of :func:`run`.

    Raises:
        RpcTimeoutError: other threads did not give the leaves back in time.
        Exception: a hook raised it.
    """
    for leaf in leaves:
        if not leaf.is_leaf:
            raise RuntimeError("a leaf Variable has been moved into the graph interior")
    if not all(leaf.requires_grad for leaf in leaves):
        box[:] = [each for leaf, each in zip(leaves, box, strict=True) if leaf.requires_grad]
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
    if not leaves:
        return []
    before = _silence(False)
    try:
        if create_graph:
            return _finish_with_history(leaves, box)
        _unshare(box)
        with Borrowed(leaves, deadline):
            root = _root(leaves, box)
            _run((root,), (_one,), False, False, (), True, True)
            return [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None]
    finally:
        _silence(before)


def _root(leaves: Sequence[torch.Tensor], box: list[torch.Tensor]) -> torch.Tensor:
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return _feed(box, *leaves)
    with torch.inference_mode(False), torch.enable_grad():
        return _feed(box, *leaves)


def _finish_with_history(
    leaves: Sequence[torch.Tensor], box: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    # Not into .grad: with a history, gradient and leaf would refer to each other.
    edges = tuple(get_gradient_edge(leaf) for leaf in leaves)
    results = _run(edges, tuple(box), True, True, edges, True, False)
    box.clear()
    return [(leaf, each) for leaf, each in zip(leaves, results, strict=True) if each is not None]
