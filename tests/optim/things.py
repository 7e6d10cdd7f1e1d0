"""Helpers for tests of optimizers: parameters on workers, equal local parameters, and gradients set by hand."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import actorrpc.autograd as dist_autograd
from actorrpc import rpc
from actorrpc.autograd.api import contexts
from actorrpc.optim.local_optimizer import LocalOptimizer

__all__ = [
    "Blocking",
    "FailingConstructor",
    "FailingStep",
    "Meeting",
    "Pair",
    "Twins",
    "call_on",
    "gradient_of",
    "local_gradients",
    "local_optimizers",
    "put",
    "weight",
]


def weight(seed: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a leaf that requires grad, equal on every worker for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


class Pair(torch.nn.Module):
    """A module with two parameters."""

    def __init__(self, seed: int = 0, frozen: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight(seed, (3, 2)).detach(), requires_grad=not frozen)
        self.bias = torch.nn.Parameter(weight(seed + 1, (2,)).detach(), requires_grad=not frozen)


# -- functions called on the worker of a parameter -----------------------------------------------------------------


def _put(context_id: int, parameter: Any, gradient: torch.Tensor | None) -> None:
    context = contexts().get(context_id)
    if gradient is None:
        context.gradients.pop(id(parameter), None)
    else:
        context.gradients[id(parameter)] = parameter, gradient.clone()


def _gradient(parameter: Any, context_id: int) -> torch.Tensor | None:
    return dist_autograd.get_gradients(context_id).get(parameter)


def _call(function: Callable[..., Any], rref: Any, args: tuple[Any, ...]) -> Any:
    return function(rref.local_value(), *args)


def call_on(rref: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(value, *args)`` on the owner of the value, and return the result."""
    return rpc.rpc_sync(rref.owner(), _call, (function, rref, args))


def put(context_id: int, rref: Any, gradient: torch.Tensor | None) -> None:
    """Set the gradient of a parameter in a context."""
    call_on(rref, _put_value, context_id, gradient)


def _put_value(parameter: Any, context_id: int, gradient: torch.Tensor | None) -> None:
    _put(context_id, parameter, gradient)


def gradient_of(context_id: int, rref: Any) -> torch.Tensor | None:
    """Return the gradient of a parameter in a context."""
    found: torch.Tensor | None = call_on(rref, _gradient, context_id)
    return found


def _count() -> int:
    gc.collect()
    return sum(type(each) is LocalOptimizer for each in gc.get_objects())


def local_optimizers(worker: str) -> int:
    """Count the local optimizers on a worker."""
    return rpc.rpc_sync(worker, _count)


# -- remote parameters and local twins -------------------------------------------------------------------------------


class Twins:
    """Parameters on workers, and equal local leaves with the same gradients.

    Args:
        places: the worker of each parameter.
        shapes: their shapes; by default, ``(4, 3)`` for all.
    """

    def __init__(
        self,
        places: Sequence[str],
        shapes: Sequence[Sequence[int]] | None = None,
        dtypes: Sequence[torch.dtype] | None = None,
        seed: int = 0,
    ) -> None:
        shapes = shapes or [(4, 3)] * len(places)
        dtypes = dtypes or [torch.float32] * len(places)
        self.rrefs = [
            rpc.remote(place, weight, (seed + n, tuple(shape), dtype))
            for n, (place, shape, dtype) in enumerate(zip(places, shapes, dtypes, strict=True))
        ]
        self.locals = [
            weight(seed + n, shape, dtype)
            for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        self._random = torch.Generator().manual_seed(seed + 1000)

    def random_gradients(self, missing: Sequence[int] = (), scale: float = 1.0) -> list[torch.Tensor | None]:
        """Return new gradients; None for the indices in ``missing``."""
        return [
            None if n in missing else (torch.randn(each.shape, generator=self._random) * scale).to(each.dtype)
            for n, each in enumerate(self.locals)
        ]

    @contextlib.contextmanager
    def context(self, gradients: Sequence[torch.Tensor | None]) -> Iterator[int]:
        """Enter a context with these gradients, and set them as ``.grad`` of the local twins."""
        with dist_autograd.context() as context_id:
            for rref, local, gradient in zip(self.rrefs, self.locals, gradients, strict=True):
                put(context_id, rref, gradient)
                local.grad = None if gradient is None else gradient.clone()
            yield context_id

    def values(self) -> list[torch.Tensor]:
        """Return copies of the parameters on the workers."""
        futures = [rpc.rpc_async(rref.owner(), _call, (_copy, rref, ())) for rref in self.rrefs]
        return [future.wait() for future in futures]

    def check(self) -> None:
        """Check that the parameters are bitwise equal to their twins."""
        for number, (there, here) in enumerate(zip(self.values(), self.locals, strict=True)):
            assert torch.equal(there, here.detach()), f"parameter {number}: {there} instead of {here}"


def _copy(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().clone()


def local_gradients(twins: Twins) -> list[torch.Tensor | None]:
    """Return the ``.grad`` of the local twins."""
    return [each.grad for each in twins.locals]


# -- optimizers that misbehave --------------------------------------------------------------------------------------


class FailingStep(torch.optim.SGD):
    """An optimizer whose step fails on some workers."""

    def __init__(self, params: Any, on: Sequence[str]) -> None:
        super().__init__(params, lr=1.0)
        self.on = on

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        name = rpc.get_worker_info().name
        if name in self.on:
            raise LookupError(f"no step on {name}")
        super().step()


class FailingConstructor(torch.optim.SGD):
    """An optimizer whose constructor fails on some workers."""

    def __init__(self, params: Any, on: Sequence[str]) -> None:
        super().__init__(params, lr=1.0)
        name = rpc.get_worker_info().name
        if name in on:
            raise LookupError(f"nothing for {name}")


_gate = threading.Event()
_entered = threading.Event()
_meeting = threading.Barrier(2)


class Blocking(torch.optim.SGD):
    """An optimizer whose step blocks until the gate of its worker is opened."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        _entered.set()
        assert _gate.wait(30)
        super().step()

    @staticmethod
    def close() -> None:
        """Close the gate of this worker."""
        _gate.clear()
        _entered.clear()

    @staticmethod
    def await_entered() -> None:
        """Wait until a step blocks on this worker."""
        assert _entered.wait(30)

    @staticmethod
    def open() -> None:
        """Open the gate of this worker."""
        _gate.set()


class Meeting(torch.optim.SGD):
    """An optimizer whose step ends only if another step runs at the same time."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        _meeting.wait(30)
        super().step()
