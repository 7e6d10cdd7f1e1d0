"""Which tensors ``share()`` refuses, and how it moves tensors; ``e2e/test_share.py`` has the tests between processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from actorrpc import _time
from actorrpc.actors.refs.object_ref import put, share
from actorrpc.actors.refs.wait import get
from tests.actors.bare import alone


@pytest.mark.filterwarnings("ignore::UserWarning")  # about quantized and nested tensors
@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: [1.0], TypeError, "not a list"),
        (lambda: put(1), TypeError, "not a ObjectRef"),
        (torch.nn.UninitializedParameter, TypeError, "not a UninitializedParameter"),
        (lambda: torch.eye(2).to_sparse(), ValueError, "dense tensors"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8), ValueError, "dense tensors"),
        (lambda: torch.ones(2, device="meta"), ValueError, "dense tensors"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), ValueError, "dense tensors"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), ValueError, "dense tensors"),
        (lambda: torch.ones(2, requires_grad=True) * 2, ValueError, r"detach\(\)\.clone\(\)"),
        (lambda: torch.ones(0), ValueError, "without elements"),
        (
            lambda: torch.ones(4)[1:],
            ValueError,
            r"12 bytes of a storage of 16 bytes.*tensor\.clone\(\)",
        ),
        (lambda: torch.ones(4).share_memory_(), ValueError, "would separate"),
        (lambda: torch.frombuffer(bytearray(16), dtype=torch.float32), ValueError, "would separate"),
        (lambda: torch.nn.Linear(2, 2), TypeError, "not a Linear: share each tensor"),
    ],
)
def test_an_object_whose_memory_cannot_be_shared_is_refused(
    make: Any, error: type[Exception], says: str
) -> None:
    with alone(), pytest.raises(error, match=says):
        share(make())


def test_a_tensor_whose_memory_another_tensor_uses_is_refused_and_not_moved() -> None:
    tensor = torch.ones(4)
    view = tensor.view(2, 2)
    with alone(), pytest.raises(ValueError, match="would separate the tensor from other tensors"):
        share(tensor)
    tensor += 1
    assert view.sum() == 8


def test_a_tensor_whose_memory_dlpack_has_exported_is_refused() -> None:
    tensor = torch.ones(4)
    array = np.from_dlpack(tensor)
    with alone(), pytest.raises(ValueError, match="DLPack"):
        share(tensor)
    assert array.sum() == 4


def test_a_tensor_that_torch_has_moved_since_it_was_shared_is_refused() -> None:
    tensor = torch.ones(4)
    with alone():
        share(tensor)
        tensor.share_memory_()
        with pytest.raises(ValueError, match="would separate"):
            share(tensor)


def test_a_thread_that_waits_for_room_does_not_block_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, sleep = threading.Event(), _time.sleep
    monkeypatch.setenv("ACTORRPC_OBJECT_MEMORY", str(12 << 20))
    monkeypatch.setattr(_time, "sleep", lambda seconds: waits.set() or sleep(seconds))
    with alone(), ThreadPoolExecutor(1) as threads:
        full = share(torch.ones(2 << 20))
        large = threads.submit(share, torch.ones(2 << 20))
        assert waits.wait(10.0)
        assert get(share(torch.ones(4))).sum() == 4
        assert not large.done()
        del full
        assert get(large.result()).sum() == 2 << 20


def test_a_tensor_that_several_threads_share_is_moved_once_and_keeps_its_layout() -> None:
    tensor = torch.empty(2, 3, 4, 5).fill_(1.0).contiguous(memory_format=torch.channels_last)
    with alone(), ThreadPoolExecutor(8) as threads:
        refs = list(threads.map(share, [tensor] * 8))
        tensor.add_(1)
        for each in get(refs):
            assert torch.equal(each, tensor)
            assert each.stride() == tensor.stride()


def test_a_tensor_can_be_shared_in_the_next_group() -> None:
    tensor = torch.ones(4)
    for number in range(2):
        with alone():
            ref = share(tensor)
            tensor += 1
            assert get(ref).sum() == 4 * (2 + number)
    assert tensor.sum() == 12
