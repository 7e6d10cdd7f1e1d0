"""DistributedOptimizer: creation, steps, errors, and concurrent steps."""

from __future__ import annotations

import copy
import inspect
import operator
import os
import pickle
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed.optim as torch_optim

import actorrpc.autograd as dist_autograd
from actorrpc import errors, rpc
from actorrpc.autograd import graph
from actorrpc.autograd.api import contexts
from actorrpc.optim import DistributedOptimizer, OptimizerError
from tests.optim.things import (
    Blocking,
    FailingConstructor,
    FailingStep,
    Meeting,
    Pair,
    Twins,
    call_on,
    gradient_of,
    local_optimizers,
    weight,
)
from tests.ranks import Died, rpc_group

SGD = torch.optim.SGD
_TINY = 0.05  # a time-out that must expire


@pytest.fixture
def twins(workers: list[str]) -> Twins:
    """A parameter on each worker."""
    return Twins([workers[1], workers[2], workers[0]])


# -- parameters --------------------------------------------------------------------------------------------------


def _attribute(value: Any, name: str) -> Any:
    return getattr(value, name)


def _fill_grad(module: torch.nn.Module, context_id: int) -> None:
    gradients = contexts().get(context_id).gradients
    for each in module.parameters():
        gradients[id(each)] = each, torch.ones_like(each)


class Holder:
    """Has the method remote_parameters(), like RemoteModules and handles of actors."""

    def __init__(self, rrefs: list[Any]) -> None:
        self.rrefs = rrefs

    def remote_parameters(self) -> list[Any]:
        return self.rrefs


def test_frozen_parameters_are_not_changed_until_they_require_grad(workers: list[str]) -> None:
    frozen, live = rpc.remote(workers[1], Pair, (3, True)), rpc.remote(workers[2], weight, (0, (2,)))
    optimizer = DistributedOptimizer(SGD, [frozen, live], lr=0.5)
    with dist_autograd.context() as context_id:
        optimizer.step(context_id)
        assert torch.equal(call_on(frozen, _attribute, "bias"), Pair(3).bias)
        call_on(frozen, torch.nn.Module.requires_grad_)
        call_on(frozen, _fill_grad, context_id)
        optimizer.step(context_id)
    assert torch.equal(call_on(frozen, _attribute, "bias").detach(), Pair(3).bias - 0.5)


# -- invalid arguments ----------------------------------------------------------------------------------------------


class _NeedsClosure(SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        super().step()


def test_invalid_parameters_are_refused_before_anything_is_sent(twins: Twins) -> None:
    one, two = twins.rrefs[:2]
    leaf = weight(0, (2,))
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "empty parameter list", []),
        (ValueError, "empty parameter list", iter(())),
        (ValueError, "empty parameter list", [{"params": []}]),
        (ValueError, "given twice", [one, two, one]),
        (ValueError, "given twice", [leaf, leaf]),
        (ValueError, "given twice", [{"params": one}, {"params": [two, one]}]),
        (ValueError, "given twice", [Holder([one]), one]),
        (ValueError, "non-leaf", [leaf * 2]),
        (ValueError, "does not require grad", [torch.ones(2)]),
        (ValueError, "cannot have gradients", [torch.ones(2, dtype=torch.int64)]),
        (ValueError, "no parameters", torch.nn.ReLU()),
        (ValueError, "no parameters", Holder([])),
        (ValueError, "needs an entry 'params'", [{"lr": 0.1}]),
        (TypeError, "not an RRef", Holder([leaf])),
        (TypeError, "dicts", [{"params": one}, two]),
        (TypeError, "set", {one}),
        (TypeError, "not as str", "worker1"),
        (TypeError, "not as int", 3),
        (TypeError, "not as NoneType", [None]),
        (TypeError, "names of hyper-parameters", [{"params": one, 3: 0.1}]),
    ]
    for error, text, params in cases:
        with pytest.raises(error, match=text) as caught:
            DistributedOptimizer(SGD, params, lr=0.1)
        assert not isinstance(caught.value, errors.RemoteError), params


