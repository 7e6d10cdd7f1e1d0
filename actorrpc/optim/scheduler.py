"""Learning rate schedulers of torch, for optimizers whose parameters are on other workers.

The scheduler runs in the process of the DistributedOptimizer, on a stand-in that has the optimizer's hyper-parameters. Therefore
this process calls the user's functions and has the scheduler's state, and new values are sent in one call to each worker.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actorrpc.rpc.options import UNSET_RPC_TIMEOUT

if TYPE_CHECKING:
    from actorrpc.optim.optimizer import DistributedOptimizer

__all__ = ["DistributedLRScheduler"]


class DistributedLRScheduler:
    """A learning rate scheduler of a DistributedOptimizer, whose method ``lr_scheduler()`` returns it.

    :meth:`step` is thread-safe: other changes of the optimizer's hyper-parameters wait until the step has ended.

    Args:
        optimizer: the optimizer whose learning rates the scheduler sets.
        scheduler_class: a class of ``torch.optim.lr_scheduler``, or any function that is called with an optimizer (a stand-in)
            and returns a scheduler of this optimizer.
        args, kwargs: for ``scheduler_class``, besides the optimizer. A DistributedLRScheduler is replaced by its ``scheduler``.

    Raises:
        TypeError: ``scheduler_class`` cannot be called, or did not return a scheduler.
        ValueError: a scheduler in the arguments belongs to another optimizer.
        Exception: ``scheduler_class`` raised it, or the first values could not be sent.
    """

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        scheduler_class: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not callable(scheduler_class):
            raise TypeError(
                f"lr_scheduler() takes a class of torch.optim.lr_scheduler, not {scheduler_class!r}"
            )
        self._optimizer = optimizer
        arguments = [self._inner(each) for each in args]
        keywords = {key: self._inner(each) for key, each in kwargs.items()}
        with optimizer._changing(UNSET_RPC_TIMEOUT) as stand_in:
            if _takes_optimizer_first(scheduler_class):
                made = scheduler_class(stand_in, *arguments, **keywords)
            else:
                made = scheduler_class(*arguments, optimizer=stand_in, **keywords)
        if not (callable(getattr(made, "step", None)) and callable(getattr(made, "state_dict", None))):
            raise TypeError(
                f"{scheduler_class!r} returned {made!r}, which is no scheduler: it lacks step() or state_dict()"
            )
        self._scheduler: Any = made

    def _inner(self, value: Any) -> Any:
        """Replace each DistributedLRScheduler in an argument by torch's scheduler."""
        if isinstance(value, DistributedLRScheduler):
            if value._optimizer is not self._optimizer:
                raise ValueError("the scheduler in the arguments belongs to another optimizer")
            return value._scheduler
        if type(value) in (list, tuple):
            return type(value)(self._inner(each) for each in value)
        return value

    @property
    def scheduler(self) -> Any:
        """torch's own scheduler, for reading. Do not call its ``step()``, which would send no values to the workers."""
        return self._scheduler

    def step(self, *args: Any, timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any) -> None:
        """Set the learning rates of the next step or epoch, on all workers. Call it after the optimizer's ``step()``.

        Args:
            args, kwargs: for the scheduler's own ``step``: the metric, for ReduceLROnPlateau.
            timeout: seconds; 0 means no time-out. By default, the time-out of the RPC group.

        Raises:
            PeerDiedError, RpcTimeoutError, OptimizerError: some workers did not get the values. The scheduler has made its
                step; the values are sent again before the optimizer's next step, or with the next change.
        """
        with self._optimizer._changing(timeout):
            self._scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates that the scheduler has set last, in the order of the parameter groups."""
        return list(self._scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of torch's scheduler, which leaves out functions."""
        state: dict[str, Any] = copy.deepcopy(self._scheduler.state_dict())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from :meth:`state_dict`. The optimizer's learning rates are in the optimizer's state."""
        self._scheduler.load_state_dict(copy.deepcopy(state_dict))

    def __repr__(self) -> str:
        return f"DistributedLRScheduler({type(self._scheduler).__name__}, lr={self.get_last_lr()})"


def _takes_optimizer_first(scheduler_class: Callable[..., Any]) -> bool:
    """Return whether the optimizer is the first argument, as in all of torch's classes except ChainedScheduler."""
    try:
        names = list(inspect.signature(scheduler_class).parameters)
    except (TypeError, ValueError):
        return True
    return "optimizer" not in names or names[0] == "optimizer"
