"""Training loops with backward passes across workers, compared with the same loop in one process."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import actorrpc
import actorrpc.autograd as dist_autograd
from actorrpc import rpc
from actorrpc.nn import RemoteModule
from actorrpc.optim import DistributedOptimizer
from tests.migration.rows import row

_WORDS, _WIDTH, _STEPS = 12, 5, 4


class Encoder(torch.nn.Module):
    """An embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(_WORDS, _WIDTH, sparse=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(words)
        return found


class Middle(torch.nn.Module):
    """The middle layer of the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.cell = torch.nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.cell(x))


class Decoder(torch.nn.Module):
    """The output layer; one of its parameters is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.out = torch.nn.Linear(_WIDTH, _WORDS)
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(x)
        return found


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(_WORDS, (8,), generator=generator)
    return words, (words + 1) % _WORDS


def _local_run() -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    parts = [Encoder(), Middle(), Decoder()]
    params = [each for part in parts for each in part.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.5)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for step in range(_STEPS):
        words, targets = _batch(step)
        optimizer.zero_grad()
        x = words
        for part in parts:
            x = part(x)
        loss = torch.nn.functional.cross_entropy(x, targets)
        loss.backward()
        torch.nn.utils.clip_grad_value_(params[1:], 0.05)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, [part.state_dict() for part in parts]


def _apply(rref: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = rref.local_value()(x)
    return found


def _state(rref: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = rref.local_value().state_dict()
    return found


@row("DistributedOptimizer.step", "from-torch-rpc")
def test_training_a_model_across_three_workers_equals_local_training(workers: list[str]) -> None:
    encoder = RemoteModule(workers[1], Encoder)
    middle = Middle()
    model = torch.nn.Sequential(encoder, middle)  # a local module with a remote part
    decoder = rpc.remote(workers[2], Decoder)
    optimizer = DistributedOptimizer(torch.optim.SGD, [model, decoder], lr=0.5, momentum=0.5)
    dense = DistributedOptimizer(torch.optim.SGD, [middle, decoder], lr=0.5)  # only clips
    schedule = optimizer.lr_scheduler(lr_scheduler.ExponentialLR, 0.9)
    losses = []
    for step in range(_STEPS):
        words, targets = _batch(step)
        with dist_autograd.context() as context_id:
            x = rpc.rpc_sync(workers[2], _apply, (decoder, model(words)))
            loss = torch.nn.functional.cross_entropy(x, targets)
            dist_autograd.backward(context_id, [loss])
            dense.clip_grad_value_(context_id, 0.05)
            optimizer.step(context_id)
        schedule.step()
        losses.append(loss.item())
    expected, states = _local_run()
    assert losses == pytest.approx(expected)
    assert losses[-1] < losses[0]
    found = [
        rpc.rpc_sync(workers[1], _state, (encoder.get_module_rref(),)),
        middle.state_dict(),
        rpc.rpc_sync(workers[2], _state, (decoder,)),
    ]
    for one, other in zip(found, states, strict=True):
        torch.testing.assert_close(one, other)
    assert all(each.grad is None for each in middle.parameters())


def test_training_an_actor_that_is_a_module_equals_local_training(workers: list[str]) -> None:
    handle = actorrpc.remote(Middle).remote()
    optimizer = DistributedOptimizer(torch.optim.Adam, handle, lr=0.1)
    local = Middle()
    local_optimizer = torch.optim.Adam(local.parameters(), lr=0.1)
    x = torch.arange(10.0).reshape(2, _WIDTH) / 10
    for _ in range(3):
        with dist_autograd.context() as context_id:
            loss = actorrpc.get(handle.forward.remote(x)).square().sum()
            dist_autograd.backward(context_id, [loss])
            expected = local(x).square().sum()
            local_optimizer.zero_grad()
            expected.backward()
            torch.testing.assert_close(
                optimizer.clip_grad_norm_(context_id, 0.5),
                torch.nn.utils.clip_grad_norm_(local.parameters(), 0.5),
            )
            optimizer.step(context_id)
            local_optimizer.step()
        torch.testing.assert_close(loss, expected)
    state = optimizer.state_dict()
    assert list(state["workers"]) == list(optimizer.workers)
    optimizer.load_state_dict(state)
    del handle, optimizer
    gc.collect()