def test_optimizer_classes_that_need_a_closure_and_other_objects_are_refused(twins: Twins) -> None:
    for cls, text in [
        (torch.optim.LBFGS, "needs closure"),
        (_NeedsClosure, "needs closure"),
        (SGD([weight(0, (1,))], lr=0.1), "class of optimizers"),
        (torch.nn.Linear, "class of optimizers"),
        ("SGD", "class of optimizers"),
    ]:
        with pytest.raises(TypeError, match=text):
            DistributedOptimizer(cls, twins.rrefs, lr=0.1)  # type: ignore[arg-type]


def test_parameters_that_only_their_owner_can_check_are_refused_there(workers: list[str]) -> None:
    module = rpc.remote(workers[1], Pair)
    bias = rpc.remote(module.owner(), _attribute_of, (module, "bias"))
    again = rpc.remote(module.owner(), _attribute_of, (module, "bias"))
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "given twice", [module, bias]),
        (ValueError, "given twice", [{"params": bias}, {"params": again, "lr": 1.0}]),
        (ValueError, "non-leaf", rpc.remote(workers[1], _product, (2,))),
        (ValueError, "cannot have gradients", rpc.remote(workers[1], torch.arange, (3,))),
        (ValueError, "no parameters", rpc.remote(workers[1], torch.nn.ReLU)),
        (TypeError, "RRefs is to a str", rpc.remote(workers[1], str, ("a",))),
        (ZeroDivisionError, "division", rpc.remote(workers[1], operator.truediv, (1, 0))),
    ]
    for error, text, params in cases:
        with pytest.raises(error, match=text) as caught:
            DistributedOptimizer(SGD, params, lr=0.1)
        assert isinstance(caught.value, errors.RemoteError)
        assert "Error creating optimizer on worker 'worker1'." in caught.value.__notes__
    with pytest.raises(ValueError, match="none of the 2 parameters requires grad"):
        DistributedOptimizer(SGD, rpc.remote(workers[1], Pair, (0, True)), lr=0.1)
    with pytest.raises(ValueError, match="learning rate"):
        DistributedOptimizer(SGD, module, lr=-1.0)


def _attribute_of(rref: Any, name: str) -> Any:
    return getattr(rref.local_value(), name)


def _product(factor: int) -> torch.Tensor:
    return weight(0, (2,)) * factor


@pytest.mark.slow
def test_local_optimizers_are_freed_with_the_distributed_optimizer_or_if_its_creation_fails(
    workers: list[str], twins: Twins
) -> None:
    optimizer = DistributedOptimizer(SGD, twins.rrefs, lr=0.1)
    assert [local_optimizers(worker) for worker in workers] == [1, 1, 1]
    with pytest.raises(LookupError, match="nothing for worker2") as one:
        DistributedOptimizer(FailingConstructor, twins.rrefs, on=["worker2"])
    assert isinstance(one.value, errors.RemoteError)
    with pytest.raises(OptimizerError, match=r"Error creating optimizer on 2 of 3 workers") as both:
        DistributedOptimizer(FailingConstructor, twins.rrefs, on=["worker1", "worker2"])
    assert both.value.workers == ("worker1", "worker2")
    assert all(isinstance(each, LookupError) for each in both.value.exceptions)
    del one, both, optimizer
    for worker in workers:
        _until_none(worker)


def _until_none(worker: str) -> None:
    while local_optimizers(worker):  # bounded by the test's limit
        threading.Event().wait(0.01)


def test_a_distributed_optimizer_cannot_be_copied_or_pickled(twins: Twins) -> None:
    optimizer = DistributedOptimizer(SGD, twins.rrefs, lr=0.1)
    for travel in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="stays in its process"):
            travel(optimizer)
    assert repr(optimizer) == "DistributedOptimizer(SGD, 3 parameters on ['worker1', 'worker2', 'worker0'])"


