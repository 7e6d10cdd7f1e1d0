"""A page whose rows and tests do not belong together is told so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.migration.rows import check, row

_PAGE = """# A page

| theirs | ours | why |
|---|---|---|
| `a` | `b` | |
| `a(x)` | `b(x)` | it is shorter |
"""


def _tests(*beginnings: str) -> dict[str, object]:
    return {each: row(each)(lambda: None) for each in beginnings}


def _check(text: str, folder: Path, *beginnings: str) -> None:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    check(str(page), _tests(*beginnings))


def test_a_row_is_named_by_its_first_cell_or_by_how_that_begins(tmp_path: Path) -> None:
    _check(_PAGE, tmp_path, "a", "a(")


def test_tests_in_classes_and_tests_of_two_rows_count(tmp_path: Path) -> None:
    class Two:
        @row("a")
        @row("a(x)")
        def test(self) -> None: ...

    (tmp_path / "page.md").write_text(_PAGE, encoding="utf-8")
    check(str(tmp_path / "page.md"), {"Two": Two})


@pytest.mark.parametrize(
    ("text", "beginnings"),
    [
        pytest.param(_PAGE, ["a"], id="a row without a test"),
        pytest.param(_PAGE, ["a", "a(", "c"], id="a test without a row"),
        pytest.param(_PAGE.replace("`a` |", "`a(y)` |"), ["a"], id="a test of two rows"),
        pytest.param(_PAGE.replace("`a(x)` |", "`a` |"), ["a"], id="two rows with one name"),
        pytest.param(_PAGE.replace("| it is shorter ", ""), ["a", "a("], id="two columns"),
        pytest.param(_PAGE.replace("| `b` |", "| |"), ["a", "a("], id="nothing of ours"),
        pytest.param(_PAGE.replace("| theirs |", "| |"), ["a", "a("], id="a column without a name"),
    ],
)
def test_what_does_not_belong_together_is_red(text: str, beginnings: list[str], tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        _check(text, tmp_path, *beginnings)
