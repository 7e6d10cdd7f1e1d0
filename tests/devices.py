"""Tests on devices: which of them need a GPU, and whether there is one.

python -m pytest -m gpu                    # all that need one, in some minutes

@pytest.mark.gpu                           # skipped, with the reason, where there is no CUDA device
@pytest.mark.parametrize("device", DEVICES)  # the same on the CPU, and on a GPU where there is one
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

__all__ = ["DEVICES", "missing", "prepare"]

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def missing() -> str:
    """Say why nothing can run on a GPU here; empty where it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"needs a CUDA device: this torch ({torch.__version__}) was built without CUDA"
    return "" if torch.cuda.is_available() else "needs a CUDA device: torch sees none"


def prepare(items: Sequence[pytest.Item]) -> None:
    """Have the items that need a GPU skipped where there is none.

    Where there is one, this process opens it now, with the threads and descriptors that it then keeps for ever: no test is
    charged with them.
    """
    if not items:
        return
    if reason := missing():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))
        return
    one = torch.ones(2, 2, device="cuda:0", requires_grad=True)
    (one @ one).sum().backward()
    torch.cuda.synchronize()
