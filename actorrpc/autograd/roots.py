"""The roots of a backward pass: checked before anything is asked of anybody, with torch's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

__all__ = ["check_roots"]

_Given = torch.Tensor | Sequence[torch.Tensor | None] | None


def check_roots(
    roots: Sequence[torch.Tensor], gradients: _Given
) -> tuple[tuple[GradientEdge, ...], tuple[torch.Tensor, ...]]:
    """Return the edges of the roots and the gradient of each.

    Args:
        gradients: one for each root, or None for all or some of them: then it is ones, and the root has to be a real scalar.

    Raises:
        TypeError: the roots, or the gradients, are not sequences of tensors.
        ValueError: there are not as many gradients as roots.
        RuntimeError: there are no roots; one does not require grad, has more than one element without a gradient, or has
            no history; gradients do not fit.
    """
    if not isinstance(roots, (list, tuple)):
        raise TypeError(
            f"backward(): incompatible function arguments: roots must be a list of tensors, not {type(roots).__name__}"
        )
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    given = _sequence(gradients, len(roots))
    edges = []
    found = []
    for index, (root, gradient) in enumerate(zip(roots, given, strict=True)):
        if not isinstance(root, torch.Tensor):
            raise TypeError(
                f"backward(): incompatible function arguments: roots must be tensors, but roots[{index}] is of type "
                f"{type(root).__name__}"
            )
        if not root.requires_grad:
            raise RuntimeError(f"requires_grad not set on root (roots[{index}])")
        if gradient is None and root.numel() != 1:
            raise RuntimeError(
                f"roots[{index}] is not a scalar, all roots need to be scalar (or have a gradient given)"
            )
        if root.grad_fn is None:
            raise RuntimeError(f"roots[{index}] does not have a valid gradient function.")
        edges.append(GradientEdge(root.grad_fn, root.output_nr, None))
        found.append(_ones(root) if gradient is None else _fitting(gradient, root, index))
    return tuple(edges), tuple(found)


def _sequence(gradients: _Given, count: int) -> Sequence[Any]:
    if gradients is None:
        return (None,) * count
    if isinstance(gradients, torch.Tensor):
        gradients = (gradients,)
    if not isinstance(gradients, (list, tuple)):
        raise TypeError(f"gradient must be a tensor or a sequence of tensors, not {type(gradients).__name__}")
    if len(gradients) != count:
        raise ValueError(f"gradient must have one entry for each of the {count} roots, not {len(gradients)}")
    return gradients


def _ones(root: torch.Tensor) -> torch.Tensor:
    if not root.is_floating_point():
        raise RuntimeError(
            f"grad can be implicitly created only for real scalar outputs but got {root.dtype}"
        )
    return torch.ones_like(root, memory_format=torch.preserve_format)


def _fitting(gradient: Any, root: torch.Tensor, index: int) -> torch.Tensor:
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"gradient[{index}] must be a tensor or None, not {type(gradient).__name__}")
    if gradient.shape != root.shape:
        raise RuntimeError(
            f"Mismatch in shape: gradient[{index}] has a shape of {tuple(gradient.shape)} and roots[{index}] has a shape of "
            f"{tuple(root.shape)}."
        )
    if gradient.is_complex() != root.is_complex():
        raise RuntimeError(
            f"gradient[{index}] has dtype {gradient.dtype}, but roots[{index}] {root.dtype}: both must be complex, or neither"
        )
    return gradient
