"""Distributed autograd: gradients that flow through calls, as with ``torch.distributed.autograd``, and through actors.

``import actorrpc.autograd as dist_autograd`` in place of ``import torch.distributed.autograd as dist_autograd``.
"""

from actorrpc.autograd.api import backward, context, get_gradients
from actorrpc.autograd.recorder import current_context

__all__ = ["backward", "context", "current_context", "get_gradients"]
