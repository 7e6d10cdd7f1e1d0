"""DistributedGradScaler across workers behaves like torch's GradScaler in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from actorrpc.optim import DistributedGradScaler, DistributedOptimizer
from tests.migration.rows import row
from tests.optim.things import Twins, gradient_of, put

_OPTIONS: dict[str, Any] = {
    "init_scale": 1000.0,
    "growth_factor": 1.7,
    "backoff_factor": 0.3,
    "growth_interval": 2,
}
_LOSS = torch.ones((), requires_grad=True)


@pytest.fixture
def twins(workers: list[str]) -> Twins:
    return Twins([workers[1], workers[2], workers[0]])


def _gradients(twins: Twins, bad: float | None, scale: float) -> list[torch.Tensor | None]:
    found = twins.random_gradients(missing=[2], scale=scale)
    if bad is not None:
        assert found[1] is not None
        found[1][2, 1] = bad
    return found


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@row("DistributedOptimizer.step", "from-torch-rpc")
def test_scales_steps_and_skipped_steps_equal_torchs(twins: Twins, explicit: bool, fused: bool) -> None:
    """torch's fused optimizers unscale gradients by a division, which rounds differently."""
    distributed = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1, momentum=0.9, fused=fused)
    local = torch.optim.SGD(twins.locals, lr=0.1, momentum=0.9, fused=fused)
    mine, theirs = DistributedGradScaler(**_OPTIONS), torch.amp.GradScaler("cpu", **_OPTIONS)
    for bad in (None, None, math.inf, None, math.nan, -math.inf, None, None, None):
        scaled = mine.scale(_LOSS)
        assert torch.equal(scaled, theirs.scale(_LOSS))
        before = twins.values()
        with twins.context(_gradients(twins, bad, mine.get_scale())) as context_id:
            if explicit:
                mine.unscale_(distributed, context_id)
                theirs.unscale_(local)
                expected = torch.nn.utils.clip_grad_norm_(twins.locals, 0.5)
                assert torch.equal(
                    distributed.clip_grad_norm_(context_id, 0.5).nan_to_num(), expected.nan_to_num()
                )
            assert mine.step(distributed, context_id) is (bad is None)
            theirs.step(local)
        mine.update()
        theirs.update()
        assert mine.get_scale() == theirs.get_scale()
        assert mine.state_dict() == theirs.state_dict()
        after = twins.values()
        assert torch.equal(before[0], after[0]) is (bad is not None)
        if not fused:
            twins.check()
        for one, other in zip(after, twins.locals, strict=True):
            torch.testing.assert_close(one, other.detach())


def test_sparse_gradients_are_unscaled_and_checked_for_inf(twins: Twins) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1)
    values = torch.full((3, 3), 8.0)
    sparse = torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), values, (4, 3), check_invariants=True)
    scaler = DistributedGradScaler(init_scale=4.0)
    with twins.context([sparse, None, None]) as context_id:
        scaler.unscale_(optimizer, context_id)
        assert torch.equal(gradient_of(context_id, twins.rrefs[0]).to_dense(), sparse.to_dense() / 4)  # type: ignore[union-attr]
        put(context_id, twins.rrefs[0], sparse * math.inf)
        scaler.update()
        assert scaler.step(optimizer, context_id) is False


def test_methods_called_in_the_wrong_order_raise_torchs_errors(twins: Twins) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1)
    scaler = DistributedGradScaler(**_OPTIONS)
    with pytest.raises(RuntimeError, match="No inf checks"):
        scaler.update()
    with twins.context(twins.random_gradients()) as context_id:
        scaler.unscale_(optimizer, context_id)
        with pytest.raises(RuntimeError, match="already been called on this optimizer"):
            scaler.unscale_(optimizer, context_id)
        scaler.step(optimizer, context_id)
        with pytest.raises(RuntimeError, match="called after step"):
            scaler.unscale_(optimizer, context_id)
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
            scaler.step(optimizer, context_id)
        scaler.update()
        scaler.step(optimizer, context_id)
    with pytest.raises(TypeError, match="context"):
        scaler.unscale_(optimizer, "1")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        scaler.step(optimizer, 12345)


def test_fp16_gradients_cannot_be_unscaled_and_the_step_is_refused(workers: list[str]) -> None:
    twins = Twins(workers[1:], dtypes=[torch.float16, torch.float32])
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1)
    scaler = DistributedGradScaler(**_OPTIONS)
    before = twins.values()
    with twins.context(twins.random_gradients()) as context_id:
        with pytest.raises(ValueError, match="FP16"):
            scaler.unscale_(optimizer, context_id)
        with pytest.raises(RuntimeError, match="has not succeeded"):
            scaler.step(optimizer, context_id)
    scaler.update()
    assert scaler.get_scale() == 1000.0
    assert all(torch.equal(one, other) for one, other in zip(before, twins.values(), strict=True))


def test_the_state_can_be_exchanged_with_torchs_scaler() -> None:
    mine, theirs = DistributedGradScaler(**_OPTIONS), torch.amp.GradScaler("cpu")
    theirs.load_state_dict(mine.state_dict())
    assert theirs.state_dict() == mine.state_dict()
    other = DistributedGradScaler()
    other.load_state_dict(theirs.state_dict())
    assert other.state_dict() == mine.state_dict()
    with pytest.raises(RuntimeError, match="empty"):
        other.load_state_dict({})
    other.update(3.0)
    assert other.get_scale() == 3.0


def test_a_disabled_scaler_scales_nothing_and_always_steps(twins: Twins) -> None:
    optimizer, local = (
        DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1),
        torch.optim.SGD(twins.locals, lr=0.1),
    )
    scaler = DistributedGradScaler(enabled=False)
    assert not scaler.is_enabled()
    assert scaler.scale(_LOSS) is _LOSS
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})
    scaler.load_state_dict({})
    with twins.context(twins.random_gradients()) as context_id:
        scaler.unscale_(optimizer, context_id)
        assert scaler.step(optimizer, context_id) is True
        local.step()
        scaler.update()
    twins.check()


@pytest.mark.parametrize(
    ("option", "text"),
    [("growth_factor", "growth factor must be > 1.0"), ("backoff_factor", "backoff factor must be < 1.0")],
)
def test_factors_that_would_never_change_the_scale_are_refused(option: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DistributedGradScaler(**{option: 1.0})


def test_scale_accepts_nested_iterables_of_tensors_only() -> None:
    scaler = DistributedGradScaler(init_scale=4.0)
    (one, two), [three] = scaler.scale(([_LOSS, 2 * _LOSS], iter([3 * _LOSS])))
    assert (one.item(), two.item(), three.item()) == (4.0, 8.0, 12.0)
    for outputs in (1.0, [_LOSS, "1"]):
        with pytest.raises(TypeError, match="outputs must be a Tensor or an iterable of Tensors"):
            scaler.scale(outputs)
