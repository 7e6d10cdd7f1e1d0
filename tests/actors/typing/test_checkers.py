"""mypy, pyright, pyrefly and ty check ``expectations.py`` and the programs of the documentation; mypy also with the plugin."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[3]
_EXPECTATIONS = Path(__file__).with_name("expectations.py")
_COMMANDS = {
    # With the project's settings, so that mypy uses the cached results for the package and torch in .mypy_cache.
    "mypy": ["mypy", "--no-pretty", "--hide-error-context"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
    "pyrefly": [
        *("pyrefly", "check", "--preset", "default", "--output-format", "min-text"),
        *("--python-interpreter-path", sys.executable, "--search-path", str(_ROOT)),
    ],
    "ty": [
        *("ty", "check", "--output-format", "concise", "--python", sys.prefix),
        *("--extra-search-path", str(_ROOT)),
    ],
}
_PAGES = ["README.md", "docs/tutorial.md", "docs/how-to/types.md"]
# mypy reports this for expressions that only show a type and are not awaited.
_ASIDE = "[unused-awaitable]"


def _program(checker: str) -> str:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which(checker, path=path)
    if found is None:
        pytest.skip(f"{checker} is not installed: pip install -c constraints.txt -e '.[dev]'")
    return found


def _refused(checker: str, paths: list[Path], *options: str) -> dict[Path, dict[int, list[str]]]:
    """Return the errors of a checker for some files, by line."""
    command = [_program(checker), *_COMMANDS[checker][1:], *options, *map(str, paths)]
    environment = os.environ | {"MYPYPATH": str(_ROOT), "NO_COLOR": "1"}
    ran = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=170)
    found: dict[Path, dict[int, list[str]]] = {path: {} for path in paths}
    for row in ran.stdout.splitlines():
        matched = re.search(r"([\w-]+\.py):(\d+)\b", row)
        if matched and re.search(r"\berror\b", row, re.IGNORECASE) and _ASIDE not in row:
            (path,) = [path for path in paths if path.name == matched[1]]  # errors are only in these files
            found[path].setdefault(int(matched[2]), []).append(row)
    # A checker that worked has reported errors, because files with expected errors are always among the files.
    assert ran.returncode == 1, ran.stdout + ran.stderr
    return found


def _expected(checker: str) -> set[int]:
    lines = _EXPECTATIONS.read_text(encoding="utf-8").splitlines()
    return {
        number
        for number, line in enumerate(lines, 1)
        if (matched := re.search(r"# E(?:: ([a-z ]+))?$", line))
        and checker in (matched[1] or checker).split()
    }


def _code(page: str) -> str:
    text = (_ROOT / page).read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


@pytest.mark.limit(180)  # the first run of mypy analyses torch
@pytest.mark.parametrize(
    "checker",
    [
        pytest.param("mypy", marks=pytest.mark.slow),
        pytest.param("pyright", marks=pytest.mark.slow),
        "pyrefly",
        "ty",
    ],
)
def test_each_checker_reports_exactly_the_expected_errors_and_none_in_documentation(
    checker: str, tmp_path: Path
) -> None:
    paths = [_EXPECTATIONS]
    for page in _PAGES:
        paths.append(tmp_path / f"{Path(page).stem.lower()}_page.py")
        paths[-1].write_text(_code(page), encoding="utf-8")
    refused = _refused(checker, paths)
    expected, found = _expected(checker), refused.pop(_EXPECTATIONS)
    assert not [row for number, rows in sorted(found.items()) if number not in expected for row in rows]
    assert expected
    assert not expected - found.keys(), "the checker accepted these lines, which it should refuse"
    assert not [row for lines in refused.values() for rows in lines.values() for row in rows]


# -- mypy with the plugin: the type of each expression with ``# ->``, and the error of each line with ``# E`` ------

_WITH_PLUGIN = """\
from __future__ import annotations
import actorrpc
from actorrpc import ActorHandle, ObjectRef, ObjectRefGenerator
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, assert_type
T = TypeVar("T")

class Plain:
    def __init__(self, start: int, *, step: int = 1) -> None: ...
    def add(self, times: int, *, twice: bool = False) -> float: return 1.0
    async def wait(self) -> bytes: return b""
    def stream(self) -> Iterator[int]: yield 1
    async def astream(self) -> AsyncIterator[str]: yield ""
    @staticmethod
    def static(x: int) -> str: return ""
    @classmethod
    def made(cls) -> bytes: return b""
    @actorrpc.method(num_returns=2)
    def two(self) -> tuple[int, str]: return 1, ""
    @actorrpc.method(timeout=3)
    def marked(self, x: int) -> int: return x
    attribute: int = 1

@actorrpc.remote
class Actor(Plain):
    def own(self) -> int: return 1
