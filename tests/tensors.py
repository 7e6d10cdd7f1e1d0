"""Properties of tensors that torch's public interface does not show."""

from __future__ import annotations

import torch


def is_view(t: torch.Tensor) -> bool:
    """Return whether torch treats a tensor as a view, so that autograd records an in-place change of it on its base."""
    return t._is_view()
