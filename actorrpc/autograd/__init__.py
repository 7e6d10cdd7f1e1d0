"""Distributed autograd: backward passes through calls, as with ``torch.distributed.autograd``, and through calls of actors.

``import actorrpc.autograd as dist_autograd`` replaces ``import torch.distributed.autograd as dist_autograd``.
"""

from actorrpc.autograd.api import backward, context, get_gradients
from actorrpc.autograd.recorder import current_context

__all__ = ["backward", "context", "current_context", "get_gradients"]
