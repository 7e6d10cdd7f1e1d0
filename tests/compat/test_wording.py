"""Errors under the drop-in contain torch's messages."""

from __future__ import annotations

import pytest
import torch

from actorrpc.compat.translate import reword
from actorrpc.errors import SerializationError
from actorrpc.serialization import tensors


def test_the_error_for_a_device_without_a_map_contains_torchs_message() -> None:
    with pytest.raises(SerializationError) as caught:
        tensors.Outgoing(None).target(torch.device("cuda:0"))
    for _ in range(2):  # an error may be reworded more than once
        reword(caught.value, torch.add)
    assert isinstance(caught.value, RuntimeError)
    caught.match(
        "^TensorPipe RPC backend only supports CPU tensors by default.*"
        "`set_device_map` on `TensorPipeRpcBackendOptions`.*Response device mapping is not available"
    )
