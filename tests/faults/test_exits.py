"""Processes exit with their own status and without output, whatever they have done and still hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import output
from tests.faults.figures import NIGHTLY

_RUNS = 1_000 if NIGHTLY else 8


@pytest.mark.limit(30 * _RUNS)
def test_processes_exit_with_their_own_status_and_without_output(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.exits", str(_RUNS), "0", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=25 * _RUNS)
    assert done.returncode == 0, done.stderr
    output.check(done.stderr)
    wrong = json.loads(done.stdout)
    assert not wrong, "\n".join(f"{each['said']}\n{each}" for each in wrong)
