"""mypy, pyright, pyrefly and ty, without a plugin, check ``expectations.py`` and the programs of the documentation."""

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


def _refused(checker: str, paths: list[Path]) -> dict[Path, dict[int, list[str]]]:
    """Return the errors of a checker for some files, by line."""
    command = [_program(checker), *_COMMANDS[checker][1:], *map(str, paths)]
    environment = os.environ | {"MYPYPATH": str(_ROOT), "NO_COLOR": "1"}
    ran = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=170)
    found: dict[Path, dict[int, list[str]]] = {path: {} for path in paths}
    for row in ran.stdout.splitlines():
        matched = re.search(r"([\w-]+\.py):(\d+)\b", row)
        if matched and re.search(r"\berror\b", row, re.IGNORECASE) and _ASIDE not in row:
            (path,) = [path for path in paths if path.name == matched[1]]  # errors are only in these files
            found[path].setdefault(int(matched[2]), []).append(row)
    # A checker that worked has reported errors, because the expectations are always among the files.
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
