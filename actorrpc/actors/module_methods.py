"""Actors whose class is an nn.Module: what is called on their handles directly, and what runs in the actor then.

``handle.state_dict()`` calls the method in the actor and waits, as if the handle were the module: the RPC floor's
:mod:`~actorrpc.rpc.modules` says what comes back in place of what cannot travel. With ``remote`` all of these are ordinary
methods. What a class defines itself is what is called, whatever its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from actorrpc.actors.methods import ClassInfo, MethodInfo
from actorrpc.rpc import modules
from actorrpc.rpc.rref import RRef

__all__ = ["is_direct", "parameters", "run"]

_DIRECT: Final = frozenset(
    {
        *("__call__", "parameters", "named_parameters", "state_dict", "load_state_dict", "train", "eval"),
        *("to", "to_empty", "cpu", "cuda", "type", "float", "double", "half", "bfloat16"),
        *("requires_grad_", "zero_grad", "apply"),
    }
)
_LISTED: Final = ("parameters", "named_parameters")


def is_direct(info: ClassInfo, method: MethodInfo) -> bool:
    """Say whether a method of a class can be called on a handle without ``remote``."""
    if not info.is_module or method.name not in _DIRECT:
        return False
    if method.name == "__call__":
        # What an async forward returns is no output yet, and Module.__call__ hands it on.
        forward = info.methods.get("forward")
        return method.kind == "sync" and (forward is None or forward.kind == "sync")
    return method.kind == "sync" or (method.kind == "generator" and method.name in _LISTED)


def run(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Call a method in the actor.

    Returns:
        Whether it has returned the module itself (then the caller returns the handle), and if not, what it has returned: RRefs
        in place of parameters, tensors of a state on the CPU.
    """
    if name == "state_dict":
        return False, modules.state_of(module, *args, **kwargs)
    found = getattr(module, name)(*args, **kwargs)
    if found is module:
        return True, None
    if name in _LISTED and isinstance(found, (Iterator, list, tuple)):
        found = [_reference(each) for each in found]
    return False, found


def _reference(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return RRef(item)
    if isinstance(item, tuple):
        return tuple(_reference(each) for each in item)
    return item


def parameters(module: nn.Module, recurse: bool = True) -> list[RRef[nn.Parameter]]:
    """Return RRefs to the parameters, in the actor: ``handle.remote_parameters()``."""
    return modules.parameter_rrefs(module, recurse)
