"""The functions that handle nn.Modules on their owner, without a group."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from actorrpc.rpc import modules

_META = torch.device("meta")


class Pair(NamedTuple):
    left: Any
    right: Any


def _moved(value: Any) -> Any:
    return modules.relocate(value, _META)


def test_relocate_moves_tensors_nested_in_containers() -> None:
    t, thing, elsewhere = torch.ones(2, requires_grad=True), object(), torch.empty(1, device="meta")
    moved = _moved((t, [t, 1], {"a": t, "b": "text"}, Pair(t, None), (t,), thing, elsewhere))
    assert moved[0].device == _META
    assert moved[0].grad_fn is not None  # part of the autograd graph
    assert moved[1][0].device == _META
    assert moved[1][1] == 1
    assert moved[2]["a"].device == _META
    assert moved[2]["b"] == "text"
    assert type(moved[3]) is Pair
    assert moved[3].left.device == _META
    assert moved[4][0].device == _META
    assert moved[5] is thing
    assert moved[6] is elsewhere
    assert t.device.type == "cpu"


def test_relocate_keeps_the_classes_of_containers_and_leaves_the_originals_unchanged() -> None:
    ordered, default = OrderedDict(a=torch.ones(1)), defaultdict(list, a=torch.ones(1))
    for value in (ordered, default):
        moved = _moved(value)
        assert type(moved) is type(value)
        assert moved["a"].device == _META
        assert value["a"].device.type == "cpu"
    assert _moved(default)["new"] == []
    found = torch.max(torch.ones(2, 2), 0)
    moved = _moved(found)
    assert type(moved) is type(found)
    assert moved.values.device == _META


@pytest.mark.gpu
def test_relocate_moves_packed_sequences() -> None:
    packed = pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
    moved = modules.relocate(packed, torch.device("cuda:0"))
    assert isinstance(moved, PackedSequence)
    assert moved.data.is_cuda


def test_functions_for_state_and_parameters_refuse_objects_that_are_no_module() -> None:
    for function in (modules.state_of, modules.named_parameter_rrefs, modules.parameter_rrefs):
        with pytest.raises(TypeError, match=r"refer to an nn.Module, but refers to a list"):
            function([1])  # type: ignore[operator]
