"""The examples as modules, for what needs no processes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

__all__ = ["load"]

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def load(name: str, folder: str = "torch_style") -> ModuleType:
    """Import an example, of a folder below ``examples``, under a name of its own."""
    spec = importlib.util.spec_from_file_location(
        f"example_{name.removesuffix('.py')}", FOLDER / folder / name
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up while it loads
        spec.loader.exec_module(module)
    return module
