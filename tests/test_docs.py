"""What the README and the pages of docs/ show: it runs, it leads somewhere, and the README takes a minute to read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.output import check

_ROOT = Path(__file__).resolve().parent.parent
_PAGES = [
    *(_ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((_ROOT / "docs").rglob("*.md")),
]


def _code(page: str) -> str:
    """Return the Python of a page, each line under its number there."""
    lines, inside = [], False
    for line in (_ROOT / page).read_text(encoding="utf-8").splitlines():
        fence = line.startswith("```")
        lines.append("" if fence or not inside else line)
        inside = line == "```python" if fence else inside
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_code_of_a_page_runs_as_a_program(page: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_code(page), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check(done.stderr, what=page)


def test_the_test_of_a_page_passes() -> None:
    names: dict[str, Any] = {}
    code = _code("docs/how-to/test.md")
    start = code.index("import pytest")
    exec(compile("\n" * code.count("\n", 0, start) + code[start:], "docs/how-to/test.md", "exec"), names)
    names["test_a_worker_that_falls_silent"]()


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [*re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text), *re.findall(r'src(?:set)?="([^"]+)"', text)]
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_readme_takes_a_minute() -> None:
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 800
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (block,) = blocks
    assert len([line for line in block.splitlines() if line.strip()]) <= 15