# -- steps ------------------------------------------------------------------------------------------------------------


def test_invalid_or_unknown_context_ids_raise(twins: Twins) -> None:
    optimizer = DistributedOptimizer(SGD, twins.rrefs, lr=0.1)
    methods: list[Any] = [
        optimizer.step,
        optimizer.zero_grad,
        lambda id: optimizer.clip_grad_norm_(id, 1.0),
        lambda id: optimizer.clip_grad_value_(id, 1.0),
    ]
    with dist_autograd.context() as over:
        pass
    for method in methods:
        for wrong in ("1", 1.0, True, [1]):
            with pytest.raises(TypeError, match="context"):
                method(wrong)
        for unknown in (12345, over):
            with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {unknown}"):
                method(unknown)
    with pytest.raises(TypeError, match="context_id"):
        optimizer.step()  # type: ignore[call-arg]
    with dist_autograd.context() as context_id, pytest.raises(TypeError, match="takes no closure"):
        optimizer.step(context_id, lambda: 1.0)  # type: ignore[arg-type]


def _set_grad(parameter: torch.Tensor, value: float | None) -> None:
    parameter.grad = None if value is None else torch.full_like(parameter, value)


def _grad(parameter: torch.Tensor) -> torch.Tensor | None:
    return parameter.grad


def test_a_step_changes_only_its_own_parameters_and_leaves_grad_unchanged(workers: list[str]) -> None:
    twins = Twins([workers[1], workers[1], workers[2]])
    optimizer = DistributedOptimizer(SGD, [twins.rrefs[0], twins.rrefs[2]], lr=0.5)
    local = SGD([twins.locals[0], twins.locals[2]], lr=0.5)
    call_on(twins.rrefs[0], _set_grad, 7.0)
    with twins.context(twins.random_gradients()) as context_id:
        gradients = [gradient_of(context_id, rref) for rref in twins.rrefs]
        optimizer.step(context_id)
        local.step()
        twins.check()
        for rref, gradient in zip(twins.rrefs, gradients, strict=True):
            assert gradient is not None
            assert torch.equal(gradient_of(context_id, rref), gradient)  # type: ignore[arg-type]
    assert [call_on(rref, _grad) is None for rref in twins.rrefs] == [False, True, True]
    assert torch.equal(call_on(twins.rrefs[0], _grad), torch.full((4, 3), 7.0))


def test_a_step_without_a_context_uses_grad(twins: Twins) -> None:
    optimizer = DistributedOptimizer(SGD, twins.rrefs, lr=0.5)
    local = SGD(twins.locals, lr=0.5)
    for position in (0, 2):
        call_on(twins.rrefs[position], _set_grad, 4.0)
        _set_grad(twins.locals[position], 4.0)
    norm = optimizer.clip_grad_norm_(None, 2.0)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(twins.locals, 2.0))
    optimizer.step(None)
    local.step()
    twins.check()
    assert torch.equal(call_on(twins.rrefs[0], _grad), twins.locals[0].grad)  # type: ignore[arg-type]
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(call_on(twins.rrefs[0], _grad), torch.zeros(4, 3))
    optimizer.zero_grad()
    assert all(call_on(rref, _grad) is None for rref in twins.rrefs)


def test_zero_grad_of_a_context_leaves_grad_and_other_parameters_unchanged(workers: list[str]) -> None:
    twins = Twins([workers[1], workers[1], workers[2]])
    optimizer = DistributedOptimizer(SGD, [twins.rrefs[0], twins.rrefs[2]], lr=0.5)
    call_on(twins.rrefs[0], _set_grad, 7.0)
    with twins.context([torch.ones(4, 3), torch.ones(4, 3), None]) as context_id:
        optimizer.zero_grad(context_id, set_to_none=False)
        assert torch.equal(gradient_of(context_id, twins.rrefs[0]), torch.zeros(4, 3))  # type: ignore[arg-type]
        optimizer.zero_grad(context_id)
        assert gradient_of(context_id, twins.rrefs[0]) is None
        assert gradient_of(context_id, twins.rrefs[1]) is not None  # not a parameter of this optimizer
    assert call_on(twins.rrefs[0], _grad) is not None


