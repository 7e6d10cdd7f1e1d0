"""Gradient clipping across workers gives the same result as torch's functions in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from actorrpc.optim import DistributedOptimizer
from tests.optim.things import Twins, gradient_of, local_gradients, put

_INF, _NAN = math.inf, math.nan


@pytest.fixture
def twins(workers: list[str]) -> Twins:
    """Parameters of several shapes on all workers."""
    return Twins(
        [workers[1], workers[2], workers[0], workers[1], workers[2], workers[1]],
        [(4, 3), (7,), (2, 2, 2), (1,), (5, 5), (33,)],
    )


def _optimizer(twins: Twins, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1, **options)


def _check(context_id: int, twins: Twins) -> None:
    """Check that the gradients in the context are bitwise equal to those of the local twins."""
    for rref, expected in zip(twins.rrefs, local_gradients(twins), strict=True):
        found = gradient_of(context_id, rref)
        if expected is None:
            assert found is None
        else:
            assert found is not None
            assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(expected))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, 0.5, _INF])
@pytest.mark.parametrize("max_norm", [0.3, 1e6])
def test_clip_grad_norm_equals_torchs_for_all_norm_types_and_is_zero_without_gradients(
    twins: Twins, norm_type: float, max_norm: float
) -> None:
    optimizer = _optimizer(twins)
    with twins.context(twins.random_gradients(missing=[3])) as context_id:
        expected = torch.nn.utils.clip_grad_norm_(twins.locals, max_norm, norm_type)
        assert torch.equal(optimizer.clip_grad_norm_(context_id, max_norm, norm_type), expected)
        _check(context_id, twins)
    with twins.context([None] * len(twins.rrefs)) as context_id:
        assert optimizer.clip_grad_norm_(context_id, max_norm, norm_type) == 0.0


def test_clip_grad_norm_equals_torchs_for_mixed_dtypes(workers: list[str]) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]
    twins = Twins([workers[1], workers[2], workers[0], workers[1]], dtypes=dtypes)
    optimizer = _optimizer(twins)
    with twins.context(twins.random_gradients()) as context_id:
        expected = torch.nn.utils.clip_grad_norm_(twins.locals, 0.5)
        found = optimizer.clip_grad_norm_(context_id, 0.5)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)
        for rref, gradient in zip(twins.rrefs, local_gradients(twins), strict=True):
            torch.testing.assert_close(gradient_of(context_id, rref), gradient)


@pytest.mark.parametrize("value", [_INF, _NAN])
def test_non_finite_norms_raise_if_requested_and_else_clip_like_torch(twins: Twins, value: float) -> None:
    optimizer = _optimizer(twins)
    gradients = twins.random_gradients()
    assert gradients[4] is not None
    gradients[4][2, 3] = value
    with twins.context(gradients) as context_id:
        with pytest.raises(RuntimeError, match="non-finite"):
            optimizer.clip_grad_norm_(context_id, 1.0, error_if_nonfinite=True)
        _check(context_id, twins)  # untouched
        torch.nn.utils.clip_grad_norm_(twins.locals, 1.0)
        assert not optimizer.clip_grad_norm_(context_id, 1.0).isfinite()
        _check(context_id, twins)


def test_sparse_gradients_are_clipped_like_dense_ones(workers: list[str]) -> None:
    """torch can only clip dense gradients, so the equal dense gradient is the reference."""
    twins = Twins([workers[1], workers[2]])
    optimizer = _optimizer(twins)
    values = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    sparse = torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), values, (4, 3), check_invariants=True)
    for clip in ("norm", "value"):
        with twins.context([sparse.to_dense(), torch.ones(4, 3)]) as context_id:
            put(context_id, twins.rrefs[0], sparse)
            if clip == "norm":
                expected = torch.nn.utils.clip_grad_norm_(twins.locals, 0.7)
                torch.testing.assert_close(optimizer.clip_grad_norm_(context_id, 0.7), expected)
            else:
                torch.nn.utils.clip_grad_value_(twins.locals, 0.3)
                optimizer.clip_grad_value_(context_id, 0.3)
            found = gradient_of(context_id, twins.rrefs[0])
            assert found is not None
            assert found.is_sparse
            torch.testing.assert_close(found.to_dense(), twins.locals[0].grad)
            torch.testing.assert_close(gradient_of(context_id, twins.rrefs[1]), twins.locals[1].grad)
