"""Actors whose class is an nn.Module, compared with local modules, in a group of one worker."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorrpc
from actorrpc import ActorHandle, RRef, get
from actorrpc.errors import RpcTimeoutError
from tests.actors import things

Handle = ActorHandle[Any]


@actorrpc.remote
class Model(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)
        self.norm = nn.BatchNorm1d(size)
        self.again = nn.Linear(size, size, bias=False)
        self.again.weight = self.layer.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, *, times: int = 1) -> Tensor:
        return self.again(self.norm(self.layer(x))) * self.scale * times

    def parts(self) -> list[Any]:
        return [id(each) for each in self.parameters()]

    def grads(self) -> list[bool]:
        return [each.grad is None for each in self.parameters()]

    def fit(self) -> None:
        self(torch.randn(4, 3)).sum().backward()


@pytest.fixture
def model(one_worker: None) -> Handle:
    return Model.remote()


def local_of(handle: Handle) -> nn.Module:
    """Return a local module with the state of the actor."""
    local: nn.Module = Model.__actor_class__()
    local.load_state_dict(handle.state_dict())
    return local


def test_calling_the_handle_runs_forward(model: Handle) -> None:
    local, x = local_of(model), torch.randn(4, 3)
    expected = local(x)
    assert torch.equal(model(x), expected)
    model.load_state_dict(local_of(model).state_dict())
    model.eval()
    local.eval()
    assert torch.equal(model(x, times=2), local(x, times=2))
    assert torch.equal(get(model.forward.remote(x)), local(x))
    assert torch.equal(get(model.__call__.remote(x)), local(x))
    assert torch.equal(model.rpc_sync()(x), local(x))
    assert torch.equal(model.rpc_async()(x).wait(), local(x))
    assert torch.equal(get(model.remote()(x)), local(x))
    assert callable(model)
    assert model.__call__ is model.__call__
    with pytest.raises(TypeError, match="unexpected keyword argument 'time'"):
        model(x, time=1)


@actorrpc.remote
class Blocking(nn.Module):
    def forward(self) -> bool:
        return things.Counter.gate.wait(20)


def test_call_options_apply_to_direct_calls_of_a_module_actor(one_worker: None) -> None:
    things.Counter.gate.clear()
    blocking = Blocking.remote()
    try:
        held = blocking.forward.remote()  # the calls below wait behind this one, and time out
        with pytest.raises(RpcTimeoutError, match=r"Blocking.__call__"):
            blocking.options(timeout=0.05)()
        with pytest.raises(RpcTimeoutError, match=r"Blocking.state_dict"):
            blocking.state_dict.options(timeout=0.05)()
    finally:
        things.Counter.gate.set()
    assert get(held) is True
    assert blocking.options(num_returns=2)() is True  # num_returns applies to remote() only
    assert blocking.options(num_returns=2).state_dict() == {}


def test_parameters_are_rrefs_to_the_parameters_of_the_actor(model: Handle) -> None:
    ids = get(model.parts.remote())
    for found in (model.parameters(), model.remote_parameters()):
        assert isinstance(found, list)
        assert all(isinstance(rref, RRef) for rref in found)
        assert [id(rref.local_value()) for rref in found] == ids
    assert [rref.local_value().shape for rref in model.parameters(recurse=False)] == [(1,)]
    assert len(model.remote_parameters(recurse=False)) == 1
    assert {rref.owner_name() for rref in model.parameters()} == {"w0"}
    local = local_of(model)
    for asked in ({}, {"prefix": "p"}, {"recurse": False}, {"remove_duplicate": False}):
        named = model.named_parameters(**asked)
        assert [name for name, _ in named] == [name for name, _ in local.named_parameters(**asked)]
        assert all(isinstance(rref.local_value(), nn.Parameter) for _, rref in named)


def test_state_dict_is_loaded_saved_and_checked_as_by_torch(model: Handle) -> None:
    state = model.state_dict()
    assert set(state) == set(Model.__actor_class__().state_dict())
    assert state["layer.weight"].data_ptr() == state["again.weight"].data_ptr()
    assert list(model.state_dict(prefix="a.")) == ["a." + name for name in state]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = Model.remote()
    assert (
        str(other.load_state_dict(torch.load(file, weights_only=True))) == "<All keys matched successfully>"
    )
    for name, value in other.state_dict().items():
        assert torch.equal(value, state[name])
    state.pop("scale")
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "scale"'):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).missing_keys == ["scale"]


_CONVERSIONS: list[tuple[Callable[[Any], Any], torch.dtype]] = [
    (lambda m: m.double(), torch.float64),
    (lambda m: m.half(), torch.float16),
    (lambda m: m.to(torch.float64), torch.float64),
    (lambda m: m.to("cpu", torch.float64), torch.float64),
    (lambda m: m.to_empty(device="cpu"), torch.float32),
]


def test_dtype_conversions_change_the_actor_and_keep_its_parameters(one_worker: None) -> None:
    for change, dtype in _CONVERSIONS:
        model = Model.remote()
        before = get(model.parts.remote())
        assert change(model) == model
        assert model.state_dict()["layer.weight"].dtype is dtype
        assert get(model.parts.remote()) == before  # RRefs to parameters stay valid


def test_train_eval_requires_grad_zero_grad_and_apply_act_on_the_actor(model: Handle) -> None:
    assert isinstance(model.eval(), ActorHandle)
    assert model.rpc_sync().training is False
    assert model.train().rpc_sync().training is True
    assert model.train(False).rpc_sync().training is False
    assert model.train().requires_grad_(False) == model
    assert [rref.local_value().requires_grad for rref in model.parameters()] == [False] * 5
    model.requires_grad_()
    get(model.fit.remote())
    assert not all(get(model.grads.remote()))
    assert model.apply(lambda each: isinstance(each, nn.BatchNorm1d) and nn.init.zeros_(each.weight)) == model
    assert not model.state_dict()["norm.weight"].any()
    assert model.zero_grad() is None
    assert all(get(model.grads.remote()))
    with pytest.raises(ValueError, match="boolean"):
        model.train(3)
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments but 3 were given"):
        model.train(True, True)


@actorrpc.remote
class Own(nn.Module):
    """Overrides methods of nn.Module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def train(self, data: Any = True, epochs: int = 1) -> Any:  # type: ignore[override]
        if isinstance(data, bool):
            return super().train(data)
        return [data] * epochs

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"mine": self.weight.detach()}

    async def eval(self) -> str:  # type: ignore[override]
        return "later"

    def remote_parameters(self) -> str:
        return "the class's own"

    def forward(self, x: Any) -> Any:
        return x


