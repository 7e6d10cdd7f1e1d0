"""Replaces ``torch.distributed.nn.api.remote_module``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from actorrpc.nn import RemoteModule

__all__ = ["RemoteModule"]

_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)


class _RemoteModule(RemoteModule):
    """As :class:`actorrpc.nn.RemoteModule`.

    Args:
        _module_interface_cls: a TorchScript interface; not supported.

    Raises:
        ValueError: an interface was given, or as :class:`actorrpc.nn.RemoteModule`.
    """

    def __init__(
        self,
        remote_device: Any,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        if _module_interface_cls is not None:
            raise ValueError("TorchScript interfaces are not supported for RemoteModule")
        super().__init__(remote_device, module_cls, args, kwargs)
