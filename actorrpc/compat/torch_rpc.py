"""Puts actorrpc in the place of ``torch.distributed.rpc`` and of the modules of torch that build on it.

What stands in torch's place are modules of this package, the same objects under torch's names. It makes no difference
whether torch's own were imported before; but a name that a program has bound before (``from torch.distributed.rpc import
RRef``) stays bound to torch's: install first, or use ``python -m actorrpc.compat``.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from types import ModuleType
from typing import Any, Final

import torch
import torch.distributed
import torch.futures

from actorrpc.compat import autograd, futures, rpc
from actorrpc.compat.rpc.references import RRef
from actorrpc.rpc import rref as rrefs

__all__ = ["install", "is_installed", "uninstall"]

_MISSING: Final = object()
_lock = threading.Lock()  # guards _before
_before: list[tuple[Any, str, Any]] = []  # what was where, to be put back in reverse order
_modules_before: dict[str, ModuleType | None] = {}


def _modules() -> dict[str, ModuleType]:
    """Return what stands in the place of which module of torch."""
    found: dict[str, ModuleType] = {"torch.distributed.rpc": rpc, "torch.distributed.autograd": autograd}
    for name in (
        "api",
        "backend_registry",
        "constants",
        "functions",
        "internal",
        "options",
        "server_process_global_profiler",
    ):
        found[f"torch.distributed.rpc.{name}"] = getattr(rpc, name)
    return found


def _put(place: Any, name: str, value: Any) -> None:
    _before.append((place, name, getattr(place, name, _MISSING)))
    setattr(place, name, value)


def install() -> None:
    """Put actorrpc in the place of torch's modules, in this process and in those that it starts. Idempotent.

    Groups that are joined from now on are actorrpc's, whichever of the two names they are joined by.
    """
    with _lock:
        if _before:
            return
        for name, module in _modules().items():
            _modules_before[name] = sys.modules.get(name)
            sys.modules[name] = module
        _put(torch.distributed, "rpc", rpc)
        _put(torch.distributed, "autograd", autograd)
        # torch's cannot see that one of ours has failed before all are complete.
        _put(torch.futures, "collect_all", futures.collect_all)
        _put(torch.futures, "wait_all", futures.wait_all)
        # Those who bound names of torch's own when torch was imported.
        _put(importlib.import_module("torch._jit_internal"), "RRef", RRef)
        _put(importlib.import_module("torch.nn.parallel.distributed"), "RRef", RRef)
        native = getattr(torch._C, "_distributed_rpc", None)
        if native is not None:
            _put(native, "_is_current_rpc_agent_set", rpc._is_current_rpc_agent_set)
            _put(native, "PyRRef", RRef)
        rrefs.set_class(RRef)


def uninstall() -> None:
    """Put torch's modules back, those that were imported before. For tests; not while RPC is initialised."""
    with _lock:
        while _before:
            place, name, value = _before.pop()
            if value is _MISSING:
                delattr(place, name)
            else:
                setattr(place, name, value)
        for name, module in _modules_before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
        _modules_before.clear()
        rrefs.set_class(rrefs.RRef)


def is_installed() -> bool:
    """Say whether actorrpc is in the place of torch's modules."""
    return bool(_before)


_ = os
