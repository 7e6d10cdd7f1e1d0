"""Optimizers of parameters that live on several workers: torch's ``DistributedOptimizer``, and what it lacks.

``from actorrpc.optim import DistributedOptimizer`` in place of ``from torch.distributed.optim import
DistributedOptimizer``. Learning rate schedulers, clipping, checkpoints and gradient scaling work across workers, too.
"""

from actorrpc.optim.errors import OptimizerError
from actorrpc.optim.hyperparameters import ParamGroup
from actorrpc.optim.optimizer import DistributedOptimizer
from actorrpc.optim.scaler import DistributedGradScaler
from actorrpc.optim.scheduler import DistributedLRScheduler

__all__ = [
    "DistributedGradScaler",
    "DistributedLRScheduler",
    "DistributedOptimizer",
    "OptimizerError",
    "ParamGroup",
]