# -- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_on_one_worker_is_raised_and_the_others_have_stepped(twins: Twins) -> None:
    optimizer = DistributedOptimizer(FailingStep, twins.rrefs, on=["worker2"])
    before = twins.values()
    with twins.context(twins.random_gradients()) as context_id:
        with pytest.raises(LookupError, match="no step on worker2") as caught:
            optimizer.step(context_id)
        assert isinstance(caught.value, errors.RemoteError)
        assert caught.value.worker == "worker2"
        assert "Error running optimizer on worker 'worker2'." in caught.value.__notes__
        assert all(call_on(rref, _grad) is None for rref in twins.rrefs)
        assert gradient_of(context_id, twins.rrefs[1]) is not None
    changed = [not torch.equal(one, other) for one, other in zip(before, twins.values(), strict=True)]
    assert changed == [True, False, True]


def test_errors_on_several_workers_raise_an_optimizer_error_group(twins: Twins) -> None:
    optimizer = DistributedOptimizer(FailingStep, twins.rrefs, on=["worker1", "worker2"])
    with twins.context(twins.random_gradients()) as context_id:
        with pytest.raises(OptimizerError, match="Error running optimizer on 2 of 3 workers") as caught:
            optimizer.step(context_id)
        assert caught.value.workers == ("worker1", "worker2")
        assert "no step on worker1" in str(caught.value)
        for each, name in zip(caught.value.exceptions, caught.value.workers, strict=True):
            assert isinstance(each, LookupError)
            assert isinstance(each, errors.RemoteError)
            assert each.worker == name
        assert isinstance(caught.value, errors.RpcError)
        found = []
        try:
            optimizer.step(context_id)
        except* LookupError as group:
            found.extend(group.exceptions)
        assert len(found) == 2


def test_an_optimizer_error_can_be_raised_through_a_remote_call(workers: list[str]) -> None:
    with pytest.raises(OptimizerError) as caught:
        rpc.rpc_sync(workers[1], _fail_there, (workers,))
    assert caught.value.workers == ("worker1", "worker2")
    assert [type(each).__name__ for each in caught.value.exceptions] == ["LookupError", "LookupError"]


def _fail_there(workers: list[str]) -> None:
    twins = Twins(workers)
    optimizer = DistributedOptimizer(FailingStep, twins.rrefs, on=workers[1:])
    with dist_autograd.context() as context_id:
        optimizer.step(context_id)


# -- concurrent steps ---------------------------------------------------------------------------------------------


def _step(optimizer: DistributedOptimizer, context_id: int, failed: list[BaseException]) -> None:
    try:
        optimizer.step(context_id)
    except BaseException as error:
        failed.append(error)


def _together(optimizers: list[DistributedOptimizer]) -> None:
    """Let all optimizers step in different threads at the same time."""
    failed: list[BaseException] = []
    with dist_autograd.context() as context_id:
        threads = [threading.Thread(target=_step, args=(each, context_id, failed)) for each in optimizers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]


def test_steps_on_different_parameters_run_concurrently(workers: list[str]) -> None:
    places = [rpc.remote(workers[1], weight, (seed, (2,))) for seed in range(2)]
    _together([DistributedOptimizer(Meeting, place, lr=0.1) for place in places])


class _Alone(SGD):
    """An optimizer whose step fails if another step of the class runs at the same time."""

    _inside = threading.Lock()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self._inside.acquire(blocking=False)
        try:
            threading.Event().wait(0.002)
            super().step()
        finally:
            self._inside.release()


