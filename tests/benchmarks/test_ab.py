"""The comparison of two commits: its arithmetic, and a tiny run of the working tree against itself, without timing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ab


def test_a_ratio_is_taken_within_each_round() -> None:
    series = {"old": [10.0, 20.0], "new": [5.0, 30.0]}
    assert ab.ratios(series, "new") == [0.5, 1.5]


@pytest.mark.slow
@pytest.mark.limit(120)
def test_the_working_tree_is_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ab.json"
    small = ["--starts", "1", "--rounds", "1", "--scale", "0.01"]
    assert ab.main([".", ".", "--only", "sync", "actor", *small, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "sync" in printed
    rows = json.loads(out.read_text(encoding="utf-8"))
    assert {operation for operation, _, _ in (row["series"] for row in rows)} == {"sync", "actor"}
    assert all(row["microseconds"].keys() == {"old", "old again", "new"} for row in rows)
