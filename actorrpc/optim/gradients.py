"""The gradients of some parameters of this worker: in an autograd context, or in ``.grad``.

The one place where optimizers reach into contexts. While gradients are lent the ``.grad`` of the parameters belongs to
the borrower, so that optimizers of overlapping sets of parameters wait for each other, and others do not. Never called
with a lock held: waits are bounded by the call that this runs in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from actorrpc import moments
from actorrpc.autograd import slots, wiring
from actorrpc.core.calls import CURRENT

__all__ = ["alone", "check_context", "clear", "lent"]


def check_context(context_id: int | None) -> None:
    """Refuse what is no context of this worker. None, which stands for ``.grad``, is accepted.

    Raises:
        TypeError: it is neither an int nor None.
        RpcError: this worker does not know such a context.
    """
    if context_id is not None:
        wiring.contexts().get(context_id)


def _deadline() -> float | None:
    execution = CURRENT.get()
    return None if execution is None or math.isinf(execution.deadline) else execution.deadline


@contextmanager
def alone(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Keep optimizers and backward passes from these parameters meanwhile.

    Raises:
        RpcTimeoutError: others have them for longer than the call may take.
    """
    with slots.borrowed(parameters, _deadline()):
        yield


@contextmanager
def lent(parameters: Sequence[torch.Tensor], context_id: int | None) -> Iterator[list[torch.Tensor | None]]:
    """Have the gradients of parameters for oneself, in a list, in order; ``.grad`` is empty meanwhile, and free to use.

    The tensors are those of the context (or of ``.grad``), so that changes in place stay. What is replaced in the list
    is replaced there, too, if the block ends without an error.

    Args:
        parameters: leaves, each once.
        context_id: the context; None for what is in ``.grad``.

    Raises:
        RpcError: this worker does not know the context.
        RpcTimeoutError: others have the gradients for longer than the call may take.
    """
    deadline = _deadline()
    if context_id is None:
        with slots.borrowed(parameters, deadline) as in_slots:
            gradients = list(in_slots)
            yield gradients
            in_slots[:] = gradients
        return
    # First: this may wait for the end of a pass, which may need the slots.
    left = 0.0 if deadline is None else max(0.001, deadline - moments.now())
    found = wiring.participant().gradients(context_id, left)
    with slots.borrowed(parameters, deadline):
        gradients = [found.get(parameter) for parameter in parameters]
        yield gradients
        replaced = {
            parameter: gradient
            for parameter, gradient in zip(parameters, gradients, strict=True)
            if gradient is not None and gradient is not found.get(parameter)
        }
    if replaced:
        context = wiring.contexts().get(context_id)
        with context.lock:
            context.gradients.update(replaced)


def clear(parameters: Sequence[torch.Tensor], context_id: int | None, set_to_none: bool) -> None:
    """Forget the gradients of parameters, or fill them with zeros. Arguments and errors as for :func:`lent`."""
    with lent(parameters, context_id) as gradients:
        if not set_to_none:
            for gradient in gradients:
                if gradient is not None:
                    gradient.detach_().zero_() if gradient.grad_fn is not None else gradient.zero_()
            return
        if context_id is None:
            gradients[:] = [None] * len(gradients)
            return
        context = wiring.contexts().get(context_id)
        with context.lock:
            for parameter in parameters:
                context.gradients.pop(parameter, None)
