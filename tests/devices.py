"""Marks for tests that need a GPU, and their skipping on machines without a GPU.

python -m pytest -m gpu                    # all tests that need a GPU; takes some minutes

@pytest.mark.gpu                           # skipped, with the reason, without a CUDA device
@pytest.mark.parametrize("device", DEVICES)  # runs on the CPU, and on a GPU if the machine has one
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

__all__ = ["DEVICES", "missing", "prepare"]

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def missing() -> str:
    """Return why tests cannot use a GPU on this machine; empty if they can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"needs a CUDA device: this torch ({torch.__version__}) was built without CUDA"
    return "" if torch.cuda.is_available() else "needs a CUDA device: torch sees none"


def prepare(items: Sequence[pytest.Item]) -> None:
    """Skip the given tests, which need a GPU, on a machine without a GPU.

    With a GPU, open it now: the process keeps threads and descriptors for it, and the leak check must not blame a test for them.
    """
    if not items:
        return
    if reason := missing():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))
        return
    matrix = torch.ones(2, 2, device="cuda:0", requires_grad=True)
    (matrix @ matrix).sum().backward()
    torch.cuda.synchronize()
