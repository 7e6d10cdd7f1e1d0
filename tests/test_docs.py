"""The README and the pages of docs/: their programs and commands run, their links exist, and the README is short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, Block, blocks, run

_PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
]


_PROGRAMS = [
    page for page in _PAGES if any(each.language == "python" and not each.skipped for each in blocks(page))
]
# These pages run in the default layer; the other pages, which take seconds each, in the slow layer.
_ESSENTIAL = {"README.md"}


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.limit(
    150
)  # it starts processes that import torch: under load, the README's program takes half a minute
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if _name(page) in _ESSENTIAL else pytest.mark.slow, id=_name(page))
        for page in _PROGRAMS
    ],
)
def test_python_blocks_of_a_page_run_and_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    run(page, tmp_path)


@pytest.mark.parametrize("page", _PAGES, ids=_name)
def test_blocks_have_known_languages_and_skipped_blocks_a_reason(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    languages = set(re.findall(r"^```([^\n`]+)$", text, re.MULTILINE))
    known = {"python", "sh", "text", "toml", "yaml"}
    assert {each for each in languages if not each.startswith("{")} <= known
    # Pages skip commands that only an administrator runs, and state the reason.
    assert all(each.skipped for each in blocks(page) if each.language == "skipped")


@pytest.mark.parametrize(("old", "new"), [("3\n```", "4\n```"), ("print(1)", "print(1 / 0)")])
def test_a_page_with_wrong_output_or_an_error_fails(old: str, new: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(_PAGE.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(AssertionError):
        run(page, tmp_path)


_PAGE = """# A page

```python
print(1)
print("2", "3", sep="\\n")
```

```text
1
...
3
```

<!-- skip: next "for once" -->
```python
1 / 0
```

```text
of nothing
```
"""


@pytest.mark.parametrize("page", _PAGES, ids=_name)
def test_relative_links_lead_to_existing_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [*re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text), *re.findall(r'src(?:set)?="([^"]+)"', text)]
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_readme_has_at_most_800_words_and_one_program_of_15_lines() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 800
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (block,) = blocks
    assert len([line for line in block.splitlines() if line.strip()]) <= 15


_COMMANDS = [
    pytest.param(page, block, id=f"{_name(page)}:{block.line}")
    for page in _PAGES
    for block in blocks(page)
    if block.language == "sh" and page.parent.name == "how-to"
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "block"), _COMMANDS)
def test_shell_commands_of_how_to_pages_succeed(page: Path, block: Block, tmp_path: Path) -> None:
    """``.ci/run`` runs the commands of the README; those of CONTRIBUTING would start this test again."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{_name(page)}: {done.stderr}"
