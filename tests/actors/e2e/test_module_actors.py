"""Actors whose class is an nn.Module, in processes of their own: what is had of them, and gradients through them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorrpc
import actorrpc.autograd as dist_autograd
from actorrpc import get

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(30)]


@actorrpc.remote
class Layer(nn.Module):
    """A layer that says where it is."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.relu(self.linear(x))
        return out

    def pid(self) -> int:
        return os.getpid()

    def gradients(self, context: int) -> list[Any]:
        found = dist_autograd.get_gradients(context)
        return [found.get(each) for each in self.parameters()]


class Model(nn.Module):
    """A local module of two actors and a part of its own between them."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.between = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.between(self.first(x))))
        return out


def test_parameters_are_references_to_where_the_actor_is() -> None:
    layer = Layer.remote()
    assert get(layer.pid.remote()) != 0
    state = layer.state_dict()
    found = layer.parameters()
    assert [name for name, _ in layer.named_parameters()] == list(state)
    for rref, value in zip(found, state.values(), strict=True):
        assert torch.equal(rref.to_here(), value)
    pids = {actorrpc.rpc_sync(rref.owner(), os.getpid) for rref in found}
    assert pids == {get(layer.pid.remote())}
    assert len(layer.remote_parameters()) == 2


def test_state_goes_from_one_to_the_other() -> None:
    one, other = Layer.remote(), Layer.remote()
    other.load_state_dict(one.state_dict())
    x = torch.randn(4, 3)
    with torch.no_grad():
        assert torch.equal(one(x), other(x))
    assert one.double() == one
    with torch.no_grad():
        assert one(x.double()).dtype is torch.float64
    with pytest.raises(RuntimeError, match=r"size mismatch for linear.weight"):
        one.load_state_dict(Layer.__actor_class__(4).state_dict())


def test_gradients_go_through_handles() -> None:
    first, second = Layer.remote(), Layer.remote()
    model = Model(first, second)
    local = Model(Layer.__actor_class__(), Layer.__actor_class__())
    for part, handle in ((local.first, first), (local.second, second)):
        part.load_state_dict(handle.state_dict())
    local.between.load_state_dict(model.between.state_dict())
    x = torch.randn(5, 3)
    local(x).sum().backward()
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [model(x).sum()])
        mine = dist_autograd.get_gradients(context)
        for name, parameter in model.between.named_parameters():
            torch.testing.assert_close(mine[parameter], local.between.get_parameter(name).grad)
        for part, handle in ((local.first, first), (local.second, second)):
            there = get(handle.gradients.remote(context))
            for gradient, parameter in zip(there, part.parameters(), strict=True):
                torch.testing.assert_close(gradient, parameter.grad)


def test_an_actor_that_has_died_says_so() -> None:
    layer = Layer.remote()
    get(actorrpc.ready(layer))
    actorrpc.kill(layer)
    for use in (layer.parameters, layer.state_dict, layer.train, lambda: layer(torch.ones(1, 3))):
        with pytest.raises(actorrpc.ActorDiedError, match="Layer"):
            use()
