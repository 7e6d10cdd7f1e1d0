"""Where the history of a tensor begins that has arrived here, and where that of one ends that leaves.

A received message is one node of torch's graph, whose outputs are those of its tensors that require grad. A backward pass
takes the gradients that come to it, and sends them to whoever sent the message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["ANCHOR", "Received", "edge_of", "receive"]


class Received(torch.autograd.Function):
    """Makes tensors that have arrived the outputs of one node. They are hidden from it in a list, so that they stay the
    same objects, are views of nothing, and may be changed in place.

    A backward pass puts a list into the node's attribute ``box`` before it runs the engine, and finds the gradients there.
    """

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        ctx.box = None
        ctx.set_materialize_grads(False)
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


#: The leaf that all these nodes hang from: a walk that gets to it has passed through one.
ANCHOR: Final = torch.empty(0, requires_grad=True)
# What Function.apply calls at last, without its questions about torch.func, which never sees these tensors.
_apply: Final[Callable[..., tuple[torch.Tensor, ...]]] = super(torch.autograd.Function, Received).apply


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
    """Return where the gradient of a tensor goes. torch's own function takes a view of leaves and of what nodes written in
    Python give (:class:`Received` is one): sparse tensors have none."""
    if tensor.layout is torch.strided:
        return get_gradient_edge(tensor)
    token: Any = tensor.clone().grad_fn  # keeps nodes alive that are written in Python
    node, index = token.next_functions[0]
    return GradientEdge(node, index, ownership_token=token)
