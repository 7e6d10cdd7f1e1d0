"""Rules for the files of the repository: no unfinished code, pinned requirements, runnable commands."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

_ROOT = Path(__file__).resolve().parent.parent
_FOLDERS = ["actorrpc", "benchmarks", "docs", "examples", "tests", ".ci"]
# Each word in two parts, so that this file does not contain it.
_UNFINISHED = [a + b for a, b in [("TO", "DO"), ("FIX", "ME"), ("XX", "X"), ("HA", "CK")]]
_UNFINISHED_CODE = [a + b for a, b in [("NotImplemented", "Error"), ("set_", "trace")]]
_CONFLICT = [7 * "<" + " ", 7 * ">" + " "]


def _texts() -> Iterator[tuple[str, str]]:
    files = [path for path in _ROOT.iterdir() if path.is_file()]
    for folder in _FOLDERS:
        files += [path for path in (_ROOT / folder).rglob("*") if path.is_file()]
    for path in sorted(files):
        if {"__pycache__", "_build"} & set(path.parts) or path.name == "LICENSE":
            continue
        try:
            yield str(path.relative_to(_ROOT)), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture


def _found(pattern: str, folder: str = "") -> list[str]:
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in _texts()
        if name.startswith(folder)
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]


def _project() -> dict[str, Any]:
    with (_ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def test_nothing_is_left_unfinished() -> None:
    assert not _found(rf"\b({'|'.join(_UNFINISHED)})\b")
    assert not _found(rf"\b({'|'.join(_UNFINISHED_CODE)})\b", "actorrpc/")
    assert not _found(
        r"^\s*break" + r"point\(\)", "actorrpc/"
    )  # only as a statement: the debugger's text names it
    assert not _found(rf"^({'|'.join(_CONFLICT)})")


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in (_ROOT / "actorrpc").rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").is_file()]


def test_every_requirement_is_pinned() -> None:
    project = _project()["project"]
    extras = project["optional-dependencies"]
    pinned = set()
    for line in (_ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, exact, version = line.partition("==")
            assert exact, line
            assert "+" not in version, f"{line}: a local version cannot be installed elsewhere"
            pinned.add(_normal(name))
    wanted = {_normal(text) for group in [project["dependencies"], *extras.values()] for text in group}
    assert wanted - {"actorrpc"} <= pinned


def test_pinned_packages_support_the_oldest_promised_python() -> None:
    """Debian 12 has 3.11.2: a pin that asks for a later 3.11 makes the README's commands fail there."""
    oldest = _project()["project"]["requires-python"].removeprefix(">=") + ".0"
    for line in (_ROOT / "constraints.txt").read_text().splitlines():
        name, _, _ = line.partition("==")
        with contextlib.suppress(
            importlib.metadata.PackageNotFoundError
        ):  # of an extra that is not installed here
            wants = (
                importlib.metadata.metadata(name).get("Requires-Python")
                if line[:1] not in ("", "#")
                else None
            )
            assert wants is None or SpecifierSet(wants).contains(oldest), f"{line} asks for Python {wants}"


def _normal(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def test_the_version_is_where_the_build_looks_for_it() -> None:
    text = (_ROOT / _project()["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    assert re.search(r'^__version__ = "\d+\.\d+\.\d+[a-z0-9.]*"$', text, re.MULTILINE), (
        'actorrpc/__init__.py needs a line `__version__ = "0.1.0"`'
    )


@pytest.mark.parametrize("name", ["main-command", "test-command"])
def test_the_readme_has_each_command_once(name: str) -> None:
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(
        rf"^<!-- {name} -->\n```sh\n(.*?)\n```\n<!-- /{name} -->$", text, re.MULTILINE | re.DOTALL
    )
    assert len(blocks) == 1
    assert "pip install -c constraints.txt" in blocks[0]


def test_the_ci_script_is_executable_and_valid_shell() -> None:
    script = _ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
