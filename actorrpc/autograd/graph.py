"""Operations on torch's autograd graph: walks, gradients without side effects, and the finishing of leaves.

A worker runs its part of a pass in *strata*. Each stratum is one call of torch's engine that *captures* the gradients of received
messages and of leaves. A hook of a leaf must get the whole gradient, once. Therefore hooks of leaves are silent during captures,
and a last call of the engine *finishes* the leaves: it puts the sums into ``.grad`` as a local backward pass would, with hooks of
every kind, including hooks in C++ (DDP's). If no other stratum reaches the leaves of a stratum, which is the common case,
the stratum *runs* as a local pass does, and finishes these leaves itself.

All functions run on the calling thread. They call user code (hooks, custom Functions), and hold no lock during these calls.

The ``.grad`` of a leaf has one user at a time (:class:`Borrowed`). The engine runs hooks of a leaf only while it puts a gradient
into ``.grad``, and a local optimizer reads gradients from ``.grad``. Therefore passes and optimizers borrow ``.grad``, and put
the former content back afterwards.

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
from torch.autograd.graph import GradientEdge, get_gradient_edge

from actorrpc import _time, _torch
from actorrpc._torch import PythonNode, get_local, has_local, leaf_hooks, run_backward, set_local, use_count
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

_SLICE_S: Final = 0.1  # a thread that waits for leaves checks this often for postponed signal handlers

# Guards ``_reserved`` and ``_waiting``; held for microseconds. Re-entrant: the garbage collector may run finalisers under it.
_lock = threading.RLock()
_changed = threading.Condition(_lock)
_reserved: set[int] = set()  # ids of borrowed leaves; unique, because each Borrowed keeps its leaves alive
_waiting: list[Borrowed] = []


@uninterruptible
class Borrowed:
    """A ``with`` block that has exclusive use of the ``.grad`` of leaves. At the start of the block, ``.grad`` is None.

    All leaves are reserved at once, so that two users of overlapping sets cannot deadlock. The block gets a list of the former
    contents of ``.grad``, in order; at its end, the entries of the list become the ``.grad`` of the leaves.

    Args:
        leaves: the tensors; each once.
        deadline: on the monotonic clock; None: wait as long as other threads use the leaves.

    Raises:
        RpcTimeoutError: other threads did not release the leaves in time. No leaf was reserved.
    """

    __slots__ = ("_before", "_deadline", "_ids", "_leaves")

    def __init__(self, leaves: Iterable[torch.Tensor], deadline: float | None = None) -> None:
        self._leaves = list(leaves)
        self._ids = set(map(id, self._leaves))
        self._deadline = deadline
        self._before: list[torch.Tensor | None] = []

    def __enter__(self) -> list[torch.Tensor | None]:
        with _lock:
            free = self._ids.isdisjoint(_reserved)
            if free:
                _reserved.update(self._ids)
        while not free:
            checkpoint()
            free = self._reserve()
        for leaf in self._leaves:
            self._before.append(leaf.grad)
            leaf.grad = None
        return self._before

    def _reserve(self) -> bool:
        """Wait until the leaves are free, and reserve them. False: the caller has to run a postponed signal handler first."""
        with _lock:
            while not self._ids.isdisjoint(_reserved):
                left = _SLICE_S if self._deadline is None else self._deadline - _time.now()
                if left <= 0:
                    raise RpcTimeoutError(
                        "another backward pass, or an optimizer, at work on the same parameters on this worker, did not end "
                        "in time; nothing was changed. Run them one after the other, or give a longer timeout="
                    )
                if pending_here():
                    return False
                _waiting.append(self)
                try:
                    _changed.wait(min(_time.patience(left), _SLICE_S))
                finally:
                    _waiting.remove(self)
            _reserved.update(self._ids)
        return True

    def __exit__(self, *_: object) -> None:
        try:
            for leaf, grad in zip(self._leaves, self._before, strict=True):
                leaf.grad = grad
        finally:
            with _lock:
                _reserved.difference_update(self._ids)
                if _waiting:
                    _changed.notify_all()


class RecvFunction(torch.autograd.Function):
    """Makes received tensors the outputs of one node. The tensors are passed in a list, so torch does not treat them as inputs.
    Therefore the outputs are the same objects as the received tensors, are not views, and may be changed in place.

    :func:`run` puts an empty list into the node's attribute ``box`` before it runs the engine; the node adds the gradients.
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
                "this tensor's history leads to another worker, which a local backward() does not reach: call "
                "actorrpc.autograd.backward(context_id, [loss]) inside of `with context() as context_id`, or detach() it"
            )
        box += gradients
        return None, None