@actorrpc.remote(num_cpus=1)
@dataclass
class Box(Generic[T]):
    value: T
    def get(self) -> T: return self.value
class Sub(Actor):
    def more(self) -> str: return ""
@actorrpc.remote
class Called:
    def __call__(self, x: int) -> str: return ""
h = Actor.remote(1)
h  # -> ActorHandle[Actor]
Actor.remote("x")  # E: incompatible type "str"
Actor.remote(1, stop=2)  # E: Unexpected keyword argument "stop"
Actor.options(name="x").remote(1, step=2)  # -> ActorHandle[Actor]
h.own.remote()  # -> ObjectRef[int]
h.add.remote(1)  # -> ObjectRef[float]
h.add.remote(1, twice=True)  # -> ObjectRef[float]
h.add.remote("x")  # E: incompatible type "str"
h.add.remote(1, twise=True)  # E: Unexpected keyword argument "twise"
h.wait.remote()  # -> ObjectRef[bytes]
h.stream.remote()  # -> ObjectRefGenerator[int]
h.astream.remote()  # -> ObjectRefGenerator[str]
h.static.remote(1)  # -> ObjectRef[str]
h.made.remote()  # -> ObjectRef[bytes]
h.two.remote()  # -> Any
h.marked.remote(1)  # -> ObjectRef[int]
h.add.options(timeout=1).remote(1)  # -> ObjectRef[float]
h.add.options(num_returns=2).remote(1)  # -> Any
h.ad.remote(1)  # E: "Actor" has no method "ad"
h.attribute  # E: "attribute" is no method of "Actor": read it with handle.rpc_sync().attribute
h.add.remote(h.marked.remote(1))  # -> ObjectRef[float]
h.add.remote(h.static.remote(1))  # E: incompatible type "ObjectRef[str]"; expected "int | ObjectRef[int]"
Actor.remote(h.marked.remote(1))  # -> ActorHandle[Actor]
Box.remote(3)  # -> ActorHandle[Box[int]]
Box.remote("x").get.remote()  # -> ObjectRef[str]
Called.remote().__call__.remote(1)  # -> ObjectRef[str]
Called.remote().__call__.remote("x")  # E: incompatible type "str"
Sub.remote(1)  # E: "Sub" has no "remote": it is a plain class, put @remote over it
actorrpc.get(h.add.remote(1))  # -> float
actorrpc.get([h.add.remote(1), h.add.remote(2)])  # -> list[float]
@actorrpc.remote
def task(a: int) -> float: return 1.0
task.remote(h.own.remote())  # -> ObjectRef[float]
task.remote(h.made.remote())  # E: incompatible type "ObjectRef[bytes]"
class Based(actorrpc.Actor):
    @actorrpc.method
    def add(self, k: int) -> int: return k
    def kept(self) -> str: return ""
Based.remote()  # -> Based
Based.remote().add.remote(1)  # -> ObjectRef[int]
Based.options(name="x").remote().add.remote("x")  # E: No overload variant
Based.remote().add.remote(h.own.remote())  # -> ObjectRef[int]
def use_both(handle: ActorHandle[Based]) -> None:
    handle.add.remote(1)  # -> ObjectRef[int]
    handle.kept.remote()  # -> ObjectRef[str]
def use(handle: ActorHandle[Plain]) -> None:
    handle.add.remote(1)  # -> ObjectRef[float]
async def wait(handle: ActorHandle[Plain]) -> None:
    await handle.add.remote(1)  # -> float
    async for ref in handle.astream.remote():
        ref  # -> ObjectRef[str]
"""


@pytest.mark.slow
@pytest.mark.limit(180)
def test_mypy_with_the_plugin_infers_the_types_of_actors_and_tasks(tmp_path: Path) -> None:
    source = re.sub(r"(?m)^( *)(.*)  # -> (.*)$", r"\1assert_type(\2, \3)", _WITH_PLUGIN)
    path, settings = tmp_path / "snippet.py", tmp_path / "mypy.ini"
    path.write_text(source)
    settings.write_text(
        "[mypy]\nstrict = True\nplugins = actorrpc.mypy_plugin\n"
        "[mypy-torch.*]\nfollow_imports = skip\n"  # torch would take a minute, and no test needs its types
    )
    options = ("--config-file", str(settings), "--cache-dir", str(tmp_path), "--follow-imports", "silent")
    found = _refused("mypy", [path], *options)[path]
    for number, line in enumerate(source.splitlines(), 1):
        _, expected, text = line.partition("  # E: ")
        errors = found.pop(number, [])
        assert not expected or any(text in error for error in errors), f"{line}: {errors}"
        assert expected or not errors, f"{line}: {errors}"
    assert not found
