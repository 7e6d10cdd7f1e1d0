"""Connects the rows of the tables in docs/migration with their tests, which are anywhere below tests/.

    @row("mesh.slice(", "from-monarch")
    def test_slices() -> None: ...

The first text is the beginning of the row's first cell, without backticks. A row may have several tests, and a test several rows.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["PAGES", "first_cells", "marked", "matching_row", "names", "row"]

F = TypeVar("F", bound=Callable[..., Any])

_TESTS = Path(__file__).resolve().parents[1]
PAGES = {path.stem: path for path in sorted((_TESTS.parent / "docs" / "migration").glob("*.md"))}
_RULE = re.compile(r"^\|(-+\|)+$")
_COLUMNS = 3  # the other library's feature, this package's feature, differences


def row(beginning: str, page: str) -> Callable[[F], F]:
    """Mark a test as the test of a row of a page."""
    assert page in PAGES
    return lambda test: test


@functools.cache
def marked() -> list[tuple[str, str]]:
    """Return the page and the beginning of the row of each mark in the source of the tests."""
    found = []
    for path in _TESTS.rglob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        if "from tests.migration.rows import" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                for mark in node.decorator_list:
                    if (
                        isinstance(mark, ast.Call)
                        and isinstance(mark.func, ast.Name)
                        and mark.func.id == "row"
                    ):
                        beginning, page = (ast.literal_eval(each) for each in mark.args)
                        found.append((page, beginning))
    return found


def names(page: str, beginning: str) -> list[str]:
    """Return the texts between backticks in the first cell of a row."""
    cells = _cells(page)
    wanted = matching_row(beginning, [_plain(cell) for cell in cells])
    return re.findall(r"`([^`]+)`", next(cell for cell in cells if _plain(cell) == wanted))


def first_cells(page: str) -> list[str]:
    """Return the first cells of all rows of a page, without backticks."""
    return [_plain(cell) for cell in _cells(page)]


def _plain(cell: str) -> str:
    return cell.replace("`", "")


def _cells(page: str) -> list[str]:
    found = []
    lines = PAGES[page].read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == _COLUMNS, f"a row of {len(cells)} columns: {line}"
        heads = number + 1 < len(lines) and _RULE.match(lines[number + 1])
        if heads:
            assert all(cells), f"a column without a name: {line}"
        elif not _RULE.match(line):
            assert all(cells[:2]), f"a row without text: {line}"
            found.append(cells[0])
    return found


def matching_row(beginning: str, cells: list[str]) -> str:
    """Return the first cell that begins with a text."""
    if beginning in cells:
        return beginning
    found = [cell for cell in cells if cell.startswith(beginning)]
    assert len(found) == 1, f"a test is for {beginning!r}, and there are {len(found)} rows that begin so"
    return found[0]