#: The leaf that is the input of every RecvFunction node. If a walk reaches it, the walk has passed through such a node.
ANCHOR: Final = torch.empty(0, requires_grad=True)
# The C function that Function.apply calls after its checks for torch.func, which is never applied to received tensors.
_apply: Final[Callable[..., tuple[torch.Tensor, ...]]] = super(torch.autograd.Function, RecvFunction).apply


def receive(tensors: Sequence[torch.Tensor]) -> Any:
    """Make received tensors the outputs of a new RecvFunction node; return the node."""
    for each in tensors:
        each.requires_grad_(False)
    if torch.is_grad_enabled():  # grad mode is off in inference mode, too
        outputs = _apply(ANCHOR, list(tensors))
    else:
        with torch.inference_mode(False), torch.enable_grad():
            outputs = _apply(ANCHOR, list(tensors))
    return outputs[0].grad_fn


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Return the edge to which the gradient of a tensor is sent, as torch's ``get_gradient_edge`` does. Grad mode must be on.

    If the tensor's node is written in Python (such as :class:`RecvFunction`), torch's function makes a view of the tensor, whose
    node keeps the Python node alive. Sparse tensors have no views, so this function makes a clone instead.
    """
    node: Any = tensor.grad_fn
    if node is not None and not isinstance(node, PythonNode):
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

#: The class of the nodes that stand for leaves.
ACCUMULATE: Final[Any] = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)


# -- where edges lead -------------------------------------------------------------------------------------------------


class ReachableGraph(NamedTuple):
    """The nodes at which a backward pass that begins at some edges ends on this worker: each node once, in the order of the walk.

    Attributes:
        receipts: the nodes that stand for received messages.
        leaves: the AccumulateGrad nodes of leaves.
    """

    receipts: tuple[Node, ...]
    leaves: tuple[Node, ...]


def reach(
    edges: Sequence[GradientEdge], receipts: Mapping[Node, Receipt], seen: set[Node] | None = None
) -> ReachableGraph:
    """Walk from edges to the nodes at which their gradients end on this worker.

    Args:
        receipts: the nodes of messages that were received in this context.
        seen: a set to which the visited nodes are added.

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
    # ``seen`` has nodes, not their id(): without a Python reference to a node, torch later makes another object for the node.
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
    """Return the nodes that a backward pass from ``edges`` executes, without the nodes at which the gradients end."""
    seen: set[Node] = set()
    found = reach(edges, receipts, seen)
    return seen.difference(found.receipts, found.leaves)


# -- captures ---------------------------------------------------------------------------------------------------------


# The name of a flag that makes hooks of leaves silent in a thread, and in the engine's threads that work for the thread. The flag
# is one of torch's thread-local objects, because the engine copies these to its device threads, which run hooks of leaves outside
# of the CPU. An unused flag is removed (if torch can do that), because torch frees it too late at a thread's end.
_SILENCE: Final = "actorrpc.silence"


def _silence(on: bool) -> bool:
    """Set whether hooks of leaves are silent in this thread; return whether they were silent before."""
    before = has_local(_SILENCE) and get_local(_SILENCE)
    if before != on:
        if on or _torch.remove_local is None:
            set_local(_SILENCE, on)
        else:
            _torch.remove_local(_SILENCE)
    return before


class _Hook:
    """Wraps a user's hook of a leaf, and does not call the hook during captures. The wrapper replaces the hook in torch's table,
    so that the hook's handle removes the wrapper. A copy or pickle of the wrapper is a copy or pickle of the hook."""

    __slots__ = ("hook",)

    def __init__(self, hook: Callable[[torch.Tensor], Any]) -> None:
        self.hook = hook

    def __call__(self, gradient: torch.Tensor) -> Any:
        if has_local(_SILENCE) and get_local(_SILENCE):
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


