"""Turn links to files of the repository into links to pages of the site.

``SHOWN`` lists pages whose source is a single link to a file of the repository. On the site they show the file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

__all__ = ["SHOWN", "on_the_site", "setup"]

_DOCS = Path(__file__).resolve().parent.parent
_ROOT = _DOCS.parent
SHOWN = {
    "security": "SECURITY.md",
    "promises": "tests/PROMISES.md",
    "contributing": "CONTRIBUTING.md",
    "changes": "CHANGELOG.md",
    "benchmarks": "benchmarks/README.md",
    "examples": "examples/README.md",
}
_PAGES = {_ROOT / file: _DOCS / f"{page}.md" for page, file in SHOWN.items()} | {
    _ROOT / "README.md": _DOCS / "index.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
_FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_the_site(text: str, file: Path, page: Path) -> str:
    """Return the text of a file with its links changed to work on a page of the site."""

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match.groups()
        if "://" in target:
            return match.group()
        there = Path(os.path.normpath(file.parent / target))
        if there.is_dir():
            return words  # a folder has no page
        there = _PAGES.get(there, there)
        return f"[{words}]({os.path.relpath(there, page.parent)}{anchor or ''})"

    parts = _FENCED.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def _read(_app: Sphinx, name: str, source: list[str]) -> None:
    page = file = _DOCS / f"{name}.md"
    if name in SHOWN:
        file = _ROOT / SHOWN[name]
        source[0] = file.read_text(encoding="utf-8")
    source[0] = on_the_site(source[0], file, page)


def _again(*_event: object) -> list[str]:
    """Mark these pages as outdated in each build: Sphinx does not watch the files that they show."""
    return list(SHOWN)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect this to a build."""
    app.connect("source-read", _read)
    app.connect("env-get-outdated", _again)
    return {"parallel_read_safe": True}
