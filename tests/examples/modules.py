"""Import of examples as modules, for tests without processes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["load"]

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def load(name: str, folder: str = "") -> ModuleType:
    """Import an example from a folder below ``examples``, under a unique module name."""
    spec = importlib.util.spec_from_file_location(
        f"example_{name.removesuffix('.py')}", FOLDER / folder / name
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module during the import
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]  # other processes cannot import it, so its classes are sent by value
    return module
