"""Functions that run on the worker of an nn.Module, for workers that have a reference to it.

:class:`~actorrpc.nn.RemoteModule` calls these functions through :func:`~actorrpc.rpc.rref.call_with_value`; handles of actors
whose class is a module call them through the actor's mailbox. The functions take the module itself, run on its owner, on the
thread of the call, and return values that can be sent: RRefs in place of parameters, never the module. They take no locks: calls
of ``to`` and ``forward`` of one module at the same time do what they do on two threads of torch.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from actorrpc._torch import METADATA, tensor_mapper
from actorrpc.agent.calls import CURRENT
from actorrpc.agent.executor import ASYNC_MARK, Deferred, future_of
from actorrpc.rpc.rref import RRef

__all__ = [
    "change_module",
    "convert",
    "create",
    "forward",
    "load_state",
    "named_parameter_rrefs",
    "parameter_rrefs",
    "relocate",
    "state_of",
]

# The devices of modules that are not on the CPU. The worker that owns a module moves the tensors of calls to its device. The
# owner keeps this table, not the callers, because several workers may move a module.
_placed: Final[weakref.WeakKeyDictionary[nn.Module, torch.device]] = weakref.WeakKeyDictionary()
_AT_HOME: Final = ("cpu", "meta")  # calls move no tensors from or to modules on these devices
_LOADING: Final = "Error(s) in loading state_dict"  # the beginning of torch's error that lists several errors


def _module(value: Any) -> nn.Module:
    if not isinstance(value, nn.Module):
        raise TypeError(
            f"the RRef was expected to refer to an nn.Module, but refers to a {type(value).__name__}"
        )
    return value


# -- making and calling modules ------------------------------------------------------------------------------------------


def create(
    module_cls: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str
) -> nn.Module:
    """Make a module and move it to a device.

    Args:
        module_cls: the module's class, an actor class, or a function that returns a module.

    Raises:
        ValueError: ``module_cls`` returned another object than a module.
    """
    module = getattr(module_cls, "__actor_class__", module_cls)(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    module.to(device)
    _note_place(module)
    return module


def forward(module: nn.Module, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module, with all of its hooks.

    If the module is not on the CPU, tensors in the arguments are moved to its device, and tensors in the result to the CPU,
    unless a device map maps them to a device of the caller. A ``forward`` marked with ``async_execution`` is answered when its
    future completes.

    Args:
        device: the module's device according to the caller, used if this worker has not recorded a device.
    """
    place = _placed.get(_module(module))
    if place is None and device not in _AT_HOME:
        place = torch.device(device)
    if place is not None:
        args, kwargs = relocate((args, kwargs), place)
    output = module(*args, **kwargs)
    if getattr(module.forward, ASYNC_MARK, None) is not None:
        return Deferred(future_of(output, module.forward))
    return output if place is None else _to_sendable_devices(output)


def relocate(value: Any, device: torch.device) -> Any:
    """Move the tensors on the CPU in tuples, lists and dicts to a device; other objects are returned unchanged."""
    return _mapped(value, lambda t: t.to(device) if t.data.device.type == "cpu" else t)


def _to_sendable_devices(value: Any) -> Any:
    """Move tensors to the CPU if they cannot be sent from their device."""
    execution = CURRENT.get()
    may_stay: Mapping[str, str] = (execution.peer.answer_map if execution is not None else None) or {}
    return _mapped(value, lambda t: t if str(t.data.device) in may_stay else t.cpu())


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, (torch.Tensor, PackedSequence)):
        return function(value)
    if isinstance(value, (tuple, list)):
        parts = [_mapped(each, function) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        found = copy.copy(value)  # keeps the class of the dict
        for key, each in value.items():
            found[key] = _mapped(each, function)
        return found
    return value


def _note_place(module: nn.Module) -> str | None:
    """Record the device of a module, and return the device; None for a module without tensors."""
    tensor: torch.Tensor | None = next(iter(module.parameters()), None)
    if tensor is None:
        tensor = next(iter(module.buffers()), None)
    if tensor is None:
        return None
    if tensor.device.type in _AT_HOME:
        _placed.pop(module, None)
    else:
        _placed[module] = tensor.device
    return str(tensor.device)


# -- its parameters ---------------------------------------------------------------------------------------------------


def parameter_rrefs(module: nn.Module, recurse: bool = True) -> list[RRef[nn.Parameter]]:
    """Return one RRef, owned by this worker, for each parameter of a module.

    The RRefs keep the parameters alive, not the module. Two calls give different RRefs to the same parameters.

    Args:
        recurse: include the parameters of submodules.
    """
    return [RRef(each) for each in _module(module).parameters(recurse)]


def named_parameter_rrefs(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> list[tuple[str, RRef[nn.Parameter]]]:
    """Return RRefs to the parameters of a module with their names: see :func:`parameter_rrefs`."""
    found = _module(module).named_parameters(prefix, recurse, remove_duplicate)
    return [(name, RRef(each)) for name, each in found]


# -- its state ----------------------------------------------------------------------------------------------------------


def state_of(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the module's ``state_dict(...)`` with all tensors on the CPU."""
    state = _module(module).state_dict(*args, **kwargs)
    if not isinstance(state, dict):  # a class may override the method
        return state
    elsewhere = [
        name
        for name, each in state.items()
        if isinstance(each, torch.Tensor) and each.device.type not in _AT_HOME
    ]
    if elsewhere:
        state = copy.copy(state)  # keeps torch's metadata, an attribute of the dict
        for name in elsewhere:
            state[name] = state[name].cpu()
    return state


def load_state(
    module: nn.Module, state: Mapping[str, Any], metadata: Mapping[str, Any] | None, assign: bool
) -> tuple[list[str], list[str], list[str]]:
    """Load the entries of a state dict that fit into a module.

    Args:
        metadata: the attribute ``_metadata`` of torch's state dict: the versions of submodules by name.
        assign: put the tensors themselves into the module, instead of copying them into the module's tensors.

    Returns:
        The missing keys, the unexpected keys, and torch's messages about other keys.
    """
    loaded: Any = OrderedDict(state)
    if metadata is not None:
        setattr(loaded, METADATA, OrderedDict(metadata))
    options = {"assign": True} if assign else {}  # a class that overrides the method may lack the argument
    keys: list[Any] = []
    wrong: list[str] = []
    # If load_state_dict raises, the error does not list the missing keys; a hook gets the keys before the error is raised.
    handle = _module(module).register_load_state_dict_post_hook(lambda _, found: keys.append(found))
    try:
        keys.append(module.load_state_dict(loaded, strict=False, **options))
    except RuntimeError as error:
        text = str(error)
        if not text.startswith(_LOADING):
            raise
        wrong = text.split("\n\t")[1:]
    finally:
        handle.remove()
    found = keys[-1] if keys else None
    return list(getattr(found, "missing_keys", ())), list(getattr(found, "unexpected_keys", ())), wrong


# -- everything else -----------------------------------------------------------------------------------------------------


def change_module(
    module: nn.Module, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """Call a method that changes the module; the result of the method is discarded.

    Returns:
        The device of the module after the call; None if the module has no tensors.
    """
    getattr(_module(module), name)(*args, **kwargs)
    return _note_place(module)


def convert(module: nn.Module, dtypes: Mapping[torch.dtype, torch.dtype]) -> None:
    """Convert parameters and buffers whose dtype is a key of ``dtypes`` to the dtype that is its value."""
    tensor_mapper(_module(module))(lambda t: t.to(dtypes[t.dtype]) if t.dtype in dtypes else t)
