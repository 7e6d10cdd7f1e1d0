"""Doing something when a module has been imported, whoever imports it.

This module is also loaded by itself when an interpreter starts (``site/sitecustomize.py``), before there is any need for
torch: it imports nothing but the standard library, and nothing of this package.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["after_import", "forget"]


class _Loader(importlib.abc.Loader):
    """Loads a module as another loader does, and says so."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader  # what it looks like from now on
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, once, by way of those that find it otherwise."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        forget(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


def after_import(name: str, then: Callable[[ModuleType], None]) -> _Finder | None:
    """Call ``then(module)`` when a module has been imported; at once if it has been.

    Returns:
        What :func:`forget` takes, if it is still to be imported.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(module)
        return None
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    return finder


def forget(finder: _Finder) -> None:
    """Wait for it no more."""
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
