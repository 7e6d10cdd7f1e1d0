"""The encoder and decoder of the data-only mode, without workers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from actorrpc._exceptions import mark_handlers
from actorrpc.errors import ProtocolError, RefusedError
from actorrpc.serialization import data_only
from actorrpc.serialization.tensors import tensor


class _Cut(Exception):
    """Raised by a signal handler of the program."""


def _cut(*_: object) -> Any:
    error = _Cut()
    mark_handlers(error)
    raise error


def test_an_exception_of_a_signal_handler_during_encoding_is_raised_unchanged() -> None:
    class Thing:
        pass

    with pytest.raises(_Cut):
        data_only.dumps(Thing(), {Thing: _cut})


@pytest.mark.parametrize("make", [set, frozenset, dict.fromkeys, OrderedDict.fromkeys])
def test_more_than_1000_keys_with_the_same_hash_are_refused(make: Any) -> None:
    most = data_only.MAX_SAME_HASH
    same = [(2**61 - 1) * number for number in range(most + 1)]
    others = [*range(1, 2 * most), *map(str, range(most)), (1, 2), -1.5]
    fits, refused = make([*others, *same[:most]]), make([*others, *same])
    found = data_only.loads(data_only.dumps(fits, {}))
    assert found == fits
    assert type(found) is type(fits)
    assert list(found) == list(fits) or not isinstance(fits, dict)
    message = data_only.dumps(refused, {})
    with pytest.raises(ProtocolError, match=r"more than 1000 keys.* the same hash"):
        data_only.loads(message)


@pytest.mark.parametrize(
    "value",
    [
        slice((1,), 2),
        *map(np.str_, ("", "ab", "a\0", "\ud800")),
        *map(np.bytes_, (b"", b"ab", b"a\0")),
        np.array(["", "a"]),
        np.array(["", "\U0010ffff"], dtype=">U2"),
    ],
    ids=ascii,
)
def test_slices_numpy_texts_and_text_arrays_survive(value: Any) -> None:
    found = data_only.loads(data_only.dumps(value, {}))
    assert type(found) is type(value)
    if isinstance(value, np.ndarray):
        assert found.dtype == value.dtype
        assert found.tolist() == value.tolist()
    else:
        assert found == value


@pytest.mark.parametrize("dtype", ["<U1", ">U1"])
def test_text_arrays_with_invalid_characters_are_refused(dtype: str) -> None:
    points = np.array([65, 0x110000], dtype=f"{dtype[0]}u4")
    message = data_only.dumps(points.view(dtype), {})
    with pytest.raises(ProtocolError, match="invalid character"):
        data_only.loads(message)


def test_the_error_for_a_tensor_with_attributes_names_them() -> None:
    with pytest.raises(RefusedError, match=r"attributes \(persistent, _is_buffer\)"):
        data_only.dumps(
            torch.ones(1), {torch.Tensor: lambda _: (tensor, (), {"persistent": 1, "_is_buffer": 1})}
        )


def test_the_error_for_an_object_that_is_not_data_names_its_class() -> None:
    with pytest.raises(RefusedError, match=r"torch\.Tensor cannot be sent to a worker that takes data only"):
        data_only.dumps(torch.ones(1), {torch.Tensor: lambda _: (_cut, ())})


@pytest.mark.parametrize("value", [slice([1], 2), slice(np.int64(1), None)], ids=["list", "int64"])
def test_slices_of_other_than_plain_values_are_refused_by_the_sender(value: Any) -> None:
    with pytest.raises(RefusedError, match=r"a slice with a (list|int64), which is not a plain value,"):
        data_only.dumps(value, {})
