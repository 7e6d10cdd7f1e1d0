"""Classes of actors: shadowed methods, reprs, local and large definitions, and classes that are nn.Modules."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorrpc
import actorrpc.autograd as dist_autograd
from actorrpc import get

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]


@actorrpc.remote
class Shadowed:
    def __init__(self) -> None:
        self.__dict__.update(plain=5, static=6, of_class=7, coroutine=8, items=9)
        self.called = lambda: "the instance's"

    def plain(self) -> Any:
        return self.__dict__["plain"]

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    async def coroutine(self) -> str:
        return "coroutine"

    def items(self) -> Iterator[int]:
        yield 1

    def called(self) -> str:
        return "the class's"


def test_methods_are_called_even_if_attributes_shadow_them() -> None:
    actor = Shadowed.remote()
    calls = [actor.plain, actor.static, actor.of_class, actor.coroutine, actor.called]
    found = actorrpc.get([each.remote() for each in calls])
    assert found == [5, "static", "Shadowed", "coroutine", "the instance's"]
    assert list(actor.items.remote().values()) == [1]


@dataclass
@actorrpc.remote
class WithRepr:
    number: int

    def fail(self) -> None:
        raise ValueError("no")


@actorrpc.remote
class LinearModule(nn.Linear):
    def fail(self) -> None:
        raise ValueError("no")


@actorrpc.remote
class BrokenRepr:
    def __repr__(self) -> str:
        raise SystemExit(3)

    def fail(self) -> None:
        raise ValueError("no")


def test_a_remote_traceback_shows_the_repr_of_the_actor() -> None:
    for actor, expected in (
        (WithRepr.remote(3), ", actor WithRepr(number=3):\n"),
        (LinearModule.remote(2, 2), ":\nTraceback"),
        (BrokenRepr.remote(), ":\nTraceback"),
    ):
        with pytest.raises(ValueError, match="no") as caught:
            actorrpc.get(actor.fail.remote())
        assert isinstance(caught.value, actorrpc.RemoteError)
        assert caught.value.traceback.startswith(f"On worker {caught.value.worker}{expected}")
        del caught


def test_a_class_defined_in_a_function_is_sent_by_value() -> None:
    factor = 3

    @actorrpc.remote
    class Local:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def times(self, n: int) -> int:
            with self.lock:
                return n * factor

    assert actorrpc.get(Local.remote().times.remote(4)) == 12


def test_a_class_definition_larger_than_a_frame_is_sent() -> None:
    table = b"t" * 6_000_000

    class Plain:
        rows = table

        def length(self) -> int:
            return len(self.rows)

    @actorrpc.remote
    class Large:
        rows = table

        def length(self, of: Any = None) -> int:
            return len((of or self).rows)

        def make(self, cls: Any) -> Any:
            return cls()

    actor = Large.remote()
    for _ in range(2):
        assert actorrpc.get(actor.length.remote()) == len(table)
        assert actorrpc.get(actor.length.remote(Plain())) == len(table)
        assert type(actorrpc.get(actor.make.remote(Plain))) is Plain
    assert actorrpc.get(actorrpc.remote(Plain.length).remote(Plain())) == len(table)
    assert actorrpc.get(actorrpc.remote(lambda: Plain().length()).remote()) == len(table)
    assert type(actorrpc.get(actorrpc.put(Plain()))) is Plain
    me = actorrpc.get_worker_info().name
    assert actorrpc.rpc_sync(me, Plain.length, (Plain(),)) == len(table)


# -- classes that are nn.Modules -----------------------------------------------------------------------------


@actorrpc.remote
class Layer(nn.Module):
    """A layer that returns its process id and its gradients."""

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
    """A local module with two actors and a local layer between them."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.between = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.between(self.first(x))))
        return out


def test_parameters_are_rrefs_owned_by_the_worker_of_the_actor() -> None:
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


def test_distributed_autograd_passes_through_module_actors() -> None:
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
