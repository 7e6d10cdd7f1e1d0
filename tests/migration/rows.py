"""Connects the rows of a page's tables with their tests.

    @row("mesh.slice(")
    def test_slices() -> None: ...

The text is the beginning of the row's first cell, without backticks. A row may have several tests, and a test several rows, also
of other pages: ``@row("process.terminate()", "from-multiprocessing.md")``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

__all__ = ["check", "names", "row"]

F = TypeVar("F", bound=Callable[..., Any])

_PAGES = Path(__file__).resolve().parents[2] / "docs" / "migration"
_RULE = re.compile(r"^\|(-+\|)+$")
_COLUMNS = 3  # the other library's feature, this package's feature, differences

_rows: dict[Any, list[tuple[str, str]]] = {}  # by test: pages ("": its module's page) and beginnings of rows


def row(beginning: str, page: str = "") -> Callable[[F], F]:
    """Mark a test as the test of a row of its module's page, or of another page."""

    def mark(test: F) -> F:
        _rows.setdefault(test, []).append((page, beginning))
        return test

    return mark


def check(page: str, module: Mapping[str, Any], *others: ModuleType) -> None:
    """Check that each row of a page has a test, and that each marked text is the beginning of exactly one row.

    Args:
        page: the name of the file in docs/migration, or a path.
        module: the ``globals()`` of the page's module.
        others: modules with tests that are marked with this page.
    """
    first_cells = _first_cells((_PAGES / page).read_text(encoding="utf-8"))
    assert len(set(first_cells)) == len(first_cells), "two rows begin with the same cell"
    marked = [
        *_beginnings(module, ("", page)),
        *(beginning for other in others for beginning in _beginnings(vars(other), (page,))),
    ]
    tested = {_matching_row(beginning, first_cells) for beginning in marked}
    assert not [cell for cell in first_cells if cell not in tested], "rows without a test"


def names(page: str, beginning: str) -> list[str]:
    """Return the texts between backticks in the first cell of a row."""
    cells = _cells((_PAGES / page).read_text(encoding="utf-8"))
    wanted = _matching_row(beginning, [_plain(cell) for cell in cells])
    return re.findall(r"`([^`]+)`", next(cell for cell in cells if _plain(cell) == wanted))


def _first_cells(text: str) -> list[str]:
    return [_plain(cell) for cell in _cells(text)]


def _plain(cell: str) -> str:
    return cell.replace("`", "")


def _cells(text: str) -> list[str]:
    found = []
    lines = text.splitlines()
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


def _matching_row(beginning: str, first_cells: list[str]) -> str:
    if beginning in first_cells:
        return beginning
    found = [cell for cell in first_cells if cell.startswith(beginning)]
    assert len(found) == 1, f"a test is for {beginning!r}, and there are {len(found)} rows that begin so"
    return found[0]


def _beginnings(module: Mapping[str, Any], pages: Collection[str]) -> Iterator[str]:
    for value in module.values():
        for test in vars(value).values() if isinstance(value, type) else [value]:
            if isinstance(test, FunctionType):
                yield from (beginning for page, beginning in _rows.get(test, []) if page in pages)
