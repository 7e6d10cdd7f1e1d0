"""Every learning rate scheduler of torch sets the same hyper-parameters on workers as in a local optimizer."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import actorrpc.autograd as dist_autograd
from actorrpc.optim import DistributedLRScheduler, DistributedOptimizer
from tests.optim.things import Twins

# SequentialLR of torch 2.6 calls the schedulers in it as this warning forbids.
pytestmark = pytest.mark.filterwarnings(r"ignore:The epoch parameter in `scheduler\.step\(\)`")

SGD = torch.optim.SGD
_STEPS = 9


def _warm_up_and_cool_down(optimizer: Any) -> Any:
    return lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        [3],
    )


def _averaged(optimizer: Any) -> Any:
    return torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=4)


_CASES: list[tuple[Any, dict[str, Any]]] = [
    ("StepLR", {"step_size": 2}),
    ("MultiStepLR", {"milestones": [2, 5], "gamma": 0.3}),
    ("ConstantLR", {"total_iters": 3}),
    ("LinearLR", {"total_iters": 4}),
    ("ExponentialLR", {"gamma": 0.9}),
    ("PolynomialLR", {"total_iters": 4, "power": 2.0}),
    ("CosineAnnealingLR", {"T_max": 5}),
    ("CosineAnnealingWarmRestarts", {"T_0": 3}),
    ("CyclicLR", {"base_lr": 0.01, "max_lr": [0.2, 0.3], "step_size_up": 3}),
    ("OneCycleLR", {"max_lr": [0.2, 0.3], "total_steps": 12}),
    ("LambdaLR", {"lr_lambda": [lambda epoch: 0.9**epoch, lambda epoch: 1 / (1 + epoch)]}),
    ("MultiplicativeLR", {"lr_lambda": lambda epoch: 0.8}),
    ("ReduceLROnPlateau", {"patience": 1}),
    (_warm_up_and_cool_down, {}),
    (_averaged, {}),
]
_MADE_OF_OTHERS = {"SequentialLR", "ChainedScheduler"}
_METRICS = [3.0, 2.0, 2.0, 2.5, 2.1, 2.0, 1.0, 1.0, 1.0]


def _groups(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:1]}, {"params": params[1:], "lr": 0.05}]


@pytest.fixture
def pair(workers: list[str]) -> tuple[DistributedOptimizer, torch.optim.Optimizer]:
    """A distributed and a local optimizer with the same two groups."""
    twins = Twins([workers[1], workers[2], workers[0]])
    return (
        DistributedOptimizer(SGD, _groups(twins.rrefs), lr=0.1, momentum=0.8),
        SGD(_groups(twins.locals), lr=0.1, momentum=0.8),
    )


def _there(optimizer: DistributedOptimizer) -> list[list[dict[str, Any]]]:
    """Return the hyper-parameters of each group on each worker."""
    states = optimizer.state_dict()["workers"].values()
    return [[_bare(group) for group in state["param_groups"]] for state in states]


def _bare(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _check(distributed: DistributedOptimizer, local: torch.optim.Optimizer) -> None:
    expected = [_bare(group) for group in local.param_groups]
    assert _there(distributed) == [expected] * 3
    assert [dict(group) for group in distributed.param_groups] == expected


def _advance(
    distributed: DistributedOptimizer,
    local: torch.optim.Optimizer,
    mine: DistributedLRScheduler,
    theirs: Any,
    steps: int = _STEPS,
) -> None:
    for number in range(steps):
        with dist_autograd.context() as context_id:
            distributed.step(context_id)
        local.step()
        metric = _METRICS[number : number + 1] if isinstance(theirs, lr_scheduler.ReduceLROnPlateau) else []
        mine.step(*metric)
        theirs.step(*metric)
        assert mine.get_last_lr() == theirs.get_last_lr()
        _check(distributed, local)


def test_every_scheduler_of_torch_is_tested() -> None:
    found = {
        name
        for name, value in vars(lr_scheduler).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler)
    }
    assert found - {"LRScheduler", "_LRScheduler"} <= {name for name, _ in _CASES} | _MADE_OF_OTHERS


def _name(case: object) -> str:
    """Return a test id without addresses of functions, so that it is equal in each process."""
    return re.sub(r" at 0x\w+", "", str(getattr(case, "__name__", case)))


@pytest.mark.parametrize(("cls", "options"), _CASES, ids=_name)
def test_learning_rates_equal_those_of_the_local_scheduler(
    pair: tuple[DistributedOptimizer, torch.optim.Optimizer], cls: Any, options: dict[str, Any]
) -> None:
    made: Callable[..., Any] = getattr(lr_scheduler, cls) if isinstance(cls, str) else cls
    distributed, local = pair
    mine, theirs = distributed.lr_scheduler(made, **options), made(local, **options)
    assert isinstance(mine, DistributedLRScheduler)
    _check(distributed, local)
    _advance(distributed, local, mine, theirs)
    assert "lr=" in repr(mine)


@pytest.mark.parametrize("chained", [False, True])
def test_sequential_and_chained_schedulers_equal_the_local_ones(
    pair: tuple[DistributedOptimizer, torch.optim.Optimizer], chained: bool
) -> None:
    distributed, local = pair
    parts: list[tuple[Any, dict[str, Any]]] = [
        (lr_scheduler.ConstantLR, {"factor": 0.1, "total_iters": 3}),
        (lr_scheduler.ExponentialLR, {"gamma": 0.9}),
    ]
    ours = [distributed.lr_scheduler(cls, **options) for cls, options in parts]
    locals_ = [cls(local, **options) for cls, options in parts]
    if chained:
        mine = distributed.lr_scheduler(lr_scheduler.ChainedScheduler, ours)
        theirs: Any = lr_scheduler.ChainedScheduler(locals_, local)
    else:
        mine = distributed.lr_scheduler(lr_scheduler.SequentialLR, ours, [3])
        theirs = lr_scheduler.SequentialLR(local, locals_, [3])
    _advance(distributed, local, mine, theirs)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (lr_scheduler.OneCycleLR, {"max_lr": 0.3, "total_steps": 12}),
        (_warm_up_and_cool_down, {}),
    ],
)
def test_training_continues_from_scheduler_states_saved_to_a_file(
    pair: tuple[DistributedOptimizer, torch.optim.Optimizer], cls: Any, options: dict[str, Any]
) -> None:
    distributed, local = pair
    mine, theirs = distributed.lr_scheduler(cls, **options), cls(local, **options)
    _advance(distributed, local, mine, theirs, 3)
    file = io.BytesIO()
    torch.save([distributed.state_dict(), mine.state_dict()], file)
    again = distributed.lr_scheduler(cls, **options)  # starts anew, and sets the learning rates
    file.seek(0)
    state, schedule = torch.load(file, weights_only=True)
    distributed.load_state_dict(state)
    again.load_state_dict(schedule)
    _check(distributed, local)
    _advance(distributed, local, again, theirs, 4)


def test_invalid_scheduler_arguments_are_refused(
    workers: list[str], pair: tuple[DistributedOptimizer, torch.optim.Optimizer]
) -> None:
    distributed, _ = pair
    with pytest.raises(TypeError, match=r"class of torch\.optim\.lr_scheduler"):
        distributed.lr_scheduler("StepLR")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no scheduler"):
        distributed.lr_scheduler(lambda optimizer: None)
    with pytest.raises(TypeError, match="step_size"):
        distributed.lr_scheduler(lr_scheduler.StepLR)
    other = DistributedOptimizer(SGD, Twins(workers[1:]).rrefs, lr=0.1)
    with pytest.raises(ValueError, match="another optimizer"):
        other.lr_scheduler(lr_scheduler.ChainedScheduler, [distributed.lr_scheduler(lr_scheduler.ConstantLR)])


def test_an_error_in_a_users_lambda_changes_no_learning_rate(
    pair: tuple[DistributedOptimizer, torch.optim.Optimizer],
) -> None:
    distributed, _ = pair

    def factor(epoch: int) -> float:
        if epoch == 1:
            raise LookupError("no factor")
        return 1.0

    scheduler = distributed.lr_scheduler(lr_scheduler.LambdaLR, factor)
    before = _there(distributed)
    with dist_autograd.context() as context_id:
        distributed.step(context_id)
    assert isinstance(scheduler.scheduler, lr_scheduler.LambdaLR)
    with pytest.raises(LookupError, match="no factor"):
        scheduler.step()
    assert _there(distributed) == before
