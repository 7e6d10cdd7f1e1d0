"""Which module may know which: the floors.

A module imports only from its own floor or from floors below; the two wings of floor 5 do not know each
other. Floors 0 and 1 do no I/O. Imports for type checkers only count as knowing, but not as a cycle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

_PACKAGE = Path(__file__).resolve().parent.parent / "actorrpc"


class Floor(NamedTuple):
    """A floor, and a wing of it where it has two that do not know each other."""

    number: int
    wing: str = ""


# Modules and packages, without "actorrpc."; a package stands for all that is in it unless a longer name
# is there. A module that is in none of them fails the test: put it on its floor.
_FLOORS: dict[str, Floor] = {
    # words
    "errors": Floor(0),
    "moments": Floor(0),
    "config": Floor(0),
    "futures": Floor(0),
    "core.exception_parts": Floor(0),
    "core.exception_text": Floor(0),
    # bytes: no I/O
    "core": Floor(1),  # the package itself; all modules in it are named
    "core.by_value": Floor(1),
    "core.codec": Floor(1),
    "core.culprits": Floor(1),
    "core.definitions": Floor(1),
    "core.exceptions": Floor(1),
    "core.frames": Floor(1),
    "core.handshake": Floor(1),
    "core.holder": Floor(1),
    "core.holes": Floor(1),
    "core.identity": Floor(1),
    "core.keys": Floor(1),
    "core.launch": Floor(1),
    "core.layout": Floor(1),
    "core.points": Floor(1),
    "core.repeats": Floor(1),
    "core.opening": Floor(1),
    "core.restriction": Floor(1),
    "core.seals": Floor(1),
    # links: one other worker
    "core.answering": Floor(2),
    "core.buffers": Floor(2),
    "core.chunks": Floor(2),
    "core.connection": Floor(2),
    "core.daemons": Floor(2),
    "core.descriptors": Floor(2),
    "core.events": Floor(2),
    "core.interrupts": Floor(2),
    "core.limits": Floor(2),
    "core.liveness": Floor(2),
    "core.peer": Floor(2),
    "core.replay": Floor(2),
    "core.spin": Floor(2),
    "core.tensor_lane": Floor(2),
    "core.tls": Floor(2),
    "core.waiting": Floor(2),
    # group: all of them
    "core.agent": Floor(3),
    "core.calls": Floor(3),
    "core.changes": Floor(3),
    "core.clock": Floor(3),
    "core.execution": Floor(3),
    "core.gates": Floor(3),
    "core.guests": Floor(3),
    "core.inbox": Floor(3),
    "core.interceptors": Floor(3),
    "core.letters": Floor(3),
    "core.links": Floor(3),
    "core.meeting": Floor(3),
    "core.messages": Floor(3),
    "core.posts": Floor(3),
    "core.roster": Floor(3),
    "core.rendezvous": Floor(3),
    "core.resumption": Floor(3),
    "core.several": Floor(3),
    "core.threads": Floor(3),
    "core.upkeep": Floor(3),
    # primitives
    "rpc": Floor(4),
    # model and actors
    "autograd": Floor(5, "model"),
    "optim": Floor(5, "model"),
    "nn": Floor(5, "model"),
    "actors": Floor(5, "actors"),
    # surfaces
    "compat": Floor(6),
    "cluster": Floor(6),
    "observe": Floor(6),
    "testing": Floor(6),
    "cli": Floor(6),
    "worker": Floor(6),
    "mypy_plugin": Floor(6),
    "__main__": Floor(6),
    # the package itself, which gathers the names that users need most
    "": Floor(7),
}
# Packages whose modules are not all on one floor.
_NAMED_ONLY = {"core"}

_IO_MODULES = {
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
    "subprocess",
    "tempfile",
    "urllib",
}
_IO_CALLS = {
    *("open", "io.open", "os.fdopen", "os.memfd_create", "os.mkdir", "os.makedirs", "os.open", "os.pipe"),
    *("os.read", "os.readv", "os.remove", "os.rename", "os.replace", "os.unlink", "os.write", "os.writev"),
}
_IO_METHODS = {"read_bytes", "read_text", "write_bytes", "write_text"}
_MAY_DO_IO = {
    "core.keys": "files",  # keys lie in them
    "futures": "asyncio",  # a future can be awaited; it is completed by others
}


@dataclass(frozen=True, slots=True)
class Import:
    """That one module knows another."""

    module: str
    target: str
    line: int
    for_types: bool
    in_function: bool

    def __str__(self) -> str:
        return f"{_shown(self.module)}:{self.line} imports {_shown(self.target)}"


def _shown(module: str) -> str:
    return f"actorrpc.{module}" if module else "actorrpc"


def _modules(package: Path) -> dict[str, ast.Module]:
    """The syntax trees of all modules, by name; a package has the name of its folder."""
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
    """The modules of this package that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        # `from package import module` knows the module, `from module import name` the module as well.
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


def _floor(module: str) -> Floor | None:
    if module in _FLOORS:
        return _FLOORS[module]
    package = module.rpartition(".")[0]
    while package and package not in _FLOORS:
        package = package.rpartition(".")[0]
    return None if not package or package in _NAMED_ONLY else _FLOORS[package]


def _unplaced(trees: dict[str, ast.Module]) -> list[str]:
    return [f"{_shown(name)} is on no floor: add it to _FLOORS" for name in trees if _floor(name) is None]


def _all_imports(trees: dict[str, ast.Module]) -> list[Import]:
    return [found for name, tree in trees.items() for found in _imports(name, tree, set(trees))]


