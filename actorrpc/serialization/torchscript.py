"""TorchScript functions and modules in messages: pickle does not support them.

A script function that the peer can import is sent by the name that it has in its module, like other functions. Any other
script function is sent as the archive that `torch.jit.save` writes, and arrives as a script module with the same arguments.
Script modules are always sent as an archive.

The reducers run in any thread that encodes or decodes.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from actorrpc.serialization import codec

__all__ = ["REDUCERS", "register"]


def _imported(module: str, name: str) -> Any:
    """Find a script function by name (wire format)."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _loaded(archive: bytes) -> Any:
    """Load a script module, or function, from its archive (wire format)."""
    return torch.jit.load(io.BytesIO(archive), map_location="cpu")


def _reduce_function(function: Any) -> tuple[Any, ...]:
    # The name is `__torch__.package.module.name`, or `__torch__.name` for a function of the main module.
    module, _, name = function.qualified_name.removeprefix("__torch__.").rpartition(".")
    if getattr(sys.modules.get(module), name, None) is function:
        return _imported, (module, name)
    return _loaded, (bytes(function.save_to_buffer()),)


def _reduce_module(module: Any) -> tuple[Any, ...]:
    archive = io.BytesIO()
    torch.jit.save(module, archive)
    return _loaded, (archive.getvalue(),)


#: The reducer of each class.
REDUCERS: Final[dict[type, Callable[[Any], tuple[Any, ...]]]] = {
    torch.jit.ScriptFunction: _reduce_function,
    # These classes are not in torch.jit.__all__.
    **{
        getattr(torch.jit, name): _reduce_module for name in ("RecursiveScriptModule", "TopLevelTracedModule")
    },
}


def register() -> None:
    """Enable TorchScript in messages."""
    for cls, reducer in REDUCERS.items():
        codec.register(cls, reducer)
