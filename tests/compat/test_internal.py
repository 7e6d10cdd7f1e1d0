"""The functions of torch.distributed.rpc.internal, which pickle tensors separately."""

from __future__ import annotations

import torch

from actorrpc.compat.rpc import internal


def test_serialize_returns_tensors_separately() -> None:
    inner, tensor = [1], torch.ones(2)
    data, tensors = internal.serialize({"a": (tensor, inner), "b": inner, "c": tensor})
    assert all(each is tensor for each in tensors)
    found = internal.deserialize(data, [torch.zeros(2) for _ in tensors])
    assert found["a"][1] is found["b"]
    assert found["a"][0].tolist() == [0.0, 0.0]


def test_script_modules_survive_serialize_and_deserialize() -> None:
    data, tensors = internal.serialize(torch.jit.script(torch.nn.Linear(1, 2)))
    assert internal.deserialize(data, tensors)(torch.ones(1)).shape == (2,)


def test_the_first_registered_reducer_of_a_class_is_used() -> None:
    class Odd:
        pass

    pickler = internal._InternalRPCPickler()
    for reducer in (lambda _: (complex, (1, 2)), lambda _: (complex, (3, 4))):
        pickler._register_reducer(Odd, reducer)
    assert pickler.deserialize(*pickler.serialize([Odd()])) == [1 + 2j]


def test_deserialize_returns_an_attribute_error_for_a_missing_function() -> None:
    data = b"cos\nabsent_function\n."
    found = internal.deserialize(data, [])
    assert isinstance(found, AttributeError)
    assert "RPC pickler does not serialize" in str(found)
