"""Every public name exists, is listed in ``__all__`` and has a docstring."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import actorrpc

_PACKAGE = Path(__file__).resolve().parent.parent / "actorrpc"
_PUBLIC = [
    "actorrpc",
    "actorrpc.errors",
    "actorrpc.config",
    "actorrpc.futures",
    "actorrpc.rpc",
    "actorrpc.autograd",
    "actorrpc.optim",
    "actorrpc.nn",
    "actorrpc.actors",
    "actorrpc.cluster",
    "actorrpc.compat",
    "actorrpc.observe",
    "actorrpc.testing",
]


def _file(name: str) -> Path | None:
    path = _PACKAGE.joinpath(*name.split(".")[1:])
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None


_EXISTING = [name for name in _PUBLIC if _file(name) is not None]


@pytest.fixture(params=_EXISTING)
def module(request: pytest.FixtureRequest) -> ModuleType:
    """Each public module."""
    return importlib.import_module(request.param)


def _own(value: object) -> bool:
    """Return whether a value is defined in this package; torch documents its own objects."""
    return (getattr(value, "__module__", None) or "").partition(".")[0] == "actorrpc"


def _undocumented(name: str, value: object) -> Iterator[str]:
    if not (inspect.isclass(value) or inspect.isroutine(value)) or not _own(value):
        return
    # A class must not inherit its base's docstring, which describes the base.
    if not (value.__dict__.get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)):
        yield name
    if inspect.isclass(value):
        for base in value.__mro__:
            if not _own(base):
                continue
            for attribute, member in vars(base).items():
                function = getattr(member, "__func__", member)  # of class and static methods
                documented = inspect.isroutine(function) or isinstance(function, property)
                if attribute.startswith("_") or not documented:
                    continue
                # An override may inherit the docstring of the overridden method.
                if not inspect.getdoc(getattr(value, attribute)):
                    yield f"{name}.{attribute}"


def test_all_of_a_public_module_lists_public_names_once(module: ModuleType) -> None:
    names = getattr(module, "__all__", None)
    assert names, f"{module.__name__} has no __all__"
    assert all(isinstance(name, str) for name in names)
    assert len(names) == len(set(names)), f"twice: {sorted(n for n in set(names) if names.count(n) > 1)}"
    private = [name for name in names if name.startswith("_") and name != "__version__"]
    assert not private


def test_names_in_all_exist(module: ModuleType) -> None:
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert not missing


def test_names_in_all_and_their_methods_have_docstrings(module: ModuleType) -> None:
    assert module.__doc__, f"{module.__name__} has no docstring"
    undocumented = {
        text for name in module.__all__ for text in _undocumented(name, getattr(module, name, None))
    }
    assert not undocumented, sorted(undocumented)


def test_every_module_has_a_docstring_and_all() -> None:
    without = []
    for path in sorted(_PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not tree.body and path.name == "__init__.py":
            continue  # an empty file of a private package
        targets = {
            target.id
            for node in tree.body
            for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
            if isinstance(target, ast.Name)
        }
        # A program, and two tables in which every name is for other modules, need no __all__.
        need_none = ("__main__.py", "_python.py", "_torch.py")
        if not ast.get_docstring(tree) or (
            "__all__" not in targets and str(path.relative_to(_PACKAGE)) not in need_none
        ):
            without.append(str(path))
    assert not without


def test_the_package_exports_no_other_modules_than_its_public_subpackages() -> None:
    """With more modules, users could import a module instead of a function with a similar name."""
    modules = {name for name in actorrpc.__all__ if isinstance(getattr(actorrpc, name), ModuleType)}
    packages = {"actors", "autograd", "cluster", "nn", "optim", "rpc", "testing"}
    assert modules == packages | {"errors", "functions"}  # torch has `functions` as well
