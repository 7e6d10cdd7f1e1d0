"""TorchScript functions and modules in messages: pickle knows neither.

A script function that the other side can import goes by the name under which it stands in its module, as other
functions do; any other one goes as the archive that `torch.jit.save` writes, and arrives as a script module that is
called in the same way. Script modules always go as such an archive.

The reducers run on whichever thread encodes or decodes.
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
    # `__torch__.package.module.name`; in the main module, which has no name there, nothing is left of the module.
    module, _, name = function.qualified_name.removeprefix("__torch__.").rpartition(".")
    if getattr(sys.modules.get(module), name, None) is function:
        return _imported, (module, name)
    return _loaded, (bytes(function.save_to_buffer()),)


def _reduce_module(module: Any) -> tuple[Any, ...]:
    archive = io.BytesIO()
    torch.jit.save(module, archive)
    return _loaded, (archive.getvalue(),)


#: How each class is reduced.
REDUCERS: Final[dict[type, Callable[[Any], tuple[Any, ...]]]] = {
    torch.jit.ScriptFunction: _reduce_function,
    # torch.jit has them, and does not say so
    **{
        getattr(torch.jit, name): _reduce_module for name in ("RecursiveScriptModule", "TopLevelTracedModule")
    },
}


def register() -> None:
    """Have messages carry TorchScript."""
    for cls, reducer in REDUCERS.items():
        codec.register(cls, reducer)
