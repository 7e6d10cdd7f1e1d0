"""Gradient scaling for mixed precision, across workers."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from actorrpc.optim.local_optimizer import check_context
from actorrpc.optim.optimizer import DistributedOptimizer
from actorrpc.rpc.options import UNSET_RPC_TIMEOUT

__all__ = ["DistributedGradScaler"]

_T = TypeVar("_T")


class _Stage(enum.Enum):
    """The last action of the scaler on one optimizer and one context since the last ``update()``."""

    UNSCALING = enum.auto()  # unscaling runs, or has failed with some gradients unscaled and others not
    UNSCALED = enum.auto()
    STEPPED = enum.auto()


class DistributedGradScaler:
    """Does what ``torch.amp.GradScaler`` does, for gradients in the contexts of distributed autograd::

        scaler = DistributedGradScaler()
        with dist_autograd.context() as context_id:
            with torch.autocast("cpu", torch.float16):
                loss = ...
            dist_autograd.backward(context_id, [scaler.scale(loss)])
            scaler.unscale_(optimizer, context_id)            # only needed before clipping
            optimizer.clip_grad_norm_(context_id, 1.0)
            scaler.step(optimizer, context_id)
            scaler.update()

    If a gradient on any worker has an infinity or a NaN, no worker makes the step. Scales and defaults equal torch's. torch's
    scaler can load the state of this scaler, and this scaler can load the state of torch's scaler. Thread-safe.

    Args:
        init_scale: the first scale, by which losses are multiplied.
        growth_factor: the scale is multiplied by this factor after ``growth_interval`` updates without infinities or NaNs.
        backoff_factor: the scale is multiplied by this factor after an iteration with infinities or NaNs.
        enabled: if false, ``step`` makes a step without scaling, ``scale`` returns losses unchanged, and the scale is 1.

    Raises:
        ValueError: ``growth_factor`` is not greater than 1, or ``backoff_factor`` is not less than 1.
    """

    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if growth_factor <= 1.0:
            raise ValueError(f"The growth factor must be > 1.0, not {growth_factor}.")
        if backoff_factor >= 1.0:
            raise ValueError(f"The backoff factor must be < 1.0, not {backoff_factor}.")
        self._enabled = enabled
        self._lock = threading.Lock()  # guards the fields below; not held during calls to workers
        self._scale = _rounded(init_scale)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0
        self._stages: dict[tuple[DistributedOptimizer, int | None], _Stage] = {}
        self._found: dict[tuple[DistributedOptimizer, int | None], bool] = {}

    def is_enabled(self) -> bool:
        """Return whether the scaler is enabled."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the scale, by which losses are multiplied."""
        return self._scale if self._enabled else 1.0

    def scale(self, outputs: _T) -> _T:
        """Return a loss, or the losses in a (nested) list, tuple or other iterable, multiplied by the scale.

        Raises:
            TypeError: an element is not a tensor.
        """
        return self._scaled(outputs, self._scale) if self._enabled else outputs

    def _scaled(self, value: Any, scale: float) -> Any:
        if isinstance(value, torch.Tensor):
            return value * torch.full((), scale, dtype=torch.float32, device=value.device)
        if isinstance(value, (list, tuple)):
            return type(value)(self._scaled(each, scale) for each in value)
        if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
            return (self._scaled(each, scale) for each in value)
        raise TypeError(f"outputs must be a Tensor or an iterable of Tensors, not {type(value).__name__}")

    def unscale_(
        self,
        optimizer: DistributedOptimizer,
        context_id: int | None,
        *,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> None:
        """Divide the gradients of an optimizer in a context (None: in ``.grad``) by the scale, on all workers, in place.

        Only needed to read or clip the gradients before :meth:`step`, which otherwise divides the gradients itself.

        Raises:
            RuntimeError: since the last :meth:`update`, these gradients were unscaled, or a step with them was made.
            ValueError: a gradient is of float16.
            Exception: as :meth:`DistributedOptimizer.step`. The gradients in the context cannot be used after that.
        """
        if not self._enabled:
            return
        check_context(context_id)
        key = optimizer, context_id
        with self._lock:
            stage = self._stages.get(key)
            if stage is _Stage.STEPPED:
                raise RuntimeError("unscale_() is being called after step().")
            if stage is not None:
                raise RuntimeError(
                    "unscale_() has already been called on this optimizer since the last update()."
                )
            self._stages[key] = _Stage.UNSCALING
            # As torch does: divide in double precision, and round to single precision.
            inverse = torch.tensor(1.0 / self._scale, dtype=torch.float32)
        found = optimizer._unscale(context_id, inverse, timeout)
        with self._lock:
            self._stages[key] = _Stage.UNSCALED
            self._found[key] = found

    def step(
        self,
        optimizer: DistributedOptimizer,
        context_id: int | None,
        *,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> bool:
        """Make a step on all workers, unless the gradients on any worker have infinities or NaNs.

        Returns:
            Whether the step was made.

        Raises:
            RuntimeError: a step with this optimizer and context was made since the last :meth:`update`, or unscaling has failed.
            Exception: as :meth:`DistributedOptimizer.step`.
        """
        if not self._enabled:
            optimizer.step(context_id, timeout=timeout)
            return True
        key = optimizer, context_id
        with self._lock:
            stage = self._stages.get(key)
        if stage is None:
            self.unscale_(optimizer, context_id, timeout=timeout)
        with self._lock:
            stage = self._stages.get(key)
            if stage is _Stage.STEPPED:
                raise RuntimeError("step() has already been called since the last update().")
            if stage is not _Stage.UNSCALED:
                raise RuntimeError(
                    "unscale_() has not succeeded for this optimizer and context: some gradients are unscaled, others are "
                    "not. Call update() and begin again with a new context"
                )
            self._stages[key] = _Stage.STEPPED
            found = self._found[key]
        if not found:
            optimizer.step(context_id, timeout=timeout)
        return not found

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to the infinities and NaNs found since the last update. Call this once per iteration, after all steps.

        Args:
            new_scale: set the scale to this value instead of adapting it.

        Raises:
            RuntimeError: neither ``new_scale`` was given, nor ``step`` or ``unscale_`` called since the last update.
        """
        if not self._enabled:
            return
        with self._lock:
            if new_scale is not None:
                self._scale = _rounded(float(new_scale))
            elif not self._stages:
                raise RuntimeError("No inf checks were recorded prior to update.")
            elif any(self._found.values()):
                self._scale = _rounded(self._scale * self._backoff_factor)
                self._growth_tracker = 0
            elif self._found:
                self._growth_tracker += 1
                if self._growth_tracker == self._growth_interval:
                    grown = _rounded(self._scale * self._growth_factor)
                    self._scale = grown if grown != float("inf") else self._scale
                    self._growth_tracker = 0
            self._stages.clear()
            self._found.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in the form of torch's scaler. The state is empty if the scaler is not enabled."""
        if not self._enabled:
            return {}
        with self._lock:
            return {
                "scale": self._scale,
                "growth_factor": self._growth_factor,
                "backoff_factor": self._backoff_factor,
                "growth_interval": self._growth_interval,
                "_growth_tracker": self._growth_tracker,
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that a scaler of this class or of torch's class has saved.

        Raises:
            RuntimeError: the state is empty, because it was saved by a scaler that was not enabled.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty: it was saved by a scaler that was not enabled."
            )
        with self._lock:
            self._scale = _rounded(state_dict["scale"])
            self._growth_factor = float(state_dict["growth_factor"])
            self._backoff_factor = float(state_dict["backoff_factor"])
            self._growth_interval = int(state_dict["growth_interval"])
            self._growth_tracker = int(state_dict["_growth_tracker"])


def _rounded(scale: float) -> float:
    """Return the scale rounded to single precision, in which torch keeps it."""
    return torch.tensor(scale, dtype=torch.float32).item()
