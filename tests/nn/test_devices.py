"""Remote modules on GPUs: tensors are moved to the GPU and back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import actorrpc.autograd as dist_autograd
from actorrpc.nn import RemoteModule
from tests.nn import things

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("here")]


def test_inputs_are_moved_to_the_gpu_and_outputs_back_to_the_cpu() -> None:
    remote = RemoteModule("w0/cuda:0", things.Echo, (1,))
    assert next(remote.module_rref.local_value().parameters()).is_cuda
    tensor = torch.ones(1)
    for word, number, back in (remote(tensor, 2, word="x"), remote.forward_async(tensor, 2, "x").wait()):
        assert (word, number, back.device.type) == ("x", 2, "cpu")
    linear = RemoteModule("w0/cuda", nn.Linear, (3, 2))
    assert linear(torch.ones(1, 3)).device.type == "cpu"
    assert {each.device.type for each in linear.state_dict().values()} == {"cpu"}
    linear.load_state_dict(nn.Linear(3, 2).state_dict())
    assert linear.device.startswith("cuda")


def test_a_module_can_be_moved_to_a_gpu_and_back() -> None:
    remote = RemoteModule("w0", nn.Linear, (3, 2))
    other = RemoteModule.from_rref(remote.module_rref)
    assert remote.to("cuda:0").device == "cuda:0"
    for each in (remote, other):  # `other` was not notified of the move
        assert each(torch.ones(1, 3)).device.type == "cpu"
    assert remote.cpu().device == "cpu"
    assert other(torch.ones(1, 3)).device.type == "cpu"


def test_gradients_of_inputs_are_on_the_cpu_and_of_parameters_on_the_gpu() -> None:
    remote = RemoteModule("w0/cuda:0", nn.Linear, (3, 2))
    x = torch.ones(1, 3, requires_grad=True)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [remote(x).sum()])
        found = dist_autograd.get_gradients(context)
        assert found[x].device.type == "cpu"
        assert all(found[rref.local_value()].is_cuda for rref in remote.remote_parameters())


def test_a_missing_gpu_raises_an_error() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        RemoteModule("w0/cuda:100", nn.Linear, (1, 1))(torch.ones(1, 1))
