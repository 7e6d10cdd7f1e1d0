"""Optimizers and gradient scaling on GPU parameters. No device map is needed, because no GPU tensor is sent."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import actorrpc.autograd as dist_autograd
from actorrpc import rpc
from actorrpc.optim import DistributedGradScaler, DistributedOptimizer
from tests.optim.things import call_on, weight
from tests.ranks import rpc_group

pytestmark = [pytest.mark.gpu, pytest.mark.limit(120)]  # on the CPU: test_training.py, test_grad_scaler.py

_DEVICE = "cuda:0"

_SEEDS = (1, 2, 3)


def _made(seed: int, device: str) -> torch.Tensor:
    return weight(seed, (4, 3)).detach().to(device).requires_grad_()


def _loss(parameter: torch.Tensor, x: torch.Tensor, factor: float) -> torch.Tensor:
    return (torch.tanh(x.to(parameter.device) @ parameter).sum() * factor).cpu()


def _facts(parameter: torch.Tensor) -> tuple[str, torch.Tensor]:
    return str(parameter.device), parameter.detach().cpu()


def _losses(rrefs: list[Any], x: torch.Tensor, factor: float) -> torch.Tensor:
    parts = [
        rpc.rpc_async(each.owner(), _loss_there, (each, x, factor * (n + 1))) for n, each in enumerate(rrefs)
    ]
    return torch.stack([each.wait() for each in parts]).sum()


def _loss_there(rref: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
    return _loss(rref.local_value(), x, factor)


def _made_remotely(device: str) -> list[Any]:
    return [rpc.remote(f"worker{1 + n % 2}", _made, (seed, device)) for n, seed in enumerate(_SEEDS)]


def _same(rrefs: list[Any], local: list[torch.Tensor], device: str) -> None:
    for rref, here in zip(rrefs, local, strict=True):
        place, there = call_on(rref, _facts)
        assert place == device
        torch.testing.assert_close(there, here.detach(), rtol=1e-4, atol=1e-5)


def _trained(rank: int, world_size: int, device: str) -> None:
    if rank != 0:
        return
    cls = torch.optim.Adam
    torch.manual_seed(0)
    rrefs, local = _made_remotely(device), [_made(seed, "cpu") for seed in _SEEDS]
    distributed, single = DistributedOptimizer(cls, rrefs, lr=0.05), cls(local, lr=0.05)
    for step in range(4):
        x = torch.randn(5, 4)
        single.zero_grad()
        torch.stack([_loss(each, x, float(n + 1)) for n, each in enumerate(local)]).sum().backward()
        wanted = torch.nn.utils.clip_grad_norm_(local, 1.0)
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [_losses(rrefs, x, 1.0)])
            found = distributed.clip_grad_norm_(context, 1.0)
            torch.testing.assert_close(found, wanted)
            distributed.step(context)
        single.step()
        _same(rrefs, local, device)
        if step == 1:  # the state is sent here and back
            distributed.load_state_dict(distributed.state_dict())
    del rrefs, distributed


def test_training_on_gpus_across_workers_equals_local_training() -> None:
    rpc_group(_trained, 3, _DEVICE, timeout=100.0)


def _scaled(rank: int, world_size: int, device: str) -> None:
    if rank != 0:
        return
    options: dict[str, Any] = {
        "init_scale": 256.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
    }
    torch.manual_seed(0)
    rrefs, local = _made_remotely(device), [_made(seed, "cpu") for seed in _SEEDS]
    distributed, single = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1), torch.optim.SGD(local, lr=0.1)
    mine, theirs = DistributedGradScaler(**options), torch.amp.GradScaler("cpu", **options)
    for factor in (1.0, 1.0, math.inf, 1.0):
        x = torch.randn(5, 4)
        single.zero_grad()
        theirs.scale(
            torch.stack([_loss(each, x, factor * (n + 1)) for n, each in enumerate(local)]).sum()
        ).backward()
        theirs.step(single)
        theirs.update()
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [mine.scale(_losses(rrefs, x, factor))])
            assert mine.step(distributed, context) is (factor == 1.0)
        mine.update()
        assert mine.get_scale() == theirs.get_scale()
        _same(rrefs, local, device)
    # The loss may be on the GPU itself.
    assert mine.scale(torch.ones(2, device=device)).device == torch.device(device)
    del rrefs, distributed


def test_gradient_scaling_on_gpus_across_workers_equals_local_scaling() -> None:
    rpc_group(_scaled, 3, _DEVICE, timeout=100.0)
