"""Every optimizer of torch gives bitwise equal results across workers and in one process, at each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actorrpc.optim import DistributedOptimizer
from tests.optim.things import Twins

_CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "maximize": True}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "foreach": True}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "fused": True}),
    ("Adam", {"lr": 0.05}),
    ("Adam", {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {"lr": 0.05, "amsgrad": True, "foreach": True}),
    ("Adam", {"lr": 0.05, "amsgrad": True, "fused": True}),
    ("Adam", {"lr": torch.tensor(0.05), "betas": (0.8, 0.99)}),
    ("AdamW", {"lr": 0.05, "amsgrad": True}),
    ("AdamW", {"lr": 0.05, "fused": True, "weight_decay": 0.2}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
    ("Adagrad", {"lr": 0.05, "fused": True}),
    ("Adadelta", {"rho": 0.95, "weight_decay": 0.1}),
    ("Adamax", {"lr": 0.05, "weight_decay": 0.1}),
    ("Adafactor", {"lr": 0.05, "weight_decay": 0.1}),
    ("ASGD", {"lr": 0.05, "t0": 2.0, "weight_decay": 0.1}),
    ("Muon", {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}),
    ("NAdam", {"lr": 0.05, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 0.05, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.05, "centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("Rprop", {"lr": 0.05, "etas": (0.4, 1.3)}),
    ("SparseAdam", {"lr": 0.05}),
]
_NEEDS_CLOSURE = {"LBFGS"}
_STEPS = 5


def _classes() -> set[str]:
    found = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    return found - {"Optimizer"}


def test_every_optimizer_of_torch_is_tested() -> None:
    assert _classes() <= {name for name, _ in _CASES} | _NEEDS_CLOSURE


def _sparse(gradient: torch.Tensor | None, step: int) -> torch.Tensor | None:
    """Return a sparse gradient of two rows, one of which occurs twice, as from an embedding."""
    if gradient is None:
        return None
    indices = torch.tensor([[step % 4, (step + 1) % 4, step % 4]])
    return torch.sparse_coo_tensor(indices, gradient[:3], gradient.shape, check_invariants=True)


@pytest.mark.parametrize(("name", "options"), _CASES, ids=lambda case: str(case))
def test_steps_across_workers_equal_local_steps(
    workers: list[str], name: str, options: dict[str, Any]
) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    cls = getattr(torch.optim, name)
    twins = Twins([workers[1], workers[2], workers[0], workers[1]])
    given = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()
    }
    distributed = DistributedOptimizer(cls, twins.rrefs, **options)
    local = cls(twins.locals, **given)
    for step in range(_STEPS):
        gradients = twins.random_gradients(missing=[1] if step == 2 else [])
        if name == "SparseAdam":
            gradients = [_sparse(each, step) for each in gradients]
        with twins.context(gradients) as context_id:
            before = [each.detach().clone() for each in twins.locals]
            distributed.step(context_id)
            local.step()
        twins.check()
        assert not torch.equal(before[0], twins.locals[0].detach())  # the step changes parameters
