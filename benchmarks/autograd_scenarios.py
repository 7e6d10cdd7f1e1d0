"""The scenarios that a worker of the autograd benchmark runs on request of the driver, as in ``scenarios.py``.

All run on the worker's main thread, return plain dictionaries of numbers, and never pin or print. Times are medians.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import scenarios
from benchmarks.autograd_models import HERE, Step, bag_step, dot, echo, hop, plain_rnn_step, rnn_step

__all__ = ["SCENARIOS", "Context"]


@dataclass(slots=True)
class Context(scenarios.Context):
    """One worker of one group, and its training step."""

    step: Step | None = None


def init(context: Context, backend: str, **fields: Any) -> dict[str, float]:
    """Join the group, and import the modules of its backend."""
    HERE.choose(backend)
    return scenarios.init(context, backend, **fields)


def shutdown(context: Context) -> dict[str, float]:
    """Drop references to other workers, then leave the group together with the others."""
    context.step = None
    HERE.kept.clear()
    gc.collect()
    return scenarios.shutdown(context)


def used(_context: Context) -> dict[str, float]:
    """Return the seconds of processor time that this process has used."""
    return {"seconds": scenarios.cpu_seconds()}


def _timed(once: Callable[[], Any], turns: int, warm: int) -> float:
    """Return the median time of a turn, in microseconds."""
    for _ in range(warm):
        once()
    gc.collect()
    times = []
    for _ in range(turns):
        start = time.perf_counter_ns()
        once()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


# -- training ------------------------------------------------------------------------------------------


def make(context: Context, model: str, server: int, **sizes: int) -> dict[str, float]:
    """Make a model with its part on the server; ``train`` trains it."""
    builders: dict[str, Callable[..., Step]] = {"rnn": rnn_step, "server": bag_step}
    context.step = builders[model](f"w{server}", **sizes)
    return {}


def train(context: Context, steps: int, warm: int, start_at: float = 0.0) -> dict[str, float]:
    """Take steps from ``start_at`` (shared clock) on; milliseconds a step, and the last loss."""
    assert context.step is not None
    losses: list[float] = []
    step = context.step
    time.sleep(max(0.0, start_at - time.monotonic()))
    return {"time": _timed(lambda: losses.append(step()), steps, warm) / 1e3, "loss": losses[-1]}


def plain(_context: Context, turns: int, warm: int, **sizes: int) -> dict[str, float]:
    """Train the RNN in this process alone; milliseconds a step."""
    return {"time": _timed(plain_rnn_step(**sizes), turns, warm) / 1e3}


# -- one hop after another -----------------------------------------------------------------------------


def chain(context: Context, path: list[int], turns: int, warm: int) -> dict[str, float]:
    """Send 1 KiB along workers, each of which multiplies it by a parameter, and the gradient back; microseconds."""
    first, *rest = [f"w{rank}" for rank in path]
    rpc, autograd = HERE.rpc, HERE.autograd
    tensor = torch.ones(256, requires_grad=True)
    forwards, backwards = [], []

    def once() -> None:
        begin = time.perf_counter_ns()
        with autograd.context() as number:
            loss = rpc.rpc_sync(first, hop, args=(tensor, rest)).sum()
            middle = time.perf_counter_ns()
            autograd.backward(number, [loss])
            end = time.perf_counter_ns()
        forwards.append(middle - begin)
        backwards.append(end - middle)

    whole = _timed(once, turns, warm)
    return {
        "p50": whole,
        "forward": statistics.median(forwards[warm:]) / 1e3,
        "backward": statistics.median(backwards[warm:]) / 1e3,
    }


def activation(context: Context, size: int, turns: int, warm: int) -> dict[str, float]:
    """Send a tensor of ``size`` bytes and get its gradient, which is as large; GB/s counts both ways."""
    rpc, autograd, partner = HERE.rpc, HERE.autograd, context.partner
    tensor = torch.full((size // 4,), 0.25, requires_grad=True)

    def once() -> None:
        with autograd.context() as number:
            autograd.backward(number, [rpc.rpc_sync(partner, dot, args=(tensor,))])
            assert autograd.get_gradients(number)[tensor].numel() == tensor.numel()

    whole = _timed(once, turns, warm)
    return {"both_ways": 2 * size / (whole * 1e3), "time": whole / 1e3}


# -- what it costs where nothing, or nothing else, is remote -------------------------------------------


def _model(layers: int) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    width, parts = 64, []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    model, given = nn.Sequential(*parts), torch.randn(8, width)
    return lambda: model(given).sum()


def alone(context: Context, layers: int, turns: int, warm: int, plain: bool) -> dict[str, float]:
    """Run forward and backward of a local model; ``plain``: without a context."""
    autograd, forward = HERE.autograd, _model(layers)

    def local() -> None:
        forward().backward()

    def distributed() -> None:
        with autograd.context() as number:
            autograd.backward(number, [forward()])
            autograd.get_gradients(number)

    return {"p50": _timed(local if plain else distributed, turns, warm)}


def recording(context: Context, turns: int, warm: int, how: str) -> dict[str, float]:
    """Call with 1 KiB that comes back: outside of a context, inside without and with ``requires_grad``."""
    rpc, autograd, partner = HERE.rpc, HERE.autograd, context.partner
    tensor = torch.ones(256, requires_grad=how == "grad")

    def once() -> None:
        rpc.rpc_sync(partner, echo, args=(tensor,))

    if how == "outside":
        return {"p50": _timed(once, turns, warm)}
    times = []
    for _ in range(max(1, turns // 50)):  # several contexts, because a context keeps all its records
        with autograd.context():
            times.append(_timed(once, min(turns, 50), warm))
        warm = 2
    return {"p50": statistics.median(times)}


SCENARIOS: dict[str, Callable[..., dict[str, float]]] = {
    function.__name__: function
    for function in (init, shutdown, used, make, train, plain, chain, activation, alone, recording)
}
