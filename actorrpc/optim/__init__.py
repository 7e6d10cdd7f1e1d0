"""Optimizers of parameters that live on several workers: torch's ``DistributedOptimizer``, with further methods.

``from actorrpc.optim import DistributedOptimizer`` replaces ``from torch.distributed.optim import DistributedOptimizer``.
Learning rate schedulers, gradient clipping, checkpoints and gradient scaling also apply to all of these workers.
"""

from actorrpc.optim.grad_scaler import DistributedGradScaler
from actorrpc.optim.optimizer import DistributedLRScheduler, DistributedOptimizer, OptimizerError
from actorrpc.optim.parameters import ParamGroup

__all__ = [
    "DistributedGradScaler",
    "DistributedLRScheduler",
    "DistributedOptimizer",
    "OptimizerError",
    "ParamGroup",
]
