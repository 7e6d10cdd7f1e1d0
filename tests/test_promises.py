"""PROMISES.md has a row for each promise, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

_HERE = Path(__file__).parent
_ROW = re.compile(r"^\| ([RS]\d+) \| (.*) \| (.*) \| (.*) \|$", re.MULTILINE)


def _rows() -> dict[str, tuple[str, ...]]:
    text = (_HERE / "PROMISES.md").read_text(encoding="utf-8")
    return {name: rest for name, *rest in _ROW.findall(text)}


def test_promises_md_has_a_row_for_each_promise() -> None:
    assert list(_rows()) == [*(f"R{n}" for n in range(1, 17)), *(f"S{n}" for n in range(1, 10))]


def test_the_tests_that_promises_md_names_exist() -> None:
    for name, (_promise, _measured, proof) in _rows().items():
        found = re.findall(r"`([\w/]+\.py)?(?:::(\w+))?`", proof)
        assert found or "SECURITY.md" in proof, f"{name} names no test"
        file = ""
        for named, function in found:
            file = named or file  # `::test` belongs to the file named before
            path = _HERE / file
            assert path.is_file(), f"{name} names {file}, which is not there"
            text = path.read_text(encoding="utf-8")
            assert not function or re.search(rf"^(?:async )?def {function}\(", text, re.MULTILINE), (
                f"{name}: {file} has no {function}"
            )