def _upward(trees: dict[str, ast.Module]) -> list[str]:
    wrong = []
    for found in _all_imports(trees):
        mine, theirs = _floor(found.module), _floor(found.target)
        if mine is None or theirs is None:
            continue  # reported as being on no floor
        if theirs.number > mine.number:
            wrong.append(f"{found}: floor {mine.number} must not know floor {theirs.number}")
        elif theirs.number == mine.number and theirs.wing != mine.wing:
            wrong.append(f"{found}: {mine.wing} and {theirs.wing} must not know each other")
    return wrong


def _inside_functions(trees: dict[str, ast.Module]) -> list[str]:
    return [f"{found} inside a function" for found in _all_imports(trees) if found.in_function]


def _cycles(trees: dict[str, ast.Module]) -> list[str]:
    """Cycles among the imports that happen at run time, each named once."""
    graph: dict[str, set[str]] = {name: set() for name in trees}
    for found in _all_imports(trees):
        if not found.for_types and found.target in graph and found.target != found.module:
            graph[found.module].add(found.target)
    cycles: list[str] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            cycles.append(" -> ".join(map(_shown, [*path[path.index(name) :], name])))
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return cycles


def _io(trees: dict[str, ast.Module]) -> list[str]:
    wrong = []
    for name, tree in trees.items():
        floor = _floor(name)
        if floor is None or floor.number > 1 or _MAY_DO_IO.get(name) == "files":
            continue
        for node in ast.walk(tree):
            used: set[str] = set()
            if isinstance(node, ast.Import):
                used = {alias.name.partition(".")[0] for alias in node.names} & _IO_MODULES
            elif isinstance(node, ast.ImportFrom):
                used = {(node.module or "").partition(".")[0]} & _IO_MODULES
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                used = {called} & _IO_CALLS
                if isinstance(node.func, ast.Attribute) and node.func.attr in _IO_METHODS:
                    used = {called}
            if used - {_MAY_DO_IO.get(name)}:
                wrong.append(f"{_shown(name)}:{getattr(node, 'lineno', 0)} does I/O: {', '.join(used)}")
    return wrong


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """All modules of the package."""
    return _modules(_PACKAGE)


def _none(wrong: list[str]) -> None:
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_module_is_on_a_floor(trees: dict[str, ast.Module]) -> None:
    _none(_unplaced(trees))


def test_no_module_knows_a_higher_floor(trees: dict[str, ast.Module]) -> None:
    _none(_upward(trees))


def test_no_module_imports_inside_a_function(trees: dict[str, ast.Module]) -> None:
    _none(_inside_functions(trees))


def test_imports_have_no_cycle(trees: dict[str, ast.Module]) -> None:
    _none(_cycles(trees))


def test_words_and_bytes_do_no_io(trees: dict[str, ast.Module]) -> None:
    _none(_io(trees))


# -- the checks themselves -----------------------------------------------------------------------


def _trees(**sources: str) -> dict[str, ast.Module]:
    return {name.replace("__", "."): ast.parse(source) for name, source in sources.items()}


def test_unplaced_modules_are_found() -> None:
    trees = _trees(core__frames="", core__gadgets="", rpc__api="", rpc__deep__er="", gadgets="")
    assert [text.split()[0] for text in _unplaced(trees)] == ["actorrpc.core.gadgets", "actorrpc.gadgets"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("errors", "from actorrpc.core import frames"),
        ("core__frames", "import actorrpc.core.peer"),
        ("core__agent", "from actorrpc.rpc.api import rpc_sync"),
        ("core__agent", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import actorrpc.rpc"),
        ("rpc__api", "import actorrpc"),
        ("actors", "from actorrpc.autograd import context"),
        ("optim", "import actorrpc.actors"),
    ],
)
def test_upward_imports_are_found(module: str, source: str) -> None:
    others = dict.fromkeys(["core__frames", "core__peer", "rpc__api", "autograd", "actors"], "")
    assert len(_upward(_trees(**{**others, module: source}))) == 1


def test_downward_imports_are_allowed() -> None:
    assert not _upward(
        _trees(
            core__agent="from actorrpc.core import frames, peer\nfrom actorrpc.errors import RpcError",
            core__frames="",
            core__peer="from actorrpc.core.frames import Frame",
            actors="from actorrpc import rpc",
            nn="import actorrpc.autograd",
            rpc="from actorrpc.core.agent import Agent",
        )
    )


def test_imports_inside_functions_are_found() -> None:
    source = "class A:\n    def f(self):\n        from actorrpc import errors\n        import os"
    assert len(_inside_functions(_trees(config=source, errors=""))) == 1


def test_cycles_are_found_but_not_those_of_types() -> None:
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from actorrpc.core.agent import Agent"
    cyclic = {"core__agent": "from actorrpc.core import calls", "core__calls": "import actorrpc.core.agent"}
    assert _cycles(_trees(**cyclic)) == ["actorrpc.core.agent -> actorrpc.core.calls -> actorrpc.core.agent"]
    assert not _cycles(_trees(**{**cyclic, "core__calls": types}))


@pytest.mark.parametrize(
    "source", ["import socket", "from os import path\nos.read(3, 1)", "open('x')", "Path('x').read_text()"]
)
def test_io_is_found(source: str) -> None:
    assert len(_io(_trees(core__frames=source))) == 1
    assert not _io(_trees(core__connection=source, core__keys=source, futures="import asyncio"))
