"""Gradients through remote modules, compared with the same model in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import actorrpc.autograd as dist_autograd
from actorrpc import rpc
from actorrpc.nn import RemoteModule
from tests.nn import things
from tests.nn.things import Hybrid
from tests.ranks import run_group, unused_path


@pytest.fixture
def here() -> Iterator[None]:
    with things.alone():
        yield


def _both(part: Any, *args: Any) -> tuple[Hybrid, Hybrid]:
    hybrid = Hybrid(RemoteModule("w0", part, args))
    return hybrid, things.clone_of(hybrid, part(*args))


def _gradients(context: int, hybrid: Hybrid) -> dict[str, torch.Tensor]:
    found = dist_autograd.get_gradients(context)
    here = {name: found[each] for name, each in hybrid.named_parameters()}
    there = {
        f"remote.{name}": found[rref.local_value()]
        for name, rref in hybrid.remote.named_parameters()  # type: ignore[union-attr]
    }
    return here | there


def _local(model: nn.Module) -> dict[str, Any]:
    return {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("part", [things.Tied, things.build_linear, things.normed])
def test_gradients_equal_those_of_the_local_model(part: Any) -> None:
    hybrid, local = _both(part, 3)
    x = torch.randn(4, 3)
    torch.manual_seed(1)
    local(x).square().sum().backward()
    with dist_autograd.context() as context:
        torch.manual_seed(1)  # for dropout
        dist_autograd.backward(context, [hybrid(x).square().sum()])
        torch.testing.assert_close(_gradients(context, hybrid), _local(local))
    assert all(each.grad is None for each in hybrid.parameters())


@pytest.mark.usefixtures("here")
def test_gradients_flow_through_forward_async() -> None:
    hybrid, local = _both(things.build_linear, 3)
    x = torch.randn(4, 3)
    (local(x) * local(2 * x)).sum().backward()
    with dist_autograd.context() as context:
        one, other = (hybrid.remote.forward_async(torch.relu(hybrid.local(each))) for each in (x, 2 * x))  # type: ignore[operator]
        dist_autograd.backward(context, [(one.wait() * other.wait()).sum()])
        torch.testing.assert_close(_gradients(context, hybrid), _local(local))


@pytest.mark.usefixtures("here")
def test_frozen_remote_parameters_get_no_gradients() -> None:
    hybrid, local = _both(things.build_linear, 3)
    hybrid.remote.requires_grad_(False)
    x = torch.randn(4, 3)
    local(x).sum().backward()
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [hybrid(x).sum()])
        found = dist_autograd.get_gradients(context)
        assert set(found) == set(hybrid.parameters())
        torch.testing.assert_close(found[hybrid.local.weight], local.local.weight.grad)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("changes", [False, True])
def test_full_backward_hooks_run_at_the_caller_as_in_a_local_model(changes: bool) -> None:
    hybrid, local = _both(things.build_linear, 3)
    seen: dict[str, list[Any]] = {"remote": [], "local": []}
    for name, model in (("remote", hybrid), ("local", local)):

        def before(_module: Any, out: Any, name: str = name) -> Any:
            seen[name].append(out[0].clone())
            return (out[0] * 2,) if changes else None

        def after(_module: Any, given: Any, out: Any, name: str = name) -> Any:
            seen[name] += [given[0].clone(), out[0].clone()]
            return (given[0] * 3,) if changes else None

        model.remote.register_full_backward_pre_hook(before)
        model.remote.register_full_backward_hook(after)
    x = torch.randn(4, 3)
    local(x).square().sum().backward()
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [hybrid(x).square().sum()])
        torch.testing.assert_close(_gradients(context, hybrid), _local(local))
    assert len(seen["local"]) == 3
    torch.testing.assert_close(seen["remote"], seen["local"])


# -- over real workers ------------------------------------------------------------------------------------------------


def gradients_of(rrefs: list[Any], context: int) -> list[torch.Tensor]:
    found = dist_autograd.get_gradients(context)
    return [found[rref.local_value()] for rref in rrefs]


def descend(rrefs: list[Any], context: int, rate: float) -> None:
    found = dist_autograd.get_gradients(context)
    with torch.no_grad():
        for rref in rrefs:
            rref.local_value().sub_(found[rref.local_value()], alpha=rate)


def _trains(rank: int, world_size: int, path: str) -> int:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        _train()
    return len(rpc.api.leave())


def _train() -> None:
    parts = [RemoteModule(f"worker{n}", things.build_linear, (3,)) for n in (1, 2)]
    model = nn.Sequential(parts[0], nn.Tanh(), nn.Linear(3, 3), parts[1])
    local = nn.Sequential(things.build_linear(3), nn.Tanh(), nn.Linear(3, 3), things.build_linear(3))
    local.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    torch.manual_seed(0)
    for _ in range(5):
        x, y = torch.randn(8, 3), torch.randn(8, 3)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(local(x), y)
        loss.backward()
        with dist_autograd.context() as context:
            ours = nn.functional.mse_loss(model(x), y)
            torch.testing.assert_close(ours, loss)
            dist_autograd.backward(context, [ours])
            for part, mine in ((parts[0], local[0]), (parts[1], local[3])):
                rrefs = part.remote_parameters()
                there = rpc.rpc_sync(part.on, gradients_of, (rrefs, context))
                torch.testing.assert_close(there, [each.grad for each in mine.parameters()])
                rpc.rpc_sync(part.on, descend, (rrefs, context, 0.1))
            here = dist_autograd.get_gradients(context)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(here[parameter], alpha=0.1)
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, local.state_dict()[name])


def test_a_model_across_three_workers_trains_like_a_local_model() -> None:
    path = unused_path("nn-train")
    assert run_group(_trains, 3, path) == [0, 0, 0]
