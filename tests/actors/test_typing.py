"""Types of actors and tasks in mypy with the plugin (``typing/`` has tests without it). Comments are the expected results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

_ROOT = Path(__file__).resolve().parents[2]
_HEAD = """\
from __future__ import annotations
import actorrpc
from actorrpc import ActorHandle, ObjectRef, ObjectRefGenerator, RRef
from actorrpc.actors import ActorClass, ActorMethod, RemoteFunction
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
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

"""
_SNIPPET = """\
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


def _check(folder: Path, source: str) -> list[str]:
    lines, expected = [], {}
    for line in (_HEAD + source).splitlines():
        code, _, comment = line.partition("  # ")
        if comment.startswith("-> "):
            indent = code[: len(code) - len(code.lstrip())]
            code = f"{indent}reveal_type({code.strip()})"
        lines.append(code)
        if comment:
            expected[len(lines)] = comment
    path = folder / "snippet.py"
    path.write_text("\n".join(lines))
    settings = "[mypy]\nstrict = True\nplugins = actorrpc.mypy_plugin\n"
    settings += "[mypy-torch.*]\nfollow_imports = skip\n"  # skipped: torch would take a minute, and no test needs its types
    (folder / "mypy.ini").write_text(settings)
    # In a separate process, because mypy leaves half a million objects, which would slow down later tests.
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "mypy"),
            *("--config-file", str(folder / "mypy.ini"), "--cache-dir", str(folder / "cache")),
            *("--follow-imports", "silent", "--no-pretty", "--show-traceback", str(path)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MYPYPATH": str(_ROOT), "PYTHONPATH": str(_ROOT)},
        timeout=170,
    )
    out, err = ran.stdout, ran.stderr
    found: dict[int, list[str]] = {}
    for row in out.splitlines():
        matched = re.match(r".*snippet\.py:(\d+): (error|note): (.*)", row)
        if matched:
            found.setdefault(int(matched[1]), []).append(f"{matched[2]}: {_short(matched[3])}")
    wrong = [err] if err else []
    for number, comment in expected.items():
        rows = found.pop(number, [])
        if comment.startswith("-> "):
            right = f'note: Revealed type is "{comment[3:]}"' in rows
            right = right and not any(row.startswith("error") for row in rows)
        else:
            right = any(row.startswith("error") and comment[3:] in row for row in rows)
        if not right:
            wrong.append(f"{lines[number - 1]}: {comment}, but: {rows}")
    for number, rows in found.items():
        wrong.extend(f"{lines[number - 1]}: {row}" for row in rows if row.startswith("error"))
    return wrong


def _short(text: str) -> str:
    text = re.sub(r"\b(?:actorrpc(?:\.\w+)+|snippet|builtins)\.", "", text)
    return text.replace("*Any, **Any", "...")


@pytest.mark.slow
@pytest.mark.limit(180)
def test_mypy_with_the_plugin_infers_the_types_of_actors_and_tasks(tmp_path: Path) -> None:
    assert _check(tmp_path, _SNIPPET) == []