def test_steps_on_the_same_parameters_run_one_after_the_other(workers: list[str]) -> None:
    twins = Twins([workers[1], workers[1]])
    given = [twins.rrefs, twins.rrefs[:1], twins.rrefs[1:] + twins.rrefs[:1], twins.rrefs[:1]]
    _together([DistributedOptimizer(_Alone, params, lr=0.1) for params in given])


# -- death of a worker -------------------------------------------------------------------------------------------------


class _Deadly(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if rpc.get_worker_info().name == "worker1":
            os.kill(os.getpid(), signal.SIGKILL)
        super().step()


def _with_a_death(rank: int, world_size: int) -> None:
    if rank:
        return
    twins = Twins(["worker1", "worker0"])
    optimizer = DistributedOptimizer(_Deadly, twins.rrefs, lr=0.5)
    local = SGD(twins.locals[1:], lr=0.5)
    with twins.context(twins.random_gradients()) as context_id:
        with pytest.raises(errors.PeerDiedError):
            optimizer.step(context_id)
        local.step()
        here = twins.rrefs[1].local_value()
        assert torch.equal(here.detach(), twins.locals[1].detach())
        with pytest.raises(errors.RpcError):
            optimizer.step(context_id)
        with pytest.raises(errors.RpcError):
            optimizer.state_dict()


@pytest.mark.slow
def test_a_step_on_a_dead_worker_raises_peer_died_error_and_the_others_step() -> None:
    assert rpc_group(_with_a_death, 2, may_die=[1]) == [None, Died(-signal.SIGKILL)]


# -- interface and time-outs -------------------------------------------------------------------------------------------


def test_the_signatures_equal_those_of_torchs_distributed_optimizer() -> None:
    ours = inspect.signature(DistributedOptimizer.__init__).parameters
    theirs = inspect.signature(torch_optim.DistributedOptimizer.__init__).parameters
    kinds = {name: parameter.kind for name, parameter in theirs.items() if name != "params_rref"}
    assert {name: ours[name].kind for name in kinds} == kinds
    assert list(ours)[:3] == ["self", "optimizer_class", "params"]
    step = inspect.signature(DistributedOptimizer.step).parameters
    assert list(inspect.signature(torch_optim.DistributedOptimizer.step).parameters) == list(step)[:2]


def test_a_local_step_in_user_code_times_out(workers: list[str]) -> None:
    tensor = weight(9, (2,))
    slow, other = DistributedOptimizer(Blocking, tensor), DistributedOptimizer(SGD, tensor, lr=1.0)
    Blocking.close()
    try:
        with dist_autograd.context() as context_id:
            with pytest.raises(errors.RpcTimeoutError):
                slow.step(context_id, timeout=_TINY)
            Blocking.await_entered()
            with pytest.raises(errors.RpcTimeoutError):  # the wait for a parameter in use times out as well
                other.step(context_id, timeout=_TINY)
    finally:
        Blocking.open()


def test_ctrl_c_ends_the_wait_of_a_local_step(twins: Twins) -> None:
    optimizer = DistributedOptimizer(SGD, twins.rrefs, lr=1.0)
    parameter = twins.rrefs[2].local_value()
    before = parameter.detach().clone()
    with twins.context(twins.random_gradients()) as context_id:
        with graph.Borrowed([parameter]):  # as if another step used the parameter
            main = threading.main_thread().ident
            assert main is not None
            waits = threading.Thread(target=_interrupt_once_it_waits, args=(main,))
            waits.start()
            with pytest.raises(KeyboardInterrupt):
                optimizer.step(context_id)
            waits.join()
        assert torch.equal(parameter.detach(), before)
        optimizer.step(context_id)
    assert not torch.equal(parameter.detach(), before)


def _interrupt_once_it_waits(thread: int) -> None:
    pause = threading.Event()
    while not graph._waiting:
        pause.wait(0.001)
    signal.pthread_kill(thread, signal.SIGINT)
