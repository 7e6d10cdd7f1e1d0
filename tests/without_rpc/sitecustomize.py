"""Hides torch's RPC in each interpreter whose ``PYTHONPATH`` has this folder.

``HIDE_RPC=build``: torch is as a build with ``USE_RPC=0``: ``torch.distributed.rpc.is_available()`` is False.
``HIDE_RPC=modules``: in addition, torch's modules of RPC cannot be imported, as in a version of torch that has removed them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["hide"]

_INIT = (
    "_rpc_init",
    "_dist_autograd_init",
    "_faulty_agent_init",
)  # they make torch._C._distributed_rpc and similar modules
_REMOVED = (
    "torch.distributed.rpc.",
    "torch.distributed.autograd.",
    "torch.distributed.nn.api.",
    "torch.distributed.optim.optimizer.",
)
_absent = False  # whether imports of the modules fail
_kept: dict[
    str, ModuleType
] = {}  # removed attributes of torch.distributed, which other modules of this version of torch use


def _is_removed(name: str) -> bool:
    return f"{name}.".startswith(_REMOVED)


def _remove_functions(native: Any) -> None:
    for name in _INIT:
        delattr(native, name)


def _remove_modules(_torch: ModuleType) -> None:
    """Remove the modules after the import of torch, because this version of torch needs them while it is imported."""
    global _absent
    _absent = True
    for name in [each for each in sys.modules if _is_removed(each)]:
        module = sys.modules.pop(name)
        parent, _, child = name.rpartition(".")
        if parent == "torch.distributed":
            _kept[child] = module
            delattr(sys.modules[parent], child)
    sys.modules["torch.distributed"].__getattr__ = _attribute_for_torch  # type: ignore[method-assign]


def _attribute_for_torch(name: str) -> ModuleType:
    if name in _kept and sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
        return _kept[name]
    raise AttributeError(f"module 'torch.distributed' has no attribute {name!r}")


def _run_after(spec: ModuleSpec, then: Callable[[Any], None]) -> None:
    loader: Any = spec.loader
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        then(module)

    loader.exec_module = exec_module


class _Finder(MetaPathFinder):
    def __init__(self, actions: dict[str, Callable[[Any], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _absent and _is_removed(fullname):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self._actions else None
        if spec is not None:
            _run_after(spec, self._actions[fullname])
        return spec


def hide(what: str) -> None:
    """Hide torch's RPC in this process: ``"build"`` or ``"modules"``. Torch must not be imported yet."""
    assert "torch" not in sys.modules
    actions: dict[str, Callable[[Any], None]] = {"torch._C": _remove_functions}
    if what == "modules":
        actions["torch"] = _remove_modules
    # Directly before PathFinder, so that the modules are removed before the hooks of actorrpc.compat for torch run.
    sys.meta_path.insert(sys.meta_path.index(PathFinder), _Finder(actions))


if "HIDE_RPC" in os.environ:
    hide(os.environ["HIDE_RPC"])
