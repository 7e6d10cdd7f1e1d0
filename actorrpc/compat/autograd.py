"""What stands in the place of ``torch.distributed.autograd``: the public names, and the private ones that are in use."""

from __future__ import annotations

from typing import Any

import torch

from actorrpc.autograd import context
from actorrpc.autograd.contexts import Context
from actorrpc.autograd.recording import current_context
from actorrpc.autograd.wiring import contexts, participant
from actorrpc.rpc import api as core

__all__ = ["context", "is_available"]


def is_available() -> bool:
    """Say whether distributed autograd can be used in this build: always."""
    return True


def _init(_worker_id: int) -> None:
    """Do nothing: joining a group brings distributed autograd with it."""


class _Send:
    """Stands for a message that left with tensors that require grad, as a node of the graph."""

    def __init__(self, message: int, edges: Any) -> None:
        self.message = message
        self.next_functions = tuple((edge.node, edge.output_nr) for edge in edges)

    def name(self) -> str:
        """Return the name of such nodes in torch."""
        return "torch::distributed::autograd::SendRpcBackward"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Send) and other.message == self.message

    def __hash__(self) -> int:
        return hash(self.message)


class DistAutogradContext:
    """A look at a context, with the private names of torch's."""

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
            return {receipt.message: node for node, receipt in self._context.receipts.items()}


def _current_context() -> DistAutogradContext:
    """Return the context that this code is in.

    Raises:
        RuntimeError: it is in none.
    """
    id = current_context()
    if id is None:
        raise RuntimeError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with torch.distributed.autograd.context() as context_id` to generate a valid context"
        )
    return _retrieve_context(id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """Return a context that this worker knows of.

    Raises:
        RuntimeError: there is none.
    """
    return DistAutogradContext(contexts().get(context_id))


def _is_valid_context(context_id: int) -> None:
    """Raise RuntimeError if this worker does not know of a context."""
    contexts().get(context_id)


def _release_context(context_id: int) -> None:
    """End a context, here and on the workers that know of it."""
    _is_valid_context(context_id)
    participant().release(context_id)


def _get_debug_info() -> dict[str, str]:
    """Return counters of distributed autograd, as text."""
    known = contexts().all() if core.is_initialized() else []
    info = {
        "num_autograd_contexts": len(known),
        "num_current_backward_passes": sum(len(each.passes) for each in known),
    }
    return {name: str(count) for name, count in info.items()}


DistAutogradContext.__module__ = __name__
_Tensor = torch.Tensor