def _wrap_hooks(leaves: Sequence[Node]) -> None:
    for node in leaves:
        hooks = leaf_hooks(node)
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
        outputs: the edges at which to begin. The engine adds up the gradients of an edge that occurs several times, in order.
        gradients: the gradient of each of ``outputs``.
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
        _wrap_hooks(leaves)
        # Hooks are silent already if a hook of an interior tensor calls this function during another capture.
        before = _silence(True)
    try:
        captured = run_backward(
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
    """Move each gradient to the device of its tensor: the message may have moved the tensor from a GPU to a CPU, or back."""
    for index, edge in enumerate(edges):
        gradients[index] = gradients[index].to(_torch.input_metadata(edge.node)[edge.output_nr].device)


# -- sums -------------------------------------------------------------------------------------------------------------


def add(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two gradients, in new memory. The sum is sparse if both gradients are sparse."""
    if one.layout is not torch.strided and other.layout is torch.strided:
        one, other = other, one  # torch adds sparse to dense, but not dense to sparse
    if one.requires_grad or other.requires_grad:
        with torch.enable_grad():  # even if the caller of backward() has disabled grad mode
            return one + other
    return one + other


def add_to(total: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``total + other``: ``total`` itself if it is dense and neither has a history. No other code may use ``total``."""
    if total.layout is not torch.strided or total.requires_grad or other.requires_grad:
        return add(total, other)
    return total.add_(other)


def accumulate(grads: list[torch.Tensor | None], gradients: Iterable[torch.Tensor]) -> None:
    """Add gradients to the ``.grad`` that :class:`Borrowed` gave, in place if a local backward pass would do so."""
    for index, gradient in enumerate(gradients):
        before = grads[index]
        grads[index] = gradient if before is None else add_to(before, gradient)


# -- running as a local pass does --------------------------------------------------------------------------------------


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
        leaves: all leaves that the engine can reach from ``outputs``; each once.
        deadline: until when to wait for other users of the ``.grad`` of these leaves, on the monotonic clock; None: no bound.

    Raises:
        RpcTimeoutError: other threads did not release the leaves in time.
        Exception: a node or a hook raised it.
    """
    if not outputs:
        return [[None] * count for _, count in receipts], []
    boxes: list[Tensors] = []
    for node, _ in receipts:
        box: Tensors = []
        node.box = box
        boxes.append(box)
    silent = _silence(False) if has_local(_SILENCE) else False
    try:
        with Borrowed(leaves, deadline):
            run_backward(tuple(outputs), tuple(gradients), retain_graph, False, (), True, True)
            found: Tensors = list(map(_grad, leaves))
            _unshare(found)
    finally:
        if silent:
            _silence(silent)
        for node, _ in receipts:
            node.box = None
    for box, (_, count) in zip(boxes, receipts, strict=True):
        if not box:  # the engine did not reach the node
            box += [None] * count
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for leaf, gradient in zip(leaves, found, strict=True):
        if gradient is not None:
            results.append((leaf, gradient))
    return boxes, results


# -- finishing leaves -------------------------------------------------------------------------------------------------


class _Feed(torch.autograd.Function):
    """A node whose inputs are leaves, and whose backward returns the gradients in the list ``box`` for these leaves.

    The node empties the box, so that only the engine refers to the gradients. The engine then makes them ``.grad`` without a
    copy, as in a local backward pass.
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


_some: Final = torch.empty(1)
_grad: Final[Callable[[torch.Tensor], torch.Tensor | None]] = attrgetter("grad")
_ALONE: Final = 0 if use_count is None else use_count(_some.untyped_storage()._cdata)


def _unshare(gradients: Tensors | list[torch.Tensor]) -> None:
    """Replace each gradient in the list that shares memory with another tensor by a copy.

    The engine copies a gradient only if other code refers to the same tensor object. Without the copies of this function, views
    of one gradient (such as the gradients of the operands of a sum) would become the ``.grad`` of several leaves.
    """
    for index, gradient in enumerate(gradients):
        if gradient is not None and gradient.layout is torch.strided:
            if use_count is None or use_count(gradient.untyped_storage()._cdata) > _ALONE:
                gradients[index] = gradient.clone()


def finish(
    leaves: Sequence[torch.Tensor],
    box: list[torch.Tensor],
    *,
    create_graph: bool = False,
    deadline: float | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run the hooks of leaves on their whole gradients; return the leaves with the gradients that result.

    ``.grad`` is unchanged when this returns. The result omits leaves that have ceased to require grad, and leaves whose gradient
    a hook has removed. No two results share memory.

    Args:
        leaves: each once.
        box: the gradient of each leaf. The function empties this list; a gradient without other references is not copied.
        create_graph: whether the gradients have a history. Then only hooks of the kind ``Tensor.register_hook`` run.
        deadline: as for :func:`run`.

    Raises:
        RpcTimeoutError: other threads did not release the leaves in time.
        RuntimeError: a leaf has become the result of an operation.
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
            # Do not store these gradients in .grad: because of their history, leaf and gradient would form a reference cycle.
            edges = tuple(get_gradient_edge(leaf) for leaf in leaves)
            results = run_backward(edges, tuple(box), True, True, edges, True, False)
            box.clear()
            return [(leaf, each) for leaf, each in zip(leaves, results, strict=True) if each is not None]
        _unshare(box)
        with Borrowed(leaves, deadline):
            root = _root(leaves, box)
            run_backward((root,), (_one,), False, False, (), True, True)
            return [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None]
    finally:
        _silence(before)


def _root(leaves: Sequence[torch.Tensor], box: list[torch.Tensor]) -> torch.Tensor:
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return _feed(box, *leaves)
    with torch.inference_mode(False), torch.enable_grad():
        return _feed(box, *leaves)
