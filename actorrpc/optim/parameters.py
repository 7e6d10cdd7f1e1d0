"""What users give as parameters, put in order: by group, and within a group by the worker that has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from actorrpc.rpc.rref import RRef

__all__ = ["Given", "check_tensor", "parse"]

_EXPECTED = (
    "parameters are given as RRefs to tensors or modules, handles of actors that are modules, RemoteModules, local modules, "
    "or local tensors that require grad"
)


@dataclass(frozen=True, slots=True)
class Given:
    """One parameter group, as it was given: what it sets, and where its parameters are, in order."""

    options: dict[str, Any]
    rrefs: list[RRef[Any]]


def parse(params: Any) -> list[Given]:
    """Return the groups that ``params`` describes. Local tensors and modules become RRefs.

    Raises:
        TypeError: something is not a parameter, nor a way to name parameters.
        ValueError: there are none, one is given twice, or a local tensor cannot be optimized.
    """
    seen: set[Any] = set()
    items = _listed(params)
    if not items:
        raise ValueError("optimizer got an empty parameter list")
    if not any(isinstance(item, Mapping) for item in items):
        return [Given({}, _resolved(items, seen))]
    groups = []
    for item in items:
        if not isinstance(item, Mapping):
            raise TypeError(
                f"either all of params are dicts (parameter groups) or none is, but there is also {_shown(item)}"
            )
        if "params" not in item:
            raise ValueError(f"a parameter group needs an entry 'params', this one has only {sorted(item)}")
        options = {key: value for key, value in item.items() if key != "params"}
        for key in options:
            if not isinstance(key, str):
                raise TypeError(f"the hyper-parameters of a group have names for keys, not {key!r}")
        inside = _listed(item["params"])
        if not inside:
            raise ValueError("a parameter group has an empty parameter list")
        groups.append(Given(options, _resolved(inside, seen)))
    return groups


def check_tensor(tensor: torch.Tensor, what: str) -> None:
    """Refuse a tensor that no gradient is ever collected for.

    Raises:
        ValueError: it is the result of an operation, or has a dtype that cannot have gradients.
    """
    if not tensor.is_leaf:
        raise ValueError(
            f"can't optimize a non-leaf Tensor: {what} is the result of {type(tensor.grad_fn).__name__}; gradients are "
            f"collected for tensors that were made directly (or detach()ed and told to require grad)"
        )
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{what} is of {tensor.dtype}, which cannot have gradients")


def _listed(params: Any) -> list[Any]:
    """Return what is given as a list, be it one or several."""
    if isinstance(params, (RRef, torch.Tensor, torch.nn.Module, Mapping)) or _lists_parameters(params):
        return [params]
    if isinstance(params, (set, frozenset)):
        raise TypeError(
            "parameters need to be in an order that is the same in each run, which a set has not: give a list"
        )
    if isinstance(params, (str, bytes)) or not isinstance(params, Iterable):
        raise TypeError(f"{_EXPECTED}, or an iterable of these: not as {_shown(params)}")
    return list(params)


def _lists_parameters(item: Any) -> bool:
    return callable(getattr(item, "remote_parameters", None))


def _resolved(items: list[Any], seen: set[Any]) -> list[RRef[Any]]:
    """Return the RRefs that items stand for, in order; note them, and what they were made of, as seen."""
    rrefs: list[RRef[Any]] = []
    for position, item in enumerate(items):
        found = _rrefs_of(item, f"parameter {position}")
        # RRefs are equal where they refer to the same value; those made here for local things are always new.
        is_local = isinstance(item, (torch.Tensor, torch.nn.Module)) and not _lists_parameters(item)
        for each in [item] if is_local else found:
            if each in seen:
                raise ValueError(f"parameter {position} is given twice: {_shown(each)}")
            seen.add(each)
        rrefs.extend(found)
    return rrefs


def _rrefs_of(item: Any, name: str) -> list[RRef[Any]]:
    if isinstance(item, RRef):
        return [item]
    if _lists_parameters(item):
        found = list(item.remote_parameters())
        for each in found:
            if not isinstance(each, RRef):
                raise TypeError(
                    f"{name}: remote_parameters() of {_shown(item)} gave {_shown(each)}, not an RRef"
                )
    elif isinstance(item, torch.nn.Module):
        # A RemoteModule in a local one has no parameters here.
        found = [RRef(item)] if next(item.parameters(), None) is not None else []
        found += [
            rref for each in item.modules() if _lists_parameters(each) for rref in _rrefs_of(each, name)
        ]
    elif isinstance(item, torch.Tensor):
        check_tensor(item, name)
        if not item.requires_grad:
            raise ValueError(f"{name} does not require grad: call requires_grad_() on it first")
        return [RRef(item)]
    else:
        raise TypeError(f"{_EXPECTED}: not as {_shown(item)} ({name})")
    if not found:
        raise ValueError(f"{name} is {_shown(item)}, which has no parameters")
    return found


def _shown(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return f"a tensor of shape {tuple(item.shape)}"
    text = f"{type(item).__name__} {item!r}"
    return text if len(text) <= 120 else f"{text[:117]}..."
