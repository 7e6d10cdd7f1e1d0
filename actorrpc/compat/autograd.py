"""Replaces ``torch.distributed.autograd``: its public names, and the private names that programs use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from actorrpc._exceptions import is_of_handler
from actorrpc.autograd import api, context, get_gradients
from actorrpc.autograd.contexts import Context
from actorrpc.autograd.recorder import current_context
from actorrpc.autograd.startup import contexts, participant
from actorrpc.compat.profiling import profiled_pass
from actorrpc.compat.translate import as_runtime_error
from actorrpc.errors import RemoteError, RpcError
from actorrpc.rpc import api as core

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]

_RANK_BITS = 48  # a context's id, shifted right by this, is the rank of the worker that made the context

_entered: dict[int, context] = {}  # context id -> a context that _new_context() has entered


def is_available() -> bool:
    """Say whether distributed autograd can be used in this build: always."""
    return True


def _init(_worker_id: int) -> None:
    """Do nothing: joining a group also starts distributed autograd."""


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False, **more: Any) -> None:
    """As :func:`actorrpc.autograd.backward`, with the same further keywords.

    Raises:
        TypeError: an argument has a wrong type.
        RuntimeError: a tensor of ``roots`` cannot be a root, or as :func:`actorrpc.autograd.backward`.
    """
    if not isinstance(context_id, int) or not _are_tensors(roots):
        raise TypeError(
            "backward(): incompatible function arguments. It takes (context_id: int, roots: list[Tensor], "
            f"retain_graph: bool = False), not {context_id!r}, {roots!r}"
        )
    contexts().get(context_id)
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for index, root in enumerate(roots):
        if not root.requires_grad:
            raise RuntimeError(f"requires_grad not set on root {index}")
        if root.numel() != 1 and "gradient" not in more:
            raise RuntimeError(f"root {index} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RuntimeError(f"root {index} does not have a valid gradient function.")
    try:
        with profiled_pass(context_id):
            api.backward(context_id, roots, retain_graph, **more)
    except Exception as error:
        if is_of_handler(error) or (isinstance(error, RpcError) and not isinstance(error, RemoteError)):
            raise
        named = as_runtime_error(error)
        _name_the_node(named)
        if named is error:
            raise
        raise named from error


def _are_tensors(roots: object) -> bool:
    return isinstance(roots, list | tuple) and all(isinstance(root, torch.Tensor) for root in roots)


def _name_the_node(error: Exception) -> None:
    """Add to the error of a backward pass the id of the worker on which the pass has failed, as torch does."""
    worker = getattr(error, "worker", None)
    try:
        id = core.get_worker_info(worker).id
    except RpcError:  # the worker has left the group meanwhile
        return
    if len(error.args) == 1 and not str(error.args[0]).startswith("Error on Node"):
        error.args = (f"Error on Node {id}: {error.args[0]}",)


class _Send:
    """Stands for torch's graph node of a message with tensors that require grad, which this worker has sent."""

    def __init__(self, message: int, edges: Any) -> None:
        self.message = message
        self.next_functions = tuple((edge.node, edge.output_nr) for edge in edges)

    def name(self) -> str:
        """Return the name that torch gives to such nodes."""
        return "torch::distributed::autograd::SendRpcBackward"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Send) and other.message == self.message

    def __hash__(self) -> int:
        return hash(self.message)


class DistAutogradContext:
    """A view of a context, with torch's private names."""

    def __init__(self, found: Context) -> None:
        self._context = found

    def _context_id(self) -> int:
        return self._context.id

    def _known_worker_ids(self) -> set[int]:
        with self._context.lock:
            return {peer.rank for peer in self._context.peers}

    def _send_functions(self) -> dict[int, Any]:
        with self._context.lock:
            return {message: _Send(message, edges) for message, edges in self._context.sends.items()}

    def _recv_functions(self) -> dict[int, Any]:
        with self._context.lock:
            return {receipt.sink.message: node for node, receipt in self._context.receipts.items()}


def _current_context() -> DistAutogradContext:
    """Return the context in which this code runs.

    Raises:
        RuntimeError: this code runs in no context.
    """
    id = current_context()
    if id is None:
        raise RuntimeError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with torch.distributed.autograd.context() as context_id` to generate a valid context"
        )
    return _retrieve_context(id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """Return the context with this id.

    Raises:
        RuntimeError: this worker has no state of such a context.
    """
    return DistAutogradContext(contexts().get(context_id))


def _is_valid_context(context_id: int) -> None:
    """Raise RuntimeError if this worker has no state of a context with this id."""
    contexts().get(context_id)


def _new_context() -> DistAutogradContext:
    """Enter a new context, which :func:`_release_context` ends.

    Raises:
        RuntimeError: the code is in a context already.
    """
    made = context()
    id = made.__enter__()
    _entered[id] = made
    return _retrieve_context(id)


def _release_context(context_id: int) -> None:
    """End a context, on this worker and on all other workers that have state of it."""
    made = _entered.pop(context_id, None)
    if made is not None:
        made.__exit__(None, None, None)
    else:
        _is_valid_context(context_id)
        participant().release(context_id)


def _get_max_id() -> int:
    """Return the largest id that a context of this worker could have."""
    rank = core.get_worker_info().id
    return ((rank + 1) << _RANK_BITS) - 1


def _get_debug_info() -> dict[str, str]:
    """Return counters of distributed autograd, as text."""
    known = contexts().all() if core.is_initialized() else []
    info = {
        "num_autograd_contexts": len(known),
        "num_current_backward_passes": sum(len(each.passes) for each in known),
    }
    return {name: str(count) for name, count in info.items()}
