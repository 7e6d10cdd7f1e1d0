"""Hooks for imports: callbacks after the import of a module, aliases of modules, and modules without files.

``site/sitecustomize.py`` loads this module alone when an interpreter starts. Therefore it imports only the standard library.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

__all__ = ["after_import", "alias", "alias_package", "forget", "module"]


def module(name: str, meaning: str, contents: Mapping[str, Any]) -> ModuleType:
    """Make a module, importable by its name, of these contents and with the docstring ``meaning``."""
    made = ModuleType(name, meaning)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(contents, __all__=[each for each in contents if not each.startswith("_")])
    sys.modules[name] = made
    return made


class _Loader(importlib.abc.Loader):
    """Loads a module with the loader ``loader``, and calls ``then(module)`` after that."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader  # the module's attributes must name the original loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module ``name`` with Python's other finders, and wraps its loader in a :class:`_Loader`. Works once."""

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
    """Call ``then(module)`` when the module ``name`` has been imported; at once if it is imported already.

    Returns:
        The argument for :func:`forget`, or None if the module is imported already.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(module)
        return None
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    return finder


class _Other(importlib.abc.Loader):
    """The loader of an alias: gives the module whose real name is ``name``, unchanged."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # restore the spec, which Python has replaced by the alias's spec


class _Aliases(importlib.abc.MetaPathFinder):
    """Finds modules by their aliases."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name = self._names.get(fullname)
        return None if name is None else importlib.util.spec_from_loader(fullname, _Other(name))


def alias(names: Mapping[str, str]) -> _Aliases:
    """Make modules importable by aliases.

    Args:
        names: alias -> name of the module.

    Returns:
        The argument for :func:`forget`.
    """
    finder = _Aliases(names)
    sys.meta_path.insert(0, finder)
    return finder


class _Root(_Other):
    """The loader of a package's alias: also registers the package's modules that are imported already, by their aliases."""

    def __init__(self, name: str, other: str) -> None:
        super().__init__(name)
        self._prefix = f"{name}."
        self._other_prefix = f"{other}."

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name, found in sys.modules.copy().items():
            if name.startswith(self._prefix):
                sys.modules[self._other_prefix + name.removeprefix(self._prefix)] = found


class _Package(importlib.abc.MetaPathFinder):
    """Finds the package ``name`` and its modules by the alias ``other``. Python's other finders are not called for the alias."""

    def __init__(self, other: str, name: str) -> None:
        self._other = other
        self._name = name

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == self._other:
            return importlib.util.spec_from_loader(fullname, _Root(self._name, self._other))
        if not fullname.startswith(f"{self._other}."):
            return None
        own = self._name + fullname.removeprefix(self._other)
        if own in sys.modules:
            return importlib.util.spec_from_loader(fullname, _Other(own))
        names = importlib.import_module(f"{self._name}.names")
        known = [each for each in list(sys.modules) if f"{each}.".startswith(f"{self._other}.")]
        raise names.no_module(fullname, known)


def alias_package(other: str, name: str) -> MetaPathFinder:
    """Make a package and its modules importable by an alias, even if a package with the alias as its name is installed.

    Args:
        other: the alias.
        name: the package's own name. The package imports all its modules; ``names`` makes the error for missing modules.

    Returns:
        The argument for :func:`forget`.

    Raises:
        RuntimeError: another package has been imported by the name ``other``.
    """
    loaded = sys.modules.get(other)
    if loaded is not None and loaded.__name__ != name:
        raise RuntimeError(f"{other} has been imported already, from {getattr(loaded, '__file__', None)}")
    finder = _Package(other, name)
    sys.meta_path.insert(0, finder)
    return finder


def forget(finder: importlib.abc.MetaPathFinder) -> None:
    """Remove a finder."""
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