def test_overridden_module_methods_are_the_ones_that_are_called(one_worker: None) -> None:
    own = Own.remote()
    assert own.train("x", 2) == ["x", "x"]
    assert own.train(False) == own
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        own.train("x", epoch=2)
    assert list(own.state_dict()) == ["mine"]
    with pytest.raises(TypeError, match=r"instead of handle.eval\(...\) write handle.eval.remote\(...\)"):
        own.eval()
    assert get(own.eval.remote()) == "later"
    with pytest.raises(TypeError, match=r"handle.remote_parameters.remote\(...\)"):
        own.remote_parameters()
    assert get(own.remote_parameters.remote()) == "the class's own"


def test_handles_of_other_classes_have_no_module_methods(one_worker: None) -> None:
    counter, box = things.Counter.remote(), things.Box.remote(1)
    for handle in (counter, box):
        assert not hasattr(handle, "remote_parameters")
        assert not hasattr(handle, "state_dict")
        assert "remote_parameters" not in dir(handle)
    with pytest.raises(
        TypeError, match=r"Box is not callable: it has no __call__; .*handle.method.remote\(...\)"
    ):
        box(1)
    with pytest.raises(AttributeError, match="Box has no method '__call__'"):
        box.__call__.remote(1)


def test_only_certain_module_methods_can_be_called_directly(model: Handle) -> None:
    for method in (model.forward, model.parts, model.buffers, model.named_modules, model.register_buffer):
        with pytest.raises(TypeError, match="cannot be called directly"):
            method()
    assert {"remote_parameters", "parameters", "state_dict", "ready"} < set(dir(model))
    assert model.remote_parameters.__class__.__name__ != "ActorMethod"
    with pytest.raises(AttributeError, match=r"Model has no method 'remote_parameters'.*called directly"):
        model.remote_parameters.remote()
