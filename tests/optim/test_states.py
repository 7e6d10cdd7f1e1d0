"""The state of a DistributedOptimizer: saving and loading, parameter groups, hyper-parameters."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from actorrpc import errors, rpc
from actorrpc.optim import DistributedOptimizer, OptimizerError, ParamGroup
from tests.migration.rows import row
from tests.optim.things import Blocking, Pair, Twins, call_on, weight

Adam, SGD = torch.optim.Adam, torch.optim.SGD
_TINY = 0.05  # a time-out that must expire


@pytest.fixture
def twins(workers: list[str]) -> Twins:
    return Twins([workers[1], workers[2], workers[0]])


def _train(
    twins: Twins, distributed: DistributedOptimizer, local: torch.optim.Optimizer, steps: int = 2
) -> None:
    for _ in range(steps):
        with twins.context(twins.random_gradients()) as context_id:
            distributed.step(context_id)
            local.step()
    twins.check()


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _everywhere(optimizer: DistributedOptimizer, key: str) -> list[Any]:
    """Return the value of each group on the workers, and check that all workers agree."""
    states = optimizer.state_dict()["workers"]
    first, *others = [[group[key] for group in state["param_groups"]] for state in states.values()]
    assert all(each == first for each in others), states
    return first


# -- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"lr": 0.05, "amsgrad": True}, {"lr": torch.tensor(0.05)}], ids=str)
def test_training_continues_from_a_saved_state(twins: Twins, options: dict[str, Any]) -> None:
    distributed, local = DistributedOptimizer(Adam, twins.rrefs, **options), Adam(twins.locals, **options)
    _train(twins, distributed, local)
    distributed.param_groups[0]["lr"] = 0.02
    local.param_groups[0]["lr"] = 0.02
    state = _through_a_file(distributed.state_dict())
    again = DistributedOptimizer(Adam, twins.rrefs, lr=7.0)
    again.load_state_dict(state)
    assert again.param_groups[0]["lr"] == 0.02
    _train(twins, again, local)


def test_the_state_contains_the_state_dicts_of_the_local_optimizers(workers: list[str], twins: Twins) -> None:
    distributed, local = DistributedOptimizer(Adam, twins.rrefs, lr=0.1), Adam(twins.locals[:1], lr=0.1)
    _train_one(twins, distributed, local)
    state = distributed.state_dict()
    assert state["optimizer"] == "Adam"
    assert list(state["workers"]) == [workers[1], workers[2], workers[0]]
    theirs = local.state_dict()
    mine = state["workers"][workers[1]]
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["shapes"] == [[[4, 3]]]
    for key, value in theirs["state"][0].items():
        assert torch.equal(mine["state"][0][key], value)


def _train_one(twins: Twins, distributed: DistributedOptimizer, local: torch.optim.Optimizer) -> None:
    with twins.context(twins.random_gradients()) as context_id:
        distributed.step(context_id)
        local.step()


def test_a_state_can_be_loaded_on_workers_with_other_names(workers: list[str]) -> None:
    before, after = Twins(workers[1:]), Twins([workers[2], workers[1]])
    one, local = DistributedOptimizer(Adam, before.rrefs, lr=0.1), Adam(before.locals, lr=0.1)
    _train(before, one, local)
    state = one.state_dict()
    two = DistributedOptimizer(Adam, after.rrefs, lr=0.1)
    two.load_state_dict(state, dict(zip(state["workers"], two.workers, strict=True)))
    found, expected = two.state_dict()["workers"][workers[2]], state["workers"][workers[1]]
    assert torch.equal(found["state"][0]["exp_avg"], expected["state"][0]["exp_avg"])


def test_states_of_another_optimizer_or_other_workers_are_refused(workers: list[str], twins: Twins) -> None:
    optimizer = DistributedOptimizer(Adam, twins.rrefs, lr=0.1)
    _train(twins, optimizer, Adam(twins.locals, lr=0.1))
    fit = optimizer.state_dict()
    pair = DistributedOptimizer(Adam, rpc.remote(workers[1], Pair), lr=0.1)
    without = {**fit, "workers": {name: fit["workers"][name] for name in workers[:2]}}
    bare = {**fit, "workers": {name: {} for name in workers}}
    cases: list[tuple[Any, dict[str, str], str]] = [
        (
            DistributedOptimizer(SGD, twins.rrefs, lr=0.1).state_dict(),
            {},
            "is of a SGD, this optimizer is a Adam",
        ),
        (Adam(twins.locals).state_dict(), {}, "no state of a DistributedOptimizer.*'param_groups'"),
        ([], {}, "no state of a DistributedOptimizer"),
        (pair.state_dict(), {}, r"workers \['worker1'\], .* on \['worker0', 'worker1', 'worker2'\]"),
        (without, {}, r"workers \['worker0', 'worker1'\]"),
        (fit, {"nobody": "worker1"}, r"no worker of these names.*nobody"),
        (fit, {"worker1": "worker2"}, "workers= says which is which"),
        (bare, {}, "lacks"),
    ]
    for state, names, text in cases:
        with pytest.raises(ValueError, match=text) as caught:
            optimizer.load_state_dict(state, names)
        assert not isinstance(caught.value, errors.RemoteError)


def test_loading_a_state_that_one_worker_refuses_changes_no_worker(workers: list[str], twins: Twins) -> None:
    optimizer, local = DistributedOptimizer(Adam, twins.rrefs, lr=0.1), Adam(twins.locals, lr=0.1)
    _train(twins, optimizer, local)
    state = optimizer.state_dict()
    state["workers"][workers[1]]["state"][0]["exp_avg"].fill_(
        7.0
    )  # would change the training if it were loaded
    state["workers"][workers[1]]["param_groups"][0]["lr"] = 3.0
    one = copy.deepcopy(state)
    one["workers"][workers[2]]["shapes"] = [[[4, 3], [2]]]
    with pytest.raises(ValueError, match="group 0 has 2 parameters in the state, 1 here") as caught:
        optimizer.load_state_dict(one)
    assert "Error loading the optimizer's state on worker 'worker2'." in caught.value.__notes__
    both = copy.deepcopy(state)
    both["workers"][workers[2]]["shapes"] = [[[4, 2]]]
    both["workers"][workers[0]]["shapes"] = []
    with pytest.raises(OptimizerError, match="2 of 3 workers") as several:
        optimizer.load_state_dict(both)
    assert several.value.workers == (workers[2], workers[0])
    assert r"shape (4, 2) in the state, (4, 3) here" in str(several.value)
    assert "the state has 0 parameter groups" in str(several.value)
    broken = copy.deepcopy(state)
    broken["workers"][workers[0]]["param_groups"] = []  # detected by torch
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(broken)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert _everywhere(optimizer, "lr") == [0.1]
    _train(twins, optimizer, local)


# -- groups ---------------------------------------------------------------------------------------------------------


@row("DistributedOptimizer.step", "from-torch-rpc")
def test_add_param_group_adds_groups_on_any_worker(workers: list[str]) -> None:
    twins = Twins([workers[1], workers[1], workers[2], workers[0]])
    optimizer = DistributedOptimizer(Adam, twins.rrefs[0], lr=0.1)
    local = Adam(twins.locals[:1], lr=0.1)
    _train_one(twins, optimizer, local)
    optimizer.param_groups[0]["lr"] = 0.3
    local.param_groups[0]["lr"] = 0.3
    for some in ([1], [2], [3]):
        optimizer.add_param_group({"params": [twins.rrefs[n] for n in some], "lr": 0.01, "amsgrad": True})
        local.add_param_group({"params": [twins.locals[n] for n in some], "lr": 0.01, "amsgrad": True})
        _train(twins, optimizer, local)
    assert optimizer.workers == (workers[1], workers[2], workers[0])
    assert _everywhere(optimizer, "lr") == [0.3, 0.01, 0.01, 0.01]
    again = DistributedOptimizer(Adam, [{"params": each} for each in twins.rrefs], lr=9.0)
    again.load_state_dict(_through_a_file(optimizer.state_dict()))
    _train(twins, again, local)


def test_invalid_groups_are_refused_by_add_param_group_without_effect(
    workers: list[str], twins: Twins
) -> None:
    optimizer = DistributedOptimizer(SGD, twins.rrefs[:2], lr=0.1)
    more = rpc.remote(workers[2], weight, (5, (2,)))
    same = rpc.remote(workers[1], _itself, (twins.rrefs[0],))
    cases: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "dict with 'params'", [more]),
        (ValueError, "needs an entry 'params'", {"lr": 0.1}),
        (ValueError, "empty parameter list", {"params": []}),
        (ValueError, "given twice", {"params": [more, twins.rrefs[0]]}),
        (ValueError, "given twice", {"params": [more, same]}),
        (TypeError, "is to a str", {"params": [more, rpc.remote(workers[1], str, ("a",))]}),
        (TypeError, "is to a str", {"params": [more, rpc.remote(workers[0], str, ("a",))]}),
    ]
    for error, text, group in cases:
        with pytest.raises(error, match=text):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    assert _everywhere(optimizer, "lr") == [0.1]
    optimizer.add_param_group({"params": more})  # no worker has kept it from the failed attempts
    assert len(optimizer.param_groups) == 2


def _itself(rref: Any) -> Any:
    return rref.local_value()


# -- hyper-parameters -------------------------------------------------------------------------------------------------


def test_param_groups_are_mappings_of_hyper_parameters_without_params(twins: Twins) -> None:
    [group] = DistributedOptimizer(SGD, twins.rrefs, lr=0.1).param_groups
    expected = {
        key: value for key, value in SGD(twins.locals, lr=0.1).param_groups[0].items() if key != "params"
    }
    assert isinstance(group, ParamGroup)
    assert dict(group) == expected
    assert len(group) == len(expected)
    assert "params" not in group
    assert "0.1" in repr(group)
    with pytest.raises(KeyError, match="on the workers"):
        group["params"]
    with pytest.raises(KeyError):
        group["nothing"]
    with pytest.raises(TypeError, match="add_param_group"):
        group["params"] = []
    with pytest.raises(TypeError, match="not removed"):
        del group["lr"]


def _next_step(optimizer: DistributedOptimizer) -> None:
    optimizer.step(None)


def _next_change(optimizer: DistributedOptimizer) -> None:
    optimizer.param_groups[0]["momentum"] = 0.9


@pytest.mark.parametrize("step", [_next_step, _next_change])
def test_hyper_parameters_that_did_not_reach_a_worker_are_sent_again_with_the_next_step(
    workers: list[str], step: Callable[[DistributedOptimizer], None]
) -> None:
    places = [rpc.remote(worker, weight, (0, (2,))) for worker in workers[1:]]
    blocking = DistributedOptimizer(Blocking, places[0])
    optimizer = DistributedOptimizer(SGD, places, lr=0.1)
    scheduler = optimizer.lr_scheduler(torch.optim.lr_scheduler.ConstantLR, factor=0.5, total_iters=1)
    assert _everywhere(optimizer, "lr") == [0.05]
    optimizer.step(None)
    call_on(places[0], _blocking, "close")
    try:
        with pytest.raises(errors.RpcTimeoutError):
            blocking.step(None, timeout=_TINY)
        call_on(places[0], _blocking, "await_entered")
        # The other worker may not react within the short time-out either.
        with pytest.raises((errors.RpcTimeoutError, OptimizerError)):
            scheduler.step(timeout=_TINY)
        assert scheduler.get_last_lr() == [0.1]
    finally:
        call_on(places[0], _blocking, "open")
    step(optimizer)
    assert _everywhere(optimizer, "lr") == [0.1]


def _blocking(_parameter: torch.Tensor, name: str) -> None:
    getattr(Blocking, name)()
