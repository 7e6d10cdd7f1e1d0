"""Learning rate schedulers of torch, for optimizers whose parameters are on other workers.

The scheduler runs in the process that has the DistributedOptimizer, on a stand-in that has its hyper-parameters. So
functions that it was given are called here, its state is here, and one message to each worker tells of the new values.
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
    """A learning rate scheduler of a DistributedOptimizer; made by its ``lr_scheduler()``.

    Thread-safe; while it makes a step, other changes of the optimizer's hyper-parameters wait.

    Args:
        optimizer: whose learning rates it sets.
        scheduler_class: a class of ``torch.optim.lr_scheduler``, or any function that is given an optimizer (a stand-in)
            and returns a scheduler of it.
        args, kwargs: for the class, besides the optimizer. Schedulers of this class stand for torch's in them.

    Raises:
        TypeError: ``scheduler_class`` cannot be called, or gave no scheduler.
        ValueError: a scheduler in the arguments belongs to another optimizer.
        Exception: what the class raises, or sending the first values.
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
                f"{scheduler_class!r} gave {made!r}, which is no scheduler: it needs step() and state_dict()"
            )
        self._scheduler: Any = made

    def _inner(self, value: Any) -> Any:
        """Return torch's scheduler for each of this class in an argument."""
        if isinstance(value, DistributedLRScheduler):
            if value._optimizer is not self._optimizer:
                raise ValueError("the scheduler in the arguments belongs to another optimizer")
            return value._scheduler
        if type(value) in (list, tuple):
            return type(value)(self._inner(each) for each in value)
        return value

    @property
    def scheduler(self) -> Any:
        """torch's own scheduler, to look at. Its ``step()`` would tell no worker."""
        return self._scheduler

    def step(self, *args: Any, timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any) -> None:
        """Set the learning rates of the next step or epoch, on all workers. Call it after the optimizer's ``step()``.

        Args:
            args, kwargs: for the scheduler's own ``step``: the metric, for ReduceLROnPlateau.
            timeout: seconds; default that of the group, 0 means none.

        Raises:
            PeerDiedError, RpcTimeoutError, OptimizerError: workers were not told. The scheduler has gone on; they are
                told before the next step, or with the next change.
        """
        with self._optimizer._changing(timeout):
            self._scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates that it has set last, one for each parameter group."""
        return list(self._scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the scheduler's state, as torch's gives it: functions are not in it."""
        state: dict[str, Any] = copy.deepcopy(self._scheduler.state_dict())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state. As with torch, the learning rates come with the state of the optimizer."""
        self._scheduler.load_state_dict(copy.deepcopy(state_dict))

    def __repr__(self) -> str:
        return f"DistributedLRScheduler({type(self._scheduler).__name__}, lr={self.get_last_lr()})"


def _takes_optimizer_first(scheduler_class: Callable[..., Any]) -> bool:
    """Say whether the optimizer is the first argument, as it is except for torch's ChainedScheduler."""
    try:
        names = list(inspect.signature(scheduler_class).parameters)
    except (TypeError, ValueError):
        return True
    return "optimizer" not in names or names[0] == "optimizer"
