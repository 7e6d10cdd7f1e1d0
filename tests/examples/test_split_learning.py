"""Split learning with actors learns, with the results of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.kit import run

SCRIPT = "../split_learning.py"


@pytest.mark.limit(120)
def test_split_learning_learns_with_the_results_of_one_process(tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPT, "--clients", "2", "--rounds", "5", "--steps", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    *progress, report = done.stdout.splitlines()
    assert [line[:9] for line in progress] == [f"round {turn:2d} " for turn in range(1, 6)]
    losses = [float(line.rpartition(" ")[2]) for line in progress]
    assert losses[0] > 1.8
    assert losses[-1] < 0.5
    assert report.startswith("2 clients, 100 steps in ")
    assert ", the same as in one process; accuracy " in report
    assert float(report.rpartition(" ")[2]) > 0.75
