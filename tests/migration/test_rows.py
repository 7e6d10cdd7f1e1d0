"""Each row of the tables in docs/migration has a test."""

from __future__ import annotations

import pytest

from tests.migration import rows


@pytest.mark.parametrize("page", rows.PAGES)
def test_each_row_of_a_page_has_a_test(page: str) -> None:
    cells = rows.first_cells(page)
    assert len(set(cells)) == len(cells), "two rows begin with the same cell"
    tested = {rows.matching_row(beginning, cells) for of, beginning in rows.marked() if of == page}
    assert not [cell for cell in cells if cell not in tested], "rows without a test"
