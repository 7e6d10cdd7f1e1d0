"""Runs at the start of interpreters in which actorrpc replaces torch's RPC or Ray.

:func:`actorrpc.compat.install` puts this file's folder in front of ``PYTHONPATH`` and sets ``ACTORRPC_DROP_IN``, so that actorrpc
also replaces torch's RPC in processes that the program starts. If actorrpc is installed, the variable is enough, because
``actorrpc_drop_in.pth`` in the site-packages runs this file. ``python -m actorrpc.compat.ray`` sets ``ACTORRPC_RAY``: then
``import ray`` finds :mod:`actorrpc.compat.ray`.

This file does not import torch or actorrpc (actorrpc is imported after torch). It also runs the ``sitecustomize`` that it hides.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType

__all__ = ["start"]

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compat() -> str:
    """Return the path of actorrpc.compat, without importing it."""
    spec = importlib.util.find_spec("actorrpc")
    if spec is not None and spec.submodule_search_locations:
        return os.path.join(spec.submodule_search_locations[0], "compat")
    return os.path.dirname(_HERE)


def _install(_torch: ModuleType) -> None:
    if importlib.util.find_spec("actorrpc") is None:
        sys.path.append(os.path.dirname(os.path.dirname(_compat())))
    importlib.import_module("actorrpc.compat.take_over").install()


def _hidden() -> None:
    """Run the ``sitecustomize`` that this file hides."""
    path = [each for each in sys.path if os.path.abspath(each) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.origin is not None:
        _run("sitecustomize", spec.origin)


def start() -> None:
    """Register the replacement of torch's RPC, or of Ray, if the environment variables request it. Runs once in a process."""
    for_torch, for_ray = [
        os.environ.get(name, "0") not in ("", "0") for name in ("ACTORRPC_DROP_IN", "ACTORRPC_RAY")
    ]
    if (for_torch or for_ray) and "actorrpc_drop_in_imports" not in sys.modules:
        imports = _run("actorrpc_drop_in_imports", os.path.join(_compat(), "imports.py"))
        sys.modules["actorrpc_drop_in_imports"] = imports
        if for_torch:
            imports.after_import("torch", _install)
        if for_ray:
            imports.alias_package("ray", "actorrpc.compat.ray")


start()
if __name__ == "sitecustomize":
    _hidden()
