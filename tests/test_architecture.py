"""Structure of the package: import directions, sizes of folders, and modules without I/O.

The import directions are contracts of import-linter in ``pyproject.toml``, which include imports for type checkers. This file
checks the rules for which import-linter has no contract.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGE = _ROOT / "actorrpc"
_MOST_MODULES = 15

# Packages and modules without I/O, each with the only kind that it may use.
_WITHOUT_IO = {
    "config": "",
    "errors": "",
    "futures": "asyncio",  # a future can be awaited; it is completed by others
    "serialization": "",
    "wire": "",
    "wire.keys": "files",  # keys are stored in files
}
_IO_MODULES = {
    *(
        "asyncio",
        "fcntl",
        "http",
        "mmap",
        "multiprocessing",
        "select",
        "selectors",
        "shutil",
        "socket",
        "ssl",
    ),
    *("subprocess", "tempfile", "urllib"),
}
_IO_CALLS = {
    *("open", "io.open", "os.fdopen", "os.memfd_create", "os.mkdir", "os.makedirs", "os.open", "os.pipe"),
    *("os.read", "os.readv", "os.remove", "os.rename", "os.replace", "os.unlink", "os.write", "os.writev"),
}
_IO_METHODS = {"read_bytes", "read_text", "write_bytes", "write_text"}


class Import(NamedTuple):
    """An import of one module by another."""

    module: str
    target: str
    line: int
    for_types: bool
    in_function: bool


def _modules(package: Path) -> dict[str, ast.Module]:
    """Return the syntax trees of all modules, by name relative to the package."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def _imports(module: str, tree: ast.Module, known: set[str]) -> Iterator[Import]:
    def walk(node: ast.AST, for_types: bool, in_function: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in _targets(node, known):
                yield Import(module, target, node.lineno, for_types, in_function)
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                yield from walk(statement, True, in_function)
            for statement in node.orelse:
                yield from walk(statement, for_types, in_function)
            return
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, for_types, inside)

    return walk(tree, False, False)


def _targets(node: ast.Import | ast.ImportFrom, known: set[str]) -> Iterator[str]:
    """Yield the modules of this package that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        # `from package import module` imports the module, `from module import name` the module as well.
        base = node.module or ""
        names = [
            f"{base}.{alias.name}" if _inner(f"{base}.{alias.name}") in known else base
            for alias in node.names
        ]
    for name in dict.fromkeys(names):
        inner = _inner(name)
        if inner is not None:
            yield inner


def _inner(name: str) -> str | None:
    if name == "actorrpc":
        return ""
    return name.removeprefix("actorrpc.") if name.startswith("actorrpc.") else None


def _all_imports(trees: dict[str, ast.Module]) -> list[Import]:
    return [found for name, tree in trees.items() for found in _imports(name, tree, set(trees))]


def _cycles(trees: dict[str, ast.Module]) -> list[str]:
    """Return the cycles among imports that happen at run time, each once."""
    graph: dict[str, set[str]] = {name: set() for name in trees}
    for found in _all_imports(trees):
        if not found.for_types and found.target in graph and found.target != found.module:
            graph[found.module].add(found.target)
    cycles: list[str] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            cycles.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return cycles


def _allowed(module: str) -> str | None:
    """Return the only kind of I/O that a module may use; None if all kinds are allowed."""
    while module and module not in _WITHOUT_IO:
        module = module.rpartition(".")[0]
    return _WITHOUT_IO.get(module)


def _io(trees: dict[str, ast.Module]) -> list[str]:
    wrong = []
    for name, tree in trees.items():
        allowed = _allowed(name)
        if allowed is None:
            continue
        for node in ast.walk(tree):
            io_name = ""
            if isinstance(node, ast.Import):
                io_name = next((a.name for a in node.names if a.name.partition(".")[0] in _IO_MODULES), "")
            elif isinstance(node, ast.ImportFrom):
                base = (node.module or "").partition(".")[0]
                io_name = base if base in _IO_MODULES else ""
            elif isinstance(node, ast.Call) and allowed != "files":
                called = ast.unparse(node.func)
                if called in _IO_CALLS or called.rpartition(".")[2] in _IO_METHODS:
                    io_name = called
            if io_name and io_name.partition(".")[0] != allowed:
                wrong.append(f"{name}:{getattr(node, 'lineno', 0)} {io_name}")
    return wrong


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Syntax trees of the whole package."""
    return _modules(_PACKAGE)


def test_imports_follow_the_contracts_in_pyproject_toml() -> None:
    # In a separate process, as it configures logging, which disables existing loggers.
    command = [sys.executable, "-c", "from importlinter import cli; cli.lint_imports_command()", "--no-cache"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_folder_has_more_than_15_modules() -> None:
    sizes = {
        str(folder.relative_to(_ROOT)): sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        for folder in [_PACKAGE, *_PACKAGE.rglob("*")]
        if folder.is_dir()
    }
    assert not {folder: size for folder, size in sizes.items() if size > _MOST_MODULES}


def test_imports_have_no_cycle(trees: dict[str, ast.Module]) -> None:
    assert not _cycles(trees)


def test_modules_declared_free_of_io_do_no_io(trees: dict[str, ast.Module]) -> None:
    assert not _io(trees)


# -- the checks themselves ---------------------------------------------------------


def _trees(**sources: str) -> dict[str, ast.Module]:
    return {name.replace("__", "."): ast.parse(source) for name, source in sources.items()}


def test_the_check_finds_import_cycles_and_ignores_imports_for_type_checkers() -> None:
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from actorrpc.agent.calls import Call\n"
    assert not _cycles(_trees(agent__agent=types, agent__calls="from actorrpc.agent import agent"))
    cyclic = {
        "agent__agent": "import actorrpc.agent.calls",
        "agent__calls": "from actorrpc.agent.agent import Agent",
    }
    assert _cycles(_trees(**cyclic)) == ["agent.agent -> agent.calls -> agent.agent"]


@pytest.mark.parametrize(
    "source", ["import socket", "from os import path\nimport mmap", "open('x')", "path.read_text()"]
)
def test_the_check_finds_io(source: str) -> None:
    assert _io(_trees(wire__frames=source))
    assert not _io(_trees(agent__agent=source))


# -- the page about the architecture ---------------------------------------------------------------------------------------

_STEP = re.compile(r"`([a-z_/]+\.py)`\s+`([\w.]+)`")


def test_functions_named_in_architecture_md_exist() -> None:
    steps = _STEP.findall((_ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8"))
    assert len(steps) > 50
    assert not [f"{path} {name}" for path, name in steps if name not in _defined(_PACKAGE / path)]


def _defined(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {ast.unparse(target) for target in targets}
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found
